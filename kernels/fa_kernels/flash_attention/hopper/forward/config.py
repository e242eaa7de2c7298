"""Configurations of the forward kernel, one for each head_dim and length class of documents.

The values were chosen by measurements on an H200 (docs/hopper.md).
"""

from typing import NamedTuple

from fa_kernels.flash_attention.schedule import LengthClass

ROWS = 64  # queries per consumer, because a warpgroup's matmul instruction has 64 rows


class ForwardConfig(NamedTuple):
    """One configuration of the forward kernel. A tile has 64 * consumers queries and block_n keys.

    The kernel reads only fields, because Triton 3.8 turns a NamedTuple into a tuple without its properties.

    consumers: 2 or 3. Each consumer has 64 queries, so a loaded block of K and V serves 128 or 192 queries. Three
        consumers make some calls at head_dim 64 and 96 faster. On short documents, larger tiles waste more work. With
        three consumers, a thread has too few registers for the default softmax, so `pv_first` or `max_first` must be
        True.
    stages: the number of blocks of K, and of V, that can be in shared memory at once.
    ranged: each consumer visits only the blocks of keys that its own 64 queries see, which saves work on short
        documents.
    pingpong: consumers take turns on the tensor cores for each block, so all consumers must visit the same blocks.
    max_first: softmax first updates `row_max` with the scores, and then computes P in the registers of the scores
        (softmax.py). By default, scores and P are in registers at the same time.
    pv_first: the matmul P V of the previous block ends before softmax starts, which frees the registers of the
        previous P.
    o_in_q: the output o is copied to global memory through the buffer of Q, because at head_dim 256, shared memory has
        no room for a buffer of o. Q's buffer is too small for o in fp32.
    consumer_registers, producer_registers: registers per thread of a consumer and of the producer, after `setmaxnreg`.
        The defaults are for two consumers. Three consumers need 160 and 32.
    """

    block_n: int
    consumers: int
    stages: int
    ranged: bool = False
    pingpong: bool = False
    max_first: bool = False
    pv_first: bool = False
    o_in_q: bool = False
    consumer_registers: int = 240
    producer_registers: int = 24

    @property
    def start_registers(self) -> int:
        """Registers per thread when the kernel starts. All threads together have at most 64K registers."""
        return 168 if self.consumers == 2 else 128


# The default configurations, by head_dim.
FORWARD_CONFIGS = {
    64: ForwardConfig(block_n=128, consumers=2, stages=3, pingpong=True),
    96: ForwardConfig(block_n=128, consumers=2, stages=3, pingpong=True),
    128: ForwardConfig(block_n=128, consumers=2, stages=2, pingpong=True),
    256: ForwardConfig(block_n=64, consumers=2, stages=2, pingpong=True, o_in_q=True),
}
_LONG = {
    64: ForwardConfig(
        block_n=128, consumers=3, stages=3, pingpong=True, pv_first=True, consumer_registers=160, producer_registers=32
    ),
    96: ForwardConfig(
        block_n=64, consumers=3, stages=6, pingpong=True, pv_first=True, consumer_registers=160, producer_registers=32
    ),
}
WIDE_O_STAGES = 4  # the upper limit of `stages` if o is fp32
# Configurations that are faster than the default for some length classes (schedule.length_class_of).
OTHER_CONFIGS: dict[LengthClass, dict[int, ForwardConfig]] = {
    "short": {
        64: ForwardConfig(
            block_n=64,
            consumers=3,
            stages=4,
            ranged=True,
            max_first=True,
            consumer_registers=160,
            producer_registers=32,
        ),
        96: ForwardConfig(block_n=64, consumers=2, stages=4, ranged=True),
        128: ForwardConfig(block_n=64, consumers=2, stages=4, ranged=True),
        256: ForwardConfig(block_n=64, consumers=2, stages=2, ranged=True, o_in_q=True),
    },
    "medium": {
        256: ForwardConfig(block_n=64, consumers=2, stages=2, pingpong=True, max_first=True, o_in_q=True),
    },
    "long": _LONG,
    "very_long": _LONG | {128: ForwardConfig(block_n=128, consumers=2, stages=2)},
}


def forward_config(head_dim: int, length_class: LengthClass, wide_o: bool = False) -> ForwardConfig:
    """Returns the configuration of a call. wide_o: whether the output o is fp32."""
    config = OTHER_CONFIGS[length_class].get(head_dim, FORWARD_CONFIGS[head_dim])
    return config._replace(stages=min(config.stages, WIDE_O_STAGES)) if wide_o else config
