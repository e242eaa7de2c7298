"""Exports a run's checkpoint to a folder for transformers: weights, config, tokenizer and a model card.

The checkpoint is a file, or a folder if the run sharded its weights. The checkpoint is loaded into CPU memory.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fa_train.checkpoints.architecture import ADAPTER, ARCHITECTURE, differences
from fa_train.checkpoints.base import PREFIX, REFERENCE, require_fit
from fa_train.checkpoints.files import CheckpointError, Shapes, all_finite, shapes
from fa_train.checkpoints.metrics import metrics_of
from fa_train.data.sources.files import read_text
from fa_train.data.tokens.sft import ChatEncoder
from fa_train.data.tokens.tokenizer import HFTokenizer
from fa_train.early_checks import HUB_NAME
from fa_train.models.config import ModelConfig
from fa_train.models.gpt import GPT
from fa_train.models.hf.import_ import (
    DTYPES,
    SavesTokenizer,
    eos_ids,
    new_config,
    new_rope,
    save_pretrained,
    save_tokenizer,
)
from fa_train.models.lora import adapted, adapter_values, merge, save_adapter
from fa_train.parallel.sharded_checkpoint import load_into, read_parts, require_whole

ROPE_KEYS = ("model.rope_scaling", "model.rope_theta", "model.max_seq_len")
# the values of data._target_ for data that can contain texts; without a tokenizer, each byte of a text is a token
OF_TEXTS = {f"fa_train.data.datamodule.{name}_data" for name in ("stdlib", "text", "hf", "mix")}
CHATS_OF_MIX = "fa_train.data.mixing.sft_part"  # the value of data.sources.<name>._target_ for chats
# a function that takes a vocabulary size and builds the run's model and adapter on torch's default device
Build = Callable[[int], GPT]
CARD = """---
{header}
---

# {title}

Trained with fa_train. The tokens and losses are those of the exported step.

| | |
|---|---|
{table}

```python
{code}
```
"""


def export_run(
    checkpoint: Path, run: Path, build: Build, config: Mapping[str, Any], metrics: Mapping[str, float]
) -> list[Path]:
    """Writes the folder run/exported.

    If the run has an adapter of a pretrained base model, also writes run/exported_adapter, which peft can load.
    Each folder is written under a temporary name, and renamed when it is complete. A complete folder replaces an
    earlier export of the run. Returns the paths of the written folders.
    config: see `write`. metrics: the newest metrics of the run. `metrics_of` chooses the metrics for the model card.
    Raises: ValueError if the export fails. The message of the error names the checkpoint, which stays intact.
    """
    folder, adapter_folder = run / "exported", run / "exported_adapter"
    unfinished = run / "exported.partial"
    written = []
    shutil.rmtree(unfinished, ignore_errors=True)  # removes the folder of an earlier export that was killed
    try:
        model, step = load(checkpoint, build)
        base = None if model.origin is None else model.origin.folder
        if base is not None and base.resolve() == folder.resolve():
            raise ValueError(f"{folder} must not be the base model of the run, because an export would delete it")
        require_same_tokenizer(checkpoint, config)
        metrics = metrics_of(checkpoint, metrics)
        # write the adapter first, because merging removes it from the model
        has_adapter = base is not None and any(adapted(model))
        for target, adapter in [(adapter_folder, True)] * has_adapter + [(folder, False)]:
            write(model, step, unfinished, run.parent.name, config, metrics, adapter=adapter)
            _replace(target, unfinished)
            written.append(target)
    except Exception as error:  # after any failure, the user can export from the checkpoint
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ValueError(
            f"the run is finished, but {folder} could not be written: {error}. "
            f"`python -m scripts.export_hf {checkpoint} <folder>` writes it from the checkpoint"
        ) from error
    return written


def _replace(target: Path, new: Path) -> None:
    """Renames the folder `new` to `target`, and then deletes the earlier folder `target` if there was one."""
    earlier = target.with_name(f"{target.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if target.exists():
        target.rename(earlier)
    new.rename(target)
    shutil.rmtree(earlier, ignore_errors=True)


def require_exportable(model: GPT, seq_len: int) -> None:
    """Checks that transformers supports the model's architecture. Does not change the model.

    seq_len: the length of training rows in tokens.
    Raises: ValueError if `write` would refuse the architecture. A model that was loaded from a checkpoint is
    never refused, because an export starts from the config.json of the checkpoint.
    """
    if model.origin is None:
        new_config(_with_context_length(model.config, seq_len), None)


def write(
    model: GPT,
    step: int,
    folder: Path,
    name: str,
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    *,
    dtype: str | None = None,
    adapter: bool = False,
) -> None:
    """Writes the model, its tokenizer and a model card to `folder`. Adapters are merged into the model.

    name: the run's name, for the model card.
    config: the run's config, with the keys choices, model, data, seq_len, batch_size and seed.
    metrics: the metrics of the model's step, by name.
    dtype: the dtype of the written weights. By default, a fine-tuned model gets the dtype that its base model's
    config.json names, if that dtype is a key of DTYPES. In all other cases, the weights are written in the dtype that
    they had in training.
    adapter: whether to write only the unmerged adapter, in fp32.
    Raises: ValueError if `folder` has a README.md, which the model card would replace. With adapter=True,
    ValueError if `dtype` is set, if the model has no adapter, or if its base model has random weights.
    """
    card = folder / "README.md"
    if card.exists():
        raise ValueError(f"an export needs a new folder or one without README.md; got {folder}, which has a README.md")
    if adapter and dtype is not None:
        raise ValueError(f"--adapter writes float32, so --dtype must not be given; got {dtype}")
    if adapter and any(adapted(model)) and model.origin is None:
        raise ValueError(
            "--adapter needs a run with model.pretrained, because peft loads the base model; got a base model with "
            "random weights. Without --adapter, the whole model is exported"
        )
    model.config = _with_context_length(model.config, config["seq_len"])
    loaded = tokenizer_of(config)
    tokenizer: SavesTokenizer | None = loaded.hf if isinstance(loaded, HFTokenizer) else loaded
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    ends = answer_ends(loaded)
    # An adapter has neither config.json nor generation_config.json, so the model card lists RoPE and end tokens.
    rope = new_rope(model) if adapter else None
    eos = eos_ids(model, tokenizer, ends)
    new_eos = eos if adapter and model.origin is not None and eos != model.origin.eos_ids else []
    if adapter:
        save_adapter(model, folder, config["model"].get("pretrained"))
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)
    else:
        if dtype is None and model.origin is not None:
            stored = model.origin.config.get("dtype") or model.origin.config.get("torch_dtype")
            dtype = stored if stored in DTYPES else None
        save_pretrained(merge(model), folder, tokenizer, dtype=dtype, ends=ends)
        parameters = sum(p.numel() for p in model.parameters())
    card.write_text(
        model_card(name, config, step, metrics, parameters, adapter, tokenizer is not None, rope, new_eos),
        encoding="utf-8",
    )


def load(checkpoint: Path, build: Build, chosen: Collection[str] = ()) -> tuple[GPT, int]:
    """Loads a trained model to the CPU. Returns the model and the number of optimizer steps that trained it.

    A checkpoint with an adapter of a pretrained base model does not contain the base model's weights. `build` loads
    them.
    chosen: the config keys that the user has overridden. An overridden key may have another value than in training.
    Raises: CheckpointError if the checkpoint is damaged, does not fit the model of `build`, was trained with other
    settings, or has weights that are NaN or infinite.
    """
    require_whole(checkpoint)
    content, weights = read_parts(checkpoint)
    stored = shapes(weights)
    reference = content.get(REFERENCE)
    model = _empty(build, checkpoint, stored) if reference is None else build(reference["vocab_size"])
    require_fit(model, stored, content, str(checkpoint))
    _require_same_settings(model, content, checkpoint, chosen)
    if checkpoint.is_dir():
        weights = {name: torch.empty_like(weight, device="cpu") for name, weight in weights.items()}
        load_into({"state_dict": weights}, checkpoint, alone=True)
    weights = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
    if not all_finite(weights.values()):
        raise CheckpointError(f"{checkpoint} must have finite weights; got NaN or infinity. Use an earlier checkpoint")
    if model.config.tied and reference is None:
        weights["head.weight"] = weights["token_embedding.weight"]  # sharded runs do not store head.weight
    model.load_state_dict(weights, assign=True, strict=reference is None)
    return model, content["global_step"]


def _require_same_settings(model: GPT, content: Mapping[str, Any], checkpoint: Path, chosen: Collection[str]) -> None:
    """Raises: CheckpointError if a setting of the model or its adapter has changed since the checkpoint was written.

    For example, the config.json of the base model can have changed. chosen: see `load`.
    """
    if any(f"{key}.".startswith(tuple(f"{of_rope}." for of_rope in ROPE_KEYS)) for key in chosen):
        chosen = {*chosen, *ROPE_KEYS}  # overriding one key of ROPE_KEYS can change the values of the other two keys
    if (model.config.rope_scaling or {}).get("rope_type", "default") in ("default", "linear"):
        chosen = {*chosen, "model.max_seq_len"}  # with these RoPE types, max_seq_len does not affect results
    changes = differences("model", model.config.values(), content.get(ARCHITECTURE), "the export", chosen)
    changes += differences("adapter", adapter_values(model), content.get(ADAPTER), "the export", chosen)
    if changes:
        raise CheckpointError(
            f"{checkpoint} must be exported with the settings of its training: {changes[0]}. Restore the files in "
            "model.pretrained or adapter.path, or override the setting"
        )


def require_same_tokenizer(checkpoint: Path, config: Mapping[str, Any], chosen: Collection[str] = ()) -> None:
    """Checks, by hashes in the checkpoint, that the vocabulary and the chat template have not changed since training.

    Older checkpoints have no such hashes, and are not checked.
    config: the run's config, as for `write`. chosen: as for `load`.
    Raises: CheckpointError if the vocabulary or the chat template has changed. ValueError if there is no tokenizer.
    """
    stored = read_parts(checkpoint)[0].get("PackedDataModule", {}).get("tokenizer", {})
    tokenizer = tokenizer_of(config) if stored else None
    if not isinstance(tokenizer, HFTokenizer):
        return
    own = {"vocabulary": tokenizer.vocabulary_hash, "chat_template": tokenizer.template_hash}
    data = config["data"]
    for name, value in stored.items():
        is_file = name == "chat_template" and data.get("chat_template") is not None
        key = "chat_template" if is_file else "tokenizer"
        if own[name] != value and f"data.{key}" not in chosen:
            raise CheckpointError(
                f"{checkpoint} must be exported with the {name.replace('_', ' ')} of its training; the one in "
                f"{data[key]} is different. Restore the old one. To export with the new one, add "
                f"data.{key}={data[key]} to the command of scripts.export_hf"
            )


def _with_context_length(config: ModelConfig, seq_len: int) -> ModelConfig:
    """Returns the config, with max_seq_len=seq_len if max_seq_len is None.

    seq_len: the length of training rows in tokens.
    """
    return config if config.max_seq_len is not None else replace(config, max_seq_len=seq_len)


def model_card(
    name: str,
    config: Mapping[str, Any],
    step: int,
    metrics: Mapping[str, float],
    parameters: int,
    adapter: bool,
    has_tokenizer: bool,
    rope: Mapping[str, Any] | None = None,
    eos: Sequence[int] = (),
) -> str:
    """Returns a model card in Markdown with the training data, the number of training steps, and the losses.

    rope: for an adapter, the fields to change in the base model's config, or None if no field must be changed.
    eos: the end tokens of an adapter, if they differ from those of its base model. Otherwise empty.
    """
    pretrained = config["model"].get("pretrained")
    base = _without_folder(str(pretrained)) if pretrained else None
    title = f"{Path(base).name}, fine-tuned" if base else name
    rows = {
        "Base model": base or "none: trained from scratch",
        "Parameters": f"{parameters / 1e6:,.1f}M" if parameters >= 1e6 else f"{parameters:,}",
        "Data": _data(config),
        "Optimizer steps": f"{step:,}",
        "Sequence length": f"{config['seq_len']:,} tokens",
        "Sequences per step": f"{config['batch_size']:,}",
        "Seed": str(config["seed"]),
    }
    if rope is not None:
        rows["RoPE"] = "differs from the base model; load the adapter with the config below"
    measured = {
        "tokens": ("Tokens", "{:,.0f}"),
        "train/loss": ("Training loss, nats per token", "{:.4f}"),
        "val/loss": ("Validation loss, nats per token", "{:.4f}"),
    }
    rows |= {label: form.format(metrics[key]) for key, (label, form) in measured.items() if key in metrics}
    # if peft is installed, the transformers code in the card also loads an adapter
    library = "peft" if adapter else "transformers"
    header = [f"library_name: {library}", "pipeline_tag: text-generation"]
    if base is not None and is_hub_name(str(pretrained)):
        header.append(f"base_model: {base}")
    table = [f"| {label} | {value} |" for label, value in rows.items()]
    code = _loading_code(str(pretrained), has_tokenizer, rope, eos)
    return CARD.format(title=title, header="\n".join(header), table="\n".join(table), code=code)


def _loading_code(pretrained: str, has_tokenizer: bool, rope: Mapping[str, Any] | None, eos: Sequence[int]) -> str:
    """Returns the Python code that loads the exported folder. rope, eos: as for `model_card`."""
    names = ["AutoConfig"] * (rope is not None) + ["AutoModelForCausalLM"] + ["AutoTokenizer"] * has_tokenizer
    lines = [f"from transformers import {', '.join(names)}", ""]
    argument = ""
    if rope is not None:
        base = pretrained if is_hub_name(pretrained) else f"path/to/{Path(pretrained).name}"
        lines += [f'config = AutoConfig.from_pretrained("{base}")', f"config.get_text_config().update({rope})"]
        argument = ", config=config"
    lines.append(f'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{argument})')
    if eos:
        lines.append(f"model.generation_config.eos_token_id = {list(eos)}")
    if has_tokenizer:
        lines.append('tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")')
    return "\n".join(lines)


def tokenizer_of(config: Mapping[str, Any]) -> HFTokenizer | SavesTokenizer | None:
    """Returns the tokenizer of a run's data, with its chat template.

    If the run was trained on texts, the tokenizer puts one bos before each text, as in training. A tokenizer without a
    bos puts no special token before a text. A slow tokenizer is returned unchanged.
    Returns None if the data are random tokens. Also returns None if the user's own function loads the data, and
    data.tokenizer is not a name.
    Raises: ValueError if the tokenizer or the chat template is not found.
    """
    data = config["data"]
    name = data.get("tokenizer")
    if name is None and data.get("_target_") in OF_TEXTS:
        return byte_tokenizer()
    if not isinstance(name, str):
        return None
    try:
        tokenizer = HFTokenizer(name)
    except ValueError as error:
        raise ValueError(
            f"{str(error).splitlines()[0].rstrip('.')}. If the run's tokenizer is now in another folder, add "
            "data.tokenizer=<folder> to the command"
        ) from error
    if _has_texts(data):
        tokenizer.begin_with_bos()
    if data.get("chat_template") is not None:
        template = Path(data["chat_template"]).expanduser()
        if not template.is_file():
            raise ValueError(f"data.chat_template must be the run's Jinja file; {template} does not exist")
        tokenizer.hf.chat_template = read_text(template)
    return tokenizer


def _has_texts(data: Mapping[str, Any]) -> bool:
    """Returns whether a run's data contain texts, which TextEncoder encodes.

    data: the run's config group `data`.
    """
    sources = data.get("sources")  # only data=mix has sources
    is_mix_of_chats = sources is not None and all(part["_target_"] == CHATS_OF_MIX for part in sources.values())
    return data.get("_target_") in OF_TEXTS and not is_mix_of_chats


def answer_ends(tokenizer: HFTokenizer | SavesTokenizer | None) -> list[int]:
    """Returns [the token that ends an answer in the chat template], or [] if there is no such token."""
    if not isinstance(tokenizer, HFTokenizer) or not tokenizer.hf.chat_template or not tokenizer.hf.is_fast:
        return []
    end_id = ChatEncoder(tokenizer).end_id
    return [] if end_id is None else [end_id]


def byte_tokenizer() -> SavesTokenizer:
    """Returns a transformers tokenizer with the ids of fa_train.data.tokens.tokenizer.ByteTokenizer.

    The tokenizer puts bos before a text, as TextEncoder does in training.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    # these tokens have the ids 256, 257 and 258, after the ids of the bytes
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {name: 256 + i for i, name in enumerate(names.values())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, add_bos_token=True, **names)


def _empty(build: Build, checkpoint: Path, stored: Shapes) -> GPT:
    """Builds the model on the meta device, without weights."""
    embedding = stored.get(f"{PREFIX}token_embedding.weight")
    if embedding is None:
        raise CheckpointError(f"{checkpoint} must hold the weights of a GPT; it has no token_embedding.weight")
    with torch.device("meta"):
        return build(embedding[0])


def _data(config: Mapping[str, Any]) -> str:
    """Describes a run's training data without naming folders of this machine."""
    kind, data = config["choices"]["data"], config["data"]
    path, name = str(data.get("path") or ""), str(data.get("name") or "")
    if path.startswith("hf:"):
        dataset, *parts = path.removeprefix("hf:").split(":")
        where = ":".join(["hf", _without_folder(dataset), *parts])
    else:
        where = Path(path).name or _without_folder(name)
    return f"{kind}: {where}" if where else kind


def _without_folder(name: str) -> str:
    """Returns `name` if it is a hub name, and otherwise the last part of the path `name`."""
    return name if is_hub_name(name) else Path(name).name


def is_hub_name(name: str) -> bool:
    """Returns whether `name` has the form of a Hugging Face hub name and is not a path on this machine."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()
