"""Hashes the source of each case of portable.py, and prints the hashes as JSON. Run this file as a module, with cases
as arguments.

The hash covers the code of the kernel and of the functions that it calls. It also covers the constants, the compile
options and the GPU. Comments, docstrings and the host's code do not change the hash. Triton's own hashes would include
comments and line numbers.
"""

import ast
import hashlib
import json
import sys
from functools import cache

from triton.language.core import constexpr
from triton.runtime.jit import JITCallable

from tests.kernels.aot.portable import case_source
from tests.kernels.aot.reports import code_of


@cache
def code_and_names(source):
    """Returns a function's code and the names in it. A name has the form `a` or `a.b`."""
    code = code_of(source)
    nodes = [*ast.walk(ast.parse(code))]
    names = {(node.id,) for node in nodes if isinstance(node, ast.Name)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return code, sorted(names | {(node.value.id, node.attr) for node in attributes})


def collect(function, found):
    """Adds the code of a jit function to `found`. Also adds the fa_kernels functions and constants in this code."""
    place = f"{function.__module__}.{function.__qualname__}"
    if place in found:
        return
    found[place], names = code_and_names(function.src)
    for first, *rest in names:
        value = function.__globals__.get(first)
        for attribute in rest:
            value = getattr(value, attribute, None)
        if isinstance(value, JITCallable) and value.__module__.startswith("fa_kernels"):
            collect(value, found)
        elif isinstance(value, constexpr):
            found[f"{place} {'.'.join([first, *rest])}"] = repr(value.value)


def source_hash(case):
    """Returns the hash of one case."""
    gpu, head_dim, v_head_dim, direction, itemsize = case.split("-")
    source, options, _ = case_source(gpu, int(head_dim), int(v_head_dim), direction, int(itemsize))
    found = {}
    collect(source.fn, found)
    arguments = [sorted(values.items()) for values in (options, source.signature, source.constants, source.attrs)]
    return hashlib.sha256(repr((gpu, arguments, sorted(found.items()))).encode()).hexdigest()[:16]


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps({"case": case, "source": source_hash(case)}))
