"""Tests that documented runs train. Resumed runs, runs with float8 and runs on several machines are left out.

A documented run on several GPUs is tested with two ranks on the CPU.
"""

import json
import re
import shlex

import pytest
import torch

from fa_train import training
from fa_train.run_config import check
from tests.data.support.chats import chat_message, save_tokenizer
from tests.support.documentation import GUIDES, commands
from tests.support.finetuning import write_base
from tests.support.processes import REPOSITORY
from tests.support.ranks import forked, needs_ports
from tests.support.training import composed, write_corpus

SMALL = {
    "preset": "cpu", "logger": "csv", "seq_len": "64", "batch_size": "4", "max_steps": "1", "data.num_workers": "0",
    "trainer.accelerator": "cpu", "trainer.log_every_n_steps": "1",
    "scheduler.warmup_steps": "1",
}  # fmt: skip
SMALL_MODEL = {
    "model.n_layers": "1", "model.dim": "32", "model.n_heads": "4", "model.n_kv_heads": "2", "model.ffn_dim": "64",
}  # fmt: skip


def documented() -> list[str]:
    """Returns the commands of the documented runs on one device, without a leading `python`.

    A sweep is replaced by its first run. If `shrunk` makes several commands equal, the list has only the first.
    """
    found: dict[tuple[str, ...], str] = {}
    for words in (words for page in GUIDES for words in commands(page) if words[:2] == ["python", "train.py"]):
        overrides = [word.split(",")[0] if "-m" in words else word for word in words[1:] if word != "-m"]
        line = shlex.join(overrides)
        if not re.search("--config-dir|ckpt_path|trainer.devices|float8", line):  # float8 needs a GPU
            found.setdefault(tuple(sorted(shrunk(overrides[1:]))), line)
    return list(found.values())


def documented_on_several_devices() -> list[str]:
    """Returns the commands of the documented runs on several devices of one machine, without a leading `python`.

    If `shrunk` makes several commands equal, the list has only the first.
    """
    found: dict[tuple[str, ...], str] = {}
    for words in (words for page in GUIDES for words in commands(page) if "train.py" in words):
        line, place = shlex.join(words).removeprefix("python "), words.index("train.py") + 1
        if "trainer.devices" in line and "num_nodes" not in line:
            found.setdefault((words[0], *sorted(shrunk(words[place:]))), line)
    return list(found.values())


def shrunk(overrides: list[str]) -> list[str]:
    """Returns the overrides of the same run with a small model, short rows and only one step.

    If the overrides set `epochs`, the run trains for all its epochs, and not for one step.
    """
    given = dict(override.split("=", 1) for override in overrides)
    given |= {name: "2" for name in ("trainer.devices", "strategy.context") if name in given}
    from_checkpoint = "model.pretrained" in given
    settings = given | SMALL | ({} if from_checkpoint else SMALL_MODEL)
    if given.get("experiment") == "extend_context":
        settings |= {"seq_len": "128"}  # twice the context length of the checkpoint
    if "epochs" in given:
        del settings["max_steps"]
    return [f"{name}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files and folders that the documentation names."""
    folder = tmp_path_factory.mktemp("documented")
    for name in ("my_folder", "long_texts", "docs", "corpus", "roneneldan/TinyStories"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_corpus(folder / name)
    texts = [path.read_text() for path in sorted((folder / "my_folder").iterdir())]
    for name, column in {"corpus/rows": "body", "roneneldan/TinyStories/rows": "text"}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    for name in ("train.txt", "val.txt"):
        (folder / name).write_text("".join(texts))
    chats = [{"messages": chat(number)} for number in range(20)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    for name in ("path", "path/or/hub-name"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_base(folder / name)
    save_tokenizer(folder / "gpt2")
    return folder


def chat(number: int) -> list[dict[str, str]]:
    return [chat_message("user", f"what is {number} + 2?"), chat_message("assistant", f"{number + 2}")]


@pytest.mark.slow
@pytest.mark.parametrize("line", documented(), ids=str)
def test_documented_run_trains(line, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FA_TRAIN_CACHE", "cache")
    eager = torch.compiler.set_stance("force_eager")  # compiling would take half a minute
    with eager, composed(tmp_path, *shrunk(shlex.split(line)[1:])) as cfg:
        check(cfg)
        result = training.train(cfg)
    assert result["train/loss"] > 0


@pytest.mark.slow
@needs_ports
@pytest.mark.parametrize("line", documented_on_several_devices(), ids=str)
def test_documented_run_on_several_devices_trains(line, folder, monkeypatch):
    monkeypatch.setenv("FA_TRAIN_CACHE", "cache")
    words = shlex.split(line)
    launcher = words[: words.index("train.py") + 1]
    if launcher[0] == "torchrun":
        launcher = ["torchrun", "--nproc-per-node=2", str(REPOSITORY / "train.py")]
    done = forked(folder, *launcher, *shrunk(words[words.index("train.py") + 1 :]), "lit_gpt.compile_model=false")
    assert done.returncode == 0, done.stderr
    assert "done: loss " in done.stdout
