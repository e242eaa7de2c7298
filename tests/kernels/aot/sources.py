"""Hashes the source of each compiled case, and prints the hashes as JSON.

A command-line argument names a module of this folder and one of its cases, for example `portable:sm90-128-128-fwd-2`.
The hash of a case covers the code of the kernel, and of all functions and classes of fa_kernels that the kernel uses.
The hash also covers the constants that the code uses, the kernel's arguments, the compile options and the GPU.
Comments, docstrings, and code that the kernel does not use do not change the hash. Triton's own hashes would include
comments and line numbers.
"""

import ast
import hashlib
import json
import re
import sys
from functools import cache
from importlib import import_module
from types import FunctionType

from triton.language.core import constexpr
from triton.runtime.jit import JITCallable

from tests.kernels.aot.reports import code_of


@cache
def code_and_names(source):
    """Returns the code without comments and docstrings, and a list of the names that the code uses.

    Each name in the list has the form `a` or `a.b`.
    """
    code = code_of(source)
    nodes = [*ast.walk(ast.parse(code))]
    names = {(node.id,) for node in nodes if isinstance(node, ast.Name)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return code, sorted(names | {(node.value.id, node.attr) for node in attributes})


@cache
def definitions(module):
    """Returns the source of each function and class of a module, by name."""
    with open(module.__file__, encoding="utf-8") as file:
        text = file.read()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def is_ours(value):
    return (getattr(value, "__module__", None) or "").startswith("fa_kernels")


def collect(value, found):
    """Adds the code of `value`, a function or class of fa_kernels, to `found`.

    Also adds everything that the code of `value` uses: the code of functions and classes, and the values of constants.
    """
    place = f"{value.__module__}.{value.__qualname__}"
    if place in found:
        return
    module = sys.modules[value.__module__]
    # Python returns wrong source code for a Triton aggregate, so the source of a class is found by its name.
    source = value.src if isinstance(value, JITCallable) else definitions(module)[value.__qualname__]
    found[place], names = code_and_names(source)
    for first, *rest in names:
        used = vars(module).get(first)
        for attribute in rest:
            used = getattr(used, attribute, None)
        add(f"{place} {'.'.join([first, *rest])}", used, found)


def add(place, used, found):
    """Adds the code of a function or class of fa_kernels, or the value of a constant, to the dictionary `found`.

    used: the function, class or constant. place: a string with two names: the code that uses `used`, and `used` itself.
    """
    if isinstance(used, JITCallable | FunctionType | type):
        if is_ours(used):
            collect(used, found)
    elif isinstance(used, constexpr):
        found[place] = repr(used.value)
    elif isinstance(used, int | float | str | tuple | list | dict) or is_ours(type(used)):
        found[place] = repr(used)


def parts_of(name):
    """Returns everything that determines the compiled code of a case such as `portable:sm90-128-128-fwd-2`.

    The result has three parts: the GPU, a tuple (compile options, kernel arguments) and a dictionary. The dictionary
    holds the code of each function and class that the case uses, and the value of each constant.
    """
    module, _, case = name.partition(":")
    source, capability, options = import_module(f"tests.kernels.aot.{module}").case_source(*case.split("-"))
    found = {}
    collect(source.fn, found)
    for value in source.constants.values():
        if is_ours(type(value)):
            collect(type(value), found)
    return f"sm{capability}", (options, source.signature, source.constants, source.attrs), found


def source_hash(name):
    """Returns the hash of one case."""
    gpu, values, found = parts_of(name)
    text = repr((gpu, [sorted(some.items()) for some in values], sorted(found.items())))
    assert not re.search(r" at 0x[0-9a-f]+", text), f"an address would change the hash of {name} in each process"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"case": name, "source": source_hash(name)}))
