"""Runs train.py for tests, either in this process on tiny models or on the command line."""

import csv
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig, open_dict
from torch import Tensor

import train  # noqa: F401  registers the resolvers that conf/train.yaml needs
from tests.support import processes
from tests.support.processes import REPOSITORY

CONF = REPOSITORY / "conf"
# with 20 thousand parameters and rows of 64 bytes, a step takes a few milliseconds
TINY = (
    "preset=cpu", "seq_len=64", "max_steps=20", "batch_size=4", "logger=csv", "model.n_layers=2", "model.dim=32",
    "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=64", "data=text", "data.val_rows=4", "data.num_workers=0",
    "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "trainer.val_check_interval=10",
    "scheduler.warmup_steps=2",
)  # fmt: skip


def own_option(folder: Path, option: str, text: str) -> str:
    """Writes a config file for `option`, such as strategy/mine. Returns an override with the effect of --config-dir."""
    path = folder / "my_conf" / f"{option}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"hydra.searchpath=[file://{folder}/my_conf]"


def write_corpus(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "old", "walls"]
    for number in range(40):
        text = " ".join(words[(number * i + i // 3) % len(words)] for i in range(10 + number * 3 % 50))
        (folder / f"{number}.txt").write_text(text)
    return folder


@contextmanager
def composed(folder: Path, *overrides: str) -> Iterator[DictConfig]:
    """Yields the config that the main function of train.py would get, with `folder` as the run's folder."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        folders = [f"hydra.run.dir={folder}", f"hydra.runtime.output_dir={folder}"]
        cfg = compose("train", [*overrides, *folders, "hydra.mode=RUN", "hydra.job.num=0"], return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg.hydra
    yield cfg


def tiny(tmp_path: Path, *overrides: str) -> list[str]:
    """Returns overrides for a tiny run whose corpus and cache are below tmp_path.

    `overrides` take precedence over `TINY`. With model=pretrained, the sizes in `TINY` are left out.
    """
    own = [x for x in TINY if not ("model=pretrained" in overrides and x.startswith("model."))]
    settings = dict(override.split("=", 1) for override in (*own, *overrides))
    if settings["data"] == "text":
        settings["data.path"] = str(write_corpus(tmp_path / "corpus"))
    if settings["data"] != "synthetic":
        settings["data.cache_dir"] = str(tmp_path / "cache")
    return [f"{name}={value}" for name, value in settings.items()]


def command_line(
    cwd: Path, *overrides: str, limit_memory: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python train.py` with overrides and waits for its end (see tests.support.processes)."""
    return processes.finish(REPOSITORY / "train.py", overrides, cwd, quiet_environment() | environment, limit_memory)


class RowRecorder(Callback):
    """Writes [step, a hash of each row's tokens, labels and positions] to rows_<rank>.jsonl in the run's folder.

    recorded_rows() reads the rows of all ranks, including ranks that a test has killed.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        parts = [batch[name].reshape(-1, self.seq_len) for name in ("tokens", "labels", "position_ids")]
        hashes = [hashlib.md5(row.numpy().tobytes()).hexdigest() for row in torch.cat(parts, dim=1).cpu()]
        with Path(trainer.default_root_dir, f"rows_{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.global_step, hashes]) + "\n")


RECORDED = ("+callbacks.rows._target_=tests.support.training.RowRecorder", "+callbacks.rows.seq_len=${seq_len}")


def recorded_rows(folder: Path) -> dict[int, list[str]]:
    """Returns a dictionary from step to the sorted hashes of all ranks' rows. Steps are numbered from 0.

    The hashes are sorted, because ranks may get the rows in any order.
    """
    rows: dict[int, list[str]] = {}
    for path in folder.glob("rows_*.jsonl"):
        for line in path.read_text().splitlines():
            step, hashes = json.loads(line)
            rows.setdefault(step, []).extend(hashes)
    return {step: sorted(hashes) for step, hashes in rows.items()}


def quiet_environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def column(folder: Path, name: str) -> dict[int, float]:
    """Returns one column of a run's metrics.csv as a dictionary from step to value."""
    [path] = folder.rglob("metrics.csv")
    with path.open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}
