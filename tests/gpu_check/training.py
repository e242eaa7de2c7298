"""Trains small random models on a GPU, and compares each with a plain run in fp32 (python -m tests.gpu_check.training).

The configurations are those of scripts/bench/random_plans.py with smaller sizes. The plain run has naive attention, and
neither torch.compile nor memory levers. The program compares the losses of three steps, and each parameter's gradient
of the first step.
"""

import argparse
import math
import random
import re
import sys
import time
from dataclasses import dataclass

import lightning as L
import torch
from hydra.errors import HydraException
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from scripts.bench.random_plans import overrides_of
from scripts.bench.timing import require_gpu
from scripts.bench.training_case import Device, StepTimes, measure, training_config

STEPS = 3
LARGEST_LOSS_ERROR = 0.02  # nats per label
LARGEST_GRADIENT_ERROR = 0.06  # norm of the difference divided by the gradient's norm; bf16 gives about 0.01
PLAIN = {
    "attention": "naive",
    "trainer.precision": "32-true",
    "optimizer": "adamw",
    "memory.checkpointing": "none",
    "memory.offload": "false",
    "memory.mlp_chunk": "null",
    "lit_gpt.compile_model": "false",
}


@dataclass(frozen=True)
class Trained:
    """The losses of a run in nats per label, and the gradients of its first step by parameter name."""

    losses: list[float]
    gradients: dict[str, Tensor]


class FirstGradients(Callback):
    """Keeps the gradients of the first step, on the CPU in fp32."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if not self.gradients:
            for name, parameter in pl_module.model.named_parameters():
                if parameter.grad is not None:
                    self.gradients[name.replace("_orig_mod.", "")] = parameter.grad.detach().float().cpu()


def small(number: int) -> tuple[int, dict[str, str]]:
    """Returns seq_len and the overrides of a configuration of random_plans, with a smaller model and shorter rows."""
    _, overrides = overrides_of(number)
    settings = dict(override.split("=", 1) for override in overrides)
    draw = random.Random(f"small {number}")
    layers, n_heads = draw.choice((2, 3)), draw.choice((2, 4, 6))
    seq_len = draw.choice((1024, 1500, 2048, 3333, 4096)) // int(settings["data.micro_batch_size"])
    sizes = {
        "model.n_layers": layers,
        "model.dim": draw.choice((256, 384, 512)),
        "model.n_heads": n_heads,
        "model.n_kv_heads": draw.choice((1, 2, n_heads)),
        "model.ffn_dim": draw.choice((512, 768, 1024)),
        "model.vocab_size": draw.choice((300, 1024, 4096)),
        "data.document_len": draw.choice((seq_len, 100, 333, 777)),
        "memory.loss.chunk_size": draw.choice((256, 1000, 4096)),
        "memory.loss.z_loss": draw.choice((0.0, 1e-4)),
        "memory.loss.label_smoothing": draw.choice((0.0, 0.1)),
        "scheduler.warmup_steps": 1,
    }
    if settings["memory.mlp_chunk"] != "null":
        sizes["memory.mlp_chunk"] = draw.choice((256, 700))
    if "model.max_seq_len" in settings:
        sizes["model.max_seq_len"] = seq_len
    if "model.family" in settings:
        windows = ", ".join(str(draw.choice((64, 200, 512))) if i % 2 else "null" for i in range(layers))
        settings["model.family"] = re.sub(r"windows: \[.*?\]", f"windows: [{windows}]", settings["model.family"])
    return seq_len, settings | {key: str(value) for key, value in sizes.items()}


def train(seq_len: int, settings: dict[str, str], device: Device) -> Trained:
    overrides = [f"{key}={value}" for key, value in settings.items() if key != "attention"]
    config = training_config("llama_1b", settings.get("attention", "flash"), seq_len, STEPS, device, overrides)
    L.seed_everything(1, verbose=False)
    torch._dynamo.reset()
    first, times = FirstGradients(), StepTimes(STEPS - 1, warmup=1)
    measure(config, torch.device(device), times, [first])
    return Trained(times.losses, first.gradients)


def difference(found: Trained, expected: Trained) -> tuple[str, bool]:
    """Returns a description of the differences between two runs, and True if rounding cannot explain them."""
    of_losses = [abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)]
    of_loss = math.nan if any(map(math.isnan, of_losses)) else max(of_losses)
    errors = {
        name: float((found.gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-30))
        for name, gradient in expected.gradients.items()
        if name in found.gradients
    }
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    missing = sorted(found.gradients.keys() ^ expected.gradients.keys())
    is_wrong = not (of_loss <= LARGEST_LOSS_ERROR and errors[worst] <= LARGEST_GRADIENT_ERROR) or bool(missing)
    text = f"losses differ by {of_loss:.4f}, the gradient of {worst} by {errors[worst]:.1%}"
    return text + (f"; only one run has gradients of {', '.join(missing)}" if missing else ""), is_wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the number of the first configuration")
    parser.add_argument("--count", type=int, default=20, help="how many configurations to draw")
    arguments = parser.parse_args()
    require_gpu("tests.gpu_check.training")
    wrong = right = 0
    for number in range(arguments.first, arguments.first + arguments.count):
        seq_len, settings = small(number)
        began = time.monotonic()
        try:
            found, expected = (train(seq_len, one, "cuda") for one in (settings, settings | PLAIN))
        except (ValueError, HydraException) as error:
            print(f"{number}: refused, {error}", flush=True)
            continue
        text, is_wrong = difference(found, expected)
        wrong, right = wrong + is_wrong, right + (not is_wrong)
        print(f"{'WRONG ' * is_wrong}{number}: {text}; {time.monotonic() - began:.0f} s", flush=True)
        if is_wrong:
            print("  ", " ".join(f"{key}={value}" for key, value in settings.items()), flush=True)
    print(f"{right} of {right + wrong} configurations train like a plain run in fp32")
    sys.exit(wrong > 0 or not right)


if __name__ == "__main__":
    main()
