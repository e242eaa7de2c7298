"""From a checkpoint of a run to a folder that transformers loads: weights, config, tokenizer and a model card.

A checkpoint is a file, or the folder that a sharded run writes; either is read into host memory, without a GPU.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fa_train.models.gpt import GPT
from fa_train.models.hf import SavesTokenizer, save_pretrained
from fa_train.models.lora import adapted, merge, save_adapter

PREFIX = "model."  # of the GPT's weights in LitGPT's
Build = Callable[[int], GPT]  # of a vocabulary's size, the run's model with its adapter, on torch's default device
CARD = """---
{header}
---

# {title}

Trained with fa_train. Losses and tokens are those of the run's last step.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
"""


def export_run(
    checkpoint: Path, run: Path, build: Build, config: Mapping[str, Any], metrics: Mapping[str, float]
) -> list[Path]:
    """Writes run/exported and, of a run with an adapter, run/exported_adapter for peft; returns their paths.

    Each appears whole or not at all. config, metrics: as of `write`.
    Raises: ValueError on any failure, naming the checkpoint, which stays as it is.
    """
    folder, adapter_folder = run / "exported", run / "exported_adapter"
    unfinished = run / "exported.partial"
    written = []
    try:
        model, step = load(checkpoint, build)
        # the adapter first: merging takes it out of the model
        for target, adapter in [(adapter_folder, True)] * any(adapted(model)) + [(folder, False)]:
            write(model, step, unfinished, run.parent.name, config, metrics, adapter=adapter)
            unfinished.rename(target)
            written.append(target)
    except Exception as error:  # whatever it is, hours of training are safe, and the user is told where
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ValueError(
            f"the run is finished, but {folder} could not be written: {error}. "
            f"`python scripts/export_hf.py {checkpoint} <folder>` writes it from the checkpoint"
        ) from error
    return written


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
    """Writes the folder; merges adapters into the model unless they alone are wanted.

    name: the run's, for the card; config: of which model, data, seq_len, batch_size and seed are read; metrics: the
    run's newest, by name.
    dtype None is what the base model is stored in, else what was trained.
    adapter: only what LoRA trained, in fp32, not merged into the base model.
    Raises: ValueError where only an adapter is wanted of a run that has none or in another dtype.
    """
    if adapter and dtype is not None:
        raise ValueError(f"an adapter is written in float32, without --dtype; got {dtype}")
    if model.max_seq_len is None:
        model.max_seq_len = config["seq_len"]  # RoPE counts from the rows that it was trained on
    tokenizer = tokenizer_of(config["data"])
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if adapter:
        save_adapter(model, folder, config["model"].get("pretrained"))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
    else:
        if dtype is None and model.origin is not None:
            dtype = model.origin.config.get("dtype") or model.origin.config.get("torch_dtype")
        save_pretrained(merge(model), folder, tokenizer, dtype=dtype)
        parameters = sum(p.numel() for p in model.parameters())
    (folder / "README.md").write_text(model_card(name, config, step, metrics, parameters, adapter))


def load(checkpoint: Path, build: Build) -> tuple[GPT, int]:
    """The trained model on the CPU, and its optimizer steps.

    Raises: ValueError on a checkpoint whose weights are not those of what `build` makes.
    """
    weights: dict[str, Tensor]
    if checkpoint.is_dir():
        reader = dcp.FileSystemReader(checkpoint)
        metadata = reader.read_metadata()
        model = _empty(build, _stored(checkpoint, metadata, "token_embedding.weight").size[0])
        weights = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in ((name, _stored(checkpoint, metadata, name)) for name, _ in model.named_parameters())
        }
        dcp.load({"state_dict": {PREFIX + name: x for name, x in weights.items()}}, storage_reader=reader, no_dist=True)
        step = torch.load(checkpoint / "meta.pt", map_location="cpu", weights_only=True)["global_step"]
    else:
        content = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
        step = content["global_step"]
        weights = {name.removeprefix(PREFIX): x for name, x in content["state_dict"].items()}
        model = _empty(build, weights["token_embedding.weight"].shape[0])
    if model.tied:
        weights["head.weight"] = weights["token_embedding.weight"]  # of which a sharded run has one
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{checkpoint} does not hold the weights of its run's config: {error}") from error
    if model.tied:
        model.head.weight = model.token_embedding.weight
    return model, step


def model_card(
    name: str, config: Mapping[str, Any], step: int, metrics: Mapping[str, float], parameters: int, adapter: bool
) -> str:
    """What the model was trained on, for how long and how well, in Markdown."""
    base = config["model"].get("pretrained")
    title = f"{Path(base).name}, fine-tuned" if base else name
    rows = {
        "Base model": base or "none: trained from scratch",
        "Parameters": f"{parameters / 1e6:,.1f}M",
        "Data": _data(config["data"]),
        "Optimizer steps": f"{step:,}",
        "Sequence length": f"{config['seq_len']:,} tokens",
        "Sequences a step": f"{config['batch_size']:,}",
        "Seed": str(config["seed"]),
    }
    measured = {
        "tokens": ("Tokens", "{:,.0f}"),
        "train/loss": ("Training loss, nats a token", "{:.4f}"),
        "val/loss": ("Validation loss, nats a token", "{:.4f}"),
    }
    rows |= {label: form.format(metrics[key]) for key, (label, form) in measured.items() if key in metrics}
    library = "peft" if adapter else "transformers"  # transformers loads an adapter's folder too, with peft installed
    header = [f"library_name: {library}", "pipeline_tag: text-generation", *([f"base_model: {base}"] if base else [])]
    table = [f"| {label} | {value} |" for label, value in rows.items()]
    return CARD.format(title=title, header="\n".join(header), table="\n".join(table))


def tokenizer_of(data: Mapping[str, Any]) -> SavesTokenizer | None:
    """The one that a run's `data` was read with, and its chat template; random tokens have none."""
    if data["_target_"].endswith(".synthetic_data"):
        return None
    if data.get("tokenizer") is None:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data["tokenizer"])
    if data.get("chat_template") is not None:
        template = Path(data["chat_template"]).expanduser()
        if not template.is_file():
            raise ValueError(f"data.chat_template must be the run's file of Jinja; {template} does not exist")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    saved: SavesTokenizer = tokenizer
    return saved


def byte_tokenizer() -> SavesTokenizer:
    """fa_train.data.tokenizer.ByteTokenizer as a tokenizer of transformers: the same ids."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}  # which follow the bytes in this order
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {name: 256 + i for i, name in enumerate(names.values())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _empty(build: Build, vocab_size: int) -> GPT:
    """The model without weights."""
    with torch.device("meta"):
        return build(vocab_size)


def _stored(checkpoint: Path, metadata: Metadata, name: str) -> TensorStorageMetadata:
    """The shape and dtype of a parameter in a sharded checkpoint."""
    stored = metadata.state_dict_metadata.get(f"state_dict.{PREFIX}{name}")
    if not isinstance(stored, TensorStorageMetadata):
        raise ValueError(f"{checkpoint} does not hold the weights of its run's config: {name} is missing")
    return stored


def _data(data: Mapping[str, Any]) -> str:
    kind = data["_target_"].rpartition(".")[2].removesuffix("_data")
    where = data.get("path") or data.get("name")
    return f"{kind}: {where}" if where else kind
