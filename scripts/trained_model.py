"""Reads a trained model from a checkpoint in its run's folder, and exports the model."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from fa_train import compat
from fa_train.checkpoints.files import require_checkpoint
from fa_train.checkpoints.metrics import metrics_of, read_result
from fa_train.checkpoints.saved_config import require_own_targets
from fa_train.errors import explain
from fa_train.models.gpt import GPT
from fa_train.models.hf.export import load as load_checkpoint
from fa_train.models.hf.export import require_same_tokenizer, write

PARTS = ("model", "adapter")  # the keys of a run's config that are needed to build the model
SHOWN = ("choices.data", "data.path", "data.name", "model.pretrained", "seed", "seq_len", "batch_size")


def export(checkpoint: Path, folder: Path, overrides: list[str], dtype: str | None, adapter: bool = False) -> None:
    """Exports the checkpoint to `folder`. See fa_train.models.hf.export.write for dtype and adapter.

    Raises: ValueError if the checkpoint is not in the folder of a run. The function also raises the errors of `load`
    and `write`.
    """
    run = _run_folder(checkpoint)
    cfg = saved_config(run, overrides)
    metrics = read_result(run)
    chosen = [override.partition("=")[0] for override in overrides]
    model, step = load(checkpoint, cfg, chosen)
    require_same_tokenizer(checkpoint, cfg, chosen)
    metrics = metrics_of(checkpoint, metrics)
    name_variables(cfg)
    write(model, step, folder, run.parent.name, cfg, metrics, dtype=dtype, adapter=adapter)


def saved_config(run: Path, overrides: list[str]) -> DictConfig:
    """Reads the config from a run's folder, applies the overrides, and updates the names of moved classes.

    The config.yaml of older runs has no key `choices`. Raises: ValueError if a file is not the config of a run, or if
    an override is wrong.
    """
    saved = _loaded(run / ".hydra" / "config.yaml", needs="model")
    hydra = _loaded(run / ".hydra" / "hydra.yaml", needs="hydra.runtime.choices")
    saved.choices = OmegaConf.select(hydra, "hydra.runtime.choices")
    OmegaConf.set_struct(saved, True)  # an override of an unknown key becomes an error
    try:
        cfg = OmegaConf.merge(saved, OmegaConf.from_dotlist(overrides))
    except OmegaConfBaseException as error:
        raise ValueError(explain(error)) from error
    assert isinstance(cfg, DictConfig)
    for key, target in compat.moved_targets(cast(dict[str, Any], OmegaConf.to_container(cfg))).items():
        OmegaConf.update(cfg, key, target)
    return cfg


def name_variables(cfg: DictConfig) -> None:
    """Replaces environment variables by their names in the config keys that a model card shows (`SHOWN`).

    The value of a variable may be a secret, and the config may come from another person.
    """
    OmegaConf.register_new_resolver("oc.env", lambda name, *_: f"${{oc.env:{name}}}", replace=True)
    try:
        values = {key: str(OmegaConf.select(cfg, key)) for key in SHOWN}
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    for key, value in values.items():
        if "${" in value:
            OmegaConf.update(cfg, key, value.replace("${", "\\${"))  # escaped, so that OmegaConf does not resolve it


def _loaded(path: Path, needs: str) -> DictConfig:
    try:
        saved = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} must be a run's config: {' '.join(str(error).split())}") from error
    if not isinstance(saved, DictConfig) or OmegaConf.select(saved, needs) is None:
        raise ValueError(f"{path} must be a run's config; it has no {needs}")
    return saved


def load(checkpoint: Path, cfg: DictConfig, chosen: Collection[str] = ()) -> tuple[GPT, int]:
    """Returns the trained model on the CPU, and the number of optimizer steps that it was trained for.

    chosen: see fa_train.models.hf.export.load.
    Raises: ValueError if `require_own_targets` refuses the config's model or adapter. Also raises the errors of
    fa_train.models.hf.export.load.
    """
    adapter = {"_target_": "fa_train.models.lora.whole_model", "_partial_": True}  # absent in configs of older runs
    # Interpolations are resolved only once, so that exactly the checked targets are built.
    parts = [OmegaConf.to_container(cfg[name], resolve=True) if name in cfg else adapter for name in PARTS]
    for name, part in zip(PARTS, parts, strict=True):
        require_own_targets(part, f"{name} in the run's .hydra/config.yaml")

    def build(vocab_size: int) -> GPT:
        torch.manual_seed(cfg.seed)
        model, adapter = parts
        gpt: GPT = instantiate(adapter)(instantiate(model, vocab_size=vocab_size))
        return gpt

    return load_checkpoint(checkpoint, build, chosen)


def _run_folder(checkpoint: Path) -> Path:
    """Returns the folder RUN of a run. The checkpoint must be in RUN/checkpoints or in RUN/NAME.

    NAME is the last part of the path `callbacks.checkpoint.dirpath` in the run's config.
    Folders further up are not searched, because they could hold the config of another run.
    Raises: ValueError if the checkpoint is not in such a folder.
    """
    if not checkpoint.exists():
        raise ValueError(f"{checkpoint} does not exist")
    require_checkpoint(checkpoint)
    folder = checkpoint.resolve().parent
    config = folder.parent / ".hydra" / "config.yaml"
    if not config.exists() or folder.name not in ("checkpoints", _dirpath_name(config)):
        raise ValueError(
            f"{checkpoint} must be in its run's folder, as RUN/checkpoints/{checkpoint.name} next to "
            f"RUN/.hydra/config.yaml; got a checkpoint in {folder}. Move the checkpoint to RUN/checkpoints, or make a "
            "new folder with copies of the checkpoint (in its subfolder checkpoints) and of RUN/.hydra"
        )
    return folder.parent


def _dirpath_name(config: Path) -> str | None:
    """Returns the name of the folder in which a run saves checkpoints, or None if its config has no such folder."""
    callback = OmegaConf.select(_loaded(config, needs="model"), "callbacks.checkpoint")
    if not isinstance(callback, DictConfig) or "dirpath" not in callback:
        return None
    unresolved = cast(dict[str, Any], OmegaConf.to_container(callback))  # with ${hydra:runtime.output_dir}
    return Path(unresolved["dirpath"]).name
