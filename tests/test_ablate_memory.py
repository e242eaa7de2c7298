"""scripts/ablate_memory.py: a small sweep from its command line, and what it writes, skips and predicts."""

import csv
import json
import resource
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from scripts import ablate_memory
from scripts.ablate_memory import (
    Case,
    Prediction,
    Result,
    configuration,
    header,
    load,
    markdown,
    measure,
    page,
    parse_arguments,
    predict,
    run_apart,
    series,
    sweep,
)
from tests.training import REPOSITORY, quiet_environment

TINY = ("model.n_layers=2", "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=64")
HEAD = {"command": "python <& a pipe", "GPU": "none"}
RESULTS = [
    Result("naive", 1024, "ok", 2.0, 2.5, 10.0, 102400.0, 1.5, 0.25),
    Result("naive", 2048, "oom", 79.0, 80.0),
    Result("naive", 4096, "skipped: 2048 ran out of memory"),
    Result("flash", 1024, "ok", 1.0, 1.5, 5.0, 204800.0, 3.0, 0.5),
]


def case(attention="sdpa", seq_len=32, **settings):
    defaults = {"model": "nano", "device": "cpu", "precision": "32-true", "steps": 2, "overrides": TINY}
    return Case(attention=attention, seq_len=seq_len, **defaults | settings)


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (200 * 2**30, 200 * 2**30))


def test_a_sweep_with_a_case_that_runs_out_of_memory(tmp_path):
    """Files, the offline runs read back, and the skipped case after the one of 274 GB of scores."""
    arguments = ["--attentions", "naive", "--seq-lens", "32", "131072", "262144", "--model", "nano", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.ablate_memory", *arguments, "--out", str(tmp_path), *TINY],
        cwd=REPOSITORY, env=quiet_environment() | {"WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=240, preexec_fn=limit_memory,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Naive attention needs at least")
    with (tmp_path / "ablation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["outcome"] for row in rows] == ["ok", "oom", "skipped: 131072 ran out of memory"]
    assert [row["oom"] for row in rows] == ["0", "1", "0"]
    assert float(rows[0]["tokens_per_s"]) == pytest.approx(32 / float(rows[0]["step_ms"]) * 1e3)
    assert float(rows[0]["peak_gib"]) > 0 and float(rows[1]["peak_gib"]) > 0
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    assert_self_contained((tmp_path / "ablation.html").read_text())

    inspected = [inspect(path) for path in sorted(tmp_path.rglob("*.wandb"))]
    summaries = [text for text in inspected if "chart/peak_gib" in text]
    cases = [text for text in inspected if "chart/peak_gib" not in text]
    assert len(summaries) == 1 and len(cases) == 2
    for text in inspected:
        assert f"ablate_memory {tmp_path.name}" in text
    assert all("seq_len=" in text and "peak_gib" in text and '"case"' in text for text in cases)
    assert sum("tokens_per_s" in text for text in cases) == 1
    for name in ("results", "picture", "page", "chart/tokens_per_s", '"summary"'):
        assert name in summaries[0], name


def inspect(path):
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


class References(HTMLParser):
    """What a page loads, and its table's cells."""

    def __init__(self):
        super().__init__()
        self.targets, self.rows, self.tags = [], 0, []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.targets += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]


def assert_self_contained(html):
    parser = References()
    parser.feed(html)
    parser.close()
    assert parser.targets and all(target.startswith("data:") for target in parser.targets)
    assert "script" not in parser.tags and "@import" not in html and "url(" not in html
    return parser


def test_the_page_asks_nothing_of_others_and_escapes():
    html = page(RESULTS, HEAD, "N < 3", b"picture")
    assert assert_self_contained(html).tags.count("td") == len(RESULTS) * len(header())
    assert "python &lt;&amp; a pipe" in html and "N &lt; 3" in html


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_chromium_shows_the_page(tmp_path):
    (tmp_path / "page.html").write_text(page(RESULTS, HEAD, "N < 3", b"picture"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "skipped: 2048 ran out of memory" in done.stdout


def outcomes(run_outcomes, path, cases):
    """Sweeps with made-up outcomes by (attention, seq_len); also which cases ran."""
    ran = []

    def run(case):
        ran.append((case.attention, case.seq_len))
        outcome = run_outcomes[case.attention, case.seq_len]
        if outcome == "stop":
            raise KeyboardInterrupt
        return Result(case.attention, case.seq_len, outcome)

    results = sweep(cases, path, run, lambda case, result: None)
    return [result.outcome for result in results], ran


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path):
    path = tmp_path / "results.jsonl"
    cases = [case("naive", 32), case("naive", 64), case("sdpa", 32)]
    with pytest.raises(KeyboardInterrupt):
        outcomes({("naive", 32): "ok", ("naive", 64): "stop"}, path, cases)
    assert load(path) == {cases[0]: Result("naive", 32, "ok")}
    found, ran = outcomes({("naive", 64): "failed: crash", ("sdpa", 32): "ok"}, path, cases)
    assert found == ["ok", "failed: crash", "ok"] and ran == [("naive", 64), ("sdpa", 32)]
    found, ran = outcomes({("naive", 64): "ok"}, path, cases)  # what failed is tried again
    assert found == ["ok", "ok", "ok"] and ran == [("naive", 64)]
    other = [case("naive", 32, steps=3)]
    assert outcomes({("naive", 32): "ok"}, path, other)[1] == [("naive", 32)]


def test_longer_cases_of_the_same_attention_are_skipped(tmp_path):
    cases = [case(attention, seq_len) for attention in ("naive", "sdpa") for seq_len in (32, 64, 128)]
    made_up = {("naive", 32): "oom", ("sdpa", 32): "ok", ("sdpa", 64): "failed: crash", ("sdpa", 128): "ok"}
    found, _ = outcomes(made_up, tmp_path / "results.jsonl", cases)
    skipped = "skipped: 32 ran out of memory"
    assert found == ["oom", skipped, skipped, "ok", "failed: crash", "ok"]


@pytest.mark.parametrize("attention", ["naive", "chunked"])
def test_a_case_is_measured(attention):
    result = measure(case(attention))
    assert result.outcome == "ok" and result.step_ms > 0 and result.peak_gib > 0
    assert result.mfu is None and result.reserved_gib is None
    # 6 N T + 6 layers n_heads head_dim T^2: matrices of 32 x 64, 32 x 32, 32 x 128 and 64 x 32, a head of 259 x 32
    matrices = 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32) + 259 * 32
    flops = 6 * matrices * 32 + 6 * 2 * 32 * 32**2
    assert result.tflops * 1e12 * result.step_ms / 1e3 == pytest.approx(flops)


def test_other_errors_are_raised():
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        measure(case("chunked", overrides=(*TINY, "attention.chunk_size=0")))


@pytest.mark.parametrize(
    ("returncode", "stderr", "outcome"),
    [
        pytest.param(-9, "", "oom", id="killed-by-linux"),
        pytest.param(1, "Traceback\nValueError: no\n", "failed: ValueError: no", id="error"),
        pytest.param(-11, "", "failed: exit status -11", id="crash"),
    ],
)
def test_what_a_case_that_dies_becomes(monkeypatch, returncode, stderr, outcome):
    died = subprocess.CompletedProcess([], returncode, "", stderr)
    monkeypatch.setattr(ablate_memory.subprocess, "run", lambda *_, **__: died)
    assert run_apart(case(), 1.0) == Result("sdpa", 32, outcome)


def test_the_prediction_is_the_formula():
    tiny = predict(case("naive"))
    parameters = 259 * 32 + 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32 + 2 * 32) + 32
    assert tiny == Prediction(16 * parameters, 2 * 4 * 4)
    assert predict(case("naive", precision="bf16-mixed")).per_pair == 2 * 4 * 6
    assert predict(case("naive", overrides=(*TINY, "memory=full"))).per_pair == 4 * 4


def test_naive_fails_from_the_first_length_that_does_not_fit():
    prediction = Prediction(1000, 8)
    assert prediction.fails_at(1000 + 8 * 50**2) == 51
    assert prediction.peak(50) <= 1000 + 8 * 50**2 < prediction.peak(51)
    assert prediction.fails_at(500) == 1


def test_series_mark_where_memory_ran_out():
    assert series(RESULTS, "peak_gib", 80.0) == (
        [[1024], [2048], [1024]],
        [[2.0], [80.0], [1.0]],
        ["naive", "naive OOM", "flash"],
    )


def test_the_markdown_has_every_result():
    text = markdown(RESULTS, HEAD, "N < 3")
    assert "| naive | 1024 | ok | 2 | 2.5 | 10 | 102400 | 1.5 | 0.25 | 0 |" in text
    assert "| naive | 2048 | oom | 79 | 80 | – | – | – | – | 1 |" in text


def test_memory_and_optimizer_are_overrides():
    config = configuration(case(overrides=("memory=full", "optimizer=adamw_bf16", "model.vocab_size=300")))
    assert config.memory.checkpointing == "full" and config.optimizer._target_.endswith("adamw_bf16")
    assert config.model.vocab_size == 300


@pytest.mark.parametrize("arguments", [["--seq-lens", "0"], ["--steps", "0"], ["--model", "none"], ["no-value"]])
def test_arguments_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert arguments[-1] in capsys.readouterr().err


def test_a_case_survives_the_way_to_its_process():
    sent = json.loads(json.dumps(ablate_memory.asdict(case())))
    assert ablate_memory.case_of(sent) == case()
