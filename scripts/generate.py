"""Generates text with a Hugging Face model (a folder or hub name) or with a checkpoint of train.py.

    python -m scripts.generate exported --chat "What is the capital of France?"        # answers.
    python -m scripts.generate runs/nano/<time>/checkpoints/<step>.ckpt --prompt "def " --temperature 0.8    # samples.

With --temperature, the same --seed gives the same text. On a GPU, flash_attn_with_kvcache reads the KV cache. A
checkpoint is first exported to a temporary folder (see scripts/export_hf.py). The export merges adapters into the
weights.
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

if not __package__:  # If this file is run as a script, import from the repository root, not from scripts/.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fa_train.bounds import Dtype
from fa_train.errors import errors_in_one_line
from fa_train.output import outlive_readers, replace_unprintable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a name on the Hugging Face hub, or a .ckpt still in its run's folder")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--prompt",
        action="append",
        help="text to continue; a name such as <eos> becomes the special token; may be given several times",
    )
    asked.add_argument(
        "--chat",
        action="append",
        help="a user's message to answer; needs a tokenizer with a chat template; may be given several times",
    )
    parser.add_argument("--system", help="a system prompt for --chat")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: 128")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="default: 0, which always takes the most likely token"
    )
    parser.add_argument("--top-k", type=int, help="sample from this number of most likely tokens; default: all tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens with this total probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling; default: 0")
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="dtype of the weights; default: the stored one on a GPU, float32 on the CPU",
    )
    parser.add_argument("--device", help="default: cuda if available, else cpu")
    arguments = vars(parser.parse_args())
    from scripts.answers import answers  # import late: torch and Lightning take seconds to import

    with errors_in_one_line((ValueError, HydraException, OmegaConfBaseException)):
        texts = answers(**arguments)
    for question, text in zip(arguments["prompt"] or arguments["chat"], texts, strict=True):
        print(text if len(texts) == 1 else f"--- {question}\n{text}\n")


if __name__ == "__main__":
    outlive_readers()
    replace_unprintable()
    main()
