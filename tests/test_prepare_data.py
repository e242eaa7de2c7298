"""scripts/prepare_data.py writes what train.py with the same overrides then finds."""

import shutil
import subprocess
import sys

import pytest
from hydra.utils import instantiate

from fa_train.data import store
from scripts.prepare_data import main
from tests.data.chats import many_chats, save_tokenizer, write_jsonl
from tests.training import REPOSITORY, composed, quiet_environment, write_corpus


@pytest.fixture
def overrides(tmp_path):
    chats = write_jsonl(tmp_path / "chats.jsonl", many_chats(10))
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    return [
        "preset=cpu", "seq_len=64", "data=mix", f"data.cache_dir={tmp_path / 'cache'}", f"data.tokenizer={tokenizer}",
        "+data/source@data.sources.web=text", f"data.sources.web.path={write_corpus(tmp_path / 'corpus')}",
        "data.sources.web.weight=3",
        "+data/source@data.sources.chats=sft", f"data.sources.chats.path={chats}",
    ]  # fmt: skip


def test_train_finds_it_done(tmp_path, overrides, monkeypatch):
    report = main([*overrides, "workers=1"])
    assert "web: 75.00% of rows" in report and "chats: 25.00% of rows" in report and "labels " in report

    def again(*arguments):
        raise AssertionError("tokenised anew")

    monkeypatch.setattr(store, "write_shards", again)
    with composed(tmp_path, *overrides) as cfg:
        assert instantiate(cfg.data).packing_report().text() == report


def test_as_a_command(tmp_path):
    path = write_jsonl(tmp_path / "chats.jsonl", many_chats(10))
    arguments = [
        "data=sft", f"data.path={path}", f"data.tokenizer={save_tokenizer(tmp_path / 'tokenizer')}",
        f"data.cache_dir={tmp_path / 'cache'}", "seq_len=64",
    ]  # fmt: skip

    def run(*more):
        command = [sys.executable, str(REPOSITORY / "scripts" / "prepare_data.py"), *arguments, *more]
        environment = quiet_environment()
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    done = run("workers=2")
    assert done.returncode == 0 and "packing best_fit: " in done.stdout, done.stderr
    [folder] = (tmp_path / "cache").glob("*.arrow")
    shutil.rmtree(folder)
    path.write_text('{"messages": 1}\n')
    done = run("workers=1")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"error: messages must be a list; {path}, line 1 has a int"


@pytest.mark.parametrize("workers", ["0", "two", "-1"])
def test_workers_must_be_positive(workers):
    with pytest.raises(ValueError, match=f"workers must be a positive integer; got {workers}"):
        main(["data=stdlib", f"workers={workers}"])
