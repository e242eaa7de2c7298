"""Tests AdamW and its variants: which parameters decay, and whether each variant trains like AdamW."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.optim import Optimizer

from fa_train import training
from fa_train.lit_gpt import scale_or_skip
from fa_train.optim.adamw import KINDS, adamw, adamw_8bit, adamw_bf16, adamw_master, adamw_offload
from fa_train.optim.resume import kinds_that_write, require_same_kind
from fa_train.optim.schedule import warmup_cosine
from tests.models.support.gpt import build
from tests.optim.support.optimizers import optimizer_of
from tests.support.training import column, composed, tiny

CONF = Path(__file__).parents[2] / "conf"
SETTINGS: Any = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
LOW_MEMORY: dict[str, tuple[Callable[[nn.Module], Optimizer], torch.dtype]] = {
    "8bit": (lambda model: adamw_8bit(model, stochastic_rounding=True, **SETTINGS), torch.float32),
    "8bit-bf16": (lambda model: adamw_8bit(model, stochastic_rounding=True, **SETTINGS), torch.bfloat16),
    "bf16": (lambda model: adamw_bf16(model, **SETTINGS), torch.bfloat16),
    "master": (lambda model: adamw_master(model, **SETTINGS), torch.bfloat16),
}
OF_TORCHAO = [name for name in LOW_MEMORY if name != "master"]


def test_norms_biases_and_position_embeddings_do_not_decay():
    model = build(positions="learned", bias=True, qk_norm=True, norm="layernorm")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = (
        {names[id(parameter)] for parameter in group["params"]} for group in optimizer_of(model).param_groups
    )
    assert decayed | kept == set(names.values()) and not decayed & kept
    assert {name for name in decayed if not name.startswith("blocks.1")} == {
        "token_embedding.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.ffn.up.weight",
        "blocks.0.ffn.down.weight",
    }
    assert [group["weight_decay"] for group in optimizer_of(model).param_groups] == [0.1, 0.0]


def test_frozen_parameters_are_left_out():
    model = build()
    model.token_embedding.weight.requires_grad_(False)
    held = {id(parameter) for group in optimizer_of(model).param_groups for parameter in group["params"]}
    assert id(model.token_embedding.weight) not in held


def small_model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    """Builds a model with the same weights in every call.

    Only the matrices of the model are large enough to be quantized and offloaded.
    """
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)).to(device, dtype)


def train_steps(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    """Runs steps `first` to `last`, and scales the gradients of a step after its backward, as in LitGPT."""
    scheduler = warmup_cosine(optimizer, warmup_steps=2, max_steps=10, min_lr_ratio=0.1)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["lr"] = group["initial_lr"] * factor(first)
    scheduler.last_epoch = first
    parameters = list(model.parameters())
    for step in range(first, last):
        noise = torch.Generator().manual_seed(step)

        def backward(noise: torch.Generator = noise) -> Any:
            optimizer.zero_grad()
            loss = torch.stack([(p * torch.randn(p.shape, generator=noise).to(p)).sum() for p in parameters]).sum()
            loss.backward()
            shown = [p for group in optimizer.param_groups for p in group["params"]]
            assert {id(p) for p in shown} == {id(p) for p in parameters}
            assert all(type(group["lr"]) is float for group in optimizer.param_groups), (
                "callbacks record the learning rate"
            )
            torch._foreach_mul_([p.grad for p in shown], 0.1)
            return loss.detach()

        assert isinstance(optimizer.step(backward), Tensor)
        scheduler.step()


def moved(model: nn.Module) -> Tensor:
    """Returns how much training has changed each weight."""
    pairs = zip(model.parameters(), small_model().parameters(), strict=True)
    return torch.cat([(p.detach().float().cpu() - q).flatten() for p, q in pairs])


def assert_like_adamw(make: Callable[[nn.Module], Optimizer], model: nn.Module, rounding: float) -> None:
    """Compares five steps of an optimizer with those of AdamW.

    Before the last two steps, a new optimizer loads the saved state.
    """
    exact = small_model()
    train_steps(exact, adamw(exact, fused=False, **SETTINGS), 0, 5)
    optimizer = make(model)
    train_steps(model, optimizer, 0, 3)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    read = torch.load(saved, weights_only=True)
    resumed = small_model(next(model.parameters()).dtype, next(model.parameters()).device.type)
    optimizer = make(resumed)
    resumed.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    train_steps(resumed, optimizer, 3, 5)
    assert (moved(resumed) - moved(exact)).norm() < rounding * moved(exact).norm()


@pytest.fixture
def without_compiler() -> Iterator[None]:
    """Disables torch.compile, because torchao would compile its update for each shape, which takes time."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", LOW_MEMORY)
def test_low_memory_optimizers_step_like_adamw(name):
    make, dtype = LOW_MEMORY[name]
    # 8-bit moments and bf16 weights each change the update of five steps by a few percent
    assert_like_adamw(make, small_model(dtype), rounding=0.05)


@pytest.mark.usefixtures("without_compiler")
def test_states_are_as_small_as_promised():
    model = small_model()
    optimizer = LOW_MEMORY["8bit"][0](model)
    train_steps(model, optimizer, 0, 1)
    matrix, vector = model[0].weight, model[0].bias
    assert optimizer.state[matrix]["exp_avg"].codes.dtype == torch.uint8
    assert optimizer.state[matrix]["exp_avg_sq"].scale.numel() == matrix.numel() // 256
    assert optimizer.state[vector]["exp_avg"].dtype == torch.float32
    model = small_model(torch.bfloat16)
    optimizer = LOW_MEMORY["bf16"][0](model)
    train_steps(model, optimizer, 0, 1)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", ["8bit-bf16", "bf16"])
def test_stochastic_rounding_lets_small_updates_count(name):
    """Each exact update is 1/1024 of the distance between two adjacent bf16 numbers.

    After 64 steps, one weight in 16 should have moved to the next bf16 number.
    """
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = LOW_MEMORY[name][0](model)
    for group in optimizer.param_groups:
        # bf16 values above 1 are 2**-7 apart, and each step of AdamW has the size lr
        group.update(lr=2**-17, weight_decay=0.0)
    for _ in range(64):
        model.weight.grad = -torch.ones_like(model.weight)
        optimizer.step()
    assert model.weight.float().mean().item() - 1 == pytest.approx(64 * 2**-17, rel=0.3)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the CPU in place of the GPU."""
    from torchao.optim import cpu_offload

    stream, event = SimpleNamespace(), SimpleNamespace(synchronize=lambda: None)
    stream.wait_stream, stream.synchronize, stream.record_event = lambda other: None, lambda: None, lambda: event
    empty_like = torch.empty_like
    monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch, "empty_like", lambda x, device=None, pin_memory=False: empty_like(x, device=device))


@pytest.mark.usefixtures("one_device")
def test_offloaded_optimizer_steps_like_adamw():
    from fa_train.optim.adamw import parameter_groups
    from fa_train.optim.low_memory import OffloadedAdamW

    def make(model: nn.Module) -> Optimizer:
        return OffloadedAdamW(parameter_groups(model, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)

    assert_like_adamw(make, small_model(), rounding=1e-5)
    assert not make(small_model()).state, "Lightning would move this state to the GPU"


@pytest.mark.usefixtures("one_device")
def test_the_offloaded_optimizer_skips_a_step():
    from fa_train.optim.adamw import parameter_groups
    from fa_train.optim.low_memory import OffloadedAdamW

    models = []
    for skips in (False, True):
        model = small_model()
        optimizer = OffloadedAdamW(parameter_groups(model, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        train_steps(model, optimizer, 0, 2)
        if skips:
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model[0].weight.grad = torch.full_like(model[0].weight, torch.inf)
            scale_or_skip(optimizer, [model[0].weight.grad], torch.tensor(1.0), torch.tensor(True))
            optimizer.step()
            torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
        train_steps(model, optimizer, 2, 4)
        models.append(model)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        ((64, 128), (128, 64), r"must have the shape \(128, 64\); got \(64, 128\)"),
        ((64, 128), (64,), r"\[1, 0\] large and small weights in adamw_offload; got \[2, 0\]"),
        ((64, 8), (64, 128), r"\[2, 0\] large and small weights in adamw_offload; got \[1, 1\]"),
        ((64, 128), (64, 8), r"\[1, 1\] large and small weights in adamw_offload; got \[2, 0\]"),
        ((8, 128), (4, 128), r"must have the shape \(4,\); got \(8,\)"),
    ],
    ids=["large", "fewer", "no-small", "no-large", "small"],
)
def test_the_offloaded_optimizer_refuses_moments_of_other_weights(saved, resumed, message):
    from fa_train.optim.low_memory import OffloadedAdamW

    optimizers = []
    for sizes in (saved, resumed):
        weights = [nn.Parameter(torch.ones(size, 8192 // size) if size > 8 else torch.ones(size)) for size in sizes]
        optimizers.append(OffloadedAdamW([{"params": weights}], lr=1e-2, betas=(0.9, 0.95), eps=1e-8))
        for weight in weights:
            weight.grad = torch.ones_like(weight)
    optimizers[0].step()
    with pytest.raises(ValueError, match=f"trained the same weights: .*{message}"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())


def states_of(optimizer: Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict()["state"])


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", LOW_MEMORY)
def test_low_memory_optimizers_scale_or_skip_without_waiting_for_the_gpu(name, monkeypatch):
    """`item` and `bool` would make the host wait for the GPU."""
    make, dtype = LOW_MEMORY[name]
    model = small_model(dtype)
    optimizer = make(model)
    train_steps(model, optimizer, 0, 2)
    before = copy.deepcopy(model.state_dict()), states_of(optimizer)
    weights = [*model.parameters()]
    for weight in weights:
        weight.grad = torch.full_like(weight, torch.inf)
    for waits in ("item", "__bool__", "__float__", "tolist", "cpu"):
        monkeypatch.setattr(Tensor, waits, lambda *_: pytest.fail("the host waits for the GPU"))
    scale_or_skip(optimizer, [weight.grad for weight in weights], torch.tensor(1.0), torch.tensor(True))
    optimizer.step()
    skipped = copy.deepcopy(model.state_dict()), states_of(optimizer)
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.25)
    torch.manual_seed(1)
    scale_or_skip(optimizer, [weight.grad for weight in weights], torch.tensor(0.5), torch.tensor(False))
    optimizer.step()
    monkeypatch.undo()
    torch.testing.assert_close(skipped, before, rtol=0, atol=0)
    other = small_model(dtype)
    unscaled = make(other)
    other.load_state_dict(before[0])
    unscaled.load_state_dict({"state": before[1], "param_groups": optimizer.state_dict()["param_groups"]})
    for weight in other.parameters():
        weight.grad = torch.full_like(weight, 0.125)
    torch.manual_seed(1)
    unscaled.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(states_of(optimizer), states_of(unscaled), rtol=0, atol=0)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", OF_TORCHAO)
def test_the_first_step_is_that_of_torchao(name):
    """Later steps differ, because torchao rounds small second moments to 0, and bf16 second moments to nearest."""
    from torchao import optim

    make, dtype = LOW_MEMORY[name]
    models = [small_model(dtype)[0].requires_grad_() for _ in range(2)]
    ours, theirs = (nn.ParameterList([model.weight]) for model in models)
    ours_optimizer = make(ours)
    theirs_optimizer = (optim.AdamW8bit if "8bit" in name else optim._AdamW)(
        [{"params": list(theirs), "weight_decay": ours_optimizer.param_groups[0]["weight_decay"]}],
        lr=SETTINGS["lr"], betas=SETTINGS["betas"], eps=SETTINGS["eps"], bf16_stochastic_round=True,
    )  # fmt: skip
    for model, optimizer in ((ours, ours_optimizer), (theirs, theirs_optimizer)):
        model[0].grad = torch.randn(model[0].shape, generator=torch.Generator().manual_seed(0)).to(model[0])
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            if optimizer is ours_optimizer:
                patch.setattr(torch, "compile", lambda *_, **__: pytest.fail("torch.compile is slow"))
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)


@pytest.mark.usefixtures("without_compiler")
def test_a_small_second_moment_is_not_rounded_to_zero():
    """In each block of 256 elements, the gradients of 255 elements are 1000 times smaller than that of one element."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = LOW_MEMORY["8bit"][0](model)
    scale = torch.full((4096,), 1e-3)
    scale[::256], scale[1::256] = 1.0, 0.0
    noise = torch.Generator().manual_seed(0)
    for _ in range(50):
        before = model.weight.detach().clone()
        model.weight.grad = (scale * torch.randn(4096, generator=noise)).view(64, 64)
        optimizer.step()
        step = (model.weight.detach() - before).abs().max()
        assert step < 3 * optimizer.param_groups[0]["lr"], "torchao's largest step is 561 times the learning rate"
    codes = optimizer.state[model.weight]["exp_avg_sq"].codes.flatten()
    assert not codes[1::256].any() and codes[2::256].all(), "the moment of a gradient that is always 0 stays 0"


@pytest.mark.usefixtures("without_compiler")
def test_a_second_moment_in_bf16_decreases():
    """Rounding to nearest would lose all decreases below 0.19%, because bf16 has 8 significant bits."""
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    optimizer = adamw_bf16(model, **SETTINGS | {"betas": (0.9, 0.995)})
    exact = 0.0
    for step in range(600):
        gradient = 1.0 if step < 100 else 0.125
        exact = 0.995 * exact + 0.005 * gradient**2
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
    assert optimizer.state[model.weight]["exp_avg_sq"].float().mean().item() == pytest.approx(exact, rel=0.02)


def test_weights_in_fp16_are_not_trained():
    model = small_model(torch.float16)
    message = "model.dtype must be float32 or bfloat16 for weights that are trained; got float16"
    with pytest.raises(ValueError, match=message):
        adamw(model, fused=False, **SETTINGS)
    adapters = nn.ModuleList([model.requires_grad_(False), nn.Linear(4, 4)])
    adamw(adapters, fused=False, **SETTINGS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["offload", *LOW_MEMORY])
def test_low_memory_optimizers_on_a_gpu(name):
    make, dtype = LOW_MEMORY.get(name, (lambda model: adamw_offload(model, **SETTINGS), torch.float32))
    assert_like_adamw(make, small_model(dtype, "cuda"), rounding=1e-4 if name == "offload" else 0.05)


def test_low_memory_optimizers_say_what_they_need():
    with pytest.raises(ValueError, match="optimizer=adamw_offload needs a model on a CUDA GPU; got cpu"):
        adamw_offload(small_model(), **SETTINGS)
    with pytest.raises(ValueError, match=r"adamw_bf16 needs bfloat16 weights .*bf16-true\); got float32"):
        adamw_bf16(small_model(), **SETTINGS)
    with pytest.raises(ValueError, match=r"adamw_master needs bfloat16 weights .*bf16-true\); got float32"):
        adamw_master(small_model(), **SETTINGS)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adamw_bf16", "adamw_master", "adamw_offload"])
def test_every_config_decays_the_same_parameters(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+optimizer={name}"])
    model = build()
    if name == "adamw_offload":
        with pytest.raises(ValueError, match="CUDA GPU"):
            instantiate(config.optimizer)(model)
        return
    if name in ("adamw_bf16", "adamw_master"):
        model.bfloat16()
    optimizer, expected = instantiate(config.optimizer)(model), optimizer_of(model)
    for ours, theirs in zip(optimizer.param_groups, expected.param_groups, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]
        assert ours["weight_decay"] == theirs["weight_decay"] and ours["betas"] == theirs["betas"]


def test_configs_instantiate_and_their_state_is_plain():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=["+optimizer=adamw", "+scheduler=warmup_cosine", "+max_steps=1000"])
    optimizer = instantiate(config.optimizer)(build())
    scheduler = instantiate(config.scheduler)(optimizer)
    assert scheduler.get_last_lr() == [6e-4 / 100] * 2
    saved = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, saved)
    saved.seek(0)
    torch.load(saved, weights_only=True)


@pytest.mark.slow
@pytest.mark.usefixtures("without_compiler")
def test_a_run_goes_on_from_states_of_8_bits(tmp_path):
    losses = []
    for name, steps in (("whole", [6]), ("parts", [4, 6])):
        for max_steps in steps:
            folder = tmp_path / f"{name}_{max_steps}"
            checkpoint = sorted(tmp_path.glob(f"{name}*/checkpoints/*.ckpt"))[-1:]
            overrides = tiny(
                tmp_path,
                "optimizer=adamw_8bit",
                f"max_steps={max_steps}",
                "scheduler.max_steps=6",
                f"ckpt_path={checkpoint[0] if checkpoint else 'null'}",
            )
            with composed(folder, *overrides) as cfg:
                training.train(cfg)
        losses.append(column(folder, "train/loss"))
    assert list(losses[1]) == [5, 6]
    for step, loss in losses[1].items():
        assert loss == pytest.approx(losses[0][step], rel=1e-5)


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("configured", KINDS)
def test_the_state_of_a_users_own_optimizer_is_refused(other, configured):
    weight = nn.Parameter(torch.ones(4))
    optimizer = other([weight], lr=0.1)
    weight.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(ValueError, match=rf"of optimizer={configured}; got one that no optimizer in conf/ wrote$"):
        require_same_kind(KINDS[configured], optimizer.state_dict())


def test_a_users_own_function_may_have_the_name_of_one_of_ours():
    def own(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    own.__name__ = "adamw_8bit"
    saved = own(nn.Linear(2, 2)).state_dict()
    require_same_kind(own, saved)
    require_same_kind(partial(own), saved)


def test_a_checkpoint_without_states_may_be_of_each_optimizer_for_bf16_weights():
    saved = {"state": {}, "param_groups": [{"betas": (0.9, 0.95), "lr": 0.1}]}
    assert set(kinds_that_write(saved)) == {"adamw_8bit", "adamw_bf16", "adamw_master"}
