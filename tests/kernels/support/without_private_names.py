"""Runs attention under a torch that lacks one of the private names that fa_kernels.torch_private uses.

    TRITON_INTERPRET=1 python -m tests.kernels.support.without_private_names    # on any machine.

The script imports torch and triton, and then forks one process for each private name. A forked process removes one
private name from torch and imports fa_kernels. After the import, the forked process restores the name, because torch
itself needs the name.
"""

import os
import sys
import traceback
from types import SimpleNamespace

import torch
import torch._dynamo  # imported here, so that forked processes do not import torch._dynamo again
import torch.utils.flop_counter
import triton.language  # noqa: F401

from tests.support.interpreter import patched_once_a_launch

NAMES = (
    "_C._len_torch_dispatch_stack",
    "_C._is_torch_function_mode_enabled",
    "_C._get_tracing_state",
    "_C._cuda_getCurrentRawStream",
    "_C._functorch.maybe_current_level",
    "_C._functorch.unwrap_if_dead",
    "_C._dynamo.guards._empty_strided_cuda",
    "autograd._profiler_enabled",
    "autograd.forward_ad._current_level",
    "utils._python_dispatch.TorchDispatchMode",
)


def check(path):
    """Imports attention without one of torch's attributes, and compares attention's results with the reference.

    path: the name of the missing attribute, such as `_C._get_tracing_state`.
    """
    owner = torch
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    value = getattr(owner, name, None)  # a torch that was built without CUDA lacks some of the names
    if value is not None:
        delattr(owner, name)
    from fa_kernels import flash_attn_func, torch_private
    from fa_kernels.flash_attention.reference import attention_reference

    if value is not None:
        setattr(owner, name, value)
    if name == "_current_level":  # torch itself reads `_current_level` at each call
        torch_private.forward_ad = SimpleNamespace()
    inputs = [torch.randn(1, 20, heads, 16, requires_grad=True) for heads in (2, 1, 1)]
    cu_seqlens = torch.tensor([0, 20])
    o = flash_attn_func(*inputs, causal=True)
    expected, _ = attention_reference(*(x[0] for x in inputs), cu_seqlens, cu_seqlens, causal=True)
    torch.testing.assert_close(o[0].double(), expected, rtol=1e-4, atol=1e-5)
    do = torch.randn_like(o)
    ours, theirs = torch.autograd.grad(o, inputs, do), torch.autograd.grad(expected, inputs, do[0].double())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def passes(path: str) -> bool:
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        check(path)
    except BaseException:
        print(f"without torch.{path}:", flush=True)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process does not have the other threads of its parent
    with patched_once_a_launch():
        failed = [path for path in NAMES if not passes(path)]
    print(f"failed: {failed}" if failed else f"{len(NAMES)} names are not needed")
    sys.exit(bool(failed))
