"""Hashes the PTX of every kernel, to show that a change of the source does not change the compiled code.

    python -m tests.kernels.support.ptx_digest --out before.json        # writes before.json.
    python -m tests.kernels.support.ptx_digest --compare before.json    # exit status 1 if code differs.

A case is one kernel from the ahead-of-time tests, or all kernels that a public call launches. The hash of a case
ignores comments, source lines and function names. The script needs neither a GPU nor ptxas.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.aot import decode, hopper_backward, hopper_forward, portable, schedule
from tests.kernels.aot.support import limits
from tests.kernels.support import launched_kernels

COMMENT = re.compile(r"//.*")
# Matches the definition of a function in PTX. Functions that are only declared, such as __assertfail, keep their names.
DEFINED = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)?\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", re.MULTILINE)
SYMBOL = re.compile(r'@"[^"]*"|@[\w$.]+')
MODULES = {
    "portable": portable,
    "decode": decode,
    "hopper_forward": hopper_forward,
    "hopper_backward": hopper_backward,
    "schedule": schedule,
}
CODE: dict[str, str] = {}  # {hash of source, target and options: hash of the code}
SOURCES: list[str] = []  # the hash of each source, in the order of compilation


def all_cases() -> list[str]:
    """Returns the names of all cases, for example `hopper_backward bf16-128-4-0-1`.

    The first word of a name is a key of `MODULES`, or `call` for the public calls in launched_kernels.
    """
    isolating = [(arch, head_dim, f"contain_{of}") for arch, head_dim, of in limits.PORTABLE if arch != "sm90"]
    isolating += [("sm90", *entry) for entry in [*limits.ISOLATING, *limits.REPAIRS]]
    cases = [limits.case_of(*entry) for entry in [*limits.PORTABLE, *isolating]]
    cases += [limits.case_of(*entry, itemsize=4) for entry in limits.OF_4_BYTES]
    groups = {
        "portable": [*cases, *limits.UNUSUAL, *limits.UNALIGNED],
        "decode": [*limits.DECODE, limits.UNALIGNED_DECODE],
        "hopper_forward": limits.FORWARD_SPILLS,
        "hopper_backward": limits.BACKWARD_SPILLS,
        "schedule": limits.SCHEDULE,
        "call": launched_kernels.CALLS,
    }
    return list(dict.fromkeys(f"{group} {case}" for group, cases in groups.items() for case in cases))


class Known(Exception):
    """Raised to stop a compilation whose result is known."""


def digest(case: str) -> tuple[str, dict[str, str]]:
    """Returns the hash of a case, and its kernels as a dictionary {source hash: code hash}."""
    group, _, name = case.partition(" ")
    if group == "call":
        launches = launched_kernels.compile_call(name, code_of)
        return hash_of(*(f"{grid} {code}" for grid, (_, code) in launches)), dict(kernel for _, kernel in launches)
    source, code = code_of(partial(portable.compile_to_ptx, *MODULES[group].case_source(*name.split("-"))))
    return code, {source: code}


def code_of(compile: Callable[[], CompiledKernel]) -> tuple[str, str]:
    """Returns the hashes of a kernel's source and of its code.

    A source whose hash is in `CODE` is not compiled.
    """
    with contextlib.suppress(Known):
        compiled = compile()
        # the size of shared memory is not in the PTX, so it is hashed too
        CODE[SOURCES[-1]] = hash_of(str(compiled.metadata.shared), normalised(compiled.asm["ptx"]))
    return SOURCES[-1], CODE[SOURCES[-1]]


def start(known: dict[str, str]) -> None:
    CODE.update(known)
    knobs.compilation.disable_line_info = knobs.compilation.always_compile = True
    for kind in (ASTSource, GluonASTSource):
        kind.make_ir = ending_if_known(kind.make_ir)


def ending_if_known(make_ir: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement for `make_ir`, the method of Triton's source classes that converts a kernel to Triton's IR.

    The replacement for `make_ir` also appends the hash of the kernel's source to `SOURCES`. If `CODE` already holds a
    code hash for this source, the replacement for `make_ir` raises `Known`, which stops the compilation.
    """

    def make_and_note(source: Any, target: Any, options: Any, *rest: Any) -> Any:
        module = make_ir(source, target, options, *rest)
        SOURCES.append(hash_of(str(target), str(options), with_numbered_functions(module.str_nodebug())))
        if SOURCES[-1] in CODE:
            raise Known
        return module

    return make_and_note


def hash_of(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def normalised(ptx: str) -> str:
    """Removes comments and indentation from PTX, and replaces function names by numbers in their order of
    appearance.
    """
    lines = (line.strip() for line in COMMENT.sub("", ptx).splitlines())
    text = "\n".join(line for line in lines if line)
    for number, name in enumerate(DEFINED.findall(text)):
        text = re.sub(rf"(?<![\w$]){re.escape(name)}(?=_param_\d|_retval\d|(?![\w$]))", f"function_{number}", text)
    return text


def with_numbered_functions(ir: str) -> str:
    """Replaces function names in a kernel's IR (intermediate representation) by numbers, in order of appearance."""
    names: dict[str, str] = {}
    return SYMBOL.sub(lambda match: names.setdefault(match[0], f"@{len(names)}"), ir)


def record_of(cases: Sequence[str], known: dict[str, str]) -> dict[str, Any]:
    """Returns a record: the Triton version, {case: hash of the case's code} and {source hash: code hash}.

    known: a dictionary from source hash to code hash, from an earlier record. Sources in `known` are not compiled
    again, because equal sources and options give equal code.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        # new processes must import the kernels with the environment variables that are set above
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), context, start, (known,)) as pool:
            results = dict(zip(cases, pool.map(digest, cases), strict=True))
    sources = {source: code for _, codes in results.values() for source, code in codes.items()}
    return {
        "triton": triton.__version__,
        "cases": {case: code for case, (code, _) in results.items()},
        "sources": sources,
    }


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [
        f"{'vanished' if case not in after else 'appeared' if case not in before else 'differs'}: {case}"
        for case in {**before, **after}
        if before.get(case) != after.get(case)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the hashes to this file")
    parser.add_argument("--compare", type=Path, help="exit with 1 if the hashes differ from this file's")
    parser.add_argument("--only", default="", metavar="TEXT", help="hash only the cases whose names contain TEXT")
    arguments = parser.parse_args()
    before = json.loads(arguments.compare.read_text()) if arguments.compare else None
    if before and before["triton"] != triton.__version__:
        sys.exit(f"{arguments.compare} must be of Triton {triton.__version__}; got {before['triton']}")
    record = record_of([case for case in all_cases() if arguments.only in case], before["sources"] if before else {})
    print(f"{len(record['cases'])} cases, Triton {triton.__version__}")
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    if before:
        expected = {case: code for case, code in before["cases"].items() if arguments.only in case}
        found = differences(expected, record["cases"])
        print("\n".join(found) or "all as before")
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
