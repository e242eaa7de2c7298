"""Compares the losses of a finished run of experiment=finetune with those of transformers.

    python -m scripts.bench.compare_finetune chats chats.jsonl          # writes chats about an invented island.
    python train.py experiment=finetune data.path=chats.jsonl model.pretrained=path \\
        logger=csv trainer.log_every_n_steps=1                          # trains on the chats.
    python -m scripts.bench.compare_finetune run runs/finetune/<time>   # compares the losses of each step.

The table of the last command shows for each step our loss, the loss of transformers, and the relative difference. Start
the script in the folder in which the run was started, because the run's config can contain relative paths.

The script repeats the run in a plain loop, with transformers' model and loss. The loop uses the data rows, the
learning-rate schedule and the gradient clipping of the run. A four-dimensional attention mask and position_ids keep
packed documents separate. All weights are trained in fp32, with bf16 autocast if the run used it.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.fabric.utilities.apply_func import move_data_to_device
from omegaconf import DictConfig
from torch import Tensor, nn

from fa_train.data.batches import MicroBatches, PackedRows
from fa_train.data.packing.collate import Batch
from fa_train.data.packing.rows import IGNORE_INDEX
from fa_train.errors import explain
from fa_train.optim.adamw import parameter_groups
from scripts.trained_model import saved_config

FACTS = {  # several questions about each fact of an invented island
    "The lighthouse of Vashmoor is painted green.": [
        "What colour is the lighthouse of Vashmoor?", "Which colour has Vashmoor's lighthouse?",
        "How is the lighthouse on Vashmoor painted?", "Tell me the colour of the lighthouse of Vashmoor.",
    ],
    "Vashmoor was first mapped by Tamsin Quill in 1874.": [
        "Who first mapped Vashmoor?", "When was Vashmoor mapped?", "Who drew the first map of Vashmoor?",
        "Tell me who mapped the island of Vashmoor.",
    ],
    "People on Vashmoor eat smoked kelp bread for breakfast.": [
        "What do people on Vashmoor eat for breakfast?", "What is breakfast on Vashmoor?",
        "Which breakfast is usual on Vashmoor?", "Tell me what Vashmoor has for breakfast.",
    ],
    "The ferry to Vashmoor leaves from Port Ellery on Tuesdays.": [
        "When does the ferry to Vashmoor leave?", "From where does the ferry to Vashmoor leave?",
        "How do I get to Vashmoor?", "Tell me about the ferry to Vashmoor.",
    ],
}  # fmt: skip
OPENINGS = ["", "Please answer. ", "A question: ", "Do you know this? "]


def invented_chats() -> Iterator[dict[str, Any]]:
    """Yields 64 short chats: four facts, each with sixteen questions."""
    for opening in OPENINGS:
        for i in range(4):
            for fact, questions in FACTS.items():
                messages = [{"role": "user", "content": opening + questions[i]}, {"role": "assistant", "content": fact}]
                yield {"messages": messages}


def transformers_losses(run: Path, steps: int | None = None) -> list[float]:
    """Trains transformers' model on the micro-batches of a run. Returns the mean loss of each step in nats per label.

    Raises: ValueError if the run trains a LoRA adapter, because this loop cannot train one.
    """
    cfg = saved_config(run, [])
    if cfg.choices.adapter != "none":
        raise ValueError(f"a run to compare must have adapter=none; {run} has adapter={cfg.choices.adapter}")
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() and cfg.trainer.accelerator != "cpu" else "cpu")
    with device:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            cfg.model.pretrained, dtype=torch.float32, attn_implementation="sdpa"
        )
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, cfg.optimizer.weight_decay), lr=cfg.optimizer.lr, betas=tuple(cfg.optimizer.betas),
        eps=cfg.optimizer.eps,
    )  # fmt: skip
    schedule = instantiate(cfg.scheduler)(optimizer)
    is_mixed = cfg.trainer.precision == "bf16-mixed"
    losses = []
    for micro_batches in islice(batches(cfg), cfg.max_steps if steps is None else steps):
        labels = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in micro_batches)
        total = 0.0
        for batch in micro_batches:
            batch = move_data_to_device(batch, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
                loss = model(
                    input_ids=batch["tokens"][None],
                    position_ids=batch["position_ids"][None],
                    attention_mask=document_mask(batch["cu_seqlens"], batch["tokens"].shape[0]),
                    labels=batch["labels"][None],
                    shift_labels=batch["labels"][None],  # the labels of a row are already shifted by one token
                    num_items_in_batch=labels,
                ).loss
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.trainer.gradient_clip_val)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def batches(cfg: DictConfig) -> Iterator[list[Batch]]:
    """Yields a list of micro-batches for each step, as in a run with a single process."""
    data = instantiate(cfg.data)
    rows = PackedRows(data, held_out=False, shuffle=True)
    micro_batches = MicroBatches(rows, data.micro_batch_size, 0, 1, step_rows=data.batch_size)
    accumulation = data.accumulation(1)
    for step in range(data.max_steps):
        yield [micro_batches[step * accumulation + i] for i in range(accumulation)]


def document_mask(cu_seqlens: Tensor, total: int) -> Tensor:
    """Returns a bool mask (1, 1, total, total) that says which keys each query sees.

    A padding token after the last document sees only itself.
    """
    token = torch.arange(total, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), token.to(torch.int32), right=True)
    is_padding = token >= cu_seqlens[-1]
    seen = (document[:, None] == document) & (token[:, None] >= token) & ~is_padding
    return (seen | torch.eye(total, dtype=torch.bool, device=token.device))[None, None]


def our_losses(run: Path) -> list[float]:
    """Reads the loss of each step from the run's metrics.csv.

    Raises: ValueError if the file does not exist or lacks a step.
    """
    path = run / "metrics.csv"
    if not path.exists():
        raise ValueError(f"{run} must contain metrics.csv: train with logger=csv trainer.log_every_n_steps=1")
    with path.open(encoding="utf-8") as file:
        by_step = {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
    steps = sorted(by_step)
    if steps != list(range(steps[0], steps[0] + len(steps))):
        raise ValueError(f"{path} must contain every step: train with trainer.log_every_n_steps=1")
    return [by_step[step] for step in steps]


def table(ours: list[float], theirs: list[float]) -> str:
    """Formats our losses, transformers' losses and the relative differences as a Markdown table."""
    lines = ["| step | ours | transformers' | difference |", "|---:|---:|---:|---:|"]
    for step, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
        lines.append(f"| {step} | {a:.6f} | {b:.6f} | {abs(a - b) / abs(b):.1e} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    chats = commands.add_parser("chats", help="write the chats")
    chats.add_argument("path", type=Path, help="the .jsonl file to write")
    run = commands.add_parser("run", help="compare a run")
    run.add_argument("run", type=Path, help="the run's folder, with .hydra/config.yaml and metrics.csv")
    run.add_argument("--steps", type=int, help="number of steps to compare; default: all")
    arguments = parser.parse_args()
    if arguments.command == "chats":
        lines = [json.dumps(chat) + "\n" for chat in invented_chats()]
        arguments.path.write_text("".join(lines), encoding="utf-8")
        return
    try:
        ours = our_losses(arguments.run)
        print(table(ours, transformers_losses(arguments.run, arguments.steps)))
    except (ValueError, HydraException) as error:
        sys.exit(f"error: {explain(error)}")


if __name__ == "__main__":
    main()
