"""Converts chats to tokens with a chat template. The model is trained on the assistant's messages.

A chat is first rendered to text. The encoder then finds the answers, which are the assistant's messages. If the
template has {% generation %} blocks, these blocks mark the answers. If the template has no {% generation %} blocks, the
encoder also renders each answer's prompt from the messages before the answer. The text of the chat must begin with the
text of the prompt. The answer starts directly after the prompt, and ends with the answer's end token.
The text of the chat is tokenised as a whole. The tokenizer's offsets map characters of the text to tokens.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa_train.data.sources.chats import IN_A_MIXTURE, Chat, Message
from fa_train.data.sources.files import read_text
from fa_train.data.tokens.encoding import Encoded, Encoder, Rejection
from fa_train.data.tokens.tokenizer import HFTokenizer, Tokenizer

FORMAT = "9"  # the version of the conversion from chats to tokens, and of the sizes of shards; part of the cache key
GENERATION = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
END_GENERATION = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
BEGIN, END = "\ue0f0\ue0f1", "\ue0f2\ue0f3"  # private-use characters that mark the start and end of a block in a text
REASONING = ("reasoning_content", "thinking", "reasoning")  # the fields that transformers reads, in this order
THINK, END_OF_THINK = "<think>", "</think>"  # the content of an answer can begin with reasoning between these tags
Spans = list[tuple[int, int]]


class Rendered(NamedTuple):
    """The text of a chat, and the spans of characters that the model is trained on."""

    text: str
    spans: Spans


def tokenizer_hashes(encoder: Encoder[Any]) -> dict[str, str]:
    """Returns a hash of the encoder's vocabulary and, for a ChatEncoder, a hash of the chat template.

    Returns no hashes for a byte tokenizer.
    """
    if not isinstance(encoder.tokenizer, HFTokenizer):
        return {}
    of_chats = {"chat_template": encoder.tokenizer.template_hash} if isinstance(encoder, ChatEncoder) else {}
    return {"vocabulary": encoder.tokenizer.vocabulary_hash} | of_chats


class ChatEncoder:
    """Encodes chats with the template in the file `chat_template`, or by default with the tokenizer's template.

    skip_rejected: whether `encode_batch` returns a Rejection in place of a chat that the template rejects.
    Raises: ValueError if there is no chat template, or the tokenizer does not return offsets. `encode_batch` raises
    ValueError if the template omits a part of a chat, or renders a message differently if more messages follow. Without
    `skip_rejected`, `encode_batch` also raises ValueError if the template rejects a chat.
    """

    masked = True

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None, *, skip_rejected: bool = False) -> None:
        if not isinstance(tokenizer, HFTokenizer):
            raise ValueError("data.tokenizer must be a tokenizer with a chat template; got null, which means bytes")
        self.tokenizer: Tokenizer = tokenizer
        self._hf = tokenizer.hf
        self.skip_rejected = skip_rejected
        self.name = chat_template or tokenizer.name  # the template's name, for error messages
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
        """The id of the first special token after the content of a trained answer, or None if no special token follows.

        The value is also None if the template rejects a chat of one question and one answer.
        """
        after = self._text_after_answer or ""
        found = [token for token in self._special_tokens if token.strip() and token in after]
        first = min(found, key=lambda token: (after.index(token), -len(token)), default=None)
        return None if first is None else int(self._hf.convert_tokens_to_ids(first))

    @cached_property
    def end_warning(self) -> str | None:
        """A warning if no special token follows an answer. Otherwise, the value is None."""
        after = self._text_after_answer
        if after is None or self.end_id is not None:
            return None
        tokens = self._hf.convert_ids_to_tokens(self._hf(after, add_special_tokens=False).input_ids)
        become = f", which become the tokens {' '.join(tokens)}" if tokens else ""
        return (
            f"{self.name}'s chat template must end an answer with a special token of the tokenizer; it ends an answer "
            f"with {after!r}{become}. The model does not learn to end an answer with one token"
        )

    @cached_property
    def _text_after_answer(self) -> str | None:
        """The trained text after the content of an answer, or None if the template rejects or changes a test chat."""
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            text, spans = self.render(Chat("a test chat", messages, tools=None, trained_from=0))
        except ValueError:
            return None
        trained = text[: max((stop for _, stop in spans), default=0)]
        _, content, after = trained.rpartition("answer")
        return after if content else None

    def encode_batch(self, documents: Sequence[Chat]) -> list[Encoded | Rejection]:
        chats = [self._rendered_or_rejected(chat) for chat in documents]
        accepted = iter(self._encode([chat for chat in chats if isinstance(chat, Rendered)]))
        return [next(accepted) if isinstance(chat, Rendered) else chat for chat in chats]

    def rejects(self, chat: Chat) -> bool:
        """Returns whether the template rejects a chat."""
        try:
            self.render(chat)
        except ValueError as error:
            return isinstance(error, Rejection)
        return False

    def _rendered_or_rejected(self, chat: Chat) -> Rendered | Rejection:
        try:
            return self.render(chat)
        except Rejection as rejection:
            if self.skip_rejected:
                return rejection
            raise ValueError(
                f"{rejection}. data.skip_invalid=true skips chats that the template rejects{IN_A_MIXTURE}"
            ) from rejection

    def _encode(self, chats: list[Rendered]) -> list[Encoded]:
        if not chats:  # the tokenizer fails without texts
            return []
        encoded = self._hf(
            [chat.text for chat in chats],
            add_special_tokens=False,  # the template has already written the special tokens
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return [
            Encoded(np.asarray(ids, np.int32), overlaps_spans(np.asarray(offsets).reshape(-1, 2), chat.spans))
            for ids, offsets, chat in zip(encoded["input_ids"], encoded["offset_mapping"], chats, strict=True)
        ]

    def render(self, chat: Chat) -> Rendered:
        """Renders a chat, and finds the answers that the model is trained on."""
        template = self._hf.get_chat_template(tools=chat.tools)
        has_blocks = GENERATION.search(COMMENT.sub("", template)) is not None
        text, spans = self._render(template, chat, chat.messages, has_blocks=has_blocks)
        self._require_tools(template, chat, text)
        self._require_texts(template, chat, text)
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        trained_on = [i for i in answers if i >= chat.trained_from]
        self._require_reasoning(template, chat, trained_on)
        if not has_blocks:
            spans = [self._answer_span(template, chat, i, text) for i in trained_on]
        elif trained_on != answers:
            spans = self._spans_from(template, chat, trained_on[0], Rendered(text, spans))
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
            except ValueError:  # if rendering fails without `name`, the template uses `name`
                continue
            if rendered == text:
                raise ValueError(
                    f"a chat template must render {name}; that of {self.name} omits the {name} of {chat.where}. Set "
                    f"data.chat_template=<file> to a template that renders them, or remove {name} from the chat"
                )

    def _require_texts(self, template: str, chat: Chat, text: str) -> None:
        """Raises: ValueError if the template omits a message's content, or the reasoning of the last message.

        Templates of reasoning models omit the reasoning of earlier answers on purpose.
        A template may also change a text, for example convert it to JSON. If a text is not found in the rendered chat,
        the chat is rendered again with markers instead of texts.
        """
        if _in_order(text, _texts(chat.messages)):
            return
        messages, markers = _marked(chat.messages)
        try:
            rendered = self._render(template, chat, messages).text
        except ValueError:  # a template that rejects the markers needs the contents of the texts
            return
        for marker, (name, i) in markers.items():
            if marker not in rendered:
                role = messages[i]["role"]
                is_developer = role == "developer"
                instead = "give the message the role system" if is_developer else f"remove the {name} from the message"
                raise ValueError(
                    f"a chat template must render the {name} of every message; the template of {self.name} omits the "
                    f"{name} of {chat.where}, message {i}, with role {role}. Set data.chat_template=<file> to a "
                    f"template that renders it, or {instead}"
                )

    def _require_reasoning(self, template: str, chat: Chat, trained_on: list[int]) -> None:
        """Cuts the chat after its last trained answer with reasoning, and checks that the template renders it.

        `_require_texts` has already checked the whole chat. There, a template may render only the reasoning of the last
        message.
        Raises: ValueError if the template omits the reasoning although the answer is the last message.
        """
        reasoned = [i for i in trained_on if _reasoning(chat.messages[i])]
        if not reasoned or reasoned[-1] == len(chat.messages) - 1:
            return
        begin = chat.messages[: reasoned[-1] + 1]
        try:
            text = self._render(template, chat, begin).text
        except Rejection:  # the template rejects the first messages, but not the whole chat
            return
        self._require_texts(template, replace(chat, messages=begin), text)

    def _spans_from(self, template: str, chat: Chat, index: int, rendered: Rendered) -> Spans:
        """Returns the spans of the {% generation %} blocks of chat.messages[index:]. rendered: the whole chat.

        A block does not say which message it belongs to. The method therefore renders the messages before `index`,
        counts the blocks in the rendered text, and skips this number of blocks. If the chat has more or fewer blocks
        than answers, the number of blocks could depend on later messages. The method then requires that the text of the
        chat begins with the text of the messages before `index`.
        """
        # without the generation prompt, some templates end the text with a block that holds the end-of-text token
        before = self._render(template, chat, chat.messages[:index], add_generation_prompt=True, has_blocks=True)
        n_answers = sum(message["role"] == "assistant" for message in chat.messages)
        if len(rendered.spans) != n_answers and not rendered.text.startswith(before.text):
            raise ValueError(
                "a chat template must have one {% generation %} block for each answer, or render a message "
                f"independently of later messages; {self.name}'s does neither for {chat.where}. Set "
                "data.chat_template=<file> to a copy with one block for each answer"
            )
        return rendered.spans[len(before.spans) :]

    def _answer_span(self, template: str, chat: Chat, index: int, text: str) -> tuple[int, int]:
        """Returns the span of the answer chat.messages[index] in `text`. The span includes the answer's end token."""
        prompt = self._render(template, chat, chat.messages[:index], add_generation_prompt=True).text
        answered = self._render(template, chat, chat.messages[: index + 1]).text
        if not answered.startswith(prompt):
            raise ValueError(
                "a chat template must render an answer directly after the text of its prompt, or mark answers with "
                f"{{% generation %}}; {self.name}'s does neither for {chat.where}, message {index}. Set "
                "data.chat_template=<file> to a copy with marked answers"
            )
        if not text.startswith(answered):
            raise ValueError(
                "a chat template must render a message independently of later messages, or mark answers with "
                f"{{% generation %}}; {self.name}'s does neither for {chat.where}, message {index}. It may remove "
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
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments = self._hf.special_tokens_map | chat.template_kwargs
        arguments |= {"tools": chat.tools, "add_generation_prompt": add_generation_prompt}
        arguments["continue_final_message"] = False  # True would remove the end of the last answer
        templates = [template, _with_markers(template)] if has_blocks else [template]
        part = "" if len(messages) == len(chat.messages) else f"the first {len(messages)} messages of "
        with named_rejection(f"{self.name}'s chat template rejects {part}{chat.where}"):
            texts = [render_jinja_template([messages], chat_template=one, **arguments)[0][0] for one in templates]
        if not has_blocks:
            return Rendered(texts[0], [])
        rendered = _without_markers(texts[1])
        if rendered.text != texts[0]:
            raise ValueError(
                "a chat template must not change the text of a {% generation %} block after the block, for example by "
                f"a filter; {self.name}'s template changes it for {chat.where}. Apply the filter inside the block, in "
                "a copy of the template, and set data.chat_template=<copy>"
            )
        return rendered

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        return tuple(str(token) for token in self._hf.added_tokens_decoder.values())


@contextmanager
def named_rejection(rejected: str) -> Iterator[None]:
    """Converts errors of a chat template to Rejections whose messages start with `rejected`.

    An expression in a template can raise an error of any type.
    """
    from jinja2 import TemplateError

    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        is_clear = isinstance(error, TemplateError | TypeError)
        raise Rejection(f"{rejected}: {error if is_clear else f'{type(error).__name__}: {error}'}") from error


@lru_cache
def _with_markers(template: str) -> str:
    """Puts BEGIN and END at the start and the end of each {% generation %} block.

    The spans that transformers returns are not used, because they are wrong for a block in a macro, a filter or a
    variable.
    """
    # `if true` keeps the whitespace control of the tags, such as {%- generation -%}
    template = GENERATION.sub(rf"{{%\1 generation %}}{BEGIN}{{% if true \2%}}", template)
    return END_GENERATION.sub(rf"{{%\1 endif %}}{END}{{% endgeneration \2%}}", template)


def _without_markers(marked: str) -> Rendered:
    """Removes BEGIN and END from a rendered text. Returns the new text, and the spans between BEGIN and END."""
    text, spans, start = "", [], 0
    for part in re.split(f"({BEGIN}|{END})", marked):
        if part == BEGIN:
            start = len(text)
        elif part == END:
            spans.append((start, len(text)))
        else:
            text += part
    return Rendered(text, spans)


def _reasoning(message: Message) -> list[str]:
    """Returns the names of the fields that hold the reasoning of a message, or [] if the role is not assistant."""
    if message["role"] != "assistant":
        return []
    return [name for name in REASONING if isinstance(message.get(name), str) and message[name].strip()]


def _texts(messages: list[Message]) -> list[str]:
    """Returns the texts that a template must render: each message's content, and the reasoning of the last message."""
    *before, last = messages
    reasoning = [last[name] for name in _reasoning(last)[:1]]
    return [*(message["content"] for message in before), *reasoning, last["content"]]


def _in_order(text: str, parts: list[str]) -> bool:
    """Returns whether `parts` occur in `text` in this order without overlap. Ignores white space around each part."""
    position = 0
    for part in map(str.strip, parts):
        found = text.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True


def _marked(messages: list[Message]) -> tuple[list[Message], dict[str, tuple[str, int]]]:
    """Puts markers in the place of the texts that a template must render.

    Returns the new messages, and {marker: (what the marker replaces, index of the message)}.
    """
    marked, markers = [dict(message) for message in messages], {}
    for i, message in enumerate(messages):
        if message["content"].strip():
            marked[i]["content"] = f"content{i}marker"
            markers[marked[i]["content"]] = "content", i
    last, marker = len(messages) - 1, "reasoningmarker"
    thought, tag, _ = messages[last]["content"].partition(END_OF_THINK)
    if names := _reasoning(messages[last]):
        marked[last].update(dict.fromkeys(names, marker))
        markers[marker] = names[0], last
    elif messages[last]["role"] == "assistant" and tag and thought.replace(THINK, "").strip():
        marked[last]["content"] = f"{THINK}\n{marker}\n{END_OF_THINK}\n\n{marked[last]['content']}"
        markers[marker] = "reasoning", last
    return marked, markers


def overlaps_spans(offsets: np.ndarray, spans: Spans) -> np.ndarray:
    """Returns a mask of the tokens that have a character in one of the spans, (length,) bool.

    A token can begin with the last space of the prompt and contain the first word of the answer. The mask also includes
    tokens that lie only partly in a span, as does the assistant mask of transformers. Without tokens
    that lie partly in a span, an answer of one word could have no label.
    offsets: the start and the end of each token in characters, (length, 2). Some tokenizers do not include leading
    spaces in the offsets, so each token is assumed to start where the previous token ended.
    """
    ends = np.maximum.accumulate(np.concatenate([[0], offsets[:, 1]]))
    begins = np.minimum(offsets[:, 0], ends[:-1])
    inside = np.zeros(len(offsets), bool)
    for start, stop in spans:
        # a token without characters belongs to the span in which it begins
        inside |= (begins < stop) & ((offsets[:, 1] > start) | (begins >= start))
    return inside
