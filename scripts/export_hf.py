"""Exports a checkpoint of train.py to a folder that transformers can load: weights, config, tokenizer and a model card.

    python -m scripts.export_hf runs/nano/2026-11-21_07-32-06/checkpoints/step_0000300.ckpt exported    # to exported/.

A run of train.py with export=true exports its last checkpoint when the run ends. A run with adapter=lora or
adapter=qlora is exported with the adapter merged into the weights. The checkpoint is a file, or the folder that a
sharded run writes. The checkpoint is read into host memory; no GPU is needed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

if not __package__:  # If this file is run as a script, import from the repository root, not from scripts/.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fa_train.bounds import Dtype
from fa_train.errors import errors_in_one_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a .ckpt of a run, still in the run's folder")
    parser.add_argument("folder", type=_folder, help="output folder, new or without a model")
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), help="dtype of the weights; default: the base model's, or that of training"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the LoRA adapter, for peft; the run must have used model.pretrained",
    )
    parser.add_argument(
        "overrides", nargs="*", help="overrides of the run's config, such as model.pretrained=moved/folder"
    )
    arguments: dict[str, Any] = vars(parser.parse_args())
    from scripts.trained_model import export  # import late: torch and Lightning take seconds to import

    with errors_in_one_line((ValueError, HydraException, OmegaConfBaseException)):
        export(**arguments)
    print(f"exported to {arguments['folder']}")


def _folder(name: str) -> Path:
    """Returns the folder of this name. Path("") would be the current folder.

    Raises: ArgumentTypeError if the name is empty, for example because a shell variable is not set.
    """
    if not name:
        raise argparse.ArgumentTypeError("must be the name of a folder; got an empty text")
    return Path(name)


if __name__ == "__main__":
    main()
