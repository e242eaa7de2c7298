"""In a resumed run, an optimizer or scheduler that a user chose has the run's settings, not the checkpoint's."""

import inspect
import re
import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from fa_train.optim.master_weights import MasterWeightsAdamW
from fa_train.optim.resume import keep_own_settings, require_same_kind
from fa_train.optim.schedule import warmup_cosine

OPTIMIZERS = sorted(
    (kind for kind in vars(optim).values() if inspect.isclass(kind) and issubclass(kind, optim.Optimizer)),
    key=lambda kind: kind.__name__,
)
OPTIMIZERS.remove(optim.Optimizer)
OTHER = {"lr": 0.5, "weight_decay": 0.3, "betas": (0.8, 0.9), "dampening": 0.2, "maximize": True, "foreach": False}
STOPPED, STEPS = 4, 9  # step of the checkpoint, and number of steps of a whole run

SCHEDULERS = {
    "StepLR": lambda o, n: lr_scheduler.StepLR(o, n),
    "MultiStepLR": lambda o, n: lr_scheduler.MultiStepLR(o, [n, n + 2]),
    "ConstantLR": lambda o, n: lr_scheduler.ConstantLR(o, total_iters=n),
    "LinearLR": lambda o, n: lr_scheduler.LinearLR(o, total_iters=n),
    "ExponentialLR": lambda o, n: lr_scheduler.ExponentialLR(o, 1 - 1 / (2 * n)),
    "PolynomialLR": lambda o, n: lr_scheduler.PolynomialLR(o, 2 * n),
    "CosineAnnealingLR": lambda o, n: lr_scheduler.CosineAnnealingLR(o, n),
    "CosineAnnealingWarmRestarts": lambda o, n: lr_scheduler.CosineAnnealingWarmRestarts(o, n),
    "LambdaLR": lambda o, n: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + n)),
    "MultiplicativeLR": lambda o, n: lr_scheduler.MultiplicativeLR(o, lambda step: 1 - 1 / (step + n)),
    "OneCycleLR": lambda o, n: lr_scheduler.OneCycleLR(o, 0.3, total_steps=5 * n),
    "CyclicLR": lambda o, n: lr_scheduler.CyclicLR(o, 0.01, 0.3, n),
    "SequentialLR": lambda o, n: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=n), lr_scheduler.CosineAnnealingLR(o, 9)], [n]
    ),
    "ChainedScheduler": lambda o, n: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, n), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


class SelfTuning(optim.SGD):
    """An optimizer whose param_groups hold a value that changes in each step, such as `d` in Prodigy."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.defaults["distance"] = 0.0
        for group in self.param_groups:
            group["distance"] = 0.0


def of(kind, **settings):
    """Returns an optimizer of the class `kind`. Leaves out settings that the class does not accept."""
    given = {name: value for name, value in settings.items() if name in inspect.signature(kind.__init__).parameters}
    return kind([nn.Parameter(torch.ones(2, 2))], **given)


@pytest.mark.parametrize(
    "make",
    [
        optim.AdamW,
        partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
        partial(optim.Adagrad, fused=True),
        optim.Muon,
        partial(MasterWeightsAdamW, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    ],
    ids=["AdamW", "SGD", "Adagrad", "Muon", "MasterWeightsAdamW"],
)
def test_moments_of_other_weights_are_refused_because_fused_optimizers_would_write_outside_their_memory(make):
    shapes, dtype = ((4, 3), (3, 4)), torch.bfloat16
    saved, resumed = (make([nn.Parameter(torch.ones(s, dtype=dtype)) for s in x]) for x in (shapes, shapes[::-1]))
    for weight in saved.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    with torch.compiler.set_stance("force_eager"):
        saved.step()
    keep_own_settings(resumed, lr_scheduler.ConstantLR(resumed))
    with pytest.raises(ValueError, match=r"trained the same weights: .* must have the shape \(3, 4\); got \(4, 3\)"):
        resumed.load_state_dict(saved.state_dict())


def constant(optimizer):
    return lr_scheduler.ConstantLR(optimizer, 1.0)


def settings_of(optimizer):
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def rates(optimizer, scheduler, steps):
    """Returns the learning rate and the momentum of each step."""
    found = []
    for _ in range(steps):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_keeps_its_settings(kind):
    saved, resumed = of(kind, lr=0.1), of(kind, **OTHER)
    keep_own_settings(resumed, constant(resumed))
    before = settings_of(resumed)
    assert before != settings_of(saved)
    resumed.load_state_dict(saved.state_dict())
    assert settings_of(resumed) == before


def test_values_that_change_in_each_step_are_restored():
    saved, resumed = SelfTuning([nn.Parameter(torch.ones(2))]), SelfTuning([nn.Parameter(torch.ones(2))], lr=0.5)
    saved.param_groups[0]["distance"] = 7.0
    keep_own_settings(resumed, constant(resumed))
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.param_groups[0]["distance"], resumed.param_groups[0]["lr"]) == (7.0, 0.5)


def test_a_count_that_a_step_has_added_is_restored():
    saved, resumed = of(optim.SGD, lr=0.1), of(optim.SGD, lr=0.5)
    keep_own_settings(resumed, constant(resumed))
    for optimizer, count in ((saved, 50), (resumed, 1)):
        optimizer.param_groups[0]["step"] = count
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.param_groups[0]["step"], resumed.param_groups[0]["lr"]) == (50, 0.5)


@pytest.mark.parametrize(
    "scheduler", [lambda o: SWALR(o, 0.01, 3), lr_scheduler.ReduceLROnPlateau], ids=["SWA", "plateau"]
)
def test_a_scheduler_that_does_not_repeat_its_steps_keeps_the_checkpoints_rate(scheduler):
    saved, resumed = of(optim.SGD, lr=0.1), of(optim.SGD, lr=0.5)
    schedules = scheduler(saved), scheduler(resumed)
    saved.param_groups[0]["lr"] = 0.02
    keep_own_settings(resumed, schedules[1])
    resumed.load_state_dict(saved.state_dict())
    schedules[1].load_state_dict(schedules[0].state_dict())
    assert resumed.param_groups[0]["lr"] == 0.02


def test_momentum_may_start_in_a_resumed_run():
    resumed = of(optim.SGD, momentum=0.9)
    keep_own_settings(resumed, constant(resumed))
    resumed.load_state_dict(of(optim.SGD).state_dict())
    assert resumed.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(optim.AdamW, "amsgrad", True), (optim.RMSprop, "momentum", 0.9), (optim.RMSprop, "centered", True)],
)
def test_a_setting_that_needs_more_state_is_refused(kind, name, value):
    resumed = of(kind, lr=0.1, **{name: value})
    keep_own_settings(resumed, constant(resumed))
    with pytest.raises(ValueError, match=rf"optimizer.{name} must be (False|0), as in the checkpoint.*; got {value}"):
        resumed.load_state_dict(of(kind, lr=0.1).state_dict())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_follows_its_settings(name):
    """A resumed run has the learning rates of a whole run with the resumed run's settings. The checkpoint has other
    settings.
    """
    first, whole, resumed = (of(optim.SGD, lr=lr, momentum=0.9) for lr in (0.1, 0.2, 0.2))
    schedules = [SCHEDULERS[name](optimizer, n) for optimizer, n in ((first, 3), (whole, 5), (resumed, 5))]
    rates(first, schedules[0], STOPPED)
    expected = rates(whole, schedules[1], STEPS)
    kind = type(schedules[2])
    keep_own_settings(resumed, schedules[2])
    assert isinstance(schedules[2], kind) and type(schedules[2]).__name__ == kind.__name__
    stored, fresh = deepcopy(schedules[0].state_dict()), deepcopy(schedules[2].state_dict())
    assert stored.keys() == fresh.keys()
    resumed.load_state_dict(first.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        schedules[2].load_state_dict(stored)
    assert rates(resumed, schedules[2], STEPS - STOPPED) == expected[STOPPED:]
    schedules[2].load_state_dict(fresh)  # as Lightning's tuners do
    assert resumed.param_groups[0]["lr"] == expected[0][0]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_schedule_of_the_config_continues_after_any_scheduler_of_torch(name):
    first, resumed = (of(optim.SGD, lr=0.1, momentum=0.9) for _ in range(2))
    saved, schedule = SCHEDULERS[name](first, 6), warmup_cosine(resumed, warmup_steps=8, max_steps=9, min_lr_ratio=0)
    rates(first, saved, STOPPED)
    keep_own_settings(resumed, schedule)
    schedule.load_state_dict(saved.state_dict())
    assert resumed.param_groups[0]["lr"] == pytest.approx(0.1 * (STOPPED + 1) / 8)


@pytest.mark.parametrize(("saved", "got"), [({"n": 3, "k": 1}, "k, n"), ({}, "nothing")])
def test_the_schedule_of_the_config_refuses_a_scheduler_without_a_number_of_steps(saved, got):
    schedule = warmup_cosine(of(optim.SGD), warmup_steps=8, max_steps=9, min_lr_ratio=0)
    with pytest.raises(ValueError, match=f"as last_epoch; got a scheduler that saved {got}$"):
        schedule.load_state_dict(saved)


def test_an_optimizer_may_be_made_by_an_object():
    class Factory:
        def __call__(self, model):
            return optim.SGD(model.parameters())

    require_same_kind(Factory(), of(optim.SGD).state_dict())


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        (optim.SGD, optim.AdamW, "SGD has the settings dampening, momentum, nesterov; got amsgrad, betas, "),
        (optim.AdamW, optim.SGD, "AdamW has the settings amsgrad, betas, .*; got dampening, momentum, nesterov"),
        (optim.RMSprop, optim.Adagrad, "RMSprop has the settings alpha, .*; got "),
    ],
)
def test_a_checkpoint_of_another_optimizer_of_torch_is_refused(kind, other, message):
    resumed = of(kind)
    keep_own_settings(resumed, constant(resumed))
    with pytest.raises(ValueError, match=f"^ckpt_path must be a checkpoint of the same optimizer: {message}"):
        resumed.load_state_dict(of(other).state_dict())


def test_a_checkpoint_of_an_older_torch_and_another_scheduler_is_accepted():
    saved, resumed = of(optim.AdamW), of(optim.AdamW)
    lr_scheduler.OneCycleLR(saved, 0.3, total_steps=9)
    keep_own_settings(resumed, constant(resumed))
    content = saved.state_dict()
    del content["param_groups"][0]["decoupled_weight_decay"]
    resumed.load_state_dict(content)


class RowMuon(optim.Muon):
    def __init__(self, params, setting="scale"):
        super().__init__(params)
        self.param_groups[0][setting] = self.defaults[setting] = 1.0

    def step(self):
        super().step()
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["rows"] = torch.ones(len(weight), 1)


def test_a_users_subclass_may_have_states_of_other_shapes_and_rename_its_settings():
    weights = [[nn.Parameter(torch.ones(4, 3))] for _ in range(2)]
    saved, resumed = RowMuon(weights[0]), RowMuon(weights[1], "row_scale")
    weights[0][0].grad = torch.ones(4, 3)
    saved.step()
    keep_own_settings(resumed, constant(resumed))
    resumed.load_state_dict(saved.state_dict())
    assert resumed.state[weights[1][0]]["rows"].shape == (4, 1)


def test_a_first_moment_of_another_shape_is_refused_for_a_subclass_of_adam_with_its_own_step():
    class Own(optim.AdamW):
        def step(self):
            super().step()

    saved, resumed = (Own([nn.Parameter(torch.ones(shape))]) for shape in ((4, 3), (3, 4)))
    saved.param_groups[0]["params"][0].grad = torch.ones(4, 3)
    saved.step()
    keep_own_settings(resumed, constant(resumed))
    with pytest.raises(ValueError, match=r"must have the shape \(3, 4\); got \(4, 3\)"):
        resumed.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("sizes", [[1, 2], [2, 1, 1], [2]])
def test_a_checkpoint_of_other_trained_weights_is_refused(sizes):
    own, saved = (
        optim.SGD([{"params": [nn.Parameter(torch.ones(1)) for _ in range(size)]} for size in groups])
        for groups in ([2, 1], sizes)
    )
    keep_own_settings(own, constant(own))
    with pytest.raises(ValueError, match=re.escape(f"[2, 1] weights in the optimizer's groups; got {sizes}. Freeze")):
        own.load_state_dict(saved.state_dict())
