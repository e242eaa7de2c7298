"""A case of scripts.bench.step or scripts.bench.memory: a short training run in a new process.

`python -m scripts.bench.case_process MODULE CASE` calls the function `measure` of MODULE. CASE is a Case in JSON. The
last line of the output is the result in JSON.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from omegaconf import DictConfig

import train  # registers the resolvers of conf/train.yaml
from fa_train.config_options import options
from scripts.bench.command_line import REPOSITORY, require_overrides, require_positive, sigterm_raises
from scripts.bench.timing import require_gpu
from scripts.bench.training_case import FEWEST_STEPS, WARMUP, Device, training_config


@dataclass(frozen=True)
class Case:
    """The settings of one case. name: a variant of scripts.bench.step, or a combination of scripts.bench.memory."""

    model: str
    seq_len: int  # tokens
    name: str
    device: Device
    attention: str  # attention of our model
    steps: int  # number of timed steps
    slow_step: float  # if the second step takes more seconds than this, at most `FEWEST_STEPS` steps are timed
    overrides: tuple[str, ...] = ()

    def config(self, *chosen: str) -> DictConfig:
        """Composes conf/train.yaml for this case, as train.py does. chosen: the overrides that `name` stands for."""
        overrides = (*chosen, *self.overrides)
        return training_config(self.model, self.attention, self.seq_len, WARMUP + self.steps, self.device, overrides)


def add_case_options(parser: argparse.ArgumentParser, seq_lens: Sequence[int]) -> None:
    """Adds the options from which `case_of` makes a case. seq_lens: the default of --seq-lens."""
    parser.add_argument("--model", choices=options("model"), default="llama_1b")
    parser.add_argument("--seq-lens", type=int, nargs="+", default=list(seq_lens), help="tokens")
    parser.add_argument(
        "--attention",
        choices=options("attention"),
        help="attention of our model; default: flash on a GPU, sdpa on the CPU",
    )
    parser.add_argument("--steps", type=int, default=5, help=f"timed steps of a case, after {WARMUP} others")
    parser.add_argument(
        "--slow-step", type=float, default=6, help=f"only {FEWEST_STEPS} steps are timed if a step takes more seconds"
    )
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU; large models take hours")


def check_case_options(parser: argparse.ArgumentParser, args: argparse.Namespace, overrides: str = "overrides") -> None:
    """Sets the default of --attention. Ends the program with a message if an option is wrong.

    overrides: the name of the option with overrides.
    """
    args.attention = args.attention or ("sdpa" if args.cpu else "flash")
    require_positive(parser, args, ("steps", "slow_step", "timeout", "seq_lens"))
    require_overrides(parser, args.overrides, overrides)


def require_device(args: argparse.Namespace, script: str) -> None:
    """Ends the script if it needs a GPU and there is none. Also makes SIGTERM end the processes of cases."""
    if not args.cpu:
        require_gpu(script, "--cpu measures on the CPU")
    sigterm_raises()


def case_of(args: argparse.Namespace, seq_len: int, name: str, *chosen: str) -> Case:
    """Returns a case with the settings of the command line. `chosen` comes before its overrides."""
    device: Device = "cpu" if args.cpu else "cuda"
    overrides = (*chosen, *args.overrides)
    return Case(args.model, seq_len, name, device, args.attention, args.steps, args.slow_step, overrides)


def result_of(module: str, case: Case, timeout: float, **environment: str) -> dict[str, Any]:
    """Runs a case in a new process, and returns the result of `module`.measure as a dict.

    environment: additional environment variables for the process.
    Raises: subprocess.TimeoutExpired if the process takes longer than `timeout` seconds. MemoryError if Linux killed
    the process. RuntimeError with the reason if the process failed otherwise.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.bench.case_process", module, json.dumps(asdict(case))],
        cwd=REPOSITORY,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # also ends the compiler processes that the case has started
        process.communicate()
        raise
    if process.returncode == -signal.SIGKILL:  # The Linux OOM killer uses SIGKILL when host memory is exhausted.
        raise MemoryError(f"{module} was killed")
    if process.returncode:
        print(errors, file=sys.stderr)
        last_line = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise RuntimeError(last_line.removeprefix("error: "))
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def main() -> None:
    module, settings = sys.argv[1:]
    case = json.loads(settings)
    with train.errors_in_one_line(train.MISTAKES):
        row = import_module(module).measure(Case(**case | {"overrides": tuple(case["overrides"])}))
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
