"""A results page names its command and this repository's commit, even if the command starts in another repository."""

import subprocess
import sys

import pytest
import torch

from scripts.bench import provenance


def git(*arguments, cwd):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    done = subprocess.run(["git", *identity, *arguments], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit() -> str:
    return provenance.describe("-m command", None)["commit"]


@pytest.fixture
def other_repository(tmp_path, monkeypatch):
    """Returns the folder `checkout` in another repository. The test runs in the root folder of the other repository."""
    git("init", cwd=tmp_path)
    git("commit", "--allow-empty", "--message=other", cwd=tmp_path)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(provenance, "REPOSITORY", checkout)
    return checkout


def test_the_commit_is_not_that_of_the_current_folder(other_repository):
    git("init", cwd=other_repository)
    git("commit", "--allow-empty", "--message=own", cwd=other_repository)
    assert commit() == git("describe", "--always", cwd=other_repository)


def test_a_downloaded_folder_does_not_have_the_commit_of_a_repository_around_it(other_repository):
    assert commit() == "unknown: no git checkout, and no --commit"


def test_a_page_is_written_without_git(other_repository, monkeypatch, tmp_path):
    (other_repository / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == "unknown: git is not installed, and no --commit"


def test_the_command_can_be_repeated(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/host.py", "--out", "two words"])
    assert provenance.describe("-m scripts.bench.host", "abc")["command"] == (
        "python -m scripts.bench.host --out 'two words'"
    )


def test_results_have_a_folder(tmp_path, monkeypatch):
    assert provenance.results_prefix(tmp_path / "given" / "host", "host") == tmp_path / "given" / "host"
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    prefix = provenance.results_prefix(None, "host")
    assert prefix.name.startswith("host_h100-80gb-hbm3_2") and prefix.parent == tmp_path / "scripts" / "results"
    assert prefix.parent.is_dir() and (tmp_path / "given").is_dir()
