"""Checks the documentation: its Python code runs, its commands can be parsed, and its links have targets."""

import argparse
import importlib
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch.distributed.run import get_args_parser

from fa_train import training
from scripts.composed import composed
from tests.support.documentation import GUIDES, PAGES, commands
from tests.support.marks import slow_if
from tests.support.processes import REPOSITORY
from tests.support.training import composed as run_config

RESULTS = sorted((REPOSITORY / "scripts" / "results").glob("*.md"))
OWN_KEYS = re.compile(r"workers=")  # options that scripts take in addition to overrides of train.py


def fragments(page: Path) -> list[str]:
    """Returns the Python code blocks of a page, preceded by empty lines so that errors name the line in the page."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text[: match.start(1)].count("\n") + match[1] for match in found]


@pytest.mark.parametrize("page", [page for page in PAGES if fragments(page)], ids=lambda page: page.stem)
def test_every_fragment_runs(page):
    namespace: dict[str, object] = {}
    for fragment in fragments(page):
        exec(compile(fragment, str(page), "exec"), namespace)


@cache
def composes(*overrides: str) -> None:
    """Composes and checks the config of a command. If several pages have the same command, it is checked only once."""
    composed([*overrides])


class Parsed(Exception):
    """Raised after the arguments of a script have been accepted."""


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a command names a script, target, option or setting that does not exist."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets, f"make {words[1]}"
        return
    if words[0] == "torchrun":
        parsed = get_args_parser().parse_args(words[1:])
        words = ["python", parsed.training_script, *parsed.training_script_args]
    script, arguments = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    if script.endswith("plan_memory"):
        module.main(arguments)
        return
    if "--config-dir" in arguments:
        return  # test_the_example_of_a_config_folder_makes_a_run
    if script.endswith(("train.py", "prepare_data", "profile_step")):
        one = [word.split(",")[0] if "-m" in arguments else word for word in arguments]
        composes(*(word for word in one if word != "-m" and not OWN_KEYS.match(word)))
        return

    original = argparse.ArgumentParser.parse_args

    def parse_args(parser, args=None, namespace=None):
        original(parser, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(Parsed):
        module.main()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=slow_if(page.stem != "CONTRIBUTING")) for page in GUIDES if commands(page)],
)
def test_every_command_names_what_exists(page, monkeypatch):
    for words in commands(page):
        try:
            parse(words, monkeypatch)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page.name}: {shlex.join(words)}") from error


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_named_checkpoint_is_the_last_one_of_an_experiment_on_the_same_page(page):
    checkpoints = re.findall(r"runs/(\w+)/<time>/checkpoints/step_(\d+)\.ckpt", page.read_text(encoding="utf-8"))
    lines = [words[2:] for words in commands(page) if words[:2] == ["python", "train.py"] and "-m" not in words]
    experiments = [words for words in lines if any(word.startswith("experiment=") for word in words)]
    runs = [composed(words) for words in experiments] if checkpoints else []
    assert {(name, int(step)) for name, step in checkpoints} <= {(cfg.run_name, cfg.max_steps) for cfg in runs}


def test_the_example_of_a_config_folder_makes_a_run(tmp_path, monkeypatch):
    docs = REPOSITORY / "docs"
    experiment, data = re.findall(r"^```yaml\n(.*?)^```", (docs / "config.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_module.py").write_text(
        "from lightning import Callback\n\n\nclass MyCallback(Callback):\n    pass\n"
    )
    model = "defaults: [_decoder, _self_]\nn_layers: 2\ndim: 64\nn_heads: 4\nffn_dim: 128\n"
    for name, text in {"experiment/mine": experiment, "data/articles": data, "model/small": model}.items():
        path = tmp_path / "my_conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, number in {"train": 500, "val": 300}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"article": "x" * number}) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FA_TRAIN_CACHE", str(tmp_path / "cache"))
    folder = f"hydra.searchpath=[file://{tmp_path}/my_conf]"  # the same as --config-dir
    paths = [f"data.{key}={tmp_path}/{name}.jsonl" for key, name in {"path": "train", "val_path": "val"}.items()]
    short = [
        "preset=cpu", "logger=csv", "seq_len=64", "max_steps=1", "batch_size=1", "data.num_workers=0",
        "trainer.accelerator=cpu", "trainer.val_check_interval=1",
    ]  # fmt: skip
    with run_config(tmp_path / "run", folder, "experiment=mine", *paths, *short) as cfg:
        trainer, lit_gpt, loaded = training.build(cfg)
    assert [type(callback).__name__ for callback in trainer.callbacks].count("MyCallback") == 1
    assert len(lit_gpt.model.blocks) == 2
    assert "held out for validation: 1 documents, 302 tokens" in loaded.packing_report().text()
    sys.modules.pop("my_module")


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*GUIDES, *RESULTS], ids=lambda page: page.stem)
def test_every_link_within_the_repository_leads_somewhere(page):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_file_in_backticks_exists(page):
    paths = re.findall(r"`((?:conf|docs|fa_train|kernels|scripts|tests)/[\w/.-]+)`", page.read_text(encoding="utf-8"))
    for path in paths:
        assert (REPOSITORY / path).exists(), path


def test_the_site_shows_every_page():
    site = OmegaConf.load(REPOSITORY / "mkdocs.yml")
    shown = {page for entry in site["nav"] for page in entry.values()}
    assert {page.name for page in PAGES} <= shown
    assert shown - {page.name for page in PAGES} == {
        "index.md", "results/README.md", "contributing.md", "changelog.md",
    }  # fmt: skip
    assert all((REPOSITORY / hook).exists() for hook in site["hooks"])


def test_the_index_of_results_names_every_page():
    index = (REPOSITORY / "scripts" / "results" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([a-z0-9_]+\.md)\)", index)) == {page.name for page in RESULTS} - {"README.md"}


def test_every_file_of_results_is_shown_by_a_page():
    shown = "".join(page.read_text(encoding="utf-8") for page in [*RESULTS, REPOSITORY / "README.md"])
    files = [path.name for path in RESULTS[0].parent.iterdir() if path.suffix != ".md"]
    assert [name for name in files if name not in shown] == []
