"""Refuses model classes of transformers that do not support flash attention.

The transformers library checks whether a model class supports flash_attention_2. The library does not check whether a
model class supports the attention of another package. Many model classes that do not support flash attention have their
own attention code. Without a check, the masks of unsupported model classes would be lost without an error.
"""

from functools import wraps
from typing import Any

from fa_train.private_names import replace_private

# The transformers library refuses flash_attention_2 for the listed classes. fa_train only refuses the inputs that it
# does not support: image tokens of Gemma 3, and sequences of Llama 4 that are longer than a chunk.
ALSO_SUPPORTED = {"Gemma3Model", "Gemma3ForConditionalGeneration", "Llama4PreTrainedModel"}

# The layers of the listed classes do not pass their sliding window to the attention function.
WINDOW_ONLY_IN_MASK = {"PhimoePreTrainedModel", "Qwen2MoePreTrainedModel"}


def refuse_unsupported_classes(name: str) -> None:
    """Makes transformers check a model's class before the model uses the attention `name`.

    The check runs whenever a model or sub-model is built or loaded, and in `set_attn_implementation`. Further calls
    have no effect.
    """
    from transformers import PreTrainedModel  # the import takes seconds

    original = PreTrainedModel.get_correct_attn_implementation
    if getattr(original, "checks_for", None) == name:
        return

    @wraps(original)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == name:
            require_supported(type(self), name)
            require_known_window(self, name)
        result: str = original(self, requested_attention, *args, **kwargs)
        return result

    checked.checks_for = name  # type: ignore[attr-defined]
    replace_private("transformers", PreTrainedModel, "get_correct_attn_implementation", checked)


def require_supported(model_class: type, name: str) -> None:
    """Checks that a model class supports flash attention.

    Raises: ValueError if model_class does not declare support. Classes in `ALSO_SUPPORTED`, and their subclasses, need
    no declaration.
    """
    declared = any(getattr(model_class, flag, False) for flag in ("_supports_flash_attn", "_supports_flash_attn_2"))
    if declared or ALSO_SUPPORTED & {base.__name__ for base in model_class.__mro__}:
        return
    raise ValueError(
        f'attn_implementation="{name}" must be used with a model class that supports flash attention; got '
        f"{model_class.__name__}, whose attribute _supports_flash_attn is not True. To use {name} only in a sub-model "
        f'that supports it, pass a dict, such as attn_implementation={{"text_config": "{name}"}}'
    )


def require_known_window(model: Any, name: str) -> None:
    """Checks that the attention function gets the sliding window of a model.

    model: a model of transformers.
    Raises: ValueError if the layers do not pass their sliding window to the attention function, and the window is
    shorter than the longest sequence.
    """
    bases, config = {base.__name__ for base in type(model).__mro__}, model.config
    # without use_sliding_window, layers of SmolLM3 do not pass the window, but layer_types can still ask for it
    unused = "SmolLM3PreTrainedModel" in bases and not config.use_sliding_window
    if not WINDOW_ONLY_IN_MASK & bases and not (unused and "sliding_attention" in config.layer_types):
        return
    window, longest = config.sliding_window, config.max_position_embeddings
    if window and window < longest:  # in a Qwen2-MoE without a window, sliding_window is 0
        raise ValueError(
            f"config.sliding_window of {type(model).__name__} must be None, or at least max_position_embeddings="
            f"{longest}, because its layers do not pass the window to {name}; got {window}"
        )
