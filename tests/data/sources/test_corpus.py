"""Documents are read from every kind of file and are tokenised once."""

import json
import os
from functools import partial

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fa_train.data.sources.chats import ChatCorpus
from fa_train.data.sources.corpus import HFCorpus, StdlibCorpus, TextCorpus, WithValidation, is_held_out
from fa_train.data.tokens.encoding import TextEncoder
from fa_train.data.tokens.store import Documents, TokenizedCorpus, prepare
from fa_train.data.tokens.tokenizer import ByteTokenizer
from fa_train.private_names import replace_private


@pytest.fixture
def folder(tmp_path):
    """Writes eight documents, one of them empty, to files of five kinds."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.md").write_text("# two")
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in ("drei", "vier ü")) + "\n")
    pyarrow.parquet.write_table(pa.table({"text": ["five"], "other": [5]}), tmp_path / "d.parquet")
    (tmp_path / "e.csv").write_text('id,text\n1,"six, ""7""\n8"\n2,\n3,9\n')
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    return tmp_path


def texts(path, column="text"):
    return [text for _, text in TextCorpus(str(path), column).documents()]


def test_a_path_may_be_a_folder_a_glob_or_a_file(folder):
    assert texts(folder / "*") == ["one", "# two", "drei", "vier ü", "five", 'six, "7"\n8', "", "9"]
    assert texts(folder / "*.md") == ["# two"]
    assert texts(folder / "c.jsonl") == ["drei", "vier ü"]
    keys = [key for key, _ in TextCorpus(str(folder / "*"), "text").documents()]
    assert len(set(keys)) == 8


def test_a_folder_with_other_files_is_read_without_its_csv_files(folder):
    assert texts(folder) == ["one", "# two", "drei", "vier ü", "five"]
    for name in ("a.txt", "b.md", "c.jsonl", "d.parquet"):
        (folder / name).unlink()
    assert texts(folder) == ['six, "7"\n8', "", "9"]


@pytest.mark.parametrize(
    ("path", "column", "message"),
    [
        (
            "nothing",
            "text",
            "must be a file, folder or glob of .txt, .md, .jsonl, .csv, .parquet; .* does not exist",
        ),
        ("ignored.bin", "text", "must be a file, folder or glob of .*; got .*ignored.bin"),
        ("c.jsonl", "body", "data.text_column=body must be a column of .*, line 1; it has text"),
        ("e.csv", "body", "data.text_column=body must be a column of .*csv, row 1; it has id, text"),
        ("cut.csv", "text", r"as many values as its first row, which has 2; .*cut\.csv, line 2 has 3"),
        ("d.parquet", "body", "data.text_column=body must be a column of .*parquet; it has text, other"),
        ("d.parquet", "other", "data.text_column=other must hold text; .*, row 1 holds a int"),
        ("cut.jsonl", "text", "every line must be a JSON object; .*cut.jsonl, line 1 is not: "),
        ("list.jsonl", "text", "every line must be a JSON object; .*list.jsonl, line 1 is a list"),
        ("cut.parquet", "text", "cut.parquet must be a Parquet file; it cannot be read: "),
    ],
)
def test_bad_paths_columns_and_files_are_named(folder, path, column, message):
    (folder / "cut.jsonl").write_text('{"text": "one')
    (folder / "list.jsonl").write_text("[1]")
    (folder / "cut.csv").write_text("id,text\n1,2,3\n")
    (folder / "cut.parquet").write_bytes((folder / "d.parquet").read_bytes()[:-7])
    with pytest.raises(ValueError, match=message):
        texts(folder / path, column)


@pytest.mark.parametrize("columns", [{}, {"text": []}], ids=["no-columns", "no-rows"])
def test_a_saved_dataset_without_rows_is_refused(columns, tmp_path):
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=f"must have rows; {tmp_path} has a split without rows$"):
        HFCorpus(str(tmp_path), None, "train", "text").count()


def test_a_dataset_that_save_to_disk_has_written_is_read(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "other": [1, 2]})
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    corpus = HFCorpus(str(tmp_path / "saved"), None, "train", "text")
    assert list(corpus.documents()) == [("0", "one"), ("1", "two")] and corpus.count() == 2
    with pytest.raises(
        ValueError, match=r"data.path must be text files; .*saved is a dataset .* Use data=hf data.name="
    ):
        texts(tmp_path / "saved")


def test_a_file_is_no_dataset(folder):
    """`datasets` would search the hub for a dataset with the file's name."""
    file = next(folder.glob("*.txt"))
    with pytest.raises(
        ValueError, match=rf"^data.name must be .* or a folder; {file} is a file. Use data=text data.path"
    ):
        HFCorpus(str(file), None, "train", "text")


@pytest.mark.parametrize("split", ["train[2:]", "train[90%:]", "train[:0]"])
def test_a_part_of_a_saved_dataset_without_rows_is_refused(split, tmp_path):
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=r"must select rows; got train\[.*\], which selects none .*'train': 2"):
        HFCorpus(str(tmp_path), None, split, "text").count()
    assert list(HFCorpus(str(tmp_path), None, f"{split}+train[:1]", "text").documents()) == [("0", "one")]


def test_a_saved_dataset_with_other_rows_is_tokenised_anew(tmp_path):
    prints = []
    for name, texts_of_rows in [("a", ["one", "two"]), ("b", ["uno", "dos"]), ("c", ["one", "two"])]:
        rows = datasets.Dataset.from_dict({"text": texts_of_rows})
        # the library `datasets` hashes only the transforms, so datasets with different rows can have one fingerprint
        replace_private("datasets", rows, "_fingerprint", "same")
        rows.save_to_disk(tmp_path / name)
        corpora = (HFCorpus(str(tmp_path / name), None, split, "text") for split in ("train", "train[:1]"))
        prints.append([corpus.fingerprint() for corpus in corpora])
    assert prints[0] == prints[2] and len({*prints[0], *prints[1]}) == 4


def test_a_folder_with_an_edited_file_of_the_same_time_is_read_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows" / "train.jsonl"
    found = {}
    for text in ("one", "two"):
        path.write_text(json.dumps({"text": text}))
        os.utime(path, (1, 1))
        corpus = HFCorpus(str(tmp_path / "rows"), None, "train", "text")
        found[corpus.fingerprint()] = list(corpus.documents())
    assert list(found.values()) == [[("0", "one")], [("0", "two")]]


def test_the_folder_of_a_dataset_can_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text(json.dumps({"text": "one"}))
    datasets.Dataset.from_dict({"text": ["two"]}).save_to_disk(tmp_path / "saved")
    found = [list(HFCorpus(f"~/{name}", None, "train", "text").documents()) for name in ("rows", "saved")]
    assert found == [[("0", "one")], [("0", "two")]]


@pytest.mark.parametrize("kind", ["numpy", "pandas", "arrow", "torch"])
def test_the_format_of_a_saved_dataset_is_ignored(kind, tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "other": [1, 2]})
    rows.with_format(kind, columns=["other"]).save_to_disk(tmp_path)
    corpus = HFCorpus(str(tmp_path), None, "train", "text")
    assert list(corpus.documents()) == [("0", "one"), ("1", "two")]


def test_empty_documents_are_counted_and_get_no_tokens(tmp_path):
    rows = ["one", " ", None, "", *("two words" for _ in range(100))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    (tmp_path / "empty.txt").write_text("\n")
    path = prepare(TextCorpus(str(tmp_path), "text"), TextEncoder(ByteTokenizer()), tmp_path / "cache")
    lengths = [length for held_out in (True, False) for length in stored(path, held_out).lengths]
    assert sorted(lengths) == [0, 0, 0, 0, len("one") + 2, *[len("two words") + 2] * 100]


def test_an_empty_document_alone_is_not_held_out(tmp_path):
    """If only an empty document were held out, a validation would have no labels."""
    keys = (f"{number}.txt" for number in range(1000))
    empty = next(key for key in keys if is_held_out(key))
    (tmp_path / empty).write_text("")
    (tmp_path / next(key for key in keys if not is_held_out(key))).write_text("text " * 100)
    path = prepare(TextCorpus(str(tmp_path), "text"), TextEncoder(ByteTokenizer()), tmp_path / "cache")
    assert stored(path, held_out=True).lengths.sum() > 0


def stored(path, held_out):
    return Documents(path, held_out=held_out, vocab_size=ByteTokenizer.vocab_size)


def test_tokenised_once_and_anew_when_a_document_changes(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    corpus, encoder = TextCorpus(str(folder), "text"), TextEncoder(ByteTokenizer())
    path = prepare(corpus, encoder, cache)
    [shard] = path.glob("*.arrow")
    written = shard.stat().st_mtime_ns
    assert prepare(corpus, encoder, cache) == path and shard.stat().st_mtime_ns == written
    (folder / "a.txt").write_text("uno")
    assert prepare(corpus, encoder, cache) != path
    assert not list(cache.glob("unfinished-*"))


def test_documents_come_back_wrapped_and_split(folder, tmp_path):
    source = TokenizedCorpus(TextCorpus(str(folder), "text"), TextEncoder(ByteTokenizer()), str(tmp_path / "cache"))
    everything = [*source.documents(held_out=False), *source.documents(held_out=True)]
    decoded = {ByteTokenizer().decode(x.tolist()) for x in everything}
    assert {"one", "# two", "drei", "vier ü"} <= decoded
    first = source.documents(held_out=False)[0]
    assert first.tolist() == [256, *b"one", 257] and first.dtype == np.int32


def test_one_document_validates_on_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 998)
    path = prepare(TextCorpus(str(tmp_path / "a.txt"), "text"), TextEncoder(ByteTokenizer()), tmp_path / "cache")
    train, val = (Documents(path, held_out=held_out, vocab_size=259) for held_out in (False, True))
    assert len(train) == len(val) == 1
    assert train.lengths.tolist() == [980] and val.lengths.tolist() == [20]
    assert val[0][-1] == 257 and train[0][0] == 256
    assert val.is_tail and not train.is_tail


@pytest.mark.parametrize(("n_tokens", "held_out"), [(99, 0), (100, 2)])
def test_one_token_is_not_held_out_because_it_has_no_label(n_tokens, held_out, tmp_path):
    (tmp_path / "a.txt").write_text("x" * (n_tokens - 2))  # the tokenizer adds bos and eos
    path = prepare(TextCorpus(str(tmp_path / "a.txt"), "text"), TextEncoder(ByteTokenizer()), tmp_path / "cache")
    train, val = (Documents(path, held_out=held_out, vocab_size=259) for held_out in (False, True))
    assert val.lengths.sum() == held_out and train.lengths.sum() == n_tokens - held_out
    assert len(val) == val.is_tail == bool(held_out)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        pytest.param("\n", "must have a document; it has none", id="no-row"),
        pytest.param('{"text": ""}\n' * 3, "must have a document with text; all 3 documents are empty", id="no-text"),
    ],
)
def test_nothing_to_read_is_an_error(lines, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'a.jsonl'} {message}$"):
        prepare(TextCorpus(str(tmp_path / "a.jsonl"), "text"), TextEncoder(ByteTokenizer()), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


def test_the_standard_library_is_a_corpus_with_held_out_files():
    keys = [path.name for path in StdlibCorpus().paths]
    assert len(keys) > 400 and "argparse.py" in keys
    assert 0 < sum(map(is_held_out, map(str, range(5000)))) < 250
    assert is_held_out("x") == is_held_out("x")


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    [ids] = tokenizer.encode_batch(["naïve ∑"])
    assert tokenizer.decode([256, *ids.tolist(), 257]) == "naïve ∑"
    assert max(tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) < tokenizer.vocab_size


def test_a_validation_corpus_is_held_out_and_nothing_else(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("validation")
    for number in range(100):  # without a validation corpus, about two of these 100 documents would be held out
        (folder / f"{number}.txt").write_text(str(number))
    (other / "a.txt").write_text("held out")
    read = partial(TextCorpus, text_column="text")
    corpus = WithValidation.read(read, str(folder), str(other))
    held_out = {text: is_held_out(key) for key, text in corpus.documents()}
    assert held_out == {**dict.fromkeys(texts(folder), False), "held out": True}
    assert corpus.count() is None and WithValidation.read(read, str(other), str(other)).count() == 2
    before = corpus.fingerprint()
    (other / "a.txt").write_text("held back")
    changed, swapped = (WithValidation.read(read, *map(str, paths)) for paths in ((folder, other), (other, folder)))
    assert len({before, changed.fingerprint(), swapped.fingerprint()}) == 3
    assert isinstance(WithValidation.read(read, str(folder), None), TextCorpus)
    with pytest.raises(ValueError, match=r"^data\.val_path=nowhere\.txt: data\.path must be a file"):
        WithValidation.read(read, str(folder), "nowhere.txt")


@pytest.mark.parametrize("read", [partial(TextCorpus, text_column="prompt"), ChatCorpus], ids=["texts", "chats"])
def test_files_for_training_and_validation_cause_a_warning(read, tmp_path):
    (tmp_path / "all").mkdir()
    for name in ("all/a.jsonl", "all/b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "2?", "completion": name}) + "\n")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "all/b.jsonl")

    def warning(val_path):
        return WithValidation.read(read, str(tmp_path / "all"), str(tmp_path / val_path)).overlap_warning

    assert warning("c.jsonl") is None
    for path in ("all/b.jsonl", "link.jsonl"):
        found = warning(path)
        assert f"1 of 1 files for validation are also read for training, such as {tmp_path}/all/b.jsonl" in found
    assert "2 of 3 files" in warning("**/*.jsonl")
