"""Tests scripts/bench/host.py: its candidates compute the same result, and its samples and table are right."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from scripts.bench import host
from scripts.bench.host import (
    CALLS,
    NODE,
    NOTHING,
    Candidate,
    Row,
    Sample,
    Shape,
    candidates,
    grad_mode,
    markdown,
    measure,
    order,
    parse_arguments,
    sample,
)
from scripts.bench.page import write_csv

SHAPE = Shape(tokens=32, n_heads=4, n_kv_heads=2, head_dim=16)


@pytest.mark.slow
def test_all_candidates_of_one_document_compute_the_same(device):
    results = {}
    for name, candidate in candidates(SHAPE, device).items():
        if "cuDNN" in name and device.type == "cpu":
            continue  # cuDNN's attention does not run on a CPU
        torch.manual_seed(0)
        # fp16, because Triton's interpreter computes bf16 incorrectly
        leading = 1 if candidate.layout == "tokens heads" else 2
        q, k, v = (torch.randn(32, heads, 16, device=device, dtype=torch.float16) for heads in (4, 2, 2))
        laid_out = [x if leading == 1 else x[None] for x in (q, k, v)]
        if candidate.layout == "batch heads tokens":
            laid_out = [x.transpose(1, 2) for x in laid_out]
        with candidate.setting():
            o = candidate.attend(*laid_out)
        o = o[0] if isinstance(o, tuple) else o
        results[name] = o.transpose(1, 2) if candidate.layout == "batch heads tokens" else o
    several = {name: o for name, o in results.items() if "4 documents" in name}
    quarters = zip(*(x.transpose(0, 1)[None].split(8, dim=2) for x in (q, k, v)), strict=True)
    outputs = [scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True) for x in quarters]
    several["SDPA of each"] = torch.cat(outputs, dim=2).transpose(1, 2)
    one = {name: o for name, o in results.items() if name not in several and name != NOTHING}
    assert len(several) >= 3 and len(one) >= 4
    for alike in (several, one):
        first, *_ = alike.values()
        for name, o in alike.items():
            assert (o.flatten() - first.flatten()).abs().max() < 4e-3, name


@pytest.mark.slow
def test_passes_run_and_give_gradients_of_q_k_and_v(device, monkeypatch):
    monkeypatch.setitem(CALLS, "backward, of 16", 3)  # with Triton's interpreter, 16 calls take seconds
    shape = Shape(tokens=8, n_heads=2, n_kv_heads=1, head_dim=16)
    for name, candidate in candidates(shape, device).items():
        if not candidate.has_backward or ("cuDNN" in name and device.type == "cpu"):
            continue
        calls = candidate.calls(shape, device, torch.float16)
        assert calls.keys() == CALLS.keys()
        with candidate.setting():
            of_forward, recorded = (calls[direction]() for direction in ("forward", "forward, autograd"))
            gradients = [calls["backward"]() for _ in range(2)][-1]  # the backward runs twice on the same outputs
            in_a_row = calls["backward, of 16"]()
            with grad_mode(NODE):
                of_node = calls[NODE]()
        first = [o[0] if isinstance(o, tuple) else o for o in (of_forward, recorded)]
        assert [o.requires_grad for o in first] == [False, True], name
        shapes = [candidate._shape(shape, heads) for heads in (2, 1, 1)]
        assert [x.shape for x in gradients] == shapes, name
        assert [x.shape for x in in_a_row] == [shapes[0], *shapes[1:] * 3], name
        if candidate.layout != "batch heads tokens":  # on a CPU, SDPA consists of many autograd nodes
            assert [x.shape for x in of_node[:3]] == shapes, name
        if name.startswith("ours"):
            assert all(torch.equal(a, b) for a, b in zip(of_node[:3], gradients, strict=True)), name


def test_waiting_is_not_in_the_time(monkeypatch):
    now = [0.0]

    def passes(seconds):
        now[0] += seconds

    monkeypatch.setattr(host.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: passes(0.5))
    assert sample(lambda: passes(0.25), calls=4, in_a_row=1) == Sample(us=0.25e6, left=0.5)
    assert sample(lambda: passes(0.5), calls=3, in_a_row=2) == Sample(us=0.25e6, left=0.5)


def test_each_round_has_all_in_an_order_of_its_own():
    places = [*range(8)]
    drawn = order(places, rounds=5)
    rounds = [drawn[i : i + 8] for i in range(0, 40, 8)]
    assert all(sorted(each) == places for each in rounds) and len({tuple(each) for each in rounds}) == 5
    assert drawn == order(places, rounds=5)


@pytest.mark.parametrize(
    ("left", "outcome"),
    [
        pytest.param([0.0, 0.09, 0.5], "ok", id="one-late-round"),
        pytest.param([0.0, 0.2, 0.5], "GPU-bound", id="most-rounds"),
    ],
)
def test_row_is_the_median_and_says_where_the_gpu_was_behind(left, outcome):
    samples = [Sample(us, share) for us, share in zip((30.0, 50.0, 31.0), left, strict=True)]
    assert Row.of("ours", "forward", samples) == Row("ours", "forward", outcome, 31.0, 30.0, 50.0)


def test_a_candidate_that_fails_is_a_row(monkeypatch):
    class Stub(Candidate):
        def calls(self, shape, device, dtype):
            return {"forward": partial(self.attend, *torch.zeros(3, 1))}

    def refuses(q, k, v):
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    chosen = {"bad": Stub(refuses, "tokens heads"), "good": Stub(lambda q, k, v: time.sleep(1e-3), "tokens heads")}
    good, bad = measure(chosen, SHAPE, rounds=3, calls=2)
    assert (good.candidate, good.outcome) == ("good", "ok") and good.lowest_us <= good.median_us <= good.highest_us
    assert bad == Row("bad", "forward", "RuntimeError: no kernel")


def test_table_and_csv(tmp_path):
    rows = [
        Row("ours", "forward", "ok", 31.04, 30.0, 39.96),
        Row("ours", "backward", "GPU-bound", 145.0, 140.0, 150.0),
        Row("SDPA", "forward", "RuntimeError: no kernel"),
    ]
    lines = markdown(rows, SHAPE, parse_arguments([]), {"GPU": "made up"}).splitlines()
    assert "- GPU: `made up`" in lines
    assert lines[-4:] == [
        "| candidate | forward | forward, autograd | backward | backward, of 16 | backward's node |",
        "|:--|--:|--:|--:|--:|--:|",
        "| ours | 31.0 (30.0 to 40.0) | – | GPU-bound: 145.0 (140.0 to 150.0) | – | – |",
        "| SDPA | RuntimeError: no kernel | – | – | – | – |",
    ]
    assert any(line.startswith("32 tokens, 4 heads for 2, head_dim 16") for line in lines)
    write_csv(Row, rows, tmp_path / "host.csv")
    assert (tmp_path / "host.csv").read_text().splitlines() == [
        "candidate,direction,outcome,median_us,lowest_us,highest_us",
        "ours,forward,ok,31.04,30.0,39.96",
        "ours,backward,GPU-bound,145.0,140.0,150.0",
        "SDPA,forward,RuntimeError: no kernel,,,",
    ]


@pytest.mark.slow
def test_without_a_gpu_it_ends_with_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.host"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["scripts.bench.host needs a CUDA GPU; torch sees none on this machine"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "250"], "--tokens must be a multiple of 4; got 250"),
        (["--kv-heads", "5"], "--heads must be a multiple of --kv-heads; got 32 and 5"),
        (["--head-dim", "512"], "--head-dim must be from 1 to 256; got 512"),
        (["--rounds", "0"], "--rounds must be positive; got 0"),
        (["--calls", "501"], "--calls must be from 1 to 500; got 501"),
    ],
    ids=str,
)
def test_bad_arguments_end_with_a_message(arguments, said, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert said in capsys.readouterr().err
