"""Every value in a config is checked before anything is built."""

import pkgutil
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import zip_longest
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Len, Lt
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from fa_train import config_options, run_config, settings
from fa_train.bounds import Betas, NonNegativeFloat
from fa_train.config_options import OTHER_NAMES
from fa_train.errors import explain
from tests.support.marks import slow_except
from tests.support.training import CONF, command_line, composed

# Together, the configs of all commands contain every kind of config node.
COMMANDS = {
    "default": ["preset=cpu"],
    "gpu": ["preset=gpu", "data=synthetic", "logger=csv", "optimizer=adamw_8bit", "strategy=ddp", "attention=chunked"],
    "text": [
        "preset=cpu",
        "data=text",
        "data.path=docs",
        "logger=tensorboard",
        "adapter=lora",
        "optimizer=adamw_bf16",
        "memory=auto",
    ],
    "finetune": [
        "preset=cpu",
        "experiment=finetune",
        "data.path=chats.jsonl",
        "model.pretrained=base",
        "strategy=fsdp",
    ],
    "mix": [
        "preset=cpu",
        "data=mix",
        "+data/source@data.sources.web=hf",
        "data.sources.web.name=web",
        "optimizer=adamw_offload",
    ],
}
NOT_OVERRIDDEN = {"_target_", "_args_"}  # Hydra calls the class or function `_target_` with the arguments `_args_`


def is_own(raw: Any, key: str) -> bool:
    """Returns True if the key has its own value, and False if the key copies another key by an interpolation.

    If a node is an interpolation such as ${other}, every key in the node copies a key of `other`.
    """
    for name in key.split("."):
        if not isinstance(raw, dict) or name not in raw:
            return False
        raw = raw[name]
    return not (isinstance(raw, str) and raw.startswith("${"))


def wrong_values(hint: Any) -> list[str]:
    """Returns values that a key with this type hint must refuse: other types, numbers out of bounds, and null."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return wrong_values(arguments[0]) + [value for bound in arguments[1:] for value in beyond(bound)]
    if type(None) in arguments and len(arguments) == 2:
        [other] = set(arguments) - {type(None)}
        return [value for value in wrong_values(other) if value != "null"]
    if origin is Literal:
        return ["foo", "1.5", "[a]"]
    by_type = {
        int: ["foo", "1.5", "true", "null", "[1]"],
        float: ["foo", "no", "true", "null", "[1]"],
        bool: ["no", "off", "Yes", "0", "null"],
        str: ["null", "7", "[a]"],
        settings.Node: ["foo", "3", "{a: 1}"],
    }
    return by_type.get(hint, [])


def beyond(bound: Any) -> list[str]:
    """Returns overrides that violate one bound."""
    match bound:
        case Ge(ge=int(limit)):
            return [str(limit - 1), "-inf"]
        case Gt(gt=int(limit)):
            return [str(limit), str(limit - 1), "nan"]
        case Le(le=int(limit)):
            return [str(limit + 1)]
        case Lt(lt=limit):
            return [str(limit), "nan"]
        case Len(min_length=least):
            return [str([0.5] * (least - 1))]
    raise AssertionError(f"{bound} is a bound that this test does not know")


def overridden(cfg, key, value):
    """Returns a copy of the config after an override on the command line, and the value that the override set."""
    copy = deepcopy(cfg)
    OmegaConf.update(copy, key, parsed(value), merge=False, force_add=True)
    came = OmegaConf.select(copy, key)
    return copy, OmegaConf.to_container(came) if OmegaConf.is_config(came) else came


def parsed(value):
    return OverridesParser.create().parse_override(f"key={value}").value()


def changed(resolved, key, value):
    """Returns a copy of the dictionary `resolved` in which `key` has the value `value`.

    resolved: a config whose interpolations have been replaced by their values.
    """
    name, _, rest = key.partition(".")
    return resolved | {name: changed(resolved[name], rest, value) if rest else value}


@pytest.mark.slow
def test_every_wrong_value_of_every_key_is_refused_in_one_line():
    tried = dict.fromkeys(NOT_OVERRIDDEN, 0)
    for overrides in COMMANDS.values():
        with composed("folder", *overrides) as cfg:
            raw = OmegaConf.to_container(cfg)
        resolved = OmegaConf.to_container(cfg, resolve=True)
        for key, _, hint in settings.entries(resolved):
            if key.rpartition(".")[2] in NOT_OVERRIDDEN or not is_own(raw, key) or (key, hint) in tried:
                continue
            values = wrong_values(hint)
            for number, value in enumerate(values):
                with pytest.raises(ValueError) as raised:
                    if number == 0 and f"${{{key}}}" in str(raw):  # keys that copy this key get the wrong value, too
                        wrong, came = overridden(cfg, key, value)
                        run_config.check(wrong)
                    else:
                        came = parsed(value)
                        settings.check(changed(resolved, key, came))
                line = str(raised.value)
                assert line.startswith(f"{key} must be ") and f"; got {settings.shown(came)}" in line, line
                assert explain(raised.value) == line
            tried[key, hint] = len(values)
    assert sum(tried.values()) > 400 and len(tried) > 100, f"{sum(tried.values())} overrides of {len(tried)} keys"


@pytest.mark.parametrize(
    ("override", "line"),
    slow_except(
        ["lr", "node", "parameter", "passed-on", "missing"],
        [
            pytest.param("optimizer.eps=0", "optimizer.eps must be a positive number; got 0", id="eps"),
            pytest.param("optimizer.lr=foo", "optimizer.lr must be a finite number of at least 0; got foo", id="lr"),
            pytest.param(
                "optimizer.betas=0.9",
                "optimizer.betas must be a list of 2 items, each a number of at least 0 and less than 1; got 0.9",
                id="betas",
            ),
            pytest.param(
                "optimizer.betas=[0.9]", "optimizer.betas must be a list of 2 items, .*; got \\[0.9\\]", id="one-beta"
            ),
            pytest.param(
                "optimized_metric=loss",
                "optimized_metric must be one of train/loss, .* or null; got loss",
                id="metric",
            ),
            pytest.param("model.rope_theta=-5", "model.rope_theta must be a positive number; got -5", id="rope-theta"),
            pytest.param("model.dim=foo", "model.dim must be a positive integer; got foo", id="dim"),
            pytest.param("model.tied=No", "model.tied must be true or false; got No", id="tied"),
            pytest.param("model.memory=foo", "model.memory must be a node with a _target_ or null; got foo", id="node"),
            pytest.param(
                "model.rope_scaling=yarn", "model.rope_scaling must be a mapping or null; got yarn", id="mapping"
            ),
            pytest.param(
                "++model.loss.z_loss=1",
                'model.loss must be a node .*; got {"z_loss": 1}. .* Set memory.loss instead',
                id="key-in-copy",
            ),
            pytest.param(
                "++trainer.logger.mode=offline",
                'trainer.logger must be .*; got {"mode": "offline"}. .* Set logger instead',
                id="key-in-copied-logger",
            ),
            pytest.param("memory.offload=no", "memory.offload must be true or false or all; got no", id="union"),
            pytest.param("data.val_rows=-1", "data.val_rows must be an integer of at least 0; got -1", id="val-rows"),
            pytest.param(
                "data.text_column=7",
                "data.text_column must be text; got 7; quotes make it text: .data.text_column='7'.",
                id="text",
            ),
            pytest.param(
                "data.text_column=1e3",
                "data.text_column must be text; got 1000.0; quotes make it text: .data.text_column='1e3'.",
                id="text-with-exponent",
            ),
            pytest.param(
                "seed=null", "seed must be an integer of at least 0 and less than 4294967296; got null", id="seed"
            ),
            pytest.param(
                "trainer.log_every_n_steps=0", "trainer.log_every_n_steps must be a positive integer; got 0", id="log"
            ),
            pytest.param(
                "trainer.devices=[]",
                "trainer.devices must be a positive integer, a list of at least 1 item, .*; got \\[\\]",
                id="devices",
            ),
            pytest.param(
                "trainer.gradient_clip_val=-1",
                "trainer.gradient_clip_val must be a finite number of at least 0 or null; got -1",
                id="clip",
            ),
            pytest.param(
                "callbacks.progress=3",
                "callbacks.progress must be a node with a _target_ or null; got 3",
                id="callback",
            ),
            pytest.param(
                "+model.n_layer=3", "unknown key model.n_layer; did you mean model.n_layers\\?", id="parameter"
            ),
            pytest.param(
                "+trainer.limit_val_batch=3",
                "unknown key trainer.limit_val_batch; did you mean trainer.limit_val_batches\\?",
                id="foreign-parameter",
            ),
            pytest.param("+logger.tagz=[a]", "unknown key logger.tagz; did you mean logger.tags\\?", id="passed-on"),
            pytest.param("~trainer._target_", "trainer must be a node with a _target_; got", id="trainer-of-no-class"),
            pytest.param(
                "optimizer.lr='0.5'",
                "optimizer.lr must be a finite number of at least 0; got 0.5, which is text. Omit its quotes, or",
                id="number-as-text",
            ),
            pytest.param("+lr=3", "unknown key lr; did you mean optimizer.lr\\?", id="without-node"),
            pytest.param("+maxsteps=3", "unknown key maxsteps; did you mean max_steps\\?", id="root"),
            pytest.param(
                "scheduler._target_=torch.optim.lr_scheduler.StepLR",
                "unknown key scheduler.warmup_steps; it is a key of scheduler=warmup_cosine. A file of the config has "
                "set it; ~scheduler.warmup_steps removes it",
                id="not-typed",
            ),
            pytest.param("+scheduler={a: 1}", "unknown key scheduler.a; .*, min_lr_ratio$", id="typed-in-a-mapping"),
            pytest.param("+trainer.zzz.k=1", "unknown key trainer.zzz((?!removes).)*$", id="typed-below"),
            pytest.param(
                "~optimizer.lr", "optimizer.lr must be a finite number of at least 0; got nothing", id="left-out"
            ),
            pytest.param("scheduler._partial_=false", ".*; got nothing. If .*, add _partial_: true to .*$", id="call"),
            pytest.param(
                "model._target_=fa_train.nowhere",
                "model._target_ must be a name that can be imported; got fa_train.nowhere",
                id="target",
            ),
            pytest.param(
                "logger=[csv,wandb]", "logger must be one option of conf/logger; got a list of them", id="two-loggers"
            ),
            pytest.param("data.path=", 'data.path must be a text that is not empty; got ""', id="empty-path"),
            pytest.param(
                "data.val_path=", "data.val_path must be a text that is not empty or null; got", id="empty-val"
            ),
            pytest.param("data=sft", "data.path and data.tokenizer must be given; got nothing", id="missing"),
            pytest.param(
                "run_name=a/../../b", "run_name must be the name of a folder below runs/; got a/../../b", id="run-name"
            ),
        ],
    ),
)
def test_a_mistake_is_said_in_the_users_words(override, line):
    given = [] if override.startswith("data=") else ["data=text", "data.path=docs"]
    with composed("folder", "preset=cpu", *given, override) as cfg, pytest.raises(ValueError, match=f"^{line}"):
        run_config.check(cfg)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        pytest.param("model.n_layer=3", "unknown key model.n_layer; did you mean model.n_layers?", id="parameter"),
        pytest.param("strategy.context=2", "unknown key strategy.context; it is a key of strategy=fsdp", id="option"),
        pytest.param(
            "model.pretrained=base", "unknown key model.pretrained; it is a key of model=pretrained", id="other-option"
        ),
        pytest.param(
            "optimizer.warmup=1", "unknown key optimizer.warmup; optimizer has the keys lr, weight_", id="list"
        ),
        pytest.param("modle=gpt2", "unknown key modle; did you mean model?", id="group"),
        pytest.param(
            "model.loss.z_loss=1",
            "model.loss.z_loss cannot be set, because model.loss is a copy of memory.loss. Set memory.loss.z_loss ",
            id="copied-node",
        ),
        pytest.param("learning_rate=1", "unknown key learning_rate; did you mean optimizer.lr?", id="other-name"),
        pytest.param(
            "zzz=1", "unknown key zzz (to add a parameter that conf/ does not list, write + before it)", id="none-near"
        ),
    ],
)
def test_an_override_of_no_key_names_the_nearest_one(override, line):
    with pytest.raises(HydraException) as raised, composed("folder", "preset=cpu", override):
        pass
    assert explain(raised.value).startswith(line)


@pytest.mark.parametrize("group", ["optimizer", "data", "strategy"])
def test_an_unknown_option_is_answered_with_the_options(group):
    with pytest.raises(HydraException) as raised, composed("folder", "preset=cpu", f"{group}=adam"):
        pass
    assert explain(raised.value) == f"{group} must be one of {', '.join(config_options.options(group))}; got adam"


def test_an_option_has_the_keys_of_its_bases():
    assert config_options.options_with("optimizer.stochastic_rounding") == ["optimizer=adamw_8bit"]
    assert len(config_options.options_with("optimizer.lr")) == len(config_options.options("optimizer")) > 1
    assert config_options.options_with("memory.loss.z_loss") and not config_options.options_with("memory.loss.z")
    assert not config_options.options_with("seq_len") and not config_options.options_with("../conf.seq_len")


def test_finetune_names_what_it_needs():
    with composed("folder", "preset=cpu", "experiment=finetune") as cfg:
        needed = re.escape("data.path and model.pretrained must be given; got nothing")
        with pytest.raises(ValueError, match=f"^{needed}$"):
            run_config.check(cfg)


@pytest.mark.parametrize("name", ["a", "a/b", "7", "with space", "..."])
def test_a_run_may_have_any_folder_below_runs(name):
    assert settings.run_folder(int(name) if name == "7" else name) == name


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "a/../../b", "../b", "/tmp/b", "//tmp/b", None, True, 1.5, float("nan")]
)
def test_no_run_has_a_folder_elsewhere(name):
    with pytest.raises(ValueError, match="run_name must be the name of a folder below runs/; got "):
        settings.run_folder(name)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        pytest.param("run_name=2026_11_29", "2026_11_29", id="date"),
        pytest.param("run_name=3e-4", "3e-4", id="exponent"),
        pytest.param("run_name='3e-4'", "3e-4", id="quoted"),
        pytest.param("run_name= 3e-4 ", "3e-4", id="spaces"),
        pytest.param("run_name=7", "7", id="integer"),
        pytest.param("run_name=${batch_size}", "8", id="interpolation"),
    ],
)
def test_a_run_name_that_hydra_reads_as_a_number_is_kept_as_typed(override, name):
    with composed("folder", "preset=cpu", "batch_size=8", override) as cfg:
        assert run_config.run_folder(cfg.run_name) == name
        run_config.check(cfg)
        assert str(cfg.run_name) == str(cfg.callbacks.checkpoint.run_name) == name


@pytest.mark.slow
def test_a_name_that_leaves_runs_makes_no_folder(tmp_path):
    (tmp_path / "work").mkdir()
    done = command_line(tmp_path / "work", "run_name=../../escaped")
    assert done.returncode == 1
    assert done.stderr == "error: run_name must be the name of a folder below runs/; got ../../escaped\n"
    assert [path.name for path in tmp_path.iterdir()] == ["work"] and not list((tmp_path / "work").iterdir())


def options():
    """Yields the config options of each test, such as `optimizer=adamw`. Each option of conf/ is tested at least once.

    An option of the group `experiment` is combined only with a preset, because an experiment chooses the options of the
    other config groups.
    """
    folders = sorted(path for path in CONF.iterdir() if path.is_dir())
    groups = [[f"{folder.name}={file.stem}" for file in sorted(folder.glob("[!_]*.yaml"))] for folder in folders]
    alone = [(option,) for group in groups for option in group if option.startswith("experiment=")]
    others = [group for group in groups if not group[0].startswith("experiment=")]
    for row in [*alone, *zip_longest(*others)]:
        chosen = [option for option in row if option]
        preset = [] if any(option.startswith("preset=") for option in chosen) else ["preset=cpu"]
        yield pytest.param(preset + chosen, id=",".join(chosen))


@pytest.mark.parametrize("chosen", list(options()))
def test_every_option_passes_the_check(chosen):
    with composed("folder", *chosen) as cfg:
        for key, value in settings.leaves("", run_config.to_container(cfg, resolve=False)):
            if value == settings.MISSING:
                OmegaConf.update(cfg, key, "given")
        run_config.check(cfg)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["+trainer.limit_val_batches=2", "+trainer.profiler=simple"], id="trainer"),
        pytest.param(["strategy=ddp", "+strategy.find_unused_parameters=true"], id="passed-on-to-ddp"),
        pytest.param(["+logger.notes=text", "+logger.resume=allow"], id="passed-on-to-wandb"),
        pytest.param(
            ["trainer.devices=[0,1]", "callbacks.progress=null", "trainer.gradient_clip_val=null"], id="union"
        ),
        pytest.param(["adapter=lora", "adapter.target_modules=[q_proj]", "optimizer.lr=1"], id="list-and-integer"),
    ],
)
def test_parameters_that_conf_does_not_list_and_every_kind_of_value_pass(overrides):
    with composed("folder", "preset=cpu", *overrides) as cfg:
        run_config.check(cfg)


def test_a_list_is_given_for_a_tuple():
    hint = settings.as_list(tuple[float, float] | None)
    assert settings.wanted(hint) == "a list of 2 items, each a number or null"
    assert [settings.fits(value, hint) for value in ([0.9, 0.95], None, [0.9])] == [True, True, False]


def test_every_bound_of_another_package_is_of_a_parameter():
    for target, bounds in settings.BOUNDS.items():
        parameters = settings.parameters_of(pkgutil.resolve_name(target))
        assert parameters is not None
        passed_on = settings.parameters_of(pkgutil.resolve_name(settings.PASSED_ON.get(target, target)))
        assert bounds.keys() <= parameters.keys() | passed_on.keys(), target


class Quoted:
    """A callback whose first parameter has a type hint that cannot be evaluated."""

    def __init__(self, trainer: "nowhere.Trainer", every: int) -> None:  # type: ignore[name-defined]  # noqa: F821
        pass


def test_a_type_hint_that_cannot_be_evaluated_is_not_checked():
    node = ["+callbacks.own._target_=tests.test_settings.Quoted", "+callbacks.own.trainer=3"]
    with composed("folder", "preset=cpu", *node, "+callbacks.own.every=3") as cfg:
        run_config.check(cfg)
    with (
        composed("folder", "preset=cpu", *node, "+callbacks.own.each=3") as cfg,
        pytest.raises(ValueError, match=r"unknown key callbacks\.own\.each"),
    ):
        run_config.check(cfg)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        pytest.param(Mapping[str, Any], "a mapping", id="mapping"),
        pytest.param(
            Mapping[str, settings.Node | None], "a mapping, each value a node with a _target_ or null", id="of"
        ),
        pytest.param(NonNegativeFloat | None, "a finite number of at least 0 or null", id="bounds"),
        pytest.param(Betas, "a list of 2 items, each a number of at least 0 and less than 1", id="list"),
        pytest.param(bool | Literal["all"], "true or false or all", id="union"),
        pytest.param(Sequence[int | None] | None, "a list, each an integer or null, or null", id="null-twice"),
    ],
)
def test_a_type_hint_is_said_in_words(hint, words):
    assert settings.wanted(hint) == words


def test_other_names_lead_to_keys(tmp_path):
    pretrained = ["model=pretrained", "model.pretrained=base", "data=text", "data.path=docs"]
    with composed(tmp_path, "preset=cpu", *pretrained) as cfg:
        missing = [key for key in OTHER_NAMES.values() if OmegaConf.select(cfg, key, default=...) is ...]
    assert missing == ["hydra.run.dir"], "this key is Hydra's own"
    assert not OTHER_NAMES.keys() & cfg.keys()


FAILS_DIFFERENTLY_TWICE = """
import {0}
if hasattr({0}, "has_failed"):
    raise ImportError("circular import")
{0}.has_failed = True
import not_installed
"""


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        pytest.param("needs", "No module named 'not_installed'", id="missing"),
        pytest.param("shorter", "No module named '{shorter}'", id="missing-with-a-name-that-begins-alike"),
        pytest.param("twice", "No module named 'not_installed'", id="missing-if-a-second-import-fails-otherwise"),
        pytest.param("wrong", "cannot import name 'nothing' from 'json'", id="name"),
        pytest.param("fine", "module '{module}' has no attribute 'Thing'", id="attribute"),
        pytest.param("nowhere", "module '{package}' has no attribute 'nowhere'", id="module"),
    ],
)
def test_why_a_target_cannot_be_imported_is_said(module, reason, tmp_path, monkeypatch):
    shorter = tmp_path.name[:-1]  # the package's name without its last character; no module has this name
    texts = {"__init__": "", "needs": "import not_installed", "shorter": f"import {shorter}"}
    texts |= {"wrong": "from json import nothing", "fine": "", "twice": FAILS_DIFFERENTLY_TWICE.format(tmp_path.name)}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path.parent)
    package = tmp_path.name  # a different name in each test, because Python keeps imported modules
    target = f"{package}.{module}.Thing"
    said = reason.format(package=package, module=f"{package}.{module}", shorter=shorter)
    line = f"can be imported; got {target}: {said}"
    overrides = ["preset=cpu", f"+callbacks.mine._target_={target}"]
    with composed("folder", *overrides) as cfg, pytest.raises(ValueError, match=line):
        run_config.check(cfg)
