"""A pre-norm decoder over a packed stream of tokens, for GPT-2 (2019), Llama (arXiv:2302.13971) and their variants."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.rotary import rotate_heads, rotate_qkv
from fa_train.memory.checkpointing import block_runner
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.memory.offload import Offload
from fa_train.models.attention import Attention, flash_attention, function_of, require_softcap, soft_capped
from fa_train.models.config import ModelConfig
from fa_train.models.ffn import build_ffn, choose_ffn
from fa_train.models.initial import draw
from fa_train.models.norms import NormModule, OffsetRMSNorm, add_and_norm, build_norm, zeros_to_add
from fa_train.models.origin import Origin
from fa_train.models.rope import RotaryTable, document_positions, rotary_table
from fa_train.models.stream import context_schedule, require_stream, windowed_schedule
from fa_train.parallel.context.attention import ContextAttention
from fa_train.parallel.context.shard import ContextShard
from fa_train.parallel.context.traffic import Traffic

Value = TypeVar("Value")
QKV = tuple[Tensor, Tensor, Tensor]  # q (total, n_heads, head_dim), and k and v (total, n_kv_heads, head_dim)
# splits the result of SelfAttention.qkv, (total, n_heads + 2 * n_kv_heads, head_dim), and rotates q and k
SplitHeads = Callable[["SelfAttention", Tensor, RotaryTable | None], QKV]


class GPT(nn.Module):
    """A decoder-only transformer.

    A model that is built on the meta device has no values until `materialise` is called. A model that is built on
    another device has random initial values, which depend on torch.initial_seed() and on the parameters' names.

    memory: the settings that reduce GPU memory, or None to use none of them.
    config: the fields of fa_train.models.config.ModelConfig, which the YAML files in conf/model set.
    Raises: ValueError if ModelConfig rejects a value, if `attention` is not callable or is a module with parameters, or
    if `attention` does not support the model's soft cap.
    """

    origin: Origin | None = None  # the checkpoint from which the weights were loaded, or None if the weights are random
    # the names of the weights of `origin` that LoRA has frozen; checkpoints omit a weight as long as it is frozen
    base_weights: frozenset[str] = frozenset()

    def __init__(
        self, *, attention: Attention, loss: LinearCrossEntropy, memory: Memory | None = None, **config: Any
    ) -> None:
        super().__init__()
        self.config = ModelConfig(**config)
        if not callable(attention):
            raise ValueError(f"attention must be a function, such as sdpa_attention; got {attention}")
        if isinstance(attention, nn.Module) and (names := [name for name, _ in attention.named_parameters()]):
            # all layers would share the parameters, and `materialise` would leave them uninitialised
            raise ValueError(
                "attention must be a function, or a module without parameters; "
                f"got {type(attention).__name__} with the parameters {', '.join(names)}"
            )
        extras = self.config.extras
        require_softcap(attention, extras.softcap)
        self.memory = memory = Memory("none", False, None, loss) if memory is None else memory
        self.is_flash = function_of(attention) is flash_attention
        self.windows, self.ropes, self.head_dim = self.config.windows, self.config.ropes, self.config.heads.dim
        self.embedding_scale, self.logit_softcap = extras.embedding_scale, extras.logit_softcap
        # With a deferred addition (see `Block`), the input of a block is two tensors. Checkpointed blocks and blocks
        # with offloaded inputs need one tensor.
        self.may_add_later = memory.checkpointing == "none" and memory.offload is not True
        self.adds_later = False
        self.offload = Offload(self.config.n_layers, memory.offload == "all") if memory.offload else None

        self.loss = loss
        self.seed, device = torch.initial_seed(), torch.get_default_device()
        with torch.device("meta"):  # torch's own initial values are not needed
            self._add_modules(attention, memory)
        self.register_load_state_dict_post_hook(_tie_loaded)
        self.initialisers: list[Callable[[GPT], None]] = [type(self).init_weights]
        if device.type != "meta":
            self.materialise(device)

    def _add_modules(self, attention: Attention, memory: Memory) -> None:
        vocab_size, dim = self.config.vocab_size, self.config.dim
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = None
        if self.config.positions == "learned":
            self.position_embedding = nn.Embedding(self.config.max_seq_len or 0, dim)
        self.blocks = nn.ModuleList(
            Block(self.config, attention, memory, rotates=rope is not None) for rope in self.ropes
        )
        self.norm = build_norm(self.config, dim)
        self.head = Head(dim, vocab_size, self.loss, self.logit_softcap)
        self.tie()

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mean_seqlen: int | None = None,
        traffic: Mapping[int | None, Traffic] | None = None,
        last_positions: Tensor | None = None,
    ) -> Tensor:
        """Returns the logits of a packed stream, or the sum of its losses if labels are given.

        Shapes: tokens, position_ids, labels, last_positions (total,) int64; cu_seqlens (n_docs + 1,) int32; returns
        logits (total, vocab_size), or the loss, a scalar in fp32. The loss is in nats and is the sum over all labels
        except -100.
        cu_seqlens: the start of each document and the end of the last document, or None for one document.
        position_ids: the position of each token; by default, positions are counted from the start of each document.
        mean_seqlen: a mean document length in tokens, by which attention chooses its kernels. By default, mean_seqlen
        is total / n_docs. The data pipeline passes a mean document length in which each document is weighted by its
        length.
        traffic: for each attention window, the keys that this rank of a context group sends and receives. See
        `share_context`. With `traffic`, cu_seqlens describes the whole stream, and the other tensors hold only the
        rank's own tokens.
        last_positions: the last position in each token's document, by default computed from position_ids. A rank of a
        context group may hold only parts of documents, so last_positions must be given with `traffic`.
        Raises: ValueError if shapes do not match, traffic is given without last_positions, or a single document has
        more tokens than the model has learned positions. If cu_seqlens is given, the lengths of the documents are not
        checked, because cu_seqlens is on the GPU. Call `require_seq_len` before training.
        """
        require_stream(tokens, cu_seqlens, position_ids=position_ids, labels=labels, last_positions=last_positions)
        if traffic is not None and last_positions is None:
            raise ValueError("last_positions must be given with traffic; got None")
        total = tokens.shape[0]
        if cu_seqlens is None and position_ids is None:
            self.require_seq_len(total)
        schedules: dict[int | None, Any] = {
            window: windowed_schedule(cu_seqlens, total, tokens.device, window, mean_seqlen)
            if traffic is None
            else context_schedule(traffic[window], window, mean_seqlen)
            for window in _distinct(self.windows)
        }
        if position_ids is None:
            position_ids = document_positions(cu_seqlens, total, tokens.device)
        x = self._embedded(tokens, position_ids)
        tables = {
            rope: None
            if rope is None
            else rotary_table(position_ids, self.head_dim, rope.theta, rope.scaling, last_positions)
            for rope in _distinct(self.ropes)
        }
        offload = self.offload.forward_pass(x) if self.offload is not None and torch.is_grad_enabled() else None
        added = zeros_to_add(x) if self.adds_later else None
        for block, window, rope in zip(self.blocks, self.windows, self.ropes, strict=True):
            with nullcontext() if offload is None else offload.block(x):
                x, added = block(x, schedules[window], tables[rope], added)
        if added is not None:
            x = x + added
            del added  # frees the memory of `added` before the loss is computed
        if offload is not None:
            offload.end(x)
        x = self.norm(x)
        result: Tensor = self.head(x, labels)
        return result

    def _embedded(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Returns the embeddings of the tokens. Shapes: tokens and position_ids (total,) -> (total, dim)."""
        x = self.token_embedding(tokens)
        if self.embedding_scale != 1.0:
            x = x * torch.tensor(self.embedding_scale, dtype=x.dtype)
        return x if self.position_embedding is None else x + self.position_embedding(position_ids)

    def require_seq_len(self, seq_len: int) -> None:
        """Raises: ValueError if the model has fewer learned positions than seq_len."""
        if self.position_embedding is not None and seq_len > self.position_embedding.num_embeddings:
            raise ValueError(
                "model.positions=learned needs documents of at most "
                f"model.max_seq_len={self.config.max_seq_len} tokens; got {seq_len}"
            )

    def compile_blocks(self, **options: Any) -> None:
        """Compiles each block with torch.compile(**options).

        Blocks share one graph, because their code and shapes are equal. A compiled block leaves its last residual
        addition to the next block (see `Block`), unless blocks are checkpointed or offload their inputs.
        """
        self.adds_later = self.may_add_later
        for block in self.blocks:
            block.compile(**options)

    def choose_ffns(self) -> None:
        """Chooses each block's FFN class again. Call this method after you replace linear layers of the FFNs."""
        for block in self._blocks():
            ffn = choose_ffn(block.ffn.up, block.ffn.down, self.config.activation, self.memory)
            block.ffn = ffn.train(block.ffn.training)

    def share_context(self, group: str, head_groups: int = 1) -> None:
        """Makes attention gather the keys that other ranks hold.

        After a call of share_context, each call of `forward` must pass `traffic`.

        group: the name of a process group (fa_train.parallel.context.operators.register_group).
        head_groups: the number of groups of KV heads, as in ContextAttention.
        """
        for block in self._blocks():
            block.attention.attend = ContextAttention(block.attention.attend, group, head_groups)

    def context_shard(self, rank: int, ranks: int) -> ContextShard:
        """Returns a function that selects one rank's tokens from a batch that a context group shares.

        rank: the index of the rank in the context group. ranks: the number of ranks in the context group.
        """
        return ContextShard(rank, ranks, _distinct(self.windows), may_split=self.is_flash)

    def _blocks(self) -> Iterable["Block"]:
        return (block for block in self.blocks if isinstance(block, Block))

    def tie(self) -> None:
        """Gives the head the weight of the token embedding if the config ties the two weights.

        `load_state_dict` also calls `tie`. Call `tie` again after parameters are replaced in other ways.
        """
        if self.config.tied:
            self.head.weight = self.token_embedding.weight

    def materialise(self, device: torch.device) -> None:
        """Allocates parameters on `device` for a model that was built on the meta device, and initialises them.

        If the model is sharded, each rank allocates only its rows, and holds at most one whole parameter at a time.
        """
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            self.to_empty(device=device)
        else:
            self._allocate(device)
        self.tie()
        for initialise_weights in self.initialisers:
            initialise_weights(self)

    def require_weights(self) -> None:
        """Raises: ValueError if the model is on the meta device, where it has no weights."""
        if self.token_embedding.weight.is_meta:
            raise ValueError(
                "the model must have weights; got a model on the meta device. Call its `materialise` first"
            )

    def _allocate(self, device: torch.device) -> None:
        """Replaces all parameters by uninitialised ones on `device`.

        This method exists because torch's `to_empty` refuses fake tensors.
        """
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty_like(parameter, device=device)
                module.register_parameter(name, nn.Parameter(empty, parameter.requires_grad))

    def add_initialiser(self, initialiser: "Callable[[GPT], None]") -> None:
        """Registers a function that sets parameters of the model, such as those of adapters.

        `initialiser` is called immediately, unless the model is on the meta device. `materialise` also calls it.
        """
        self.initialisers.append(initialiser)
        if not self.token_embedding.weight.is_meta:
            initialiser(self)

    def init_weights(self) -> None:
        """Gives all parameters except those of adapters their initial values.

        If the model is sharded, sets only this rank's rows.

        init="gpt2": a normal distribution with standard deviation 0.02, or 0.01 for the position embedding
        (github.com/openai/gpt-2, src/model.py). The weights of attention.out and ffn.down are divided by
        sqrt(2 * n_layers) (the GPT-2 paper, section 2.3).
        init="llama": a normal distribution with standard deviation 0.02, the value of initializer_range in Meta's
        config.json of Llama.
        """
        deviations = {}
        if self.config.init == "gpt2":
            deviations = {"attention.out": 0.02 / (2 * self.config.n_layers) ** 0.5, "position_embedding": 0.01}
            deviations["ffn.down"] = deviations["attention.out"]
        for name, parameter in self.named_parameters():
            path, _, kind = name.rpartition(".")
            module = self.get_submodule(path)
            if isinstance(module, NormModule):
                nn.init.constant_(parameter, float(kind == "weight" and not isinstance(module, OffsetRMSNorm)))
            elif isinstance(module, nn.Linear | nn.Embedding):
                std = deviations.get(".".join(path.split(".")[-2:]), 0.02)
                if kind == "bias":
                    nn.init.zeros_(parameter)
                else:
                    draw(parameter, partial(nn.init.normal_, std=std), self.seed, name)


class Block(nn.Module):
    """A decoder block: x + attention(norm(x)), then x + ffn(norm(x)).

    With config.extras.post_norms (Gemma 2 and 3), the outputs of attention and FFN are also normalised before the
    residual additions.

    A compiled block can defer its last addition. The next block then computes this addition and its own first norm in
    one kernel (`add_and_norm`):

        each block adds itself:   block i returns x + y           block i + 1 computes norm(x)
        each block adds later:    block i returns x and y         block i + 1 computes norm(x + y)

    Here, y is the output of the FFN. The next block gets y as the argument `added`.

    rotates: whether the layer has RoPE.
    """

    def __init__(self, config: ModelConfig, attention: Attention, memory: Memory, *, rotates: bool) -> None:
        super().__init__()
        post_norms = config.extras.post_norms
        checkpointed = memory.checkpointing != "none"
        self.attention_norm = build_norm(config, config.dim)
        self.attention = SelfAttention(config, attention, rotates=rotates, checkpointed=checkpointed)
        self.ffn_norm = build_norm(config, config.dim)
        self.ffn = build_ffn(config, memory)
        self.attention_post_norm = build_norm(config, config.dim) if post_norms else nn.Identity()
        self.ffn_post_norm = build_norm(config, config.dim) if post_norms else nn.Identity()
        self.run = block_runner(memory.checkpointing)

    def forward(
        self, x: Tensor, schedule: Schedule, rotary: RotaryTable | None, added: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns two tensors whose sum is the output of the block. The second tensor may be None.

        x, added: two tensors whose sum is the input, (total, dim) each. If `added` is None, the block computes all its
        residual additions, and the second returned tensor is also None.
        """
        if added is not None:
            return self._adds_later(x, schedule, rotary, added)

        def layers(x: Tensor) -> Tensor:
            x = x + self.attention_post_norm(self.attention(self.attention_norm(x), schedule, rotary))
            return x + self.ffn_post_norm(self.ffn(self.ffn_norm(x)))

        return self.run(layers, x), None

    def _adds_later(
        self, x: Tensor, schedule: Schedule, rotary: RotaryTable | None, added: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, normed = add_and_norm(x, added, self.attention_norm, keep_sum=True)
        y = self.attention_post_norm(self.attention(normed, schedule, rotary))
        x, normed = add_and_norm(x, y, self.ffn_norm, keep_sum=False)  # the first call of add_and_norm has saved x
        return x, self.ffn_post_norm(self.ffn(normed))


class Head(nn.Linear):
    """The last linear layer and the loss.

    `forward` also computes the loss, because FSDP gathers the weight of an untied head when `forward` is called.

    softcap: the soft cap on the logits, or 0.
    """

    def __init__(self, dim: int, vocab_size: int, loss: LinearCrossEntropy, softcap: float) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.loss, self.softcap = loss, softcap

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns the logits, or the sum of the losses if labels are given.

        Shapes: x (total, dim), labels (total,); returns (total, vocab_size) or ().
        """
        if labels is None:
            return soft_capped(super().forward(x), self.softcap)
        return self.loss(x, self.weight, labels, self.softcap)


class SelfAttention(nn.Module):
    """Self-attention: the projection to queries, keys and values, an attention function, and the output projection.

    One matmul computes queries, keys and values. With three separate matmuls, autocast would keep three 16-bit copies
    of x for the backward pass, instead of one copy. Queries, keys and values have the same dtype.
    rotates: whether the layer has RoPE. checkpointed: whether activation checkpointing recomputes the block.
    """

    def __init__(self, config: ModelConfig, attention: Attention, *, rotates: bool, checkpointed: bool) -> None:
        super().__init__()
        n_heads, n_kv_heads, head_dim = config.heads
        self.qkv_heads = [n_heads, n_kv_heads, n_kv_heads]
        self.qkv = nn.Linear(config.dim, sum(self.qkv_heads) * head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(n_heads * head_dim, config.dim, bias=config.out_bias)
        self.q_norm = build_norm(config, head_dim) if config.qk_norm else None
        self.k_norm = build_norm(config, head_dim) if config.qk_norm else None
        self.attend: Callable[..., Tensor] = attention
        self.split_heads = _head_splitter(config.qk_norm, rotates, checkpointed)
        scores = {"softmax_scale": config.extras.softmax_scale, "softcap": config.extras.softcap}
        self.scores = {name: value for name, value in scores.items() if value}  # only the options that are set

    def forward(self, x: Tensor, schedule: Schedule, rotary: RotaryTable | None) -> Tensor:
        """Shapes: x (total, dim) -> (total, dim)."""
        # the result of self.qkv has no variable, because a variable would keep it in memory while attention runs
        q, k, v = self.split_heads(self, self.qkv(x).unflatten(-1, (sum(self.qkv_heads), -1)), rotary)
        return self.out(self.attend(q, k, v, schedule, **self.scores).flatten(1))


def _head_splitter(qk_norm: bool, rotates: bool, checkpointed: bool) -> SplitHeads:
    if qk_norm:
        return _normed_and_rotated if rotates else _normed
    if not rotates:
        return _split
    return _rotated_in_checkpoint if checkpointed else _rotated


def _split(layer: SelfAttention, qkv: Tensor, rotary: RotaryTable | None) -> QKV:
    q, k, v = qkv.split(layer.qkv_heads, dim=1)
    return q, k, v


def _rotated(layer: SelfAttention, qkv: Tensor, rotary: RotaryTable | None) -> QKV:
    """Rotates q and k. q, k and v are views of one new buffer, the only tensor that autograd saves."""
    assert rotary is not None
    q, k, v = rotate_qkv(qkv, layer.qkv_heads, rotary.cos, rotary.sin)
    return q, k, v


def _rotated_first(layer: SelfAttention, qkv: Tensor, rotary: RotaryTable | None) -> QKV:
    """Rotates q and k within qkv, and then splits the result. q, k and v are views of the rotated tensor."""
    assert rotary is not None
    return _split(layer, rotate_heads(qkv, rotary.cos, rotary.sin, layer.qkv_heads[0] + layer.qkv_heads[1]), None)


def _rotated_in_checkpoint(layer: SelfAttention, qkv: Tensor, rotary: RotaryTable | None) -> QKV:
    # In a compiled checkpoint, torch 2.11 would save the tensors that `_rotated` gets from an autograd.Function.
    return (_rotated_first if torch.compiler.is_compiling() else _rotated)(layer, qkv, rotary)


def _normed(layer: SelfAttention, qkv: Tensor, rotary: RotaryTable | None) -> QKV:
    q, k, v = qkv.split(layer.qkv_heads, dim=1)
    return _norm(layer.q_norm, q).to(v.dtype), _norm(layer.k_norm, k).to(v.dtype), v


def _normed_and_rotated(layer: SelfAttention, qkv: Tensor, rotary: RotaryTable | None) -> QKV:
    assert rotary is not None
    cos, sin = rotary
    q, k, v = qkv.split(layer.qkv_heads, dim=1)
    q = rotate_heads(_norm(layer.q_norm, q), cos, sin, q.shape[1], v.dtype)
    return q, rotate_heads(_norm(layer.k_norm, k), cos, sin, k.shape[1], v.dtype), v


def _norm(norm: NormModule | None, x: Tensor) -> Tensor:
    """Converts x to the dtype of the norm's weight and applies the norm."""
    assert norm is not None
    y: Tensor = norm(x.to(norm.weight.dtype))
    return y


def _tie_loaded(model: GPT, _: object) -> None:
    """Ties the head after load_state_dict, which replaces parameters if assign=True."""
    model.tie()


def _distinct(values: Sequence[Value]) -> list[Value]:
    return list(dict.fromkeys(values))
