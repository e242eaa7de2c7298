"""Makes the table of scripts/plan_memory.py: the predicted memory of a run, by component."""

from dataclasses import asdict

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from fa_train.data.tokens.tokenizer import load_tokenizer
from fa_train.early_checks import is_fsdp, micro_batches, require_checkpoint_name
from fa_train.memory.host_memory import available_host_bytes
from fa_train.memory.planner.levers import (
    fastest_that_fits,
    fits,
    longest_of_all_levers,
    longest_seq_len,
    next_lever,
    smallest,
    with_blocks_gathered,
    with_levers,
)
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.predict import COMPONENTS, GIB, Prediction, predict
from fa_train.memory.planner.run import WITHOUT_FLOAT8, device_bytes, longest_in_words
from fa_train.memory.planner.weights import parameter_sizes
from fa_train.models.gpt import GPT
from fa_train.parallel.ranks import devices_per_node
from fa_train.preflight import chooses_reshard, longest_row, plan_of, require_reach
from scripts.composed import composed, without

H200_GIB = 139.8


def memory_table(arguments: list[str]) -> str:
    """Returns the table for `arguments`: overrides of train.py, and optionally gpu_gib=... and host_gib=...

    Raises: ValueError, HydraException or OmegaConfBaseException if an override is wrong.
    """
    gpu, rest = _without_gib("gpu_gib", arguments)
    host, overrides = _without_gib("host_gib", rest)
    gpu_bytes = int(gpu * GIB) if gpu is not None else memory_of_gpu()
    cfg = composed(overrides, unread=["data.path", "data.name"])
    host_bytes = int(host * GIB) if host is not None else available_host_bytes() // devices_per_node(cfg.trainer)
    model = model_of_run(cfg)
    plan, auto = plan_of_run(cfg, model), bool(cfg.memory.get("auto"))
    reach = longest_row(model, cfg.data.max_doc_len, cfg.data.reset_positions)
    if auto:
        plan = with_levers(plan, fastest_that_fits(plan, gpu_bytes, host_bytes) or smallest(plan))
    shown, attention = as_run(plan, cfg, gpu_bytes), cfg.choices.attention
    lines = [table(shown, gpu_bytes, host_bytes, attention, auto=auto, searched=plan, reach=reach)]
    if refusal := refused_rows(cfg):
        lines += [f"train.py refuses this run: {refusal}"]
    if (
        devices_per_node(cfg.trainer) > 1
        and not is_fsdp(cfg.strategy)
        and not fits(predict(plan), gpu_bytes, host_bytes)
    ):
        lines += ["strategy=fsdp shards the model over the devices; strategy.context=N divides each sequence"]
    if attention != "flash":
        lines += ["the plan assumes attention=flash; other kinds of attention may need more memory"]
    if plan.run.float8:
        lines += [WITHOUT_FLOAT8]
    if not torch.cuda.is_available() and (gpu is None or host is None):
        assumed = ["an H200's GPU"] * (gpu is None) + ["this machine's host memory"] * (host is None)
        lines += [f"assumed: {' and '.join(assumed)}; set gpu_gib= and host_gib= to change this"]
    return "\n".join(lines)


def model_of_run(cfg: DictConfig) -> GPT:
    """Builds the model of a run without weights, on the device "meta".

    Raises: ValueError if model.pretrained is no checkpoint, or the model does not support documents of seq_len tokens.
    """
    require_checkpoint_name(cfg.model.get("pretrained"))
    with torch.device("meta"):
        vocab_size = cfg.model.vocab_size or vocab_size_of(cfg.data, is_pretrained="pretrained" in cfg.model)
        model: GPT = instantiate(cfg.adapter)(instantiate(cfg.model, vocab_size=vocab_size))
    require_reach(model, cfg.seq_len, cfg.data.max_doc_len, cfg.data.reset_positions)
    return model


def vocab_size_of(data: DictConfig, is_pretrained: bool) -> int:
    """Returns the vocabulary size of the tokenizer if the config has a tokenizer, else that of the data module.

    For a pretrained model, returns the number of embeddings that the tokenizer needs at least.

    Raises: ValueError if the tokenizer cannot be loaded.
    """
    if "tokenizer" in data:
        tokenizer = load_tokenizer(data.tokenizer)
        return tokenizer.min_vocab_size if is_pretrained else tokenizer.vocab_size
    size: int = instantiate(data).vocab_size
    return size


def plan_of_run(cfg: DictConfig, model: GPT | None = None) -> Plan:
    """Returns the memory plan of a run.

    If strategy.reshard_after_forward=auto, the plan uses the value that needs less memory.

    Raises: the errors of `model_of_run`. ValueError if strategy=fsdp cannot shard the model, if the number of devices
    is not a multiple of strategy.context, or if the run does not support lit_gpt.float8 or its optimizer.
    """
    return plan_of(
        cfg,
        model or model_of_run(cfg),
        instantiate(cfg.optimizer),
        devices_per_node(cfg.trainer) * cfg.trainer.num_nodes,
    )


def refused_rows(cfg: DictConfig) -> str | None:
    """Returns the reason why batch_size does not fit the number of devices, or None if it fits."""
    context = cfg.strategy.get("context", 1)
    try:
        micro_batches(
            cfg.batch_size, cfg.data.micro_batch_size, devices_per_node(cfg.trainer) * cfg.trainer.num_nodes, context
        )
    except ValueError as error:
        return str(error)
    return None


def as_run(plan: Plan, cfg: DictConfig, gpu_bytes: int) -> Plan:
    """Returns the plan with the value that the run chooses for strategy.reshard_after_forward=auto."""
    is_chosen = chooses_reshard(cfg.strategy, cfg.choices.attention)
    return with_blocks_gathered(plan, gpu_bytes) if is_chosen else plan


def table(
    plan: Plan,
    gpu_bytes: int,
    host_bytes: int,
    attention: str,
    *,
    auto: bool,
    searched: Plan,
    reach: int | None = None,
) -> str:
    """Formats the predicted memory by component, whether the run fits, and the longest seq_len that fits.

    plan: the run's plan, which is `searched` after as_run has replaced strategy.reshard_after_forward=auto.
    attention: the name of the chosen option of conf/attention.
    auto: if true, the search for the longest seq_len tries all memory levers.
    searched: the plan from which the searches for the longest seq_len and for the next lever start.
    reach: the longest seq_len that the model supports, or None if there is no limit.
    """
    prediction, run = predict(plan), plan.run
    longest = (longest_of_all_levers if auto else longest_seq_len)(searched, gpu_bytes, host_bytes)
    levers = ", ".join(f"{name}={value}" for name, value in asdict(plan.levers).items())
    change = next_lever(searched, gpu_bytes, host_bytes, attention)
    lines = [
        f"{sum(parameter_sizes(plan.model)) / 1e9:.2f}B parameters, {run.tokens:,} tokens at a time, {run.precision}, "
        f"{run.optimizer}, {'compiled' if run.compiled else 'not compiled'}",
        f"memory: {levers}",
        *([f"strategy.reshard_after_forward: {str(run.reshard_after_forward).lower()}"] if run.ranks > 1 else []),
        "",
        *(_line(name.replace("_", " "), getattr(prediction, name)) for name in COMPONENTS),
        _line("GPU", prediction.gpu_bytes) + f" of {gpu_bytes / GIB:.1f}, peak at {prediction.moment}",
        _line("host", prediction.host) + f" of {host_bytes / GIB:.1f}",
        "",
        f"fits: {_answer(prediction, gpu_bytes, host_bytes)}",
        f"longest seq_len that fits{' with memory=auto' if auto else ''}: {longest_in_words(longest, reach)}",
    ]
    return "\n".join([*lines, f"next lever: {change}"] if change else lines)


def _answer(prediction: Prediction, gpu_bytes: int, host_bytes: int) -> str:
    if fits(prediction, gpu_bytes, host_bytes):
        return "yes"
    over = {"GPU": prediction.gpu_bytes - gpu_bytes, "host": prediction.host - host_bytes}
    shown = {name: f"{n / GIB:.1f} GiB" if n >= GIB / 10 else f"{n / 2**20:.1f} MiB" for name, n in over.items()}
    return "no, " + " and ".join(f"{shown[name]} too much for the {name}" for name, n in over.items() if n > 0)


def _line(name: str, nbytes: int) -> str:
    return f"{name:<16}{nbytes / GIB:8.2f} GiB"


def _without_gib(name: str, arguments: list[str]) -> tuple[float | None, list[str]]:
    given, others = without(name, arguments)
    if given is None:
        return None, others
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number; got {given}")
    return value, others


def memory_of_gpu() -> int:
    return device_bytes(torch.device("cuda")) if torch.cuda.is_available() else int(H200_GIB * GIB)
