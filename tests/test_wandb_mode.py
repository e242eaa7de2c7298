"""If the W&B server cannot be used, a run with a W&B key continues offline within seconds."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest
from hydra.utils import instantiate

from fa_train import run_config, training
from tests.support.training import composed, quiet_environment, tiny
from train import run_in_own_process

KEY = "0123456789" * 4
NOBODY = "http://127.0.0.1:9"  # no server listens on this port
PROGRAM = "from fa_train.wandb_mode import wandb_mode; print(wandb_mode())"


def mode_of(home: Path, **environment: str) -> tuple[str, list[str]]:
    """Calls wandb_mode() in a new process with an empty home, and returns its result and the lines that it printed."""
    own = quiet_environment() | {"HOME": str(home), "WANDB_CONFIG_DIR": str(home), "WANDB_SILENT": "true"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=own | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 30, "most of it is the import of wandb on a busy machine"
    *lines, mode = done.stdout.splitlines()
    return mode, lines


@pytest.fixture
def silent_host():
    """Yields the address of a server that accepts connections but never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


class Answers(BaseHTTPRequestHandler):
    """A fake W&B server, which accepts every key if `status` is 200, and otherwise refuses every key."""

    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        accepted = self.status == 200
        answer = {"data": {"viewer": {"id": "1", "username": "somebody", "entity": "somebody", "flags": "{}"}}}
        body = json.dumps(answer if accepted else {"errors": [{"message": "invalid key"}]}).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as started:
        threading.Thread(target=started.serve_forever, daemon=True).start()
        yield started
        started.shutdown()


@pytest.mark.slow
def test_a_key_in_the_environment_gives_offline_without_a_network(tmp_path):
    mode, lines = mode_of(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=NOBODY)
    assert mode == "offline" and len(lines) == 1 and "login failed" in lines[0]


@pytest.mark.slow
def test_a_key_in_a_netrc_file_gives_offline_without_a_network(tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1:9\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    mode, lines = mode_of(tmp_path, NETRC=str(netrc), WANDB_BASE_URL=NOBODY)
    assert mode == "offline" and len(lines) == 1 and "login failed" in lines[0], "the file was not read"


@pytest.mark.slow
def test_a_host_that_never_answers_gives_offline(tmp_path, silent_host):
    mode, lines = mode_of(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=silent_host)
    assert mode == "offline" and len(lines) == 1 and "login failed" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("key", [pytest.param("short", id="malformed"), pytest.param(KEY, id="refused")])
def test_a_wrong_key_does_not_end_a_run(key, tmp_path, server, monkeypatch):
    monkeypatch.setattr(Answers, "status", 401)
    mode, lines = mode_of(tmp_path, WANDB_API_KEY=key, WANDB_BASE_URL=f"http://127.0.0.1:{server.server_port}")
    assert mode == "offline" and len(lines) == 1
    assert ("invalid key" if key == KEY else "WANDB_API_KEY invalid") in lines[0]


@pytest.mark.slow
def test_a_key_that_the_server_accepts_gives_online(tmp_path, server):
    mode, lines = mode_of(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=f"http://127.0.0.1:{server.server_port}")
    assert (mode, lines) == ("online", [])


@pytest.mark.slow
def test_the_environment_may_choose_the_mode(tmp_path):
    assert mode_of(tmp_path, WANDB_MODE="disabled", WANDB_API_KEY=KEY, WANDB_BASE_URL=NOBODY) == ("disabled", [])


@pytest.mark.parametrize(
    ("mode", "environment"),
    [pytest.param("online", None, id="logger.mode"), pytest.param(None, "online", id="WANDB_MODE")],
)
@pytest.mark.parametrize("found", ["none", "WANDB_API_KEY invalid"])
def test_a_run_that_must_log_online_needs_a_key_before_it_starts(mode, environment, found, tmp_path, monkeypatch):
    login = Mock(return_value=False) if found == "none" else Mock(side_effect=ValueError(found))
    monkeypatch.setattr("wandb.login", login)
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    overrides = [] if mode is None else [f"logger.mode={mode}"]
    setting = "WANDB_MODE" if mode is None else "logger.mode"
    message = f"^{setting}=online needs an API key of W&B; got {found}. Run `wandb login`, .* choose {setting}=offline$"
    with (
        composed(tmp_path, *tiny(tmp_path, "logger=wandb", *overrides)) as cfg,
        pytest.raises(ValueError, match=message),
    ):
        run_config.require_start(cfg, 1)


def test_an_ablation_that_must_log_online_needs_a_key_before_its_first_job(tmp_path, monkeypatch):
    monkeypatch.setattr("wandb.login", Mock(return_value=False))
    overrides = ("logger=wandb", "logger.mode=online", "+sweep_job._target_=builtins.exit", "+sweep_job._partial_=true")
    with (
        composed(tmp_path, *tiny(tmp_path, *overrides)) as cfg,
        pytest.raises(ValueError, match=r"^logger\.mode=online needs an API key of W&B; got none"),
    ):
        run_in_own_process(cfg)


@pytest.mark.parametrize(
    ("of_sweep", "mode", "refused"),
    [
        pytest.param(None, "offline", True, id="multirun"),
        pytest.param(None, "disabled", False, id="disabled"),
        pytest.param("s1", "offline", False, id="agent"),
    ],
)
def test_the_jobs_of_a_multirun_may_not_share_a_wandb_run(of_sweep, mode, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    if of_sweep is not None:
        monkeypatch.setenv("WANDB_SWEEP_ID", of_sweep)
    message = "^WANDB_RUN_ID must not be set in a multirun, .* got mine$"
    with composed(tmp_path, *tiny(tmp_path, "logger=wandb", f"logger.mode={mode}")) as cfg:
        run_config.require_start(cfg, 1)  # a single run continues the run of W&B
        monkeypatch.setattr(run_config, "in_sweep", lambda: True)
        with pytest.raises(ValueError, match=message) if refused else nullcontext():
            run_config.require_start(cfg, 1)


def test_only_rank_0_needs_a_key(tmp_path, monkeypatch):
    """All ranks must call decided_by_rank_zero with the same questions, because a rank waits for each answer."""
    questions = []

    monkeypatch.setattr("wandb.login", Mock(return_value=False))
    monkeypatch.setattr(run_config, "decided_by_rank_zero", lambda question, decide: questions.append(question))
    for mode in ("online", "offline"):
        with composed(tmp_path, *tiny(tmp_path, "logger=wandb", f"logger.mode={mode}")) as cfg:
            run_config.require_start(cfg, 1)
    assert questions == 2 * ["logger"]


@pytest.mark.parametrize(
    ("name", "known"),
    [("WANDB_MODE", "online, offline, shared, disabled, dryrun, run"), ("WANDB_RESUME", "allow, must, never, auto")],
)
@pytest.mark.parametrize(("value", "shown"), [("OFFLINE", "OFFLINE"), ("on", "on"), ("", '""')])
def test_an_unknown_value_in_the_environment_is_named_before_the_run_starts(
    name, known, value, shown, tmp_path, monkeypatch
):
    monkeypatch.setenv(name, value)
    message = f"^{name} must be one of {known}; got {shown}$"
    with composed(tmp_path, *tiny(tmp_path, "logger=wandb")) as cfg, pytest.raises(ValueError, match=message):
        run_config.require_start(cfg, 1)
    with composed(tmp_path, *tiny(tmp_path, "logger=wandb", "trainer.logger=false")) as cfg:
        run_config.require_start(cfg, 1)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("WANDB_RUN_ID", "a/b", "Run ID cannot contain the characters"),
        ("WANDB_TAGS", "a,", "Value error, Tag at index 1 is empty"),
        ("WANDB_CONSOLE", "x", "Input should be 'auto', 'off'"),
    ],
)
def test_a_value_that_wandb_refuses_is_named_before_the_run_starts(name, value, reason, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short")  # the run is logged offline
    monkeypatch.setenv(name, value)
    message = f"^{name} must be a value that wandb accepts; got {value}: {reason}"
    with composed(tmp_path, *tiny(tmp_path, "logger=wandb")) as cfg, pytest.raises(ValueError, match=message):
        run_config.require_start(cfg, 1)
    monkeypatch.delenv(name)
    with composed(tmp_path, *tiny(tmp_path, "logger=wandb")) as cfg:
        run_config.require_start(cfg, 1)


def test_a_run_passes_no_setting_of_which_wandb_warns(tmp_path):
    with composed(tmp_path, *tiny(tmp_path, "logger=wandb", "logger.mode=offline")) as cfg:
        [logger] = training.build(cfg)[0].loggers
    assert logger._wandb_init["mode"] == "offline" and "anonymous" not in logger._wandb_init


def test_an_offline_logger_is_offline_even_with_a_key(tmp_path):
    with composed(tmp_path, *tiny(tmp_path, "logger=wandb", "logger.mode=online", "+logger.offline=true")) as cfg:
        [logger] = training.build(cfg)[0].loggers
    assert logger._wandb_init["mode"] == "offline"


def test_the_environment_gives_defaults_that_the_command_line_overrides(tmp_path, monkeypatch):
    for name in ("PROJECT", "NAME", "JOB_TYPE", "TAGS", "DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    keys = ("project", "name", "job_type", "tags", "dir")

    def passed(*overrides: str) -> list[object]:
        with composed(tmp_path, *tiny(tmp_path, "logger=wandb", "logger.mode=offline", *overrides)) as cfg:
            run_config.check(cfg)
            logger = instantiate(cfg.logger)
        return [logger._wandb_init[key] for key in keys]

    tags = ["model=nano", "attention=sdpa", "data=text", "seq_len=64"]
    assert passed() == ["fa_train", "nano sdpa 64", "train", tags, str(tmp_path)]
    for name, value in {"PROJECT": "7", "NAME": 'a "b", c=1', "JOB_TYPE": "x", "TAGS": "a, b=1", "DIR": "/w"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert passed() == ["7", 'a "b", c=1', "x", ["a", "b=1"], "/w"]
    given = ("logger.project=p", "logger.name=n", "logger.job_type=j", "logger.tags=[t]", "logger.save_dir=/s")
    assert passed(*given) == ["p", "n", "j", ["t"], "/s"]


def test_wandb_reads_wandb_resume_unless_the_config_sets_resume(tmp_path, monkeypatch):
    def passed(*overrides):
        with composed(tmp_path, *tiny(tmp_path, "logger=wandb", "logger.mode=offline", *overrides)) as cfg:
            [logger] = training.build(cfg)[0].loggers
        return logger._wandb_init.get("resume")

    monkeypatch.delenv("WANDB_RESUME", raising=False)
    assert passed() == "allow"
    monkeypatch.setenv("WANDB_RESUME", "never")
    assert passed() is None, "without an argument, wandb.init reads the variable"
    assert passed("+logger.resume=allow") == "allow"
    for resume in ("allow", "must"):
        logger = f"{{_target_: lightning.pytorch.loggers.WandbLogger, offline: true, resume: {resume}}}"
        assert passed(f"trainer.logger={logger}") == resume
    assert passed(f"trainer.logger=[{logger}]") == "must"


def test_a_project_that_wandb_would_refuse_is_named_before_the_run_starts(tmp_path):
    message = r"logger.project must not contain /; got team/mine. Set the team with \+logger.entity=<team>"
    with (
        composed(tmp_path, *tiny(tmp_path, "logger=wandb", "logger.project=team/mine")) as cfg,
        pytest.raises(ValueError, match=message),
    ):
        run_config.require_start(cfg, 1)
