"""Computes the memory that FSDP2 holds on a rank at each moment of a step, in addition to the rank's shards.

fa_train.parallel.fsdp.shard makes these groups of weights: each block, an untied token embedding, an untied head, the
learned positions, and the root. The root has the last norm, and the token embedding if the head shares the embedding's
weight. FSDP2 gathers and frees the weights of a group together.

In the forward, a block or the head gathers its weights into a gathering buffer, and copies the weights out of the
buffer. The gathering buffer lives until the next group is gathered, or until the model's forward ends. Before the
backward of a block starts, FSDP2 has gathered two groups: the block, and the group that precedes the block in the
model. The weights of a block are freed at the end of the block's backward. The root group stays gathered for the whole
micro-batch.

After the backward of a group, FSDP2 copies the group's gradients to an averaging buffer, averages the buffer over the
ranks, and keeps the rank's shard of the average. The averaging buffer lives until the backward pass has also finished
the next group. When the gradients of a group have been copied to the averaging buffer, FSDP2 frees these gradients.
Before torch 2.15, a loop variable of foreach_reduce keeps the last gradient alive until the average is computed. torch
2.15 frees the last gradient earlier. Predictions count it with every version.

tests/memory/planner/test_sharded.py compares the rules above with FSDP2 on fake tensors. peaks_h100.json and
peaks_h200.json have peaks that were measured on two and on four GPUs. The peak memory of runs with reduce_once,
adapters or replicas was not measured.
"""

from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.weights import block_sizes, norm_size, trained_sizes

REDUCED_BYTES = 4  # bytes per element of the averaging buffer; an upper bound if strategy.reduce_dtype is bfloat16


class Sharded:
    """The bytes that FSDP2 holds on a rank. All results are 0 in a run that is not sharded."""

    def __init__(self, plan: Plan) -> None:
        model, run = plan.model, plan.run
        self.run, self.n_layers, self.tied = run, model.n_layers, model.tied
        self.resharded = run.reshard_after_forward
        is_sharded, is_trained = run.ranks > 1, run.adapters is None
        embedding = model.vocab_size * model.dim * is_sharded
        positions = (model.max_seq_len or 0) * model.dim * is_sharded if model.positions == "learned" else 0
        # gathered weights in bytes
        self.block = sum(block_sizes(model)) * run.compute_bytes * is_sharded
        self.head = 0 if self.tied else embedding * run.compute_bytes
        self.embedding = 0 if self.tied else embedding * run.weight_bytes
        self.positions = positions * run.weight_bytes
        self.root = (embedding * self.tied + norm_size(model) * is_sharded) * run.weight_bytes
        # with reduce_once, gradients stay whole until the last micro-batch of a step
        is_whole = is_sharded and run.reduce_once and run.accumulates
        self.whole_gradients = sum(trained_sizes(plan)) * REDUCED_BYTES if is_whole else 0
        # bytes per element of the gradients of the embedding and the learned positions
        self.gradient_bytes = REDUCED_BYTES if is_whole else run.weight_bytes
        # the number of elements that have a gradient
        self.trained_embedding = embedding * is_trained
        self.trained_positions = positions * is_trained
        self.trained_block = sum(block_sizes(model) if run.adapters is None else run.adapters.sizes) * is_sharded
        self.trained_block //= 1 if is_trained else self.n_layers

    def weights_in_forward(self) -> int:
        """Returns the bytes of gathered weights during the last block's forward, including the block's buffer."""
        return self.root + self.block * (1 if self.resharded else self.n_layers) + self.block

    def weights_at_the_loss(self) -> int:
        """Returns the bytes of gathered weights while the loss is computed, including the newest gathering buffer."""
        buffer = self.block if self.tied else self.head
        return self.root + self.head + buffer + (0 if self.resharded else self.n_layers * self.block)

    def weights_after_the_head(self) -> int:
        """Returns the bytes of gathered weights after the head's backward, including the last block's weights."""
        return self.root + self.block * (1 if self.resharded else self.n_layers)

    def weights_in_backward(self, unfinished: int) -> int:
        """Returns the bytes of gathered weights during the backward of a block.

        unfinished: the number of blocks that have not finished their backward.
        """
        blocks = min(2, unfinished) if self.resharded else unfinished
        # during the first block's backward, FSDP2 gathers the preceding group: the learned positions or the embedding
        before = self.positions or self.embedding
        return self.root + self.block * blocks + (before if unfinished == 1 else 0)

    def weights_in_embedding(self) -> int:
        """Returns the bytes of gathered weights in the embedding's backward."""
        return self.root + self.embedding + self.positions

    def buffer_in_backward(self, unfinished: int) -> int:
        """Returns the bytes of the averaging buffer during the backward pass.

        unfinished: the number of blocks that have not finished their backward.
        With reduce_once and several micro-batches, the result is 0, because `whole_gradients` still counts freed
        gradients of the same size as the buffer.
        """
        before = 0 if self.tied else self.trained_embedding  # the head's gradient is averaged before blocks' gradients
        elements = before if unfinished == self.n_layers else self.trained_block
        return 0 if self.whole_gradients else elements * REDUCED_BYTES

    def positions_gradient(self) -> int:
        """Returns the bytes of the learned positions' gradient, which FSDP2 averages after the backward."""
        return self.trained_positions * self.run.weight_bytes

    def gradients_of_block(self) -> int:
        """Returns the bytes of a block's gradients before they are copied to the averaging buffer."""
        return self.trained_block * self.run.compute_bytes

    def averaged_head(self) -> int:
        """Returns the peak bytes while an untied head's gradient is averaged.

        If `whole_gradients` counts the bytes of the head's gradient, the result does not count these bytes again.
        """
        if self.tied:
            return 0
        return self._averaged(self.trained_embedding, 0 if self.whole_gradients else self.run.compute_bytes)

    def averaged_embedding(self) -> int:
        """Returns the peak bytes while the embedding's gradient is averaged."""
        return self._averaged(self.trained_embedding, self.gradient_bytes, is_last=not self.tied)

    def averaged_positions(self) -> int:
        """Returns the peak bytes while the learned positions' gradient is averaged."""
        return self._averaged(self.trained_positions, self.gradient_bytes)

    def _averaged(self, elements: int, gradient_bytes: int, is_last: bool = True) -> int:
        """Returns the peak bytes while a gradient is averaged: the gradient, its buffer, the average and the new shard.

        is_last: whether the gradient is the last one of its group. FSDP2 keeps the last gradient of each group until
        the average is computed. The last gradient of the root group is the gradient of the norm.
        """
        gradient, buffer = elements * gradient_bytes, elements * REDUCED_BYTES
        rounded = 0 if self.run.weight_bytes == REDUCED_BYTES else elements * self.run.weight_bytes
        return buffer + max(gradient, (buffer + rounded) // self.run.ranks + gradient * is_last)
