"""Loads a Hugging Face checkpoint as a GPT, and saves a GPT as a Hugging Face checkpoint."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from fa_train.bounds import AtLeastOne, Dtype, PositiveInt
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.models.attention import Attention, flash_attention, naive_attention, sdpa_attention
from fa_train.models.config import ModelConfig
from fa_train.models.gpt import GPT
from fa_train.models.hf.families import FAMILIES, WITH_IMAGES, Layout, scaling_fields, text_part, understood
from fa_train.models.hf.rope import with_rope
from fa_train.models.hf.weights import (
    INDEX,
    Place,
    has_weights,
    places_of,
    read_json,
    read_weights,
    require_finite,
    stored_dtypes,
    stored_tensors,
    write_json,
    write_weights,
)
from fa_train.models.origin import Origin

ATTENTIONS: dict[str, Attention] = {"flash": flash_attention, "sdpa": sdpa_attention, "naive": naive_attention}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOSS_CHUNK = 4096  # tokens, as in conf/memory
SHARD_BYTES = 5 * 10**9  # as in transformers 4


class SavesTokenizer(Protocol):
    """The attributes and methods of a transformers tokenizer that an export uses."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def save_pretrained(self, save_directory: str) -> object: ...


def load_pretrained(
    pretrained: str | Path,
    attention: str | Attention = "flash",
    *,
    vocab_size: PositiveInt | None = None,
    dtype: Dtype | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: AtLeastOne | None = None,
    max_seq_len: PositiveInt | None = None,
    loss: LinearCrossEntropy | None = None,
    memory: Memory | None = None,
) -> GPT:
    """Loads a Hugging Face checkpoint as a GPT.

    pretrained: the folder of the checkpoint, or its name on the Hugging Face hub.
    attention: "flash", "sdpa", "naive" or a function with the signature of fa_train.models.attention.Attention.
    vocab_size: the minimum size of the checkpoint's vocabulary in tokens, or None for no minimum.
    dtype: the dtype of the weights (float32, bfloat16, float16), or None to keep the stored dtype.
    rope_scaling: the RoPE scaling, or None to keep the checkpoint's scaling. The keys of rope_scaling are those of
    `rope_parameters` in config.json. rope_type="default" removes the scaling. Without rope_type, rope_scaling gets the
    checkpoint's rope_type, or yarn if the checkpoint has no scaling.
    rope_theta: the base of RoPE's frequencies, or None to keep the checkpoint's base.
    max_seq_len: the number of tokens that the model must support. If rope_scaling has no factor, the factor is computed
    from max_seq_len, and is at least the checkpoint's factor. A rope_scaling without a factor has no effect if the
    checkpoint already supports max_seq_len tokens. But rope_type="default" always removes the scaling of the
    checkpoint. If rope_scaling, rope_theta or max_seq_len changes RoPE, an export writes the new RoPE to config.json.
    Weights are read one by one to torch's default device. If torch's default device is the meta device, `materialise`
    reads the weights later, and converts them to the parameters' dtype. If `dtype` is None, the parameters have the
    stored dtype, or fp32 if the checkpoint is not on this machine yet.
    Raises: ValueError if the checkpoint is incomplete, its vocabulary is too small, or a tensor or a field of
    config.json is not supported. ValueError if the resulting RoPE does not support max_seq_len tokens.
    """
    device = torch.get_default_device()
    on_meta = device.type == "meta"
    folder = _folder(str(pretrained), with_weights=not on_meta)
    stored = read_json(folder / "config.json")
    config = own = text_part(stored, folder / "config.json")
    if rope_scaling is not None or rope_theta is not None or max_seq_len is not None:
        config = with_rope(config, folder / "config.json", rope_scaling, rope_theta, max_seq_len)
    if loss is None:
        loss = LinearCrossEntropy(LOSS_CHUNK) if memory is None else memory.loss
    arguments = _arguments(config, folder / "config.json")
    with torch.device("meta"):
        model = GPT(**arguments, attention=_attention(attention), loss=loss, memory=memory)
    known = model.config.vocab_size
    if vocab_size is not None and vocab_size > known:
        raise ValueError(
            f"data.tokenizer must have at most {known} tokens, the vocabulary of {pretrained}; got {vocab_size}. "
            f"Choose data.tokenizer={pretrained}. If you have chosen it, choose a copy of it without the tokens from "
            f"id {known} on"
        )
    generation_config = folder / "generation_config.json"
    model.origin = Origin(
        config,
        read_json(generation_config) if generation_config.exists() else None,
        str(pretrained),
        folder,
        has_images=stored["model_type"] == WITH_IMAGES,
        has_new_rope=config is not own,
    )
    layout = FAMILIES[config["model_type"]].layout
    places = places_of(model, layout)
    dtypes = {} if dtype is None else {place.parameter: _dtype(dtype) for place in places.values()}
    if dtype is None and (not on_meta or has_weights(folder)):
        dtypes = stored_dtypes(stored_tensors(model, places, folder, layout))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name))
    model.initialisers = [partial(_read, places=places, pretrained=str(pretrained), layout=layout)]
    if not on_meta:
        model.materialise(device)
    return model


def require_checkpoint(pretrained: str, key: str = "model.pretrained") -> None:
    """Checks that there is a config.json in the folder `pretrained`, or on the hub under the name `pretrained`.

    key: the name of the setting, for error messages.
    Raises: ValueError if there is no config.json.
    """
    folder = _folder(pretrained, with_weights=False, key=key)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key} must be a checkpoint with a config.json; {pretrained} has none")


def _read(model: GPT, *, places: Mapping[str, Place], pretrained: str, layout: Layout) -> None:
    """Reads the checkpoint's weights into a model that `load_pretrained` has built.

    If the model is sharded, reads only this rank's rows.
    """
    folder = _folder(pretrained, with_weights=True)
    read_weights(model, stored_tensors(model, places, folder, layout))


def save_pretrained(
    model: GPT,
    folder: str | Path,
    tokenizer: SavesTokenizer | None = None,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    ends: Collection[int] = (),
) -> None:
    """Saves a model in the format of transformers' AutoModelForCausalLM.from_pretrained.

    generation_config.json names the tokens that end a text: those of the checkpoint from which the model was loaded,
    the tokenizer's eos_token, and `ends`.

    dtype: the dtype of the written weights, or None to keep the dtype of each weight.
    shard_bytes: the maximum size of a weight file in bytes. A tensor that is larger than shard_bytes gets a separate
    file.
    config.json is written last, so an unfinished folder does not contain config.json.
    Raises: ValueError if `folder` already contains a model, or no supported family matches `model`. Also raises
        ValueError if `model` has no weights, or if its adapters are not merged. Also raises ValueError if a weight is
        NaN or infinite in the written dtype.
    """
    model.require_weights()
    folder = Path(folder)
    if folder.exists() and (
        not folder.is_dir() or any(folder.glob("*.safetensors*")) or (folder / "config.json").exists()
    ):
        raise ValueError(f"an export needs a new folder or one without a model; {folder} is a file or contains a model")
    written = None if dtype is None else _dtype(dtype)
    require_finite(model, written)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model, tokenizer)
    write_weights(model, folder, FAMILIES[config["model_type"]].layout, written, shard_bytes)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    write_json(folder / "generation_config.json", _generation_config(model, tokenizer, ends))
    stored = str(written or model.token_embedding.weight.dtype).removeprefix("torch.")
    dtype_field = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    write_json(folder / "config.json", config | {dtype_field: stored})


def save_tokenizer(tokenizer: SavesTokenizer, folder: Path) -> None:
    """Writes the files of a tokenizer. Raises: ValueError or OSError if a file cannot be written."""
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:
        if type(error) is not Exception:
            raise
        # the tokenizers library raises a plain Exception, for example if the disk is full
        raise ValueError(f"the tokenizer could not be written to {folder}: {error}") from error


def _arguments(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the fields of ModelConfig for a config.json. path: the path of config.json, for error messages."""
    family, normalised = understood(config, path)
    try:
        return family.arguments(normalised)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _config(model: GPT, tokenizer: SavesTokenizer | None) -> dict[str, Any]:
    """Returns the config.json of the loaded checkpoint, or a new one if the model was not loaded from a checkpoint."""
    return new_config(model.config, tokenizer) if model.origin is None else dict(model.origin.config)


def new_config(model: ModelConfig, tokenizer: SavesTokenizer | None) -> dict[str, Any]:
    """Returns the config.json for a model that was not loaded from a checkpoint.

    Raises: ValueError if no supported family matches the model.
    """
    from transformers import __version__

    own, differing = _signature(model), dict[str, list[str]]()
    for candidate in _candidates(model, _token_ids(tokenizer)):
        family = candidate["model_type"]
        described = _signature(ModelConfig(**_arguments(candidate, Path("config.json"))))
        if described == own:
            architecture = FAMILIES[family].architecture
            return {"architectures": [architecture], **candidate, "transformers_version": __version__}
        differing[family] = [name for name in own if described[name] != own[name]]
    if model.dim % model.n_heads:
        cause = ". In llama, arcee and gpt2, dim must be a multiple of n_heads"
    elif differing:
        closest = min(differing, key=lambda family: len(differing[family]))
        cause = f". The model differs from {closest} in: {', '.join(differing[closest])}"
    else:
        cause = ""
    raise ValueError(
        "an export needs the architecture of llama (norm=rmsnorm positions=rope activation=swiglu), qwen3 (llama with "
        "qk_norm=true), arcee (llama with activation=gelu) or gpt2 (norm=layernorm positions=learned activation=gelu "
        f"bias=true, and dim = n_heads * head_dim); got norm={model.norm} positions={model.positions} "
        f"activation={model.activation} bias={str(model.bias).lower()} qk_norm={str(model.qk_norm).lower()} "
        f"dim={model.dim} n_heads={model.n_heads} head_dim={model.heads.dim}{cause}"
    )


def _candidates(model: ModelConfig, token_ids: Mapping[str, int | None]) -> Iterator[dict[str, Any]]:
    """Yields a config.json with the model's sizes for each family that may be able to express the model."""
    common = {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tied, **token_ids}
    if model.dim == model.query_dim:  # gpt2 has no field for head_dim, so head_dim is dim / n_heads
        yield common | {
            "model_type": "gpt2",
            "n_embd": model.dim,
            "n_layer": model.n_layers,
            "n_head": model.n_heads,
            "n_inner": model.ffn_dim,
            "n_positions": model.max_seq_len or 1,
            "layer_norm_epsilon": model.norm_eps,
            # without these fields, transformers would apply dropout in training
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    rope = model.ropes[0]
    if rope is None:
        return
    scaling = {"rope_type": "default"} if rope.scaling is None else scaling_fields(rope.scaling)
    llama = common | {
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.heads.kv,
        "head_dim": model.heads.dim,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": scaling | {"rope_theta": rope.theta},
        "attention_bias": model.qkv_bias,
    }
    if model.max_seq_len is not None:
        llama["max_position_embeddings"] = model.max_seq_len
    # transformers refuses llama and arcee models whose dim is not a multiple of n_heads, even if head_dim is set
    if model.dim % model.n_heads == 0:
        with_ffn_bias = llama | {"mlp_bias": model.ffn_bias}
        yield with_ffn_bias | {"model_type": "llama", "hidden_act": "silu"}
        yield with_ffn_bias | {"model_type": "arcee", "hidden_act": "gelu_pytorch_tanh"}
    yield llama | {"model_type": "qwen3", "hidden_act": "silu"}


def _signature(model: ModelConfig) -> dict[str, object]:
    """Returns all settings that determine what a model computes from its weights.

    If a model matches no family, an error message uses keys of the result to say how the model differs from a family.
    """
    norm_bias = model.bias if model.norm == "layernorm" else False
    family = model.extras
    return {
        "sizes": (model.vocab_size, model.n_layers, model.dim, model.ffn_dim, model.tied),
        "heads": model.heads,
        "biases": (model.qkv_bias, model.out_bias, model.ffn_bias, norm_bias),
        "norm": (model.norm, model.norm_eps),
        "qk_norm": model.qk_norm,
        "positions": (model.positions, model.max_seq_len if model.positions == "learned" else None),
        "RoPE": model.ropes,
        "activation": model.activation,
        "family.windows": model.windows,
        "family.softmax_scale": family.softmax_scale,
        "family.softcap": family.softcap,
        "family.logit_softcap": family.logit_softcap,
        "family.embedding_scale": family.embedding_scale,
        "family.post_norms": family.post_norms,
    }


def _generation_config(model: GPT, tokenizer: SavesTokenizer | None, ends: Collection[int]) -> dict[str, Any]:
    origin, own = model.origin, _token_ids(tokenizer)
    known = [] if origin is None else origin.eos_ids
    eos = eos_ids(model, tokenizer, ends)
    if origin is not None and origin.generation_config is not None:
        stored = dict(origin.generation_config)
        if eos != known or stored.get("eos_token_id") is None:
            stored |= {"eos_token_id": _one_or_all(eos)} if eos else {}
            # with _from_model_config, transformers 4 would read config.json, and not this generation_config.json
            stored.pop("_from_model_config", None)
        return stored
    if origin is None:
        settings: dict[str, Any] = {"_from_model_config": True}
    else:  # transformers reads these settings from config.json if there is no generation_config.json
        from transformers import GenerationConfig

        known_names = GenerationConfig().to_dict().keys() - {"transformers_version"}
        settings = {name: value for name, value in origin.config.items() if name in known_names}
    settings |= {name: i for name, i in own.items() if i is not None} | {"eos_token_id": _one_or_all(eos)}
    return {name: value for name, value in settings.items() if value is not None}


def eos_ids(model: GPT, tokenizer: SavesTokenizer | None, ends: Collection[int]) -> list[int]:
    """Returns the tokens that end a text of an exported model. ends: see `save_pretrained`."""
    known = [] if model.origin is None else model.origin.eos_ids
    return list(dict.fromkeys(i for i in (*known, _token_ids(tokenizer)["eos_token_id"], *ends) if i is not None))


def _one_or_all(ids: list[int]) -> int | list[int] | None:
    return ids if len(ids) > 1 else next(iter(ids), None)


def _token_ids(tokenizer: SavesTokenizer | None) -> dict[str, int | None]:
    """Returns the ids of the special tokens for config.json.

    The id of a token that the tokenizer lacks is None, so that transformers does not use a default id.
    """
    return {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def tensor_places(model: GPT) -> dict[str, Place]:
    """Returns {name of a parameter in transformers: the parameter's place in the model}.

    The names are the parameter names of the model that transformers loads. The result has no parameters of an image
    encoder.
    Raises: ValueError if no supported family matches the model.
    """
    places = places_of(model, FAMILIES[_config(model, None)["model_type"]].layout)
    if model.origin is not None and model.origin.has_images:
        return {name.replace("model.", "model.language_model.", 1): place for name, place in places.items()}
    return places


def new_rope(model: GPT) -> dict[str, Any] | None:
    """Returns the fields of transformers' config that describe RoPE, or None if the checkpoint's RoPE is unchanged."""
    if model.origin is None or not model.origin.has_new_rope:
        return None
    _, config = understood(model.origin.config, Path("config.json"))
    return {"rope_parameters": config.rope_parameters, "max_position_embeddings": config.max_position_embeddings}


def _folder(pretrained: str, with_weights: bool, key: str = "model.pretrained") -> Path:
    """Returns the folder of a checkpoint. Downloads the checkpoint if `pretrained` is not a local folder."""
    if Path(pretrained).is_dir():
        return Path(pretrained)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = ["config.json", "generation_config.json"] + (["model*.safetensors", INDEX] if with_weights else [])
    try:
        return Path(snapshot_download(pretrained, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"{key} must be a folder with a checkpoint or a name on the Hugging Face hub; got {pretrained}: "
            f"{str(error).splitlines()[0]}"
        ) from error


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
