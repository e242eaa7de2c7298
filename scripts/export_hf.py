"""From a checkpoint of train.py to a folder that transformers loads: weights, config, tokenizer and a model card.

    python scripts/export_hf.py runs/nano/2026-11-21_07-32-06/checkpoints/step_0000300.ckpt exported

A run with adapter=lora or qlora is exported merged, or with --adapter as the adapter alone, which peft loads. A
checkpoint is a file, or the folder that a sharded run writes; either is read into host memory, without a GPU.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fa_train.models.gpt import GPT
from fa_train.models.hf import DTYPES, SavesTokenizer, save_pretrained
from fa_train.models.lora import merge, save_adapter

PREFIX = "model."  # of the GPT's weights in LitGPT's
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


def export(checkpoint: Path, folder: Path, overrides: list[str], dtype: str | None, adapter: bool = False) -> None:
    """Writes the folder. dtype None is what the base model is stored in, else what was trained.

    adapter: only what LoRA trained, in fp32, not merged into the base model.
    Raises: ValueError on a checkpoint without its run's folder, or whose weights are not those of its config, and where
    only an adapter is wanted of a run that has none or in another dtype.
    """
    run = _run_folder(checkpoint)
    cfg = OmegaConf.merge(OmegaConf.load(run / ".hydra" / "config.yaml"), OmegaConf.from_dotlist(overrides))
    assert isinstance(cfg, DictConfig)
    if adapter and dtype is not None:
        raise ValueError(f"an adapter is written in float32, without --dtype; got {dtype}")
    model, step = load(checkpoint, cfg)
    if dtype is None and model.origin is not None:
        dtype = model.origin.config.get("dtype") or model.origin.config.get("torch_dtype")
    tokenizer = _tokenizer(cfg)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if adapter:
        save_adapter(model, folder, cfg.model.get("pretrained"))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
    else:
        save_pretrained(merge(model), folder, tokenizer, dtype=dtype)
        parameters = sum(p.numel() for p in model.parameters())
    result = run / "result.json"
    metrics = json.loads(result.read_text()) if result.exists() else {}
    (folder / "README.md").write_text(model_card(run.parent.name, cfg, step, metrics, parameters, adapter))


def load(checkpoint: Path, cfg: DictConfig) -> tuple[GPT, int]:
    """The trained model on the CPU, and its optimizer steps."""
    weights: dict[str, Tensor]
    if checkpoint.is_dir():
        model = _empty(cfg, _stored(checkpoint, "token_embedding.weight").size[0])
        weights = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in ((name, _stored(checkpoint, name)) for name, _ in model.named_parameters())
        }
        dcp.load(
            {"state_dict": {PREFIX + name: x for name, x in weights.items()}}, checkpoint_id=checkpoint, no_dist=True
        )
        step = torch.load(checkpoint / "meta.pt", map_location="cpu", weights_only=True)["global_step"]
    else:
        content = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
        step = content["global_step"]
        weights = {name.removeprefix(PREFIX): x for name, x in content["state_dict"].items()}
        model = _empty(cfg, weights["token_embedding.weight"].shape[0])
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
    name: str, cfg: DictConfig, step: int, metrics: Mapping[str, float], parameters: int, adapter: bool
) -> str:
    """What the model was trained on, for how long and how well, in Markdown."""
    base = cfg.model.get("pretrained")
    title = f"{Path(base).name}, fine-tuned" if base else name
    rows = {
        "Base model": base or "none: trained from scratch",
        "Parameters": f"{parameters / 1e6:,.1f}M",
        "Data": _data(cfg),
        "Optimizer steps": f"{step:,}",
        "Sequence length": f"{cfg.seq_len:,} tokens",
        "Sequences a step": f"{cfg.batch_size:,}",
        "Seed": str(cfg.seed),
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


def _empty(cfg: DictConfig, vocab_size: int) -> GPT:
    """The model without weights; RoPE counts from the rows that it was trained on, where nothing else is said."""
    with torch.device("meta"):
        model = instantiate(cfg.model, vocab_size=vocab_size)
    assert isinstance(model, GPT)
    if model.max_seq_len is None:
        model.max_seq_len = cfg.seq_len
    if cfg.get("adapter") is None:  # a run from before there were any
        return model
    with torch.device("meta"):
        adapted: GPT = instantiate(cfg.adapter)(model)
    return adapted


def _stored(checkpoint: Path, name: str) -> TensorStorageMetadata:
    """The shape and dtype of a parameter in a sharded checkpoint."""
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.get(f"state_dict.{PREFIX}{name}")
    if not isinstance(stored, TensorStorageMetadata):
        raise ValueError(f"{checkpoint} does not hold the weights of its run's config: {name} is missing")
    return stored


def _run_folder(checkpoint: Path) -> Path:
    if not checkpoint.exists():
        raise ValueError(f"{checkpoint} does not exist")
    for folder in checkpoint.resolve().parents:
        if (folder / ".hydra" / "config.yaml").exists():
            return folder
    raise ValueError(
        f"{checkpoint} must lie in its run's folder, beside .hydra/config.yaml; no folder above it has one"
    )


def _tokenizer(cfg: DictConfig) -> SavesTokenizer | None:
    """The one that the data was read with; random tokens have none."""
    if cfg.data._target_.endswith(".synthetic_data"):
        return None
    if cfg.data.get("tokenizer") is None:
        return byte_tokenizer()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(cfg.data.tokenizer)


def _data(cfg: DictConfig) -> str:
    kind = cfg.data._target_.rpartition(".")[2].removesuffix("_data")
    where = cfg.data.get("path") or cfg.data.get("name")
    return f"{kind}: {where}" if where else kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a .ckpt of a run, still in the run's folder")
    parser.add_argument("folder", type=Path, help="where to write, new or without a model")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; the base model's by default, else the trained")
    parser.add_argument("--adapter", action="store_true", help="write what LoRA trained alone, for peft")
    parser.add_argument("overrides", nargs="*", help="of the run's config, such as model.pretrained=moved/folder")
    arguments: dict[str, Any] = vars(parser.parse_args())
    try:
        export(**arguments)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"exported to {arguments['folder']}")


if __name__ == "__main__":
    main()
