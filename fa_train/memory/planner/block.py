"""The tensors of one decoder block, read off the code, and how many of them live at a time."""

from fa_train.memory.offload import worth_a_copy
from fa_train.memory.planner.shape import Shape

DEQUANTISATION_BYTES = 20  # of an element while its code is looked up; fp32, torchao 0.18, by the operators


class Block:
    """The tensors of one decoder block, in bytes, and how many of them live at a time."""

    def __init__(self, s: Shape) -> None:
        t, c = s.tokens, s.compute_bytes
        self.shape, self.eager = s, s.eager
        self.x = t * s.dim * s.weight_bytes  # a hidden state between blocks, and its gradient
        self.x_rounded = t * s.dim * c
        self.q, self.kv = t * s.query_dim * c, t * s.kv_dim * c
        self.q_full, self.kv_full = t * s.query_dim * 4, t * s.kv_dim * 4
        self.qkv = self.q + 2 * self.kv
        self.lse = t * s.n_heads * 4
        self.hidden, self.up = t * s.ffn_dim * c, t * s.up_dim * c
        self.statistics = t * 4 * s.norm_statistics
        self.qk_statistics = t * (s.n_heads + s.n_kv_heads) * 4 * s.norm_statistics
        self.qkv_weight, self.out_weight = s.dim * (s.query_dim + 2 * s.kv_dim), s.query_dim * s.dim
        self.up_weight, self.down_weight = s.dim * s.up_dim, s.ffn_dim * s.dim
        a = s.adapters
        self.attention_adapters = (t * a.attention_rank + a.attention_joined) * c if a else 0
        self.ffn_adapters = (t * a.ffn_rank + a.ffn_joined) * c if a else 0

    def rounded_weights(self) -> int:
        """Autocast's copies that autograd keeps; the FFN by chunks makes its own and drops them.

        Blocks that are gathered from several ranks are gathered in autocast's dtype.
        """
        s = self.shape
        if not s.mixed or s.ranks > 1 or (s.adapters and s.adapters.quantised):
            return 0
        ffn = 0 if s.mlp_chunk else self.up_weight + (self.down_weight if s.adapters else 0)
        return (self.qkv_weight + self.out_weight + ffn) * s.compute_bytes

    def rounded_down(self) -> int:
        """The copy of the FFN's last weight, which the backward makes again as it does the activations."""
        s = self.shape
        return 0 if s.adapters or s.mlp_chunk or s.ranks > 1 or not s.mixed else self.down_weight * s.compute_bytes

    def attention_kept(self) -> int:
        """From the block's input to attention's result."""
        s = self.shape
        kept = self.x + self.statistics + self.x_rounded + self.qkv + self.q + self.lse + self.attention_adapters
        if s.qk_norm:
            kept += self.q + self.kv  # else views of the buffer in which values are, rotated or not
            kept += self.qk_statistics
            kept += self.q_full + self.kv_full if s.mixed and self.eager else 0
        return kept

    def ffn_kept(self) -> int:
        """From the hidden state between attention and FFN, which torch.compile adds up again, to the FFN's result."""
        kept = (self.x if self.eager else self.x_rounded) + self.statistics + self.x_rounded
        if self.shape.mlp_chunk and not keeps_up(self.shape):
            return kept + (self.x - self.x_rounded if self.torchs_chunks() else 0)  # chunks of the norm's own result
        return kept + self.up + self.activated_kept() + self.ffn_adapters

    def activated(self) -> int:
        """The FFN's operand of its last product; SwiGLU's silu too, which torch.compile does not write."""
        return self.hidden * (2 if self.shape.gated and self.eager else 1)

    def activated_kept(self) -> int:
        """Those of the first forward; the backward computes them again, but for adapters."""
        return self.activated() if self.shape.adapters else 0

    def kept(self) -> int:
        """What autograd keeps of a block that computes nothing again."""
        return self.attention_kept() + self.ffn_kept()

    def boundary(self) -> int:
        """What is kept of a block from its forward to its backward, on the GPU or on the host."""
        if self.shape.checkpointing == "none":
            return self.kept()
        return self.x + (self.q + self.lse if self.shape.checkpointing == "selective" else 0)

    def torchs_chunks(self) -> bool:
        """Whether chunks of the FFN pass through torch's own operators and checkpoints (fa_train.models.gpt)."""
        s = self.shape
        return s.mlp_chunk is not None and (s.adapters is not None or s.activation == "geglu")

    def sent(self) -> int:
        """What of it waits on the host."""
        if not self.shape.everything:
            return self.x if self.shape.offload else 0
        s = self.shape
        stays = 2 * self.statistics + self.lse + self.attention_adapters + (0 if s.mlp_chunk else self.ffn_adapters)
        if s.qk_norm:
            stays += self.qk_statistics + (0 if worth_a_copy(self.kv, s.tokens, s.dim) else self.kv)
        return self.kept() - stays

    def forward(self) -> dict[str, int]:
        """The most at a time in each part of the first forward, the block's own tensors included."""
        ffn = self._ffn_forward()
        if self.shape.checkpointing != "none":  # nothing is kept for longer than it is read
            activated = self.up + self.activated()
            ffn = self.boundary() + 2 * self.x + (self._chunk_forward() if self.shape.mlp_chunk else activated)
        return {"attention": self._attention_forward(), "FFN": ffn}

    def backward(self) -> dict[str, int]:
        """The same of the backward, with the forward again where it is checkpointed."""
        again = {}
        if self.shape.checkpointing != "none":
            waiting = self.x + (self.x_rounded if self.shape.mixed else 0)  # the gradient of the block's result
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
        return self.x if self.shape.mixed and self.eager else 0

    def _attention_forward(self) -> int:
        """Until attention's result is projected."""
        return self.attention_kept() + self._argument() + self.x_rounded

    def _ffn_forward(self) -> int:
        held = self.kept() + self._argument()
        if self.shape.mlp_chunk or self.shape.adapters:
            return held + self.x_rounded + self._chunk_forward()
        return held + max(self.activated(), self.hidden + self.x_rounded)

    def _chunk_forward(self) -> int:
        """Rounded weights, and a chunk from its first product to its last."""
        if not self.shape.mlp_chunk:
            return 0
        # GELU's result takes the place of its argument, unless that is kept
        operands = 1 if keeps_up(self.shape) or not self.shape.gated else 3
        if self.torchs_chunks():
            operands = 4 if self.shape.gated else 2
        return self._ffn_rounded() + self._chunk(self.shape.tokens) * operands

    def _ffn_backward(self) -> int:
        """The gradient of the last product's operand; SwiGLU's, of its two factors; or a chunk's tensors."""
        s, held = self.shape, self.kept() + self.x
        if s.checkpointing == "selective" and not self.eager and not s.adapters:
            held -= self.attention_kept() - self.boundary()  # compiled code makes queries, keys and values after this
        rounded = self.x_rounded if s.mixed else 0  # the gradient of the FFN's result
        if s.adapters:  # that operand has a gradient through frozen weights and one through A, let go for the sum
            chunk = self._chunk(s.tokens)
            if not s.mlp_chunk:
                return held + 2 * chunk + self._dequantised()
            again = (5 if s.gated else 3) * chunk + self._ffn_rounded() + self.ffn_adapters
            return held + rounded + again + 2 * chunk + self._dequantised()
        if not s.mlp_chunk:  # the activations again, and autocast's copy of the last weight
            again = self.activated() + self.rounded_down()
            of_operand = rounded + again + self.hidden + self.down_weight * s.compute_bytes
            # the gradient of that weight, which compiled code hands over at its end
            its_own = 0 if self.eager and s.accumulates else self.down_weight * s.weight_bytes
            of_factors = self.hidden * (4 if self.eager else 3) + its_own if s.gated else 0
            return held + max(of_operand, of_factors)
        weights = (self.up_weight + self.down_weight) * 4
        chunk = self._chunk(s.tokens)
        if self.torchs_chunks():  # a chunk again, its operands' gradients, and the weights' of one precision and both
            return held + rounded + 7 * chunk + self._ffn_rounded() + weights
        d_projected = (2 if s.gated else 1) * chunk  # which, like the activations, takes the place of an operand
        chunks = d_projected + chunk
        if s.compute_bytes == 4:  # products of lower precisions are added up by one call
            chunks = max(self.down_weight * 4 + chunks, self.up_weight * 4 + d_projected)
        if s.weight_bytes != 4:  # the sums are rounded when the loop has ended
            chunks = max(chunks, weights // 2)
        return held + rounded + self.x_rounded + weights + self._ffn_rounded() + chunks

    def _norm_backward(self) -> int:
        """Of the FFN's norm: its input, the gradients of its result and input, and of the residual."""
        between = self.x if self.eager else self.x_rounded
        return self.attention_kept() + between + self.statistics + 3 * self.x

    def _attention_backward(self) -> int:
        """Hopper's kernels add up the gradient of queries in fp32."""
        s = self.shape
        held = self.attention_kept() + self.x + self.q
        on_hopper = s.compute_bytes == 2 and s.head_dim in (64, 96, 128)
        operator = self.lse * (3 if on_hopper else 1) + (self.q_full if on_hopper else 0) + self.qkv
        return held + operator + (0 if self.eager else self._held_by_compiled_code())

    def _held_by_compiled_code(self) -> int:
        """What eager code has let go by the time of attention's backward; as torch 2.11's inductor orders an H200's."""
        s = self.shape
        held = self.x  # the gradient of the block's result: all of the block is one node, whose argument it is
        if s.adapters:
            return held
        # one kernel at the end sums for both norms' weights: attention's projected result, the FFN's gradient of its x;
        # blocks that add in the norm's own pass (GPT.may_add_later) hold one of them less, where no peak was measured
        held += 2 * self.x_rounded + self.statistics
        held += self.x_rounded if s.mixed and not s.mlp_chunk else 0  # of that result, for its weight's gradient
        return held + (self.up_weight + self.down_weight) * s.weight_bytes  # gradients, handed over at the end

    def _chunk(self, tokens: int) -> int:
        """(chunk, ffn_dim), one operand, with `tokens` left."""
        s = self.shape
        return min(s.mlp_chunk or s.tokens, tokens) * s.ffn_dim * s.compute_bytes

    def _dequantised(self) -> int:
        """torchao's steps from codes of 4 bits to one matrix, the largest of a block; 64-bit indices are most of it."""
        s = self.shape
        if s.adapters is None or not s.adapters.quantised:
            return 0
        matrices = (self.qkv_weight, self.out_weight, self.up_weight, self.down_weight)
        return max(matrices) * DEQUANTISATION_BYTES

    def _ffn_rounded(self) -> int:
        return (self.up_weight + self.down_weight) * self.shape.compute_bytes if self.shape.mixed else 0


def keeps_up(shape: Shape) -> bool:
    """Whether chunks of the FFN's first product are kept; those of adapters and GeGLU are torch's checkpoints."""
    return shape.everything and shape.adapters is None and shape.activation != "geglu"
