"""A pre-norm decoder over one packed stream of tokens: GPT-2 (2019), Llama (arXiv:2302.13971) and what lies between."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fa_kernels.flash_attention.schedule import Schedule, build_schedule, causal_schedule
from fa_kernels.rmsnorm import add_rms_norm
from fa_kernels.rotary import rotate_heads, rotate_qkv
from fa_train.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from fa_train.memory.checkpointing import Checkpointing, run_block
from fa_train.memory.loss import IGNORE_INDEX, LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.memory.offload import Offload
from fa_train.memory.swiglu_down import swiglu_down, trains_plainly
from fa_train.memory.tiled_ffn import activate, tiled_mlp
from fa_train.models.attention import Attention, require_softcap, soft_capped
from fa_train.models.rope import RopeScaling, RotaryTable, document_positions, rope_scaling, rotary_table

Norm = Literal["rmsnorm", "layernorm", "offset_rmsnorm"]
Positions = Literal["rope", "learned", "none"]
Activation = Literal["swiglu", "gelu", "geglu"]
Init = Literal["gpt2", "llama"]
Value = TypeVar("Value")


class OffsetRMSNorm(nn.Module):
    """RMSNorm whose weight counts from 1, taken in fp32 (Gemma, arXiv:2403.08295)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> the same."""
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).type_as(x)


NormModule = nn.RMSNorm | nn.LayerNorm | OffsetRMSNorm


@dataclass(frozen=True)
class Family:
    """What single families of published checkpoints add to the decoder; by default nothing.

    qkv_bias, out_bias, ffn_bias: biases of these projections, None as the model's `bias` says (Qwen 2: qkv only).
    windows: tokens that a query of each layer sees, its own counted, None for all before it (Mistral, Gemma).
    rope_layers: whether each layer rotates queries and keys (SmolLM 3: not every fourth).
    local_rope_theta: theta of the layers with a window, whose frequencies are never scaled (Gemma 3).
    softmax_scale: of the scores, None is head_dim**-0.5. softcap: of the scaled scores; logit_softcap: of the logits;
    both 0 for none (Gemma 2).
    embedding_scale: what token embeddings are multiplied by, rounded to their dtype (Gemma: sqrt(dim)).
    post_norms: whether attention's and the FFN's outputs are normed before they are added (Gemma 2 and 3).
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    ffn_bias: bool | None = None
    windows: Sequence[PositiveInt | None] | None = None
    rope_layers: Sequence[bool] | None = None
    local_rope_theta: PositiveFloat | None = None
    softmax_scale: PositiveFloat | None = None
    softcap: NonNegativeFloat = 0.0
    logit_softcap: NonNegativeFloat = 0.0
    embedding_scale: PositiveFloat = 1.0
    post_norms: bool = False

    def __post_init__(self) -> None:
        for name, value in (("softcap", self.softcap), ("logit_softcap", self.logit_softcap)):
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"model.family.{name} must be at least 0, where 0 is none; got {value}")
        for window in self.windows or ():
            if window is not None and window < 1:
                raise ValueError(f"model.family.windows must be of at least 1 token or null; got {window}")


@dataclass(frozen=True)
class Origin:
    """The checkpoint that weights were read from, as an export needs it: its config.json and generation_config.json."""

    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    pretrained: str | None = None  # the folder or hub name that the user gave
    folder: Path | None = None  # where its files are


class GPT(nn.Module):
    """Decoder-only transformer; attention, loss and the blocks' memory levers (none by default) are handed in.

    Units: dim, ffn_dim, head_dim in channels; max_seq_len in tokens; rope_theta in tokens per radian of the slowest
    channel. head_dim None is dim / n_heads, n_kv_heads None is n_heads. max_seq_len is the length that the model is
    trained on; it bounds learned positions, and scaled RoPE starts from it. rope_theta is read for RoPE only.
    rope_scaling stretches RoPE's frequencies; its keys are those of `rope_parameters` in Hugging Face's config.json:
    rope_type (linear, dynamic, yarn, llama3), factor and so on.
    Raises: ValueError on sizes that do not divide or are not positive, on an unknown norm, positions, activation or
    init, on an attention that cannot do what the family needs, and on a family with a number of layers not its own.
    """

    origin: Origin | None = None  # set where weights come from a checkpoint
    drawn_hash: str | None = None  # of the frozen initial weights, if LoRA froze them and there is no origin

    def __init__(
        self,
        *,
        vocab_size: PositiveInt,
        n_layers: PositiveInt,
        dim: PositiveInt,
        n_heads: PositiveInt,
        n_kv_heads: PositiveInt | None,
        head_dim: PositiveInt | None,
        ffn_dim: PositiveInt,
        norm: Norm,
        norm_eps: NonNegativeFloat,
        positions: Positions,
        rope_theta: PositiveFloat,
        max_seq_len: PositiveInt | None,
        activation: Activation,
        bias: bool,
        qk_norm: bool,
        tied: bool,
        init: Init,
        attention: Attention,
        loss: LinearCrossEntropy,
        memory: Memory | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        family: Family | None = None,
    ) -> None:
        super().__init__()
        family = Family() if family is None else family
        _require_positive(vocab_size=vocab_size, n_layers=n_layers, dim=dim, n_heads=n_heads, ffn_dim=ffn_dim)
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        _require_positive(n_kv_heads=n_kv_heads)
        if n_heads % n_kv_heads:
            raise ValueError(f"model.n_heads must be a multiple of model.n_kv_heads; got {n_heads} and {n_kv_heads}")
        if head_dim is None and dim % n_heads:
            raise ValueError(
                f"model.dim must be a multiple of model.n_heads unless model.head_dim is set; got {dim} and {n_heads}"
            )
        head_dim = dim // n_heads if head_dim is None else head_dim
        _require_positive(head_dim=head_dim)
        _require_one_of(Norm, norm=norm)
        _require_one_of(Positions, positions=positions)
        _require_one_of(Activation, activation=activation)
        _require_one_of(Init, init=init)
        if positions == "rope" and head_dim % 2:
            raise ValueError(f"model.head_dim must be even for model.positions=rope; got {head_dim}")

        require_softcap(attention, family.softcap)

        self.vocab_size, self.n_layers, self.n_heads, self.head_dim = vocab_size, n_layers, n_heads, head_dim
        self.positions, self.rope_theta, self.max_seq_len, self.init = positions, rope_theta, max_seq_len, init
        self.family = family
        self.windows = _by_layer("windows", family.windows, n_layers, None)
        self.ropes = _ropes(self.windows, positions, rope_theta, rope_scaling, max_seq_len, family)
        make_norm = partial(_norm, norm, eps=norm_eps, bias=bias)
        everything = memory is not None and memory.offload == "all"
        # blocks that are computed again keep their input, which is then one tensor and not two; so it is if it leaves
        self.may_add_later = memory is None or (memory.checkpointing == "none" and memory.offload is not True)
        self.adds_later = False
        self.offload = Offload(n_layers, everything) if memory is not None and memory.offload else None

        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = None
        if positions == "learned":
            _require_positive(max_seq_len=max_seq_len)
            self.position_embedding = nn.Embedding(max_seq_len or 0, dim)
        self.blocks = nn.ModuleList(
            Block(
                attention_norm=make_norm(dim),
                attention=SelfAttention(
                    qkv=nn.Linear(dim, (n_heads + 2 * n_kv_heads) * head_dim, bias=_or(bias, family.qkv_bias)),
                    out=nn.Linear(n_heads * head_dim, dim, bias=_or(bias, family.out_bias)),
                    q_norm=make_norm(head_dim) if qk_norm else None,
                    k_norm=make_norm(head_dim) if qk_norm else None,
                    heads=[n_heads, n_kv_heads, n_kv_heads],
                    attention=attention,
                    softmax_scale=family.softmax_scale,
                    softcap=family.softcap,
                    checkpointed=memory is not None and memory.checkpointing != "none",
                ),
                attention_post_norm=make_norm(dim) if family.post_norms else None,
                ffn_norm=make_norm(dim),
                ffn=FeedForward(
                    dim,
                    ffn_dim,
                    activation,
                    _or(bias, family.ffn_bias),
                    chunk_size=memory.mlp_chunk if memory else None,
                    checkpointed=memory is not None and memory.checkpointing != "none",
                    keep=everything,
                ),
                ffn_post_norm=make_norm(dim) if family.post_norms else None,
                checkpointing=memory.checkpointing if memory else "none",
            )
            for _ in range(n_layers)
        )
        self.norm = make_norm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.tied = tied
        self.loss = loss
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draws all weights anew, also after a model built on the meta device was given memory.

        gpt2: normal with deviation 0.02, positions 0.01 (github.com/openai/gpt-2, src/model.py), projections into the
        residual stream divided by sqrt(2 * n_layers) (the GPT-2 paper, section 2.3).
        llama: normal with deviation 0.02 throughout, the initializer_range of Meta's published config.json.
        """
        if self.tied:  # here, because memory given to a model on the meta device unties them
            self.head.weight = self.token_embedding.weight
        for module in self.modules():
            if isinstance(module, NormModule):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.init == "gpt2":
            for block in self._blocks():
                for projection in (block.attention.out, block.ffn.down):
                    nn.init.normal_(projection.weight, std=0.02 / (2 * self.n_layers) ** 0.5)
            if self.position_embedding is not None:
                nn.init.normal_(self.position_embedding.weight, std=0.01)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mean_seqlen: int | None = None,
    ) -> Tensor:
        """The logits of a packed stream or, given labels, the sum of its losses.

        Shapes: tokens, position_ids, labels (total,) int64; cu_seqlens (n_docs + 1,) int32, None for one document
        -> logits (total, vocab_size), or a fp32 scalar in nats, the sum over the labels that are not -100.
        position_ids are each token's place in its document by default. mean_seqlen, tokens of the document that a token
        is in, is for attention's choice of kernels; by default as if cu_seqlens, padded or not, were of one length.
        Raises: ValueError on a shape mismatch, and on one document longer than learned positions reach. Where
        documents are several, their lengths are on the GPU: ask require_seq_len before training.
        """
        _require_stream(tokens, cu_seqlens, position_ids=position_ids, labels=labels)
        total = tokens.shape[0]
        if cu_seqlens is None and position_ids is None:
            self.require_seq_len(total)
        schedules = {
            window: _schedule(cu_seqlens, total, tokens.device, window, mean_seqlen)
            for window in _distinct(self.windows)
        }
        if position_ids is None:
            position_ids = document_positions(cu_seqlens, total, tokens.device)
        x = self.token_embedding(tokens)
        if self.family.embedding_scale != 1.0:
            x = x * torch.tensor(self.family.embedding_scale, dtype=x.dtype)
        if self.position_embedding is not None:
            x = x + self.position_embedding(position_ids)
        tables = {
            rope: None if rope is None else rotary_table(position_ids, self.head_dim, rope.theta, rope.scaling)
            for rope in _distinct(self.ropes)
        }
        offload = self.offload.forward_pass(x) if self.offload is not None and torch.is_grad_enabled() else None
        added = _nothing(x) if self.adds_later else None
        for block, window, rope in zip(self.blocks, self.windows, self.ropes, strict=True):
            with nullcontext() if offload is None else offload.block(x):
                x, added = block(x, schedules[window], tables[rope], added)
        if added is not None:
            x = x + added
            del added  # before the loss needs its memory
        if offload is not None:
            offload.end(x)
        x = self.norm(x)
        if labels is None:
            return soft_capped(self.head(x), self.family.logit_softcap)
        if self.family.logit_softcap:
            return self._soft_capped_loss(x, labels)
        return self.loss(x, self.head.weight, labels)

    def _soft_capped_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """self.loss where logits are capped; chunks of them are computed again in the backward."""
        chunks = zip(x.split(self.loss.chunk_size), labels.split(self.loss.chunk_size), strict=True)
        return torch.stack(
            [
                checkpoint(self._soft_capped_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in chunks
            ]
        ).sum()

    def _soft_capped_chunk(self, x: Tensor, labels: Tensor) -> Tensor:
        """x (tokens, dim), labels (tokens,) -> () fp32."""
        logits = soft_capped(self.head(x).float(), self.family.logit_softcap)
        smoothing, z_loss = self.loss.label_smoothing, self.loss.z_loss
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing)
        if not z_loss:
            return loss
        return loss + z_loss * (logits.logsumexp(dim=-1).square() * (labels != IGNORE_INDEX)).sum()

    def require_seq_len(self, seq_len: int) -> None:
        """ValueError when positions up to seq_len tokens are more than the model has learned embeddings for."""
        if self.position_embedding is not None and seq_len > self.position_embedding.num_embeddings:
            raise ValueError(
                f"model.positions=learned needs documents of at most model.max_seq_len={self.max_seq_len} tokens; "
                f"got {seq_len}"
            )

    def compile_blocks(self, **options: Any) -> None:
        """torch.compile, with these options, of each block: all are alike, so it compiles once.

        From then on blocks that keep what they compute leave their last addition to the next one.
        """
        self.adds_later = self.may_add_later
        for block in self.blocks:
            block.compile(**options)

    def _blocks(self) -> Iterable["Block"]:
        return (block for block in self.blocks if isinstance(block, Block))


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); with post norms x + norm(attention(norm(x))) and so on."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: "SelfAttention",
        attention_post_norm: nn.Module | None,
        ffn_norm: nn.Module,
        ffn: "FeedForward",
        ffn_post_norm: nn.Module | None,
        checkpointing: Checkpointing,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.attention_norm, self.attention = attention_norm, attention
        self.ffn_norm, self.ffn = ffn_norm, ffn
        self.attention_post_norm, self.ffn_post_norm = attention_post_norm, ffn_post_norm

    def forward(
        self, x: Tensor, schedule: Schedule, rotary: RotaryTable | None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The hidden states (total, dim), and the same shape to add to them or None -> both, for the next block.

        A block that is given something to add leaves its own last addition, for one pass with the next block's norm.
        """
        if added is not None:
            x, normed = _add_and_norm(x, added, self.attention_norm, keep_sum=True)
            y = _normed(self.attention(normed, schedule, rotary), self.attention_post_norm)
            x, normed = _add_and_norm(x, y, self.ffn_norm, keep_sum=False)  # the first one keeps this x
            return x, _normed(self.ffn(normed), self.ffn_post_norm)

        def layers(x: Tensor) -> Tensor:
            x = x + _normed(self.attention(self.attention_norm(x), schedule, rotary), self.attention_post_norm)
            return x + _normed(self.ffn(self.ffn_norm(x)), self.ffn_post_norm)

        return run_block(self.checkpointing, layers, x), None


class SelfAttention(nn.Module):
    """Projections around the attention that is handed in.

    heads holds the numbers of query, key and value heads. Queries, keys and values come from one matrix, so that
    under autocast one rounded copy of x is kept for the backward, not three. Attention gets all three in one dtype.
    checkpointed: whether its block is computed again for the backward.
    """

    def __init__(
        self,
        qkv: nn.Linear,
        out: nn.Linear,
        q_norm: NormModule | None,
        k_norm: NormModule | None,
        heads: list[int],
        attention: Attention,
        softmax_scale: float | None,
        softcap: float,
        checkpointed: bool,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.qkv, self.out, self.q_norm, self.k_norm = qkv, out, q_norm, k_norm
        self.heads, self.attention = heads, attention
        scores = {"softmax_scale": softmax_scale, "softcap": softcap}
        self.scores = {name: value for name, value in scores.items() if value}  # an attention need not know of others

    def forward(self, x: Tensor, schedule: Schedule, rotary: RotaryTable | None) -> Tensor:
        """x (total, dim) -> the same."""
        qkv = self.qkv(x).unflatten(-1, (sum(self.heads), -1))
        if self.q_norm is not None or rotary is None:
            q, k, v = qkv.split(self.heads, dim=1)
        elif self.checkpointed and torch.compiler.is_compiling():
            # there torch 2.11 would keep q, k and v, results of an autograd.Function
            q, k, v = rotate_heads(qkv, rotary.cos, rotary.sin, self.heads[0] + self.heads[1]).split(self.heads, dim=1)
        else:  # either way q, k and v stay views of one buffer, all that is kept of them
            q, k, v = rotate_qkv(qkv, self.heads, rotary.cos, rotary.sin)
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm, q), (self.k_norm, k)
            q, k = (_rotated(norm(x.to(norm.weight.dtype)), rotary, v.dtype) for norm, x in norms)
        return self.out(self.attention(q, k, v, schedule, **self.scores).flatten(1))


class FeedForward(nn.Module):
    """down(activation(up(x))), by chunk_size tokens at a time or all; a gate and its values come from one matrix.

    checkpointed: whether its block is computed again for the backward. keep: whether tiled_mlp keeps up(x).
    """

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        activation: Activation,
        bias: bool,
        chunk_size: int | None,
        checkpointed: bool,
        keep: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointed, self.keep = checkpointed, keep
        self.activation: Activation = activation
        self.chunk_size = chunk_size
        self.up = nn.Linear(dim, ffn_dim if activation == "gelu" else 2 * ffn_dim, bias=bias)
        self.down = nn.Linear(ffn_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (total, dim) -> the same."""
        plain = type(self.up) is nn.Linear and type(self.down) is nn.Linear  # and not those of fa_train.models.lora
        if self.chunk_size is None:
            projected = self.up(x)
            if not plain:  # an adapter's second product needs the first one's result, which would be computed again
                return self._activated_down(projected)
            # compiled in a checkpointed block: torch 2.11 keeps what passes from one checkpoint into another
            if self.checkpointed and torch.compiler.is_compiling():
                return self._activated_down(projected)
            # keeps `projected` alone; the backward computes the activations again, which end before down's product
            return checkpoint(self._activated_down, projected, use_reentrant=False, preserve_rng_state=False)
        if self.activation == "geglu" or not plain:  # tiled_mlp knows no derivative of it, and weights alone
            chunks = [
                checkpoint(self._all_at_once, rows, use_reentrant=False, preserve_rng_state=False)
                for rows in x.split(self.chunk_size)
            ]
            return torch.cat(chunks)
        up, down = self.up, self.down
        return tiled_mlp(x, up.weight, up.bias, down.weight, down.bias, self.activation, self.chunk_size, self.keep)

    def _all_at_once(self, x: Tensor) -> Tensor:
        return self._activated_down(self.up(x))

    def _activated_down(self, projected: Tensor) -> Tensor:
        """(total, rows of up) -> (total, dim)."""
        if self.activation == "geglu":  # GELU by tanh of the gate, which comes before the values
            gate, value = projected.chunk(2, dim=-1)
            return self.down(F.gelu(gate, approximate="tanh") * value)
        # eagerly, memory is as the planner has it of autograd's own path
        if self.activation == "swiglu" and torch.compiler.is_compiling() and trains_plainly(self.down):
            return swiglu_down(projected, self.down.weight, self.down.bias)
        return self.down(activate(projected, self.activation))


@dataclass(frozen=True)
class Rope:
    """The rotation of one layer's queries and keys."""

    theta: float
    scaling: RopeScaling | None


def _ropes(
    windows: Sequence[int | None],
    positions: Positions,
    theta: float,
    scaling: Mapping[str, Any] | None,
    max_seq_len: int | None,
    family: Family,
) -> list[Rope | None]:
    """Each layer's rotation."""
    if positions != "rope":
        if scaling is not None:
            raise ValueError(f"model.rope_scaling needs model.positions=rope; got {positions}")
        return [None] * len(windows)
    everywhere = Rope(theta, None if scaling is None else rope_scaling(scaling, max_seq_len))
    local = everywhere if family.local_rope_theta is None else Rope(family.local_rope_theta, None)
    rotated = _by_layer("rope_layers", family.rope_layers, len(windows), True)
    return [
        (everywhere if window is None else local) if rotates else None
        for window, rotates in zip(windows, rotated, strict=True)
    ]


def _schedule(
    cu_seqlens: Tensor | None, total: int, device: torch.device, window: int | None, seqlen: int | None
) -> Schedule:
    """The causal one of the documents; in a window of as many tokens as there are, no key is out of sight."""
    if window is None or window >= total:
        return causal_schedule(cu_seqlens, total, device, seqlen)
    documents = torch.tensor([0, total], dtype=torch.int32, device=device) if cu_seqlens is None else cu_seqlens
    padded = cu_seqlens is not None
    return build_schedule(
        documents, documents, total, total, causal=True, window_size=(window - 1, 0), padded=padded, seqlen=seqlen
    )


def _rotated(x: Tensor, rotary: RotaryTable | None, dtype: torch.dtype) -> Tensor:
    """All heads of x, in dtype."""
    return x.to(dtype) if rotary is None else rotate_heads(x, rotary.cos, rotary.sin, x.shape[1], dtype)


def _add_and_norm(x: Tensor, added: Tensor, norm: nn.Module, *, keep_sum: bool) -> tuple[Tensor, Tensor]:
    """x + added, and that normed, (total, dim) each; keep_sum as add_rms_norm has it."""
    if type(norm) is nn.RMSNorm and type(norm.weight) is nn.Parameter and norm.eps is not None:
        return add_rms_norm(x, added, norm.weight, norm.eps, _compute_dtype(x), keep_sum=keep_sum)
    x = x + added
    return x, norm(x)


def _nothing(x: Tensor) -> Tensor:
    """What the first block adds: zeros, which torch.compile takes for the FFN's result that the other blocks add."""
    zero = torch.zeros((), dtype=_compute_dtype(x), device=x.device, requires_grad=x.requires_grad)
    return zero.expand(x.shape).contiguous()  # no leaf, which its gradient would keep


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Of products with x: autocast's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)


def _by_layer(name: str, values: Sequence[Value] | None, n_layers: int, default: Value) -> list[Value]:
    if values is not None and len(values) != n_layers:
        raise ValueError(f"model.family.{name} must be of model.n_layers={n_layers} layers; got {len(values)}")
    return [default] * n_layers if values is None else list(values)


def _distinct(values: Sequence[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


def _or(default: bool, chosen: bool | None) -> bool:
    return default if chosen is None else chosen


def _norm(kind: Norm, dim: int, *, eps: float, bias: bool) -> NormModule:
    if kind == "layernorm":
        return nn.LayerNorm(dim, eps=eps, bias=bias)
    return nn.RMSNorm(dim, eps=eps) if kind == "rmsnorm" else OffsetRMSNorm(dim, eps=eps)


def _require_positive(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is None or size < 1:
            raise ValueError(f"model.{name} must be at least 1; got {size}")


def _require_one_of(choices: object, **values: str) -> None:
    known = get_args(choices)
    for name, value in values.items():
        if value not in known:
            raise ValueError(f"model.{name} must be one of {', '.join(known)}; got {value}")


def _require_stream(tokens: Tensor, cu_seqlens: Tensor | None, **like_tokens: Tensor | None) -> None:
    if tokens.dim() != 1 or tokens.numel() == 0:
        raise ValueError(f"tokens must be one packed stream (total,) of at least 1 token; got {tuple(tokens.shape)}")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype != torch.int32):
        raise ValueError(
            f"cu_seqlens must be (n_docs + 1,) int32 with n_docs at least 1; "
            f"got {tuple(cu_seqlens.shape)} {str(cu_seqlens.dtype).removeprefix('torch.')}"
        )
    for name, x in like_tokens.items():
        if x is not None and x.shape != tokens.shape:
            raise ValueError(f"{name} must be of tokens' shape {tuple(tokens.shape)}; got {tuple(x.shape)}")
