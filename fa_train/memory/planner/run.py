"""Plans the memory of a run before it starts: checks that the run fits, chooses memory levers, and reports the plan."""

import os
from collections.abc import Callable
from dataclasses import asdict

import torch

from fa_train.memory.host_memory import available_host_bytes, require_host_memory
from fa_train.memory.memory import Levers
from fa_train.memory.planner.levers import (
    fastest_that_fits,
    longest_of_all_levers,
    longest_seq_len,
    next_lever,
    resized,
    with_blocks_gathered,
    with_levers,
)
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.predict import COMPONENTS, GIB, Prediction, predict
from fa_train.memory.planner.weights import parameter_sizes, trained_sizes
from fa_train.parallel.decisions import decided_by_rank_zero
from fa_train.settings import shown

CERTAIN = 1.1  # a run is refused if it needs more than this multiple of the device's memory
OUTSIDE_TORCH = 3 * GIB  # the most memory that a process uses outside torch's allocator, for CUDA's context and NCCL
WITHOUT_FLOAT8 = "the plan assumes bf16 matmuls; lit_gpt.float8 keeps other copies of weights and activations"


class DoesNotFitError(ValueError):
    """Raised if the planner predicts that a step runs out of GPU memory."""


def plan_memory(
    plan: Plan,
    device: torch.device,
    processes: int,
    *,
    auto: bool,
    auto_reshard: bool = False,
    attention: str,
    reach: int | None = None,
    in_sweep: bool,
    say: Callable[[str], object],
) -> Plan:
    """Returns the plan of the run, after the planner has chosen the settings that are "auto".

    processes: the number of processes that share this machine's memory.
    auto: whether the run has memory=auto. With memory=auto, the planner chooses the fastest memory levers (settings
    that reduce memory) that fit.
    auto_reshard: whether the gathered weights of blocks are kept after the forward pass if they fit in memory
    (strategy.reshard_after_forward=auto). On the CPU, gathered weights are never kept.
    attention: the name of the chosen option of conf/attention.
    reach: the longest seq_len that the model supports, or None if there is no limit.
    say: a function that prints the chosen settings and, on a GPU, a summary of the prediction.
    Raises: ValueError if the run cannot fit. In a sweep, a run that exceeds the GPU's memory is not refused, because
    running out of memory is a result of the sweep.
    """
    if auto:
        chosen = decided_by_rank_zero("memory", lambda: asdict(fastest_levers(plan, device, processes, attention)))
        plan = with_levers(plan, Levers(**chosen))
        say(f"memory=auto: {', '.join(f'{name}={value}' for name, value in chosen.items())}")
    # With auto_reshard, the search for the longest seq_len assumes that gathered weights are freed after the forward
    # pass.
    searched = plan
    if auto_reshard and device.type == "cuda":
        resharded = decided_by_rank_zero(
            "reshard_after_forward",
            lambda: with_blocks_gathered(searched, usable_bytes(device)).run.reshard_after_forward,
        )
        plan = resized(plan, reshard_after_forward=resharded)
        say(f"strategy.reshard_after_forward=auto: {shown(resharded)}")
    try:
        prediction = require_memory(plan, device, processes, attention)
    except DoesNotFitError:
        if not in_sweep:
            raise
        prediction = predict(plan)
    if device.type == "cuda":
        say(summary(prediction, device, processes, attention, auto, searched, reach))
    return plan


def device_bytes(device: torch.device) -> int:
    """Returns the total memory of a GPU, or of the machine if the device is the CPU, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_of_others(device: torch.device) -> int:
    """Returns how many bytes of a GPU's memory other processes use, or 0 if they use little or nothing.

    CUDA reports only the total use. The function subtracts what torch's allocator has reserved in this process. Up to
    `OUTSIDE_TORCH` of the rest can belong to this process, so a rest of at most `OUTSIDE_TORCH` counts as 0.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    return used if used > OUTSIDE_TORCH else 0


def usable_bytes(device: torch.device) -> int:
    """Returns the memory of a device in bytes, without the GPU memory that other processes use."""
    return device_bytes(device) - bytes_of_others(device)


def fastest_levers(plan: Plan, device: torch.device, processes: int, attention: str = "flash") -> Levers:
    """Returns the memory levers that memory=auto chooses on this device. On the CPU, all levers are off.

    processes: the number of processes that share this machine's memory.
    attention: the name of the chosen option of conf/attention.
    Raises: ValueError if no combination of levers makes the run fit.
    """
    if device.type != "cuda":
        return Levers("none", False, None)
    gpu, host = usable_bytes(device), available_host_bytes() // processes
    levers = fastest_that_fits(plan, gpu, host)
    if levers is None:
        shared = f" (other processes use {others / GIB:.1f} GiB)" if (others := bytes_of_others(device)) else ""
        raise ValueError(
            f"memory=auto found no memory settings with which this run fits in {gpu / GIB:.1f} GiB of {device}{shared} "
            f"and {host / GIB:.1f} GiB of host memory. Try {next_lever(plan, gpu, host, attention)}"
        )
    return levers


def require_memory(plan: Plan, device: torch.device, processes: int, attention: str = "flash") -> Prediction:
    """Checks that a run fits, and returns the prediction. On the CPU, the check does not include activations.

    processes: the number of processes that share this machine's memory.
    attention: the name of the chosen option of conf/attention.
    Raises: ValueError if the run does not fit. DoesNotFitError if a step needs more than `CERTAIN` times the GPU's
    memory.
    """
    prediction, available = predict(plan), device_bytes(device)
    trained = sum(trained_sizes(plan)) * plan.run.gradient_bytes // plan.run.ranks * plan.run.gradient_copies
    needed = prediction.weights + prediction.optimizer + trained
    if needed > available:
        raise ValueError(
            f"{sum(parameter_sizes(plan.model)) / 1e9:.2f}B parameters need {needed / GIB:.1f} GiB for weights, "
            f"gradients and the optimizer's states; {device} has {available / GIB:.1f} GiB. Choose a smaller model"
        )
    if device.type != "cuda":
        return prediction
    host = available_host_bytes()
    if prediction.gpu_bytes > CERTAIN * available:
        raise DoesNotFitError(
            f"a step needs about {prediction.gpu_bytes / GIB:.1f} GiB of GPU memory; {device} has "
            f"{available / GIB:.1f} GiB. Try {next_lever(plan, available, host // processes, attention)}"
        )
    if plan.levers.offload:
        require_host_memory(prediction.host, host, processes, everything=plan.levers.offloads_all)
    elif prediction.host * processes > host:
        raise ValueError(
            f"optimizer=adamw_offload needs {prediction.host / GIB:.1f} GiB of host memory in each of {processes} "
            f"processes; {host / GIB:.1f} GiB are available. Choose optimizer=adamw_8bit or a smaller model"
        )
    return prediction


def longest_in_words(fits: int, reach: int | None) -> str:
    """Returns the longest seq_len in words. fits: the longest seq_len that fits in memory. reach: as in plan_memory."""
    return f"{fits:,}" if reach is None or fits <= reach else f"{reach:,}, the longest that the model supports"


def summary(
    prediction: Prediction,
    device: torch.device,
    processes: int,
    attention: str,
    auto: bool = False,
    searched: Plan | None = None,
    reach: int | None = None,
) -> str:
    """Returns the lines of text that a run on a GPU prints before it starts.

    The text has three lines. Another line follows if other processes use the GPU's memory, and one for a run with
    float8. The prediction assumes attention=flash. Other kinds of attention can need more memory than flash attention.
    auto: whether the search for the longest seq_len tries all combinations of levers, or only the run's levers.
    searched: the plan for which the function computes the longest seq_len and suggests a change of settings. If
    `searched` is None, prediction.plan is used.
    reach: as in plan_memory.
    """
    searched = searched or prediction.plan
    gpu, total, host = usable_bytes(device), device_bytes(device), available_host_bytes() // processes
    parts = {name.replace("_", " "): getattr(prediction, name) / GIB for name in COMPONENTS}
    listed = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05)
    longest = longest_in_words((longest_of_all_levers if auto else longest_seq_len)(searched, gpu, host), reach)
    change = next_lever(searched, gpu, host, attention)
    if attention == "flash":
        length = f"the longest seq_len that fits{' with memory=auto' if auto else ''} is {longest}" + (
            f"; this run may not fit. Try {change}" if change else ""
        )
    else:
        length = (
            f"attention={attention} can need more memory than planned; with attention=flash the longest seq_len is "
            f"{longest}"
        )
    lines = [
        f"planned: {prediction.gpu_bytes / GIB:.1f} of {gpu / GIB:.1f} GiB, peak at {prediction.moment}",
        f"GiB: {listed}; on the host {prediction.host / GIB:.1f} of {host / GIB:.1f}",
        length,
    ]
    if total > gpu:
        lines += [f"other processes use {(total - gpu) / GIB:.1f} of the {total / GIB:.1f} GiB of {device}"]
    return "\n  ".join(lines + ([WITHOUT_FLOAT8] if prediction.plan.run.float8 else []))
