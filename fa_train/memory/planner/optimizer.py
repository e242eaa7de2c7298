"""Predicts the memory that the optimizer needs."""

from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.weights import trained_sizes

OFFLOADED_FROM = QUANTIZED_FROM = 4096  # torchao neither offloads nor quantizes tensors with fewer than 4096 elements
MASTER_WEIGHTS_BYTES = 4 + 4 + 2  # bytes per parameter for two fp32 moments and the low 16 bits of the master weight
QUANTIZATION_BLOCK = 256  # the number of elements that share one scale


def optimizer_bytes(plan: Plan) -> tuple[int, int]:
    """Returns the bytes of the optimizer's states on the GPU and on the host.

    The host's bytes include pinned buffers.
    """
    sizes, w = trained_sizes(plan), plan.run.gradient_bytes
    if plan.run.optimizer == "adamw_offload":
        moved = [n for n in sizes if n >= OFFLOADED_FROM]
        # pinned copies of weight and gradient; torch rounds their sizes up to powers of two
        pinned = sum(2 * _power_of_two(n * w) for n in moved)
        return 2 * w * (sum(sizes) - sum(moved)), pinned + 2 * w * sum(moved)
    if plan.run.optimizer == "adamw_8bit":
        quantized = sum(n for n in sizes if n >= QUANTIZED_FROM and n % QUANTIZATION_BLOCK == 0)
        scales = 2 * 4 * quantized // QUANTIZATION_BLOCK
        return 2 * quantized + scales + 2 * w * (sum(sizes) - quantized), 0
    bytes_of_each = MASTER_WEIGHTS_BYTES if plan.run.optimizer == "adamw_master" else 2 * w
    return bytes_of_each * sum(sizes) // plan.run.ranks, 0


def optimizer_working(plan: Plan) -> int:
    """Returns the bytes of temporary tensors in an optimizer step.

    8-bit AdamW makes two fp32 copies of one parameter at a time.
    """
    return 8 * max(trained_sizes(plan)) if plan.run.optimizer == "adamw_8bit" else 0


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
