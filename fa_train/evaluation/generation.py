"""Generates text from a prompt, token by token.

Each layer caches its keys and values. The forward pass for a new token therefore processes only this token.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fa_kernels import flash_attn_with_kvcache
from fa_kernels.flash_attention.schedule import Schedule, build_schedule
from fa_train.bounds import PositiveInt
from fa_train.data.sources.chats import Chat, ChatCorpus, Message
from fa_train.data.sources.corpus import is_held_out
from fa_train.data.tokens.sft import ChatEncoder, named_rejection
from fa_train.data.tokens.tokenizer import HFTokenizer, load_tokenizer
from fa_train.models.attention import Attention, flash_attention, function_of, naive_attention
from fa_train.models.gpt import GPT, Block
from fa_train.models.rope import DynamicNTKScaling
from fa_train.parallel.context.attention import unshared


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Sequence[int] | np.ndarray | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
    cached: bool = True,
) -> list[int]:
    """Generates at most max_new_tokens tokens after `prompt`.

    prompt: token ids, as a sequence, a NumPy array or a tensor of one dimension.
    temperature: divides the logits. If temperature is 0, the most likely token is chosen.
    top_k: samples from the top_k most likely tokens, or from all tokens if top_k is None.
    top_p: samples from the smallest set of most likely tokens whose probabilities sum to at least top_p.
    With top_k, the probabilities of the top_k tokens are first scaled to a sum of 1.
    stop: tokens that end the text. The result includes the stop token.
    seed: on the same device, the same seed gives the same tokens. torch's global random state does not change.
    cached: whether to use a KV cache. Without a cache, all tokens are computed again for each new token. A model with
    rope_type=dynamic never uses the cache, because its rotations depend on the total length.
    Raises: ValueError if the model has no weights, an argument is out of range, or the text could exceed the model's
    learned positions. Raises TypeError if a token is not an integer.
    """
    prompt = [index(token) for token in (prompt.tolist() if isinstance(prompt, np.ndarray | Tensor) else prompt)]
    model.require_weights()
    _require_settings(prompt, model.config.vocab_size, max_new_tokens, temperature, top_k, top_p)
    longest = len(prompt) + max_new_tokens
    _require_positions(model, len(prompt), max_new_tokens)
    cached &= not any(rope is not None and isinstance(rope.scaling, DynamicNTKScaling) for rope in model.ropes)
    device = model.token_embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    stream, seen = torch.tensor([*prompt, *[0] * max_new_tokens], device=device), 0
    generated: list[int] = []
    with _evaluating(model, longest if cached else None):
        for end in range(len(prompt), longest):
            logits = model(stream[seen:end], position_ids=torch.arange(seen, end, device=device))[-1]
            stream[end] = _chosen(logits.float(), temperature, top_k, top_p, generator)
            if isinstance(model, FSDPModule):  # rounding can differ between GPUs, so all ranks use rank 0's token
                dist.broadcast(stream[end : end + 1], src=0)
            generated.append(int(stream[end]))
            if generated[-1] in stop:
                break
            seen = end if cached else 0
    return generated


class CachedAttention:
    """The attention of one layer with a KV cache.

    The first call gets the prompt, and each later call gets one new token.
    attention: the layer's attention function, used for the prompt. Later tokens use flash_attn_with_kvcache if the
    prompt uses `flash_attention`, and naive_attention otherwise.
    window: how many of the last tokens a query sees, including the query's own token, or None for all tokens.
    capacity: the maximum number of cached tokens.
    """

    def __init__(self, attention: Attention, window: int | None, capacity: int) -> None:
        self.attention, self.window, self.capacity = attention, window, capacity
        self.is_flash = function_of(attention) is flash_attention
        self.length = 0
        self.k: Tensor
        self.v: Tensor

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        schedule: Schedule,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        scores: dict[str, Any] = {"softmax_scale": softmax_scale, "softcap": softcap}
        if self.length == 0:
            self.k, self.v = (x.new_zeros(self.capacity, *x.shape[1:]) for x in (k, v))
            self._append(k, v)
            known = {name: value for name, value in scores.items() if value}  # pass only options that are set
            return self.attention(q, k, v, schedule, **known)
        assert q.shape[0] == 1
        if self.is_flash:
            window = (-1 if self.window is None else self.window - 1, -1)
            o = flash_attn_with_kvcache(
                q[None], self.k[None], self.v[None], k[None], v[None],
                cache_seqlens=self.length, causal=True, window_size=window, **scores,
            )  # fmt: skip
            assert isinstance(o, Tensor)
            self.length += 1
            return o[0]
        self._append(k, v)
        start = 0 if self.window is None else max(0, self.length - self.window)
        keys, values = self.k[start : self.length], self.v[start : self.length]
        one, all_keys = (torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (1, len(keys)))
        return naive_attention(q, keys, values, build_schedule(one, all_keys, 1, len(keys), causal=True), **scores)

    def _append(self, k: Tensor, v: Tensor) -> None:
        end = self.length + k.shape[0]
        self.k[self.length : end], self.v[self.length : end] = k, v
        self.length = end


class Sample:
    """Prints the model's answer to one chat, and appends it to samples.jsonl in the run's folder.

    chats, val_path, path: the paths to read chats from, in the format of data.path. The first path that is not None is
    used. If text_column is not None, val_path and path are not used, because they hold texts, not chats.
    The prompt consists of a chat's messages before the first answer that the model is trained on. The prompt comes from
    the first held-out chat, or from the last chat if no chat is held out. Chats without a prompt are skipped. The
    answer has at most max_new_tokens tokens. Each token of the answer is the most likely token.
    The model generates no answer if all paths are None, if all chats are skipped, or if the tokens of the prompt plus
    max_new_tokens exceed the model's learned positions.
    """

    def __init__(
        self,
        chats: str | None,
        tokenizer: str,
        chat_template: str | None,
        max_new_tokens: PositiveInt,
        val_path: str | None = None,
        path: str | None = None,
        text_column: str | None = None,
    ) -> None:
        of_data = (val_path, path) if text_column is None else ()
        self.chats = next((given for given in (chats, *of_data) if given is not None), None)
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.max_new_tokens = max_new_tokens

    def __call__(self, trainer: Any, lit_gpt: Any) -> None:
        """Samples on rank 0.

        If the model is sharded, all ranks run the model, because each rank has only a part of the weights.

        trainer: Lightning's trainer. lit_gpt: the LitGPT, whose model must be on the device.
        """
        if self.chats is None or not (trainer.is_global_zero or isinstance(lit_gpt.model, FSDPModule)):
            return
        loaded = load_tokenizer(self.tokenizer)
        encoder = ChatEncoder(loaded, self.chat_template)
        try:
            asked = sampled_chat(self.chats, encoder)
        except ValueError as error:  # an error of `chats`: the data module has already read val_path and path
            raise ValueError(f"sample.chats={self.chats}: {error}") from error
        if asked is None:
            return
        prompt = chat_prompt(encoder, asked.messages, asked.tools, asked.template_kwargs)
        try:
            lit_gpt.model.require_seq_len(len(prompt) + self.max_new_tokens)
        except ValueError as error:
            trainer.print(f"no sample: its prompt has {len(prompt)} tokens, and {error}")
            return
        with trainer.precision_plugin.forward_context():
            stop = stop_tokens(lit_gpt.model, loaded.eos_id, encoder.end_id)
            ids = generate(lit_gpt.model, prompt, max_new_tokens=self.max_new_tokens, stop=stop)
        if not trainer.is_global_zero:
            return
        answer = loaded.decode(ids)
        question = asked.messages[-1]["content"]
        trainer.print(f"sample after {trainer.global_step} steps\n  asked: {question}\n  answer: {answer}")
        record = {"step": trainer.global_step, "messages": asked.messages, "answer": answer}
        with Path(trainer.default_root_dir, "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def sampled_chat(path: str, encoder: ChatEncoder) -> Chat | None:
    """Returns a chat that is cut before the first answer that the model is trained on.

    The chat is the first held-out chat, or the last chat if no chat is held out. Chats without a prompt and chats that
    the template rejects are skipped. If the template rejects all chats, the function returns the first chat that has a
    prompt. Returns None if no chat has a prompt.
    """
    last = None
    for key, chat in ChatCorpus(path, skip_invalid=True, say=lambda line: None).documents():
        trained_on = (i for i, m in enumerate(chat.messages) if i >= chat.trained_from and m["role"] == "assistant")
        asked = chat.messages[: next(trained_on)]
        if not asked:
            continue
        accepted = not encoder.rejects(chat)
        if accepted or last is None:
            last = replace(chat, messages=asked)
        if accepted and is_held_out(key):
            break
    return last


def chat_prompt(
    encoder: ChatEncoder,
    messages: list[Message],
    tools: list[Any] | None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Renders messages with the encoder's template up to the start of the answer, and returns the tokens.

    template_kwargs: variables of the template.
    Raises: ValueError if the template rejects the messages.
    """
    assert isinstance(encoder.tokenizer, HFTokenizer)
    hf = encoder.tokenizer.hf
    roles = ", ".join(message["role"] for message in messages)
    rejected = f"{encoder.name}'s chat template rejects a prompt of messages with the roles {roles}"
    arguments = dict(template_kwargs or {}) | {"tools": tools, "tokenize": False, "add_generation_prompt": True}
    arguments["continue_final_message"] = False  # transformers refuses True with a generation prompt
    with named_rejection(rejected):
        text = hf.apply_chat_template(messages, **arguments)
    return list(hf(text, add_special_tokens=False).input_ids)


def stop_tokens(model: GPT, *ends: int | None) -> set[int]:
    """Returns the tokens that end a text: the tokens in `ends`, and the end tokens of the model's checkpoint."""
    named = [] if model.origin is None else model.origin.eos_ids
    return {i for i in (*ends, *named) if i is not None}


@contextmanager
def _evaluating(model: GPT, capacity: int | None) -> Iterator[None]:
    """Prepares the model for generation, and restores it at the end.

    During generation, the model has no dropout, runs in eager mode and computes only the logits of the last token. Each
    rank processes all tokens, even if strategy.context divides the tokens of a training stream among several ranks.
    capacity: the maximum number of tokens in each layer's cache, or None for no cache.
    """
    modes = [(module, module.training) for module in model.modules()]
    layers = [block.attention for block in model.blocks if isinstance(block, Block)]
    attentions = [layer.attend for layer in layers]
    last_only = model.head.register_forward_pre_hook(lambda head, inputs: (inputs[0][-1:],))
    model.eval()
    for layer, window in zip(layers, model.windows, strict=True):
        alone = unshared(layer.attend)
        layer.attend = alone if capacity is None else CachedAttention(alone, window, capacity)
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled model would be compiled again for each length
            yield
    finally:
        last_only.remove()
        for module, was_training in modes:
            module.training = was_training
        for layer, attention in zip(layers, attentions, strict=True):
            layer.attend = attention


def _chosen(logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator) -> Tensor:
    """Chooses the next token from the logits. Shapes: (vocab_size,) fp32 -> ()."""
    if temperature == 0.0:
        return logits.argmax()
    # if `temperature` is tiny, fp64 and the subtraction of the maximum prevent NaN in the softmax
    scaled = (logits - logits.max()).double() / max(temperature, 1e-300)
    probabilities, tokens = scaled.softmax(dim=-1).float().sort(descending=True, stable=True)
    if top_k is not None:
        probabilities = probabilities[:top_k] / probabilities[:top_k].sum()
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = probabilities.masked_fill(before >= top_p, 0.0)
    return tokens[torch.multinomial(kept, 1, generator=generator)][0]


def _require_positions(model: GPT, n_prompt: int, max_new_tokens: int) -> None:
    """Raises: ValueError if n_prompt + max_new_tokens is larger than the number of the model's learned positions."""
    learned = model.position_embedding
    if learned is None or n_prompt + max_new_tokens <= learned.num_embeddings:
        return
    fits = learned.num_embeddings - n_prompt
    raise ValueError(
        f"the prompt's {n_prompt} tokens plus max_new_tokens={max_new_tokens} must be at most "
        f"model.max_seq_len={learned.num_embeddings} tokens; got {n_prompt + max_new_tokens}. "
        + (f"Set max_new_tokens to at most {fits}" if fits > 0 else "Shorten the prompt")
    )


def _require_settings(
    prompt: Sequence[int],
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> None:
    if not prompt:
        raise ValueError("a prompt must have at least 1 token; got none")
    if not all(0 <= token < vocab_size for token in prompt):
        raise ValueError(f"a prompt's tokens must be below the model's vocab_size={vocab_size}; got {max(prompt)}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1; got {max_new_tokens}")
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and at least 0; got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1; got {top_k}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be more than 0 and at most 1; got {top_p}")
