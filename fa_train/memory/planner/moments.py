"""The moments of a training step at which memory use can peak."""

from dataclasses import dataclass

from fa_train.memory.offload import IN_FLIGHT
from fa_train.memory.planner.block import Block
from fa_train.memory.planner.optimizer import optimizer_working
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.weights import block_sizes, outer_sizes, trained_sizes


@dataclass(frozen=True)
class Moment:
    """The bytes held at one moment of a step, without weights and optimizer states."""

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
    """Returns the moments of a step at which memory use can peak."""
    model, levers, run = plan.model, plan.levers, plan.run
    block, again = Block(plan), levers.checkpointing != "none"
    vocabulary = model.vocab_size * model.dim * run.weight_bytes
    gradients = sum(trained_sizes(plan)) * run.gradient_bytes // run.ranks
    rounded = block.rounded_weights()
    cached = run.eager and run.adapters is None  # autocast does not cache its copies of frozen weights
    rounded_in_forward = model.n_layers * (rounded + block.rounded_down() * cached) if cached or not again else 0
    boundaries = model.n_layers * block.boundary() - (model.n_layers - 1) * block.sent()
    # GPU memory of the previous blocks' states, whose copies may still run
    underway = min(IN_FLIGHT if levers.offloads_all else 1, model.n_layers - 1) * block.sent()
    lagging = underway if levers.offloads_all else 0  # also after the last block
    data = run.tokens * (3 * 8 + 4 * 4)  # tokens, labels and positions; the schedule's four range ends
    data += run.tokens * model.heads.dim * 4 if model.positions == "rope" else 0  # cosines and sines
    last_norm = block.x + block.statistics + 2 * block.x  # its input, and two more: its output and gradients
    # the gradient of the head's weight; if tied, it is kept until the embedding's gradient is added
    of_head = vocabulary if model.tied or not run.accumulates or run.ranks > 1 else 0
    of_block = sum(block_sizes(model)) * run.weight_bytes // run.ranks
    embeddings = vocabulary
    # gradients that are averaged over ranks at the end, and their fp32 copies
    outer = sum(outer_sizes(model)) * (run.weight_bytes + 4) if run.ranks > 1 and run.adapters is None else 0
    if run.adapters:  # frozen weights have no gradients
        of_head = embeddings = 0
        of_block = gradients // model.n_layers
    before = gradients if run.accumulates else 0  # gradients of the step's earlier micro-batches
    forward, in_forward = max(block.forward().items(), key=_nbytes)
    moments = [
        Moment(
            f"{forward} of the last block",
            gradients=before,
            rounded_weights=rounded_in_forward or rounded + block.rounded_down(),
            activations=boundaries,
            outside=data,
            working=underway + in_forward - block.boundary(),
        ),
        Moment(
            "the loss",
            gradients=before,
            rounded_weights=rounded_in_forward,
            activations=boundaries,
            outside=data + last_norm,
            loss=loss_bytes(plan),
            working=lagging,
        ),
        Moment(
            "the last norm's backward",
            gradients=before,
            rounded_weights=0 if again else model.n_layers * rounded,
            activations=boundaries,
            outside=data + last_norm,
            loss=of_head,
            working=lagging,
        ),
        Moment(
            "the embedding's backward",
            gradients=gradients - (0 if run.accumulates else embeddings // run.ranks),
            outside=data,
            # the gradient of a tied embedding is added to the head's gradient in place
            working=(block.x + 2 * embeddings if model.tied else block.x + embeddings) + outer,
        ),
        Moment("the optimizer", gradients=gradients, outside=data, working=optimizer_working(plan)),
    ]
    # in the backward, each block frees its activations and adds gradients, unless gradients already exist
    backward, in_backward = max(block.backward().items(), key=_nbytes)
    for left, which in {model.n_layers: "last", 2: "second", 1: "first"}.items():
        if left > model.n_layers:
            continue
        fetched = (
            block.sent() if (again or levers.offloads_all) and left > 1 else 0
        )  # the next block's states, fetched early
        moments.append(
            Moment(
                f"{backward} of the {which} block",
                gradients=before or (model.n_layers - left) * of_block,
                rounded_weights=rounded if again else left * rounded,
                activations=left * block.boundary() - (left - 1) * block.sent(),
                outside=data,
                loss=of_head,
                working=fetched + in_backward - block.boundary(),
            )
        )
    return moments


def _nbytes(item: tuple[str, int]) -> int:
    return item[1]


def loss_bytes(plan: Plan) -> int:
    """Returns the peak bytes of linear_cross_entropy: a chunk's logits, and the gradient of the weight."""
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
    if run.weight_bytes == 4:  # the fp32 sum is the result
        result = 0
    in_loop = rounded_hidden + logits + max(hidden, product)
    return of_weight + rounded_weight + max(in_loop, result) + run.tokens * 4
