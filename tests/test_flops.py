"""Compares the FLOPs of a step with those that torch counts, and tests the peak FLOP/s of known GPUs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fa_train.flops import peak_flops, train_flops
from fa_train.models.attention import naive_attention
from tests.models.support.gpt import build


@pytest.mark.parametrize("overrides", [{}, {"tied": False, "activation": "gelu", "head_dim": 32}], ids=["tied", "wide"])
def test_formula_equals_torchs_count(overrides):
    # naive attention also computes the half above the diagonal, so torch counts twice the formula's FLOPs for attention
    model = build(attention=naive_attention, **overrides)
    tokens = torch.randint(40, (24,))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert train_flops(model.config, 24, 2 * 24**2) == counter.get_total_flops()


def test_lengths_may_stay_on_the_gpu():
    model = build()
    flops = train_flops(model.config, 24, torch.tensor(300.0, dtype=torch.float64))
    assert isinstance(flops, torch.Tensor) and flops.item() == train_flops(model.config, 24, 300.0)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        pytest.param("NVIDIA H200", torch.bfloat16, 989e12, id="h200"),
        pytest.param("NVIDIA H100 80GB HBM3", torch.float16, 989e12, id="h100"),
        pytest.param("NVIDIA H100 PCIe", torch.bfloat16, 756e12, id="h100-pcie"),
        pytest.param("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12, id="a100"),
        pytest.param("NVIDIA L40S", torch.bfloat16, 362e12, id="l40s-is-no-l4"),
        pytest.param("NVIDIA L40", torch.bfloat16, 181e12, id="l40-is-no-l4"),
        pytest.param("NVIDIA RTX A4000", torch.bfloat16, None, id="a4000-is-no-a40"),
        pytest.param("NVIDIA GB200", torch.bfloat16, None, id="gb200-is-no-b200"),
        pytest.param("NVIDIA H200 NVL", torch.bfloat16, 835e12, id="h200-nvl"),
        pytest.param("NVIDIA L4", torch.bfloat16, 121e12, id="l4"),
        pytest.param("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12, id="rtx-4090"),
        pytest.param("NVIDIA H200", torch.float32, None, id="fp32"),
        pytest.param("Some Other GPU", torch.bfloat16, None, id="unknown"),
    ],
)
def test_each_gpu_and_dtype_has_its_peak(name, dtype, peak):
    assert peak_flops(name, dtype) == peak
