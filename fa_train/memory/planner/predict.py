"""How much memory a training step takes, by arithmetic: nothing is allocated.

What autograd keeps of each block is read off the code, tensor by tensor. A step's peak is the largest of a few moments:
the loss; within a block, whichever of its forward (again, if checkpointed), its FFN's or its attention's backward holds
most; the end of the backward, when all gradients exist; the optimizer. tests/memory/planner/test_planner.py runs the
real model on fake tensors and compares, and holds the formula against peaks measured on GPUs.

Attention is counted as flash attention; the other kinds keep at least as much. What to change where a step does not fit
is fa_train.memory.planner.levers' to say.
"""

from dataclasses import dataclass

from fa_train.memory.planner.block import Block
from fa_train.memory.planner.moments import Moment, moments_of
from fa_train.memory.planner.optimizer import optimizer_bytes
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.weights import weights_bytes

GIB = 2**30
LIBRARIES = 96 * 2**20  # cuBLAS's workspaces, by torch's allocator; measured on an H200
CONTEXT = 600 * 2**20  # CUDA's context and the kernels' code, beside torch's allocator
FRAGMENTATION = 0.03  # of what is allocated: what the allocator has reserved and cannot use


@dataclass(frozen=True)
class Prediction:
    """What one GPU and its process hold at the largest moment of a step, in bytes.

    rounded_weights are autocast's copies; activations is what blocks keep for their backward, outside what the
    embeddings, the data and the last norm do; working is what the moment itself needs; loss is the logits and gradients
    of the last layer. allocated is what torch.cuda.max_memory_allocated will say; overhead is the CUDA context, the
    kernels' code and what the caching allocator cannot use. host is pinned memory.
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
    """The peak of a training step after the first, by component."""
    largest = max(moments_of(plan), key=Moment.total)
    weights = weights_bytes(plan)
    optimizer, host = optimizer_bytes(plan)
    return Prediction(
        plan=plan,
        moment=largest.name,
        weights=weights,
        optimizer=optimizer,
        gradients=largest.gradients,
        rounded_weights=largest.rounded_weights,
        activations=largest.activations,
        outside=largest.outside,
        loss=largest.loss,
        working=largest.working,
        libraries=LIBRARIES,
        overhead=CONTEXT + int(FRAGMENTATION * (weights + optimizer + largest.total())),
        host=host + (plan.model.n_layers - 1) * Block(plan).sent(),
    )


def kept_per_layer(plan: Plan) -> int:
    """What the GPU keeps of a block but the last between its forward and its backward, copies of weights included."""
    block = Block(plan)
    rounded = block.rounded_weights() if plan.levers.checkpointing == "none" else 0
    return block.boundary() - block.sent() + rounded


def sent_per_layer(plan: Plan) -> int:
    """What waits on the host of a block but the last."""
    return Block(plan).sent()
