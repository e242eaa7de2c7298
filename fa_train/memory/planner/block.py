"""Computes the sizes of the tensors that one decoder block allocates and saves."""

from fa_kernels.flash_attention.backend import backward_workspace
from fa_train.memory.offload import worth_a_copy
from fa_train.memory.planner.plan import LINEARS, Plan
from fa_train.parallel.context.traffic import STEPS


class BlockBytes:
    """The sizes of one decoder block's tensors in bytes, and the peak bytes of each part of the block.

    Example: the bytes per token that autograd saves in a compiled block of llama_1b, with trainer.precision=bf16-mixed:

        attention_kept = 22660: the block's input in fp32 (8192), the norm's statistics (4) and output in bf16 (4096),
                                q, k and v (6144), attention's output (4096) and lse (128)
        ffn_kept       = 40964: the output projection's result (4096), the norm's statistics (4) and output (4096),
                                and up(x), with gates and values (32768)

    With checkpointing="selective", `saved` is 12416: the block's input, attention's output and lse.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.model, self.levers, self.run = plan, plan.model, plan.levers, plan.run
        model, run = plan.model, plan.run
        t, c = run.tokens, run.compute_bytes  # most sizes below are t * (number of channels) * (bytes per element)
        self.eager = run.eager
        self.x = t * model.dim * run.weight_bytes  # hidden states between blocks, or their gradient
        self.x_rounded = t * model.dim * c
        self.q, self.kv = t * model.query_dim * c, t * model.kv_dim * c
        self.q_full, self.kv_full = t * model.query_dim * 4, t * model.kv_dim * 4
        self.qkv = self.q + 2 * self.kv
        self.lse = t * model.heads.query * 4
        self.ffn_hidden, self.projected = t * model.ffn_dim * c, t * model.up_dim * c
        # for each row, an RMSNorm saves one fp32 value, and a LayerNorm saves two
        norm_statistics = 2 if model.norm == "layernorm" else 1
        self.statistics = t * 4 * norm_statistics
        # whether each block leaves its last residual addition to the next block (GPT.may_add_later)
        self.adds_later = not self.eager and self.levers.checkpointing == "none" and self.levers.offload is not True
        # An OffsetRMSNorm saves its input in fp32 in eager code, and its output in compiled code. The saved output has
        # x's dtype with activation checkpointing, and otherwise autocast's dtype.
        is_offset = model.norm == "offset_rmsnorm"
        self.norm_input = t * model.dim * 4 if is_offset and self.eager else self.x
        self.converts = self.norm_input > self.x  # whether norms convert their input to fp32
        in_dtype_of_x = is_offset and not self.eager and self.levers.checkpointing != "none"
        self.normed = self.x if in_dtype_of_x else self.x_rounded
        if is_offset and self.adds_later:
            self.normed += model.dim * 4  # the sum 1 + weight
        # Compiled code saves attention's output in any case, so attention's post-norm does not save its input.
        of_post_norm = self.norm_input if is_offset and self.eager else self.x_rounded
        self.attention_post_norm = self.ffn_post_norm = 0
        self.post_norms_convert = model.extras.post_norms and is_offset and self.eager and c != 4  # to fp32
        if model.extras.post_norms:
            self.attention_post_norm = (of_post_norm if self.eager else 0) + self.statistics
            self.ffn_post_norm = of_post_norm + self.statistics
            if self.adds_later and (self.levers.mlp_chunk or model.activation == "swiglu"):
                # found by simulation, not measured; without FFN chunks, only torch 2.11 holds this tensor
                self.attention_post_norm += self.x_rounded
        self.qk_statistics = t * (model.heads.query + model.heads.kv) * 4 * norm_statistics
        # with FSDP2, a block's gathered weights and their gradients have autocast's dtype
        self.rounds_weights = run.mixed and run.ranks == 1
        self.gradient_bytes = c if run.ranks > 1 else run.weight_bytes
        self.qkv_weight, self.out_weight, self.up_weight, self.down_weight = model.block_matrices
        a = run.adapters
        # With frozen weights, autograd saves the input of a linear layer only if the layer has an adapter.
        self.saves_input = {name: a is None or name in a.adapted for name in LINEARS}
        self.plain_ffn = a is None or a.plain_ffn
        self.is_quantized = a is not None and a.quantized
        self.attention_adapters = (t * a.attention_rank + a.attention_joined) * c if a else 0
        self.joined_adapters = a.ffn_joined * c if a else 0
        self.ffn_adapters = t * a.ffn_rank * c + self.joined_adapters if a else 0

    def rounded_weights(self) -> int:
        """Returns the bytes of autocast's weight copies that autograd keeps.

        The copies of a tiled FFN's weights are not counted, because a tiled FFN frees them at the end of its forward
        pass.
        """
        if not self.rounds_weights or self.is_quantized:
            return 0
        ffn = 0 if self.levers.mlp_chunk else self.up_weight + (0 if self.plain_ffn else self.down_weight)
        return (self.qkv_weight + self.out_weight + ffn) * self.run.compute_bytes

    def rounded_down(self) -> int:
        """Returns the bytes of autocast's copy of the FFN's last weight, which the backward pass makes again."""
        if not self.plain_ffn or self.levers.mlp_chunk or not self.rounds_weights:
            return 0
        return self.down_weight * self.run.compute_bytes

    def attention_kept(self) -> int:
        """Returns the bytes that the attention half of the block saves, including the block's input."""
        kept = self.norm_input + self.statistics + self.qkv + self.q + self.lse + self.attention_adapters
        kept += (self.normed if self.saves_input["qkv"] else 0) + self.attention_post_norm
        if self.converts and self.levers.checkpointing != "none":
            kept += self.x  # activation checkpointing also keeps the block's input before its conversion to fp32
        if self.model.qk_norm:
            kept += self.q + self.kv  # without qk_norm, q and k share a buffer with v
            kept += self.qk_statistics
            kept += self.q_full + self.kv_full if (self.run.mixed and self.eager) or self.converts else 0
        return kept

    def ffn_kept(self) -> int:
        """Returns the bytes that the FFN half of the block saves.

        Eager code saves the sum of the block's input and attention's output. Compiled code saves only attention's
        output, and adds it to the block's input again in the backward pass.
        """
        kept = (self.norm_input if self.eager else self.x_rounded) + self.statistics + self.ffn_post_norm
        kept += self.normed if self.saves_input["up"] or self.levers.mlp_chunk else 0
        if self.levers.mlp_chunk and not keeps_up(self.plan):
            return kept + self.joined_adapters
        return kept + self.projected + self.activated_kept() + self.ffn_adapters

    def activated(self) -> int:
        """Returns the bytes of the activations.

        In eager mode, the gate of a gated activation needs a second tensor of the same size.
        """
        return self.ffn_hidden * (2 if self.model.gated and self.eager else 1)

    def activated_kept(self) -> int:
        """Returns the bytes of saved activations. RecomputedFFN computes the activations again in the backward pass."""
        if self.plain_ffn:
            return 0
        return self.activated() - (0 if self.saves_input["down"] else self.ffn_hidden)

    def kept(self) -> int:
        """Returns the bytes that autograd saves for a block without activation checkpointing."""
        return self.attention_kept() + self.ffn_kept()

    def saved(self) -> int:
        """Returns the bytes that a block saves for its backward, including bytes that are offloaded to the host."""
        if self.levers.checkpointing == "none":
            return self.kept()
        return self.x + (self.q + self.lse if self.levers.checkpointing == "selective" else 0)

    def offloaded(self) -> int:
        """Returns how many of a block's saved bytes are offloaded to the host."""
        if not self.levers.offloads_all:
            # Without checkpointing, a norm that converts x to fp32 saves its fp32 copy of x. x itself is not saved, and
            # therefore not offloaded.
            is_saved = not self.converts or self.levers.checkpointing != "none"
            return self.x if self.levers.offload and is_saved else 0
        stays = (4 if self.model.extras.post_norms else 2) * self.statistics + self.lse + self.attention_adapters
        stays += self.joined_adapters if self.levers.mlp_chunk else self.ffn_adapters
        if self.model.qk_norm:
            stays += self.qk_statistics + (0 if worth_a_copy(self.kv, self.run.tokens, self.model.dim) else self.kv)
        return self.kept() - stays

    def forward_peaks(self) -> dict[str, int]:
        """Returns the peak bytes in each part of the block's forward, including the tensors that the block saves."""
        ffn = self._ffn_forward()
        if self.levers.checkpointing != "none":  # with checkpointing, each tensor is freed after its last use
            activated = self.projected + self.activated()
            ffn = self.saved() + 2 * self.x + (self._chunk_forward() if self.levers.mlp_chunk else activated)
        return {"attention": self._attention_forward(), "FFN": ffn}

    def backward_peaks(self) -> dict[str, int]:
        """Returns the peak bytes in each part of the block's backward, including the forward if it is recomputed."""
        recomputed = {}
        if self.levers.checkpointing != "none":
            waiting = self.x  # the gradient of the block's output
            if self.post_norms_convert:
                waiting += self.norm_input  # the gradient of the post-norm's output in fp32
            elif self.run.mixed:
                waiting += self.x_rounded
            ffn = self.kept() + self._argument()  # the activations and the last matmul are not recomputed
            if self.model.extras.post_norms:  # the output of the last matmul is the post-norm's input
                ffn = self._ffn_forward()
            parts = {"attention": self._attention_forward(), "FFN": ffn}
            recomputed = {f"{part} again": waiting + nbytes for part, nbytes in parts.items()}
        return recomputed | {
            "FFN's backward": self._ffn_backward(),
            "norm's backward": self._norm_backward(),
            "attention's backward": self._attention_backward(),
        }

    def _argument(self) -> int:
        """Returns the bytes of a norm's fp32 output.

        A norm's fp32 output stays in memory while attention or the FFN uses the rounded copy of this output.
        """
        return self.x if self.run.mixed and self.eager else 0

    def _attention_forward(self) -> int:
        """Returns the peak bytes of attention's forward, including its output projection."""
        groups = self.run.head_groups
        if groups == 1:  # attention's output does not exist yet while keys are gathered
            gathering, in_kernel = self._gathering() - self.q - self.lse, self._gathered()
        else:  # the output of each group of heads is copied into the full output
            gathering, in_kernel = self._gathering(), self._gathered() + (self.q + self.lse) // groups
        return self.attention_kept() + self._argument() + max(self.x_rounded, in_kernel, gathering)

    def _gathered(self) -> int:
        """Returns an upper bound on the bytes of gathered keys and values for one group of heads.

        If the stream is one document, the rank with the last chunk gathers the keys of the whole stream. No rank
        gathers more keys than the stream has. The number of gathered rows is rounded up (traffic.buffer_rows). The
        result is 0 if ranks do not share a stream.
        """
        if self.run.context == 1:
            return 0
        keys = 2 * self.kv * self.run.context // self.run.head_groups
        return keys + keys // STEPS

    def _gathering(self) -> int:
        """Returns an upper bound on the peak bytes while keys and values are gathered.

        The bound counts the gathered rows, a copy of the rows that this rank sends, and a copy of the rows that this
        rank receives.
        """
        own = 2 * self.kv // self.run.head_groups
        return self._gathered() + 2 * (self._gathered() - own) if self.run.context > 1 else 0

    def _ffn_forward(self) -> int:
        held = self.kept() - self.ffn_post_norm + self._argument()
        if self.levers.mlp_chunk or not self.plain_ffn:
            peak = held + self.x_rounded + self._chunk_forward()
        else:
            peak = held + max(self.activated(), self.ffn_hidden + self.x_rounded)
        if self.post_norms_convert:  # the FFN's output, and the post-norm's output in fp32
            ffn_input = self.x if self.converts else 0
            peak = max(peak, self.kept() + ffn_input + self.x_rounded + self.norm_input)
        return peak

    def _chunk_forward(self) -> int:
        """Returns the bytes of temporary tensors in a tiled FFN's forward, including its rounded weights."""
        if not self.levers.mlp_chunk:
            return 0
        # GELU overwrites its input, unless the input is saved
        operands = 1 if keeps_up(self.plan) or not self.model.gated else 3
        return self._ffn_rounded() + self._chunk() * operands

    def _ffn_backward(self) -> int:
        """Returns the peak bytes of the FFN's backward, which frees what the post-norm has saved."""
        held = self.kept() - self.ffn_post_norm + self.x
        recomputes_later = not self.run.adapters or self.levers.mlp_chunk
        holds_more = self.levers.checkpointing == "full" and self.levers.mlp_chunk
        if self.levers.checkpointing == "selective" and not self.eager and recomputes_later:
            held -= self.attention_kept() - self.saved()  # compiled code recomputes q, k and v after the FFN's backward
            holds_more = True
        if holds_more and not self.eager and self.model.extras.post_norms:
            # fitted to peaks on an H200 with torch 2.11; only one peak was measured with full checkpointing
            held += 2 * self.x_rounded
        # the size of the gradient of the FFN's output, or 0 if the gradient of the block's output is the same tensor
        rounded = self.x_rounded if self.run.mixed or self.model.extras.post_norms else 0
        if not self.plain_ffn and not self.levers.mlp_chunk:
            # with adds_later, autograd holds the gradient of the FFN's output until the block's backward ends
            held += rounded if self.adds_later else 0
            return held + self._gradients_of_ffn()
        if not self.levers.mlp_chunk:  # the backward pass recreates autocast's copy of the FFN's last weight
            recomputed = self.activated() + self.rounded_down()
            d_weight = 0 if self.run.adapters else self.down_weight * self.run.compute_bytes
            of_operand = rounded + recomputed + self.ffn_hidden + d_weight
            # compiled code holds the gradient of the FFN's last weight until the block's backward ends
            in_place = self.eager and self.run.gradients_in_place and self.run.ranks == 1
            its_own = 0 if in_place or self.run.adapters else self.down_weight * self.gradient_bytes
            of_factors = self.ffn_hidden * (4 if self.eager else 3) + its_own if self.model.gated else 0
            return held + max(of_operand, of_factors)
        weights = 0 if self.run.adapters else (self.up_weight + self.down_weight) * 4
        adapters = self.run.adapters.ffn_joined * 4 if self.run.adapters else 0  # fp32 sums of the adapters' gradients
        chunk = self._chunk()
        d_projected = (2 if self.model.gated else 1) * chunk  # the gradient of up(x), which overwrites up(x)
        chunks = d_projected + chunk
        if self.run.compute_bytes == 4 and weights:  # only fp32 products need a temporary tensor
            chunks = max(self.down_weight * 4 + chunks, self.up_weight * 4 + d_projected)
        if self.gradient_bytes != 4:  # the fp32 sums of weight gradients are rounded after the loop
            chunks = max(chunks, weights // 2)
        if self.run.compute_bytes != 4:  # the sums of the adapters' gradients are rounded after the loop
            chunks = max(chunks, adapters // 2)
        return held + rounded + self.x_rounded + weights + adapters + self._ffn_rounded() + chunks

    def _gradients_of_ffn(self) -> int:
        """Returns the bytes that the backward of an FFN with frozen weights allocates, besides its saved tensors.

        If `down` has an adapter, the activations get two gradients: one through the frozen weight, and one through
        LoRA's A. The sum of the two gradients is a third tensor. The activations are freed before the sum exists.
        """
        hidden, x_rounded = self.ffn_hidden, self.x_rounded
        is_adapted = self.saves_input["down"]
        dequantized = self.run.compute_bytes if self.is_quantized else 0  # bytes per element of a dequantized weight
        of_activations = hidden + max(hidden, self.down_weight * dequantized) + (hidden if is_adapted else 0)
        if not self.eager and self.levers.checkpointing == "full" and self.is_quantized:
            # up(x) is computed again after the gradients of the activations; adding LoRA's term makes another tensor
            of_activations += hidden if is_adapted and self.saves_input["up"] else 0
        # the gradients of the activations, of the gates and of the values
        of_factors = 3 * hidden if self.model.gated else 0
        if self.model.gated and is_adapted and self.adds_later:
            # one kernel reads both gradients of the activations, and writes the gradients of the gates and values
            of_factors += hidden
        of_input = x_rounded + max(x_rounded, self.up_weight * dequantized) - (hidden if self.model.gated else 0)
        return max(of_activations, of_factors, of_input) - (hidden if is_adapted else 0)

    def _norm_backward(self) -> int:
        """Returns the peak bytes while the backward of the FFN's norm runs.

        The peak includes the norm's input and three gradients: those of the norm's output, its input and the residual.
        """
        between = self.x if self.eager else self.x_rounded
        return self.attention_kept() + between + self.statistics + 3 * self.x

    def _attention_backward(self) -> int:
        """Returns the peak bytes of attention's backward, including workspaces and the gradients of q, k and v."""
        held = self.attention_kept() + self.x + self.q
        heads = self.model.heads
        workspace = backward_workspace(heads.dim, self.run.compute_dtype, self.model.extras.softcap, self.run.arch)
        workspace *= self.run.tokens * heads.query
        held += 0 if self.eager else self._held_by_compiled_code()
        if self.run.context == 1:
            return held + workspace + self.qkv
        groups = self.run.head_groups
        d_own = (self.q + 2 * self.kv) // groups  # the gradients of this rank's q, k and v for one group of heads
        # the gathered keys and values, their gradients, and the gradient of q
        in_kernel = 2 * self._gathered() + (self.q + workspace) // groups
        if groups > 1:
            held += self.qkv  # the gradients of q, k and v for all heads
            held += 2 * self.q // groups  # contiguous copies of a group's output and of its gradient
        return held + max(self._gathering(), in_kernel, self._gathering() + d_own)

    def _held_by_compiled_code(self) -> int:
        """Returns the bytes that only compiled code, and not eager code, holds during attention's backward.

        The formula assumes the order of operations that inductor in torch 2.11 chooses on an H200.
        """
        held = self.x  # a compiled block is one autograd node, which holds the gradient of the block's output
        if self.run.adapters:
            return held
        # The block's last kernel computes the weight gradients of both norms, so two inputs of this kernel stay in
        # memory. If GPT.may_add_later is true, the formula counts one tensor more than the block holds.
        held += 2 * self.x_rounded + self.statistics
        # attention's output is needed for the weight gradient of the output projection
        held += self.x_rounded if self.run.mixed and not self.levers.mlp_chunk else 0
        return held + (self.up_weight + self.down_weight) * self.gradient_bytes  # weight gradients

    def _chunk(self) -> int:
        """Returns the bytes of a (chunk, ffn_dim) tensor."""
        tokens = self.run.tokens
        return min(self.levers.mlp_chunk or tokens, tokens) * self.model.ffn_dim * self.run.compute_bytes

    def _ffn_rounded(self) -> int:
        """Returns the bytes of temporary copies of the FFN's weights: dequantized, or rounded by autocast."""
        copies = self.rounds_weights or self.is_quantized
        return (self.up_weight + self.down_weight) * self.run.compute_bytes if copies else 0


def keeps_up(plan: Plan) -> bool:
    """Returns whether a tiled FFN saves the output of its first matmul. Without offload="all", the result is False."""
    return plan.levers.offloads_all and (plan.run.adapters is None or plan.run.adapters.plain_ffn)
