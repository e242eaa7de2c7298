"""Compares both passes of attention with dense attention, which is computed by its definition."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa_kernels.flash_attention.reference import attention_reference
from tests.support.tolerance import assert_as_accurate

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
Results = dict[str, Tensor]
MASKS = [
    {"causal": False}, {"causal": True}, {"causal": True, "window_size": (64, 0)},
    {"causal": False, "window_size": (37, 90)}, {"causal": False, "window_size": (-1, 5)},
]  # fmt: skip


def cumulative(lengths: Sequence[int]) -> Tensor:
    """Returns cu_seqlens of documents with the given lengths, (n_docs + 1,) int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


def attend(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    features: Mapping[str, Any],
    sinks: Tensor | None,
    do: Tensor,
    dlse: Tensor,
) -> Results:
    """Calls `function`, and returns its outputs and the gradients of its inputs.

    If a row sees no key, its lse of -inf is replaced by -10000 and gets no gradient.
    """
    inputs = [x.detach().requires_grad_() for x in inputs]
    features = dict(features)
    if sinks is not None:
        sinks = sinks.detach().requires_grad_()
        inputs.append(sinks)
        features["sinks"] = sinks
    o, lse = function(*inputs[:3], **features)
    seen = torch.isfinite(lse)
    gradients = torch.autograd.grad((o, lse), inputs, (do.to(o.dtype), torch.where(seen, dlse, 0.0).to(lse.dtype)))
    names = ("o", "lse", "dq", "dk", "dv", "dsinks")
    return dict(zip(names, (o, torch.where(seen, lse, -1e4), *gradients), strict=False))


def _moved(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in values.items()}


def left_by_rounding(
    inputs: Sequence[Tensor],
    features: Mapping[str, Any],
    sinks: Tensor | None,
    do: Tensor,
    dlse: Tensor,
    exact: Results,
    o_dtype: torch.dtype,
    truth: torch.dtype,
) -> Results:
    """Returns the errors of dq, dk and dv after an exact backward pass that reads a rounded o and a rounded lse.

    Our backward pass computes P from lse, so an error of lse scales a row of P and dS. Our backward pass also computes
    delta from o, so an error of o changes delta. The errors of o and lse have the same effect on dq, dk and dv as two
    extra terms, one in the gradient of o and one in the gradient of lse. `left_by_rounding` passes only the two extra
    terms to autograd, as the gradients of o and lse. Autograd then returns the errors of dq, dk and dv. Torch's own
    backward pass keeps P, and does not use lse. Our error can therefore exceed twice torch's error in rows that see few
    keys or have an lse far from 0.
    """
    o, lse = exact["o"].detach(), exact["lse"].detach()
    factor = torch.expm1(lse - lse.float().to(truth))
    delta = ((o.to(o_dtype).to(truth) - o) * do.to(truth)).sum(-1).T
    reference = partial(attention_reference, dtype=truth)
    d_lse = dlse.to(truth) * factor - delta
    left = attend(reference, inputs, features, sinks, do.to(truth) * factor.T[..., None], d_lse)
    return {name: left[name] for name in ("dq", "dk", "dv")}


def compare(
    ours: Callable[..., Any],
    inputs: Sequence[Tensor],
    features: Mapping[str, Any],
    sinks: Tensor | None,
    do: Tensor,
    dlse: Tensor,
    reference_device: str = DEVICE,
) -> dict[str, tuple[float, float]]:
    """For each output and gradient, returns the largest error of `ours` and the largest error of torch in the same
    dtype.

    Shapes: q, k and v in `inputs` are as in flash_attn_varlen_func; `do` has the shape of `o`; dlse is (n_heads,
    total_q). The exact values come from dense attention in fp32, or in fp64 if the inputs are fp32. Raises:
    AssertionError if `ours` has a larger error than rounding can cause.
    """
    dtype = inputs[0].dtype
    truth = torch.float64 if dtype == torch.float32 else torch.float32
    results = attend(ours, inputs, features, sinks, do, dlse)
    if reference_device != DEVICE:
        results, features = (_moved(x, reference_device) for x in (results, features))
        inputs = [x.to(reference_device) for x in inputs]
        do, dlse = do.to(reference_device), dlse.to(reference_device)
        sinks = sinks if sinks is None else sinks.to(reference_device)
    exact_inputs = [x.to(truth) for x in inputs]  # a gradient has the dtype of its input
    exact = attend(partial(attention_reference, dtype=truth), exact_inputs, features, sinks, do, dlse)
    baseline = attend(partial(attention_reference, dtype=dtype), inputs, features, sinks, do, dlse)
    # A score is a sum of head_dim products. `floor` is the fp32 rounding error of a score whose largest products
    # cancel.
    floor = torch.finfo(torch.float32).eps * do.shape[-1] * max(x.abs().max().item() for x in (*inputs, do))
    floors = dict.fromkeys(results, floor)
    rounded = left_by_rounding(exact_inputs, features, sinks, do, dlse, exact, results["o"].dtype, truth)
    for name, left in rounded.items():
        floors[name] += left.abs().max().item()
    if sinks is not None:
        # dsinks sums p * (dlse - do · o) over all rows, where p is the sink's probability. With few sinks, torch's
        # error can be small by chance, so the floor also includes the standard deviation of the error from rounding o.
        products = exact["o"] * do * torch.exp(sinks - exact["lse"].T.float())[..., None]
        floors["dsinks"] += torch.finfo(dtype).eps * products.detach().double().square().sum().sqrt().item()
    errors = {}
    for name, result in results.items():
        assert_as_accurate(name, result, exact[name], baseline[name], floor=floors[name])
        largest = [(x[name].double() - exact[name].double()).abs().max().item() for x in (results, baseline)]
        errors[name] = (largest[0], largest[1])
    return errors
