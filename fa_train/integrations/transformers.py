"""This project's attention inside Hugging Face transformers, under the name `attn_implementation="fa_train"`.

    from fa_train.integrations import transformers as fa

    fa.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fa_train")

Most models that work with flash_attention_2 also work with fa_train. Model classes that do not declare support for
flash attention are refused. fa_train supports GQA, sliding windows, soft caps, attention sinks, padding, rows packed by
position_ids or cu_seqlens, and generation with a dynamic or static cache.

Unlike flash_attention_2, fa_train accepts fp32 inputs. The host waits for the GPU only while `key_mask` or
`packed_schedule` copies numbers from the GPU to the host, such as the length of the longest document. In a forward
pass, all layers with the same window share the numbers that `key_mask` and `packed_schedule` copy to the host. Under
torch.inference_mode, but not under torch.no_grad, `packed_schedule` copies numbers from the GPU again in each layer.
Compiled code never copies numbers from the GPU to the host.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

from fa_kernels import flash_attn_func, flash_attn_with_kvcache
from fa_kernels.device import interpreted
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.ops import needs_gradients
from fa_kernels.flash_attention.schedule import Schedule
from fa_train.integrations.key_masks import (
    Keys,
    Padding,
    causality,
    encoded,
    forbid_later_keys,
    is_key_mask,
    is_packed,
    packed_positions,
    refuse_other_masks,
    visible_keys,
)
from fa_train.integrations.model_classes import refuse_unsupported_classes
from fa_train.integrations.packed_rows import document_schedule, packed_schedule

NAME = "fa_train"
REFUSED = {  # {unsupported argument of `attention`: its meaning, for the error message}
    "output_attentions": "returning attention weights",
    "head_mask": "masking heads",
    "position_bias": "a position bias",
    "alibi": "ALiBi",
    "block_table": "a paged cache",
    "k_cache": "a paged cache",
    "indices": "sparse attention to chosen keys",
    "block_indices": "sparse attention to chosen blocks of keys",
    "sinks": "sinks under this name (s_aux is supported)",
}


def register() -> None:
    """Registers `attn_implementation="fa_train"` in transformers. Further calls have no effect.

    Afterwards, transformers refuses fa_train for model classes that do not support flash attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # the import takes seconds

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, key_mask)
    refuse_unsupported_classes(NAME)


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool | None = None,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **_: object,
) -> Tensor:
    """Returns the mask that `attention` gets in each layer.

    transformers calls key_mask once for each kind of layer in a forward pass. The arguments are those of the mask
    functions in transformers. The docstring of key_masks.py describes the result.
    Raises: ValueError if the mask hides keys for any reason other than causality, a window, documents or padding.
    """
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and local_size == chunk and kv_length + kv_offset > chunk:
        raise ValueError(
            f"{NAME} supports at most attention_chunk_size={chunk} keys, because it has no chunked attention; "
            f"got {kv_length + kv_offset}"
        )
    # transformers passes allow_is_bidirectional_skip only for bidirectional masks
    causal = allow_is_bidirectional_skip is None
    refuse_other_masks(mask_function, use_vmap)
    # If a mask can have bidirectional blocks, transformers sets allow_is_causal_skip to False.
    if causal and allow_is_causal_skip is False and mask_function is not None and torch.compiler.is_compiling():
        forbid_later_keys(mask_function, batch_size, q_length, q_offset, torch.device(device))
    # If rows can be packed, transformers sets allow_is_causal_skip to False. Packed rows have no padding and no cache.
    can_be_packed = causal and allow_is_causal_skip is False and attention_mask is None and mask_function is not None
    if can_be_packed and q_length == kv_length and isinstance(q_offset, int) and q_offset == 0:
        packed = packed_positions(mask_function, batch_size, q_length, torch.device(device))
        if packed is not None:
            return packed
    # if a mask is bidirectional, all kv_length keys are already in the cache
    written = q_offset + q_length - kv_offset if causal else kv_length
    return encoded(attention_mask, batch_size, kv_length, kv_offset, written, causal, torch.device(device))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of one layer. transformers calls this function through its AttentionInterface.

    Args:
        module: the layer.
        query: (batch, n_heads, seqlen_q, head_dim).
        key: (batch, n_kv_heads, seqlen_k, head_dim).
        value: (batch, n_kv_heads, seqlen_k, v_head_dim).
        attention_mask: the result of `key_mask`, or (batch, seqlen_k) with 0 for masked keys. If a mask with padding is
            given, position_ids and cu_seqlens are ignored, as in flash_attention_2.
        is_causal: whether attention is causal. An attention_mask that transformers has made says whether attention is
            causal, so is_causal is ignored, as in eager attention. If attention_mask does not say whether attention is
            causal, is_causal=None stands for the attribute `module.is_causal`.
        scaling: the factor that the scores are multiplied by.
        sliding_window: the number of tokens that a causal query sees, including its own. Without causality, a query
            also sees the next sliding_window - 1 tokens.
        softcap: replaces a score by softcap * tanh(score / softcap). A softcap above 1000 is refused.
        s_aux: (n_heads,) attention sinks, in nats.
        position_ids: (1 or batch, seqlen_q). Without a cache, a document starts where position_ids do not increase by
            one. If attention_mask contains the document starts, position_ids are ignored.
        cu_seq_lens_q, cu_seq_lens_k: (n_docs + 1,), the document boundaries in the flattened batch.
        max_length_k: the number of keys of the longest document, which determines the choice of kernels.

    Returns:
        The output o, (batch, seqlen_q, n_heads, v_head_dim), and None instead of attention weights. The rows of o that
        belong to padding have no meaning.

    Raises:
        ValueError: if flash attention or this function does not support an argument. The ValueError is raised before
        any kernel of flash attention runs.
    """
    _require_supported(module, query, attention_mask, dropout, kwargs)
    q, k, v = (x.transpose(1, 2) for x in _of_one_dtype(module, query, key, value))
    is_causal = _is_causal(module, attention_mask, is_causal, q.shape[1])
    if sliding_window is not None and causality(attention_mask) is False and _is_of_config(module, sliding_window):
        sliding_window += 1
    if is_packed(attention_mask):
        position_ids, attention_mask = attention_mask, None
    elif attention_mask is not None and attention_mask.shape[1:] == (1, 1, 0):  # no key is masked
        attention_mask = None
    window = (-1, -1)
    if sliding_window is not None and k.shape[1] > sliding_window:
        window = sliding_window - 1, 0 if is_causal else sliding_window - 1
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    if q.shape[1] == 1 and cu_seq_lens_q is None and not needs_gradients(q, k, v, s_aux):
        return _decode(q, k, v, attention_mask, is_causal, window, **options), None
    if deterministic is None:
        deterministic = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    options["deterministic"] = deterministic
    if attention_mask is not None:
        padding = Padding.of(attention_mask, q.shape[1], k.shape[1], is_causal, window)
        q, k, v = padding.compacted(q, k, v)
        return padding.restored(_scheduled(q, k, v, padding.schedule, **options)), None
    schedule: Schedule | None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        schedule = document_schedule(cu_seq_lens_q, cu_seq_lens_k, max_length_k, q, k, is_causal, window)
    else:
        schedule = packed_schedule(position_ids, q, k, is_causal, window)
    if schedule is not None:
        return _scheduled(q, k, v, schedule, **options), None
    o = flash_attn_func(q, k, v, causal=is_causal, window_size=window, **options)
    assert isinstance(o, Tensor)
    return o, None


def _require_supported(
    module: nn.Module, query: Tensor, attention_mask: Tensor | None, dropout: float, others: dict[str, Any]
) -> None:
    if query.device.type != "cuda" and not interpreted():
        raise ValueError(
            f'attn_implementation="{NAME}" must run on a CUDA GPU; got {query.device}. '
            "TRITON_INTERPRET=1 runs its kernels in Triton's (slow) CPU interpreter"
        )
    if dropout:
        raise ValueError(
            f"the config's {_dropout_field(module, dropout)} must be 0.0 in training; got {dropout}. "
            f"{NAME} has no dropout"
        )
    if attention_mask is not None and not is_key_mask(attention_mask):
        raise ValueError(
            f"attention_mask must be (batch, tokens) for {NAME}, which has no custom masks; "
            f"got {tuple(attention_mask.shape)}"
        )
    if attention_mask is not None and attention_mask.shape[0] != query.shape[0]:
        raise ValueError(
            f"attention_mask must have {query.shape[0]} rows, one for each sequence; got {attention_mask.shape[0]}"
        )
    for name, meaning in REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"{name} must not be given: {NAME} does not support {meaning}")


def _dropout_field(module: nn.Module, dropout: float) -> str:
    """Returns the name of the config's field that holds `dropout`, such as attn_pdrop in GPT-2.

    If no field is found, the result is "attention dropout".
    """
    for name, value in _fields_of_config(module).items():
        if "att" in name and "drop" in name and value == dropout:
            return name
    return "attention dropout"


def _is_causal(module: nn.Module, attention_mask: Tensor | None, is_causal: bool | None, seqlen_q: int) -> bool:
    """Returns whether attention is causal.

    Raises: ValueError if there are several queries, and `attention_mask`, `is_causal` and `module.is_causal` all leave
    open whether attention is causal.
    """
    asked = causality(attention_mask)
    if asked is None:
        asked = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if asked is None and seqlen_q > 1:  # a single query sees the same keys with and without causality
        raise ValueError(
            f"is_causal must be True or False; got None, and the layer {type(module).__name__} has no is_causal"
        )
    return bool(asked)


def _is_of_config(module: nn.Module, sliding_window: int) -> bool:
    """Returns whether a layer passes on the window of its config unchanged.

    In a bidirectional mask, a query of eager attention sees config.sliding_window tokens on each side. The layers of
    encoders, such as ModernBERT, therefore pass config.sliding_window + 1. Layers that can also be causal pass
    config.sliding_window.
    """
    return _fields_of_config(module).get("sliding_window") == sliding_window


def _fields_of_config(module: nn.Module) -> dict[str, Any]:
    # If the windows of layers differ, reading config.sliding_window raises an error. Reading __dict__ does not.
    fields: dict[str, Any] = getattr(getattr(module, "config", None), "__dict__", {})
    return fields


def _of_one_dtype(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts q, k and v to autocast's dtype. Without autocast, casts fp32 inputs to the dtype of the layer's weights."""
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    elif dtype == torch.float32:
        config = getattr(module, "config", None)
        if hasattr(config, "_is_quantized"):
            dtype = getattr(config, "dtype", None) or dtype
        else:
            weights = (w.dtype for w in module.parameters() if w.dim() == 2 and w.is_floating_point())
            dtype = next(weights, dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _scheduled(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, **options: Any) -> Tensor:
    """Computes attention with the schedule of the flattened batch. Shapes: q, k, v (batch, seqlen, heads, head_dim)."""
    o = flash_attn_packed(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), schedule, **options)
    return o.unflatten(0, q.shape[:2])


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool,
    window: tuple[int, int],
    *,
    sinks: Tensor | None,
    **options: Any,
) -> Tensor:
    """Computes the attention of one query per row to the row's KV cache. Uses the split-KV kernel.

    The result has no gradient.
    """
    lengths: dict[str, Any] = {}
    if attention_mask is not None:
        keys, first = Keys.of(attention_mask, k.shape[1]), None
        if keys.order is not None and max(window) >= 0:
            first, window = visible_keys(attention_mask, 1, k.shape[1], window)[0].flatten().int(), (-1, -1)
        k, v = keys.ordered(k, v)
        lengths = {"cache_seqlens": keys.end, "cache_leftpad": keys.first if first is None else first}
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    o, lse = flash_attn_with_kvcache(
        q, k, v, causal=is_causal, window_size=window, return_softmax_lse=True, **lengths, **options
    )
    if sinks is not None:  # the softmax denominator is exp(lse), and a sink adds exp(sink)
        kept = torch.sigmoid(lse - sinks[:, None])  # [batch, n_heads, 1]
        o = (o * kept.transpose(1, 2)[..., None]).to(q.dtype)
    return o
