"""Warp-specialised attention kernels for Hopper (sm_90), written in Gluon. TMA loads their inputs.

docs/hopper.md explains Gluon, lists the function of each role, and says in which order to read the files.
"""

import atexit
import sys


def clear_gluon() -> None:
    """Clears the namespaces of Gluon's modules. After this call, the process can compile no Gluon kernel.

    After the compilation of a Gluon kernel, Triton 3.9 never releases some classes of these modules. Without this call,
    nanobind, which binds Triton's C++ code to Python, prints 25 lines about leaked objects when the process ends.
    """
    for name, module in [*sys.modules.items()]:
        if name.startswith("triton.experimental.gluon.language."):
            vars(module).clear()


atexit.register(clear_gluon)
