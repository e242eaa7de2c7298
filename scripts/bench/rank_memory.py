"""Writes the peak memory of each rank of a run of train.py, for scripts.bench.scaling.

python train.py +callbacks.memory._target_=scripts.bench.rank_memory.RankMemory
"""

import json
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback

from fa_train.callbacks.monitor import memory


class RankMemory(Callback):
    """Writes the peak of a rank's training in GiB to rank_memory_<rank>.json in the run's folder."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        path = Path(trainer.default_root_dir, f"rank_memory_{trainer.global_rank}.json")
        path.write_text(json.dumps({"peak_gib": memory(pl_module.device)["perf/peak_gib"]}) + "\n", encoding="utf-8")
