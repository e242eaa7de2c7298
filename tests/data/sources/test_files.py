"""Files are found through links, and a file that cannot be read is named."""

import errno
import json
import logging
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fa_train.data.sources import files
from fa_train.data.sources.chats import ChatCorpus
from fa_train.data.sources.corpus import HFCorpus, TextCorpus, is_held_out
from tests.data.support.chats import PAIR, write_jsonl


def keys(path):
    return [key for key, _ in TextCorpus(str(path), "text").documents()]


def texts(path):
    return [text for _, text in TextCorpus(str(path), "text").documents()]


@pytest.fixture
def linked(tmp_path):
    """Returns a folder with three links: to a folder elsewhere, to the returned folder and to its subfolder b."""
    folder, disk = tmp_path / "data", tmp_path / "disk"
    for name in (folder / "b" / "deep", disk):
        name.mkdir(parents=True)
    for name in (folder / "a.txt", folder / "b" / "deep" / "b.txt", disk / "c.txt"):
        name.write_text(name.stem)
    (folder / "disk").symlink_to(disk)
    (folder / "b" / "loop").symlink_to(folder)
    (folder / "a-link").symlink_to(folder / "b")
    return folder


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "**"])
def test_links_to_folders_are_followed_and_each_folder_is_read_once(linked, pattern):
    assert keys(linked / pattern) == ["a.txt", "b/deep/b.txt", "disk/c.txt"]


def test_a_glob_matches_each_part_of_a_path(linked):
    assert keys(linked / "*" / "*.txt") == ["disk/c.txt"]
    assert keys(linked / "b" / "**" / "[ab].txt") == ["deep/b.txt", "loop/a.txt"]
    assert keys(linked / "?" / "deep" / "*") == ["b/deep/b.txt"]
    with pytest.raises(ValueError, match=r"data.path must be .* contains no such file"):
        keys(linked / "*" / "*.md")
    with pytest.raises(ValueError, match=r"data.path must be .*/nowhere/\*.txt does not exist"):
        keys(linked / "nowhere" / "*.txt")
    os.mkfifo(linked / "pipe.txt")
    with pytest.raises(ValueError, match=r"/pipe.txt is neither a file nor a folder"):
        keys(linked / "pipe.txt")


@pytest.mark.parametrize("name", ["lost.txt", "lost"])
def test_a_link_to_nothing_is_named(linked, name):
    (linked / name).symlink_to("nowhere")
    with pytest.raises(ValueError, match=f"a link must lead to a file or folder; {linked / name} leads to nowhere, "):
        keys(linked)


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "b/*/*.txt"])
def test_a_folder_that_cannot_be_read_is_named(linked, monkeypatch, pattern):
    deny(monkeypatch, os, "scandir", linked / "b" / "deep")
    deny(monkeypatch, os, "listdir", linked / "b" / "deep")
    with pytest.raises(ValueError, match=f"must be readable; {linked}/b/deep is not: Permission denied"):
        keys(linked / pattern)


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/*.txt"])
def test_lost_and_found_is_skipped(linked, monkeypatch, pattern):
    before, recovered = keys(linked / pattern), linked / "lost+found"
    recovered.mkdir()
    (recovered / "r.txt").write_text("recovered")
    assert keys(recovered) == ["r.txt"]
    deny(monkeypatch, os, "scandir", recovered)
    deny(monkeypatch, os, "listdir", recovered)
    assert keys(linked / pattern) == before


@pytest.fixture
def cluttered(tmp_path):
    """Returns a folder with a.jsonl, hidden copies of it, links to it, and files with other suffixes or no suffix."""
    folder = tmp_path / "cluttered"
    for name in (".git", ".ipynb_checkpoints", "b"):
        (folder / name).mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", [PAIR])
    for copy in (".git/x.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", "._a.jsonl", "b/.c.jsonl"):
        write_jsonl(folder / copy, [PAIR])
    for name in ("c.jsonl.gz", "d.pdf", "e.pdf", "v1.2.zip", "README"):
        (folder / name).write_bytes(b"\xff")
    for name in ("0-link.jsonl", "b/link.jsonl"):
        (folder / name).symlink_to(folder / "a.jsonl")
    return folder


def chat_keys(path):
    return [key for key, _ in ChatCorpus(str(path)).documents()]


def test_hidden_files_and_links_add_nothing_to_a_folder(cluttered, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    write_jsonl(plain / "a.jsonl", [PAIR])
    corpus = ChatCorpus(str(cluttered))
    assert chat_keys(cluttered) == ["a.jsonl:1"] and corpus.fingerprint() == ChatCorpus(str(plain)).fingerprint()
    skipped = "1 .jsonl.gz, 4 names that begin with a dot, 2 .pdf, 2 links to files that are already read, 1 .zip, "
    assert corpus.file_counts.text() == f"1 read; skipped {skipped}1 without a suffix"
    (cluttered / "f.zst").touch()
    assert ChatCorpus(str(cluttered)).file_counts.text() == f"1 read; skipped {skipped}1 .zst, 1 others"
    assert ChatCorpus(str(plain)).file_counts.text() == "1 read"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        pytest.param("*.jsonl", ["a.jsonl:1"], id="glob"),
        pytest.param("**/*.jsonl", ["a.jsonl:1"], id="all-folders"),
        pytest.param("*/*.jsonl", ["b/link.jsonl:1"], id="link-alone"),
        pytest.param(".*.jsonl", ["._a.jsonl:1"], id="names-hidden-files"),
        pytest.param("**/.*.jsonl", ["._a.jsonl:1", "b/.c.jsonl:1"], id="names-hidden-files-of-all-folders"),
        pytest.param(".git/*.jsonl", ["x.jsonl:1"], id="names-hidden-folder"),
        pytest.param(".*/*.jsonl", [".git/x.jsonl:1", ".ipynb_checkpoints/a-checkpoint.jsonl:1"], id="hidden-folders"),
        pytest.param(".git", ["x.jsonl:1"], id="hidden-folder"),
        pytest.param("._a.jsonl", ["._a.jsonl:1"], id="hidden-file"),
    ],
)
def test_hidden_files_are_read_if_the_path_names_them(cluttered, pattern, expected):
    assert chat_keys(cluttered / pattern) == expected


def test_a_folder_with_only_compressed_files_is_refused(tmp_path):
    (tmp_path / "c.jsonl.gz").touch()
    with pytest.raises(ValueError, match=r"contains no such file \(0 read; skipped 1 .jsonl.gz\)$"):
        chat_keys(tmp_path)


def test_suffixes_may_be_in_upper_case(tmp_path):
    table = pa.table({"prompt": [PAIR["prompt"]], "completion": [PAIR["completion"]]})
    pq.write_table(table, tmp_path / "A.PARQUET")
    write_jsonl(tmp_path / "B.JSONL", [PAIR])
    (tmp_path / "C.Json").write_text(json.dumps([PAIR]))
    assert chat_keys(tmp_path) == ["A.PARQUET:1", "B.JSONL:1", "C.Json:1"]
    assert chat_keys(tmp_path / "B.JSONL") == ["B.JSONL:1"]
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "D.TXT").write_text("four")
    (tmp_path / "E.CSV").write_text("text\nfive\n")
    assert texts(tmp_path) == ["four"] and texts(tmp_path / "E.CSV") == ["five"]
    assert TextCorpus(str(tmp_path), "text").file_counts.text() == "1 read; skipped 1 .csv"


def test_a_file_that_cannot_be_read_is_named(linked, monkeypatch):
    deny(monkeypatch, Path, "open", linked / "a.txt")
    for read in (lambda corpus: corpus.fingerprint(), lambda corpus: list(corpus.documents())):
        with pytest.raises(ValueError, match=f"must be readable; {linked}/a.txt is not: Permission denied"):
            read(TextCorpus(str(linked), "text"))


@pytest.mark.parametrize("read", [ChatCorpus, lambda path: TextCorpus(path, "text")], ids=["chats", "texts"])
def test_a_path_that_cannot_be_looked_up_is_named(read):
    """A path below a folder without permission fails at the same place as a name that is too long."""
    name = "a" * 300
    with pytest.raises(ValueError, match=rf"files and folders must be readable; {name} is not: File name too long"):
        read(name)


def deny(monkeypatch, owner, name, denied):
    """Makes a function fail for one path. Changing permissions would not help, because root can read all files."""
    real = getattr(owner, name)

    def denying(path, *args, **options):
        if str(path) == str(denied):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(owner, name, denying)


@pytest.mark.parametrize("path", ["", " "])
def test_an_empty_path_is_not_the_current_directory(tmp_path, monkeypatch, path):
    (tmp_path / "a.txt").write_text("one")
    for name in ("dataset_info.json", "state.json"):
        write_jsonl(tmp_path / name, [PAIR])
    monkeypatch.chdir(tmp_path)
    for read in (lambda: TextCorpus(path, "text"), lambda: ChatCorpus(path)):
        with pytest.raises(ValueError, match=r"data.path must be a file, folder or glob of .*; got an empty text"):
            read()
    with pytest.raises(ValueError, match=r"data.name must be a dataset .* or a folder; got an empty text"):
        HFCorpus(path, None, "train", "text")


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        pytest.param("a.txt", "naïve\n".encode("latin1"), "a.txt, line 1 has the byte 0xef", id="latin1.txt"),
        pytest.param("a.md", b"one\ntwo\n\xff", "a.md, line 3 has the byte 0xff", id="one-bad-byte.md"),
        pytest.param("a.txt", "one".encode("utf-16"), "a.txt, line 1 has the byte 0xff", id="utf16.txt"),
        pytest.param("a.txt", b"\x1f\x8b\x08\0", "a.txt, line 1 has the byte 0x8b", id="gzip.txt"),
        pytest.param("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "a.jsonl, line 2 has the byte 0xe9", id="jsonl"),
        pytest.param("a.csv", b"id,text\n1,a\n2,\xe9\n", "a.csv, line 3 has the byte 0xe9", id="csv"),
        pytest.param("a.csv", b'id,text\n1,"a\nb\xe9"\n', "a.csv, line 3 has the byte 0xe9", id="in-lines-of-a-value"),
        pytest.param("a.csv", b'text\na"\xe9"\n', "a.csv, line 2 has the byte 0xe9", id="next-to-a-quote"),
        pytest.param("a.csv", b"t\xe9xt\na\n", "a.csv, line 1 has the byte 0xe9", id="names-of-csv"),
        pytest.param("a.csv", "text\na\n".encode("utf-16"), "a.csv, line 1 has the byte 0xff", id="utf16.csv"),
    ],
)
def test_text_that_is_not_utf8_is_named(tmp_path, name, content, where):
    (tmp_path / name).write_bytes(content)
    encoding = "utf-16" if "0xff" in where else "latin1"
    with pytest.raises(ValueError, match=rf"a text file must be UTF-8; .*{where}\. .* `iconv -f {encoding} -t utf-8`"):
        texts(tmp_path / name)


@pytest.mark.parametrize(("row", "got"), [("1", 1), ("1,a,b", 3)])
def test_a_row_of_csv_has_a_value_for_each_column(tmp_path, row, got):
    path = tmp_path / "a.csv"
    path.write_text(f'id,text\n0,"a\nb"\n\n{row}\n')
    with pytest.raises(ValueError, match=rf"as many values as its first row, which has 2; .*{path}, line 5 has {got}$"):
        texts(path)


def test_a_value_of_csv_is_of_limited_size(tmp_path, monkeypatch):
    """A quote without an end would otherwise read the rest of a large file as one value."""
    monkeypatch.setattr(files, "CSV_VALUE", 10)
    (tmp_path / "a.csv").write_text('text\n"' + "one\n" * 10)
    with pytest.raises(ValueError, match=r"up to 10 characters, .*a.csv, line 2 cannot be read: field larger"):
        texts(tmp_path / "a.csv")


def test_line_ends_in_values_of_csv_are_kept(tmp_path):
    path, value = tmp_path / "a.csv", "one\r\ntwo\rthree\n"
    for end in ("\r\n", "\n", "\r"):
        path.write_bytes(f'text{end}"{value}"{end}{end}b{end}'.encode())
        assert texts(path) == [value, "b"]


def test_a_csv_file_without_rows_is_empty(tmp_path):
    for content in ("", "\n", "text\n"):
        (tmp_path / "a.csv").write_text(content)
        assert texts(tmp_path / "a.csv") == []


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in {"a.txt": "one\r\n", "b.md": "two", "c.jsonl": '{"text": "three"}'}.items():
        (tmp_path / name).write_text(content, encoding="utf-8-sig", newline="")
    (tmp_path / "d.csv").write_text('"text"\nfour\n', encoding="utf-8-sig")
    assert texts(tmp_path / "*") == ["one\n", "two", "three", "four"]


def test_chats_that_are_not_utf8_are_invalid_rows(tmp_path):
    path, row = tmp_path / "a.jsonl", json.dumps(PAIR).encode()
    path.write_bytes(b"\n".join([row, row.replace(b"is", b"\xe9"), row]))
    corpus = ChatCorpus(str(path), skip_invalid=True)
    assert [key for key, _ in corpus.documents()] == ["a.jsonl:1", "a.jsonl:3"] and corpus.n_skipped == 1
    (tmp_path / "b.json").write_bytes(b'[{"prompt": "\xe9"}]')
    with pytest.raises(ValueError, match=r"must be UTF-8; .*b.json, line 1 has the byte 0xe9"):
        list(ChatCorpus(str(tmp_path / "b.json")).documents())


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param('id,text\n1,"abc\n2,foo\n3,bar\n', 2, id="no-other-quote"),
        pytest.param('id,text\n1,foo\n2,"bar', 3, id="last-row"),
        pytest.param('text,id\r\na,1\r\n"abc,2\r\n', 3, id="first-column"),
        pytest.param('id,text\n1,"abc\n2,"foo"\n', 2, id="closed-by-the-next-quote"),
        pytest.param('id,text\n1,"a \\"b\\" c"\n', 2, id="backslash"),
        pytest.param('id,text\n1,"a"""\n2,"""\n', 3, id="escaped-quotes"),
        pytest.param('id,text\n1,"a\nb"\n2,"a" \n', 4, id="space-after-the-quote"),
        pytest.param('\ufeff"id,text\n1,a\n', 1, id="byte-order-mark"),
    ],
)
def test_a_quote_without_an_end_is_named(tmp_path, content, line):
    path = tmp_path / "a.csv"
    path.write_text(content, newline="")
    with pytest.raises(ValueError, match=f"begins with a quote must end with a quote .*{path}, line {line} cannot"):
        texts(path)


def test_columns_of_csv_have_different_names(tmp_path):
    path = tmp_path / "twice.csv"
    path.write_text("text,text\na,b\n")
    with pytest.raises(ValueError, match="must have different names; got text more than once"):
        texts(path)


def test_quotes_are_read_as_csv_has_them(tmp_path):
    (tmp_path / "a.csv").write_text(
        'id,"text"\n1,a "b" c\n2,"5"" disk,\n"\n"3",""\n4,""""\n5, "a"\n6,"end"', newline=""
    )
    assert texts(tmp_path / "a.csv") == ['a "b" c', '5" disk,\n', "", '"', ' "a"', "end"]


def test_json_that_python_cannot_read_is_named(tmp_path):
    huge = "9" * 5000  # Python limits the length of integers
    (tmp_path / "a.jsonl").write_text(f'{json.dumps(PAIR)}\n{{"prompt": {huge}}}\n')
    (tmp_path / "b.json").write_text(f"[{huge}]")
    for name, where in (("a.jsonl", "a.jsonl, line 2"), ("b.json", "b.json")):
        with pytest.raises(ValueError, match=f"must be a .*{where} is not: "):
            list(ChatCorpus(str(tmp_path / name)).documents())
    corpus = ChatCorpus(str(tmp_path / "a.jsonl"), skip_invalid=True)
    assert len(list(corpus.documents())) == corpus.n_skipped == 1
    write_jsonl(tmp_path / "c.jsonl", [PAIR | {"tools": huge}])
    with pytest.raises(ValueError, match=r"tools must be JSON; .*c.jsonl, line 1 has "):
        list(ChatCorpus(str(tmp_path / "c.jsonl")).documents())


def test_names_of_files_may_have_any_bytes(tmp_path, capsys):
    """A name in Latin-1 is not valid UTF-8."""
    name = os.fsdecode(b"caf\xe9.jsonl")
    try:
        write_jsonl(tmp_path / name, [{"text": "one"}])
    except OSError:
        pytest.skip("this file system allows only names in UTF-8")
    corpus = TextCorpus(str(tmp_path), "text")
    assert [is_held_out(key) for key, _ in corpus.documents()] == [False] and corpus.fingerprint()
    assert not list(ChatCorpus(str(tmp_path), skip_invalid=True).documents())
    assert r"caf\udce9.jsonl, line 1" in capsys.readouterr().out


def test_a_broken_file_in_the_folder_of_a_dataset_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)  # caplog needs it
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"text": "one"}\n{"text": "two\n')
    with pytest.raises(
        ValueError, match=r"data.name=.* must be a dataset .* can load: .*JSON parse error: .* in row 1"
    ):
        list(HFCorpus(str(tmp_path / "rows"), None, "train", "text").documents())
    assert f"{tmp_path}/rows/a.jsonl" in caplog.text


def test_a_parquet_file_is_read_a_few_rows_at_a_time(tmp_path):
    texts = [f"{i:04}" * 2_000 for i in range(1_000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "books.parquet")
    corpus = TextCorpus(str(tmp_path / "books.parquet"), "text")
    tracemalloc.start()
    assert sum(1 for _ in corpus.documents()) == len(texts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sum(map(len, texts)) / 2
