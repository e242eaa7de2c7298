"""Changes the RoPE of a Hugging Face config.json: its scaling, its base, and the length that it supports."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fa_train.models.hf.families import scaling_fields, understood
from fa_train.models.rope import DynamicNTKScaling, LinearScaling
from fa_train.models.rope import rope_scaling as parse_rope_scaling


def with_rope(
    config: dict[str, Any],
    path: Path,
    scaling: Mapping[str, Any] | None,
    theta: float | None,
    max_seq_len: int | None,
) -> dict[str, Any]:
    """Returns config.json with a new RoPE scaling, a new RoPE base and a new max_position_embeddings.

    max_position_embeddings becomes the number of tokens that the new RoPE supports.
    """
    _, normalised = understood(config, path)
    if not hasattr(normalised, "rope_parameters"):
        raise ValueError(
            "model.rope_theta, model.max_seq_len and model.rope_scaling need a checkpoint with RoPE; "
            f"got model_type={config['model_type']}"
        )
    for name, value in (("rope_theta", theta), ("max_seq_len", max_seq_len)):
        if value is not None and not 1 <= value < float("inf"):
            raise ValueError(f"model.{name} must be at least 1; got {value}")
    by_kind = "full_attention" in normalised.rope_parameters
    parameters = normalised.rope_parameters["full_attention"] if by_kind else normalised.rope_parameters
    own = {name: value for name, value in parameters.items() if value is not None}
    own_theta = own.pop("rope_theta")
    own.pop("partial_rotary_factor", None)  # families.py accepts only 1.0
    reach = normalised.max_position_embeddings
    original = _original_length(own, reach)
    asked = own if scaling is None else _asked_scaling(scaling, own, original, reach, max_seq_len)
    parsed = parse_rope_scaling(asked, original)
    fields: dict[str, Any] = {"rope_type": "default"} if parsed is None else scaling_fields(parsed)
    # dynamic scaling applies beyond max_position_embeddings tokens, so max_position_embeddings must not change
    is_dynamic = isinstance(parsed, DynamicNTKScaling)
    if asked is not own:
        reach = fields.get("original_max_position_embeddings", original)
        reach = reach if parsed is None or is_dynamic else round(reach * fields["factor"])
    if max_seq_len is not None and max_seq_len > reach and not is_dynamic:
        if theta is None:
            raise ValueError(
                f"model.max_seq_len={max_seq_len} is more than the {reach} tokens that {path} supports. Set another "
                "model.rope_scaling, such as {rope_type: yarn}, or model.rope_theta"
            )
        reach = max_seq_len
    if asked is own and theta is None:
        return config
    new_theta = own_theta if theta is None else float(theta)
    return _with_rope_fields(config, fields | {"rope_theta": new_theta}, by_kind) | {"max_position_embeddings": reach}


def _with_rope_fields(config: dict[str, Any], fields: dict[str, Any], by_kind: bool) -> dict[str, Any]:
    """Returns a copy of config.json with other values for RoPE, under the field names that `config` uses.

    Old and new versions of transformers use different names for these fields. by_kind: whether layers with and without
    a window have separate RoPE parameters. If so, only those of layers without a window change.
    """
    config = copy.deepcopy(config)
    # transformers ignores original_max_position_embeddings in `fields` if `config` has this key at the top level
    config.pop("original_max_position_embeddings", None)
    if config.get("rope_parameters") is None:  # transformers before version 5 reads rope_scaling and rope_theta
        scaling = {name: value for name, value in fields.items() if name != "rope_theta"}
        scaled = None if scaling["rope_type"] == "default" else scaling
        return config | {"rope_scaling": scaled, "rope_theta": fields["rope_theta"]}
    config.pop("rope_scaling", None)  # transformers prefers rope_scaling to rope_parameters
    of_all = config["rope_parameters"] | {"full_attention": fields} if by_kind else fields
    return config | {"rope_parameters": of_all}


def _original_length(own: Mapping[str, Any], reach: int) -> int:
    """Returns the number of tokens that the checkpoint would support without its RoPE scaling `own`.

    reach: the number of tokens that the checkpoint supports with its own RoPE scaling. A checkpoint with linear scaling
    does not store its original length. For linear scaling, the function assumes that `reach` is the original length
    times the factor, as in Gemma 3.
    """
    if own["rope_type"] != "linear":
        return own.get("original_max_position_embeddings", reach)
    scaling = parse_rope_scaling(own, reach)
    assert isinstance(scaling, LinearScaling)
    return max(1, round(reach / scaling.factor))


def _asked_scaling(
    scaling: Mapping[str, Any], own: dict[str, Any], original: int, own_reach: int, max_seq_len: int | None
) -> dict[str, Any]:
    """Returns a copy of `scaling`, and adds rope_type and factor if they are missing.

    `own` is the checkpoint's scaling. The result is `own` if the checkpoint already supports max_seq_len tokens, and
    `scaling` has no factor. But the result is never `own` if `scaling` has rope_type="default". An added factor is at
    least the factor in `own`, because the checkpoint was trained with the factor in `own`.
    original: the number of tokens that the checkpoint would support without RoPE scaling. own_reach: the number of
    tokens that the checkpoint supports with its own scaling.
    """
    asked = {name: value for name, value in scaling.items() if value is not None}
    kind = asked.get("rope_type", asked.get("type"))
    if "factor" not in asked and kind != "default" and max_seq_len is not None:
        if max_seq_len <= own_reach:
            return own
        needed = max_seq_len / asked.get("original_max_position_embeddings", original)
        asked["factor"] = max(needed, own.get("factor", 1.0))
    if kind is not None:
        return asked
    kept = own if own["rope_type"] != "default" else {"rope_type": "yarn"}
    if asked.get("factor") != own.get("factor"):  # `attention_factor` is computed from `factor`
        kept = {name: value for name, value in kept.items() if name not in ("factor", "attention_factor")}
    return kept | asked
