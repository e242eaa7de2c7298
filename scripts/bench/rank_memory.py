"""Writes the peak memory of each rank of a run of train.py, for scripts.bench.scaling.

Each rank writes a file rank_memory_<rank>.json to the run's folder when training ends.

    python train.py +callbacks.memory._target_=scripts.bench.rank_memory.RankMemory +callbacks.memory.warm_up=20
"""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from fa_train.bounds import PositiveInt
from fa_train.callbacks.monitor import GIB, memory, resident_bytes


class RankMemory(Callback):
    """Records the peaks of the first `warm_up` optimizer steps and of the later steps, in GiB.

    After the first `warm_up` steps, the callback resets the allocator's maxima. After the reset, the metrics
    perf/peak_gib and perf/reserved_gib cover only the later steps. On the CPU, no peak can be reset, so the recorded
    peak of the later steps is the peak of the whole run.
    """

    def __init__(self, warm_up: PositiveInt) -> None:
        self.warm_up = warm_up
        self.first_gib = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.warm_up and not self.first_gib:
            self.first_gib = memory(pl_module.device)["perf/peak_gib"]
            if pl_module.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = memory(pl_module.device)
        written = {
            "first_gib": self.first_gib,
            "later_gib": found["perf/peak_gib"],
            "reserved_gib": found.get("perf/reserved_gib"),
            "host_gib": resident_bytes() / GIB,
        }
        path = Path(trainer.default_root_dir, f"rank_memory_{trainer.global_rank}.json")
        path.write_text(json.dumps(written) + "\n", encoding="utf-8")
