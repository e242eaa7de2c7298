"""Tests the arguments of scripts that accept the overrides of train.py."""

import pytest

from scripts import prepare_data
from scripts.composed import composed, without
from scripts.memory_table import memory_table


@pytest.fixture
def folder(tmp_path):
    """Returns a config folder with the option experiment=mine."""
    path = tmp_path / "my conf's, 1" / "experiment" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\ndefaults: [override /data: stdlib]\nseq_len: 96\n")
    return str(path.parents[1])


def test_options_of_a_config_folder_can_be_chosen(folder, monkeypatch, tmp_path):
    for option in (["--config-dir", folder], [f"--config-dir={folder}"], ["-cd", folder]):
        assert composed([*option, "preset=cpu", "experiment=mine"]).seq_len == 96
    monkeypatch.chdir(tmp_path)
    assert composed(["preset=cpu", "experiment=mine", "--config-dir", "my conf's, 1"]).data.seq_len == 96


@pytest.mark.slow
def test_scripts_take_a_config_folder(folder, tmp_path):
    choice = ["--config-dir", folder, "experiment=mine"]
    assert ", 96 tokens at a time, " in memory_table([*choice, "gpu_gib=80", "host_gib=80"])
    report = prepare_data.main([*choice, "preset=cpu", f"data.cache_dir={tmp_path / 'cache'}", "workers=1"])
    assert "rows of 96 tokens" in report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--config-dir", "none"], "--config-dir must be a folder with config files; got none", id="none"),
        pytest.param(["--config-dir"], "--config-dir must be a folder with config files; got nothing", id="no-value"),
        pytest.param(["--config-name=mine"], ".* of train.py or --config-dir; got --config-name=mine", id="name"),
        pytest.param(["-m", "seq_len=8,16"], ".* of train.py or --config-dir; got -m", id="multirun"),
    ],
)
def test_other_options_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        composed(arguments)


@pytest.mark.parametrize(
    ("arguments", "value", "others"),
    [
        pytest.param(["a=1", "workers=2", "b=3", "workers=4=5"], "4=5", ["a=1", "b=3"], id="last"),
        pytest.param(["data.workers=2", "workers"], None, ["data.workers=2", "workers"], id="none"),
    ],
)
def test_the_last_value_of_an_option_counts(arguments, value, others):
    assert without("workers", arguments) == (value, others)
