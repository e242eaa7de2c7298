"""Private names of torch are in one module. Tensors with the wrapper of an ended functorch transform can be inputs."""

import re
from pathlib import Path

import torch

from fa_kernels import flash_attn_func

REPOSITORY = Path(__file__).parents[2]


def test_one_module_names_what_is_private_to_torch():
    private = re.compile(r"torch\._C|from torch(\.[\w.]*)?\._|from torch(\.[\w.]*)? import .*\b_\w")
    files = [path for package in ("kernels", "fa_train") for path in (REPOSITORY / package).rglob("*.py")]
    assert len(files) > 80
    found = [path.name for path in files if private.search(path.read_text()) and path.name != "torch_private.py"]
    assert found == []


def test_a_tensor_may_have_the_wrapper_of_an_ended_transform(device):
    q, k = torch.randn(1, 20, 2, 16, device=device), torch.randn(1, 20, 2, 16, device=device, requires_grad=True)
    left = []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(q)
    got, expected = (torch.autograd.grad(flash_attn_func(x, k, k).sum(), k)[0] for x in (left[0], q))
    assert torch.equal(got, expected)
