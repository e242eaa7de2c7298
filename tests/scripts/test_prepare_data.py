"""scripts/prepare_data.py writes the cache that train.py uses with the same overrides."""

import re
import shutil

import pytest
from hydra.utils import instantiate

from fa_train.data.tokens import store
from scripts.prepare_data import main
from tests.data.support.chats import many_chats, save_tokenizer, write_jsonl
from tests.support import processes
from tests.support.training import REPOSITORY, composed, quiet_environment, write_corpus


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


@pytest.mark.slow
def test_train_finds_it_done(tmp_path, overrides, monkeypatch):
    report = main([*overrides, "workers=1"])
    assert "web: 75.00% of rows" in report and "chats: 25.00% of rows" in report and "labels " in report
    of_chats = report.partition("chats: ")[2]
    [packed] = re.findall(r" documents (\d+): ", of_chats)
    [held_out] = re.findall(r"held out for validation: (\d+) documents, \d+ tokens", of_chats)
    assert int(packed) + int(held_out) == 10, "none is missing"

    def again(*arguments):
        raise AssertionError("tokenised anew")

    monkeypatch.setattr(store, "write_shards", again)
    with composed(tmp_path, *overrides) as cfg:
        assert instantiate(cfg.data).packing_report().text() == report


@pytest.mark.slow
def test_the_command_prepares_data_or_prints_its_help(tmp_path):
    path = write_jsonl(tmp_path / "chats.jsonl", many_chats(10))
    arguments = [
        "data=sft", f"data.path={path}", f"data.tokenizer={save_tokenizer(tmp_path / 'tokenizer')}",
        f"data.cache_dir={tmp_path / 'cache'}", "seq_len=64",
    ]  # fmt: skip

    def run(*more):
        script = REPOSITORY / "scripts" / "prepare_data.py"
        return processes.finish(script, [*arguments, *more], tmp_path, quiet_environment())

    done = run("--help")
    assert done.returncode == 0 and "workers=8" in done.stdout and not (tmp_path / "cache").exists()
    done = run("workers=2")
    assert done.returncode == 0 and "packing best_fit: " in done.stdout, done.stderr
    [folder] = (tmp_path / "cache").glob("*.arrow")
    shutil.rmtree(folder)
    path.write_text('{"messages": 1}\n')
    done = run("workers=1")
    assert done.returncode == 1
    expected = f"error: messages must be a list; {path}, line 1 has a int. data.skip_invalid=true skips rows that are"
    expected += " not valid chats; with data=mix, write data.sources.<name>.skip_invalid=true"
    assert done.stderr.strip().splitlines()[-1] == expected


@pytest.mark.parametrize("workers", ["0", "two", "-1"])
def test_workers_must_be_positive(workers):
    with pytest.raises(ValueError, match=f"workers must be a positive integer; got {workers}"):
        main(["data=stdlib", f"workers={workers}"])
