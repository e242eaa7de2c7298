"""Generates text with a Hugging Face model (a folder or hub name) or with a checkpoint of train.py."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from fa_train.bounds import Dtype
from fa_train.checkpoints.files import newest_below
from fa_train.data.tokens.sft import ChatEncoder
from fa_train.data.tokens.tokenizer import HFTokenizer
from fa_train.early_checks import require_checkpoint_name
from fa_train.evaluation.generation import chat_prompt, generate, stop_tokens
from fa_train.models.attention import flash_attention, naive_attention
from fa_train.models.hf.import_ import load_pretrained, require_checkpoint
from scripts.trained_model import export


def answers(
    model: str,
    *,
    prompt: Sequence[str] | None = None,
    chat: Sequence[str] | None = None,
    system: str | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: Dtype | None = None,
    device: str | None = None,
) -> list[str]:
    """Returns the text that the model writes after each `prompt`, or its answer to each user message in `chat`.

    Exactly one of `prompt` and `chat` must be given. A prompt begins with the special tokens that the model's tokenizer
    puts before a text. For a model that was trained on texts, a prompt begins with the bos token, as in training.

    dtype=None uses the dtype of the stored weights on a GPU and float32 on the CPU. Raises: ValueError if the model or
    its tokenizer is missing, if `chat` is given without a chat template, or if an argument has an impossible value.
    """
    if system is not None and chat is None:
        raise ValueError(f"--system needs --chat; got --system {system!r} and --prompt")
    if temperature == 0 and (top_k is not None or top_p != 1):
        raise ValueError("--top-k and --top-p need --temperature, because nothing is sampled without it")
    for text in (*(prompt or ()), *(chat or ()), system or ""):
        if text.encode("utf-8", "replace").decode() != text:  # Python reads other bytes as lone surrogates
            raise ValueError(f"--prompt, --chat and --system must be UTF-8; got {text!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = _is_gpu(device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = _exported(model, Path(temporary, "exported"), dtype)
        tokenizer = HFTokenizer(folder, "the argument model")
        tokenizer.name = model  # error messages name the checkpoint and not the temporary folder
        if chat is not None and not tokenizer.hf.chat_template:
            raise ValueError(f"--chat: the tokenizer of {model} must have a chat template; it has none. Use --prompt")
        attention = flash_attention if on_gpu else naive_attention
        with torch.device(device):
            gpt = load_pretrained(folder, attention, dtype=dtype or (None if on_gpu else "float32"))
    if chat is not None:
        encoder = ChatEncoder(tokenizer)
        before = [] if system is None else [{"role": "system", "content": system}]
        prompts = [chat_prompt(encoder, [*before, {"role": "user", "content": text}], None) for text in chat]
        stop = stop_tokens(gpt, tokenizer.eos_id, encoder.end_id)
    else:
        prompts = [_prompt_tokens(tokenizer, text) for text in prompt or ()]
        stop = stop_tokens(gpt, tokenizer.eos_id)
    texts = []
    for tokens in prompts:
        ids = generate(
            gpt,
            tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
        )
        texts.append(tokenizer.decode(ids))
    return texts


def _prompt_tokens(tokenizer: HFTokenizer, text: str) -> list[int]:
    """Returns the tokens of a text that the model continues.

    The result includes the special tokens that the tokenizer puts before a text, but no eos that the tokenizer adds.
    """
    tokens, own = (list(tokenizer.hf(text, add_special_tokens=special).input_ids) for special in (True, False))
    adds_eos = len(tokens) > 1 and tokens[-1] == tokenizer.eos_id and tokens[:-1][len(tokens) - 1 - len(own) :] == own
    return tokens[:-1] if adds_eos else tokens


def _exported(model: str, folder: Path, dtype: Dtype | None) -> str:
    """Returns `model`, or exports it to `folder` and returns `folder` if `model` is a checkpoint of train.py.

    Raises: ValueError if the model or its tokenizer is missing.
    """
    path = Path(model)
    if path.suffix != ".ckpt":  # a checkpoint is a file, or a folder if the run sharded its weights
        _require_model(model)
        return model
    export(path, folder, [], dtype)
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(
            f"the argument model must be a model with a tokenizer; got {model}, whose data have no tokenizer or do not "
            "name it in data.tokenizer"
        )
    return str(folder)


def _require_model(model: str) -> None:
    """Raises: ValueError if `model` is neither a folder with a config.json nor a name on the hub."""
    key, folder = "the argument model", Path(model)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{key} must be a whole model; got {model}, an adapter. Give the checkpoint of the adapter's run, or the "
            "folder `exported`, which holds the base with the adapter merged into it"
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{key} must be a folder with a config.json, a name on the hub, or a .ckpt of train.py; got {model}, "
            f"a folder without config.json{newest_below(folder)}"
        )
    require_checkpoint_name(model, key)
    require_checkpoint(model, key)


def _is_gpu(device: str) -> bool:
    """Raises: ValueError if `device` is neither cpu nor cuda, or if this machine lacks the GPU that `device` names."""
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        kind, index = "unknown", 0
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda; got {device}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device must be cpu on a machine without a CUDA GPU; got {device}")
    if kind == "cuda" and index >= torch.cuda.device_count():
        gpus = ", ".join(f"cuda:{i}" for i in range(torch.cuda.device_count()))
        raise ValueError(f"--device must be cpu or one of {gpus}; got {device}")
    return kind == "cuda"
