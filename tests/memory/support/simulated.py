"""Simulates a training step on fake tensors, and counts the bytes of live tensors after each operator.

Fake tensors do not show allocations inside an operator, so the simulation replaces the operators of the chunked loss
and the chunked FFN by their Python code. As on CUDA, RMSNorm is one operator in the forward and one in the backward.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fa_kernels.flash_attention import checks
from fa_kernels.flash_attention.schedule import causal_schedule
from fa_train.memory import host_memory
from fa_train.memory import loss as loss_module
from fa_train.memory import offload as offload_module
from fa_train.memory import tiled_ffn as tiled_mlp_module
from fa_train.memory.loss import linear_cross_entropy
from fa_train.memory.planner.plan import Buckets
from fa_train.memory.tiled_ffn import mlp_backward, mlp_forward
from fa_train.models.gpt import GPT
from fa_train.models.norms import zeros_to_add
from fa_train.models.rope import rotary_table


@torch.library.custom_op("simulated::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns y, and the reciprocal of the root mean square in fp32."""
    rstd = x.float().square().mean(-1, keepdim=True).add(eps).rsqrt()
    return (x.float() * rstd * weight.float()).to(x.dtype), rstd


@rms_norm.register_fake
def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@torch.library.custom_op("simulated::rms_norm_backward", mutates_args=())
def rms_norm_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dy, x = dy.float(), x.float()
    normed, d_normed = x * rstd, dy * weight
    dx = rstd * (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * normed).flatten(0, -2).sum(0)


@rms_norm_backward.register_fake
def _rms_norm_backward_fake(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


class FusedRMSNorm(torch.autograd.Function):
    """An RMSNorm that saves what CUDA's RMSNorm saves: the input, one value per row, and the weight."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = torch.ops.simulated.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        return *torch.ops.simulated.rms_norm_backward(dy, *ctx.saved_tensors), None


def _attention_backward(do, dlse, q, k, v, o, lse, *rest):
    """Allocates the tensors that attention's backward kernels allocate.

    The kernels are the portable kernels if q is fp32, and the Hopper kernels for other dtypes. With head_dim 256, a
    separate Hopper kernel computes dQ. It needs no fp32 sum.
    """
    delta, hopper = torch.empty_like(lse), q.dtype != torch.float32
    rows = lse.new_empty(2 * hopper, *lse.shape)
    dq_sum = torch.empty(q.shape if hopper and q.shape[-1] < 256 else 0, dtype=torch.float32)
    dk, dv = torch.empty(k.shape, dtype=k.dtype), torch.empty(v.shape, dtype=v.dtype)
    dq = torch.empty(q.shape, dtype=q.dtype)
    del delta, rows, dq_sum
    return dq, dk, dv, lse.new_empty(0)


def _nf4_matmul(x, *arguments):
    """Allocates the dequantized weight and the result, as on a GPU."""
    *_, out_features, in_features, transposed = arguments
    weight = torch.empty(out_features, in_features, dtype=x.dtype)
    return F.linear(x, weight) if transposed else x @ weight


HOST = "meta"  # in the simulation, the device "cpu" stands for the GPU, and the device "meta" for the host

INSIDE: dict[Any, Callable[..., Any]] = {
    torch.ops.fa_train.linear_cross_entropy.default: linear_cross_entropy._init_fn,
    torch.ops.fa_train.mlp_forward.default: mlp_forward._init_fn,
    torch.ops.fa_train.mlp_backward.default: mlp_backward._init_fn,
    torch.ops.flash_attention.backward.default: _attention_backward,
    torch.ops.fa_train.nf4_matmul.default: _nf4_matmul,
}


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors that operators have created: the current number and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.where = ""
        self.timeline: list[tuple[int, str]] = []
        self._seen: set[int] = set()

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen and tensor.device.type != HOST:
            self._seen.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in INSIDE:
            with self:
                result = INSIDE[func](*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for tensor in tensors:
            self.count(tensor)
        self.timeline.append((self.now, f"{func} {[tuple(x.shape) for x in tensors]}"))
        if self.now > self.most:
            self.most, self.where = self.timeline[-1]
        return result

    def _forget(self, storage: int, nbytes: int) -> None:
        self._seen.discard(storage)
        self.now -= nbytes


@dataclass
class Step:
    """The memory of a training step, in bytes.

    DDP's buckets are included. Weights, optimizer states, and the gradients of earlier micro-batches are left out.
    """

    kept: int  # the bytes that the forward pass keeps for the backward pass
    forward: int  # the peak in the forward pass
    forward_where: str
    backward: int  # the peak in the backward pass
    backward_where: str
    timeline: list[tuple[int, str]]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Patches functions so that a step allocates the same memory on the CPU as on a GPU."""

    def cross_entropy(logits: Tensor, labels: Tensor, *terms: float) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(labels, dtype=torch.float32), logits

    def add_product(accumulated: Tensor, a: Tensor, b: Tensor) -> None:
        if a.dtype == torch.float32:
            accumulated += a @ b

    def nf4_weight(parts: Sequence[Tensor], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype)

    def take(pool: host_memory.HostPool, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=HOST)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "add_product", add_product)
        patch.setattr(tiled_mlp_module, "add_product", add_product)
        patch.setattr(tiled_mlp_module, "nf4_weight", nf4_weight)
        patch.setattr(host_memory.HostPool, "take", take)
        patch.setattr(
            offload_module,
            "_is_same_tensor",
            lambda saved, x: saved.untyped_storage()._cdata == x.untyped_storage()._cdata,
        )
        patch.setattr(host_memory, "available_host_bytes", lambda: 2**60)
        patch.setattr(checks, "require_backend", lambda *_: None)  # nothing is computed
        patch.setattr(F, "rms_norm", lambda x, shape, weight, eps: FusedRMSNorm.apply(x, weight, eps))
        patch.setattr(loss_module, "_torch_cross_entropy", cross_entropy)
        yield


@contextmanager
def in_buckets(model: GPT, buckets: Buckets, communicates: bool) -> Iterator[nn.Module]:
    """Yields the model, wrapped in DDP unless buckets="none".

    The first step under DDP does not depend on the values of tensors, and therefore also runs on fake tensors.
    communicates: whether DDP moves gradients to its buckets in the backward pass.
    """

    def reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced: torch.futures.Future[Tensor] = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced

    if buckets == "none":
        yield model
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = DistributedDataParallel(model, gradient_as_bucket_view=buckets == "views", init_sync=False)
        module.register_comm_hook(None, reduce)
        with nullcontext() if communicates else module.no_sync():
            yield module
    finally:
        dist.destroy_process_group()


def autocast_of_lightning(precision: str) -> AbstractContextManager[object]:
    """Returns the context of a training step, in which autocast does not cache weights, as in Lightning."""
    if precision == "bf16-mixed":
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    return nullcontext()


def simulate(
    build: Callable[[], GPT], tokens: int, precision: str, accumulates: bool, buckets: Buckets = "none"
) -> Step:
    """Runs a micro-batch of one document, and returns the memory that the micro-batch needs.

    accumulates: whether the step has other micro-batches before and after this micro-batch.
    buckets: as in RunSize.
    """
    autocast = autocast_of_lightning(precision)
    with FakeTensorMode(), as_on_a_gpu(), Live() as live:
        torch.set_default_dtype(torch.bfloat16 if precision == "bf16-true" else torch.float32)
        try:
            model = build()
        finally:
            torch.set_default_dtype(torch.float32)
        static = live.now
        with in_buckets(model, buckets, communicates=not accumulates) as module:
            of_buckets = live.now - static
            if accumulates:
                for p in model.parameters():
                    p.grad = torch.empty_like(p)
            static = live.now - of_buckets
            ids, positions, labels = (torch.empty(tokens, dtype=torch.int64) for _ in range(3))
            live.most, start = 0, len(live.timeline)
            with autocast:
                loss = module(ids, torch.empty(2, dtype=torch.int32), positions, labels)
            kept, forward, forward_where = live.now, live.most, live.where
            live.most = 0
            loss.backward()
    return Step(
        kept=kept - static,
        forward=forward - static,
        forward_where=forward_where,
        backward=live.most - static,
        backward_where=live.where,
        timeline=[(now - static, what) for now, what in live.timeline[start:]],
    )


def kept_by_compiled_block(build: Callable[[], GPT], tokens: int, precision: str) -> int:
    """Returns the bytes that the compiled first block keeps for its backward, including the block's input."""
    autocast = autocast_of_lightning(precision)
    storages: dict[int, int] = {}

    def partition(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        graphs = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        outputs: Any = graphs[0].graph.output_node().args[0]
        for node in outputs[num_fwd_outputs:]:
            value = node.meta["val"]
            # do not count weights, the attention schedule and the rotary table
            if node.op != "placeholder" or value.shape == x.shape:
                storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        return graphs

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph.forward,
        bw_compiler=lambda graph, inputs: graph.forward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "require_backend", lambda *_: None)  # nothing is computed
        torch.set_default_dtype(torch.bfloat16 if precision == "bf16-true" else torch.float32)
        try:
            model = build()
            x = torch.empty(tokens, model.token_embedding.embedding_dim, requires_grad=True)
        finally:
            torch.set_default_dtype(torch.float32)
        rope = model.ropes[0]
        rotary = rope and rotary_table(torch.empty(tokens, dtype=torch.int64), model.head_dim, rope.theta)
        schedule = causal_schedule(None, tokens, torch.device("cpu"))
        with autocast:
            model.compile_blocks(backend=backend, fullgraph=True, dynamic=False)
            model.blocks[0](x, schedule, rotary, zeros_to_add(x) if model.may_add_later else None)
    return sum(storages.values())
