"""The memory of the optimizer."""

from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.weights import trained_sizes

OFFLOADED_FROM = QUANTISED_FROM = 4096  # elements: torchao leaves smaller tensors alone
QUANTISATION_BLOCK = 256  # elements that share a scale


def optimizer_bytes(plan: Plan) -> tuple[int, int]:
    """The optimizer's states on the GPU, and what it holds on the host, pinned copies included."""
    sizes, w = trained_sizes(plan), plan.run.gradient_bytes
    if plan.run.optimizer == "adamw_offload":
        moved = [n for n in sizes if n >= OFFLOADED_FROM]
        pinned = sum(2 * _power_of_two(n * w) for n in moved)  # weight and gradient; torch pins powers of two
        return 2 * w * (sum(sizes) - sum(moved)), pinned + 2 * w * sum(moved)
    if plan.run.optimizer == "adamw_8bit":
        quantised = sum(n for n in sizes if n >= QUANTISED_FROM and n % QUANTISATION_BLOCK == 0)
        scales = 2 * 4 * quantised // QUANTISATION_BLOCK
        return 2 * quantised + scales + 2 * w * (sum(sizes) - quantised), 0
    return 2 * w * sum(sizes) // plan.run.ranks, 0


def optimizer_working(plan: Plan) -> int:
    """AdamW in 8 bits goes parameter by parameter, through two copies in fp32; the others need none."""
    return 8 * max(trained_sizes(plan)) if plan.run.optimizer == "adamw_8bit" else 0


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
