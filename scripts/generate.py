"""Generates text with a Hugging Face model (a folder or hub name) or with a checkpoint of train.py.

    python -m scripts.generate exported --chat "What is the capital of France?"
    python -m scripts.generate runs/nano/<time>/checkpoints/step_0000300.ckpt --prompt "def " --temperature 0.8

Without --temperature, each token is the most likely one. With --temperature, the same --seed gives the same text. Keys
and values are cached, and on a GPU flash_attn_with_kvcache reads the cache. A checkpoint is first exported to a
temporary folder (scripts/export_hf.py), which also merges its adapters. The result equals that of an exported model.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fa_train.data.tokens.sft import ChatEncoder
from fa_train.data.tokens.tokenizer import HFTokenizer
from fa_train.errors import explain
from fa_train.evaluation.generation import chat_prompt, generate, stop_tokens
from fa_train.models.attention import flash_attention, naive_attention
from fa_train.models.hf.import_ import DTYPES, Dtype, load_pretrained
from scripts.export_hf import export


def answer(
    model: str,
    *,
    prompt: str | None = None,
    chat: str | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: Dtype | None = None,
    device: str | None = None,
) -> str:
    """Returns the text that the model writes after `prompt`, or its answer to `chat`. Exactly one must be given.

    dtype None means the stored dtype on a GPU and float32 on the CPU. device None means a GPU if there is one.
    Raises: ValueError if the model or its tokenizer is missing, if a chat has no template, and on impossible values.
    """
    path = Path(model)
    if path.suffix == ".ckpt":  # a file, or the folder of a sharded run
        with tempfile.TemporaryDirectory() as folder:
            export(path, Path(folder, "exported"), [], dtype)
            return answer(
                str(Path(folder, "exported")), prompt=prompt, chat=chat, max_new_tokens=max_new_tokens,
                temperature=temperature, top_p=top_p, seed=seed, dtype=dtype, device=device,
            )  # fmt: skip
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = _is_gpu(device)
    with torch.device(device):
        gpt = load_pretrained(
            model, flash_attention if on_gpu else naive_attention, dtype=dtype or (None if on_gpu else "float32")
        )
    tokenizer = HFTokenizer(model)
    if chat is not None:
        tokens = chat_prompt(ChatEncoder(tokenizer), [{"role": "user", "content": chat}], None)
    else:
        tokens = tokenizer.hf(prompt).input_ids  # includes the tokens that the tokenizer puts before a text
    ids = generate(
        gpt,
        tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop_tokens(gpt, tokenizer.eos_id),
    )
    return tokenizer.decode(ids)


def _is_gpu(device: str) -> bool:
    """Returns whether a device is a CUDA GPU. Raises: ValueError if this machine does not have the device."""
    try:
        on_gpu = torch.device(device).type == "cuda"
    except RuntimeError as error:
        raise ValueError(f"--device must be cpu or cuda; got {device}") from error
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"--device must be cpu on a machine without a CUDA GPU; got {device}")
    return on_gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a name on the Hugging Face hub, or a .ckpt still in its run's folder")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", help="text to continue")
    asked.add_argument("--chat", help="a user's message for the tokenizer's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always take the most likely token")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the most likely tokens with this total probability"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the weights; default: the stored one on a GPU, float32 on the CPU"
    )
    parser.add_argument("--device", help="default: cuda if available, else cpu")
    try:
        print(answer(**vars(parser.parse_args())))
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {explain(error)}")


if __name__ == "__main__":
    main()
