"""Runs the attention ablation as a Hydra multirun of train.py, configured by conf/experiment/ablate_attention.yaml.

run_job runs each job in a new process, so that its memory starts from zero and a crash affects only that job. At the
end of the multirun, Report writes the files that scripts/ablate_memory.py would write. The Weights & Biases runs of a
multirun form one group, and Report adds a summary run to this group.
"""

import json
import math
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from fa_train.callbacks.out_of_memory import is_out_of_memory
from scripts.ablation.cases import Device, Precision, Result, StepCase, capacity, configuration, finished
from scripts.ablation.formula import step_formula
from scripts.ablation.report import Records, Row, step_part, write_files
from scripts.ablation.sweep import ProcessError, apart, call_apart, load, require_same_gpu, save, skipped
from scripts.bench.provenance import describe
from scripts.bench.training_case import memory_gib, step_flops

Train = Callable[[DictConfig], dict[str, float]]
# overrides in which the jobs of an ablation may differ
FREE = re.compile(r"(attention|seq_len|logger|trainer\.logger)(=|$)|(logger|sweep_job)\.")
OF_THE_MODEL = ("model.", "attention.", "memory.", "optimizer.")  # prefixes of the overrides that a StepCase keeps


def run_job(train: Train, cfg: DictConfig, timeout: float) -> dict[str, float]:
    """Runs train(cfg) in a new process for at most `timeout` seconds.

    The output of the job goes to cases/<number>.log in the multirun's folder.

    Returns the measured values by name. A job is skipped if the multirun's folder already has the job's result, or if a
    job with the same attention and a smaller seq_len ran out of memory. Ends the program on Ctrl-C, or if the jobs
    differ in more than attention and seq_len.
    """
    hydra = HydraConfig.get()
    folder, number = Path(hydra.sweep.dir).resolve() / "cases", f"{hydra.job.num:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number}.jsonl"
    case = case_of(cfg)
    no_result_yet = not any(result.final for _, result in rows(folder))
    require_same_settings(hydra.overrides.task, folder / "settings.json", no_result_yet)
    others = rows(folder, but=path)
    require_one_sweep(case, others)
    log = folder / f"{number}.log"
    if hydra.job.num == 0:
        try:
            gpu = call_apart(torch.cuda.get_device_name, (), timeout, log) if case.device == "cuda" else "no GPU"
            require_same_gpu(gpu, folder, has_results=not no_result_yet, key="hydra.sweep.dir")
            print(call_apart(explanation, (case,), timeout, log), flush=True)
        except (ProcessError, ValueError) as error:
            sys.exit(f"error: {error}")
    result = skipped(case, others) or load(path).get(case)
    if result is None or not result.final:
        try:
            result = apart(measure_job, (train, cfg, HydraConfig.instance().cfg, case), timeout, log)
        except KeyboardInterrupt:
            print(f"stopped; run the same command with hydra.sweep.dir={folder.parent} to continue", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
    save({case: result}, path)
    numbers = {name: float(x) for name, x in asdict(result).items() if isinstance(x, int | float)}
    print(f"{case.name}: {result.outcome}", *(f"{name}={x:.4g}" for name, x in numbers.items()), sep="  ", flush=True)
    return numbers | ({"oom": 1.0} if result.oom else {})


def rows(folder: Path, but: Path | None = None) -> list[Row[StepCase]]:
    """Returns the finished jobs in the order of the multirun."""
    paths = [path for path in sorted(folder.glob("*.jsonl")) if path != but]
    return [(case, result) for path in paths for case, result in load(path).items() if isinstance(case, StepCase)]


def require_one_sweep(case: StepCase, others: list[Row[StepCase]]) -> None:
    """Ends the program if a job differs from the other jobs in more than attention and seq_len.

    The tables and pictures distinguish jobs only by attention and seq_len.
    """
    for other, _ in others:
        same_place = (case.attention, case.seq_len) == (other.attention, other.seq_len)
        if same_place or replace(other, attention=case.attention, seq_len=case.seq_len) != case:
            sys.exit(f"error: an ablation's jobs may differ in attention and seq_len only; got {case} and {other}")


def require_same_settings(overrides: Sequence[str], path: Path, no_result_yet: bool) -> None:
    """Ends the program if the overrides of a job differ from those of the earlier jobs in the multirun's folder.

    A StepCase does not hold all settings, so without this check, one table could mix results of different settings.
    overrides: the job's overrides; those that match `FREE` are not compared. path: the file with the compared overrides
    of the first job. no_result_yet: true if no job in the folder has a final result.
    """
    own = sorted({override for override in overrides if not FREE.match(override.lstrip("+~"))})
    if no_result_yet or not path.exists():
        path.write_text(json.dumps(own) + "\n", encoding="utf-8")
    first = json.loads(path.read_text(encoding="utf-8"))
    if own != first:
        got, earlier = (" ".join(sorted({*x} - {*y})) or "no override" for x, y in ((own, first), (first, own)))
        sys.exit(
            f"error: an ablation's jobs may differ in attention and seq_len only; got {got}, but {earlier} in the "
            f"earlier jobs in {path.parent}. Choose another hydra.sweep.dir"
        )


def case_of(cfg: DictConfig) -> StepCase:
    """Converts the config of a job to a StepCase.

    Raises: ValueError if the job has several documents per row, documents of varying length, several rows per
    micro-batch, several devices, an adapter, or an unsupported precision. The FLOPs of a step and the minimum memory
    are computed for rows that consist of one document.
    """
    wanted = {
        "data.document_len": cfg.seq_len,
        "data.length_sigma": 0,
        "data.micro_batch_size": 1,
        "trainer.devices": 1,
    }
    for name, value in wanted.items():
        if OmegaConf.select(cfg, name) != value:
            raise ValueError(f"an ablation needs {name}={value}; got {OmegaConf.select(cfg, name)}")
    if cfg.trainer.precision not in get_args(Precision):
        raise ValueError(
            f"trainer.precision must be one of {', '.join(get_args(Precision))}; got {cfg.trainer.precision}"
        )
    hydra = HydraConfig.get()
    choices: dict[str, Any] = hydra.runtime.choices
    if choices["adapter"] != "none":  # the formulas assume that all weights are trained
        raise ValueError(f"an ablation needs adapter=none; got {choices['adapter']}")
    overrides = [f"{group}={choices[group]}" for group in ("memory", "optimizer")]
    overrides += [f"model.vocab_size={cfg.model.vocab_size or cfg.data.vocab_size}"]
    overrides += [x for x in hydra.overrides.task if x.lstrip("+").startswith(OF_THE_MODEL)]
    device: Device = "cuda" if torch.cuda.is_available() and cfg.trainer.accelerator != "cpu" else "cpu"
    return StepCase(
        choices["model"], choices["attention"], cfg.seq_len, device, cfg.trainer.precision, cfg.max_steps, math.inf,
        tuple(overrides), cfg.lit_gpt.compile_model,
    )  # fmt: skip


def explanation(case: StepCase) -> str:
    """Returns a text about the minimum memory of naive attention. If case.device is "cuda", creates a CUDA context."""
    return step_formula(case).explain(f"a training step of {case.model}", capacity(case.device))


def measure_job(train: Train, cfg: DictConfig, hydra: Any, case: StepCase) -> Result:
    """Trains in the current process and returns the result.

    The step time is the median over all log entries.
    """
    setup_globals()
    HydraConfig.instance().cfg = hydra
    try:
        measured = train(cfg)
    except Exception as error:  # if memory runs out in trainer.fit, `train` returns oom=1 and does not raise
        if not is_out_of_memory(error):
            raise
        measured = {"oom": 1.0}
    if "oom" in measured:
        return Result("oom", *memory_gib(torch.device(case.device)))
    tokens_per_s = measured["perf/tokens_per_s"]
    step_ms = cfg.batch_size * case.seq_len / tokens_per_s * 1e3
    flops = step_flops(configuration(case).model, [case.seq_len] * cfg.batch_size)
    return replace(finished(case, step_ms, cfg.max_steps, flops), tokens_per_s=tokens_per_s)


class Report(Callback):
    """A Hydra callback that writes the report at the end of a multirun."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            report(config)
        except Exception:  # without this handler, Hydra would print a warning and continue
            traceback.print_exc()
            sys.exit(1)


def report(config: DictConfig) -> None:
    """Writes all results, and ends the program with status 1 if a job failed."""
    HydraConfig.instance().set_config(config)  # the logger needs Hydra's config, which the last job has removed
    GlobalHydra.instance().clear()  # step_formula initialises Hydra again to compose a config
    folder = Path(config.hydra.sweep.dir).resolve()
    jobs = rows(folder / "cases")
    device_bytes = call_apart(capacity, (jobs[0][0].device,), 60, folder / "cases" / "capacity.log")
    head = describe("train.py", None)
    parts = [step_part(jobs, device_bytes, head["GPU"])]
    write_files(parts, head, folder)
    logger, is_replaced = config.logger, isinstance(config.trainer.logger, bool | None)
    if config.choices.logger == "wandb" and not is_replaced:
        given = "offline" if logger.get("offline") else logger.mode
        mode = given if isinstance(given, str) else instantiate(given)
        Records(mode, logger.project, logger.group, folder, logger.get("entity")).summary(parts, head)
    print(f"results: {folder}")
    if failed := [case.name for case, result in jobs if result.outcome.startswith("failed")]:
        sys.exit(
            f"error: {len(failed)} of {len(jobs)} jobs failed ({', '.join(failed)}); see the logs in {folder / 'cases'}"
        )
