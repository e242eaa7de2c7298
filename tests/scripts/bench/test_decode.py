"""Tests scripts/bench/decode.py: its candidates compute the same result, and its arguments and report are right."""

import pytest
import torch

from scripts.bench.decode import CASES, PAGES, Case, candidates, in_pages, markdown, parse_arguments


@pytest.mark.slow
def test_all_candidates_compute_the_same(device):
    torch.manual_seed(0)
    # fp16, because Triton's interpreter computes bf16 incorrectly
    runs = candidates(Case(2, 4, 2, 16, 512), device, torch.float16)
    results = {name: run().flatten() for name, run in runs.items()}
    assert list(results) == ["automatic", "1 split", "pages of 256", "pages of 16", "SDPA"]
    for name, o in results.items():
        error = (o - results["SDPA"]).abs().max().item()
        assert error < 2e-3, f"{name}: {error}, where the mean of 512 values is about 0.04"


def test_pages_lie_anywhere():
    x = torch.arange(2 * 32 * 3 * 4.0).view(2, 32, 3, 4)
    order = torch.tensor([2, 0, 3, 1])
    pages = in_pages(x, 16, order)
    assert pages.shape == (4, 16, 3, 4) and torch.equal(pages[3], x[1, :16])


def test_report_gives_time_and_bandwidth():
    case = Case(4, 32, 8, 128, 8192)
    assert case.bytes_read == 2 * 4 * 8192 * 8 * 128 * 2
    lines = markdown({case: {"automatic": 100.0, "SDPA": 268.4}}, {"GPU": "made up"}).splitlines()
    assert "- GPU: `made up`" in lines
    assert "| batch | heads | KV heads | d | cache | automatic | SDPA |" in lines
    assert lines[-1] == "| 4 | 32 | 8 | 128 | 8192 | 100.0 · 1342 | 268.4 · 500 |"


def test_arguments():
    args = parse_arguments(["--cases", "1,8,2,64,512", "2,8,8,96,256", "--commit", "abc"])
    assert args.cases == [Case(1, 8, 2, 64, 512), Case(2, 8, 8, 96, 256)] and args.commit == "abc"
    assert parse_arguments([]).cases == list(CASES)
    assert all(case.cache % max(PAGES) == 0 and case.n_heads % case.n_kv_heads == 0 for case in CASES)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param("1,8,2,64", "must be batch,heads,KV heads,head_dim,cache; got 1,8,2,64", id="four"),
        pytest.param("1,8,3,64,256", "a multiple of KV heads; got 1,8,3,64,256", id="heads"),
        pytest.param("1,8,2,64,300", "a multiple of 256 tokens; got 1,8,2,64,300", id="cache"),
        pytest.param("1,8,2,512,256", "head_dim at most 256; got 1,8,2,512,256", id="head-dim"),
    ],
)
def test_wrong_cases_are_refused(given, said, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--cases", given])
    assert said in capsys.readouterr().err


def test_no_processes_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--jobs", "0"])
    assert "--jobs must be positive; got 0" in capsys.readouterr().err
