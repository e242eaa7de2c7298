"""Compares kinds of attention in a Hydra multirun of train.py, configured by conf/experiment/ablate_attention.yaml.

run_job runs each job in a new process, so that its memory starts from zero and a crash affects only that job. The
folder jobs/ in the multirun's folder holds the result and the output of each job. At the end of the multirun, Report
writes tables and a picture. The Weights & Biases runs of a multirun form one group, and Report adds a summary run to
this group.
"""

import os
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from fa_train.callbacks.out_of_memory import is_out_of_memory
from fa_train.errors import explain
from fa_train.flops import peak_flops
from fa_train.parallel.failures import signals_to_handle
from scripts.ablation.formula import OPERANDS, sized_model, step_formula
from scripts.ablation.process import ProcessError, call_apart
from scripts.ablation.report import in_order, log_summary, write_files
from scripts.ablation.results import Job, Result, Settings, load, load_settings, remove, save, save_settings, skipped
from scripts.bench.provenance import describe
from scripts.bench.training_case import Device, memory_gib, step_flops

Train = Callable[[DictConfig], dict[str, float]]
# overrides in which the jobs of an ablation may differ
FREE = re.compile(r"(attention|seq_len|logger|trainer\.logger)(=|$)|(logger|sweep_job)\.")


def run_job(train: Train, cfg: DictConfig, timeout: float) -> dict[str, float]:
    """Runs train(cfg) in a new process for at most `timeout` seconds.

    Returns the measured values by name. A job is skipped if the multirun's folder already has the job's result, or if a
    job with the same attention and a smaller seq_len ran out of memory. Ctrl-C and the other signals that end a run end
    the program. The program also ends if the jobs differ in more than attention and seq_len.
    """
    require_one_document(cfg)
    folder = Path(HydraConfig.get().sweep.dir).resolve() / "jobs"
    for signum in signals_to_handle():
        signal.signal(signum, partial(stop, folder.parent))
    folder.mkdir(parents=True, exist_ok=True)
    job, results = Job(cfg.choices.attention, cfg.seq_len), load(folder)
    log = job.path(folder, ".log")
    require_same_settings(cfg, folder, any(result.final for result in results.values()), timeout, log)
    result = results.get(job)
    if result is None or not result.final:
        result = skipped(job, results)
    if result is None:
        result = measured_apart(train, cfg, timeout, log)
    save(job, result, folder)
    numbers = {name: float(x) for name, x in asdict(result).items() if isinstance(x, int | float)}
    print(f"{job.name}: {result.outcome}", *(f"{name}={x:.4g}" for name, x in numbers.items()), sep="  ", flush=True)
    return numbers | ({"oom": 1.0} if result.oom else {})


def stop(folder: Path, signum: int, frame: Any) -> NoReturn:
    """A signal handler that ends the program. `call_apart` then kills the running job."""
    line = f"stopped; run the same command with hydra.sweep.dir={folder} to continue\n"
    os.write(2, line.encode())  # print is not safe in a signal handler
    sys.exit(128 + signum)


def require_one_document(cfg: DictConfig) -> None:
    """Checks that a row is one document, because the FLOPs and the minimum memory are computed for such rows.

    Raises: ValueError if the job has several documents per row, documents of varying length, several rows per
    micro-batch, several devices, an adapter, or an unsupported precision.
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
    if cfg.trainer.precision not in OPERANDS:
        raise ValueError(f"trainer.precision must be one of {', '.join(OPERANDS)}; got {cfg.trainer.precision}")
    if cfg.choices.adapter != "none":  # the formulas assume that all weights are trained
        raise ValueError(f"an ablation needs adapter=none; got {cfg.choices.adapter}")


def require_same_settings(cfg: DictConfig, folder: Path, has_results: bool, timeout: float, log: Path) -> None:
    """Ends the program if a job has other settings than the earlier jobs in the multirun's folder, or another GPU.

    Without this check, one table could mix results of different settings. If the folder has no results of completed
    jobs, the first job writes its settings to the folder. It also prints the minimum memory of naive attention.
    """
    hydra = HydraConfig.get()
    is_first, earlier = hydra.job.num == 0, load_settings(folder)
    own = sorted({override for override in hydra.overrides.task if not FREE.match(override.lstrip("+~"))})
    if is_first or earlier is None:
        try:
            settings = settings_of(cfg, own, timeout, log)
        except (ProcessError, ValueError, HydraException) as error:
            sys.exit(f"error: {explain(error)}")
        print(settings.explanation, flush=True)
        if not has_results:
            remove(folder)  # failed results can be of other settings
        if not has_results or earlier is None:
            save_settings(settings, folder)
            return
        if settings.gpu != earlier.gpu:
            sys.exit(
                f"error: hydra.sweep.dir must be a folder with results of {settings.gpu}; got {folder.parent}, whose "
                f"results are of {earlier.gpu}"
            )
    if own != earlier.overrides:
        got = " ".join(sorted({*own} - {*earlier.overrides})) or "no override"
        others = " ".join(sorted({*earlier.overrides} - {*own})) or "no override"
        sys.exit(
            f"error: an ablation's jobs may differ in attention and seq_len only; got {got}, but {others} in the "
            f"earlier jobs in {folder}. Choose another hydra.sweep.dir"
        )


def settings_of(cfg: DictConfig, overrides: list[str], timeout: float, log: Path) -> Settings:
    """Returns the settings that the job shares with the other jobs.

    Another process asks for the GPU's memory, because a CUDA context in this process would leave less GPU memory for
    the jobs.
    """
    choices = cfg.choices
    title = [choices.model, cfg.trainer.precision, f"memory={choices.memory}", f"optimizer={choices.optimizer}"]
    title += ["compiled"] if cfg.lit_gpt.compile_model else []
    gpu, device_bytes = call_apart(gpu_and_memory, (device_of(cfg),), timeout, log)
    return Settings(overrides, ", ".join(title), gpu, device_bytes, step_formula(cfg))


def device_of(cfg: DictConfig) -> Device:
    return "cuda" if torch.cuda.is_available() and cfg.trainer.accelerator != "cpu" else "cpu"


def gpu_and_memory(device: Device) -> tuple[str, int]:
    """Returns the name of the GPU, or "no GPU", and the memory limit of a job in bytes."""
    if device == "cuda":
        return torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "no GPU", installed if limit == resource.RLIM_INFINITY else min(installed, limit)


def measured_apart(train: Train, cfg: DictConfig, timeout: float, log: Path) -> Result:
    """Runs `measure` in a new process. If the process fails, the result gives the reason."""
    try:
        return call_apart(measure, (train, cfg, HydraConfig.instance().cfg, device_of(cfg)), timeout, log)
    except ProcessError as error:
        if error.exitcode == -signal.SIGKILL:  # The Linux OOM killer uses SIGKILL when host memory is exhausted.
            return Result("oom")
        return Result(f"failed: {error}")


def measure(train: Train, cfg: DictConfig, hydra: Any, device: Device) -> Result:
    """Trains in the current process and returns the result. The step time is the median over all log entries.

    The FLOPs and the MFU are computed as in fa_train/flops.py, without recomputation. On a CPU, the peak memory is that
    of the whole process.
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
        return Result("oom", *memory_gib(torch.device(device)))
    tokens_per_s = measured["perf/tokens_per_s"]
    step_ms = cfg.batch_size * cfg.seq_len / tokens_per_s * 1e3
    flops_per_s = step_flops(sized_model(cfg), [cfg.seq_len] * cfg.batch_size) / step_ms * 1e3
    peak = peak_flops(torch.cuda.get_device_name() if device == "cuda" else "", OPERANDS[cfg.trainer.precision])
    return Result(
        "ok",
        *memory_gib(torch.device(device)),
        step_ms=step_ms,
        tokens_per_s=tokens_per_s,
        tflops=flops_per_s * 1e-12,
        mfu=flops_per_s / peak if peak else None,
        timed_steps=cfg.max_steps,
    )


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
    folder = Path(config.hydra.sweep.dir).resolve()
    settings, rows = load_settings(folder / "jobs"), in_order(load(folder / "jobs"))
    if settings is None or not rows:
        sys.exit(f"error: no job has a result in {folder / 'jobs'}")
    head = describe("train.py", None)
    write_files(rows, settings, head, folder)
    logger, is_replaced = config.logger, isinstance(config.trainer.logger, bool | None)
    if config.choices.logger == "wandb" and not is_replaced:
        given = "offline" if logger.get("offline") else logger.mode
        mode = given if isinstance(given, str) else instantiate(given)
        names = {"entity": logger.get("entity"), "project": logger.project, "group": logger.group}
        log_summary(rows, settings, head, folder, mode=mode, **names)
    print(f"results: {folder}")
    if failed := [job.name for job, result in rows if result.outcome.startswith("failed")]:
        sys.exit(
            f"error: {len(failed)} of {len(rows)} jobs failed ({', '.join(failed)}); see the logs in {folder / 'jobs'}"
        )
