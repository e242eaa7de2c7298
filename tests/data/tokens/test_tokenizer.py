"""Tokenizers that produce different token ids have different identities. The code of a tokenizer is never run."""

import json
from pathlib import Path

import pytest
from transformers import CTRLTokenizer

from fa_train.data.tokens.tokenizer import HFTokenizer
from tests.data.support.chats import save_tokenizer


def ids_and_identity(folder, text):
    tokenizer = HFTokenizer(str(folder))
    [ids] = tokenizer.encode_batch([text])
    return ids.tolist(), tokenizer.identity


def test_splitting_of_special_tokens_is_part_of_the_identity(tmp_path):
    found = []
    for name, split in [("a", False), ("b", True), ("c", False)]:
        config = Path(save_tokenizer(tmp_path / name), "tokenizer_config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"split_special_tokens": split}))
        found.append(ids_and_identity(tmp_path / name, "hi <|im_end|>"))
    assert all(first != second for first, second in zip(found[0], found[1], strict=True))
    assert found[0] == found[2]


class WithoutOffsets:
    """A backend that refuses to encode a text with offsets, which take a quarter of the memory."""

    def __init__(self, backend):
        self.backend = backend

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def encode_batch(self, texts, **options):
        assert not any(texts)
        return self.backend.encode_batch(texts, **options)


def test_texts_are_encoded_whole_and_without_offsets(tmp_path):
    tokenizer = HFTokenizer(save_tokenizer(tmp_path))
    texts = ["the weather in Rome is sunny", "", "ü ∑ 🙂<|im_end|>"]
    expected = tokenizer.hf(texts, add_special_tokens=False).input_ids
    tokenizer.hf.backend_tokenizer.enable_truncation(2)
    tokenizer.hf.backend_tokenizer.enable_padding()
    tokenizer.hf._tokenizer = WithoutOffsets(tokenizer.hf.backend_tokenizer)
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


def test_the_merges_of_a_slow_tokenizer_are_part_of_the_identity(tmp_path):
    vocabulary = ["a@@", "ab@@", "c", "bc", "<unk>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    found = []
    for name, merges in [("a", ["a b", "b c</w>"]), ("b", ["b c</w>", "a b"]), ("c", ["a b", "b c</w>"])]:
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        slow = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
        slow.save_pretrained(tmp_path / name)
        found.append(ids_and_identity(tmp_path / name, "abc"))
    assert [ids for ids, _ in found] == [[1, 2], [0, 3], [1, 2]]
    assert found[0] == found[2] and found[0][1] != found[1][1]


def test_the_code_of_a_tokenizer_is_neither_run_nor_offered(tmp_path, monkeypatch):
    """By default, transformers asks on the terminal whether to run the code."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(ValueError) as caught:
        HFTokenizer(str(tmp_path))
    assert str(caught.value) == (
        f"data.tokenizer must be a tokenizer without Python code of its own; got {tmp_path}, whose code is never run"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_link_is_not_ignored(file, tmp_path):
    path = Path(save_tokenizer(tmp_path), file)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=rf"{file} is a link to .*nowhere, which is missing"):
        HFTokenizer(str(tmp_path))


def test_a_name_that_no_file_can_have_is_one_error():
    with pytest.raises(ValueError, match=r"data\.tokenizer must be a folder or hub name .*; got aaa"):
        HFTokenizer("a" * 300)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param({"model": {"type": "New"}, "added_tokens": []}, "Exception: data did not match", id="new-kind"),
        pytest.param({}, "KeyError: 'added_tokens'", id="damaged"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named(content, message, tmp_path):
    Path(save_tokenizer(tmp_path), "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"data.tokenizer must be a folder .*; got {tmp_path}: {message}"):
        HFTokenizer(str(tmp_path))
