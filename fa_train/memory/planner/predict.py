"""Predicts the peak memory of a training step without allocating anything.

The formulas count every tensor that the model's code saves or allocates. The peak is at one of the moments that
moments.py lists, for example at the loss, in the backward of a block, or in the optimizer's update.
tests/memory/planner/test_planner.py compares predictions with two things: the memory of the model's step on fake
tensors, and peaks that were measured on GPUs.

The prediction assumes attention=flash. Other kinds of attention need at least as much memory as flash attention.
The formulas assume matrix products in bf16 or fp32, even with lit_gpt.float8.
"""

from dataclasses import dataclass

from fa_train.memory.planner.block import BlockBytes
from fa_train.memory.planner.moments import Moment, moments_of
from fa_train.memory.planner.optimizer import optimizer_bytes
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.weights import weights_bytes

GIB = 2**30
LIBRARIES = 96 * 2**20  # the workspaces of cuBLAS in torch's allocator, measured on an H200
CONTEXT = 600 * 2**20  # the CUDA context and the code of kernels, which are not in torch's allocator
FRAGMENTATION = 0.03  # memory that the allocator reserves but cannot use, as a fraction of allocated memory


@dataclass(frozen=True)
class Prediction:
    """The bytes that one process uses on its GPU and on the host when memory use peaks in a step.

    moment: the name of the moment at which memory use peaks.
    weights: includes the weights that FSDP2 has gathered. gradients: includes the buffers of DDP and FSDP2.
    rounded_weights: autocast's copies of weights. activations: tensors that blocks save for the backward pass.
    outside: tensors that belong to no block: the batch, the ranges of tokens that attention needs, the rotary table,
    and the tensors of the last norm.
    loss: the logits and other tensors of the loss, and the gradient of the head's weight.
    working: temporary tensors at the moment of the peak.
    libraries: cuBLAS's workspaces.
    overhead: the CUDA context, the code of kernels, and memory that the caching allocator cannot use.
    host: pinned host memory. allocated: predicts torch.cuda.max_memory_allocated.
    """

    plan: Plan
    moment: str
    weights: int
    optimizer: int
    gradients: int
    rounded_weights: int
    activations: int
    outside: int
    loss: int
    working: int
    libraries: int
    overhead: int
    host: int

    @property
    def allocated(self) -> int:
        return sum(getattr(self, name) for name in COMPONENTS if name != "overhead")

    @property
    def gpu_bytes(self) -> int:
        return self.allocated + self.overhead


COMPONENTS = (
    "weights",
    "optimizer",
    "gradients",
    "rounded_weights",
    "activations",
    "outside",
    "loss",
    "working",
    "libraries",
    "overhead",
)


def predict(plan: Plan) -> Prediction:
    """Predicts the peak memory of every training step after the first, divided into components."""
    largest = max(moments_of(plan), key=Moment.total)
    weights = weights_bytes(plan)
    optimizer, host = optimizer_bytes(plan)
    return Prediction(
        plan=plan,
        moment=largest.name,
        weights=weights + largest.weights,
        optimizer=optimizer,
        gradients=largest.gradients,
        rounded_weights=largest.rounded_weights,
        activations=largest.activations,
        outside=largest.outside,
        loss=largest.loss,
        working=largest.working,
        libraries=LIBRARIES,
        overhead=CONTEXT + int(FRAGMENTATION * (weights + optimizer + largest.total())),
        host=host + (plan.model.n_layers - 1) * BlockBytes(plan).offloaded(),
    )
