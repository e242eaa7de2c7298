"""The portable kernels isolate NaN between documents."""

import pytest
import torch

from fa_kernels.device import arch_of
from fa_kernels.flash_attention.delta import attention_delta
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.portable import backward, forward
from fa_kernels.flash_attention.schedule import causal_schedule
from fa_kernels.flash_attention.tiles import key_passes
from tests.support.marks import slow

LENGTHS, WITH_NAN = [20, 17, 13], slice(20, 37)  # document 1 contains NaN, and shares tiles with documents 0 and 2
TOTAL = sum(LENGTHS)
FEATURES = Features(0.2, 0.0, None, ())
AT_ONCE, APART = 24, 200  # head_dims: with 24, one kernel computes dK and dV; with 200, two kernels compute them


def run(tensors, schedule):
    q, k, v, do = tensors
    o, lse = forward.attention_forward(q, k, v, schedule, FEATURES, q.dtype)
    return o, *backward.attention_backward(do, q, k, v, lse, attention_delta(o, do, None), schedule, FEATURES)


def inputs(head_dim, device):
    generator = torch.Generator(device).manual_seed(0)
    # On a GPU, dK and dV have two separate kernels only in 2-byte dtypes. Triton's interpreter computes bf16
    # incorrectly.
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return [torch.randn(TOTAL, 1, head_dim, device=device, generator=generator).to(dtype) for _ in range(4)]


def documents(device):
    return torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("head_dim", [AT_ONCE, *slow(APART)])
@pytest.mark.parametrize("index", range(4), ids=["q", "k", "v", "do"])
@pytest.mark.parametrize("value", [torch.nan, *slow(torch.inf)], ids=str)
def test_nan_stays_in_its_document_and_shows_there(head_dim, index, value, device):
    tensors, schedule = inputs(head_dim, device), causal_schedule(documents(device), TOTAL, device)
    exact = run(tensors, schedule)
    tensors[index][25, 0, 3] = value
    outputs = run(tensors, schedule)
    for ours, clean in zip(outputs, exact, strict=True):
        for others in (slice(0, 20), slice(37, TOTAL)):
            torch.testing.assert_close(ours[others], clean[others], rtol=0.0, atol=0.0)
    if value != value:
        _, dq, dk, dv = (torch.isnan(x[WITH_NAN, 0]).any(1) for x in outputs)
        assert dq[5] and dk[:6].all()
        assert dv[:6].all() or index == 2, "dV does not depend on V"


@pytest.mark.parametrize("several", [True, False], ids=["several-documents", "one-document"])
@pytest.mark.parametrize("head_dim", [AT_ONCE, APART])
def test_one_document_skips_nan_isolation(head_dim, several, device, monkeypatch):
    isolated = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, ISOLATE_NAN, **constants):
                isolated.append(ISOLATE_NAN)
                return self.kernel[grid](*arguments, ISOLATE_NAN=ISOLATE_NAN, **constants)

            return launch

    for module, name in ((forward, "_fwd_kernel"), (backward, "_dkdv_kernel"), (backward, "_dq_kernel")):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name)))
    tensors = inputs(head_dim, device)
    run(tensors, causal_schedule(documents(device) if several else None, TOTAL, device))
    passes = key_passes(arch_of(tensors[0].device), head_dim, tensors[0].element_size())
    assert isolated == [several] * (2 + len(passes))
