"""Tests scripts/ablate_memory.py."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
import torch

from fa_kernels.flash_attention.schedule import causal_schedule
from fa_train.models.attention import naive_attention
from fa_train.models.gpt import GPT
from scripts.ablate_memory import attention_cases, explanations, parse_arguments, step_cases
from scripts.ablation.cases import AttentionCase, Result, StepCase, configuration, measure, timed
from scripts.ablation.formula import Formula, attention_formula, step_formula
from scripts.ablation.report import attention_part, markdown, page, step_part, write_files
from scripts.ablation.sweep import ProcessError, apart, call_apart, expected_seconds, load, require_same_gpu, sweep
from scripts.bench.case_process import case_of
from tests.scripts.support.html_page import assert_self_contained
from tests.scripts.support.wandb_runs import environment, inspect
from tests.support import processes
from tests.support.training import REPOSITORY

TINY = ("model.n_layers=2", "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=64")
HEAD = {"command": "python <& a pipe", "GPU": "none"}
GIB = 2**30


def case(attention="sdpa", seq_len=32, **settings):
    defaults = {"model": "nano", "device": "cpu", "precision": "32-true", "steps": 2, "seconds": 60.0}
    return StepCase(attention=attention, seq_len=seq_len, **{"overrides": TINY} | defaults | settings)


def alone(attention="sdpa", seq_len=32, **settings):
    defaults = {"n_heads": 4, "head_dim": 16, "dtype": "fp32", "device": "cpu", "steps": 2, "seconds": 60.0}
    return AttentionCase(attention=attention, seq_len=seq_len, **defaults | settings)


def ok(**numbers):
    return Result("ok", **{"peak_gib": 1.0, "step_ms": 10.0, "tokens_per_s": 102400.0, "tflops": 1.5} | numbers)


STEPS = [
    (case("naive", 1024), ok(peak_gib=2.0, reserved_gib=2.5, mfu=0.25)),
    (case("naive", 2048), Result("oom", 79.0, 80.0)),
    (case("naive", 4096), Result("skipped: 2048 ran out of memory")),
    (case("flash", 1024), ok(mfu=0.5)),
]
ALONE = [
    (alone("naive", 1024), ok(forward_peak_gib=0.5, forward_ms=3.0)),
    (alone("naive", 2048), Result("oom", 79.0, forward_peak_gib=60.0, forward_ms=12.0)),
    (alone("flash", 1024), ok(forward_peak_gib=0.25, forward_ms=1.0)),
    (alone("flash", 1024, n_heads=8), ok(forward_peak_gib=0.375, forward_ms=2.0)),
]


@pytest.fixture(scope="module")
def parts():
    return [step_part(STEPS, 80 * GIB, "none"), attention_part(ALONE, 80 * GIB, "none")]


@pytest.mark.slow
def test_a_sweep_reports_cases_that_run_out_of_memory(tmp_path):
    """Cases whose scores need 274 GB fail, and longer cases are skipped."""
    arguments = ["--attentions", "naive", "--seq-lens", "32", "131072", "262144", "--model", "nano", "--steps", "1"]
    arguments += ["--attention-seq-lens", "64", "131072", "262144", "--n-heads", "4", "--head-dims", "16"]
    arguments += ["--max-step-seconds", "1e9"]
    arguments += ["--out", str(tmp_path), *TINY]
    script = REPOSITORY / "scripts" / "ablate_memory.py"
    done = processes.finish(script, arguments, tmp_path, environment(), limit_memory=True, fork_servers=False)
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("Naive attention, a training step of nano") and "must fail from N = " in first
    assert second.startswith("Naive attention, alone, 4 heads of 16, fp32") and "d = 16" in second
    for name in ("ablation", "attention"):
        with (tmp_path / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["outcome"] for row in rows] == ["ok", "oom", "skipped: 131072 ran out of memory"]
        assert [row["oom"] for row in rows] == ["0", "1", "0"]
        tokens = int(rows[0]["seq_len"])
        assert float(rows[0]["tokens_per_s"]) == pytest.approx(tokens / float(rows[0]["step_ms"]) * 1e3)
        assert float(rows[0]["peak_gib"]) > 0 and float(rows[1]["peak_gib"]) > 0
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "must fail" in (tmp_path / f"{name}_formula.csv").read_text()
    assert_self_contained((tmp_path / "ablation.html").read_text())

    inspected = [inspect(path) for path in sorted(tmp_path.rglob("*.wandb"))]
    summaries = [text for text in inspected if "chart/peak_gib" in text]
    cases = [text for text in inspected if "chart/peak_gib" not in text]
    assert len(summaries) == 1 and len(cases) == 4
    for text in inspected:
        assert f"ablate_memory {tmp_path.name}" in text
    assert all("seq_len=" in text and "peak_gib" in text and '"case"' in text for text in cases)
    assert sum("tokens_per_s" in text for text in cases) == sum("head_dim=16" in text for text in cases) == 2
    assert sum("forward_ms" in text for text in cases) == 1
    charts = ("chart/tokens_per_s", "chart/attention_peak_gib", "chart/attention_step_ms")
    for name in ("table/ablation", "table/attention_formula", "picture/attention", "page", '"summary"', *charts):
        assert name in summaries[0], name


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_the_same_command_continues(tmp_path):
    program, arguments = "scripts.ablate_memory", [
        "--only", "step", "--attentions", "naive", "chunked", "sdpa", "--no-wandb", "--seq-lens", "32",
        "--out", str(tmp_path), "--steps", "100000", "--seconds", "1", *TINY,
    ]  # fmt: skip
    path, out, errors = (tmp_path / name for name in ("results.jsonl", "out", "errors"))
    out.touch()
    errors.touch()
    sweep_of_long_cases = processes.start(program, arguments, REPOSITORY, environment(), out, errors)
    try:
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # the second case should run now; the third may already run
        os.killpg(sweep_of_long_cases.pid, signal.SIGINT)  # Ctrl-C in a terminal signals the whole process group
        sweep_of_long_cases.join(30)
    finally:
        sweep_of_long_cases.kill()
    stderr = errors.read_text()
    assert sweep_of_long_cases.exitcode == 128 + signal.SIGINT, stderr
    assert stderr.strip().splitlines()[-1].startswith("stopped; ")
    kept = load(path)
    assert [case.attention for case in kept] in (["naive"], ["naive", "chunked"])
    done = processes.finish(program, arguments, REPOSITORY, environment())
    assert done.returncode == 0, done.stderr
    assert [case.attention for case in load(path)] == ["naive", "chunked", "sdpa"]
    assert kept.items() <= load(path).items(), "finished cases are not measured again"


def test_the_page_asks_nothing_of_others_and_escapes(parts):
    html = page(parts, HEAD, [b"picture", b"other"])
    cells = sum(len(table.columns) * len(table.rows) for part in parts for table in part.tables)
    tags = assert_self_contained(html).tags
    assert tags.count("td") == cells and tags.count("img") == 2 and tags.count("table") == 4
    assert "python &lt;&amp; a pipe" in html


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_chromium_shows_the_page_and_no_request_leaves_it(parts, tmp_path):
    write_files(parts, HEAD, tmp_path)
    shown, requests = opened(tmp_path / "ablation.html", tmp_path)
    assert "skipped: 2048 ran out of memory" in shown and shown.count("<img") == 2
    assert requests == []
    asking = tmp_path / "asking.html"
    asking.write_text('<img src="http://127.0.0.1:9/a.png">')
    assert opened(asking, tmp_path)[1] == ["http://127.0.0.1:9/a.png"]  # `opened` records requests


def opened(html, folder):
    """Returns a page that Chromium has loaded without name resolution, and the addresses that the page requested."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/profile"]
    command += [f"--log-net-log={folder}/net.json", "--virtual-time-budget=2000", "--dump-dom", f"file://{html}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    asked = [event.get("params", {}) for event in json.loads((folder / "net.json").read_text())["events"]]
    own = "not an origin"  # what Chromium logs as `initiator` if Chromium itself made a request
    return done.stdout, [request["url"] for request in asked if request.get("initiator", own) != own]


def outcomes(run_outcomes, path, cases, max_step_seconds=100.0):
    """Runs a sweep of cases with invented outcomes or times, and returns the outcomes and the cases that ran."""
    ran = []

    def run(case):
        ran.append((case.attention, case.seq_len))
        outcome = run_outcomes[case.attention, case.seq_len]
        if outcome == "stop":
            raise KeyboardInterrupt
        return Result(outcome) if isinstance(outcome, str) else Result("ok", step_ms=1e3 * outcome)

    rows = sweep(cases, path, run, lambda case, result: None, max_step_seconds)
    assert [case for case, _ in rows] == cases
    return [result.outcome for _, result in rows], ran


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path):
    path = tmp_path / "results.jsonl"
    cases = [case("naive", 32), case("naive", 64), alone("sdpa", 32)]
    with pytest.raises(KeyboardInterrupt):
        outcomes({("naive", 32): "ok", ("naive", 64): "stop"}, path, cases)
    assert load(path) == {cases[0]: Result("ok")}
    found, ran = outcomes({("naive", 64): "failed: crash", ("sdpa", 32): "ok"}, path, cases)
    assert found == ["ok", "failed: crash", "ok"] and ran == [("naive", 64), ("sdpa", 32)]
    found, ran = outcomes({("naive", 64): "ok"}, path, cases)  # a failed case is run again
    assert found == ["ok", "ok", "ok"] and ran == [("naive", 64)]
    other = [case("naive", 32, steps=3)]
    assert outcomes({("naive", 32): "ok"}, path, other)[1] == [("naive", 32)]


def test_longer_cases_of_the_same_line_are_skipped(tmp_path):
    cases = [case(attention, seq_len) for attention in ("naive", "sdpa") for seq_len in (32, 64, 128)]
    cases += [alone("naive", 32), alone("naive", 64)]
    made_up = {("naive", 32): "oom", ("sdpa", 32): "ok", ("sdpa", 64): "failed: crash", ("sdpa", 128): "ok"}
    found, _ = outcomes(made_up, tmp_path / "results.jsonl", cases)
    skipped = "skipped: 32 ran out of memory"
    assert found == ["oom", skipped, skipped, "ok", "failed: crash", "ok", "oom", skipped]
    heads = [alone("sdpa", 64, n_heads=8), alone("sdpa", 128, n_heads=2)]
    assert outcomes({("sdpa", 64): "oom", ("sdpa", 128): "ok"}, tmp_path / "heads", heads)[0] == ["oom", "ok"]


def test_steps_that_would_take_too_long_are_not_run_but_may_be_later(tmp_path):
    path = tmp_path / "results.jsonl"
    cases = [case("sdpa", seq_len) for seq_len in (100, 200, 400, 800)]
    seconds = {("sdpa", n): 0.01 * n + 0.0001 * n**2 for n in (100, 200, 400, 800)}  # the times are 2, 6, 20 and 72 s
    found, ran = outcomes(seconds, path, cases, max_step_seconds=20)
    assert found == ["ok", "ok", "ok", "not run: a step would take about 72 s, 20 allowed"] and len(ran) == 3
    found, ran = outcomes(seconds, path, cases, max_step_seconds=80)
    assert found[-1] == "ok" and ran == [("sdpa", 800)]


def test_a_sweep_whose_seconds_are_over_still_reports(tmp_path):
    cases = [case("naive", 32), case("naive", 64), case("sdpa", 32)]
    slow = sweep(cases, tmp_path / "results.jsonl", lambda case: time.sleep(0.2) or Result("ok"), print, 100.0, 0.1)
    assert [result.outcome for _, result in slow] == ["ok", *["not run: the sweep's budget of 0.1 s was over"] * 2]


def test_expected_seconds_never_shrink_with_length():
    assert expected_seconds([], 64) == 0
    assert expected_seconds([(32, 1.0)], 64) == 2
    # if all measured times are equal, the predicted time is proportional to seq_len
    assert expected_seconds([(32, 1.0), (64, 1.0)], 128) == 2
    assert expected_seconds([(32, 1.0), (64, 9.0)], 128) == 36  # the prediction is at most quadratic in seq_len


@pytest.mark.parametrize("attention", ["naive", "chunked"])
def test_a_step_is_measured(attention):
    result = measure(case(attention))
    assert result.outcome == "ok" and result.step_ms > 0 and result.peak_gib > 0 and result.timed_steps == 2
    assert result.mfu is None and result.reserved_gib is None
    # The FLOPs of T tokens are `6 * N * T + 6 * layers * n_heads * head_dim * T**2`. N is the number of elements in all
    # matrices, including the output matrix of 259 x 32.
    matrices = 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32) + 259 * 32
    flops = 6 * matrices * 32 + 6 * 2 * 32 * 32**2
    assert result.tflops * 1e12 * result.step_ms / 1e3 == pytest.approx(flops)


@pytest.mark.parametrize("attention", ["naive", "chunked", "sdpa"])
def test_attention_alone_is_measured(attention):
    result = measure(alone(attention, dtype="fp16" if attention == "naive" else "fp32"))
    assert result.outcome == "ok" and result.forward_ms > 0 and result.step_ms > 0
    assert 0 < result.forward_peak_gib <= result.peak_gib
    assert result.tflops * 1e12 * result.step_ms / 1e3 == pytest.approx(3.5 * 2 * 4 * 16 * 32**2)


def test_a_case_begins_no_step_after_its_seconds():
    slow = case(steps=50, seconds=0.05)
    assert measure(replace(slow, seconds=1e-9)).timed_steps == 1
    assert timed(lambda: time.sleep(0.2), slow)[1] == 1
    milliseconds, timed_steps = timed(lambda: time.sleep(0.01), replace(slow, seconds=60.0, steps=3))
    assert timed_steps == 3 and milliseconds >= 10


def test_other_errors_are_raised():
    with pytest.raises(ValueError, match=r"attention\.chunk_size must be a positive integer; got 0"):
        measure(case("chunked", overrides=(*TINY, "attention.chunk_size=0")))


@pytest.mark.slow
def test_a_case_that_dies_costs_itself_alone(tmp_path):
    log = tmp_path / "log"
    for code, exitcode in ((7, 7), (-signal.SIGKILL, -signal.SIGKILL)):
        with pytest.raises(ProcessError, match=f"exit status {exitcode}") as raised:
            call_apart(os._exit, (7,), 60, log) if code > 0 else call_apart(signal.raise_signal, (9,), 60, log)
        assert raised.value.exitcode == exitcode
    with pytest.raises(ProcessError, match="timed out after"):
        call_apart(time.sleep, (60,), 0.5, log)
    assert call_apart(max, (2, 3), 60, log) == 3
    wrong = case("chunked", overrides=(*TINY, "attention.chunk_size=0"))
    assert apart(measure, (wrong,), 60, log).outcome.startswith("failed: ValueError: attention.chunk_size must be")
    assert "Traceback" in log.read_text()


def test_a_process_killed_by_linux_ran_out_of_memory(tmp_path, monkeypatch):
    def killed(*_):
        raise ProcessError("exit status -9", -signal.SIGKILL)

    monkeypatch.setattr("scripts.ablation.sweep.call_apart", killed)
    assert apart(measure, (case(),), 1.0, tmp_path / "log") == Result("oom")


@pytest.mark.slow
def test_importing_the_cases_asks_nothing_of_cuda():
    """Importing the cases must not initialise CUDA, because a forked process could not initialise CUDA again."""
    program = """
import torch
def refuse(*_): raise AssertionError("CUDA was asked")
for name in ("is_available", "device_count", "get_device_properties", "get_device_capability", "current_device"):
    setattr(torch.cuda, name, refuse)
import scripts.ablation.sweep
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_formula_of_a_step_counts_every_component():
    tiny = step_formula(case("naive"))
    parameters = 259 * 32 + 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32 + 2 * 32) + 32
    assert tiny == Formula(4, 8, 16 * parameters, 0, (4 * 4 + 1) + (12 * 4 + 1))
    assert step_formula(case("naive", precision="bf16-mixed")).per_pair == (6 * 4 + 1) + (12 * 4 + 1)
    for memory in ("full", "selective"):  # both recompute naive attention
        assert step_formula(case("naive", overrides=(*TINY, f"memory={memory}"))).per_pair == 12 * 4 + 1
        assert step_formula(case("naive", compiled=True, overrides=(*TINY, f"memory={memory}"))).per_pair == 2 * 4 * 4
    for optimizer, size in (("adamw_8bit", 10), ("adamw_bf16", 8), ("adamw_master", 14), ("adamw_offload", 4)):
        assert step_formula(case("naive", overrides=(*TINY, f"optimizer={optimizer}"))).fixed == size * parameters
    assert step_formula(case("naive", compiled=True)).per_pair == (1 + 2) * 4 * 4
    assert step_formula(case("naive", compiled=True, precision="bf16-mixed")).per_pair == (1 + 2) * 2 * 4


def allocated(run):
    """Returns the peak bytes of torch's CPU allocator during `run`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "n_heads"), [("fp32", 4), ("fp16", 4), ("fp16", 8)])
def test_naive_attention_takes_what_its_formula_says(dtype, n_heads):
    """The measured peak is at least the peak of `attention_formula`, which leaves out terms linear in N.

    In fp32, the measured peak may include a second attention mask of N^2 bytes. In fp16, the test checks no
    upper bound of the measured peak, because torch copies the operands of fp16 matmuls on some CPUs.
    """
    tested = alone("naive", 512, n_heads=n_heads, head_dim=8, dtype=dtype)
    number = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
    schedule = causal_schedule(None, 512, torch.device("cpu"))
    q, k, v, do = (torch.randn(512, n_heads, 8, dtype=number) for _ in range(4))
    with torch.no_grad():
        forward = allocated(lambda: naive_attention(q, k, v, schedule))
    for x in (q, k, v):
        x.requires_grad_()
    both = allocated(lambda: torch.autograd.grad(naive_attention(q, k, v, schedule), (q, k, v), do))
    for passes, found in (("forward", forward), ("both", both)):
        least = attention_formula(tested, passes).per_pair * 512**2
        assert least <= found, passes
        assert found <= 1.03 * (least + 512**2) or dtype == "fp16", passes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_naive_attention_keeps_at_least_one_tensor_of_scores(dtype):
    n, n_heads, kept = 64, 2, []
    schedule = causal_schedule(None, n, torch.device("cpu"))
    q, k, v = (torch.randn(n, n_heads, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    # this backend partitions the graph as inductor does, but needs no C++ compiler
    compiled = torch.compile(naive_attention, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        compiled(q, k, v, schedule)
    scores = [x for x in kept if x.numel() >= n**2]
    assert sum(x.nbytes for x in scores) >= n_heads * n**2 * dtype.itemsize
    assert all(x.numel() == n_heads * n**2 for x in scores), "it keeps no mask"


def test_a_gpu_compiles_the_steps(monkeypatch):
    for cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        cases = step_cases(parse_arguments([]), "cuda" if cuda else "cpu")
        assert {step.attention for step in cases} >= {"naive", "chunked", "sdpa"}
        assert all(step.compiled == cuda for step in cases)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["chunked", "sdpa"])
def test_a_compiled_case_compiles_once_and_for_its_length(attention, monkeypatch, updates):
    """A case runs two warm-up steps and two timed steps, all with 320 tokens."""
    lengths, compiled = [], []
    block, forward = GPT.compile_blocks, GPT.forward
    monkeypatch.setattr(GPT, "compile_blocks", lambda model: compiled.append(block(model, backend="eager")))
    monkeypatch.setattr(
        GPT, "forward", lambda model, x, *more, **named: lengths.append(len(x)) or forward(model, x, *more, **named)
    )
    torch._dynamo.reset()
    result = measure(case(attention, 320, compiled=True))
    assert result.outcome == "ok" and result.timed_steps == 2
    assert len(compiled) == 1 and lengths == [320] * 4 and len(updates) == 4
    measure(case(attention, 320))
    assert len(compiled) == 1 and lengths == [320] * 8 and len(updates) == 8


def test_naive_fails_from_the_first_length_that_does_not_fit():
    formula = Formula(2, 64, 1000, 3, 8)
    assert formula.fails_at(1000 + 3 * 50 + 8 * 50**2) == 51
    assert formula.peak(50) == 1000 + 3 * 50 + 8 * 50**2 < formula.peak(51)
    assert formula.fails_at(500) == 1
    assert formula.scores(1024) == 4 * 2 * 1024**2 and formula.traffic_ratio(1024) == 16
    text = formula.explain("here", 10 * GIB)
    assert f"N = {formula.fails_at(10 * GIB)} tokens on this device of 10.0 GiB" in text and "8 N^2 in all" in text


def test_the_formula_is_said_once_a_model_and_shape():
    cases = [case("naive", 32), case("sdpa", 64), alone("naive"), alone("sdpa"), alone("naive", n_heads=8)]
    model, four, eight = explanations(cases, GIB)
    assert "nano" in model and "4 heads of 16" in four and "8 heads of 16" in eight


def test_charts_mark_where_memory_ran_out(parts):
    step, attention = parts
    peak, forward = step.charts["peak_gib"], attention.charts["attention_forward_peak_gib"]
    assert (peak.xs, peak.ys) == ([[1024], [2048], [1024]], [[2.0], [80.0], [1.0]])
    assert peak.keys == ["naive", "naive OOM", "flash"]
    naive = "naive, 4 heads of 16, fp32"
    assert forward.keys == [naive, "flash, 4 heads of 16, fp32", "flash, 8 heads of 16, fp32"]
    assert forward.ys[0] == [0.5, 60.0]  # the forward succeeded
    assert attention.charts["attention_step_ms"].keys[:2] == [naive, f"{naive} OOM"]


def test_the_tables_have_every_result_and_the_formula(parts):
    text = markdown(parts, HEAD)
    assert "| naive | 1024 | ok | 2 | 2.5 | 10 | 102400 | 1.5 | 0.25 | – | 0 |" in text
    assert "| naive | 2048 | oom | 79 | 80 | – | – | – | – | – | 1 |" in text
    assert "| naive | 4 | 16 | fp32 | 2048 | oom | 79 | – | – | – | – | – | – | 60 | 12 | 1 |" in text
    steps, alone_rows = (part.tables[1] for part in parts)
    predicted = step_formula(STEPS[0][0]).peak(1024) / GIB
    assert steps.rows[0] == [1024, 128.0, 4 * 4 * 1024**2 / GIB, predicted, 2.0, "may fit"]
    assert [row[-2] for row in steps.rows] == [2.0, None, None]
    first, second, third = alone_rows.rows
    assert first[:4] == [4, 16, "fp32", 1024] and first[7] == 0.5 and first[9] == 1.0
    assert second[7] == 60.0 and second[9] is None  # the backward failed, so its peak memory is left out
    assert third[0] == 8 and third[7] is None
    [must_fail] = step_part([(case("naive", 2**20), Result("oom"))], 80 * GIB, "none").tables[1].rows
    assert must_fail[-1] == "must fail"


def test_the_picture_shows_formula_failures_and_where_naive_must_fail(parts):
    step, attention = (part.picture for part in parts)
    assert [text.get_text() for text in step.axes[0].texts] == ["OOM"]
    # the forward succeeded, but forward and backward together failed
    columns = 2
    assert [len(axes.texts) for axes in attention.axes[::columns]] == [0, 1, 0, 1]
    rows = [(case("naive", n), ok()) for n in (1024, 65536)]
    axes = step_part(rows, 80 * GIB, "none").picture.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1k", "64k"]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["naive must fail from here"].get_xdata()[0] == step_formula(rows[0][0]).fails_at(80 * GIB)
    assert lines["naive, predicted least"].get_ydata()[0] == step_formula(rows[0][0]).peak(1024) / GIB


@pytest.mark.parametrize(
    ("result", "memory", "mfu"),
    [
        pytest.param(Result("oom"), *[["OOM", "no case was measured"]] * 2, id="oom"),
        pytest.param(Result("failed: x"), *[["no case was measured"]] * 2, id="failed"),
        pytest.param(ok(), [], ["unknown on this device"], id="ok"),
    ],
)
def test_a_panel_without_a_point_says_why(result, memory, mfu):
    first, _, last = step_part([(case("naive", 1024), result)], 80 * GIB, "none").picture.axes
    assert [[text.get_text() for text in axes.texts] for axes in (first, last)] == [memory, mfu]


def test_memory_and_optimizer_are_overrides():
    config = configuration(case(overrides=("memory=full", "optimizer=adamw_bf16", "model.vocab_size=300")))
    assert config.memory.checkpointing == "full" and config.optimizer._target_.endswith("adamw_bf16")
    assert config.model.vocab_size == 300


@pytest.mark.parametrize(
    "arguments", [["--seq-lens", "0"], ["--steps", "0"], ["--model", "none"], ["--head-dims", "-1"], ["no-value"]]
)
def test_arguments_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert arguments[-1] in capsys.readouterr().err


def test_a_folder_holds_results_of_one_gpu(tmp_path):
    for gpu in ("H100", "H200"):  # there is no result yet
        require_same_gpu(gpu, tmp_path, has_results=False, key="--out")
    with pytest.raises(ValueError, match=r"^--out must .* results of H100; .*, whose results are of H200$"):
        require_same_gpu("H100", tmp_path, has_results=True, key="--out")


def test_each_shape_differs_from_the_first_in_one_thing():
    arguments = "--n-heads 4 8 --head-dims 16 32 --dtypes bf16 fp32 --attentions naive --attention-seq-lens 64"
    cases = attention_cases(parse_arguments(arguments.split()), "cpu")
    assert [(c.n_heads, c.head_dim, c.dtype) for c in cases] == [
        (4, 16, "bf16"), (8, 16, "bf16"), (4, 32, "bf16"), (4, 16, "fp32")
    ]  # fmt: skip


@pytest.mark.parametrize("sent", [case(), alone()])
def test_a_case_survives_its_file(sent):
    assert case_of(type(sent), json.loads(json.dumps(asdict(sent)))) == sent
