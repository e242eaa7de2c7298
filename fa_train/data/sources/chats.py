"""Reads chats from files and datasets, in the formats that `ChatCorpus` lists."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fa_train.data.sources.corpus import is_saved_dataset, load_hf_dataset
from fa_train.data.sources.files import (
    SourceRow,
    count_rows,
    find_files,
    hash_files,
    read_rows,
    total_count,
    without_nulls_below,
)
from fa_train.private_names import private

HUB = "hf:"
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
VALIDITY = "8"  # the version of the rules for valid chats; the cache key contains it if invalid rows are skipped
ROLES = ("system", "developer", "user", "assistant", "tool")
MAY_BE_EMPTY = ("tool", "system", "developer")  # without an empty one, some templates add a system prompt
# The columns of each chat format. If a row has the columns of several formats, the first of these formats is used.
FORMS: tuple[tuple[str, ...], ...] = (
    ("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"), ("instruction", "response"),
    ("question", "answer"), ("query", "response"), ("prompt", "response"), ("question", "response"),
)  # fmt: skip
INPUTS = ("context", "input")  # optional columns whose texts are added to an instruction, a question or a query
IN_A_MIXTURE = "; with data=mix, write data.sources.<name>.skip_invalid=true"  # ends the advice in error messages
SYSTEM = ("system", "system_prompt")  # optional columns with a system prompt; the first that is not empty is used
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # unlisted roles keep their names
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns of LLaVA, LLaMA-Factory and TRL
MARKS = ("label", "kto_tag")  # columns of datasets for KTO, in which false marks an answer to avoid
NO_MEDIA = ("", "[]", "[null]", "null")  # texts that name no file; in a .csv file, lists are texts
FALSE = ("false", "0", "0.0")  # how false can be written: as a text in lower case, or as a number
TRAINED = ("weight", "train")  # in the formats of OpenAI and axolotl, 0 or false excludes a message from training
Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """One chat. The model is trained on all assistant messages whose index is at least `trained_from`.

    where: the file and the line of the chat, for error messages.
    template_kwargs: variables of the chat template, such as {"enable_thinking": False}.
    """

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    trained_from: int
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Returns about how many characters the chat template gets. This number limits the sizes of batches."""
        return _characters([self.messages, self.tools, self.template_kwargs])


class ChatCorpus:
    """Chats from files or from a Hugging Face dataset. Each row is one chat.

    path: a .jsonl, .json, .csv or .parquet file; a folder or a glob of such files; or hf:<name>:<split> for a dataset.
    If the dataset has several configs, use hf:<name>:<config>:<split>. <name> is a name on the hub, or a folder.
    If `save_to_disk` of the `datasets` library has written the folder `path`, the split `train` is read.
    A row has one of the following forms.
      OpenAI: {"messages": [{"role", "content", ...}, ...]}.
      ShareGPT: {"conversations": [{"from", "value"}, ...]}. The messages can also have "role" and "content".
      Prompt and completion: {"prompt", "completion"} or {"prompt", "response"}. Each value is a text or a list of
      messages. The model is trained only on the completion or response.
      Alpaca: {"instruction", "input", "output"}.
      Dolly: {"instruction", "context", "response"}.
      Question and answer: {"question", "answer"}, {"question", "response"} or {"query", "response"}.
    In the last three forms, the texts of the columns "context" and "input" are added to the instruction, question or
    query. Both columns may be missing or empty. An optional column "history" holds earlier pairs [question, answer].
    A list of messages, conversations or pairs can also be given as JSON text.
    The content of a message is a string, or a list of parts {"type": "text", "text": ...}. The strings of the parts are
    concatenated.
    A row can also have "tools", which is a list of JSON schemas or the JSON text of such a list. A row can also have
    "system" or "system_prompt", a text that becomes the first message unless the chat begins with a system prompt.
    "chat_template_kwargs" is an object with variables of the chat template, or the JSON text of such an object.
    skip_invalid: whether to skip rows that are not valid chats, for example because an answer is empty or a line of a
    .jsonl file is not valid JSON.
    n_skipped: the number of rows that the last complete iteration skipped.
    say: a function that prints one line about the skipped rows.
    Raises: ValueError if there is nothing to read at `path`. With skip_invalid=False, `documents` raises ValueError for
    a row that is not a valid chat.
    """

    def __init__(self, path: str | Path, skip_invalid: bool = False, say: Callable[[str], object] = print) -> None:
        path = str(path)
        self.name, self.skip_invalid, self.n_skipped, self.say = path, skip_invalid, 0, say
        self._rows: FileRows | HubRows
        if path.startswith(HUB) or is_saved_dataset(path):
            self._rows = HubRows(path)
        else:
            self._rows = FileRows(path)
        self.paths, self.file_counts = self._rows.paths, self._rows.file_counts

    def documents(self) -> Iterator[tuple[str, Chat]]:
        n_skipped, reason = 0, ""
        for key, row in self._rows.read():
            try:
                chat = parse_chat(row.value, row.where)
            except ValueError as error:
                if not self.skip_invalid:
                    advice = f"data.skip_invalid=true skips rows that are not valid chats{IN_A_MIXTURE}"
                    raise ValueError(f"{error}. {advice}") from error
                n_skipped, reason = n_skipped + 1, reason or str(error)
            else:
                yield key, chat
        self.n_skipped = n_skipped
        if n_skipped:
            line = f"skipped {n_skipped:,} rows of {self.name}, which are not valid chats. The first: {reason}"
            self.say(line.encode("utf-8", "backslashreplace").decode())  # print() rejects file names that are not UTF-8

    def count(self) -> int | None:
        return None if self.skip_invalid else self._rows.count()

    def fingerprint(self) -> str:
        return self._rows.fingerprint() + f"-skipping-{VALIDITY}" * self.skip_invalid


class FileRows:
    """The rows of chat files, as pairs (key, row)."""

    def __init__(self, path: str) -> None:
        self.root, self.paths, self.file_counts = find_files(path, SUFFIXES)

    def read(self) -> Iterator[tuple[str, SourceRow]]:
        for path in self.paths:
            key = path.relative_to(self.root).as_posix()
            for row in read_rows(path):
                yield f"{key}:{row.number}", row

    def count(self) -> int | None:
        return total_count(map(count_rows, self.paths))

    def fingerprint(self) -> str:
        return hash_files(self.root, self.paths, "chats")


class HubRows:
    """The rows of a Hugging Face dataset, as pairs (key, row). The dataset is loaded on first use.

    path: hf:<name>:<split>, hf:<name>:<config>:<split>, or the folder of a saved dataset. If `path` does
    not begin with hf:, the split `train` is read.
    """

    paths: Sequence[Path] = ()
    file_counts = None

    def __init__(self, path: str) -> None:
        self.path = path
        self.name: str = path
        self.config: str | None = None
        self.split = "train"
        if path.startswith(HUB):
            found = re.fullmatch(r"hf:(?P<name>[^:]+):((?P<config>[^:[]+):)?(?P<split>[^:[]+(\[.*)?)", path)
            if not found:
                raise ValueError(f"data.path must be hf:<name>:<split> or hf:<name>:<config>:<split>; got {path}")
            self.name, self.config, self.split = found["name"], found["config"], found["split"]

    @cached_property
    def dataset(self) -> Any:
        return load_hf_dataset(self.name, self.config, self.split, f"data.path={self.path}")

    def read(self) -> Iterator[tuple[str, SourceRow]]:
        for number, value in enumerate(self.dataset):
            yield str(number), SourceRow(number, f"{self.path}, row {number}", without_nulls_below(value))

    def count(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        return f"{private('datasets', self.dataset, '_fingerprint')}-chats"


def parse_chat(row: Mapping[str, Any], where: str) -> Chat:
    """Converts a row to a chat.

    Raises: ValueError if a field is missing, a message is empty or a role is unknown. The error message contains
    `where`.
    """
    present = {name: _encodable(value) for name, value in row.items() if value is not None}
    _require_usable(present, where)
    trained_from = 0
    form = next((form for form in FORMS if all(name in present for name in form)), None)
    match form:
        case ("messages",):
            messages = _messages(present["messages"], where)
        case ("conversations",):
            messages = _messages(_from_sharegpt(present["conversations"], where), where, "conversations")
        case ("prompt", answer):
            prompt = _prompt_or_completion(present, "prompt", "user", where)
            trained_from = len(prompt)
            messages = prompt + _prompt_or_completion(present, answer, "assistant", where)
        case (question, answer):
            pairs = [
                *_history(present.get("history"), where),
                (_with_inputs(present, question, where), present[answer]),
            ]
            messages = _from_pairs(pairs, where)
        case _:
            found = ", ".join(name if name in present else f"{name} (null)" for name in row) or "nothing"
            *others, last = (" and ".join(form) for form in FORMS)
            raise ValueError(f"a chat must have {', '.join(others)}, or {last}; {where} has {found}")
    name = next((name for name in SYSTEM if present.get(name)), SYSTEM[0])
    system = present.get(name, "")
    if not isinstance(system, str):
        raise ValueError(f"{name} must be a text; {where} has a {type(system).__name__}")
    if system.strip() and messages[0]["role"] not in ("system", "developer"):
        messages, trained_from = [{"role": "system", "content": system}, *messages], trained_from + 1
    if not any(message["role"] == "assistant" for message in messages[trained_from:]):
        raise ValueError(f"a chat must have an assistant's message to train on; {where} has none")
    if present.get("chosen") and messages[-1]["role"] != "assistant":  # LLaMA-Factory's format for preferences
        raise ValueError(
            f"a chat must end with an answer; {where} has it only in the column chosen. Append it to the messages"
        )
    template_kwargs = _template_kwargs(present.get("chat_template_kwargs"), where)
    return Chat(where, messages, _tools(present.get("tools"), where), trained_from, template_kwargs)


def _require_usable(row: Mapping[str, Any], where: str) -> None:
    """Raises: ValueError if a row has images, videos, audio or functions, or its answer is marked as one to avoid."""
    for name in MEDIA:
        if _holds_media(row.get(name)):
            raise ValueError(
                f"a chat must have only text; {where} has the column {name}. Remove the column to train without it"
            )
    if row.get("functions"):  # in OpenAI's old format; chat templates render tools
        raise ValueError(f"functions must be given as tools; {where} has the column functions")
    for name in MARKS:
        given = str(row.get(name, True)).strip().lower()
        if name == "label" and given != FALSE[0] and "prompt" not in row:
            continue  # without a prompt, 0 is often a class, and CSV files hold it as text; rows of KTO have a prompt
        if given in FALSE:
            raise ValueError(
                f"{name} must be true or absent, because false marks an answer to avoid; {where} has {row[name]!r}. "
                f"Rename {name} if it has another meaning"
            )


def _holds_media(value: Any) -> bool:
    """Returns whether the value of a column in `MEDIA` has anything except nulls and empty texts."""
    if isinstance(value, str):
        return value.strip() not in NO_MEDIA
    if isinstance(value, list | dict):
        return any(map(_holds_media, value.values() if isinstance(value, dict) else value))
    return bool(value)


def _prompt_or_completion(row: Mapping[str, Any], name: str, role: str, where: str) -> list[Message]:
    """Returns the messages in the column `name`. A text becomes a single message."""
    value = row[name]
    if not isinstance(value, str | list):
        raise ValueError(f"{name} must be a text or a list of messages; {where} has a {type(value).__name__}")
    return _messages([{"role": role, "content": value}] if isinstance(value, str) else value, where, name)


def _with_inputs(row: Mapping[str, Any], question: str, where: str) -> str:
    """Returns the text of the column `question`, followed by the text of each column in `INPUTS`."""
    texts = {name: row.get(name, "") for name in (question, *INPUTS)}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} must be a text; {where} has a {type(text).__name__}")
    return "\n\n".join(text for text in texts.values() if text.strip())


def _history(value: Any, where: str) -> list[tuple[Any, Any]]:
    """Returns the earlier pairs (question, answer) of a row. value: a list, its JSON text, or None."""
    if isinstance(value, str):
        value = _json(value, "a text in place of the list history", where) if value.strip() else None
    if not value:
        return []
    entries = _list(value, "history", where)
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 2:
            raise ValueError(f"each entry of history must be a list [question, answer]; {where} has {entry!r}")
    return [(question, answer) for question, answer in entries]


def _from_pairs(pairs: list[tuple[Any, Any]], where: str) -> list[Message]:
    roles = "user", "assistant"
    return _messages(
        [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)], where
    )


def _from_sharegpt(value: Any, where: str) -> list[Message]:
    """Converts ShareGPT's messages to messages with role and content. A list that already has roles stays as it is."""
    messages = []
    entries = _list(value, "conversations", where)
    first = entries[0]
    if isinstance(first, dict) and first.get("from") is None and "role" in first:
        return entries  # as unsloth's standardize_sharegpt writes them
    for number, message in enumerate(entries):
        if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
            raise ValueError(
                f"each entry of conversations must have from and value; {where}, message {number} is {message!r}"
            )
        role = message["from"]
        role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        others = {name: entry for name, entry in message.items() if name not in ("from", "value")}
        messages.append(others | {"role": role, "content": message["value"]})
    return messages


def _messages(value: Any, where: str, name: str = "messages") -> list[Message]:
    """Checks and returns a list of messages. name: the name of the list, for error messages."""
    return [_message(message, f"{where}, message {i}") for i, message in enumerate(_list(value, name, where))]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"a message must be an object; {where} is a {type(value).__name__}")
    message = {name: field for name, field in value.items() if field is not None}  # in Parquet, missing fields are null
    if "role" not in message:
        raise ValueError(f"a message must have a role; {where} has {', '.join(message) or 'nothing'}")
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        content = message["content"] = "".join(_text_of_part(part, where) for part in content)
    if role not in ROLES:
        raise ValueError(f"a role must be one of {', '.join(ROLES)}; {where} has {role!r}")
    for name in TRAINED:
        if message.pop(name, 1) != 1 and role == "assistant":  # True equals 1; other roles are never trained on
            raise ValueError(
                f"an assistant's {name} must be 1, true or absent; {where} has {value[name]!r}. To train only on some "
                "answers, use rows of prompt and completion, which train only on the completion"
            )
    if message.pop("function_call", None):  # chat templates render tool_calls
        raise ValueError(f"a message must have tool_calls instead of function_call; {where} has function_call")
    calls = message.pop("tool_calls", None)
    if calls:  # an empty list means no tool calls, but some templates reject an empty list
        if role != "assistant":
            raise ValueError(f"only an assistant's message can have tool_calls; {where} has role {role}")
        message["tool_calls"] = [_tool_call(call, where) for call in _list(calls, "tool_calls", where)]
    if content is None and calls:
        message["content"] = ""  # templates concatenate the content with text, so the content must be a string
    elif not isinstance(content, str):
        found = "none" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"a message must have text as its content; {where} has {found}")
    elif not content.strip() and not calls and role not in MAY_BE_EMPTY:
        raise ValueError(f"a message must not be empty; {where} with role {role} is empty")
    return message


def _text_of_part(part: Any, where: str) -> str:
    """Returns the text of one part of a message's content."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError(f"a part of a message's content must be an object with a type; {where} has {part!r}")
    if part["type"] != "text":
        raise ValueError(f"a part of a message's content must be of type text; {where} has type {part['type']}")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"a part of type text must have a text; {where} has {part!r}")
    return str(part["text"])


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object. In OpenAI's format, the arguments are JSON text.

    Arguments that are null or an empty text become an empty object. Templates would render null as an argument.
    """
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call must have the name of a function; {where} has {value!r}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments, "a tool call's arguments", where) if arguments.strip() else None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"a tool call's arguments must be an object or its JSON text; {where} has {arguments!r}")
    function = {**function, "arguments": arguments}
    return {**value, "function": function} if "function" in value else function


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        value = _json(value, "tools", where) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"tools must be a list of JSON schemas; {where} has {value!r}")
    return value


def _template_kwargs(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        value = _json(value, "chat_template_kwargs", where) if value.strip() else None
    if not isinstance(value or {}, dict):
        raise ValueError(f"chat_template_kwargs must be an object; {where} has {value!r}")
    return value or {}


def _list(value: Any, name: str, where: str) -> list[Any]:
    """Returns a list that is not empty. value: the list, or its JSON text."""
    if isinstance(value, str):
        value = _json(value, f"a text in place of the list {name}", where)
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list; {where} has a {type(value).__name__}")
    if not value:
        raise ValueError(f"{name} must have at least one entry; {where} has an empty list")
    return value


def _encodable(value: Any) -> Any:
    """Replaces lone surrogates such as "\\ud800" in all texts of a JSON value, because tokenizers reject them."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(entry) for entry in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(entry) for name, entry in value.items()}
    return value


def _characters(value: Any) -> int:
    """Returns the number of characters in all keys and texts of a JSON value. Other values count as one character."""
    if isinstance(value, dict):
        return sum(map(_characters, value)) + sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 1


def _json(text: str, name: str, where: str) -> Any:
    try:
        return _encodable(json.loads(text))
    except ValueError as error:  # the text is not JSON, or has a huge integer
        raise ValueError(f"{name} must be JSON; {where} has {text[:100]!r}: {error}") from error
