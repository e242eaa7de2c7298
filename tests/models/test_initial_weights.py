"""Two processes draw or read the same weights as one process, but neither process ever holds the whole model."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fa_train import training
from fa_train.models.gpt import GPT
from fa_train.models.hf import weights as hf_weights
from fa_train.models.hf.import_ import load_pretrained, save_pretrained
from fa_train.models.lora import LoRA, save_adapter
from fa_train.models.shards import whole
from fa_train.parallel.fsdp import shard
from tests.models.support.gpt import build
from tests.support.peak_memory import peak_growth
from tests.support.processes import start_server
from tests.support.ranks import needs_ports, ranks_of_torchrun
from tests.support.training import composed, tiny

CPU, META = torch.device("cpu"), torch.device("meta")
LLAMA: dict[str, Any] = {"vocab_size": 67, "tied": False, "init": "llama"}
GPT2 = LLAMA | {
    "norm": "layernorm", "positions": "learned", "activation": "gelu", "bias": True, "tied": True, "n_kv_heads": None,
    "rope_theta": None, "init": "gpt2",
}  # fmt: skip
# 14 million weights, 55 MB in fp32; the largest parameter is 3% of them
LARGE = LLAMA | {"vocab_size": 512, "n_layers": 16, "dim": 256, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 768}
LARGE_BYTES = 4 * (2 * 512 * 256 + 16 * (4 * 256**2 + 3 * 256 * 768))
ADAPTER = LoRA(
    r=1, lora_alpha=1, lora_dropout=0.0, target_modules="all-linear", use_rslora=False, quantization=None, path=None
)
DRAWN = {"llama": (LLAMA, None), "gpt2": (GPT2, None), "lora": (LLAMA, ADAPTER)}
READ = {"llama": LLAMA, "gpt2": GPT2}  # the import of llama joins tensors, and the import of gpt2 transposes them


def built_on(device: torch.device, config: dict[str, Any], adapter: LoRA | None) -> GPT:
    with device:
        return build(**config) if adapter is None else adapter(build(**config))


def sharded(model: GPT, precision: str = "32-true") -> GPT:
    """Shards a model that is on the meta device, so that each rank holds its rows of the weights."""
    assert all(parameter.is_meta for parameter in model.parameters())
    if precision == "bf16-true":
        model.bfloat16()
    shard(model, init_device_mesh("cpu", (2,)), precision)
    model.materialise(CPU)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def assert_same(ours: GPT, theirs: GPT) -> None:
    names = [name for name, _ in theirs.named_parameters()]
    assert names == [name for name, _ in ours.named_parameters()]
    for name in names:
        a, b = whole(ours.get_parameter(name)), theirs.get_parameter(name)
        assert a.dtype == b.dtype and torch.equal(a, b), name
    assert (ours.head.weight is ours.token_embedding.weight) == ours.config.tied


def write_checkpoints(folder: Path) -> None:
    """Writes Hugging Face checkpoints, one of them in several files, and an adapter with random weights."""
    for name, config in (READ | {"large": LARGE}).items():
        save_pretrained(build(seed=1, **config), folder / name, shard_bytes=20_000 if name == "llama" else 10**9)
    assert len(list((folder / "llama").glob("*.safetensors"))) > 1
    for name, change in (("same-head", 0), ("other-head", 1)):
        path = Path(shutil.copytree(folder / "gpt2", folder / name)) / "model.safetensors"
        tensors = load_file(path)
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        tensors["lm_head.weight"][-1] += change
        save_file(tensors, path, {"format": "pt"})
    adapted = ADAPTER(build(**LLAMA))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    save_adapter(adapted, folder / "adapter", base=None)


@pytest.mark.slow
@needs_ports
def test_two_ranks_have_the_weights_of_one(tmp_path):
    """One pair of spawned processes makes all checks that need two ranks, because a process takes seconds to start."""
    write_checkpoints(tmp_path)
    start_server()
    arguments = (str(tmp_path), ranks_of_torchrun(2))
    torch.multiprocessing.start_processes(in_two_processes, args=arguments, nprocs=2, start_method="forkserver")


def in_two_processes(rank: int, folder: str, environments: list[dict[str, str]]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environments[rank])
    dist.init_process_group("gloo")
    same_random_weights()
    same_pretrained_weights(Path(folder))
    each_rank_compares_its_rows_of_a_tied_head(rank, Path(folder))
    never_the_whole_model(rank, Path(folder))
    dist.destroy_process_group()


def same_random_weights() -> None:
    for config, adapter in DRAWN.values():
        expected = built_on(CPU, config, adapter)
        assert_same(sharded(built_on(META, config, adapter)), expected)
        assert_same(sharded(built_on(META, config, adapter), "bf16-true"), expected.bfloat16())


def recorded(function: Callable[..., Tensor], results: list[Tensor]) -> Callable[..., Tensor]:
    def call(*arguments: Any) -> Tensor:
        results.append(function(*arguments))
        return results[-1]

    return call


def same_pretrained_weights(folder: Path) -> None:
    for name in READ:
        read: list[Tensor] = []
        expected = load_pretrained(folder / name, "sdpa")
        with META:
            model = load_pretrained(folder / name, "sdpa")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf_weights, "_read", recorded(hf_weights._read, read))
            assert_same(sharded(model), expected)
        elements = sum(p.numel() for p in expected.parameters())
        assert sum(tensor.numel() for tensor in read) < 0.52 * elements, "this rank's rows only"
    adapter = LoRA(**(vars(ADAPTER) | {"path": str(folder / "adapter")}))
    assert_same(sharded(built_on(META, LLAMA, adapter)), built_on(CPU, LLAMA, adapter))


def each_rank_compares_its_rows_of_a_tied_head(rank: int, folder: Path) -> None:
    """The checkpoint `other-head` differs from `same-head` only in the last row of the head, which rank 1 holds."""
    with META:
        same, other = (load_pretrained(folder / name, "sdpa") for name in ("same-head", "other-head"))
    sharded(same)
    refused = pytest.raises(ValueError, match=r"lm_head.weight must equal the token embedding")
    with refused if rank == 1 else nullcontext():
        sharded(other)


def never_the_whole_model(rank: int, folder: Path) -> None:
    """Each of two ranks needs memory for half of the model and for one whole parameter."""
    with META:
        models = [build(**LARGE), load_pretrained(folder / "large", "sdpa")]
    for model in models:
        with peak_growth() as peak:
            sharded(model)
        assert 0.4 * LARGE_BYTES < peak.bytes < 0.65 * LARGE_BYTES, peak.bytes / LARGE_BYTES
    models.clear()
    del model
    if rank == 0:
        with peak_growth() as peak:
            build(**LARGE)
        assert peak.bytes > 0.98 * LARGE_BYTES, "the measure sees a whole model"


def test_a_sharded_run_is_built_on_the_meta_device(tmp_path):
    """Lightning calls configure_model, which shards the model and materialises it."""
    for strategy, on_meta in (("fsdp", True), ("ddp", False)):
        with composed(tmp_path, *tiny(tmp_path, f"strategy={strategy}", "trainer.devices=2", "adapter=lora")) as cfg:
            _, lit_gpt, _ = training.build(cfg)
        assert all(parameter.is_meta == on_meta for parameter in lit_gpt.parameters())


def test_weights_depend_on_the_seed_and_the_name():
    one, again, other = (build(seed, **LLAMA) for seed in (0, 0, 1))
    deeper = build(**LLAMA, n_layers=3)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter, deeper.get_parameter(name)), "other layers change nothing"
        assert ("norm" in name) == torch.equal(parameter, other.get_parameter(name))
    up, later = (one.get_parameter(f"blocks.{i}.ffn.up.weight") for i in (0, 1))
    assert not torch.isclose(up, later).all()


def test_drawing_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    build(**LLAMA)
    assert torch.equal(torch.rand(3), expected)
