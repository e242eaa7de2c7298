"""Finds machine code in which ptxas 12.8 computes a matrix descriptor from the wrong uniform register.

The descriptor of a Hopper wgmma operand has 64 bits in two halves. The high half of a descriptor is a constant that
gives the swizzle and the stride. The low half of a descriptor is an address in shared memory. To make a descriptor, PTX
code adds the constant high half to a 64-bit address whose high half is zero. ptxas 12.8 sometimes adds the high half of
a descriptor to a register that has been overwritten with an address or with another operand's descriptor. A kernel with
this error reads the wrong shared memory or ends with an illegal access.

The error occurred on an H100 in attention kernels that split the head columns into two blocks and load rows through
registers. ptxas 12.9 compiles the PTX of the affected kernels correctly.
"""

import re
import subprocess
from pathlib import Path

from triton import knobs

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ )?(.*?)\s*;")
WRITES_UNIFORM = re.compile(r"(?:U\S+|R2UR\S*|S2UR) +UR(\d+),")
ADDS_CONSTANT = re.compile(r"UIADD3\.X UR\d+, (UR\d+), (-?0x[0-9a-f]+), URZ")
STRIDES = [2**i for i in range(4, 10)]  # strides in a descriptor, in units of 16 bytes
HIGH_HALVES = {swizzle << 30 | stride for swizzle in (1, 2, 3) for stride in STRIDES}


def misplaced_descriptors(cubin: Path) -> list[str]:
    """Finds misplaced descriptors in the machine code of an sm_90 kernel.

    Returns the instructions that add the high half of a descriptor to a register whose value is not zero.
    """
    command = [knobs.nvidia.nvdisasm.path, str(cubin)]
    return misplaced_in(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def misplaced_in(sass: str) -> list[str]:
    """Finds misplaced descriptors in the output of nvdisasm.

    The function assumes that instructions run in the order of the text.
    """
    writers: dict[str, str] = {}
    found = []
    for line in sass.splitlines():
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        instruction = match[1]
        added = ADDS_CONSTANT.match(instruction)
        if added and int(added[2], 16) & 0xFFFFFFFF in HIGH_HALVES:
            writer = writers.get(added[1], "")
            if not re.match(r"UMOV UR\d+, URZ", writer):
                found.append(f"{instruction} after {writer or 'nothing'}")
        written = WRITES_UNIFORM.match(instruction)
        if written:
            n_registers = 2 if ".64" in instruction.split()[0] else 1
            for register in range(int(written[1]), int(written[1]) + n_registers):
                writers[f"UR{register}"] = instruction
    return found
