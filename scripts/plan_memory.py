"""What a run will take of GPU and host memory, by component, without running it and without a GPU.

    python -m scripts.plan_memory model=llama_1b seq_len=131072 memory=selective
    python -m scripts.plan_memory model=llama_8b seq_len=262144 trainer.precision=bf16-true memory=auto gpu_gib=80

Takes train.py's overrides, its preset=gpu unless told otherwise; and gpu_gib and host_gib, what one GPU and one process
have: by default what this machine has, and where it has no GPU, an H200's 139.8 GiB.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fa_train.memory.offload import available_host_bytes
from fa_train.memory.planner import (
    COMPONENTS,
    GIB,
    Prediction,
    Shape,
    fastest_that_fits,
    fits,
    levers_of,
    longest_seq_len,
    next_lever,
    parameter_sizes,
    predict,
    with_levers,
)
from fa_train.preflight import device_bytes, explain, shape_of

H200_GIB = 139.8


def main(arguments: list[str]) -> str:
    """The table for these overrides. Raises: ValueError, HydraException or OmegaConfBaseException on a mistake."""
    gpu, rest = _taken("gpu_gib", arguments)
    host, overrides = _taken("host_gib", rest)
    gpu_bytes = int(gpu * GIB) if gpu is not None else _gpu_bytes()
    host_bytes = int(host * GIB) if host is not None else available_host_bytes()
    cfg = composed(overrides)
    shape = shape_of_run(cfg)
    if cfg.memory.get("auto"):
        shape = with_levers(shape, fastest_that_fits(shape, gpu_bytes, host_bytes) or levers_of(shape))
    return table(shape, gpu_bytes, host_bytes, rows=cfg.data.micro_batch_size)


def composed(overrides: list[str]) -> DictConfig:
    """The config as train.py composes it on a machine with a GPU."""
    OmegaConf.register_new_resolver("auto_preset", lambda: "gpu", replace=True)
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        return compose("train", overrides)


def shape_of_run(cfg: DictConfig) -> Shape:
    """Its model is built without weights."""
    devices = cfg.trainer.devices if isinstance(cfg.trainer.devices, int) else 1
    with torch.device("meta"):
        vocab_size = cfg.model.vocab_size or instantiate(cfg.data).vocab_size
        model = instantiate(cfg.adapter)(instantiate(cfg.model, vocab_size=vocab_size))
    return shape_of(
        model,
        precision=cfg.trainer.precision,
        tokens=cfg.seq_len * cfg.data.micro_batch_size,
        optimizer=instantiate(cfg.optimizer),
        accumulates=cfg.batch_size > cfg.data.micro_batch_size * devices * cfg.trainer.num_nodes,
        compiled=cfg.lit_gpt.compile_model,
    )


def table(shape: Shape, gpu_bytes: int, host_bytes: int, rows: int) -> str:
    """The prediction by component, and what follows from it; rows of one micro-batch."""
    prediction = predict(shape)
    levers = ", ".join(f"{name}={value}" for name, value in asdict(levers_of(shape)).items())
    change = next_lever(shape, gpu_bytes, host_bytes, rows)
    lines = [
        f"{sum(parameter_sizes(shape)) / 1e9:.2f}B parameters, {shape.tokens:,} tokens at a time, {shape.precision}, "
        f"{shape.optimizer}, {'compiled' if shape.compiled else 'not compiled'}",
        f"memory: {levers}",
        "",
        *(_line(name.replace("_", " "), getattr(prediction, name)) for name in COMPONENTS),
        _line("GPU", prediction.gpu_bytes) + f" of {gpu_bytes / GIB:.1f}, most at {prediction.moment}",
        _line("host", prediction.host) + f" of {host_bytes / GIB:.1f}",
        "",
        f"fits: {_answer(prediction, gpu_bytes, host_bytes)}",
        f"longest seq_len that fits: {longest_seq_len(shape, gpu_bytes, host_bytes) // rows:,}",
    ]
    return "\n".join([*lines, f"next lever: {change}"] if change else lines)


def _answer(prediction: Prediction, gpu_bytes: int, host_bytes: int) -> str:
    if fits(prediction, gpu_bytes, host_bytes):
        return "yes"
    over = {"GPU": prediction.gpu_bytes - gpu_bytes, "host": prediction.host - host_bytes}
    return "no, " + " and ".join(f"{n / GIB:.1f} GiB too much for the {name}" for name, n in over.items() if n > 0)


def _line(name: str, nbytes: int) -> str:
    return f"{name:<16}{nbytes / GIB:8.2f} GiB"


def _taken(name: str, arguments: list[str]) -> tuple[float | None, list[str]]:
    """The value of name=value, if there, and the other arguments."""
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{name}=")]
    others = [argument for argument in arguments if not argument.startswith(f"{name}=")]
    if not values:
        return None, others
    try:
        value = float(values[-1])
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number; got {values[-1]}")
    return value, others


def _gpu_bytes() -> int:
    return device_bytes(torch.device("cuda")) if torch.cuda.is_available() else int(H200_GIB * GIB)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {explain(error)}")
