"""Hugging Face checkpoints: into this repository's GPT by config.json alone, and back.

A family is one model_type. Its fields of config.json are listed one by one: those that shape the model, those that may
have one value only, and those that change nothing here. Whatever else stands in config.json is an error.
"""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.stack import Memory
from fa_train.models.attention import Attention, flash_attention, naive_attention, sdpa_attention
from fa_train.models.gpt import GPT, Block, Family, Origin
from fa_train.models.rope import SCALINGS, DynamicNTKScaling, RopeScaling
from fa_train.models.rope import rope_scaling as parse_rope_scaling

ATTENTIONS: dict[str, Attention] = {"flash": flash_attention, "sdpa": sdpa_attention, "naive": naive_attention}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOSS_CHUNK = 4096  # tokens, as conf/memory
SHARD_BYTES = 5 * 10**9  # as large as transformers' own shards were for years

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class SavesTokenizer(Protocol):
    """A transformers tokenizer, as far as an export needs it."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def save_pretrained(self, save_directory: str) -> object: ...


@dataclass(frozen=True)
class Layout:
    """What a family calls its tensors.

    outer and inner map our modules to theirs, below the model and below one layer; where theirs are several, ours holds
    them one below the other. transposed: linear weights of layers are (in, out).
    """

    layers: str
    outer: Mapping[str, str]
    inner: Mapping[str, Sequence[str]]
    transposed: bool = False


@dataclass(frozen=True)
class Place:
    """Where one tensor of a checkpoint stands in the model: rows of a parameter."""

    parameter: str
    rows: slice
    transposed: bool


@dataclass(frozen=True)
class CheckpointFamily:
    """One model_type.

    read: the fields that `arguments` takes, from transformers' config object, for GPT's constructor.
    required: fields of which one of these values only is supported. irrelevant: fields that change nothing here.
    """

    architecture: str
    arguments: Callable[[Any], dict[str, Any]]
    layout: Layout
    read: frozenset[str]
    required: Mapping[str, tuple[object, ...]]
    irrelevant: frozenset[str] = field(default_factory=frozenset)


def load_pretrained(
    pretrained: str | Path,
    attention: str | Attention = "flash",
    *,
    vocab_size: int | None = None,
    dtype: str | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    max_seq_len: int | None = None,
    loss: LinearCrossEntropy | None = None,
    memory: Memory | None = None,
) -> GPT:
    """The model of a Hugging Face checkpoint, by its folder or its name on the hub.

    attention is flash, sdpa, naive or a callable. vocab_size is what the data's tokenizer needs, None is not checked.
    dtype is that of the weights (float32, bfloat16, float16), None as they are stored. rope_scaling replaces the
    checkpoint's own, with the keys of `rope_parameters` in config.json; None keeps it, rope_type: default removes it,
    rope_type: null is the checkpoint's own kind, or yarn where it has none. rope_theta replaces its base. max_seq_len
    is how many tokens the model must reach: a rope_scaling without a factor gets the one that does, and changes nothing
    where the checkpoint reaches as far by itself. What they change is exported in config.json.
    Weights come from disk one by one, each into its place on torch's default device; on meta none are read.
    Raises: ValueError on a folder without a whole checkpoint, on fields of config.json and tensors that are not known,
    on a vocabulary smaller than the data's, and on a max_seq_len that neither scaling nor base takes the model to.
    """
    on_meta = torch.get_default_device().type == "meta"
    folder = _folder(str(pretrained), with_weights=not on_meta)
    config = _text_part(_read_json(folder / "config.json"), folder / "config.json")
    if rope_scaling is not None or rope_theta is not None or max_seq_len is not None:
        config = _with_rope(config, folder / "config.json", rope_scaling, rope_theta, max_seq_len)
    model = _empty_model(config, folder / "config.json", _attention(attention), loss, memory)
    if vocab_size is not None and vocab_size > model.vocab_size:
        raise ValueError(
            f"the data's tokenizer has {vocab_size} tokens, the checkpoint {pretrained} only {model.vocab_size}. "
            f"Choose data.tokenizer={pretrained}"
        )
    generation_config = folder / "generation_config.json"
    model.origin = Origin(config, _read_json(generation_config) if generation_config.exists() else None)
    if not on_meta:
        _read_weights(model, folder, FAMILIES[config["model_type"]].layout, None if dtype is None else _dtype(dtype))
    return model


def save_pretrained(
    model: GPT,
    folder: str | Path,
    tokenizer: SavesTokenizer | None = None,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes what transformers' AutoModelForCausalLM.from_pretrained reads, into a folder that is new or has no model.

    dtype is that of the written weights, None as they are. Units: shard_bytes is the most that one file holds, unless a
    single tensor is larger. config.json is written last: a folder whose writing failed has none.
    Raises: ValueError on a folder that holds a model, and on a model that no family describes.
    """
    folder = Path(folder)
    if folder.exists() and (
        not folder.is_dir() or any(folder.glob("*.safetensors*")) or (folder / "config.json").exists()
    ):
        raise ValueError(f"the export's folder must be new or without a model; got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model, tokenizer)
    written = None if dtype is None else _dtype(dtype)
    _write_weights(model, folder, FAMILIES[config["model_type"]].layout, written, shard_bytes)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    _write_json(folder / "generation_config.json", _generation_config(model, tokenizer))
    stored = str(written or model.token_embedding.weight.dtype).removeprefix("torch.")
    dtype_field = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    _write_json(folder / "config.json", config | {dtype_field: stored})


def _text_part(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """config.json, or where the model sees images too (Gemma 3 from 4B on), that of its language model.

    Images have no part here: what else such a config.json has is not read, and only the language model is exported.
    """
    if config.get("model_type") != WITH_IMAGES:
        return config
    if not isinstance(config.get("text_config"), dict):
        raise ValueError(f"{path}: model_type={WITH_IMAGES} must have its text_config; got {config.get('text_config')}")
    shared = {name: config[name] for name in SHARED_WITH_IMAGES if name in config}
    return shared | config["text_config"] | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


def _empty_model(
    config: Mapping[str, Any],
    path: Path,
    attention: Attention,
    loss: LinearCrossEntropy | None = None,
    memory: Memory | None = None,
) -> GPT:
    """The GPT that config.json describes, on the meta device; `path` is for the errors."""
    family, normalised = _understood(config, path)
    try:
        arguments = family.arguments(normalised)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if loss is None:
        loss = LinearCrossEntropy(LOSS_CHUNK) if memory is None else memory.loss
    with torch.device("meta"):
        return GPT(**arguments, attention=attention, loss=loss, memory=memory)


def _understood(config: Mapping[str, Any], path: Path) -> tuple[CheckpointFamily, Any]:
    """The family and transformers' config object, which knows each family's defaults and older spellings.

    Every field of config.json must be known to the family, and those of one value must have it.
    """
    family = _family(config, path)
    from transformers import AutoConfig  # seconds to import

    try:
        normalised = AutoConfig.for_model(**copy.deepcopy(dict(config)))  # it writes into what it is given
    except (StrictDataclassError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    for name, supported in family.required.items():
        found = getattr(normalised, name, supported[0]) if config.get(name) is None else config[name]
        if found not in supported:
            choices = " or ".join(json.dumps(value) for value in supported)
            raise ValueError(f"{path}: {name} must be {choices}; got {json.dumps(found)}")
    return family, normalised


def _family(config: Mapping[str, Any], path: Path) -> CheckpointFamily:
    """By model_type; every field of config.json must be known to it."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"{path}: model_type must be one of {', '.join(FAMILIES)}; got {model_type}")
    family = FAMILIES[model_type]
    architectures = config.get("architectures")
    if architectures and family.architecture not in architectures:
        raise ValueError(f"{path}: architectures must name {family.architecture}; got {', '.join(architectures)}")
    known = family.read | family.required.keys() | family.irrelevant | IRRELEVANT
    unknown = sorted(name for name, value in config.items() if name not in known and value is not None)
    if unknown:
        listed = ", ".join(f"{name}={json.dumps(config[name])}" for name in unknown)
        raise ValueError(f"{path}: not supported for model_type={model_type}: {listed}")
    return family


def _llama(config: Any) -> dict[str, Any]:
    """What all but GPT-2 share."""
    theta, scaling = _rope(config.rope_parameters, config.max_position_embeddings)
    return {
        "vocab_size": config.vocab_size,
        "n_layers": config.num_hidden_layers,
        "dim": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None),
        "ffn_dim": config.intermediate_size,
        "norm": "rmsnorm",
        "norm_eps": config.rms_norm_eps,
        "positions": "rope",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_seq_len": config.max_position_embeddings,
        "activation": "swiglu",
        "bias": False,
        "qk_norm": False,
        "tied": config.tie_word_embeddings,
        "init": "llama",
        "family": Family(
            qkv_bias=getattr(config, "attention_bias", False),
            out_bias=getattr(config, "attention_bias", False),
            ffn_bias=getattr(config, "mlp_bias", False),
        ),
    }


def _arcee(config: Any) -> dict[str, Any]:
    return _llama(config) | {"activation": "gelu"}


def _mistral(config: Any) -> dict[str, Any]:
    return _llama(config) | {"family": Family(windows=(config.sliding_window,) * config.num_hidden_layers)}


def _qwen2(config: Any) -> dict[str, Any]:
    return _llama(config) | {"family": Family(qkv_bias=True, windows=_windows(config))}


def _qwen3(config: Any) -> dict[str, Any]:
    arguments = _llama(config)
    return arguments | {"qk_norm": True, "family": dataclasses.replace(arguments["family"], windows=_windows(config))}


def _smollm3(config: Any) -> dict[str, Any]:
    arguments = _llama(config)
    rotated = tuple(bool(rotates) for rotates in config.no_rope_layers[: config.num_hidden_layers])
    family = dataclasses.replace(arguments["family"], rope_layers=rotated, windows=_windows(config))
    return arguments | {"family": family}


def _gemma2(config: Any) -> dict[str, Any]:
    arguments = _llama(config)
    again = getattr(config, "sliding_window_size", None)  # Gemma 2 9B has both
    if again not in (None, config.sliding_window):
        raise ValueError(f"sliding_window_size must be sliding_window={config.sliding_window}; got {again}")
    family = dataclasses.replace(
        arguments["family"],
        windows=_windows(config),
        softmax_scale=config.query_pre_attn_scalar**-0.5,
        softcap=config.attn_logit_softcapping or 0.0,
        logit_softcap=config.final_logit_softcapping or 0.0,
        embedding_scale=config.hidden_size**0.5,
        post_norms=True,
    )
    return arguments | {"norm": "offset_rmsnorm", "activation": "geglu", "family": family}


def _gemma3(config: Any) -> dict[str, Any]:
    by_kind = config.rope_parameters
    local_theta, local_scaling = _rope(by_kind["sliding_attention"], config.max_position_embeddings)
    if local_scaling is not None:
        raise ValueError(f"rope_parameters.sliding_attention must be unscaled; got {by_kind['sliding_attention']}")
    if config.sliding_window is None:  # by which GPT tells the layers of local_rope_theta
        raise ValueError("sliding_window must be a number of tokens; got null")
    config.rope_parameters = by_kind["full_attention"]
    arguments = _gemma2(config)
    return arguments | {
        "qk_norm": True,
        "family": dataclasses.replace(arguments["family"], local_rope_theta=local_theta),
    }


def _gpt2(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_layers": config.n_layer,
        "dim": config.n_embd,
        "n_heads": config.n_head,
        "n_kv_heads": None,
        "head_dim": None,
        "ffn_dim": config.n_inner or 4 * config.n_embd,
        "norm": "layernorm",
        "norm_eps": config.layer_norm_epsilon,
        "positions": "learned",
        "rope_theta": 1.0,
        "max_seq_len": config.n_positions,
        "activation": "gelu",
        "bias": True,
        "qk_norm": False,
        "tied": config.tie_word_embeddings,
        "init": "gpt2",
    }


def _windows(config: Any) -> tuple[int | None, ...]:
    unknown = sorted(set(config.layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types must be full_attention or sliding_attention; got {', '.join(unknown)}")
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def _rope(parameters: Mapping[str, Any], max_seq_len: int) -> tuple[float, dict[str, Any] | None]:
    """theta, and the scaling as GPT takes it."""
    fields = {name: value for name, value in parameters.items() if value is not None}
    theta, part = fields.pop("rope_theta"), fields.pop("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1.0; got {part}")
    scaling = parse_rope_scaling(fields, max_seq_len)
    if isinstance(scaling, DynamicNTKScaling) and scaling.original_max_position_embeddings != max_seq_len:
        raise ValueError(  # which transformers would not look at
            f"original_max_position_embeddings of rope_type=dynamic must be max_position_embeddings={max_seq_len}; "
            f"got {scaling.original_max_position_embeddings}"
        )
    return float(theta), None if scaling is None else _scaling_fields(scaling)


def _scaling_fields(scaling: RopeScaling) -> dict[str, Any]:
    """The inverse of rope.rope_scaling; all fields but those that transformers does not know."""
    [kind] = [name for name, kind in SCALINGS.items() if type(scaling) is kind]
    fields = {name: value for name, value in vars(scaling).items() if value is not None}
    if isinstance(scaling, DynamicNTKScaling):
        del fields["original_max_position_embeddings"]
    return {"rope_type": kind} | fields


def _with_rope(
    config: dict[str, Any],
    path: Path,
    scaling: Mapping[str, Any] | None,
    theta: float | None,
    max_seq_len: int | None,
) -> dict[str, Any]:
    """config.json with another scaling or base, in the form that it has, and the length that these reach."""
    _, normalised = _understood(config, path)
    if not hasattr(normalised, "rope_parameters"):
        raise ValueError(
            f"model.rope_scaling needs a checkpoint with RoPE; got model_type={config['model_type']}. So do "
            "model.rope_theta and model.max_seq_len"
        )
    for name, value in (("rope_theta", theta), ("max_seq_len", max_seq_len)):
        if value is not None and not 1 <= value < float("inf"):
            raise ValueError(f"model.{name} must be at least 1; got {value}")
    by_kind = "full_attention" in normalised.rope_parameters
    parameters = normalised.rope_parameters["full_attention"] if by_kind else normalised.rope_parameters
    own = {name: value for name, value in parameters.items() if value is not None}
    own_theta = own.pop("rope_theta")
    own.pop("partial_rotary_factor", None)  # which must be 1
    reach = normalised.max_position_embeddings
    original = own.get("original_max_position_embeddings", reach)
    asked = own if scaling is None else _asked_scaling(scaling, own, original, reach, max_seq_len)
    parsed = parse_rope_scaling(asked, original)
    fields: dict[str, Any] = {"rope_type": "default"} if parsed is None else _scaling_fields(parsed)
    is_dynamic = isinstance(parsed, DynamicNTKScaling)  # max_position_embeddings stays, as that is where it begins
    if asked is not own:
        reach = fields.get("original_max_position_embeddings", original)
        reach = reach if parsed is None or is_dynamic else round(reach * fields["factor"])
    if max_seq_len is not None and max_seq_len > reach and not is_dynamic:
        if theta is None:
            raise ValueError(
                f"model.max_seq_len={max_seq_len} is more than the {reach} tokens that {path} reaches: choose another "
                "model.rope_scaling, such as {rope_type: yarn}, or model.rope_theta"
            )
        reach = max_seq_len
    if asked is own and theta is None:
        return config
    config = copy.deepcopy(config)
    theta = own_theta if theta is None else float(theta)
    if config.get("rope_parameters") is None:  # as before transformers 5
        config["rope_scaling"], config["rope_theta"] = None if parsed is None else fields, theta
    elif by_kind:
        config["rope_parameters"]["full_attention"] = fields | {"rope_theta": theta}
    else:
        config["rope_parameters"] = fields | {"rope_theta": theta}
    return config | {"max_position_embeddings": reach}


def _asked_scaling(
    scaling: Mapping[str, Any], own: dict[str, Any], original: int, own_reach: int, max_seq_len: int | None
) -> dict[str, Any]:
    """`scaling` with its kind and its factor where it leaves them out; `own` itself where there is no need of one."""
    asked = {name: value for name, value in scaling.items() if value is not None}
    kind = asked.get("rope_type", asked.get("type"))
    if "factor" not in asked and kind != "default" and max_seq_len is not None and max_seq_len <= own_reach:
        return own
    if kind is None:
        is_scaled = own.get("rope_type", "default") != "default"
        asked = (own if is_scaled else {"rope_type": "yarn"}) | asked
        if "factor" not in scaling:
            asked.pop("factor", None)
            asked.pop("attention_factor", None)  # it belongs to the factor
    if "factor" not in asked and kind != "default" and max_seq_len is not None:
        asked["factor"] = max_seq_len / asked.get("original_max_position_embeddings", original)
    return asked


def _config(model: GPT, tokenizer: SavesTokenizer | None) -> dict[str, Any]:
    """The origin's config.json, or one whose model is this one."""
    if model.origin is not None:
        return dict(model.origin.config)
    from transformers import __version__

    for candidate in _candidates(model, _token_ids(tokenizer)):
        described = _empty_model(candidate, Path("config.json"), naive_attention)
        if _signature(described) == _signature(model):
            architecture = FAMILIES[candidate["model_type"]].architecture
            return {"architectures": [architecture], **candidate, "transformers_version": __version__}
    raise ValueError(
        "no family of Hugging Face checkpoints is such a model; llama (norm=rmsnorm positions=rope activation=swiglu), "
        "qwen3 (the same with qk_norm=true), arcee (llama with activation=gelu) and gpt2 (norm=layernorm "
        "positions=learned activation=gelu bias=true) are"
    )


def _candidates(model: GPT, token_ids: Mapping[str, int | None]) -> Iterator[dict[str, Any]]:
    """The config.json of families that may have this model."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    dim, eps = model.token_embedding.embedding_dim, model.norm.eps
    common = {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tied, **token_ids}
    yield common | {
        "model_type": "gpt2",
        "n_embd": dim,
        "n_layer": model.n_layers,
        "n_head": model.n_heads,
        "n_inner": block.ffn.down.in_features,
        "n_positions": model.max_seq_len or 1,
        "layer_norm_epsilon": eps,
        # transformers would drop activations in training, as no one does today
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    rope = model.ropes[0]
    if rope is None:
        return
    scaling = {"rope_type": "default"} if rope.scaling is None else _scaling_fields(rope.scaling)
    llama = common | {
        "hidden_size": dim,
        "intermediate_size": block.ffn.down.in_features,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": block.attention.heads[1],
        "head_dim": model.head_dim,
        "rms_norm_eps": eps,
        "rope_parameters": scaling | {"rope_theta": rope.theta},
        "attention_bias": block.attention.qkv.bias is not None,
    }
    if model.max_seq_len is not None:
        llama["max_position_embeddings"] = model.max_seq_len
    with_ffn_bias = llama | {"mlp_bias": block.ffn.up.bias is not None}
    yield with_ffn_bias | {"model_type": "llama", "hidden_act": "silu"}
    yield with_ffn_bias | {"model_type": "arcee", "hidden_act": "gelu_pytorch_tanh"}
    yield llama | {"model_type": "qwen3", "hidden_act": "silu"}


def _signature(model: GPT) -> dict[str, object]:
    """All that decides what a model computes from its weights."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    own = dataclasses.asdict(model.family)
    return {
        "shapes": {name: parameter.shape for name, parameter in model.named_parameters()},
        "heads": block.attention.heads,
        "norm": (type(model.norm), model.norm.eps),
        "positions": model.positions,
        "ropes": model.ropes,
        "windows": model.windows,
        "activation": block.ffn.activation,
        "scores": [own[name] for name in ("softmax_scale", "softcap", "logit_softcap", "embedding_scale")],
    }


def _generation_config(model: GPT, tokenizer: SavesTokenizer | None) -> dict[str, Any]:
    if model.origin is not None and model.origin.generation_config is not None:
        return dict(model.origin.generation_config)
    known = {} if model.origin is None else model.origin.config
    own = _token_ids(tokenizer)
    ids = {name: known.get(name) if own[name] is None else own[name] for name in own}
    return {"_from_model_config": True} | {name: i for name, i in ids.items() if i is not None}


def _token_ids(tokenizer: SavesTokenizer | None) -> dict[str, int | None]:
    """The special tokens that a checkpoint names; None where there are none, so that no family's own come in."""
    return {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def tensor_places(model: GPT) -> dict[str, Place]:
    """Where each tensor stands in the model, by the name that its own family's checkpoints give it.

    Raises: ValueError on a model that no family describes.
    """
    return _places(model, FAMILIES[_config(model, None)["model_type"]].layout)


def _places(model: GPT, layout: Layout) -> dict[str, Place]:
    """By the name of each tensor of the checkpoint, in the order of the layers; a tied head has none."""
    parameters = dict(model.named_parameters())
    modules: list[tuple[str, Sequence[str], bool]] = [(ours, (theirs,), False) for ours, theirs in layout.outer.items()]
    for i, block in enumerate(model.blocks):
        for ours, theirs in layout.inner.items():
            linear = ours.partition(".")[0] in ("attention", "ffn") and not ours.endswith("norm")
            names = [f"{layout.layers.format(i)}.{name}" for name in theirs]
            modules.append((f"blocks.{i}.{ours}", names, layout.transposed and linear))
        assert isinstance(block, Block)
    places = {}
    for ours, theirs, transposed in modules:
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" not in parameters:
                continue
            rows = parameters.pop(f"{ours}.{kind}").shape[0]
            start = 0
            for name, count in zip(theirs, _row_counts(model, ours, rows, len(theirs)), strict=True):
                is_matrix = kind == "weight" and transposed
                places[f"{name}.{kind}"] = Place(f"{ours}.{kind}", slice(start, start + count), is_matrix)
                start += count
    assert not parameters, f"not in the layout: {', '.join(parameters)}"
    return places


def _row_counts(model: GPT, module: str, rows: int, parts: int) -> list[int]:
    """How the rows of a joined matrix are divided."""
    if parts == 1:
        return [rows]
    if module.endswith("qkv"):
        block = model.blocks[0]
        assert isinstance(block, Block)
        return [heads * model.head_dim for heads in block.attention.heads]
    return [rows // parts] * parts


def _read_weights(model: GPT, folder: Path, layout: Layout, dtype: torch.dtype | None) -> None:
    """Every tensor of the checkpoint into its place, in `dtype` or its own."""
    places = _places(model, layout)
    missing = set(places)
    for path, names in _shards(folder):
        for name, tensor in _tensors(path, names):
            place_name = _place_name(name, places, layout)
            if place_name is None:
                if _is_unused(name, model.tied):
                    continue
                raise ValueError(f"{path}: tensor {name} has no place in this model")
            _put(model, places[place_name], tensor, dtype, f"{path}: tensor {name}")
            missing.discard(place_name)
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing, {', '.join(sorted(missing)[:3])} among them")
    if model.tied:
        model.head.weight = model.token_embedding.weight


def _put(model: GPT, place: Place, tensor: Tensor, dtype: torch.dtype | None, what: str) -> None:
    """Copies into the place's rows; the first one to come makes the parameter."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(f"{what} must be of float32, bfloat16 or float16; got {tensor.dtype}: it is quantized")
    parent, _, kind = place.parameter.rpartition(".")
    module = model.get_submodule(parent)
    parameter = getattr(module, kind)
    if place.transposed:
        tensor = tensor.T
    wanted = (place.rows.stop - place.rows.start, *parameter.shape[1:])
    if tensor.shape != wanted:
        raise ValueError(f"{what} must be {_shape(wanted, place)} by config.json; got {_shape(tensor.shape, place)}")
    if parameter.is_meta:
        parameter = nn.Parameter(torch.empty(parameter.shape, dtype=dtype or tensor.dtype))
        setattr(module, kind, parameter)
    if dtype is None and tensor.dtype != parameter.dtype:  # of queries, keys and values, or gate and values
        raise ValueError(
            f"{what} must be {parameter.dtype}, as what it is joined with, or choose a dtype; got {tensor.dtype}"
        )
    with torch.no_grad():
        parameter[place.rows] = tensor.to(parameter.dtype)


def _shape(shape: Sequence[int], place: Place) -> tuple[int, ...]:
    """As the checkpoint has it."""
    return tuple(reversed(shape)) if place.transposed else tuple(shape)


def _shards(folder: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The files of weights and the tensors to read from each, None for all."""
    if (folder / WEIGHTS).exists():
        yield folder / WEIGHTS, None
        return
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {', '.join(others)}, which is not read" if others else "neither"
        raise ValueError(f"{folder} must hold {WEIGHTS} or {INDEX}; found {found}")
    by_file: dict[str, list[str]] = {}
    for name, file in _read_json(folder / INDEX)["weight_map"].items():
        by_file.setdefault(file, []).append(name)
    for file in sorted(by_file):
        if not (folder / file).exists():
            raise ValueError(f"{folder / file} is missing; {INDEX} names it")
        yield folder / file, by_file[file]


def _tensors(path: Path, names: list[str] | None) -> Iterator[tuple[str, Tensor]]:
    """One after the other, on the CPU."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as shard:
            stored = set(shard.keys())
            absent = sorted(set(names or ()) - stored)
            if absent:
                raise ValueError(f"{path} must hold {absent[0]}, as {INDEX} says; it holds {len(stored)} other tensors")
            for name in names or sorted(stored):
                yield name, shard.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _place_name(name: str, places: Mapping[str, Place], layout: Layout) -> str | None:
    """Checkpoints of the model without its head, such as GPT-2's own, leave the first part of the name out.

    Those that see images have another part in it, in older ones before the rest.
    """
    prefixed = f"{layout.layers.partition('.')[0]}.{name}"
    candidates = name, prefixed, name.replace("language_model.", "", 1)
    return next((candidate for candidate in candidates if candidate in places), None)


def _is_unused(name: str, tied: bool) -> bool:
    """Buffers that older versions of transformers saved, a second copy of a tied head, and what sees images."""
    buffers = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
    images = ("vision_tower.", "multi_modal_projector.")
    return (
        name.endswith(buffers)
        or (tied and name.removeprefix("language_model.") == "lm_head.weight")
        or name.removeprefix("model.").startswith(images)
    )


def _write_weights(model: GPT, folder: Path, layout: Layout, dtype: torch.dtype | None, shard_bytes: int) -> None:
    """Shards of at most shard_bytes, and the index where they are several."""
    places = _places(model, layout)
    parameters = dict(model.named_parameters())
    shards: list[dict[str, Place]] = [{}]
    filled, total = 0, 0
    for name, place in places.items():
        parameter = parameters[place.parameter]
        share = (place.rows.stop - place.rows.start) * parameter.numel() // parameter.shape[0]
        size = share * (dtype or parameter.dtype).itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = place
        filled, total = filled + size, total + size
    files = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    for file, shard in zip(files, shards, strict=True):
        tensors = {name: _take(parameters[place.parameter], place, dtype) for name, place in shard.items()}
        partial = folder / f"{file}.partial"
        save_file(tensors, str(partial), metadata={"format": "pt"})
        os.replace(partial, folder / file)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _take(parameter: Tensor, place: Place, dtype: torch.dtype | None) -> Tensor:
    """The inverse of _put."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    rows = whole.detach()[place.rows].to(dtype or whole.dtype).cpu()
    return (rows.T if place.transposed else rows).contiguous()


def _folder(pretrained: str, with_weights: bool) -> Path:
    """Where the checkpoint lies, fetched from the hub if that is where it is."""
    if Path(pretrained).is_dir():
        return Path(pretrained)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = ["config.json", "generation_config.json"] + (["model*.safetensors", INDEX] if with_weights else [])
    try:
        return Path(snapshot_download(pretrained, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"model.pretrained must be a folder with a checkpoint or a name on the Hugging Face hub; got {pretrained}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} must hold {path.name}; it does not") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object; got {type(content).__name__}")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _attention(attention: str | Attention) -> Attention:
    if not isinstance(attention, str):
        return attention
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)} or a callable; got {attention}")
    return ATTENTIONS[attention]


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {name}")
    return DTYPES[name]


# of no weight to what the model computes
# the model_type of a model that sees images too, and what its config.json says of both parts
WITH_IMAGES = "gemma3"
SHARED_WITH_IMAGES = (
    "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
IRRELEVANT = frozenset(
    {
        # what the file is, and who wrote it
        "_name_or_path", "name_or_path", "_model_name_or_path", "_commit_hash", "architectures", "model_type", "dtype",
        "torch_dtype", "transformers_version", "is_llama_config", "transformers.js_config", "unsloth_version",
        "unsloth_fixed", "max_sequence_length",
        # training from scratch; no dropout is applied here, whatever the checkpoint was trained with
        "initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
        # how transformers runs it
        "use_cache", "cache_implementation", "_attn_implementation_autoset", "attn_implementation", "pretraining_tp",
        "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict", "torchscript",
        "reorder_and_upcast_attn", "tf_legacy_loss", "use_bfloat16", "pruned_heads", "output_past",
        "_flash_attn_2_enabled",
        # tokens and generation
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
        "tokenizer_class", "prefix", "task_specific_params", "max_length", "min_length", "do_sample", "early_stopping",
        "num_beams",
        "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
        "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
        "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens",
        # heads for other tasks
        "id2label", "label2id", "num_labels", "_num_labels", "predict_special_tokens", "problem_type",
        "summary_type", "summary_use_proj",
        "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "finetuning_task",
    }
)  # fmt: skip

REQUIRED: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (False, True),
    "tie_encoder_decoder": (False,),
    "rope_interleaved": (False,),
}
SILU = REQUIRED | {"hidden_act": ("silu",)}
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")  # two names of one function

READ_LLAMA = frozenset(
    {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
        "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings",
    }
)  # fmt: skip
WINDOWS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})

LLAMA_LAYOUT = Layout(
    layers="model.layers.{}",
    outer={"token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    inner={
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        "ffn_norm": ("post_attention_layernorm",),
        "ffn.up": ("mlp.gate_proj", "mlp.up_proj"),
        "ffn.down": ("mlp.down_proj",),
    },
)
ARCEE_LAYOUT = dataclasses.replace(LLAMA_LAYOUT, inner={**LLAMA_LAYOUT.inner, "ffn.up": ("mlp.up_proj",)})
GEMMA_LAYOUT = dataclasses.replace(
    LLAMA_LAYOUT,
    inner={
        **LLAMA_LAYOUT.inner,
        "attention_post_norm": ("post_attention_layernorm",),
        "ffn_norm": ("pre_feedforward_layernorm",),
        "ffn_post_norm": ("post_feedforward_layernorm",),
    },
)
GPT2_LAYOUT = Layout(
    layers="transformer.h.{}",
    outer={
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    inner={
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "ffn_norm": ("ln_2",),
        "ffn.up": ("mlp.c_fc",),
        "ffn.down": ("mlp.c_proj",),
    },
    transposed=True,
)

FAMILIES = {
    "gpt2": CheckpointFamily(
        "GPT2LMHeadModel",
        _gpt2,
        GPT2_LAYOUT,
        frozenset(
            {
                "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "layer_norm_epsilon",
                "tie_word_embeddings",
            }
        ),
        REQUIRED
        | {
            "activation_function": GELU_TANH,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "n_special": (0,),  # more tokens than the vocabulary's, before there was model_type
        },
        frozenset({"n_ctx", "gradient_checkpointing"}),
    ),
    "llama": CheckpointFamily(
        "LlamaForCausalLM", _llama, LLAMA_LAYOUT, READ_LLAMA | {"attention_bias", "mlp_bias"}, SILU
    ),
    "arcee": CheckpointFamily(
        "ArceeForCausalLM",
        _arcee,
        ARCEE_LAYOUT,
        READ_LLAMA | {"attention_bias", "mlp_bias"},
        REQUIRED | {"hidden_act": GELU_TANH},
    ),
    "mistral": CheckpointFamily(
        "MistralForCausalLM", _mistral, LLAMA_LAYOUT, READ_LLAMA | {"sliding_window"}, SILU
    ),
    "qwen2": CheckpointFamily(
        "Qwen2ForCausalLM", _qwen2, LLAMA_LAYOUT, READ_LLAMA | WINDOWS, SILU | {"use_mrope": (False, None)}
    ),
    "qwen3": CheckpointFamily(
        "Qwen3ForCausalLM", _qwen3, LLAMA_LAYOUT, READ_LLAMA | WINDOWS | {"attention_bias"}, SILU
    ),
    "smollm3": CheckpointFamily(
        "SmolLM3ForCausalLM",
        _smollm3,
        LLAMA_LAYOUT,
        READ_LLAMA | WINDOWS | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"},
        SILU,
    ),
    "gemma2": CheckpointFamily(
        "Gemma2ForCausalLM",
        _gemma2,
        GEMMA_LAYOUT,
        READ_LLAMA
        | {
            "attention_bias", "sliding_window", "sliding_window_size", "layer_types", "query_pre_attn_scalar",
            "attn_logit_softcapping", "final_logit_softcapping",
        },
        REQUIRED
        | {
            "hidden_activation": GELU_TANH,
            "hidden_act": GELU_TANH,
            "use_bidirectional_attention": (None, False),
        },
    ),
    "gemma3_text": CheckpointFamily(
        "Gemma3ForCausalLM",
        _gemma3,
        GEMMA_LAYOUT,
        READ_LLAMA
        | {
            "attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar", "final_logit_softcapping",
            "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq",
        },
        REQUIRED
        | {
            "hidden_activation": GELU_TANH,
            "hidden_act": GELU_TANH,
            "use_bidirectional_attention": (False, None),
            "attn_logit_softcapping": (None,),  # which transformers does not apply
        },
    ),
}  # fmt: skip
