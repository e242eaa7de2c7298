"""Tests the streams, the parts and the table of scripts/bench/context.py."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from fa_train.models.attention import naive_attention
from fa_train.parallel.context.operators import register_group
from scripts.bench import context
from scripts.bench.context import STREAMS, Setting, documents, main, measure
from scripts.bench.context_peer import PEER_PARTS
from scripts.bench.context_report import PARTS, Result, draw, peer_table, table

MS = {"one": 100.0, "shared": 62.5, "forward": 12.5, "alone": 50.0, "moved": 2.0}


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    register_group("bench", dist.new_group([0]))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stream", STREAMS)
def test_documents_fill_the_stream_and_are_drawn_again(stream):
    drawn = [documents(stream, 100_000, seed) for seed in (0, 1, 0)]
    assert {sum(lengths) for lengths in drawn} == {100_000}
    assert drawn[0] == drawn[2]
    assert (drawn[0] == drawn[1]) == (stream in ("one", "window"))


def test_documents_of_a_file():
    lengths = documents("file", 1000, 0, lengths=(7, 300, 9000))
    assert sum(lengths) == 1000 and set(lengths[:-1]) <= {7, 250}, "a document has at most a quarter of the tokens"
    assert lengths != documents("file", 1000, 1, lengths=(7, 300, 9000))


@pytest.mark.parametrize("stream", STREAMS)
def test_every_part_of_every_stream_is_timed(stream, one_rank, monkeypatch):
    use_naive_attention(monkeypatch)
    monkeypatch.setattr(context, "WINDOW", 7)
    result = measure(stream, 100, Setting(2, 1, 8, 2, 2, "cpu"))
    assert result.ms.keys() == set(PARTS) and min(result.ms.values()) > 0
    assert result.received == 0, "a single rank has all keys"


@pytest.mark.parametrize("stream", STREAMS)
def test_sharing_a_stream_computes_what_one_rank_computes(stream, one_rank, monkeypatch):
    use_naive_attention(monkeypatch)
    monkeypatch.setattr(context, "WINDOW", 7)
    outputs = []
    for part in ("one", "shared", "alone"):
        torch.manual_seed(0)  # each new case draws its inputs again
        monkeypatch.setattr(context, "_inputs", drawn_once())
        case = context.Case(stream, 96, 0, Setting(4, 2, 8, 1, 1, "cpu"))
        outputs.append(case.parts[part]())
    for gradients in outputs[1:]:
        torch.testing.assert_close(gradients, outputs[0])


def use_naive_attention(monkeypatch):
    """Replaces flash attention, which is slow in Triton's interpreter. Naive attention requires may_split=False."""
    monkeypatch.setattr(context, "flash_attention", naive_attention)
    monkeypatch.setattr(context, "traffic", partial(context.traffic, may_split=False))


def drawn_once():
    """Returns a replacement for `_inputs` that returns the same values for every part."""
    original, drawn = context._inputs, []

    def inputs(*arguments):
        if not drawn:
            drawn.append(original(*arguments))
        return drawn[0]

    return inputs


def test_the_table_compares_with_the_ideal():
    [line] = table([Result("one", 65536, MS, [62.5, 60.0], 0.5, 0.25, 4e12)], 2)[2:]
    assert line == "| one | 65,536 | 100.00 | 62.50 | 80.0% | 100.0% | 25.0% | 2.00 | 50% | 160 | 100 | 62.50, 60.00 |"


def test_the_plot_shows_shares_of_the_ideal():
    results = [
        Result(stream, tokens, MS, [62.5], 0.5, 0.25, 1.0) for tokens in (32768, 65536) for stream in ("one", "short")
    ]
    panels = draw(results, 2, "title").axes
    assert [axes.get_title() for axes in panels] == ["32,768 tokens", "65,536 tokens"]
    for axes in panels:
        assert [label.get_text() for label in axes.get_xticklabels()] == ["one", "short"]
        assert [bar.get_height() for bar in axes.patches] == [0.8, 0.8, 1.0, 1.0]


def test_the_peer_has_a_table_of_its_own():
    without, peer = Result("window", 65536, MS, [62.5], 0.5, 0.25, 1.0), {"torch one": 120.0, "torch shared": 80.0}
    assert not peer_table([without], 2)
    line = peer_table([without, Result("one", 65536, MS | peer, [62.5], 0.5, 0.25, 1.0)], 2)[-1]
    assert line == "| 65,536 | 120.00 | 80.00 | 75.0% | 62.50 |"


@pytest.mark.parametrize(("stream", "has_peer"), [("one", True), ("log-normal", False)])
def test_the_peer_is_measured_for_one_document(stream, has_peer, one_rank, monkeypatch):
    use_naive_attention(monkeypatch)
    monkeypatch.setattr(context, "peer_parts", lambda *sizes: dict.fromkeys(PEER_PARTS, lambda: None))
    result = measure(stream, 100, Setting(2, 1, 8, 1, 1, "cpu", peer=True))
    assert result.ms.keys() == {*PARTS, *(PEER_PARTS if has_peer else ())}


def test_the_peer_is_refused_on_the_cpu(capsys):
    with pytest.raises(SystemExit):
        context.parse_arguments(["--peer", "--cpu-ranks", "2"])
    assert "--peer needs GPUs" in capsys.readouterr().err


def test_one_rank_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_context", "--cpu-ranks", "1"])
    with pytest.raises(SystemExit, match=r"at least 2 GPUs, or .*; got 1"):
        main()


def test_a_long_stream_divides_the_heads_of_the_whole_stream(one_rank, monkeypatch):
    use_naive_attention(monkeypatch)
    monkeypatch.setattr(context, "FITS_ONE_GPU", 64)
    monkeypatch.setattr(context, "_divided", lambda setting, ranks: replace(setting, n_heads=2, n_kv_heads=1))
    case = context.Case("one", 96, 0, Setting(4, 2, 8, 1, 1, "cpu"))
    assert [part.shape[1] for part in case.parts["one"]()] == [2, 1, 1]
    assert [part.shape[1] for part in case.parts["shared"]()] == [4, 2, 2]


def test_heads_that_cannot_be_divided_are_refused():
    setting = Setting(16, 4, 8, 1, 1, "cpu")
    assert (context._divided(setting, 4).n_heads, context._divided(setting, 4).n_kv_heads) == (4, 1)
    with pytest.raises(ValueError, match=r"a multiple of the 8 ranks .* got 4"):
        context._divided(setting, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--streams", "file"], "--lengths and the stream file need each other"),
        (["--lengths", "x"], "--lengths and the stream file need each other"),
        (["--lengths", "TEXT", "--streams", "file"], "whole numbers"),
        (["--lengths", "ZERO", "--streams", "file"], "at least one positive number"),
        (["--warm-up", "-1"], "--warm-up must not be negative"),
        (["--head-groups", "3"], "--head-groups must divide the 8 KV heads"),
    ],
)
def test_bad_arguments_end_with_a_message(words, message, tmp_path, capsys):
    files = {"TEXT": tmp_path / "text", "ZERO": tmp_path / "zero"}
    files["TEXT"].write_text("12 ab")
    files["ZERO"].write_text("12\n0")
    with pytest.raises(SystemExit):
        context.parse_arguments([str(files.get(word, word)) for word in words])
    assert message in capsys.readouterr().err
