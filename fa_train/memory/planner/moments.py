"""Lists the moments of a training step, which are the points in time at which memory use can peak.

Each block saves tensors for its backward. A step of a model with three blocks, in order of time:

| moment | method of `_Step` | blocks with saved tensors |
|:--|:--|:--|
| the last block's forward | around_the_loss | 3 |
| the loss | around_the_loss | 3 |
| the last norm's backward | around_the_loss | 3 |
| the backward of the last, the second and the first block | backward_of_blocks | 3, 2, 1 |
| the embedding's backward | embeddings_backward | 0 |
| the optimizer's update | update | 0 |

A run with strategy=fsdp has more moments: the end of each block's backward (ends_of_blocks), and the averaging of the
gradients of the head, the embedding and the learned positions (averaging).
"""

from dataclasses import dataclass

from fa_train.memory.offload import IN_FLIGHT
from fa_train.memory.planner.block import BlockBytes
from fa_train.memory.planner.optimizer import optimizer_working
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.sharded import Sharded
from fa_train.memory.planner.weights import block_sizes, trained_sizes


@dataclass(frozen=True)
class Moment:
    """The bytes that exist at one point in time of a step.

    Parameters and optimizer states are not counted, because a rank holds them (or its shards of them) all the time.

    weights: the bytes of the weights that FSDP2 has gathered, or 0 in a run that is not sharded.
    gradients: includes the buffers of DDP and FSDP2.
    """

    name: str
    weights: int = 0
    gradients: int = 0
    rounded_weights: int = 0
    activations: int = 0
    outside: int = 0
    loss: int = 0
    working: int = 0

    def total(self) -> int:
        kept = self.weights + self.gradients + self.rounded_weights + self.activations
        return kept + self.outside + self.loss + self.working


def moments_of(plan: Plan) -> list[Moment]:
    """Returns a Moment for each point in time of a training step at which memory use can peak."""
    step = _Step(plan)
    moments = [*step.around_the_loss(), *step.backward_of_blocks(), step.embeddings_backward()]
    if plan.run.ranks > 1 and plan.run.adapters is None:
        moments += [*step.ends_of_blocks(), *step.averaging()]
    return [*moments, step.update()]


class _Step:
    """Computes the memory use at several moments of a training step. All integer attributes are sizes in bytes."""

    def __init__(self, plan: Plan) -> None:
        model, levers, run = plan.model, plan.levers, plan.run
        self.plan, self.model, self.run = plan, model, run
        self.block, self.recomputes = BlockBytes(plan), levers.checkpointing != "none"
        self.fetches_early = self.recomputes or levers.offloads_all
        self.embeddings = 0 if run.adapters else model.vocab_size * model.dim * run.weight_bytes  # 0: frozen
        self.sharded = Sharded(plan)
        self.gradients = sum(trained_sizes(plan)) * run.gradient_bytes // run.ranks
        self.buckets = 0 if run.buckets == "none" else self.gradients
        # DDP's buckets, and gradients from earlier micro-batches of the step, exist before the backward pass
        earlier = self.sharded.whole_gradients or self.gradients
        self.gradients_before_backward = self.buckets + (earlier if run.accumulates else 0)
        self.all_gradients = self.gradients * run.gradient_copies  # bytes of gradients at the end of the backward pass
        # The backward pass allocates this rank's shards of the gradients of the embedding and the positions, unless the
        # memory of all gradients is allocated before the backward pass.
        self.embedding_shard = 0 if run.gradients_in_place else self.embeddings // run.ranks
        self.positions_shard = 0 if run.gradients_in_place else self.sharded.positions_gradient() // run.ranks
        # the gradient of the head's weight, to which the embedding's gradient is later added if the weight is tied
        self.head_gradient = self.embeddings if model.tied or (run.ranks == 1 and not run.gradients_in_place) else 0
        # FSDP2 shards the gradient of an untied head as soon as it exists
        self.head_shard = self.embedding_shard if run.ranks > 1 and not model.tied else 0
        # A batch has 3 int64 tensors, or 4 if ranks share the batch. The ranges in a schedule are 4 int32 tensors.
        self.batch = run.tokens * ((3 if run.context == 1 else 4) * 8 + 4 * 4)
        if run.context > 1:
            # for each window size, a rank holds int32 tensors: one Traffic, which says which keys are exchanged, and
            # two attention schedules
            self.batch += run.tokens * (7 + 5 * run.context) * 4 * len(set(model.windows))
        self.batch += run.tokens * model.heads.dim * 4 if model.positions == "rope" else 0  # cosines and sines
        # the last norm is never compiled, so an OffsetRMSNorm saves its input in fp32
        is_offset = model.norm == "offset_rmsnorm"
        self.last_norm_input = run.tokens * model.dim * 4 if is_offset else self.block.x
        # If the embedding is frozen, the first norm has nothing to compute in the backward pass, and saves no input.
        is_saved = run.adapters is None or not run.eager or self.recomputes or self.block.offloaded() > 0
        self.unsaved_input = 0 if is_saved else self.block.norm_input
        # the GPU memory that previous blocks still hold, because their copies to the host may still run
        self.in_flight = min(IN_FLIGHT if levers.offloads_all else 1, model.n_layers - 1) * self.block.offloaded()
        # the GPU memory that unfinished copies to the host may hold after the last block's forward (offload=all only)
        self.in_flight_at_the_loss = self.in_flight if levers.offloads_all else 0

    def around_the_loss(self) -> list[Moment]:
        """Returns the memory use in the last block's forward, in the loss, and in the last norm's backward.

        At each of the three points in time, the saved tensors of all blocks exist.
        """
        block, n_layers, sharded = self.block, self.model.n_layers, self.sharded
        rounded = block.rounded_weights()
        # with checkpointing, autocast's copies of weights are freed, because Lightning turns off autocast's cache
        rounded_in_forward = 0 if self.recomputes else n_layers * rounded
        # the input, statistics and output of the last norm, and one gradient
        last_norm = self.last_norm_input + block.statistics + 2 * block.x
        # in the last norm's backward, the gradients of the norm's input and output have the dtype of its saved input
        in_norms_backward = block.statistics + 3 * self.last_norm_input
        forward, in_forward = max(block.forward_peaks().items(), key=_nbytes)
        return [
            Moment(
                f"{forward} of the last block",
                weights=sharded.weights_in_forward(),
                gradients=self.gradients_before_backward,
                rounded_weights=(rounded_in_forward or rounded) + block.rounded_down(),
                activations=self._activations(n_layers),
                outside=self.batch,
                working=self.in_flight + in_forward - block.saved(),
            ),
            Moment(
                "the loss",
                weights=sharded.weights_at_the_loss(),
                gradients=self.gradients_before_backward,
                rounded_weights=rounded_in_forward,
                activations=self._activations(n_layers),
                outside=self.batch + last_norm,
                loss=loss_bytes(self.plan),
                working=self.in_flight_at_the_loss,
            ),
            Moment(
                "the last norm's backward",
                weights=sharded.weights_after_the_head(),
                gradients=self.gradients_before_backward + self.head_shard + sharded.buffer_in_backward(n_layers),
                rounded_weights=rounded_in_forward,
                activations=self._activations(n_layers),
                outside=self.batch + in_norms_backward,
                loss=self.head_gradient,
                working=self.in_flight_at_the_loss,
            ),
        ]

    def backward_of_blocks(self) -> list[Moment]:
        """Returns one Moment for the backward of each block in `_some_blocks`.

        The backward of a block frees the block's activations. The backward also allocates the gradients of the
        block's weights, unless the memory of all gradients is allocated before the backward pass.
        """
        block = self.block
        backward, in_backward = max(block.backward_peaks().items(), key=_nbytes)
        return [
            Moment(
                f"{backward} of the {which} block",
                weights=self.sharded.weights_in_backward(unfinished),
                gradients=self._gradients_at_start(unfinished) + self.sharded.buffer_in_backward(unfinished),
                rounded_weights=block.rounded_weights() * (1 if self.recomputes else unfinished),
                activations=self._activations(unfinished),
                outside=self.batch,
                loss=self.head_gradient,
                working=self._fetched(unfinished) + in_backward - block.saved(),
            )
            for which, unfinished in self._some_blocks()
        ]

    def embeddings_backward(self) -> Moment:
        """Returns the memory use in the embedding's backward. The saved tensors of all blocks have been freed."""
        # if the weight is tied, the embedding's gradient is added to the head's gradient in place
        gradients = 2 * self.embeddings if self.model.tied else self.embeddings
        return Moment(
            "the embedding's backward",
            weights=self.sharded.weights_in_embedding(),
            gradients=(self.sharded.whole_gradients or self._gradients_of_others())
            + self.sharded.buffer_in_backward(0)
            + self.sharded.positions_gradient(),
            outside=self.batch,
            working=self.block.x + gradients,
        )

    def ends_of_blocks(self) -> list[Moment]:
        """Returns one Moment for each block in `_some_blocks`: the end of the block's backward.

        At the end of a block's backward, all gradients of the block exist and are not sharded yet.
        """
        sharded = self.sharded
        return [
            Moment(
                f"the end of the {which} block's backward",
                weights=sharded.weights_in_backward(unfinished),
                gradients=self._gradients_at_start(unfinished)
                + sharded.buffer_in_backward(unfinished)
                + sharded.gradients_of_block(),
                activations=self._activations(unfinished) - self.block.saved(),
                outside=self.batch,
                loss=self.head_gradient,
                working=self._fetched(unfinished) + self.block.x,  # the gradient of the block's input
            )
            for which, unfinished in self._some_blocks()
        ]

    def averaging(self) -> list[Moment]:
        """Returns the memory use while FSDP2 averages the gradients of the head, the embedding and the positions."""
        block, n_layers, sharded = self.block, self.model.n_layers, self.sharded
        return [
            Moment(
                "the averaging of the head's gradient",
                weights=sharded.weights_after_the_head(),
                gradients=self.gradients_before_backward + sharded.averaged_head(),
                activations=self._activations(n_layers),
                # the input and statistics of the last norm, and the gradient of its output
                outside=self.batch + self.last_norm_input + block.statistics + block.x,
                loss=self.head_gradient,
                working=self.in_flight_at_the_loss,
            ),
            Moment(
                "the averaging of the embedding's gradient",
                weights=sharded.positions,
                gradients=self._gradients_of_others() + sharded.averaged_embedding() + sharded.positions_gradient(),
                outside=self.batch,
            ),
            Moment(
                "the averaging of the positions' gradient",
                gradients=self.gradients - self.positions_shard + sharded.averaged_positions(),
                outside=self.batch,
            ),
        ]

    def update(self) -> Moment:
        """Returns the bytes that exist while the optimizer updates the weights."""
        return Moment(
            "the optimizer",
            gradients=self.gradients * (2 if self.run.buckets == "copies" else 1),
            outside=self.batch,
            working=optimizer_working(self.plan),
        )

    def _some_blocks(self) -> list[tuple[str, int]]:
        """Returns the first two and the last two blocks, because one of these blocks has the highest peak.

        Each result is a pair (name of a block, unfinished). `unfinished` is the number of blocks that have not finished
        their backward, including the named block. Apart from the first and the last block, the peak memory changes by
        the same amount from each block to the next. A block in the middle therefore never has the highest peak.
        """
        n_layers = self.model.n_layers
        named = {n_layers: "last", n_layers - 1: "second to last", 2: "second", 1: "first"}
        return [(which, unfinished) for unfinished, which in named.items() if 1 <= unfinished <= n_layers]

    def _activations(self, unfinished: int) -> int:
        """Returns the bytes that blocks have saved and not offloaded.

        unfinished: the number of blocks that have not finished their backward. Only these blocks hold saved tensors.
        """
        return unfinished * self.block.saved() - (unfinished - 1) * self.block.offloaded() - self.unsaved_input

    def _fetched(self, unfinished: int) -> int:
        """Returns the bytes that are fetched from the host in advance, for the next block's backward."""
        return self.block.offloaded() if self.fetches_early and unfinished > 1 else 0

    def _gradients_of_others(self) -> int:
        """Returns the bytes of the gradients that exist before the embedding's backward."""
        return self.all_gradients - self.embedding_shard - self.positions_shard

    def _gradients_at_start(self, unfinished: int) -> int:
        """Returns the bytes of the gradients and of DDP's buckets that exist when the backward of a block begins.

        unfinished: the number of blocks that have not finished their backward, including the block that begins it.
        """
        if self.run.gradients_in_place:
            return self.sharded.whole_gradients or self.all_gradients
        of_block = sum(block_sizes(self.model)) * self.run.weight_bytes // self.run.ranks
        if self.run.adapters:  # frozen weights have no gradients
            of_block = self.gradients // self.model.n_layers
        return self.buckets + (self.model.n_layers - unfinished) * of_block + self.head_shard


def _nbytes(item: tuple[str, int]) -> int:
    return item[1]


def loss_bytes(plan: Plan) -> int:
    """Returns the peak bytes of linear_cross_entropy, mainly a chunk's logits and the gradient of the weight."""
    model, run = plan.model, plan.run
    chunk = min(run.loss_chunk, run.tokens)
    logits, hidden = (chunk * n * run.compute_bytes for n in (model.vocab_size, model.dim))
    rounded_hidden = hidden if run.mixed else 0
    weight = model.vocab_size * model.dim
    # FSDP2 gathers an untied head in autocast's dtype
    weight_bytes = run.weight_bytes if run.ranks == 1 or model.tied else run.compute_bytes
    rounded_weight = weight * run.compute_bytes if weight_bytes != run.compute_bytes else 0
    of_weight, product, result = weight * 4, weight * 4, weight * weight_bytes
    if run.adapters:  # the head is frozen
        of_weight = product = result = 0
    if run.compute_bytes != 4:  # accumulated without a temporary
        product = 0
    if weight_bytes == 4:  # the fp32 sum becomes the gradient without a copy
        result = 0
    in_loop = rounded_hidden + logits + max(hidden, product)
    return of_weight + rounded_weight + max(in_loop, result) + run.tokens * 4
