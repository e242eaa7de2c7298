"""The supported families of Hugging Face checkpoints, and how their config.json and tensors map to a GPT.

A family is one value of model_type in config.json. Each family lists three kinds of fields of config.json: fields that
are read, fields that must have certain values, and fields that have no effect on the GPT. A field that a family does
not list is an error.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from fa_train.models.config import Family
from fa_train.models.rope import SCALINGS, DynamicNTKScaling, RopeScaling
from fa_train.models.rope import rope_scaling as parse_rope_scaling


@dataclass(frozen=True)
class Layout:
    """The names of the tensors in a family's checkpoints.

    layers: the name of a layer in the checkpoint, with {} for its number.
    outer: for each module outside the layers, {its name in the GPT: its name in the checkpoint}.
    inner: maps the GPT's name of each module within a layer to one or more names in the checkpoint. If a module of the
    GPT has several names in the checkpoint, the checkpoint's weights are joined along their rows into one weight.
    transposed: whether the checkpoint stores the weights of linear layers as (in, out).
    """

    layers: str
    outer: Mapping[str, str]
    inner: Mapping[str, Sequence[str]]
    transposed: bool = False


@dataclass(frozen=True)
class CheckpointFamily:
    """One supported model_type.

    arguments: converts transformers' config object to the fields of ModelConfig.
    read: the fields of config.json that `arguments` uses.
    required: other fields that must have one of the listed values.
    irrelevant: fields that have no effect on the GPT.
    """

    architecture: str
    arguments: Callable[[Any], dict[str, Any]]
    layout: Layout
    read: frozenset[str]
    required: Mapping[str, tuple[object, ...]]
    irrelevant: frozenset[str] = field(default_factory=frozenset)


def text_part(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the fields of config.json that describe the language model.

    Gemma 3 models of 4B and larger also read images.
    The part of config.json that describes the image encoder is ignored. An export contains only the language model.
    """
    if config.get("model_type") != WITH_IMAGES:
        return config
    if not isinstance(config.get("text_config"), dict):
        raise ValueError(f"{path}: model_type={WITH_IMAGES} must have its text_config; got {config.get('text_config')}")
    cap = config["text_config"].get("final_logit_softcapping")
    if cap is not None:
        raise ValueError(
            f"{path}: text_config.final_logit_softcapping must be null, because transformers ignores it in a model "
            f"that also reads images; got {cap}"
        )
    shared = {name: config[name] for name in SHARED_WITH_IMAGES if name in config}
    return shared | config["text_config"] | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


def understood(config: Mapping[str, Any], path: Path) -> tuple[CheckpointFamily, Any]:
    """Returns the family and transformers' config object.

    The config object has all default values, and the field names of transformers 5.
    Raises: ValueError if the family does not know a field of config.json, or does not support its value.
    """
    family = _family(config, path)
    from transformers import AutoConfig  # the import takes seconds

    try:
        normalised = AutoConfig.for_model(**copy.deepcopy(dict(config)))  # for_model modifies its argument
    except (StrictDataclassError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if hasattr(normalised, "rope_parameters"):
        # Only the second call of standardize_rope_params copies original_max_position_embeddings into rope_parameters.
        # `for_model` has made the first call. Models of transformers also call standardize_rope_params twice.
        normalised.standardize_rope_params()
        if normalised.rope_parameters.get("truncate", True) is None:  # transformers treats null as false
            raise ValueError(f"{path}: rope_parameters.truncate must be true or false; got null")
    for name, supported in family.required.items():
        found = getattr(normalised, name, supported[0]) if config.get(name) is None else config[name]
        if found not in supported:
            choices = " or ".join(json.dumps(value) for value in supported)
            raise ValueError(f"{path}: {name} must be {choices}; got {json.dumps(found)}")
    return family, normalised


def _family(config: Mapping[str, Any], path: Path) -> CheckpointFamily:
    """Returns a model's family. Raises: ValueError if config.json has an unknown model_type, architecture or field."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"{path}: model_type must be one of {', '.join(FAMILIES)}; got {model_type}")
    family = FAMILIES[model_type]
    architectures = config.get("architectures")
    if architectures and not (isinstance(architectures, list) and family.architecture in architectures):
        raise ValueError(f"{path}: architectures must name {family.architecture}; got {json.dumps(architectures)}")
    known = family.read | family.required.keys() | family.irrelevant | IRRELEVANT
    unknown = sorted(name for name, value in config.items() if name not in known and value is not None)
    if unknown:
        listed = ", ".join(f"{name}={json.dumps(config[name])}" for name in unknown)
        raise ValueError(f"{path}: not supported for model_type={model_type}: {listed}")
    return family


def _llama(config: Any, **features: Any) -> dict[str, Any]:
    """Returns the fields of ModelConfig for Llama. Every family except GPT-2 starts from the fields of Llama.

    features: fields of Family. A bias given here replaces the bias that config names.
    """
    theta, scaling = _rope(config.rope_parameters, config.max_position_embeddings)
    attention_bias = getattr(config, "attention_bias", False)
    biases = {"qkv_bias": attention_bias, "out_bias": attention_bias, "ffn_bias": getattr(config, "mlp_bias", False)}
    features = biases | features
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
        "family": Family(**features),
    }


def _arcee(config: Any) -> dict[str, Any]:
    return _llama(config) | {"activation": "gelu"}


def _mistral(config: Any) -> dict[str, Any]:
    return _llama(config, windows=(config.sliding_window,) * config.num_hidden_layers)


def _qwen2(config: Any) -> dict[str, Any]:
    return _llama(config, qkv_bias=True, windows=_windows(config))


def _qwen3(config: Any) -> dict[str, Any]:
    return _llama(config, windows=_windows(config)) | {"qk_norm": True}


def _smollm3(config: Any) -> dict[str, Any]:
    rotated = tuple(bool(rotates) for rotates in config.no_rope_layers[: config.num_hidden_layers])
    return _llama(config, rope_layers=rotated, windows=_windows(config))


def _gemma2(config: Any, **features: Any) -> dict[str, Any]:
    size = getattr(config, "sliding_window_size", None)  # Gemma 2 9B has sliding_window_size and sliding_window
    if size not in (None, config.sliding_window):
        raise ValueError(f"sliding_window_size must equal sliding_window, {config.sliding_window}; got {size}")
    if config.query_pre_attn_scalar <= 0:
        raise ValueError(f"query_pre_attn_scalar must be positive; got {config.query_pre_attn_scalar}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        cap = getattr(config, name)
        if cap is not None and cap <= 0:  # with a cap of 0, transformers computes 0 or NaN instead of the capped values
            raise ValueError(f"{name} must be positive or null; got {cap}")
    arguments = _llama(
        config,
        windows=_windows(config),
        softmax_scale=config.query_pre_attn_scalar**-0.5,
        softcap=config.attn_logit_softcapping or 0.0,
        logit_softcap=config.final_logit_softcapping or 0.0,
        embedding_scale=config.hidden_size**0.5,
        post_norms=True,
        **features,
    )
    return arguments | {"norm": "offset_rmsnorm", "activation": "geglu"}


def _gemma3(config: Any) -> dict[str, Any]:
    by_kind = config.rope_parameters
    local_theta, local_scaling = _rope(by_kind["sliding_attention"], config.max_position_embeddings)
    if local_scaling is not None:
        raise ValueError(
            f"rope_parameters.sliding_attention must have rope_type=default; got {by_kind['sliding_attention']}"
        )
    if config.sliding_window is None:  # only layers with a window use local_rope_theta
        raise ValueError("sliding_window must be a number of tokens; got null")
    if by_kind["full_attention"].get("truncate") is False:
        raise ValueError("rope_parameters.full_attention must not have truncate=false, which transformers ignores")
    if not by_kind.get("truncate", True):  # transformers reads this key, and not that of full_attention
        raise ValueError(f"rope_parameters.truncate must be true or missing; got {json.dumps(by_kind['truncate'])}")
    config.rope_parameters = by_kind["full_attention"]
    return _gemma2(config, local_rope_theta=local_theta) | {"qk_norm": True}


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
    if config.sliding_window is None and "sliding_attention" in config.layer_types:
        raise ValueError(
            "layer_types must be full_attention if sliding_window is null or use_sliding_window is false; "
            "got sliding_attention"
        )
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def _rope(parameters: Mapping[str, Any], max_seq_len: int) -> tuple[float, dict[str, Any] | None]:
    """Returns the values of rope_theta and rope_scaling for ModelConfig."""
    fields = {name: value for name, value in parameters.items() if value is not None}
    if "rope_theta" not in fields:
        raise ValueError("rope_theta must be a number; got null")
    theta, part = fields.pop("rope_theta"), fields.pop("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1.0; got {part}")
    scaling = parse_rope_scaling(fields, max_seq_len)
    if isinstance(scaling, DynamicNTKScaling) and scaling.original_max_position_embeddings != max_seq_len:
        raise ValueError(  # transformers would ignore original_max_position_embeddings
            f"with rope_type=dynamic, original_max_position_embeddings must be max_position_embeddings={max_seq_len}; "
            f"got {scaling.original_max_position_embeddings}"
        )
    return float(theta), None if scaling is None else scaling_fields(scaling)


def scaling_fields(scaling: RopeScaling) -> dict[str, Any]:
    """Converts a RoPE scaling to the fields of `rope_parameters` in config.json. The inverse is rope.rope_scaling.

    Fields that transformers does not know are omitted.
    """
    [kind] = [name for name, kind in SCALINGS.items() if type(scaling) is kind]
    fields = {name: value for name, value in vars(scaling).items() if value is not None}
    if isinstance(scaling, DynamicNTKScaling):
        del fields["original_max_position_embeddings"]
    return {"rope_type": kind} | fields


# `WITH_IMAGES` is the model_type of models that also read images. If model_type is `WITH_IMAGES`, text_config and the
# top-level fields in `SHARED_WITH_IMAGES` describe the language model.
WITH_IMAGES = "gemma3"
SHARED_WITH_IMAGES = (
    "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id", "quantization_config",
)  # fmt: skip
# fields of config.json that do not change what the model computes
IRRELEVANT = frozenset(
    {
        # metadata of the file
        "_name_or_path", "name_or_path", "_model_name_or_path", "_commit_hash", "architectures", "model_type", "dtype",
        "torch_dtype", "transformers_version", "is_llama_config", "transformers.js_config", "unsloth_version",
        "unsloth_fixed", "max_sequence_length",
        # initialisation and dropout have no effect, because weights are loaded and the GPT has no dropout
        "initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
        # options for running the model in transformers
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
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")  # transformers' two names for GELU with the tanh approximation

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
ARCEE_LAYOUT = replace(LLAMA_LAYOUT, inner={**LLAMA_LAYOUT.inner, "ffn.up": ("mlp.up_proj",)})
GEMMA_LAYOUT = replace(
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
            "n_special": (0,),  # the number of extra tokens, which only very old checkpoints have
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
            "attn_logit_softcapping": (None,),  # transformers ignores this field
        },
    ),
}  # fmt: skip
