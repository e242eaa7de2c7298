"""Runs users' commands on one or two GPUs, and checks their exit statuses and messages.

    python -m tests.gpu_check.commands                # all commands; up to 8 one-GPU commands run at the same time.
    python -m tests.gpu_check.commands --only lora    # commands whose names contain this text.

CI has no GPU. This program can find what the tests of CI cannot see. For example, LLVM replaces signal handlers when
Triton compiles a kernel in the process of a run. Some commands therefore get a signal when they have printed a text.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.bench.timing import require_gpu
from tests.data.support.chats import many_chats, save_tokenizer, write_jsonl

ROOT = Path(__file__).parents[2]
LIMIT = 240  # seconds for all command lines of a Command together


@dataclass(frozen=True)
class Command:
    """Command lines that run one after another, until one fails.

    In the lines, `{out}` is the command's folder. `{base}`, `{chats}` and `{cache}` are paths from `write_data`.
    """

    name: str
    lines: tuple[str, ...]
    status: int = 0  # the exit status of the last line that ran
    says: str = ""  # a text that the command must print
    stop: tuple[str, int] | None = None  # (text, signal): a signal for the first line when it has printed the text
    gpus: int = 1


RUN = "python train.py logger=csv trainer.log_every_n_steps=1 hydra.run.dir={out}/run"
GPT2 = f"{RUN} preset=gpu seq_len=4096 batch_size=2 scheduler.warmup_steps=2 data.val_rows=2 data.cache_dir={{cache}}"
LLAMA = f"{RUN} model=llama_1b data=synthetic trainer.precision=bf16-true batch_size=1 max_steps=2"
CHATS = (
    f"{RUN} experiment=finetune data.path={{chats}} model.pretrained={{base}} seq_len=256 batch_size=4 data.val_rows=2"
    " max_steps=8 data.cache_dir={cache}"
)
SAVED_TEXT = "resumes from it"
PRECISION_OF_OPTIMIZER = {
    "adamw": "trainer.precision=bf16-mixed",
    "adamw_8bit": "trainer.precision=bf16-mixed",
    "adamw_offload": "trainer.precision=bf16-mixed",
    "adamw_bf16": "trainer.precision=bf16-true",
    "adamw_master": "trainer.precision=bf16-true",
}


def checkpoint_of(step: int) -> str:
    """Returns the path of the checkpoint of a step."""
    return f"{{out}}/run/checkpoints/step_{step:07d}.ckpt"


def resumed(line: str, alone: bool = False) -> tuple[str, str]:
    """Returns two lines. The first trains 8 steps. The second goes on to step 12, on one GPU if `alone` is true."""
    rest = line.split(" trainer.devices=")[0] if alone else line
    return f"{line} max_steps=8", f"{rest} max_steps=12 ckpt_path={checkpoint_of(8)}"


def stopped(name: str, line: str, number: signal.Signals, gpus: int = 1) -> Command:
    return Command(name, (f"{line} max_steps=100000",), 128 + number, SAVED_TEXT, ("step 6/", number), gpus)


ONE_GPU = [
    *(stopped(number.name, GPT2, number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)),
    Command("no-step", (f"{GPT2} max_steps=9",), 130, "no checkpoint was saved", ("validation:", signal.SIGINT)),
    *(
        Command(name, resumed(f"{GPT2} optimizer={name} {precision}"))
        for name, precision in PRECISION_OF_OPTIMIZER.items()
    ),
    Command("fp32", (f"{GPT2} trainer.precision=32-true max_steps=6",)),
    Command("float8", (f"{GPT2} lit_gpt.float8=tensorwise max_steps=6",)),
    Command("accumulates", (f"{GPT2} batch_size=8 data.micro_batch_size=2 max_steps=6 trainer.val_check_interval=3",)),
    Command("z-loss", (f"{GPT2} memory.loss.z_loss=1e-4 memory.loss.label_smoothing=0.1 max_steps=6",)),
    Command("wandb", (f"{GPT2.replace('logger=csv', 'logger=wandb')} max_steps=6",)),
    Command("tensorboard", (f"{GPT2.replace('logger=csv', 'logger=tensorboard')} max_steps=6",)),
    Command(
        "text",
        (
            f"{GPT2} data=text data.path=docs max_steps=6",
            f"python -m scripts.generate {checkpoint_of(6)} --prompt def --max-new-tokens 9",
            f"python -m scripts.export_hf {checkpoint_of(6)} {{out}}/exported",
            "python -m scripts.generate {out}/exported --prompt def --max-new-tokens 9 --temperature 0.8",
        ),
    ),
    Command(
        "sweep",
        (
            GPT2.replace("train.py", "train.py -m").replace("hydra.run.dir={out}/run", "hydra.sweep.dir={out}/sweep")
            + " attention=naive,flash max_steps=4",
        ),
    ),
    *(
        Command(
            f"finetune-{name}",
            (f"{CHATS} {settings} export=true", "python -m scripts.generate {out}/run/exported --chat hi"),
        )
        for name, settings in (
            ("full", "lit_gpt.compile_model=true"),
            ("lora", "adapter=lora"),
            ("qlora", "adapter=qlora"),
        )
    ),
    *(
        Command(f"memory-{name}", (f"{LLAMA} memory={name} model.n_layers=2 seq_len=8192 lit_gpt.compile_model=true",))
        for name in ("auto", "selective", "full", "offload", "offload_all")
    ),
    Command("too-long", (f"{LLAMA} seq_len=64000000 memory=auto",), 1, "error: memory=auto found no memory settings"),
    Command("naive", (f"{LLAMA} seq_len=131072 attention=naive model.n_layers=1",), 1, "Try attention=flash"),
    Command("plan", ("python -m scripts.plan_memory model=llama_1b seq_len=131072 memory=selective",), 0, "fits: "),
    Command(
        "profile",
        (
            "python -m scripts.bench.profile_step preset=gpu seq_len=4096 logger=csv +commit=none"
            " hydra.run.dir={out}/run",
        ),
    ),
]
DDP, FSDP = (f"{GPT2} trainer.devices=2 strategy={strategy}" for strategy in ("ddp", "fsdp"))
CONTEXT = f"{FSDP} strategy.context=2"
TWO_GPUS = [
    *(stopped(f"ddp-{x.name}", DDP, x, 2) for x in (signal.SIGINT, signal.SIGUSR1)),
    *(stopped(f"fsdp-{x.name}", FSDP, x, 2) for x in (signal.SIGTERM, signal.SIGUSR1)),
    Command("ddp-resumed-on-one", resumed(DDP, alone=True), gpus=2),
    Command("context-resumed-on-one", resumed(CONTEXT, alone=True), gpus=2),
    Command("fsdp-lora", (f"{CHATS} adapter=lora trainer.devices=2 strategy=fsdp export=true",), gpus=2),
    Command(
        "context-finetune",
        (f"{CHATS} trainer.devices=2 strategy=fsdp strategy.context=2 export=true",),
        says="sample after 8 steps",
        gpus=2,
    ),
    Command(
        "ddp-naive",
        (f"{LLAMA} seq_len=131072 attention=naive model.n_layers=1 trainer.devices=2 batch_size=2",),
        1,
        "Try attention=flash",
        gpus=2,
    ),
]


def write_data(folder: Path) -> dict[str, str]:
    """Writes chats and a small model of random weights, and returns their paths and that of a cache by name."""
    save_tokenizer(folder / "base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    write_jsonl(folder / "chats.jsonl", many_chats(400))
    places = {"base": "base", "chats": "chats.jsonl", "cache": "cache"}
    return {name: str(folder / place) for name, place in places.items()}


def failure_of(command: Command, data: dict[str, str], folder: Path, gpus: str) -> str:
    """Runs a command and returns how it differs from what is expected, or "" if it does not differ.

    gpus: the value of CUDA_VISIBLE_DEVICES.
    """
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1"}
    end, sent = time.monotonic() + LIMIT, command.stop is None
    status = 0
    for line in command.lines:
        arguments = shlex.split(line.format(out=folder, **data))
        with log.open("a") as file:
            print(f"$ {shlex.join(arguments)}", file=file, flush=True)
            process = subprocess.Popen(
                [sys.executable if arguments[0] == "python" else arguments[0], *arguments[1:]],
                stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        while process.poll() is None:
            time.sleep(0.2)
            if command.stop is not None and not sent and command.stop[0] in log.read_text(errors="replace"):
                process.send_signal(command.stop[1])
                sent = True
            if time.monotonic() > end:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"did not end within {LIMIT} s"
        status = process.returncode
        if status:
            break
    printed = log.read_text(errors="replace")
    if status != command.status:
        return f"exit status {status} instead of {command.status}; the last line: {printed.strip().splitlines()[-1]}"
    return "" if command.says in printed else f"did not print: {command.says}"


def run_all(commands: Sequence[Command], n_gpus: int, jobs: int, folder: Path) -> Iterator[tuple[Command, str]]:
    """Yields each command and its failure, or "", as soon as it has ended.

    jobs: the largest number of one-GPU commands that run at the same time, on all GPUs together. At the same time,
    max(jobs // 3, 1) two-GPU commands can run.
    """
    data = write_data(folder / "data")
    one_gpu = cycle(map(str, range(n_gpus)))
    running: dict[Future[str], Command] = {}
    with ThreadPoolExecutor(jobs) as alone, ThreadPoolExecutor(max(jobs // 3, 1)) as together:
        for command in commands:
            gpus, pool = (next(one_gpu), alone) if command.gpus == 1 else ("0,1", together)
            running[pool.submit(failure_of, command, data, folder / command.name, gpus)] = command
        for done in as_completed(running):
            yield running[done], done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the commands whose names contain this text")
    parser.add_argument("--jobs", type=int, default=8, help="the number of one-GPU commands that run at the same time")
    parser.add_argument("--out", type=Path, help="a new folder for the logs; default: a temporary folder")
    arguments = parser.parse_args()
    require_gpu("tests.gpu_check.commands")
    n_gpus = torch.cuda.device_count()
    chosen = [x for x in (*TWO_GPUS, *ONE_GPU) if arguments.only in x.name and x.gpus <= n_gpus]
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="commands-"))
    began, n_failed = time.monotonic(), 0
    for command, failure in run_all(chosen, n_gpus, arguments.jobs, folder):
        n_failed += bool(failure)
        print(f"{'FAILED' if failure else 'passed'} {command.name}{failure and f': {failure}'}", flush=True)
    print(f"{len(chosen) - n_failed} of {len(chosen)} passed in {time.monotonic() - began:.0f} s; logs: {folder}")
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
