"""The architecture of a decoder as values: checked once, and read by the model, the planner and the exports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from fa_train.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from fa_train.models.rope import Rope, rope_scaling

Norm = Literal["rmsnorm", "layernorm", "offset_rmsnorm"]
Positions = Literal["rope", "learned", "none"]
Activation = Literal["swiglu", "gelu", "geglu"]
Init = Literal["gpt2", "llama"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Family:
    """What single families of published checkpoints add to the decoder; by default nothing.

    qkv_bias, out_bias, ffn_bias: biases of these projections; None takes the model's `bias` (Qwen 2: qkv only).
    windows: for each layer, the number of tokens that a query sees, itself included; None means all tokens before it
    (Mistral, Gemma).
    rope_layers: whether each layer rotates queries and keys (SmolLM 3 leaves out every fourth layer).
    local_rope_theta: theta of the layers with a window, whose frequencies are never scaled (Gemma 3).
    softmax_scale: factor of the scores; None is head_dim**-0.5.
    softcap, logit_softcap: bounds of the scaled scores and of the logits; 0 is no bound (Gemma 2).
    embedding_scale: factor of the token embeddings, rounded to their dtype (Gemma: sqrt(dim)).
    post_norms: whether the outputs of attention and FFN are normed before they are added (Gemma 2 and 3).
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


class Heads(NamedTuple):
    """The numbers of query heads and of key-value heads, and the channels of one head."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder, by the keys of conf/model.

    Units: dim, ffn_dim, head_dim in channels; max_seq_len in tokens; rope_theta in tokens per radian of the slowest
    channel. head_dim None is dim / n_heads, n_kv_heads None is n_heads. max_seq_len is the length that the model is
    trained on; it bounds learned positions, and scaled RoPE starts from it. rope_theta is read for RoPE only.
    rope_scaling stretches RoPE's frequencies; its keys are those of `rope_parameters` in Hugging Face's config.json:
    rope_type (linear, dynamic, yarn, llama3), factor and so on.
    Raises: ValueError on sizes that do not divide or are not positive, on an unknown norm, positions, activation or
    init, and on a family with a number of layers not its own.
    """

    vocab_size: PositiveInt
    n_layers: PositiveInt
    dim: PositiveInt
    n_heads: PositiveInt
    n_kv_heads: PositiveInt | None
    head_dim: PositiveInt | None
    ffn_dim: PositiveInt
    norm: Norm
    norm_eps: NonNegativeFloat
    positions: Positions
    rope_theta: PositiveFloat
    max_seq_len: PositiveInt | None
    activation: Activation
    bias: bool
    qk_norm: bool
    tied: bool
    init: Init
    rope_scaling: Mapping[str, Any] | None = None
    family: Family | None = None

    def __post_init__(self) -> None:
        self._require_sizes()
        for name, choices in (("norm", Norm), ("positions", Positions), ("activation", Activation), ("init", Init)):
            known, value = get_args(choices), getattr(self, name)
            if value not in known:
                raise ValueError(f"model.{name} must be one of {', '.join(known)}; got {value}")
        if self.positions == "rope" and self.heads.dim % 2:
            raise ValueError(f"model.head_dim must be even for model.positions=rope; got {self.heads.dim}")
        _ = self.ropes  # checks rope_scaling and the family's layers
        if self.positions == "learned":
            self._require_positive("max_seq_len")

    @property
    def heads(self) -> Heads:
        """The sizes of attention, with n_kv_heads and head_dim resolved."""
        kv = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
        return Heads(self.n_heads, kv, self.dim // self.n_heads if self.head_dim is None else self.head_dim)

    @property
    def query_dim(self) -> int:
        """Channels of all query heads."""
        return self.heads.query * self.heads.dim

    @property
    def kv_dim(self) -> int:
        """Channels of all key heads, and of all value heads."""
        return self.heads.kv * self.heads.dim

    @property
    def gated(self) -> bool:
        """Whether the FFN's first product is a gate and values."""
        return self.activation != "gelu"

    @property
    def up_dim(self) -> int:
        """Channels of the FFN's first product."""
        return 2 * self.ffn_dim if self.gated else self.ffn_dim

    @property
    def block_matrices(self) -> tuple[int, int, int, int]:
        """The elements of a block's matrices: qkv and out of attention, up and down of the FFN."""
        qkv, out = self.dim * (self.query_dim + 2 * self.kv_dim), self.query_dim * self.dim
        return qkv, out, self.dim * self.up_dim, self.ffn_dim * self.dim

    @property
    def extras(self) -> Family:
        """What the checkpoint's family adds."""
        return Family() if self.family is None else self.family

    @property
    def qkv_bias(self) -> bool:
        return self.bias if self.extras.qkv_bias is None else self.extras.qkv_bias

    @property
    def out_bias(self) -> bool:
        return self.bias if self.extras.out_bias is None else self.extras.out_bias

    @property
    def ffn_bias(self) -> bool:
        return self.bias if self.extras.ffn_bias is None else self.extras.ffn_bias

    @property
    def windows(self) -> list[int | None]:
        """Each layer's window, in tokens."""
        return self._by_layer("windows", self.extras.windows, None)

    @property
    def ropes(self) -> list[Rope | None]:
        """Each layer's rotation of queries and keys."""
        windows, scaling = self.windows, self.rope_scaling
        if self.positions != "rope":
            if scaling is not None:
                raise ValueError(f"model.rope_scaling needs model.positions=rope; got {self.positions}")
            return [None] * self.n_layers
        theta = self.extras.local_rope_theta
        everywhere = Rope(self.rope_theta, None if scaling is None else rope_scaling(scaling, self.max_seq_len))
        local = everywhere if theta is None else Rope(theta, None)
        rotated = self._by_layer("rope_layers", self.extras.rope_layers, True)
        return [
            (everywhere if window is None else local) if rotates else None
            for window, rotates in zip(windows, rotated, strict=True)
        ]

    def _require_sizes(self) -> None:
        self._require_positive("vocab_size", "n_layers", "dim", "n_heads", "ffn_dim")
        if self.n_kv_heads is not None:
            self._require_positive("n_kv_heads")
        if self.n_heads % self.heads.kv:
            raise ValueError(
                f"model.n_heads must be a multiple of model.n_kv_heads; got {self.n_heads} and {self.heads.kv}"
            )
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(
                "model.dim must be a multiple of model.n_heads unless model.head_dim is set; "
                f"got {self.dim} and {self.n_heads}"
            )
        if self.head_dim is not None:
            self._require_positive("head_dim")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            size = getattr(self, name)
            if size is None or size < 1:
                raise ValueError(f"model.{name} must be at least 1; got {size}")

    def _by_layer(self, name: str, values: Sequence[Value] | None, default: Value) -> list[Value]:
        if values is None:
            return [default] * self.n_layers
        if len(values) != self.n_layers:
            raise ValueError(f"model.family.{name} must be of model.n_layers={self.n_layers} layers; got {len(values)}")
        return list(values)
