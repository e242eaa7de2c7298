"""If torch lacks the private names that attention uses, attention is slower but still right."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fa_kernels import flash_attn_func, torch_private
from fa_kernels.flash_attention import ops

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_attention_is_right_without_any_of_the_names():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.support.without_private_names"],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_module_names_what_is_private_to_torch():
    private = re.compile(r"torch\._C|from torch(\.[\w.]*)?\._|from torch(\.[\w.]*)? import .*\b_\w")
    files = [path for package in ("kernels", "fa_train") for path in (REPOSITORY / package).rglob("*.py")]
    assert len(files) > 80
    found = [path.name for path in files if private.search(path.read_text()) and path.name != "torch_private.py"]
    assert found == []


def test_a_torch_that_cannot_say_who_watches_is_taken_to_be_watched(device, monkeypatch):
    q, k, v = (torch.randn(1, 20, 2, 16, device=device, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q)
    operators = []
    forward = ops.forward_operator
    monkeypatch.setattr(ops, "forward_operator", lambda *x: operators.append(1) or forward(*x))
    monkeypatch.setattr(torch_private, "_KNOWS_WATCHERS", False)
    with FlopCounterMode(display=False) as flops:
        got = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q)
    assert torch.equal(*got, *expected) and operators == [1] and flops.get_total_flops() > 0


@pytest.mark.parametrize("missing", ["apply", "_unwrap_if_dead"])
def test_a_function_is_applied_with_its_layer_for_transforms(missing, device, monkeypatch):
    """If torch lacks a private name that attention needs to skip functorch's layer, attention calls `Function.apply`.

    A functorch transform that has ended can leave a wrapper around a tensor. `Function.apply` removes the wrapper.
    """
    if missing == "apply":
        # the bases of _FunctionBase have no method `apply`
        monkeypatch.setattr(torch_private, "Function", torch._C._FunctionBase)
    else:
        monkeypatch.setattr(torch_private, missing, None)
    apply = torch_private.apply_without_transforms(ops._Attention)
    has_layer = isinstance(vars(torch.autograd.Function)["apply"], classmethod)  # not from torch 2.14 on
    assert apply == ops._Attention.apply and (apply != ops._apply_without_functorch) == has_layer
    monkeypatch.setattr(ops, "_apply_without_functorch", apply)
    q, k = torch.randn(1, 20, 2, 16, device=device), torch.randn(1, 20, 2, 16, device=device, requires_grad=True)
    left = []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(q)
    got, expected = (torch.autograd.grad(flash_attn_func(x, k, k).sum(), k)[0] for x in (left[0], q))
    assert torch.equal(got, expected)


def test_the_current_stream_is_the_public_one(monkeypatch):
    monkeypatch.setattr(torch_private, "_raw_stream", None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7 + device))
    assert torch_private.current_stream_address(1) == 8


@pytest.mark.slow
def test_a_missing_dispatch_mode_is_named():
    code = """
import torch.utils._python_dispatch as dispatch, torch.utils.flop_counter
del dispatch.TorchDispatchMode
from fa_kernels.torch_private import TorchDispatchMode
with TorchDispatchMode():
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "TorchDispatchMode is missing from torch 2" in done.stderr, done.stderr
