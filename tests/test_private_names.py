"""If a package lacks a private name that the code uses, the error message names the version to install."""

import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from fa_train.callbacks.interrupt import GracefulInterrupt
from fa_train.memory.loss import _liger_cross_entropy
from fa_train.parallel.fsdp import FullyShardedStrategy
from fa_train.private_names import TESTED, private, private_module, replace_private, require_parameters
from tests.support.training import REPOSITORY

PROJECT = tomllib.loads(Path(REPOSITORY, "pyproject.toml").read_text())["project"]
BOUNDS = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}


def test_an_assignment_never_makes_a_new_attribute():
    owner = SimpleNamespace(old=1)
    replace_private("lightning", owner, "old", 2)
    assert owner.old == private("lightning", owner, "old") == 2
    message = (
        rf"lightning {version('lightning')} has no SimpleNamespace.new. Install .*: lightning=={TESTED['lightning']}"
    )
    with pytest.raises(ImportError, match=message):
        replace_private("lightning", owner, "new", 3)
    assert vars(owner) == {"old": 2}
    with pytest.raises(ImportError, match=message):
        private("lightning", owner, "new")


def interrupted(connector: SimpleNamespace, epoch_loop: SimpleNamespace) -> SimpleNamespace:
    """Builds a stand-in for a trainer with one process, with only the attributes that GracefulInterrupt uses."""
    return SimpleNamespace(
        world_size=1, _signal_connector=connector, fit_loop=SimpleNamespace(epoch_loop=epoch_loop)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("connector", "epoch_loop", "missing"),
    [
        ({}, {"_broadcast_sigterm_tensor": None}, "_sigterm_notifier_fn"),
        ({"_sigterm_notifier_fn": None}, {}, "_broadcast_sigterm_tensor"),
    ],
)
def test_a_lightning_that_would_hang_on_a_signal_is_refused(connector, epoch_loop, missing):
    trainer = interrupted(SimpleNamespace(**connector), SimpleNamespace(**epoch_loop))
    with pytest.raises(ImportError, match=rf"has no SimpleNamespace.{missing}. Install .*: lightning=="):
        GracefulInterrupt().on_fit_start(trainer, None)


def test_a_module_that_a_version_lacks_is_named():
    assert private_module("torch", "torch.nn") is torch.nn
    with pytest.raises(ImportError, match=r"^torch .* has no module torch.no_such. Install the version"):
        private_module("torch", "torch.no_such")


def test_a_lightning_with_another_mesh_is_refused():
    strategy = FullyShardedStrategy(1, True, False, "float32")
    del strategy._data_parallel_size
    with pytest.raises(ImportError, match=r"has no FullyShardedStrategy._data_parallel_size"):
        strategy.setup_environment()


def test_a_liger_kernel_with_other_parameters_is_refused(monkeypatch):
    from liger_kernel.ops import cross_entropy

    kernel = SimpleNamespace(arg_names=[*cross_entropy.liger_cross_entropy_kernel.arg_names, "new_ptr"])
    monkeypatch.setattr(cross_entropy, "liger_cross_entropy_kernel", kernel)
    with pytest.raises(ImportError, match=r"liger-kernel .*, liger_cross_entropy_kernel has .* differ in new_ptr"):
        _liger_cross_entropy(torch.zeros(2, 8), torch.zeros(2, dtype=torch.long), 0.0, 0.0, 0.0)
    with pytest.raises(ImportError, match=r", f has other parameters than expected; they differ in a, c"):
        require_parameters("liger-kernel", "f", ["a", "b"], ["b", "c"])


def test_torchaos_states_are_known():
    from fa_train.optim.low_memory import OptimState8bit, _taken_apart

    state = OptimState8bit.zeros((256,))
    assert _taken_apart(state).keys() == {"codes", "scale", "qmap", "signed"}


@pytest.mark.parametrize("package", [*TESTED, "wandb"])
def test_packages_with_private_or_moving_parts_are_bounded_on_both_sides(package):
    bounds = BOUNDS[package]
    assert {spec.operator for spec in bounds} == {">=", "<"}
    assert version(package) in bounds, "the installed version must be a tested one"


@pytest.mark.parametrize("package", TESTED)
def test_the_version_to_install_is_within_bounds(package):
    assert TESTED[package] in BOUNDS[package]
