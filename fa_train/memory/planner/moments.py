"""Lists the moments of a training step, which are the points in time at which memory use can peak."""

from dataclasses import dataclass

from fa_train.memory.offload import IN_FLIGHT
from fa_train.memory.planner.block import Block
from fa_train.memory.planner.optimizer import optimizer_working
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.weights import block_sizes, gathered_outside, trained_sizes


@dataclass(frozen=True)
class Moment:
    """The bytes that exist at one point in time of a step, in addition to weights and optimizer states.

    gradients: includes DDP's buckets.
    """

    name: str
    gradients: int = 0
    rounded_weights: int = 0
    activations: int = 0
    outside: int = 0
    loss: int = 0
    working: int = 0

    def total(self) -> int:
        return self.gradients + self.rounded_weights + self.activations + self.outside + self.loss + self.working


def moments_of(plan: Plan) -> list[Moment]:
    """Returns a Moment for each point in time of a training step at which memory use can peak."""
    step = _Step(plan)
    return [*step.around_the_loss(), *step.last_moments(), *step.backward_of_blocks()]


class _Step:
    """The sizes in bytes that several moments of a step have in common."""

    def __init__(self, plan: Plan) -> None:
        model, levers, run = plan.model, plan.levers, plan.run
        self.plan, self.model, self.run = plan, model, run
        self.block, self.recomputes = Block(plan), levers.checkpointing != "none"
        self.fetches_early = self.recomputes or levers.offloads_all
        self.embeddings = 0 if run.adapters else model.vocab_size * model.dim * run.weight_bytes  # 0: frozen
        self.gradients = sum(trained_sizes(plan)) * run.gradient_bytes // run.ranks
        self.buckets = 0 if run.buckets == "none" else self.gradients
        # what exists before the backward pass: DDP's buckets, and gradients from earlier micro-batches of the step
        self.before = self.buckets + (self.gradients if run.accumulates else 0)
        self.all_gradients = self.gradients * run.gradient_copies  # at the end of the backward pass
        # the gradient of the head's weight; if the weight is tied, the embedding's gradient is later added to this one
        self.of_head = self.embeddings if model.tied or not run.gradients_in_place or run.ranks > 1 else 0
        self.data = run.tokens * (3 * 8 + 4 * 4)  # 3 int64 tensors of the batch, 4 int32 tensors of ranges
        self.data += run.tokens * model.heads.dim * 4 if model.positions == "rope" else 0  # cosines and sines
        # the GPU memory that previous blocks still hold, because their copies to the host may still run
        self.underway = min(IN_FLIGHT if levers.offloads_all else 1, model.n_layers - 1) * self.block.offloaded()
        self.lagging = self.underway if levers.offloads_all else 0  # what remains of `underway` after the last block

    def around_the_loss(self) -> list[Moment]:
        """Returns the bytes at three points in time: the last block's forward, the loss, and the last norm's backward.

        The saved tensors of all blocks exist at all three points.
        """
        block, n_layers = self.block, self.model.n_layers
        rounded = block.rounded_weights()
        cached = self.run.eager and self.run.adapters is None  # autocast does not cache copies of frozen weights
        kept = cached or not self.recomputes
        rounded_in_forward = n_layers * (rounded + block.rounded_down() * cached) if kept else 0
        activations = n_layers * block.saved() - (n_layers - 1) * block.offloaded()
        last_norm = block.x + block.statistics + 2 * block.x  # the norm's input, its output and a gradient
        forward, in_forward = max(block.forward().items(), key=_nbytes)
        return [
            Moment(
                f"{forward} of the last block",
                gradients=self.before,
                rounded_weights=rounded_in_forward or rounded + block.rounded_down(),
                activations=activations,
                outside=self.data,
                working=self.underway + in_forward - block.saved(),
            ),
            Moment(
                "the loss",
                gradients=self.before,
                rounded_weights=rounded_in_forward,
                activations=activations,
                outside=self.data + last_norm,
                loss=loss_bytes(self.plan),
                working=self.lagging,
            ),
            Moment(
                "the last norm's backward",
                gradients=self.before,
                rounded_weights=0 if self.recomputes else n_layers * rounded,
                activations=activations,
                outside=self.data + last_norm,
                loss=self.of_head,
                working=self.lagging,
            ),
        ]

    def last_moments(self) -> list[Moment]:
        """Returns the bytes at two points in time: the embedding's backward and the optimizer's update.

        All gradients exist at both points, and the saved tensors of all blocks have been freed.
        """
        model, run, embeddings = self.model, self.run, self.embeddings
        # unsharded gradients of the weights outside the blocks, and fp32 copies of these gradients
        outer = sum(gathered_outside(model)) * (run.weight_bytes + 4) if run.ranks > 1 and run.adapters is None else 0
        return [
            Moment(
                "the embedding's backward",
                gradients=self.all_gradients - (0 if run.gradients_in_place else embeddings // run.ranks),
                outside=self.data,
                # if the weight is tied, the embedding's gradient is added to the head's gradient in place
                working=(self.block.x + 2 * embeddings if model.tied else self.block.x + embeddings) + outer,
            ),
            Moment(
                "the optimizer",
                gradients=self.gradients * (2 if run.buckets == "copies" else 1),
                outside=self.data,
                working=optimizer_working(self.plan),
            ),
        ]

    def backward_of_blocks(self) -> list[Moment]:
        """Returns the bytes during the backward of three blocks: the last block, the second block and the first block.

        The backward of a block frees the block's activations. The backward of a block allocates the gradients of the
        block's weights, unless memory for them already exists.
        """
        block, n_layers, run = self.block, self.model.n_layers, self.run
        rounded = block.rounded_weights()
        of_block = sum(block_sizes(self.model)) * run.weight_bytes // run.ranks
        if run.adapters:  # frozen weights have no gradients
            of_block = self.gradients // n_layers
        backward, in_backward = max(block.backward().items(), key=_nbytes)
        return [
            Moment(
                f"{backward} of the {which} block",
                gradients=self.all_gradients if run.gradients_in_place else self.buckets + (n_layers - left) * of_block,
                rounded_weights=rounded if self.recomputes else left * rounded,
                activations=left * block.saved() - (left - 1) * block.offloaded(),
                outside=self.data,
                loss=self.of_head,
                # the offloaded tensors that the next block's backward needs are fetched early
                working=(block.offloaded() if self.fetches_early and left > 1 else 0) + in_backward - block.saved(),
            )
            for left, which in {n_layers: "last", 2: "second", 1: "first"}.items()
            if left <= n_layers
        ]


def _nbytes(item: tuple[str, int]) -> int:
    return item[1]


def loss_bytes(plan: Plan) -> int:
    """Returns the peak bytes of linear_cross_entropy, mainly a chunk's logits and the gradient of the weight."""
    model, run = plan.model, plan.run
    chunk = min(run.loss_chunk, run.tokens)
    logits, hidden = (chunk * n * run.compute_bytes for n in (model.vocab_size, model.dim))
    rounded_hidden = hidden if run.mixed else 0
    weight = model.vocab_size * model.dim
    rounded_weight = weight * run.compute_bytes if run.mixed else 0
    of_weight, product, result = weight * 4, weight * 4, weight * run.weight_bytes
    if run.adapters:  # the head is frozen
        of_weight = product = result = 0
    if run.compute_bytes != 4:  # accumulated without a temporary
        product = 0
    if run.weight_bytes == 4:  # the fp32 sum is the gradient, without a rounded copy
        result = 0
    in_loop = rounded_hidden + logits + max(hidden, product)
    return of_weight + rounded_weight + max(in_loop, result) + run.tokens * 4
