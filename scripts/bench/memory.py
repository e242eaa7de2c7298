"""Measures the cost of each memory lever, alone and combined: time per step, GPU memory and host memory.

    python -m scripts.bench.memory                                           # llama_1b at 32k and 131k, one GPU.
    python -m scripts.bench.memory --seq-lens 32768 --combinations selective selective+offload  # 32k only.
    python -m scripts.bench.memory --budget 560 --resume             # continue an earlier call.

Each measurement runs train.py's loop in a new process, on documents of seq_len random tokens
(scripts/bench/training_case.py). Times are host times, with a device sync before and after the optimizer. The
optimizer's time includes gradient clipping. Peak memory is the CUDA allocator's maximum over all steps. Host memory
counts only offloaded activations and the tensors of an offloaded optimizer.

A combination is CHECKPOINTING[+LEVER...]. CHECKPOINTING is `none`, `selective` or `full`. LEVER is `offload`,
`mlp_chunk[=TOKENS]`, `loss_chunk=TOKENS`, `loss_chunk=all`, `bf16-true` or the name of an optimizer in conf/optimizer.
The default loss_chunk is 4096 tokens, as in conf/memory. The default precision is bf16-mixed, or fp32 on a CPU.
Combinations with bf16-true, or with an optimizer other than adamw, run only at the first length in --seq-lens. The time
of the optimizer does not depend on the number of tokens.

After every measurement, the script writes memory.md and memory.json to the folder OUT. To see whether offload's copies
run at the same time as kernels, profile a step with scripts/bench/profile_step.py.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from torch.optim import Optimizer

import train
from fa_train.callbacks.monitor import GIB
from fa_train.callbacks.out_of_memory import is_out_of_memory
from fa_train.lit_gpt import LitGPT
from fa_train.memory.offload import Offload
from scripts.bench.case_process import Case, add_case_options, case_of, check_case_options, require_device, result_of
from scripts.bench.command_line import REPOSITORY, add_results, add_time_limits, require_positive
from scripts.bench.memory_cases import COMBINATIONS, SEQ_LENS, Row, levers_of
from scripts.bench.memory_report import cells, markdown
from scripts.bench.provenance import describe
from scripts.bench.training_case import StepTimes, memory_gib, wait
from scripts.bench.training_case import measure as measure_ours


def configuration(case: Case) -> DictConfig:
    """Composes conf/train.yaml for this case, as train.py does."""
    levers = levers_of(case.name)
    return case.config(
        f"optimizer={levers.optimizer}",
        f"memory.checkpointing={levers.checkpointing}",
        f"memory.offload={str(levers.offload).lower()}",
        f"memory.mlp_chunk={'null' if levers.mlp_chunk is None else levers.mlp_chunk}",
        f"memory.loss.chunk_size={case.seq_len if levers.loss_chunk is None else levers.loss_chunk}",
        *(["trainer.precision=bf16-true"] if levers.precision == "bf16-true" else []),
    )


def measure(case: Case) -> Row:
    """Runs the case in this process and returns its row.

    If the case runs out of memory, the outcome is "out of memory".
    """
    torch.manual_seed(0)
    config, device = configuration(case), torch.device(case.device)
    times, recorder = StepTimes(case.steps, case.slow_step), OptimizerRecorder()
    try:
        measure_ours(config, device, times, [recorder])
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return Row(case.seq_len, case.name, "out of memory", peak_gib=memory_gib(device)[0])
    return Row(
        case.seq_len,
        case.name,
        "ok",
        times.milliseconds,
        recorder.milliseconds[times.warmup :],
        memory_gib(device)[0],
        recorder.host_bytes / GIB,
        times.losses[-1],
    )


class OptimizerRecorder(Callback):
    """Records the milliseconds of clipping and optimizer in each step, and the host memory at the end of training."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.host_bytes = 0

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        wait(pl_module.device)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        wait(pl_module.device)
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.milliseconds.append((time.perf_counter() - self._start) * 1e3)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, LitGPT)
        self.host_bytes = host_bytes(pl_module.model.offload, trainer.optimizers[0])


def host_bytes(offload: Offload | None, optimizer: Optimizer) -> int:
    """Returns the bytes of host memory that memory.offload and optimizer=adamw_offload hold between steps."""
    found = 0
    if offload is not None and offload.pool is not None:
        found += sum(buffer.numel() for buffer in offload.pool.free)
    for on_host in getattr(optimizer, "param_d2h_map", {}).values():
        found += on_host.nbytes + on_host.grad.nbytes
    for of_parameter in getattr(optimizer, "optim_dict", {}).values():
        for state in of_parameter.state.values():
            found += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return found


def run_apart(case: Case, timeout: float) -> Row:
    """Runs the case in a new process.

    Raises: subprocess.TimeoutExpired if the process takes longer than `timeout` seconds.
    """
    try:
        return Row(**result_of("scripts.bench.memory", case, timeout))
    except MemoryError:
        return Row(case.seq_len, case.name, "out of memory")
    except RuntimeError as error:
        return Row(case.seq_len, case.name, f"failed: {error}")


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Returns all cases to measure."""
    names = list(dict.fromkeys(levers_of(name).name for name in args.combinations))
    at_one = [name for name in names if levers_of(name).without("optimizer") or "bf16-true" in name]
    chosen = [(seq_len, name) for seq_len in args.seq_lens for name in names if name not in at_one]
    chosen += [(args.seq_lens[0], name) for name in at_one]
    compiled = f"lit_gpt.compile_model={str(args.compile).lower()}"
    return [case_of(args, seq_len, name, compiled) for seq_len, name in chosen]


def read_results(path: Path, head: dict[str, str]) -> list[Row]:
    """Reads the rows that an earlier call wrote.

    Raises: ValueError if the settings of the earlier call differ from those of this call.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    for key in ("commit", "GPU", "versions", "settings"):
        if found["head"][key] != head[key]:
            raise ValueError(f"--resume needs the same {key} as {path}, {found['head'][key]}; got {head[key]}")
    return [Row(**row) for row in found["rows"]]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--overrides", nargs="+", default=[], metavar="NAME=VALUE", help="Hydra overrides of conf/train.yaml"
    )
    add_case_options(parser, SEQ_LENS)
    parser.add_argument("--combinations", nargs="+", default=list(COMBINATIONS))
    parser.add_argument("--compile", action="store_true", help="use torch.compile for each block, as preset=gpu does")
    parser.add_argument("--resume", action="store_true", help="measure only what is missing in OUT")
    add_time_limits(parser, timeout=300, budget=True)
    add_results(parser, REPOSITORY / "runs" / "bench_memory", kind="folder")
    args = parser.parse_args(arguments)
    check_case_options(parser, args, "--overrides")
    require_positive(parser, args, ["budget"])
    try:
        for name in args.combinations:
            levers_of(name)
    except ValueError as error:
        parser.error(str(error))
    return args


def run(args: argparse.Namespace, head: dict[str, str]) -> None:
    """Runs measurements until the time budget is spent."""
    begin, out = time.monotonic(), args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = read_results(out / "memory.json", head) if args.resume else []
    left: list[str] = []

    def write() -> None:
        found = {"head": head, "rows": [asdict(row) for row in rows]}
        (out / "memory.json").write_text(json.dumps(found, indent=1) + "\n")
        (out / "memory.md").write_text(markdown(rows, left, head), encoding="utf-8")

    def take(case: Case) -> None:
        remaining = args.budget - (time.monotonic() - begin)
        limit = min(args.timeout, remaining)
        try:
            if remaining <= 0:
                raise subprocess.TimeoutExpired(case.name, remaining)
            row = run_apart(case, limit)
        except subprocess.TimeoutExpired:
            if limit == remaining:
                left.append(f"{case.name} at {case.seq_len:,}")
                return
            row = Row(case.seq_len, case.name, f"failed: timed out after {limit:g} s")
        rows.append(row)
        print(" | ".join(cells(row)), flush=True)
        write()

    measured = {(row.seq_len, row.combination) for row in rows}
    for case in cases_of(args):
        if (case.seq_len, case.name) not in measured:
            take(case)
    write()
    print(f"results: {out}")


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    require_device(args, "scripts.bench.memory")
    head = describe("-m scripts.bench.memory", args.commit)
    precision = "fp32" if args.cpu else "bf16-mixed (fp32 weights, bf16 autocast)"
    compiled = "compiled" if args.compile else "not compiled"
    head["settings"] = ", ".join([args.model, precision, f"attention={args.attention}", compiled, *args.overrides])
    with train.errors_in_one_line(train.MISTAKES):
        for case in cases_of(args)[:1]:
            configuration(case)
        run(args, head)


if __name__ == "__main__":
    main()
