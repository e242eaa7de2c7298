"""Positions in a packed stream, and rotary position embeddings (RoPE, arXiv:2104.09864).

As in Hugging Face's Llama, channels i and i + head_dim / 2 form a pair that is rotated. A RoPE scaling changes the
frequencies of the rotation, so that a model trained on short documents can read longer documents. The fields of a
scaling have the names of `rope_parameters` in Hugging Face's config.json.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RotaryTable(NamedTuple):
    """cos and sin of the rotation angles, (total, head_dim / 2) fp32. All layers with the same RoPE share a table."""

    cos: Tensor
    sin: Tensor


class RopeScaling(ABC):
    """A rule that changes RoPE's frequencies.

    The original frequencies are theta ** (-2i / head_dim) radians per token.
    """

    @abstractmethod
    def frequencies(self, theta: float, head_dim: int, position_ids: Tensor, last: Tensor | None = None) -> Tensor:
        """Returns the changed frequencies in fp64: (head_dim / 2,), or (total, head_dim / 2) with one row per token.

        position_ids: (total,). last: the last position in each token's document, (total,). If `last` is None, `last` is
        computed from position_ids, which must then contain all positions of each document.
        """

    @property
    def magnitude(self) -> float:
        """The factor that cos and sin are multiplied by.

        `magnitude` scales both q and k, so attention scores are multiplied by magnitude ** 2.
        """
        return 1.0


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Divides positions by `factor` (Position Interpolation, arXiv:2306.15595)."""

    factor: float

    def frequencies(self, theta: float, head_dim: int, position_ids: Tensor, last: Tensor | None = None) -> Tensor:
        return plain_frequencies(theta, head_dim, position_ids.device) / self.factor


@dataclass(frozen=True)
class DynamicNTKScaling(RopeScaling):
    """Increases theta for documents that are longer than the model's original context length.

    original_max_position_embeddings: the original context length in tokens.
    Source: transformers' rope_type=dynamic, after "NTK-aware scaled RoPE" (arXiv:2309.00071, appendix B.1).
    theta depends on the length of each token's document. In transformers, theta depends on the longest row of the
    batch.
    """

    factor: float
    original_max_position_embeddings: int

    def frequencies(self, theta: float, head_dim: int, position_ids: Tensor, last: Tensor | None = None) -> Tensor:
        longest = self.original_max_position_embeddings
        last = last_positions(position_ids) if last is None else last
        reach = last.double().add(1).clamp(min=longest)  # [total]
        stretched = theta * (self.factor * reach / longest - (self.factor - 1)) ** (head_dim / (head_dim - 2))
        return stretched[:, None] ** -_exponents(head_dim, position_ids.device)


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """Divides low frequencies by `factor` and keeps high frequencies (YaRN, arXiv:2309.00071, section 3.2).

    Frequencies between the low and the high ones are interpolated. The weight of the interpolation is a ramp, which is
    linear in the channel index.
    original_max_position_embeddings: the original context length in tokens.
    beta_fast, beta_slow: the frequencies at the two ends of the ramp, in rotations per original context length.
    truncate: whether the ends of the ramp are rounded to whole channels.
    attention_factor: the factor that cos and sin are multiplied by.
    The default attention_factor is YaRN's `0.1 * ln(factor) + 1`, modified by mscale and mscale_all_dim if both are
    given and not 0.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, theta: float, head_dim: int, position_ids: Tensor, last: Tensor | None = None) -> Tensor:
        plain = plain_frequencies(theta, head_dim, position_ids.device)
        ends = self.beta_fast or 32, self.beta_slow or 1
        low, high = (self._channel_of(rotations, theta, head_dim) for rotations in ends)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        channel = torch.arange(head_dim // 2, dtype=torch.float64, device=plain.device)
        interpolated = ((channel - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return plain / self.factor * interpolated + plain * (1 - interpolated)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def _channel_of(self, rotations: float, theta: float, head_dim: int) -> float:
        """Returns the channel whose angle grows by `rotations` full turns within the original context length."""
        original = self.original_max_position_embeddings
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Divides low frequencies by `factor`, keeps high frequencies, and interpolates linearly between them.

    original_max_position_embeddings: the original context length in tokens.
    low_freq_factor, high_freq_factor: the two ends of the interpolation, in rotations per original context length.
    Source: github.com/meta-llama/llama-models, models/llama3/model.py, apply_scaling.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def frequencies(self, theta: float, head_dim: int, position_ids: Tensor, last: Tensor | None = None) -> Tensor:
        plain = plain_frequencies(theta, head_dim, position_ids.device)
        rotations = self.original_max_position_embeddings * plain / (2 * math.pi)
        kept = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain / self.factor * (1 - kept) + plain * kept


@dataclass(frozen=True)
class Rope:
    """The RoPE of one layer: the base of its frequencies (theta), and the rule that scales these frequencies."""

    theta: float
    scaling: RopeScaling | None


SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicNTKScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}
MAY_BE_ZERO = ("mscale", "mscale_all_dim")  # 0 means that the field is not given, as in transformers


def rope_scaling(parameters: Mapping[str, Any], original_max_seq_len: int | None) -> RopeScaling | None:
    """Builds a RoPE scaling from the fields of `rope_parameters` in config.json. Returns None for rope_type=default.

    original_max_seq_len: the original context length in tokens, which is used if `parameters` does not contain this
    length.
    Raises: ValueError if rope_type is unknown, or a field is missing, unknown or out of range.
    """
    given = dict(parameters)
    kind = given.pop("type", None)  # before transformers 4.43, the field rope_type was named type
    kind = given.pop("rope_type", kind)
    if kind != "default" and kind not in SCALINGS:
        raise ValueError(f"rope_scaling.rope_type must be one of default, {', '.join(SCALINGS)}; got {kind}")
    known = {} if kind == "default" else {field.name: field for field in fields(SCALINGS[kind])}  # type: ignore[arg-type]
    if "original_max_position_embeddings" in known and original_max_seq_len is not None:
        given.setdefault("original_max_position_embeddings", original_max_seq_len)
    missing = [name for name, field in known.items() if field.default is MISSING and given.get(name) is None]
    unknown = [name for name in given if name not in known]
    if missing or unknown:
        raise ValueError(
            f"rope_scaling of rope_type={kind} takes {', '.join(known) or 'nothing else'}; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
        )
    if kind == "default":
        return None
    for name, value in given.items():
        if name in MAY_BE_ZERO and value == 0:
            continue
        if not isinstance(value, bool | None) and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ValueError(f"rope_scaling.{name} must be a positive number; got {value}")
    if given["factor"] < 1:
        raise ValueError(f"rope_scaling.factor must be at least 1; got {given['factor']}")
    scaling = SCALINGS[kind](**given)
    if isinstance(scaling, Llama3Scaling) and scaling.high_freq_factor < scaling.low_freq_factor:
        raise ValueError(
            f"rope_scaling.high_freq_factor must be at least low_freq_factor={scaling.low_freq_factor}; "
            f"got {scaling.high_freq_factor}"
        )
    return scaling


def document_positions(cu_seqlens: Tensor | None, total: int, device: torch.device) -> Tensor:
    """Returns each token's position in its document, (total,) int64.

    cu_seqlens: (n_docs + 1,) int32, or None for one document. Tokens after the last document count as another document.
    """
    token = torch.arange(total, device=device)
    if cu_seqlens is None:
        return token
    # the number of documents (including empty ones) that end at or before each token
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), token.to(torch.int32), right=True)
    return token - cu_seqlens[document]


def last_positions(position_ids: Tensor) -> Tensor:
    """Returns the last position in each token's document. A document ends where positions do not increase by 1.

    Shapes: (total,) -> (total,).
    """
    total = position_ids.shape[0]
    token = torch.arange(total, device=position_ids.device)
    ends = torch.ones_like(token, dtype=torch.bool)
    ends[:-1] = position_ids[1:] != position_ids[:-1] + 1
    nearest_end = token.masked_fill(~ends, total - 1).flip(0).cummin(0).values.flip(0)
    return position_ids[nearest_end]


def plain_frequencies(theta: float, head_dim: int, device: torch.device) -> Tensor:
    """Returns RoPE's frequencies without scaling, theta ** (-2i / head_dim) radians per token, (head_dim / 2,) fp64."""
    return theta ** -_exponents(head_dim, device)


def rotary_table(
    position_ids: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None, last: Tensor | None = None
) -> RotaryTable:
    """Computes cos and sin of the rotation angles at position_ids, (total,).

    last: as for RopeScaling.frequencies.
    Angles are computed in fp64: at position one million, an fp32 angle has an error of up to 0.03 radians.
    """
    if scaling is None:
        frequencies, magnitude = plain_frequencies(theta, head_dim, position_ids.device), 1.0
    else:
        frequencies, magnitude = scaling.frequencies(theta, head_dim, position_ids, last), scaling.magnitude
    angles = position_ids.double()[:, None] * frequencies  # [total, head_dim / 2]
    return RotaryTable((angles.cos() * magnitude).float(), (angles.sin() * magnitude).float())


def _exponents(head_dim: int, device: torch.device) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
