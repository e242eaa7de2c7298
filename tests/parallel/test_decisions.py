"""All ranks of a run use the decisions of rank 0, and no two runs share a folder."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch.distributed import TCPStore

from fa_train import training
from fa_train.memory.memory import Levers
from fa_train.parallel import rank_store
from fa_train.parallel.decisions import compared_by_rank_zero, decided_by_rank_zero, fresh_folder
from fa_train.parallel.fsdp import FullyShardedStrategy
from fa_train.parallel.ranks import DECISIONS, ranks_to_start
from tests.support.processes import start_server
from tests.support.ranks import needs_ports, ranks_of_torchrun
from tests.support.training import CONF, composed, tiny


def test_processes_that_want_one_folder_get_different_ones(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(fresh_folder, [f"{tmp_path}/runs/nano/now"] * 8))
    assert sorted(folders) == [f"{tmp_path}/runs/nano/now{suffix}" for suffix in ("", *(f"-{i}" for i in range(1, 8)))]
    assert all(Path(folder).is_dir() for folder in folders)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_folder_that_cannot_be_created_is_refused(kind, tmp_path):
    """If `runs` is a broken link, mkdir raises FileExistsError. fresh_folder must not try new names forever."""
    runs = tmp_path / "runs"
    runs.symlink_to(tmp_path / "missing" / "runs") if kind == "link" else runs.touch()
    with pytest.raises(ValueError, match=rf"must be in a folder that can be created; got {tmp_path}/runs/nano/now"):
        fresh_folder(f"{tmp_path}/runs/nano/now")


@pytest.mark.parametrize("node", ["run", "sweep"])
def test_runs_that_start_in_the_same_second_have_folders_of_their_own(node, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []
    for _ in range(3):
        with initialize_config_dir(str(CONF), version_base="1.3"), patch("hydra.core.utils.datetime") as clock:
            clock.now.return_value.strftime.return_value = "now"
            cfg = compose("train", ["run_name=own"], return_hydra_config=True)
            HydraConfig.instance().set_config(cfg)
            folders.append(OmegaConf.select(cfg, f"hydra.{node}.dir"))
            assert OmegaConf.select(cfg, f"hydra.{node}.dir") == folders[-1], "a run has one folder"
    first = "runs/own/now" if node == "run" else "runs/multirun/now"
    assert folders == [first, f"{first}-1", f"{first}-2"] and all((tmp_path / folder).is_dir() for folder in folders)


def test_the_launcher_tells_its_ranks_what_it_has_decided(monkeypatch):
    monkeypatch.setenv(DECISIONS, '{"folder": "of_the_launcher"}')
    assert decided_by_rank_zero("folder", lambda: "of_this_rank") == "of_the_launcher"
    assert decided_by_rank_zero("ckpt_path", lambda: "of_this_rank") == "of_this_rank"


def ranks_of_srun() -> list[dict[str, str]]:
    """Returns the environment variables that srun sets for two tasks on one node."""
    [port] = {environment["MASTER_PORT"] for environment in ranks_of_torchrun(2)}
    shared = {
        "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    return [shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


@pytest.mark.parametrize("step", [None, "4294967290"], ids=["batch-script", "shell-of-salloc"])
def test_a_process_that_srun_has_not_started_does_not_wait_for_other_tasks(step, monkeypatch):
    for name, value in ranks_of_srun()[0].items():
        monkeypatch.setenv(name, value)
    assert ranks_to_start({"devices": 2}) == 1
    monkeypatch.delenv("SLURM_STEP_ID") if step is None else monkeypatch.setenv("SLURM_STEP_ID", step)
    with pytest.raises(ValueError, match=r"srun must start the 2 tasks of this SLURM job; .* Write srun before python"):
        ranks_to_start({"devices": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [pytest.param(lambda: ranks_of_torchrun(2), id="torchrun"), pytest.param(ranks_of_srun, id="srun")]
)
@needs_ports
def test_two_ranks_take_the_decisions_of_rank_zero(ranks, tmp_path):
    start_server()
    torch.multiprocessing.start_processes(
        in_two_processes, args=(tmp_path, ranks()), nprocs=2, start_method="forkserver"
    )


def in_two_processes(rank: int, tmp_path: Path, environments: list[dict[str, str]]) -> None:
    """Without the decisions of rank 0, the two ranks would decide differently."""
    os.environ.update(environments[rank])
    torch.set_num_threads(1)
    assert [decided_by_rank_zero("question", partial(list, (rank, number))) for number in (5, 6)] == [[0, 5], [0, 6]]

    levers = [Levers("selective", False, 16), Levers("full", True, None)]
    checkpoints, started = ["of_rank_zero.ckpt", "of_rank_one.ckpt"], []
    settings = tiny(tmp_path / str(rank), "data=synthetic", "memory=auto", "strategy=ddp", "trainer.devices=2")
    with (
        composed(tmp_path / str(rank), *settings) as cfg,
        patch("fa_train.memory.planner.run.fastest_levers", lambda *arguments: levers[rank]),
        patch("fa_train.checkpoints.resume.checkpoint_path", lambda *arguments: checkpoints[rank]),
        patch("fa_train.checkpoints.resume.steps_done", lambda *arguments: 0),
        patch("lightning.Trainer.fit", lambda *arguments, ckpt_path, **options: started.append(ckpt_path)),
    ):
        training.train(cfg)
        assert {name: cfg.memory[name] for name in asdict(levers[0])} == asdict(levers[0])
    assert started == ["of_rank_zero.ckpt"]

    with pytest.raises(ValueError, match="a mistake of rank 0"):
        decided_by_rank_zero("mistake", mistake)

    compared_by_rank_zero("equal", "text", refuse)
    with pytest.raises(ValueError, match="got text 1 of rank 1"):
        compared_by_rank_zero("other", f"text {rank}", refuse)


def refuse(rank: int, text: str) -> None:
    raise ValueError(f"got {text} of rank {rank}")


def mistake() -> None:
    raise ValueError(f"a mistake of rank {os.environ.get('RANK', os.environ.get('SLURM_PROCID'))}")


@needs_ports
def test_a_rank_waits_for_a_slow_decision(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=0.1))
    monkeypatch.setattr(rank_store, "_store", lambda: store)
    monkeypatch.setattr(rank_store, "PATIENCE", timedelta(seconds=0.1))
    slow = threading.Timer(0.5, store.set, ["fa_train/0/slow/1", '{"answer": "a.ckpt"}'])
    slow.start()
    rank_one = SimpleNamespace(global_rank=lambda: 1)
    assert rank_store.decided_through_store(rank_one, "slow", Mock()) == "a.ckpt"


@needs_ports
def test_a_rank_that_sends_no_settings_is_named(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(rank_store, "_store", lambda: store)
    monkeypatch.setattr(rank_store, "PATIENCE", timedelta(seconds=0.1))
    monkeypatch.setattr(rank_store, "GOODBYE", timedelta(seconds=0.1))
    store.set("fa_train/0/late/1/text/1", "own")
    with pytest.raises(ValueError, match=r"must start within .*; got no message from ranks \[2\]"):
        rank_store.compared_through_store(
            SimpleNamespace(global_rank=lambda: 0, world_size=lambda: 3), "late", "own", Mock()
        )


def test_a_rank_does_not_wait_for_a_rank_that_has_ended(monkeypatch):
    lost = Mock(wait=Mock(side_effect=[torch.distributed.DistStoreError, torch.distributed.DistNetworkError]))
    monkeypatch.setattr(rank_store, "_store", lambda: lost)
    with pytest.raises(torch.distributed.DistNetworkError):
        rank_store.decided_through_store(SimpleNamespace(global_rank=lambda: 1), "ended", Mock())


def test_ranks_agree_on_what_kind_of_checkpoint_they_read(tmp_path, monkeypatch):
    """This rank sees a folder that rank 0 does not see yet, as can happen on a network file system."""
    read = []
    strategy = FullyShardedStrategy(1, True, False, "float32")
    monkeypatch.setattr(strategy, "broadcast", lambda answer: not answer)
    monkeypatch.setattr(strategy, "_load_whole", lambda path: read.append(path))
    strategy.load_checkpoint(tmp_path)
    assert read == [tmp_path]
