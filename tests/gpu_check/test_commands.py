"""Tests tests/gpu_check/commands.py on a CPU: its settings are valid, and it finds commands that behave differently."""

import shlex
import signal

import pytest

from scripts.composed import composed
from tests.gpu_check import commands
from tests.gpu_check.commands import ONE_GPU, TWO_GPUS, Command, failure_of

DATA = {"base": "{base}", "chats": "{chats}", "cache": "{cache}"}


def test_names_are_unique_and_settings_are_valid(tmp_path):
    names = [command.name for command in (*ONE_GPU, *TWO_GPUS)]
    assert len(set(names)) == len(names)
    data = commands.write_data(tmp_path)
    for command in (*ONE_GPU, *TWO_GPUS):
        for line in command.lines:
            arguments = shlex.split(line.format(out=tmp_path, **data))
            if "train.py" in arguments:
                settings = arguments[arguments.index("train.py") + 1 :]
                composed([x for x in settings if x != "-m" and "=naive,flash" not in x and "sweep" not in x])


SLOW = "import signal, sys, time; {}; print('ready', flush=True); time.sleep(60)"
EXIT_ON_SIGUSR1 = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit('saved'))"


@pytest.mark.parametrize(
    ("code", "command", "failure"),
    [
        pytest.param("print(1)", Command("a", ()), "", id="passes"),
        pytest.param("print(1)", Command("a", (), says="2"), "did not print: 2", id="says-something-else"),
        pytest.param("exit('no')", Command("a", ()), "exit status 1 instead of 0; the last line: no", id="fails"),
        pytest.param(
            SLOW.format(EXIT_ON_SIGUSR1),
            Command("a", (), 1, "saved", ("ready", signal.SIGUSR1)),
            "",
            id="handles-a-signal",
        ),
        pytest.param(
            SLOW.format("signal.signal(signal.SIGUSR1, signal.SIG_IGN)"),
            Command("a", (), 1, "saved", ("ready", signal.SIGUSR1)),
            "did not end within 2 s",
            id="ignores-a-signal",
        ),
    ],
)
def test_a_command_that_behaves_differently_is_found(code, command, failure, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "LIMIT", 2)
    line = shlex.join(["python", "-c", code]).replace("{", "{{").replace("}", "}}")
    changed = Command(command.name, (line,), command.status, command.says, command.stop)
    assert failure_of(changed, DATA, tmp_path / "a", "") == failure
