"""The tensors of one decoder block, read off the code, and how many of them live at a time."""

from fa_kernels.flash_attention.backend import backward_workspace
from fa_train.memory.offload import worth_a_copy
from fa_train.memory.planner.plan import Plan

DEQUANTISATION_BYTES = 20  # of an element while its code is looked up; fp32, torchao 0.18, by the operators


class Block:
    """The tensors of one decoder block, in bytes, and how many of them live at a time."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.model, self.levers, self.run = plan, plan.model, plan.levers, plan.run
        model, run = plan.model, plan.run
        t, c = run.tokens, run.compute_bytes
        self.eager = run.eager
        self.x = t * model.dim * run.weight_bytes  # a hidden state between blocks, and its gradient
        self.x_rounded = t * model.dim * c
        self.q, self.kv = t * model.query_dim * c, t * model.kv_dim * c
        self.q_full, self.kv_full = t * model.query_dim * 4, t * model.kv_dim * 4
        self.qkv = self.q + 2 * self.kv
        self.lse = t * model.heads.query * 4
        self.hidden, self.up = t * model.ffn_dim * c, t * model.up_dim * c
        # fp32 numbers that a norm keeps of each row: the deviation, and LayerNorm the mean too
        norm_statistics = 2 if model.norm == "layernorm" else 1
        self.statistics = t * 4 * norm_statistics
        self.qk_statistics = t * (model.heads.query + model.heads.kv) * 4 * norm_statistics
        self.qkv_weight, self.out_weight, self.up_weight, self.down_weight = model.block_matrices
        a = run.adapters
        self.attention_adapters = (t * a.attention_rank + a.attention_joined) * c if a else 0
        self.ffn_adapters = (t * a.ffn_rank + a.ffn_joined) * c if a else 0

    def rounded_weights(self) -> int:
        """Autocast's copies that autograd keeps; the FFN by chunks makes its own and drops them.

        Blocks that are gathered from several ranks are gathered in autocast's dtype.
        """
        if not self.run.mixed or self.run.ranks > 1 or (self.run.adapters and self.run.adapters.quantised):
            return 0
        ffn = 0 if self.levers.mlp_chunk else self.up_weight + (self.down_weight if self.run.adapters else 0)
        return (self.qkv_weight + self.out_weight + ffn) * self.run.compute_bytes

    def rounded_down(self) -> int:
        """The copy of the FFN's last weight, which the backward makes again as it does the activations."""
        if self.run.adapters or self.levers.mlp_chunk or self.run.ranks > 1 or not self.run.mixed:
            return 0
        return self.down_weight * self.run.compute_bytes

    def attention_kept(self) -> int:
        """From the block's input to attention's result."""
        kept = self.x + self.statistics + self.x_rounded + self.qkv + self.q + self.lse + self.attention_adapters
        if self.model.qk_norm:
            kept += self.q + self.kv  # else views of the buffer in which values are, rotated or not
            kept += self.qk_statistics
            kept += self.q_full + self.kv_full if self.run.mixed and self.eager else 0
        return kept

    def ffn_kept(self) -> int:
        """From the hidden state between attention and FFN, which torch.compile adds up again, to the FFN's result."""
        kept = (self.x if self.eager else self.x_rounded) + self.statistics + self.x_rounded
        if self.levers.mlp_chunk and not keeps_up(self.plan):
            return kept + (self.x - self.x_rounded if self.torchs_chunks() else 0)  # chunks of the norm's own result
        return kept + self.up + self.activated_kept() + self.ffn_adapters

    def activated(self) -> int:
        """The FFN's operand of its last product; SwiGLU's silu too, which torch.compile does not write."""
        return self.hidden * (2 if self.model.gated and self.eager else 1)

    def activated_kept(self) -> int:
        """Those of the first forward; the backward computes them again, but for adapters."""
        return self.activated() if self.run.adapters else 0

    def kept(self) -> int:
        """What autograd keeps of a block that computes nothing again."""
        return self.attention_kept() + self.ffn_kept()

    def boundary(self) -> int:
        """What is kept of a block from its forward to its backward, on the GPU or on the host."""
        if self.levers.checkpointing == "none":
            return self.kept()
        return self.x + (self.q + self.lse if self.levers.checkpointing == "selective" else 0)

    def torchs_chunks(self) -> bool:
        """Whether chunks of the FFN pass through torch's own operators and checkpoints (fa_train.models.gpt)."""
        return self.levers.mlp_chunk is not None and (self.run.adapters is not None or self.model.activation == "geglu")

    def sent(self) -> int:
        """What of it waits on the host."""
        if not self.levers.offloads_all:
            return self.x if self.levers.offload else 0
        stays = 2 * self.statistics + self.lse + self.attention_adapters
        stays += 0 if self.levers.mlp_chunk else self.ffn_adapters
        if self.model.qk_norm:
            stays += self.qk_statistics + (0 if worth_a_copy(self.kv, self.run.tokens, self.model.dim) else self.kv)
        return self.kept() - stays

    def forward(self) -> dict[str, int]:
        """The most at a time in each part of the first forward, the block's own tensors included."""
        ffn = self._ffn_forward()
        if self.levers.checkpointing != "none":  # nothing is kept for longer than it is read
            activated = self.up + self.activated()
            ffn = self.boundary() + 2 * self.x + (self._chunk_forward() if self.levers.mlp_chunk else activated)
        return {"attention": self._attention_forward(), "FFN": ffn}

    def backward(self) -> dict[str, int]:
        """The same of the backward, with the forward again where it is checkpointed."""
        again = {}
        if self.levers.checkpointing != "none":
            waiting = self.x + (self.x_rounded if self.run.mixed else 0)  # the gradient of the block's result
            ffn = self.kept() + self._argument()  # recomputation ends before the activations, or the last product
            parts = {"attention": self._attention_forward(), "FFN": ffn}
            again = {f"{part} again": waiting + nbytes for part, nbytes in parts.items()}
        return again | {
            "FFN's backward": self._ffn_backward(),
            "norm's backward": self._norm_backward(),
            "attention's backward": self._attention_backward(),
        }

    def _argument(self) -> int:
        """A norm's result in fp32: Python holds it while attention or FFN run on a rounded copy of it."""
        return self.x if self.run.mixed and self.eager else 0

    def _attention_forward(self) -> int:
        """Until attention's result is projected."""
        return self.attention_kept() + self._argument() + self.x_rounded

    def _ffn_forward(self) -> int:
        held = self.kept() + self._argument()
        if self.levers.mlp_chunk or self.run.adapters:
            return held + self.x_rounded + self._chunk_forward()
        return held + max(self.activated(), self.hidden + self.x_rounded)

    def _chunk_forward(self) -> int:
        """Rounded weights, and a chunk from its first product to its last."""
        if not self.levers.mlp_chunk:
            return 0
        # GELU's result takes the place of its argument, unless that is kept
        operands = 1 if keeps_up(self.plan) or not self.model.gated else 3
        if self.torchs_chunks():
            operands = 4 if self.model.gated else 2
        return self._ffn_rounded() + self._chunk(self.run.tokens) * operands

    def _ffn_backward(self) -> int:
        """The gradient of the last product's operand; SwiGLU's, of its two factors; or a chunk's tensors."""
        held = self.kept() + self.x
        if self.levers.checkpointing == "selective" and not self.eager and not self.run.adapters:
            held -= self.attention_kept() - self.boundary()  # compiled code makes queries, keys and values after this
        rounded = self.x_rounded if self.run.mixed else 0  # the gradient of the FFN's result
        if self.run.adapters:  # that operand has a gradient through frozen weights and one through A, freed for the sum
            chunk = self._chunk(self.run.tokens)
            if not self.levers.mlp_chunk:
                return held + 2 * chunk + self._dequantised()
            again = (5 if self.model.gated else 3) * chunk + self._ffn_rounded() + self.ffn_adapters
            return held + rounded + again + 2 * chunk + self._dequantised()
        if not self.levers.mlp_chunk:  # the activations again, and autocast's copy of the last weight
            again = self.activated() + self.rounded_down()
            of_operand = rounded + again + self.hidden + self.down_weight * self.run.compute_bytes
            # the gradient of that weight, which compiled code hands over at its end
            its_own = 0 if self.eager and self.run.accumulates else self.down_weight * self.run.weight_bytes
            of_factors = self.hidden * (4 if self.eager else 3) + its_own if self.model.gated else 0
            return held + max(of_operand, of_factors)
        weights = (self.up_weight + self.down_weight) * 4
        chunk = self._chunk(self.run.tokens)
        if self.torchs_chunks():  # a chunk again, its operands' gradients, and the weights' of one precision and both
            return held + rounded + 7 * chunk + self._ffn_rounded() + weights
        d_projected = (2 if self.model.gated else 1) * chunk  # like the activations, it takes the place of an operand
        chunks = d_projected + chunk
        if self.run.compute_bytes == 4:  # products of lower precisions are added up by one call
            chunks = max(self.down_weight * 4 + chunks, self.up_weight * 4 + d_projected)
        if self.run.weight_bytes != 4:  # the sums are rounded when the loop has ended
            chunks = max(chunks, weights // 2)
        return held + rounded + self.x_rounded + weights + self._ffn_rounded() + chunks

    def _norm_backward(self) -> int:
        """Of the FFN's norm: its input, the gradients of its result and input, and of the residual."""
        between = self.x if self.eager else self.x_rounded
        return self.attention_kept() + between + self.statistics + 3 * self.x

    def _attention_backward(self) -> int:
        """Gradients of queries, keys and values, and the workspace of the kernels that compute them."""
        held = self.attention_kept() + self.x + self.q
        heads = self.model.heads
        workspace = backward_workspace(heads.dim, self.run.compute_dtype, self.model.extras.softcap, self.run.arch)
        workspace *= self.run.tokens * heads.query
        return held + workspace + self.qkv + (0 if self.eager else self._held_by_compiled_code())

    def _held_by_compiled_code(self) -> int:
        """What eager code has let go by the time of attention's backward; as torch 2.11's inductor orders an H200's."""
        held = self.x  # the gradient of the block's result: all of the block is one node, whose argument it is
        if self.run.adapters:
            return held
        # one kernel at the end sums for both norms' weights: attention's projected result, the FFN's gradient of its x;
        # blocks that add in the norm's own pass (GPT.may_add_later) hold one of them less, where no peak was measured
        held += 2 * self.x_rounded + self.statistics
        # of that result, for its weight's gradient
        held += self.x_rounded if self.run.mixed and not self.levers.mlp_chunk else 0
        return held + (self.up_weight + self.down_weight) * self.run.weight_bytes  # gradients, handed over at the end

    def _chunk(self, tokens: int) -> int:
        """(chunk, ffn_dim), one operand, with `tokens` left."""
        return min(self.levers.mlp_chunk or self.run.tokens, tokens) * self.model.ffn_dim * self.run.compute_bytes

    def _dequantised(self) -> int:
        """torchao's steps from codes of 4 bits to one matrix, the largest of a block; 64-bit indices are most of it."""
        if self.run.adapters is None or not self.run.adapters.quantised:
            return 0
        matrices = (self.qkv_weight, self.out_weight, self.up_weight, self.down_weight)
        return max(matrices) * DEQUANTISATION_BYTES

    def _ffn_rounded(self) -> int:
        return (self.up_weight + self.down_weight) * self.run.compute_bytes if self.run.mixed else 0


def keeps_up(plan: Plan) -> bool:
    """Whether chunks of the FFN's first product are kept; those of adapters and GeGLU are torch's checkpoints."""
    return plan.levers.offloads_all and plan.run.adapters is None and plan.model.activation != "geglu"
