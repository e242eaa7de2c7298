"""Computes the sizes of the tensors that the code of one decoder block allocates and saves."""

from fa_kernels.flash_attention.backend import backward_workspace
from fa_train.memory.offload import worth_a_copy
from fa_train.memory.planner.plan import Plan

DEQUANTIZATION_BYTES = 20  # temporaries per element when torchao 0.18 dequantizes to fp32


class Block:
    """The sizes of one decoder block's tensors in bytes, and how many of them exist at the same time."""

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
        # fp32 values that a norm saves per row: the deviation, and for LayerNorm the mean too
        norm_statistics = 2 if model.norm == "layernorm" else 1
        self.statistics = t * 4 * norm_statistics
        self.qk_statistics = t * (model.heads.query + model.heads.kv) * 4 * norm_statistics
        self.qkv_weight, self.out_weight, self.up_weight, self.down_weight = model.block_matrices
        a = run.adapters
        self.attention_adapters = (t * a.attention_rank + a.attention_joined) * c if a else 0
        self.ffn_adapters = (t * a.ffn_rank + a.ffn_joined) * c if a else 0

    def rounded_weights(self) -> int:
        """Returns the bytes of the weight copies that autocast makes and autograd keeps.

        A tiled FFN frees its copies. Sharded blocks need no copies, because FSDP gathers them in autocast's dtype.
        """
        if not self.run.mixed or self.run.ranks > 1 or (self.run.adapters and self.run.adapters.quantized):
            return 0
        ffn = 0 if self.levers.mlp_chunk else self.up_weight + (self.down_weight if self.run.adapters else 0)
        return (self.qkv_weight + self.out_weight + ffn) * self.run.compute_bytes

    def rounded_down(self) -> int:
        """Returns the bytes of autocast's copy of the FFN's last weight, which the backward makes again."""
        if self.run.adapters or self.levers.mlp_chunk or self.run.ranks > 1 or not self.run.mixed:
            return 0
        return self.down_weight * self.run.compute_bytes

    def attention_kept(self) -> int:
        """Returns the bytes that are saved from the block's input to attention's output."""
        kept = self.x + self.statistics + self.x_rounded + self.qkv + self.q + self.lse + self.attention_adapters
        if self.model.qk_norm:
            kept += self.q + self.kv  # without qk_norm, q and k are views of the buffer that holds v
            kept += self.qk_statistics
            kept += self.q_full + self.kv_full if self.run.mixed and self.eager else 0
        return kept

    def ffn_kept(self) -> int:
        """Returns the bytes that are saved from the hidden state after attention to the FFN's output.

        Compiled code does not save this hidden state, but recomputes it as the sum of its two terms.
        """
        kept = (self.x if self.eager else self.x_rounded) + self.statistics + self.x_rounded
        if self.levers.mlp_chunk and not keeps_up(self.plan):
            # torch's chunks are slices of the norm's unrounded output
            return kept + (self.x - self.x_rounded if self.is_torch_chunked() else 0)
        return kept + self.up + self.activated_kept() + self.ffn_adapters

    def activated(self) -> int:
        """Returns the bytes of the activations. In eager mode, gated activations need a second tensor for the gate."""
        return self.hidden * (2 if self.model.gated and self.eager else 1)

    def activated_kept(self) -> int:
        """Returns the bytes of saved activations. Only adapters save them; otherwise the backward recomputes them."""
        return self.activated() if self.run.adapters else 0

    def kept(self) -> int:
        """Returns the bytes that autograd saves for a block without activation checkpointing."""
        return self.attention_kept() + self.ffn_kept()

    def saved(self) -> int:
        """Returns the bytes that a block saves from its forward to its backward, on the GPU or the host."""
        if self.levers.checkpointing == "none":
            return self.kept()
        return self.x + (self.q + self.lse if self.levers.checkpointing == "selective" else 0)

    def is_torch_chunked(self) -> bool:
        """Returns whether the FFN is fa_train.models.ffn.TorchChunkedFFN."""
        return self.levers.mlp_chunk is not None and (self.run.adapters is not None or self.model.activation == "geglu")

    def offloaded(self) -> int:
        """Returns the bytes of a block that are offloaded to the host."""
        if not self.levers.offloads_all:
            return self.x if self.levers.offload else 0
        stays = 2 * self.statistics + self.lse + self.attention_adapters
        stays += 0 if self.levers.mlp_chunk else self.ffn_adapters
        if self.model.qk_norm:
            stays += self.qk_statistics + (0 if worth_a_copy(self.kv, self.run.tokens, self.model.dim) else self.kv)
        return self.kept() - stays

    def forward(self) -> dict[str, int]:
        """Returns the peak bytes in each part of the first forward, including the tensors that the block saves."""
        ffn = self._ffn_forward()
        if self.levers.checkpointing != "none":  # tensors are freed after their last use
            activated = self.up + self.activated()
            ffn = self.saved() + 2 * self.x + (self._chunk_forward() if self.levers.mlp_chunk else activated)
        return {"attention": self._attention_forward(), "FFN": ffn}

    def backward(self) -> dict[str, int]:
        """Returns the peak bytes in each part of the backward, including the recomputed forward if there is one."""
        recomputed = {}
        if self.levers.checkpointing != "none":
            waiting = self.x + (self.x_rounded if self.run.mixed else 0)  # the gradient of the block's output
            ffn = self.kept() + self._argument()  # recomputation stops before the activations or the last product
            parts = {"attention": self._attention_forward(), "FFN": ffn}
            recomputed = {f"{part} again": waiting + nbytes for part, nbytes in parts.items()}
        return recomputed | {
            "FFN's backward": self._ffn_backward(),
            "norm's backward": self._norm_backward(),
            "attention's backward": self._attention_backward(),
        }

    def _argument(self) -> int:
        """Returns the bytes of a norm's fp32 output, which Python holds while attention or FFN use a rounded copy."""
        return self.x if self.run.mixed and self.eager else 0

    def _attention_forward(self) -> int:
        """Returns the peak bytes of attention's forward, including its output projection."""
        return self.attention_kept() + self._argument() + self.x_rounded

    def _ffn_forward(self) -> int:
        held = self.kept() + self._argument()
        if self.levers.mlp_chunk or self.run.adapters:
            return held + self.x_rounded + self._chunk_forward()
        return held + max(self.activated(), self.hidden + self.x_rounded)

    def _chunk_forward(self) -> int:
        """Returns the bytes of rounded weights and of one chunk's temporaries in a tiled FFN's forward."""
        if not self.levers.mlp_chunk:
            return 0
        # GELU works in place unless its input is kept
        operands = 1 if keeps_up(self.plan) or not self.model.gated else 3
        if self.is_torch_chunked():
            operands = 4 if self.model.gated else 2
        return self._ffn_rounded() + self._chunk(self.run.tokens) * operands

    def _ffn_backward(self) -> int:
        """Returns the peak bytes of the FFN's backward."""
        held = self.kept() + self.x
        if self.levers.checkpointing == "selective" and not self.eager and not self.run.adapters:
            held -= self.attention_kept() - self.saved()  # compiled code recomputes q, k and v later
        rounded = self.x_rounded if self.run.mixed else 0  # the gradient of the FFN's output
        if self.run.adapters:  # the activations have two gradients: through the frozen weight, and through A
            chunk = self._chunk(self.run.tokens)
            if not self.levers.mlp_chunk:
                return held + 2 * chunk + self._dequantized()
            recomputed = (5 if self.model.gated else 3) * chunk + self._ffn_rounded() + self.ffn_adapters
            return held + rounded + recomputed + 2 * chunk + self._dequantized()
        if not self.levers.mlp_chunk:  # recomputes the activations and autocast's copy of the last weight
            recomputed = self.activated() + self.rounded_down()
            of_operand = rounded + recomputed + self.hidden + self.down_weight * self.run.compute_bytes
            # the gradient of the last weight, which compiled code returns only at the end of the block
            its_own = 0 if self.eager and self.run.accumulates else self.down_weight * self.run.weight_bytes
            of_factors = self.hidden * (4 if self.eager else 3) + its_own if self.model.gated else 0
            return held + max(of_operand, of_factors)
        weights = (self.up_weight + self.down_weight) * 4
        chunk = self._chunk(self.run.tokens)
        if self.is_torch_chunked():  # recomputed chunk, gradients of its tensors and of the weights
            return held + rounded + 7 * chunk + self._ffn_rounded() + weights
        d_projected = (2 if self.model.gated else 1) * chunk  # it overwrites its operand, and so do the activations
        chunks = d_projected + chunk
        if self.run.compute_bytes == 4:  # products in lower precision are accumulated without a temporary
            chunks = max(self.down_weight * 4 + chunks, self.up_weight * 4 + d_projected)
        if self.run.weight_bytes != 4:  # the sums are rounded after the loop
            chunks = max(chunks, weights // 2)
        return held + rounded + self.x_rounded + weights + self._ffn_rounded() + chunks

    def _norm_backward(self) -> int:
        """Returns the peak bytes of the backward of the FFN's norm.

        The peak includes the norm's input, and the gradients of its output, of its input and of the residual.
        """
        between = self.x if self.eager else self.x_rounded
        return self.attention_kept() + between + self.statistics + 3 * self.x

    def _attention_backward(self) -> int:
        """Returns the peak bytes of attention's backward: gradients of q, k and v, and the kernels' workspace."""
        held = self.attention_kept() + self.x + self.q
        heads = self.model.heads
        workspace = backward_workspace(heads.dim, self.run.compute_dtype, self.model.extras.softcap, self.run.arch)
        workspace *= self.run.tokens * heads.query
        return held + workspace + self.qkv + (0 if self.eager else self._held_by_compiled_code())

    def _held_by_compiled_code(self) -> int:
        """Returns the bytes that compiled code still holds during attention's backward, but eager code has freed.

        The order of operations is that of torch 2.11's inductor on an H200.
        """
        held = self.x  # the gradient of the block's output, because the compiled block is one autograd node
        if self.run.adapters:
            return held
        # The last kernel computes the weight gradients of both norms from attention's projected output and the FFN's
        # input gradient. Blocks with GPT.may_add_later hold one tensor less, but no peak was measured for them.
        held += 2 * self.x_rounded + self.statistics
        # attention's output, for the gradient of the output projection
        held += self.x_rounded if self.run.mixed and not self.levers.mlp_chunk else 0
        return held + (self.up_weight + self.down_weight) * self.run.weight_bytes  # gradients, returned at the end

    def _chunk(self, tokens: int) -> int:
        """Returns the bytes of one (chunk, ffn_dim) tensor, or of (tokens, ffn_dim) if that is smaller."""
        return min(self.levers.mlp_chunk or self.run.tokens, tokens) * self.model.ffn_dim * self.run.compute_bytes

    def _dequantized(self) -> int:
        """Returns the bytes that torchao needs to dequantize the largest matrix of a block, mostly 64-bit indices."""
        if self.run.adapters is None or not self.run.adapters.quantized:
            return 0
        matrices = (self.qkv_weight, self.out_weight, self.up_weight, self.down_weight)
        return max(matrices) * DEQUANTIZATION_BYTES

    def _ffn_rounded(self) -> int:
        return (self.up_weight + self.down_weight) * self.run.compute_bytes if self.run.mixed else 0


def keeps_up(plan: Plan) -> bool:
    """Returns whether a tiled FFN keeps the output of its first matmul, which it does only with offload="all"."""
    return plan.levers.offloads_all and plan.run.adapters is None and plan.model.activation != "geglu"
