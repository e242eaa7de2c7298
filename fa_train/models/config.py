"""The configuration of a decoder's architecture, for the model, the memory planner and the exports."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from fa_train.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from fa_train.models.rope import DynamicNTKScaling, Rope, YarnScaling, rope_scaling

Norm = Literal["rmsnorm", "layernorm", "offset_rmsnorm"]
Positions = Literal["rope", "learned", "none"]
Activation = Literal["swiglu", "gelu", "geglu"]
Init = Literal["gpt2", "llama"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Family:
    """Features of the decoder that only some families of checkpoints use. The default values switch all features off.

    qkv_bias, out_bias, ffn_bias: whether attention.qkv, attention.out and the linear layers of the FFN have biases. The
    default is ModelConfig.bias. In Qwen 2, only the projection to queries, keys and values has a bias.
    windows: for each layer, the number of tokens that a query sees, including its own, or None for all earlier tokens
    (Mistral, Gemma).
    rope_layers: for each layer, whether it applies RoPE to queries and keys (in SmolLM 3, every fourth layer does not).
    local_rope_theta: the theta of RoPE in layers with a window (Gemma 3). RoPE scaling does not apply to layers that
    use local_rope_theta.
    softmax_scale: the factor that attention scores are multiplied by, or None for head_dim**-0.5.
    softcap, logit_softcap: the soft caps of the scaled scores and of the logits (Gemma 2), or 0 for no cap.
    attention=flash needs a softcap of at most 1000.
    embedding_scale: the factor that token embeddings are multiplied by. embedding_scale is rounded to the embeddings'
    dtype. Gemma multiplies embeddings by `sqrt(dim)`.
    post_norms: whether the outputs of attention and FFN are normalised before the residual addition (Gemma 2 and 3).
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
                raise ValueError(f"model.family.{name} must be at least 0 (0 disables it); got {value}")
        for window in self.windows or ():
            if window is not None and window < 1:
                raise ValueError(f"model.family.windows must each be at least 1 token or null; got {window}")


class Heads(NamedTuple):
    """The number of query heads, the number of KV heads, and the number of channels of one head."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder. Each field is a key of the YAML files in conf/model.

    Units: dim, ffn_dim and head_dim in channels; max_seq_len in tokens.
    n_kv_heads: by default n_heads. head_dim: by default dim / n_heads.
    max_seq_len: the context length that the model was trained with. A model with learned positions has max_seq_len
    positions. RoPE scaling extends the context beyond max_seq_len.
    rope_theta: the base of RoPE's frequencies.
    rope_scaling: the rule that scales RoPE's frequencies. The keys of rope_scaling are those of `rope_parameters` in
    Hugging Face's config.json, such as rope_type (linear, dynamic, yarn, llama3) and factor.
    Raises: ValueError if a size is not positive, n_heads is not a multiple of n_kv_heads, or an option is unknown.
    ValueError if a list in `family` does not have one entry per layer, or rope_theta or head_dim is too small for
    rope_scaling.
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
        if self.family is not None and not isinstance(self.family, Family):
            raise ValueError(f"model.family must be a Family or None; got a {type(self.family).__name__}")
        self._require_sizes()
        for name, choices in (("norm", Norm), ("positions", Positions), ("activation", Activation), ("init", Init)):
            known, value = get_args(choices), getattr(self, name)
            if value not in known:
                raise ValueError(f"model.{name} must be one of {', '.join(known)}; got {value}")
        if self.positions == "rope" and self.heads.dim % 2:
            raise ValueError(f"model.head_dim must be even for model.positions=rope; got {self.heads.dim}")
        for rope in self.ropes:  # `ropes` checks rope_scaling and the lists in `family`
            scaling = None if rope is None else rope.scaling
            if isinstance(scaling, DynamicNTKScaling) and self.heads.dim == 2:
                raise ValueError("model.head_dim must be at least 4 for rope_type=dynamic; got 2")
            if isinstance(scaling, YarnScaling) and self.rope_theta <= 1:
                raise ValueError(f"model.rope_theta must be more than 1 for rope_type=yarn; got {self.rope_theta:g}")
        if self.positions == "learned":
            if self.max_seq_len is None:
                raise ValueError("model.positions=learned needs model.max_seq_len, the number of positions; got null")
            self._require_positive("max_seq_len")

    def values(self) -> dict[str, Any]:
        """Returns all fields of the architecture as numbers, strings, None or lists.

        If a field such as head_dim is None, the result has the default value that is computed for the field. The keys
        of `family` and `rope_scaling` have the names that the command line uses, for example family.softcap.
        """
        whole = {field.name: getattr(self, field.name) for field in fields(self)}
        whole |= {"n_kv_heads": self.heads.kv, "head_dim": self.heads.dim}
        family = asdict(self.extras)
        family |= {"qkv_bias": self.qkv_bias, "out_bias": self.out_bias, "ffn_bias": self.ffn_bias}
        nested = {"family": family, "rope_scaling": whole["rope_scaling"] or {}}
        parts = {f"{name}.{key}": value for name, part in nested.items() for key, value in part.items()}
        flat = {name: value for name, value in whole.items() if name not in nested} | parts
        is_plain = (str, bool, int, float, type(None))
        return {name: value if isinstance(value, is_plain) else list(value) for name, value in flat.items()}

    @property
    def heads(self) -> Heads:
        """The sizes of attention. If n_kv_heads or head_dim is None, its default is used."""
        kv = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
        return Heads(self.n_heads, kv, self.dim // self.n_heads if self.head_dim is None else self.head_dim)

    @property
    def query_dim(self) -> int:
        """The number of channels of all query heads together."""
        return self.heads.query * self.heads.dim

    @property
    def kv_dim(self) -> int:
        """The number of channels of all key heads together, or of all value heads together."""
        return self.heads.kv * self.heads.dim

    @property
    def gated(self) -> bool:
        """Whether the FFN has a gate, as in SwiGLU and GeGLU."""
        return self.activation != "gelu"

    @property
    def up_dim(self) -> int:
        """The number of output channels of the FFN's first linear layer."""
        return 2 * self.ffn_dim if self.gated else self.ffn_dim

    @property
    def block_matrices(self) -> tuple[int, int, int, int]:
        """The number of elements of each matrix of a block: attention.qkv, attention.out, ffn.up and ffn.down."""
        qkv, out = self.dim * (self.query_dim + 2 * self.kv_dim), self.query_dim * self.dim
        return qkv, out, self.dim * self.up_dim, self.ffn_dim * self.dim

    @property
    def extras(self) -> Family:
        """The model's `family`, or a Family with default values if `family` is None."""
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
        """The window of each layer in tokens, or None for all earlier tokens."""
        return self._by_layer("windows", self.extras.windows, None)

    @property
    def ropes(self) -> list[Rope | None]:
        """The RoPE of each layer, or None for a layer without RoPE."""
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
            raise ValueError(f"model.family.{name} must have model.n_layers={self.n_layers} entries; got {len(values)}")
        return list(values)
