"""The error allowed in a low-precision result. It is computed, not chosen."""

from torch import Tensor


def assert_as_accurate(
    name: str, ours: Tensor, exact: Tensor, baseline: Tensor, factor: float = 2.0, floor: float = 0.0
) -> None:
    """Requires that the error of `ours` is at most `factor` times that of `baseline`, plus one rounding.

    Args:
        name: what is compared, for the error message.
        ours: the result under test.
        exact: the true result in fp32 or fp64, same shape.
        baseline: torch's own result in the dtype of `ours`, same shape.
        factor: multiple of the baseline's largest error that is allowed.
        floor: error that is always allowed, for a baseline that is exact by chance (such as a softmax over one key).
    """
    assert ours.shape == exact.shape == baseline.shape, f"{name}: {ours.shape}, {exact.shape}, {baseline.shape}"
    if exact.numel() == 0:
        return
    ours, exact, baseline, dtype = ours.detach(), exact.detach(), baseline.detach(), ours.dtype
    rounding = (exact - exact.to(dtype).to(exact.dtype)).abs().max()
    allowed = floor + factor * ((baseline.to(exact.dtype) - exact).abs().max() + rounding)
    error = (ours.to(exact.dtype) - exact).abs().max()
    assert error <= allowed, f"{name}: max error {error:.2e}, allowed {allowed:.2e}"
