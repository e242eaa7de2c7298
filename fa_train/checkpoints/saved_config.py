"""Checks a run's saved config before Hydra instantiates it, because the file may come from an untrusted source."""

from collections.abc import Mapping, Sequence

# A saved config may name only these classes and functions, which build a model. Allowing whole packages would not be
# safe: for example, fa_train.models.hf.export has functions that delete folders.
TARGETS = {
    "fa_train.memory.loss.LinearCrossEntropy",
    "fa_train.memory.memory.Memory",
    "fa_train.models.attention.chunked_attention",
    "fa_train.models.attention.flash_attention",
    "fa_train.models.attention.naive_attention",
    "fa_train.models.attention.sdpa_attention",
    "fa_train.models.config.Family",
    "fa_train.models.gpt.GPT",
    "fa_train.models.hf.import_.load_pretrained",
    "fa_train.models.lora.LoRA",
    "fa_train.models.lora.whole_model",
}


def require_own_targets(config: object, where: str) -> None:
    """Checks that every `_target_` in a config is in `TARGETS`, and that no string contains `${`.

    OmegaConf resolves the escaped interpolation `\\${...}` to the string `${...}`. Hydra would resolve this string when
    it builds the config, and `${oc.create:...}` could then add a `_target_` that was not checked.

    config: a config whose interpolations are resolved, or a part of such a config.
    where: the config's name, for the error message.
    Raises: ValueError if the config has a `_target_` that is not in `TARGETS`, or a string with `${`. The message
    names the first wrong value.
    """
    if isinstance(config, Mapping):
        if "_target_" in config and str(config["_target_"]) not in TARGETS:
            raise ValueError(
                f"{where} must contain only the targets that fa_train/checkpoints/saved_config.py lists; "
                f"got _target_: {config['_target_']}"
            )
        for value in config.values():
            require_own_targets(value, where)
    elif isinstance(config, str):
        if "${" in config:
            raise ValueError(f"{where} must contain no escaped interpolations; got {config}")
    elif isinstance(config, Sequence) and not isinstance(config, bytes):
        for value in config:
            require_own_targets(value, where)
