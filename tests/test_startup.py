"""Commands that need neither torch nor Lightning do not import them, because the imports take seconds."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fa_train import cuda_driver
from fa_train.cuda_driver import has_gpu, torch_cuda_version
from tests.support.marks import slow_if
from tests.support.processes import REPOSITORY
from tests.support.training import quiet_environment, tiny

TRAIN = str(REPOSITORY / "train.py")


def imports(cwd: Path, *command: str) -> tuple[str, set[str]]:
    """Returns all that `python command` prints, and the names of the packages that it imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        cwd=cwd,
        env=quiet_environment() | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time")]
    return done.stdout + done.stderr, {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        pytest.param(command, answer, id=name, marks=slow_if(name != "wrong-value"))
        for name, command, answer in (
            ("help", [TRAIN, "--help"], "logger: csv, tensorboard, wandb"),
            ("config", [TRAIN, "--cfg", "job"], "max_steps: "),
            ("unknown-key", [TRAIN, "model.n_layer=3"], "unknown key model.n_layer; did you mean"),
            ("wrong-value", [TRAIN, "seq_len=-1"], "seq_len must be a positive integer; got -1"),
            ("missing", [TRAIN, "data=sft"], "data.path and data.tokenizer must be given"),
            ("prepare_data", ["-m", "scripts.prepare_data", "--help"], "Tokenises and packs"),
            ("plan_memory", ["-m", "scripts.plan_memory", "--help"], "Predicts the GPU and host memory"),
            ("export_hf", ["-m", "scripts.export_hf", "--help"], "write only the LoRA adapter"),
            ("generate", ["-m", "scripts.generate", "--help"], "text to continue"),
        )
    ],
)
def test_an_answer_that_needs_no_torch_does_not_import_it(command, answer, tmp_path):
    printed, imported = imports(tmp_path, *command)
    assert answer in printed
    assert "omegaconf" in imported
    assert not imported & {"torch", "lightning", "triton", "transformers", "wandb", "fa_kernels"}


@pytest.mark.slow
def test_a_run_does_not_import_the_libraries_of_other_settings(tmp_path):
    printed, imported = imports(tmp_path, TRAIN, *tiny(tmp_path, "max_steps=1"))
    assert "done: " in printed
    assert "lightning" in imported
    assert not imported & {"datasets", "liger_kernel", "tensorboard", "torchao", "wandb"}


def test_ctrl_c_while_modules_are_imported_prints_one_line(tmp_path):
    (tmp_path / "hydra.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")  # imported first
    environment = quiet_environment() | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = subprocess.run(
        [sys.executable, TRAIN], cwd=tmp_path, env=environment, capture_output=True, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore SIGINT
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_driver_and_torch_agree_on_whether_there_is_a_gpu():
    assert torch_cuda_version() == torch.version.cuda
    assert has_gpu() == torch.cuda.is_available()


def fake_driver(error: int, version: int, gpus: int) -> SimpleNamespace:
    """Returns a fake CUDA driver. error: what cuInit returns."""

    def writes(value):
        return lambda pointer: setattr(pointer._obj, "value", value) or 0

    return SimpleNamespace(
        cuInit=lambda flags: error, cuDriverGetVersion=writes(version), cuDeviceGetCount=writes(gpus)
    )


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        pytest.param(fake_driver(0, 12040, 2), True, id="same-major-version"),
        pytest.param(fake_driver(0, 13000, 1), True, id="newer"),
        pytest.param(fake_driver(0, 11080, 1), False, id="too-old-for-torch"),
        pytest.param(fake_driver(0, 12080, 0), False, id="no-visible-device"),
        pytest.param(fake_driver(100, 12080, 1), False, id="cannot-initialise"),
    ],
)
def test_a_gpu_counts_if_torch_can_use_it(driver, expected, monkeypatch):
    monkeypatch.setattr(cuda_driver, "torch_cuda_version", lambda: "12.8")
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    assert has_gpu() is expected
