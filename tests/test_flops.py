"""Compares the FLOPs of a step with the FLOPs that torch counts, and tests the peak FLOP/s of known GPUs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fa_train.flops import attention_pairs, peak_flops, train_flops
from fa_train.models.attention import naive_attention
from tests.models.support.gpt import build


@pytest.mark.parametrize("overrides", [{}, {"tied": False, "activation": "gelu", "head_dim": 32}], ids=["tied", "wide"])
def test_formula_equals_torchs_count(overrides):
    # naive attention also computes the half above the diagonal, so torch counts 24**2 pairs in each of the 2 layers
    model = build(attention=naive_attention, **overrides)
    tokens = torch.randint(40, (24,))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert train_flops(model.config, 24, 2 * 24**2) == counter.get_total_flops()


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param([None, None], id="no-windows"),
        pytest.param([9, 9], id="equal-windows"),
        pytest.param([9, None, 30, 9, 1], id="mixed"),
        pytest.param([2**40], id="longer-than-all"),
    ],
)
def test_pairs_are_those_inside_the_windows(windows):
    lengths = [8, 9, 10, 1, 0, 50]
    expected = 0.0
    for window in windows:
        for length in lengths:
            visible = [min(query + 1, window or length) for query in range(length)]
            expected += sum(visible) - min(length, window or length) / 2
    assert attention_pairs(windows, torch.tensor(lengths, dtype=torch.int32)).item() == expected


def test_attention_without_windows_has_half_the_squared_lengths():
    model, lengths = build(n_layers=3), [8192, 100_000]
    squares = sum(length**2 for length in lengths)
    assert attention_pairs(model.windows, torch.tensor(lengths)).item() == 3 * squares / 2


def test_pairs_may_stay_on_the_gpu():
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
        pytest.param("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None, id="mig-has-a-part-of-the-gpu"),
        pytest.param("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, None, id="rtx-3090-ti-is-faster"),
        pytest.param("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None, id="laptop-gpu-is-slower"),
        pytest.param("NVIDIA GeForce RTX 5090 D", torch.bfloat16, None, id="rtx-5090-d-is-slower"),
        pytest.param("NVIDIA H200", torch.float32, None, id="fp32"),
        pytest.param("Some Other GPU", torch.bfloat16, None, id="unknown"),
    ],
)
def test_each_gpu_and_dtype_has_its_peak(name, dtype, peak):
    assert peak_flops(name, dtype) == peak
