"""Compares the dequantization of NF4 weights with torchao's."""

import pytest
import torch

from fa_kernels.nf4 import BLOCK, dequantize

pytest.importorskip("torchao")


@pytest.mark.parametrize(
    ("rows", "scales_per_factor"),
    [
        pytest.param(1, 1, id="less-than-a-program"),
        pytest.param(4 * BLOCK // 64, 1, id="two-programs"),
        pytest.param(3, 256, id="programs-and-a-part"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_elements_equal_those_of_torchao(rows, scales_per_factor, dtype, device):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds bf16 wrongly")
    from torchao.quantization import to_nf4

    columns = 64 * scales_per_factor
    weight = to_nf4((0.02 * torch.randn(rows, columns, device=device)).to(dtype), 64, scales_per_factor)
    parts = weight.quantized_data, weight.quantized_scalers, weight.quantization_factor, weight.scaler_mean, weight.nf4
    expected = weight.get_original_weight()
    assert expected.any()
    for wanted in (dtype, torch.float32, torch.float16):
        assert torch.equal(dequantize(*parts, wanted).view(rows, columns), expected.to(wanted))


@pytest.mark.parametrize("sizes", [(64, 3, 1), (64, 2, 3), (64, 0, 1), (64, 2, 0)])
def test_sizes_that_do_not_fit_together_are_refused(sizes, device):
    codes, scalers, factors = (torch.zeros(n, dtype=torch.uint8, device=device) for n in sizes)
    table = torch.zeros(16, device=device)
    with pytest.raises(ValueError, match=rf"got \({sizes[0]},\), \({sizes[1]},\), \({sizes[2]},\) and \(16,\)"):
        dequantize(codes, scalers, factors, table[0], table, torch.float32)
