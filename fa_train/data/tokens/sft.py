"""Converts chats to tokens with a chat template. The model is trained on the assistant's messages.

A chat is first rendered to text. The encoder then finds the answers, which are the assistant's messages. If the
template has {% generation %} blocks, these blocks mark the answers. If the template has no {% generation %} blocks, the
encoder also renders each answer's prompt from the messages before the answer. The text of the chat must begin with the
text of the prompt. The answer starts directly after the prompt, and ends with the answer's end token.
The text of the chat is tokenised as a whole. The tokenizer's offsets map characters of the text to tokens.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa_train.data.sources.chats import Chat, Message
from fa_train.data.sources.files import read_text
from fa_train.data.tokens.encoding import Encoded, Encoder
from fa_train.data.tokens.tokenizer import HFTokenizer, Tokenizer

FORMAT = "4"  # the version of the conversion from chats to tokens, which is part of the cache key
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Spans = list[tuple[int, int]]


class Rendered(NamedTuple):
    """The text of a chat, and the spans of characters that the model is trained on."""

    text: str
    spans: Spans


def tokenizer_hashes(encoder: Encoder[Any]) -> dict[str, str]:
    """Returns hashes of the encoder's vocabulary and, if it encodes chats, of its chat template. Bytes have none."""
    if not isinstance(encoder.tokenizer, HFTokenizer):
        return {}
    of_chats = {"chat_template": encoder.tokenizer.template_hash} if isinstance(encoder, ChatEncoder) else {}
    return {"vocabulary": encoder.tokenizer.vocabulary_hash} | of_chats


class ChatEncoder:
    """Encodes chats with the template in the file `chat_template`, or by default with the tokenizer's template.

    Raises: ValueError if there is no chat template, or the tokenizer does not return offsets. `encode_batch` raises
    ValueError if the template rejects a chat, omits the chat's tools or tool calls, or renders a message differently if
    more messages follow.
    """

    masked = True

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        if not isinstance(tokenizer, HFTokenizer):
            raise ValueError("data.tokenizer must be a tokenizer with a chat template; got null, which means bytes")
        self.tokenizer: Tokenizer = tokenizer
        self._name, self._hf = tokenizer.name, tokenizer.hf
        if not self._hf.is_fast:
            raise ValueError(
                f"data.tokenizer must be a fast tokenizer, because slow tokenizers return no token offsets; "
                f"got {tokenizer.name}"
            )
        if chat_template is not None:
            file = Path(chat_template).expanduser()
            if not file.is_file():
                raise ValueError(f"data.chat_template must be null or a Jinja file; {chat_template} does not exist")
            self._hf.chat_template = read_text(file)
        if not self._hf.chat_template:
            raise ValueError(
                f"data.tokenizer must have a chat template; {tokenizer.name} has none: set data.chat_template=<file>"
            )

    @property
    def identity(self) -> str:
        template = repr(self._hf.chat_template), sorted(self._hf.special_tokens_map.items())
        return hashlib.blake2b(f"{FORMAT}{self.tokenizer.identity}{template}".encode(), digest_size=16).hexdigest()

    @cached_property
    def end_id(self) -> int | None:
        """The first special token after the content of a trained answer, or None if there is none.

        The value is also None if the template rejects a chat of one question and one answer.
        """
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            text, spans = self.render(Chat("a test chat", messages, tools=None, trained_from=0))
        except ValueError:
            return None
        trained = text[: max((stop for _, stop in spans), default=0)]
        _, content, after = trained.rpartition("answer")
        found = [token for token in self._special_tokens if content and token.strip() and token in after]
        first = min(found, key=lambda token: (after.index(token), -len(token)), default=None)
        return None if first is None else int(self._hf.convert_tokens_to_ids(first))

    def encode_batch(self, documents: Sequence[Chat]) -> list[Encoded]:
        texts, spans = zip(*map(self.render, documents), strict=True)
        encoded = self._hf(
            list(texts),
            add_special_tokens=False,  # the template has already written the special tokens
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return [
            Encoded(np.asarray(ids, np.int32), starts_in_spans(np.asarray(offsets).reshape(-1, 2), chat_spans))
            for ids, offsets, chat_spans in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
        ]

    def render(self, chat: Chat) -> Rendered:
        """Renders a chat, and finds the answers that the model is trained on."""
        template = self._hf.get_chat_template(tools=chat.tools)
        has_blocks = GENERATION.search(template) is not None
        text, spans = self._render(template, chat, chat.messages, has_blocks=has_blocks)
        self._require_tools(template, chat, text)
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        trained_on = [i for i in answers if i >= chat.trained_from]
        if not has_blocks:
            spans = [self._answer_span(template, chat, i, text) for i in trained_on]
        elif trained_on != answers:  # a {% generation %} block does not say which message it belongs to
            begin = self._answer_span(template, chat, trained_on[0], text)[0]
            # the {% generation %} block may also contain text before the answer, for example the role
            spans = [(start, stop) for start, stop in spans if stop > begin]
        return Rendered(text, spans)

    def _require_tools(self, template: str, chat: Chat, text: str) -> None:
        """Raises: ValueError if the template omits a chat's tools or tool calls.

        Some old templates omit tool calls. With a template that omits tool calls, the model would be trained on an
        empty answer.
        """
        without = {
            "tools": replace(chat, tools=None),
            "tool_calls": replace(
                chat, messages=[{k: v for k, v in message.items() if k != "tool_calls"} for message in chat.messages]
            ),
        }
        for name, bare in without.items():
            if bare == chat:
                continue
            try:
                rendered = self._render(template, bare, bare.messages).text
            except ValueError:  # rendering fails without `name`, so the template uses `name`
                continue
            if rendered == text:
                raise ValueError(
                    f"a chat template must render {name}; that of {self._name} omits the {name} of {chat.where}. Set "
                    f"data.chat_template=<file> to a template that renders them, or remove {name} from the chat"
                )

    def _answer_span(self, template: str, chat: Chat, index: int, text: str) -> tuple[int, int]:
        """Returns the span of the answer chat.messages[index] in `text`. The span includes the answer's end token."""
        prompt = self._render(template, chat, chat.messages[:index], add_generation_prompt=True).text
        answered = self._render(template, chat, chat.messages[: index + 1]).text
        if not (answered.startswith(prompt) and text.startswith(answered)):
            raise ValueError(
                "a chat template must render a message independently of later messages, or mark answers with "
                f"{{% generation %}}; {self._name}'s does neither for {chat.where}, message {index}. It may remove "
                "the reasoning from earlier answers. Set data.chat_template=<file> to a copy with marked answers, or "
                "make each answer a separate row of prompt and completion"
            )
        bare = answered.rstrip()  # a model never samples the newline after the end token
        stop = len(bare) if bare.endswith(self._special_tokens) else len(answered)
        return len(prompt), max(stop, len(prompt))

    def _render(
        self,
        template: str,
        chat: Chat,
        messages: list[Message],
        *,
        add_generation_prompt: bool = False,
        has_blocks: bool = False,
    ) -> Rendered:
        """Renders some messages of a chat. The result has spans only if the template has {% generation %} blocks."""
        # apply_chat_template is not used here, because it returns no spans and rejects an empty list of messages.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments: dict[str, Any] = dict(
            tools=chat.tools, add_generation_prompt=add_generation_prompt, **self._hf.special_tokens_map
        )
        try:
            rendered: Any = render_jinja_template(
                [messages], chat_template=template, return_assistant_tokens_mask=has_blocks, **arguments
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{self._name}'s chat template rejects {chat.where}: {error}") from error
        [text], spans = rendered
        return Rendered(text, spans[0] if has_blocks else [])

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        return tuple(str(token) for token in self._hf.added_tokens_decoder.values())


def starts_in_spans(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Returns a mask of the tokens that start in one of the spans, (length,) bool.

    offsets: the start and the end of each token in characters, (length, 2). Some tokenizers do not include leading
    spaces in the offsets, so each token is assumed to start where the previous token ended.
    """
    ends = np.maximum.accumulate(np.concatenate([[0], offsets[:, 1]]))
    begins = np.minimum(offsets[:, 0], ends[:-1])
    inside = np.zeros(len(offsets), bool)
    for start, stop in spans:
        inside |= (begins >= start) & (begins < stop)
    return inside
