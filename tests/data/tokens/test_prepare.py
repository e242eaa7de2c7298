"""The shards of the token cache do not depend on the number of processes."""

import errno
import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from filelock import Timeout

from fa_train.data.packing.best_fit import load_plan
from fa_train.data.sources.chats import ChatCorpus
from fa_train.data.sources.corpus import TextCorpus
from fa_train.data.tokens import prepare as module
from fa_train.data.tokens.encoding import TextEncoder
from fa_train.data.tokens.sft import ChatEncoder
from fa_train.data.tokens.store import Documents, TokenizedCorpus, prepare
from fa_train.data.tokens.tokenizer import ByteTokenizer, HFTokenizer
from tests.data.support.chats import CHATML, many_chats, save_tokenizer, write_jsonl
from tests.support.marks import slow
from tests.support.processes import CONTEXT, start_server


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD", 3)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(20)))
    return TextCorpus(str(tmp_path / "texts.jsonl"), "text")


@pytest.fixture
def forked_workers(monkeypatch):
    """Forks workers from a server that has done the imports, because an interpreter takes seconds to start."""
    start_server()
    monkeypatch.setattr(module.multiprocessing, "get_context", lambda method: CONTEXT)


def read(path, *, held_out):
    return Documents(path, held_out=held_out, vocab_size=ByteTokenizer.vocab_size)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_two_workers_write_the_bytes_of_one(documents, encoder, folder, shards):
    one, two = (prepare(documents, encoder, folder / f"cache-{n}", workers=n) for n in (1, 2))
    assert one.name == two.name and contents(one) == contents(two)
    assert list(contents(one)) == [*(f"{i:06}.arrow" for i in range(shards)), "shards.json"]
    assert {path.suffix for path in (folder / "cache-2").iterdir()} == {".arrow", ".lock"}


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same_bytes_of_texts(corpus, tmp_path, forked_workers):
    assert_two_workers_write_the_bytes_of_one(corpus, TextEncoder(ByteTokenizer()), tmp_path, shards=7)


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same_bytes_of_chats(tmp_path, monkeypatch):
    """The workers are spawned and not forked, because the tokenizer has threads."""
    monkeypatch.setattr(module, "SHARD", 3)
    chats = ChatCorpus(str(write_jsonl(tmp_path / "chats.jsonl", many_chats(8))))
    encoder = ChatEncoder(HFTokenizer(save_tokenizer(tmp_path / "tokenizer")))
    assert_two_workers_write_the_bytes_of_one(chats, encoder, tmp_path, shards=3)


class Killed(BaseException):
    """Raised where a real process would be killed."""


class Counting(TextEncoder):
    """Raises Killed at a given document, and records which documents it has encoded."""

    def __init__(self, die_at=None):
        super().__init__(ByteTokenizer())
        self.seen, self.die_at = [], die_at

    def encode_batch(self, documents):
        if self.die_at in documents:
            raise Killed
        self.seen += documents
        return super().encode_batch(documents)


def test_a_killed_process_loses_at_most_a_shard(corpus, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(Killed):
        prepare(corpus, Counting(die_at="line 13"), cache)
    assert not list(cache.glob("*.arrow")), "an incomplete cache is not a cache"
    second = Counting()
    path = prepare(corpus, second, cache)
    assert second.seen == [f"line {i}" for i in range(12, 20)]
    assert contents(path) == contents(prepare(corpus, Counting(), tmp_path / "whole"))
    assert not list(cache.glob("unfinished-*"))


def test_rejected_chats_are_counted_after_an_interruption(tmp_path, monkeypatch):
    """The template rejects a whole shard, and the process is killed after this shard."""
    monkeypatch.setattr(module, "SHARD", 3)
    chats = ChatCorpus(str(write_jsonl(tmp_path / "chats.jsonl", many_chats(8))), skip_invalid=True)
    refusing = "{% if messages[0].content[0] in '012567' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    encoder = ChatEncoder(HFTokenizer(save_tokenizer(tmp_path / "tokenizer", refusing)), skip_rejected=True)
    write, killed = module._write, iter([False, True])

    def write_until_killed(*arguments):
        if next(killed):
            raise Killed
        return write(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, "_write", write_until_killed)
        prepare(chats, encoder, tmp_path / "cache")
    folder = prepare(chats, encoder, tmp_path / "cache")
    documents = [Documents(folder, held_out=held_out, vocab_size=400) for held_out in (False, True)]
    assert [(len(part), part.rows_skipped) for part in documents] == [(1, 6), (1, 6)]
    texts = [encoder.tokenizer.hf.decode(part[0]) for part in documents]
    assert ["3 + 3?" in texts[0], "4 + 4?" in texts[1]] == [True, True]


def test_a_full_disk_is_named_and_half_a_cache_never_taken_for_one(corpus, tmp_path, monkeypatch):
    cache, encoder = tmp_path / "cache", Counting()
    real, opened = pa.OSFile, []

    def sink(path, mode):
        opened.append(path)
        return real("/dev/full", mode) if len(opened) == 3 else real(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(pa, "OSFile", sink)
        with pytest.raises(ValueError, match=rf"the disk of the cache folder {cache} is full"):
            prepare(corpus, encoder, cache)
    assert not list(cache.glob("*.arrow"))
    assert encoder.seen[-1] == "line 8", "it stopped at the third shard"
    path = prepare(corpus, Counting(), cache)
    assert len(read(path, held_out=False)) + len(read(path, held_out=True)) >= 20
    assert contents(path) == contents(prepare(corpus, Counting(), tmp_path / "whole"))


def test_a_full_disk_is_named_by_the_plan_too(tmp_path, monkeypatch):
    def full(path, plan):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ValueError, match="the disk of the cache folder"):
        load_plan(np.array([3, 9]), 8, 8, "split", tmp_path)
    assert not list(tmp_path.iterdir())


def test_long_documents_end_a_shard_early(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_CHARACTERS", 13)  # "line 0" has 6 characters, and "line 10" has 7
    path = prepare(corpus, Counting(), tmp_path / "cache")
    sizes = [len(pa.ipc.open_file(file).read_all()) for file in sorted(path.glob("*.arrow"))]
    assert sizes == [3, 3, 3, 2, 2, 2, 2, 2, 1]


def test_long_documents_end_a_call_of_the_tokenizer_early(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD", 20)
    monkeypatch.setattr(module, "BATCH", 4)
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 19)  # "line 0" has 6 characters, and "line 10" has 7
    [shard] = prepare(corpus, Counting(), tmp_path / "cache").glob("*.arrow")
    chunks = pa.ipc.open_file(shard).read_all()["tokens"].chunks
    assert [len(chunk) for chunk in chunks] == [4, 4, 3, 3, 3, 3]


def cut(shard):
    shard.write_bytes(shard.read_bytes()[:-20])


def garble_offsets(shard):
    table = pa.ipc.open_file(shard).read_all()
    overwrite(shard, table["tokens"].chunks[0].offsets.to_numpy())


def garble_tokens(shard):
    table = pa.ipc.open_file(shard).read_all()
    overwrite(shard, table["tokens"].chunks[0].values.to_numpy())


def overwrite(shard, values):
    """Overwrites the bytes of an array in a file with 0xff."""
    content, part = shard.read_bytes(), values.tobytes()
    assert content.count(part) == 1
    shard.write_bytes(content.replace(part, b"\xff" * len(part)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"it has \d+ of \d+ bytes"),
        (Path.unlink, r"it has 0 of \d+ bytes"),
        (garble_offsets, "it cannot be read"),
        (garble_tokens, "token -1 is outside the vocabulary, 0 to 258"),
    ],
)
def test_a_damaged_shard_is_named(corpus, tmp_path, damage, message):
    path = prepare(corpus, Counting(), tmp_path / "cache")
    damage(path / "000003.arrow")
    with pytest.raises(
        ValueError, match=f"{path / '000003.arrow'} is damaged: {message}.* Delete {path}, and the next run writes it"
    ):
        for held_out in (False, True):
            list(read(path, held_out=held_out))


def test_shards_without_their_list_are_no_cache(corpus, tmp_path):
    path = prepare(corpus, Counting(), tmp_path / "cache")
    (path / "shards.json").unlink()
    with pytest.raises(ValueError, match=f"{path / 'shards.json'} is damaged: .* Delete {path}, and the next run"):
        read(path, held_out=False)


def test_a_damaged_plan_is_named(tmp_path):
    load_plan(np.array([3, 9]), 8, 8, "split", tmp_path)
    [plan] = tmp_path.iterdir()
    plan.write_bytes(plan.read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"{plan} is damaged: .* Delete it, and the next run writes it again"):
        load_plan(np.array([3, 9]), 8, 8, "split", tmp_path)


def test_a_run_hashes_its_corpus_once(corpus, tmp_path, monkeypatch):
    prepare(corpus, Counting(), tmp_path)
    prints = iter([corpus.fingerprint()])
    monkeypatch.setattr(corpus, "fingerprint", prints.__next__)
    tokenized = TokenizedCorpus(corpus, Counting(), str(tmp_path))
    assert tokenized.prepare() == tokenized.prepare(workers=2)
    assert sum(len(tokenized.documents(held_out=held_out)) for held_out in (False, True)) >= 20


def test_a_plan_for_a_read_only_cache_stays_in_memory(tmp_path, monkeypatch):
    written = load_plan(np.array([3, 9]), 8, 8, "split", tmp_path / "writable")
    monkeypatch.setattr("os.access", lambda folder, mode: False)
    assert (load_plan(np.array([3, 9]), 8, 8, "split", tmp_path) == written).all()
    assert [path.name for path in tmp_path.iterdir()] == ["writable"]


@pytest.mark.parametrize("reader", ["json.loads", "pyarrow.memory_map", "numpy.load"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(corpus, tmp_path, monkeypatch, reader):
    """The error about a damaged file recommends to delete the tokens, which another user may have prepared."""

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    path = prepare(corpus, Counting(), tmp_path / "cache")
    load_plan(np.array([3, 9]), 8, 8, "split", tmp_path / "cache")
    monkeypatch.setattr(reader, refuse)
    with pytest.raises(PermissionError):
        read(path, held_out=False)
        load_plan(np.array([3, 9]), 8, 8, "split", tmp_path / "cache")


@pytest.mark.parametrize("workers", [1, *slow(2)])
def test_a_bad_document_leaves_nothing_behind(tmp_path, monkeypatch, workers, request):
    if workers > 1:  # one worker needs no fork server
        request.getfixturevalue("forked_workers")
    monkeypatch.setattr(module, "SHARD", 3)
    bad = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}
    corpus = ChatCorpus(str(write_jsonl(tmp_path / "chats.jsonl", [*many_chats(10), bad])))
    encoder = ChatEncoder(HFTokenizer(save_tokenizer(tmp_path / "tokenizer")))
    with pytest.raises(ValueError, match=r"chats.jsonl, line 11, message 1 has none"):
        prepare(corpus, encoder, tmp_path / "cache", workers)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}


class Held:
    """A fake lock that another process seems to hold. acquire() succeeds at once, and acquire(blocking=False) fails."""

    def __init__(self, file):
        self.file = str(file)

    def acquire(self, blocking=True):
        if not blocking:
            raise Timeout(self.file)
        return nullcontext()


def test_a_process_that_waits_for_another_says_so_unless_it_is_a_later_rank(corpus, tmp_path, monkeypatch, capsys):
    prepare(corpus, Counting(), tmp_path / "free")
    assert not capsys.readouterr().out.strip()
    monkeypatch.setattr(module, "FileLock", Held)
    prepare(corpus, Counting(), tmp_path / "held")
    assert capsys.readouterr().out.strip() == "waiting for another process, which tokenises the same documents"
    monkeypatch.setenv("LOCAL_RANK", "1")
    prepare(corpus, Counting(), tmp_path / "held by another rank")
    assert not capsys.readouterr().out.strip()


class Editing(TextEncoder):
    """Changes a file when the first documents are encoded."""

    def __init__(self, file):
        super().__init__(ByteTokenizer())
        self.file = file

    def encode_batch(self, documents):
        self.file.write_text(self.file.read_text().replace("line 19", "LINE 19"))
        return super().encode_batch(documents)


def test_a_corpus_that_changes_while_it_is_tokenised_leaves_nothing_behind(corpus, tmp_path):
    file = tmp_path / "texts.jsonl"
    with pytest.raises(ValueError, match=f"{file} must not change while it is tokenised; it has changed"):
        prepare(corpus, Editing(file), tmp_path / "cache")
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}


class KilledOnce(TextEncoder):
    """Kills its worker process at a given document, unless the file `mark` exists."""

    def __init__(self, mark):
        super().__init__(ByteTokenizer())
        self.mark = mark

    def encode_batch(self, documents):
        if "line 13" in documents and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(documents)


@pytest.mark.slow
def test_a_killed_worker_is_one_clear_error_and_finished_shards_are_kept(corpus, tmp_path, forked_workers):
    cache, encoder = tmp_path / "cache", KilledOnce(tmp_path / "mark")
    with pytest.raises(ValueError, match=r"one of 2 was killed, .*\. Use fewer workers\. Finished shards are kept"):
        prepare(corpus, encoder, cache, workers=2)
    [unfinished] = cache.glob("unfinished-*")
    assert list(unfinished.glob("*.arrow"))
    assert contents(prepare(corpus, encoder, cache)) == contents(prepare(corpus, Counting(), tmp_path / "whole"))


class Interrupted(TextEncoder):
    """In the second shard, the worker process gets Ctrl-C and raises an error. Any other shard takes ten minutes."""

    def encode_batch(self, documents):
        if "line 3" not in documents:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("line 3 is invalid")


@pytest.mark.slow
def test_workers_ignore_ctrl_c_and_end_at_once_after_an_error(corpus, tmp_path):
    with pytest.raises(ValueError, match="line 3 is invalid"):
        prepare(corpus, Interrupted(ByteTokenizer()), tmp_path / "cache", workers=2)


class Invalid(TextEncoder):
    """In the third shard, a document is invalid."""

    def encode_batch(self, documents):
        if documents[0].startswith("6"):
            raise ValueError("document 6 is invalid")
        return super().encode_batch(documents)


@pytest.mark.slow
def test_an_error_in_old_python_ends_although_a_shard_waits_in_the_pipe(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "sys", SimpleNamespace(version_info=(3, 11, 2)))
    monkeypatch.setattr(module, "SHARD", 3)
    write_jsonl(tmp_path / "long.jsonl", [{"text": f"{i}" * 200_000} for i in range(10)] * 3)
    with pytest.raises(ValueError, match="document 6 is invalid"):
        prepare(TextCorpus(str(tmp_path / "long.jsonl"), "text"), Invalid(ByteTokenizer()), tmp_path / "c", workers=2)


def test_tokens_outside_the_vocabulary_are_named(corpus, tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.eos_id = 259
    with pytest.raises(
        ValueError, match=r"tokens must be from 0 to 258, .* vocabulary; document texts.jsonl:1 has 259"
    ):
        prepare(corpus, TextEncoder(tokenizer), tmp_path / "cache")


def test_a_folder_that_cannot_be_made_or_written_is_named(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"data.cache_dir must be a folder that can be created; got {cache}: "):
            prepare(corpus, Counting(), cache)
    monkeypatch.setattr("fa_train.data.tokens.cache.os.access", lambda folder, mode: False)
    with pytest.raises(ValueError, match=f"data.cache_dir must be a writable folder; got {tmp_path}"):
        prepare(corpus, Counting(), tmp_path)
