"""A pre-norm decoder over one packed stream of tokens: GPT-2 (2019), Llama (arXiv:2302.13971) and what lies between."""

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fa_train.memory.checkpointing import Checkpointing, run_block
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.offload import Offload
from fa_train.memory.stack import Memory
from fa_train.memory.tiled_mlp import Activation, activate, tiled_mlp
from fa_train.models.attention import Attention
from fa_train.models.rope import RotaryTable, document_positions, rotary_table, rotate
from kernels.flash_attention.schedule import Schedule, causal_schedule

Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rope", "learned", "none"]
Init = Literal["gpt2", "llama"]
NormModule = nn.RMSNorm | nn.LayerNorm


class GPT(nn.Module):
    """Decoder-only transformer; attention, loss and the blocks' memory levers (none by default) are handed in.

    Units: dim, ffn_dim, head_dim in channels; max_seq_len in tokens; rope_theta in tokens per radian of the slowest
    channel. head_dim None is dim / n_heads, n_kv_heads None is n_heads. max_seq_len is read for learned positions only,
    rope_theta for RoPE only.
    Raises: ValueError on sizes that do not divide or are not positive, and on an unknown norm, positions, activation
    or init.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        n_layers: int,
        dim: int,
        n_heads: int,
        n_kv_heads: int | None,
        head_dim: int | None,
        ffn_dim: int,
        norm: Norm,
        norm_eps: float,
        positions: Positions,
        rope_theta: float,
        max_seq_len: int | None,
        activation: Activation,
        bias: bool,
        qk_norm: bool,
        tied: bool,
        init: Init,
        attention: Attention,
        loss: LinearCrossEntropy,
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
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

        self.vocab_size, self.n_layers, self.n_heads, self.head_dim = vocab_size, n_layers, n_heads, head_dim
        self.positions, self.rope_theta, self.max_seq_len, self.init = positions, rope_theta, max_seq_len, init
        make_norm = partial(_norm, norm, eps=norm_eps, bias=bias)
        self.offload = Offload(n_layers) if memory is not None and memory.offload else None

        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = None
        if positions == "learned":
            _require_positive(max_seq_len=max_seq_len)
            self.position_embedding = nn.Embedding(max_seq_len or 0, dim)
        self.blocks = nn.ModuleList(
            Block(
                attention_norm=make_norm(dim),
                attention=SelfAttention(
                    qkv=nn.Linear(dim, (n_heads + 2 * n_kv_heads) * head_dim, bias=bias),
                    out=nn.Linear(n_heads * head_dim, dim, bias=bias),
                    q_norm=make_norm(head_dim) if qk_norm else None,
                    k_norm=make_norm(head_dim) if qk_norm else None,
                    heads=[n_heads, n_kv_heads, n_kv_heads],
                    attention=attention,
                ),
                ffn_norm=make_norm(dim),
                ffn=FeedForward(dim, ffn_dim, activation, bias, chunk_size=memory.mlp_chunk if memory else None),
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
    ) -> Tensor:
        """The logits of a packed stream or, given labels, the sum of its losses.

        Shapes: tokens, position_ids, labels (total,) int64; cu_seqlens (n_docs + 1,) int32, None for one document
        -> logits (total, vocab_size), or a fp32 scalar in nats, the sum over the labels that are not -100.
        position_ids are each token's place in its document by default.
        Raises: ValueError on a shape mismatch, and on one document longer than learned positions reach. Where
        documents are several, their lengths are on the GPU: ask require_seq_len before training.
        """
        _require_stream(tokens, cu_seqlens, position_ids=position_ids, labels=labels)
        total = tokens.shape[0]
        if cu_seqlens is None and position_ids is None:
            self.require_seq_len(total)
        schedule = causal_schedule(cu_seqlens, total, tokens.device)
        if position_ids is None:
            position_ids = document_positions(cu_seqlens, total, tokens.device)
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(position_ids)
        rotary = rotary_table(position_ids, self.head_dim, self.rope_theta) if self.positions == "rope" else None
        offload = self.offload.forward_pass(x) if self.offload is not None and torch.is_grad_enabled() else None
        for block in self.blocks:
            with nullcontext() if offload is None else offload.block(x):
                x = block(x, schedule, rotary)
        x = self.norm(x)
        if labels is None:
            return self.head(x)
        return self.loss(x, self.head.weight, labels)

    def require_seq_len(self, seq_len: int) -> None:
        """ValueError when positions up to seq_len tokens are more than the model has learned embeddings for."""
        if self.position_embedding is not None and seq_len > self.position_embedding.num_embeddings:
            raise ValueError(
                f"model.positions=learned needs documents of at most model.max_seq_len={self.max_seq_len} tokens; "
                f"got {seq_len}"
            )

    def _blocks(self) -> Iterable["Block"]:
        return (block for block in self.blocks if isinstance(block, Block))


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: "SelfAttention",
        ffn_norm: nn.Module,
        ffn: "FeedForward",
        checkpointing: Checkpointing,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.attention_norm, self.attention = attention_norm, attention
        self.ffn_norm, self.ffn = ffn_norm, ffn

    def forward(self, x: Tensor, schedule: Schedule, rotary: RotaryTable | None) -> Tensor:
        """x (total, dim) -> the same."""

        def layers(x: Tensor) -> Tensor:
            x = x + self.attention(self.attention_norm(x), schedule, rotary)
            return x + self.ffn(self.ffn_norm(x))

        return run_block(self.checkpointing, layers, x)


class SelfAttention(nn.Module):
    """Projections around the attention that is handed in.

    heads holds the numbers of query, key and value heads. Queries, keys and values come from one matrix, so that
    under autocast one rounded copy of x is kept for the backward, not three. Attention gets all three in one dtype.
    """

    def __init__(
        self,
        qkv: nn.Linear,
        out: nn.Linear,
        q_norm: NormModule | None,
        k_norm: NormModule | None,
        heads: list[int],
        attention: Attention,
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.q_norm, self.k_norm = qkv, out, q_norm, k_norm
        self.heads, self.attention = heads, attention

    def forward(self, x: Tensor, schedule: Schedule, rotary: RotaryTable | None) -> Tensor:
        """x (total, dim) -> the same."""
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.heads), -1)).split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (norm(x.to(norm.weight.dtype)) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        return self.out(self.attention(q.to(v.dtype), k.to(v.dtype), v, schedule).flatten(1))


class FeedForward(nn.Module):
    """down(activation(up(x))), by chunk_size tokens at a time or all; SwiGLU's gate and values come from one matrix."""

    def __init__(self, dim: int, ffn_dim: int, activation: Activation, bias: bool, chunk_size: int | None) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.chunk_size = chunk_size
        self.up = nn.Linear(dim, 2 * ffn_dim if activation == "swiglu" else ffn_dim, bias=bias)
        self.down = nn.Linear(ffn_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (total, dim) -> the same."""
        if self.chunk_size is None:
            return self.down(activate(self.up(x), self.activation))
        up, down = self.up, self.down
        return tiled_mlp(x, up.weight, up.bias, down.weight, down.bias, self.activation, self.chunk_size)


def _norm(kind: Norm, dim: int, *, eps: float, bias: bool) -> NormModule:
    return nn.RMSNorm(dim, eps=eps) if kind == "rmsnorm" else nn.LayerNorm(dim, eps=eps, bias=bias)


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
