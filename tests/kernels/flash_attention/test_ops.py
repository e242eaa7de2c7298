"""A call runs the registered operator while torch.compile, a profiler or a similar tool watches operators. Otherwise, a
call takes the direct path (see ops.py).
"""

from contextlib import nullcontext

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from fa_kernels import flash_attn_func
from fa_kernels.flash_attention import backend, checks, ops
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.schedule import causal_schedule


def test_a_mode_or_a_profiler_sees_the_operator(device, monkeypatch):
    q, k, v = torch.randn(3, 1, 20, 2, 16, device=device)
    operators = []
    for name in ("forward_operator", "backward_operator"):
        operator = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *x, f=operator, name=name: operators.append(name) or f(*x))
    flash_attn_func(q, k, v)
    assert operators == []
    with FlopCounterMode(display=False) as flops:
        flash_attn_func(q, k, v)
    assert operators == ["forward_operator"] and flops.get_total_flops() == 4 * 20 * 20 * 2 * 16
    with torch.profiler.profile() as profile:
        flash_attn_func(q.clone().requires_grad_(), k, v).sum().backward()
    assert operators == ["forward_operator", "forward_operator", "backward_operator"]
    names = {event.name for event in profile.events()}
    assert {"flash_attention::forward", "flash_attention::backward"} <= names


def test_a_tensor_subclass_sees_the_operator(device, monkeypatch):
    """A Parameter counts as a plain tensor."""

    class Seeing(torch.Tensor):
        pass

    operators = []
    forward = ops.forward_operator
    monkeypatch.setattr(ops, "forward_operator", lambda *x: operators.append(1) or forward(*x))
    q, k, v = torch.randn(3, 1, 20, 2, 16, device=device)
    flash_attn_func(q, k, v, sinks=torch.nn.Parameter(torch.zeros(2, device=device), requires_grad=False))
    assert not operators
    flash_attn_func(q, k.as_subclass(Seeing), v)
    assert operators


def test_a_tensor_left_by_a_transform_is_unwrapped(device):
    """torch.func.grad calls a function with wrappers of the input tensors.

    After torch.func.grad has returned, the wrappers have no data. Attention must then read the tensors inside the
    wrappers, as Function.apply does.
    """
    schedule = causal_schedule(None, 20, device)
    q, k = torch.randn(20, 2, 16, device=device), torch.randn(20, 2, 16, device=device, requires_grad=True)
    left = []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(q)
    got, expected = (torch.autograd.grad(flash_attn_packed(x, k, k, schedule).sum(), k)[0] for x in (left[0], q))
    assert torch.equal(got, expected)


def test_functorch_transforms_are_refused(device):
    q, k, v = torch.randn(3, 20, 2, 16, device=device)
    schedule = causal_schedule(None, 20, device)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: flash_attn_packed(x, k, v, schedule).sum())(q)


def test_forward_mode_gradients_are_refused(device):
    """Forward-mode AD must raise an error, because the operator and the direct path would silently drop the tangent."""
    q, k, v = torch.randn(3, 20, 2, 16, device=device)
    schedule = causal_schedule(None, 20, device)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: flash_attn_packed(x, k, v, schedule), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        flash_attn_packed(q, k, forward_ad.make_dual(v, v), schedule)


def test_tensors_without_data_have_shapes(monkeypatch):
    monkeypatch.setattr(checks, "require_backend", lambda *_: None)
    q = torch.empty(1, 20, 2, 16, device="meta")
    assert flash_attn_func(q, q, q).shape == q.shape


@pytest.mark.parametrize("device_type", ["meta", "cpu"])
def test_inconsistent_inputs_are_named_with_and_without_data(device_type, monkeypatch):
    monkeypatch.setattr(checks, "require_backend", lambda *_: None)
    q, k = torch.zeros(20, 4, 16, device=device_type), torch.zeros(20, 3, 16, device=device_type)
    with pytest.raises(ValueError, match="n_heads must be a positive multiple of n_kv_heads; got 4 and 3"):
        flash_attn_packed(q, k, k, causal_schedule(None, 20, q.device))
    with pytest.raises(ValueError, match="n_heads must be a positive multiple of n_kv_heads; got 0 and 3"):
        flash_attn_packed(q[:, :0], k, k, causal_schedule(None, 20, q.device))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_is_copied_only_where_no_view_packs_it(batch):
    """If a call copies a tensor while the call is recorded, the launches of the call are never replayed."""
    parts = torch.zeros(batch, 20, 3, 2, 16).unbind(2)
    heads_first = torch.zeros(batch, 2, 20, 16).transpose(1, 2)
    columns_last = torch.zeros(batch, 20, 16, 2).transpose(2, 3)
    for x, copied in ((parts[1], False), (heads_first, batch > 1), (columns_last, True)):
        y = ops.evenly_strided(x)
        assert (y is not x) == copied and torch.equal(x, y)
        assert backend.packed(y).data_ptr() == y.data_ptr() and y.stride(-1) == 1


@pytest.mark.slow
def test_compiled_autograd_takes_the_operator(device):
    q, k, v = (torch.randn(1, 20, 2, 16, device=device, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(flash_attn_func(q, k, v).sum(), q)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        flash_attn_func(q, k, v).sum().backward()
    assert torch.equal(q.grad, expected[0])


@pytest.mark.parametrize("tokens", [8, 7 + 128])
@pytest.mark.parametrize("observed", [False, True])
def test_a_schedule_of_another_batch_is_refused(tokens, observed, device):
    schedule = causal_schedule(None, 7, device)
    q, k = torch.randn(tokens, 2, 16, device=device), torch.randn(7, 2, 16, device=device)
    with FlopCounterMode(display=False) if observed else nullcontext():
        for queries, keys in ((q, q), (q, k), (k, q)):
            sizes = rf"{len(queries)} queries and {len(keys)} keys, .* for 7 queries and 7 keys"
            for _ in range(2):
                with pytest.raises(ValueError, match=sizes):
                    flash_attn_packed(queries, keys, keys, schedule)
        flash_attn_packed(k, k, k, schedule)


def test_calls_with_schedules_of_other_lengths_have_other_keys(device):
    """A replayed call does not check its schedule, so a recording must not be reused for schedules of other lengths."""
    x, features = torch.randn(20, 2, 16, device=device), Features(1.0, 0.0, None, [])
    full = causal_schedule(None, 20, device)
    others = full._replace(key_start=full.key_start[:19]), full._replace(query_start=full.query_start[:0])
    keys = {backend._describe_forward(x, x, x, schedule, features, x.dtype)[0] for schedule in (full, *others)}
    assert len(keys) == 3


def test_a_schedule_without_gradients_is_refused_in_a_backward_pass(device):
    full, q = causal_schedule(None, 7, device), torch.randn(7, 2, 16, device=device, requires_grad=True)
    empty = full.query_start[:0]
    o = flash_attn_packed(q, q, q, full._replace(query_start=empty, query_end=empty, key_tiles=empty))
    assert torch.equal(o, flash_attn_packed(q, q, q, full))
    with pytest.raises(ValueError, match=r"built with gradients=True for a backward pass"):
        o.sum().backward()
