"""For an argument of train.py that is neither an option nor an override, the error says what to write instead."""

import re

import pytest
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf

from fa_train.command_line import FLAGS, VALUED, require_form, sweep_folder_mistake


@pytest.mark.parametrize(
    ("command", "line"),
    [
        pytest.param("=3", "an override must have the form key=value; got =3, which has no key", id="no-key"),
        pytest.param(
            "model=gpt2 seq_len",
            "an override must have the form key=value, such as seq_len=4096; got seq_len",
            id="key",
        ),
        pytest.param("seq_len = 4096", ", without spaces; got seq_len = 4096. Write seq_len=4096", id="two-spaces"),
        pytest.param("seq_len =4096", ", without spaces; got seq_len =4096. Write seq_len=4096", id="space-before"),
        pytest.param("seq_len= 4096", ", without spaces; got seq_len= 4096. Write seq_len=4096", id="space-after"),
        pytest.param("data.path= (a)", ", without spaces; got data.path= (a). Write 'data.path=(a)'", id="quoted"),
        pytest.param(
            "--seq_len 4096", "--seq_len 4096 is no option. Write a setting without dashes: seq_len=4096", id="option"
        ),
        pytest.param("--seq-len=4096", "--seq-len=4096 is no option. Write .*: seq_len=4096", id="dash-in-the-name"),
        pytest.param("-seq_len=4096", "-seq_len=4096 is no option. Write .*: seq_len=4096", id="one-dash"),
        pytest.param("--resume model=gpt2", "--resume is no option. Write .*: resume=VALUE", id="flag"),
        pytest.param("model=gpt2 -m seq_len=8,16", "overrides must stand together, .*; got -m between", id="apart"),
        pytest.param("--hydra-help model=gpt2", "--hydra-help takes no overrides; got model=gpt2", id="hydra-help"),
    ],
)
def test_arguments_of_a_wrong_form(command, line):
    with pytest.raises(ValueError, match=line.replace("(a)", r"\(a\)")):
        require_form(command.split())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("-m model=gpt2 ~logger +data.x=3 seq_len=8,16", id="multirun"),
        pytest.param("data.val_path= ~logger", id="empty-value"),
        pytest.param("--config-dir folder model=gpt2", id="value-of-an-option"),
        pytest.param("--config-dir=folder -cn name model=gpt2 data.path=a=b", id="equals"),
        pytest.param("-cjob --info config", id="joined"),
        pytest.param("--multi seq_len=8 --help", id="start-of-a-name"),
        pytest.param("--hydra-help", id="hydra-help"),
    ],
)
def test_arguments_that_hydra_accepts(command):
    require_form(command.split())
    get_args_parser().parse_args(command.split())


def test_the_options_are_those_of_hydra():
    actions = get_args_parser()._option_string_actions
    assert {name for name, action in actions.items() if action.nargs == 0} == set(FLAGS)
    assert actions.keys() - set(FLAGS) == set(VALUED)


def test_the_folder_of_a_multirun_cannot_contain_the_name_of_a_run(monkeypatch):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # an earlier test may have set it
    setup_globals()  # registers the resolver `hydra`
    config = OmegaConf.create({"folder": "sw/${hydra:runtime.choices.model}"})
    with pytest.raises(ValueError, match="HydraConfig was not set") as unset:
        str(config.folder)
    arguments = ["-m", "hydra.sweep.dir=sw/${run_name}", "max_steps=2,3"]
    message = sweep_folder_mistake(unset.value, arguments)
    assert re.fullmatch(r"hydra\.sweep\.dir must not contain run_name .*; got hydra\.sweep\.dir=.*", str(message))
    for other, given in ((ValueError("x"), arguments), (unset.value, ["max_steps=2"])):
        assert sweep_folder_mistake(other, given) is None
