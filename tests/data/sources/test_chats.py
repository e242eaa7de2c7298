"""Chats are read in every supported format. Each error names the file and the line."""

import json
import re

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from fa_train.data.sources.chats import ChatCorpus, parse_chat
from tests.data.support.chats import CALL, PAIR, SEVERAL_ANSWERS, TOOL, chat_message, many_chats, write_jsonl

QUESTION, ANSWER = chat_message("user", "2 + 2?"), chat_message("assistant", "is 4.")


def chats(path):
    return [chat for _, chat in ChatCorpus(str(path)).documents()]


def test_all_formats_give_the_same_chat():
    sharegpt = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "is 4."}]}
    messages_pair = {"prompt": [QUESTION], "completion": [ANSWER]}
    alpaca = {"instruction": "2 + 2?", "output": "is 4."}
    question = {"question": "2 + 2?", "answer": "is 4."}
    dolly = {"instruction": "2 + 2?", "context": "", "response": "is 4.", "category": "open_qa"}
    unsloth = {"conversations": [QUESTION, ANSWER]}
    nulls = {"conversations": [message | {"role": None, "content": None} for message in sharegpt["conversations"]]}
    pairs = [{"query": "2 + 2?", "response": "is 4."}, {"prompt": "2 + 2?", "response": "is 4."}]
    pairs.append({"prompt": [QUESTION], "response": [ANSWER]})
    same = [
        alpaca,
        alpaca | {"input": ""},
        alpaca | {"input": None},
        question,
        PAIR | {"tools": None, "id": 3, "label": True, "images": [], "image": None},
        alpaca | {"kto_tag": "true", "label": 0, "image": ""},
        alpaca | {"label": "0"},
        alpaca | {"images": [None], "image": {"bytes": None, "path": None}},
        alpaca | {"images": "[]", "audios": "null", "videos": [""], "video": " "},
    ]
    for row in ({"messages": [QUESTION, ANSWER]}, sharegpt, PAIR, messages_pair, *same, dolly, *pairs, unsloth, nulls):
        chat = parse_chat(row, "")
        assert (chat.messages, chat.tools) == ([QUESTION, ANSWER], None)
        assert chat.trained_from == int("prompt" in row), "only a prompt is never trained on"


@pytest.mark.parametrize(
    ("question", "name", "answer"),
    [
        ("instruction", "input", "output"), ("instruction", "context", "output"), ("question", "context", "answer"),
        ("instruction", "input", "response"), ("instruction", "context", "response"), ("query", "context", "response"),
    ],
    ids=str,
)  # fmt: skip
def test_a_context_or_input_follows_the_instruction_or_question(question, name, answer):
    chat = parse_chat({question: "Add.", name: "2 and 2", answer: "4"}, "")
    assert [message["content"] for message in chat.messages] == ["Add.\n\n2 and 2", "4"]
    assert chat.trained_from == 0


@pytest.mark.parametrize("as_text", [False, True], ids=["lists", "json-text"])
def test_earlier_questions_and_answers_come_first(as_text, tmp_path):
    history, messages = [["2?", "3."], ["4?", "5."]], [QUESTION, ANSWER]
    sharegpt = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "is 4."}]
    rows = [
        {"instruction": "2 +", "input": "2?", "output": "is 4.", "system": "be brief.", "history": history},
        {"question": "2 + 2?", "answer": "is 4.", "history": []},
        {"messages": messages},
        {"conversations": sharegpt},
    ]
    if as_text:
        rows = [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    earlier = [
        chat_message(role, text) for pair in history for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    first = [chat_message("system", "be brief."), *earlier, chat_message("user", "2 +\n\n2?"), ANSWER]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "b.jsonl", rows[1:])
    found = chats(tmp_path)
    assert [chat.messages for chat in found] == [first, messages, messages, messages]
    assert found[0].trained_from == 1, "the answers of the history are trained on too"


def test_the_texts_of_a_content_with_parts_are_concatenated(tmp_path):
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    assert parse_chat({"messages": [chat_message("user", parts), ANSWER]}, "").messages == [QUESTION, ANSWER]
    sharegpt = {"conversations": [{"from": "human", "value": parts}, {"from": "gpt", "value": "is 4."}]}
    assert parse_chat(sharegpt, "").messages == [QUESTION, ANSWER]
    row = {"messages": [chat_message("user", [*parts, {"type": "image_url", "image_url": {"url": "a.png"}}])]}
    pyarrow.parquet.write_table(
        pa.Table.from_pylist([row]), tmp_path / "b.parquet"
    )  # in Parquet, each part of a message's content also has the keys of the other parts, with the value null
    for path in (write_jsonl(tmp_path / "a.jsonl", [row]), tmp_path / "b.parquet"):
        with pytest.raises(ValueError, match=r"content must be of type text; .*, message 0 has type image_url"):
            chats(path)


def test_a_system_prompt_may_have_its_own_column():
    system = chat_message("system", "be brief.")
    sharegpt = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "is 4."}]}
    orca = {"question": "2 + 2?", "response": "is 4."}
    for row in (PAIR, sharegpt, orca, {"messages": [QUESTION, ANSWER]}, {"messages": [system, QUESTION, ANSWER]}):
        for given in ({"system": "be brief."}, {"system_prompt": "be brief.", "system": ""}):
            assert parse_chat(row | given, "").messages == [system, QUESTION, ANSWER]
    assert parse_chat(PAIR | {"system": "be brief."}, "").trained_from == 2
    begun = [chat_message("developer", "be long."), QUESTION, ANSWER]
    assert parse_chat({"messages": begun, "system": "be brief."}, "").messages == begun
    assert parse_chat(PAIR | {"system": " "}, "").messages == [QUESTION, ANSWER]
    with pytest.raises(ValueError, match=r"system_prompt must be a text; row 1 has a list"):
        parse_chat(PAIR | {"system_prompt": ["be brief."]}, "row 1")


def test_a_system_prompt_may_be_empty():
    """An empty system prompt prevents the default system prompt of a chat template, such as that of Qwen 2.5."""
    for role in ("system", "developer"):
        messages = [chat_message(role, ""), QUESTION, ANSWER]
        assert parse_chat({"messages": messages}, "").messages == messages


def test_calls_in_parquet_have_no_arguments_of_other_rows(tmp_path):
    calls = [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "add", "arguments": {"a": 1, "b": 2}}]
    rows = [{"messages": [QUESTION, chat_message("assistant", "", tool_calls=[call])]} for call in calls]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    found = [chat.messages[1]["tool_calls"][0]["arguments"] for chat in chats(tmp_path / "chats.parquet")]
    assert found == [call["arguments"] for call in calls]


def test_a_map_in_parquet_is_an_object(tmp_path):
    """Spark writes objects with varying keys as maps."""
    kinds = {"name": pa.string(), "arguments": pa.map_(pa.string(), pa.string())}
    message = pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(pa.struct(kinds))})
    calls = [{"name": "weather", "arguments": {"city": "Rome"}}]
    row = [QUESTION, chat_message("assistant", "", tool_calls=[{**calls[0], "arguments": [("city", "Rome")]}])]
    pyarrow.parquet.write_table(pa.table({"messages": pa.array([row], pa.list_(message))}), tmp_path / "a.parquet")
    assert chats(tmp_path)[0].messages[1]["tool_calls"] == calls


def test_marks_of_trained_messages_are_accepted():
    marked = [QUESTION | {"weight": 0, "train": False}, ANSWER | {"weight": 1, "train": True}]
    assert parse_chat({"messages": marked}, "").messages == [QUESTION, ANSWER]
    human = {"from": "human", "value": "2 + 2?", "train": False}  # the format in axolotl's documentation
    sharegpt = {"conversations": [human, {"from": "gpt", "value": "is 4.", "train": True}]}
    assert parse_chat(sharegpt, "").messages == [QUESTION, ANSWER]


def test_the_other_fields_of_a_sharegpt_message_stay():
    fields = {"reasoning_content": "Two plus two.", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}
    sharegpt = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "is 4.", **fields}]
    assert parse_chat({"conversations": sharegpt}, "").messages == [QUESTION, ANSWER | fields]


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    row = json.dumps({"messages": [QUESTION, ANSWER]})
    (tmp_path / "a.jsonl").write_text(row + "\n", encoding="utf-8-sig")
    (tmp_path / "b.json").write_text(f"[{row}]", encoding="utf-8-sig")
    assert [chat.messages for chat in chats(tmp_path)] == [[QUESTION, ANSWER]] * 2


def test_tools_and_their_arguments_are_objects():
    chat = parse_chat(SEVERAL_ANSWERS, "")
    assert chat.messages[4]["content"] == ""
    assert chat.messages[4]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert chat.tools == parse_chat(SEVERAL_ANSWERS | {"tools": json.dumps([TOOL])}, "").tools == [TOOL]
    bare = {"name": "weather", "arguments": {"city": "Rome"}}
    row = {"messages": [QUESTION, chat_message("assistant", "", tool_calls=[bare])]}
    assert parse_chat(row, "").messages[1]["tool_calls"] == [bare]


@pytest.mark.parametrize("arguments", [None, "", " ", "null", "{}", {}], ids=repr)
def test_a_tool_call_without_arguments_has_an_empty_object(arguments):
    calls = [{"type": "function", "function": {"name": "now", "arguments": arguments}}]
    [_, message] = parse_chat({"messages": [QUESTION, chat_message("assistant", "", tool_calls=calls)]}, "").messages
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


LONG = "x" * 1000


@pytest.mark.parametrize(
    ("in_answer", "in_row"),
    [
        pytest.param({"content": LONG}, {}, id="content"),
        pytest.param({"reasoning_content": LONG}, {}, id="reasoning"),
        pytest.param({"tool_calls": [{"name": "f", "arguments": {"code": LONG}}]}, {}, id="tool-calls"),
        pytest.param({}, {"tools": [{"name": "f", "description": LONG}]}, id="tools"),
        pytest.param({}, {"chat_template_kwargs": {"documents": [{"text": LONG}]}}, id="variables"),
    ],
)
def test_the_length_of_a_chat_counts_every_text_that_a_template_can_render(in_answer, in_row):
    """Batches end after a number of characters, because a tokenizer needs up to 200 bytes for each of them."""
    assert 1000 < len(parse_chat({"messages": [QUESTION, ANSWER | in_answer]} | in_row, "")) < 1200


def test_files_hold_the_same_chats(tmp_path):
    rows = [{"messages": [QUESTION, ANSWER]}, {"messages": [chat_message("system", "be brief."), QUESTION, ANSWER]}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    expected = [parse_chat(row, "").messages for row in rows]
    assert [chat.messages for chat in chats(tmp_path)] == expected * 3
    keys = [key for key, _ in ChatCorpus(str(tmp_path)).documents()]
    assert keys == ["a.jsonl:1", "a.jsonl:2", "b.json:1", "b.json:2", "c.parquet:1", "c.parquet:2"]
    assert ChatCorpus(str(tmp_path / "c.parquet")).count() == 2 and ChatCorpus(str(tmp_path)).count() is None


def test_the_rows_of_csv_are_texts(tmp_path):
    path = tmp_path / "chats.csv"
    path.write_text('prompt,completion,system\n"2\n+ ""2""?",4,\n2?,null,be brief.\n', encoding="utf-8-sig")
    assert [[message["content"] for message in chat.messages] for chat in chats(path)] == [
        ['2\n+ "2"?', "4"], ["be brief.", "2?", "null"],
    ]  # fmt: skip
    assert [key for key, _ in ChatCorpus(str(path)).documents()] == ["chats.csv:1", "chats.csv:2"]
    path.write_text("prompt,completion\n2?,\n")
    with pytest.raises(ValueError, match=r"must not be empty; .*chats.csv, row 1, message 0 with role assistant"):
        chats(path)


def with_message(**changes):
    return {"messages": [QUESTION, ANSWER | changes]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "2"}, "must have messages, conversations, prompt and completion, .*; .*line 2 has text"),
        ({"prompt": "2", "completion": None}, r"prompt and completion, .*; .*line 2 has prompt, completion \(null\)"),
        ({"instruction": "2", "input": "3"}, "instruction and output, .*; .*line 2 has instruction, input"),
        ({"instruction": "2", "context": ["3"], "response": "4"}, "context must be a text; .*line 2 has a list"),
        ({"question": "2", "context": {"a": "3"}, "answer": "4"}, "context must be a text; .*line 2 has a dict"),
        ({"query": "2", "response": ""}, "must not be empty; .*line 2, message 1 with role assistant is empty"),
        ({"instruction": 2, "output": "3"}, "instruction must be a text; .*line 2 has a int"),
        ({"instruction": "", "output": "3"}, "must not be empty; .*line 2, message 0 with role user is empty"),
        ({"question": "2", "answers": ["3"]}, "question and answer, .*; .*line 2 has question, answers"),
        ({"messages": []}, "messages must have at least one entry; .*line 2 has an empty list"),
        ({"messages": "hello"}, "in place of the list messages must be JSON; .*line 2 has 'hello': Expecting value"),
        ({"messages": '{"role": "user"}'}, "messages must be a list; .*line 2 has a dict"),
        ({"conversations": "[]"}, "conversations must have at least one entry; .*line 2 has an empty list"),
        ({"instruction": "2", "output": "3", "history": {"a": "b"}}, "history must be a list; .*line 2 has a dict"),
        ({"question": "2", "answer": "3", "history": [["4"]]}, r"a list \[question, answer\]; .*line 2 has \['4'\]"),
        ({"query": "2", "response": "3", "history": [["4", ""]]}, "line 2, message 1 with role assistant is empty"),
        ({"prompt": 2, "completion": "4"}, "prompt must be a text or a list of messages; .*line 2 has a int"),
        ({"messages": ["hello"]}, "a message must be an object; .*line 2, message 0 is a str"),
        ({"messages": [QUESTION]}, "must have an assistant's message to train on; .*line 2 has none"),
        (
            {"prompt": [QUESTION, ANSWER], "completion": [QUESTION]},
            "an assistant's message to train on; .*line 2 has none",
        ),
        ({"messages": [QUESTION, {"content": "4"}]}, "must have a role; .*line 2, message 1 has content"),
        (with_message(role="bot"), "a role must be one of .*; .*line 2, message 1 has 'bot'"),
        (with_message(weight=0), "weight must be 1, true or absent; .*line 2, message 1 has 0"),
        (with_message(train=False), "train must be 1, true or absent; .*line 2, message 1 has False"),
        (
            {"conversations": [{"from": "human", "value": "2"}, {"from": "gpt", "value": "4", "weight": 0}]},
            "weight must be 1, true or absent; .*line 2, message 1 has 0",
        ),
        (with_message(function_call={"name": "f"}), "tool_calls instead of function_call; .*line 2, message 1 has"),
        (with_message(content=" "), "must not be empty; .*line 2, message 1 with role assistant is empty"),
        (with_message(content=None), "must have text as its content; .*line 2, message 1 has none"),
        (with_message(content={"text": "4"}), "must have text as its content; .*line 2, message 1 has a dict"),
        (with_message(content=[]), "must not be empty; .*line 2, message 1 with role assistant is empty"),
        (with_message(content=["4"]), "must be an object with a type; .*line 2, message 1 has '4'"),
        (with_message(content=[{"type": "text"}]), "a part of type text must have a text; .*line 2, message 1 has"),
        (with_message(content=[{"type": "image"}]), "must be of type text; .*line 2, message 1 has type image"),
        (
            with_message(role="user", tool_calls=[CALL]),
            "only an assistant's message can have tool_calls; .*message 1 has role user",
        ),
        (with_message(tool_calls=[{"id": 1}]), "must have the name of a function; .*line 2, message 1 has"),
        (with_message(tool_calls=[{"name": "f", "arguments": "{"}]), "arguments must be JSON; .*line 2, message 1 has"),
        (
            with_message(tool_calls=[{"name": "f", "arguments": json.dumps(json.dumps({"a": 1}))}]),
            r"arguments must be an object or its JSON text; .*line 2, message 1 has '{\"a\": 1}'",
        ),
        (PAIR | {"tools": ["f"]}, "tools must be a list of JSON schemas; .*line 2 has"),
        (PAIR | {"label": False}, "label must be true or absent, .*; .*line 2 has False. Rename label if"),
        (PAIR | {"label": 0}, "label must be true or absent, .*; .*line 2 has 0. Rename label if"),
        (with_message() | {"label": "False"}, "label must be true or absent, .*; .*line 2 has 'False'"),
        ({"instruction": "2", "output": "3", "kto_tag": 0}, "kto_tag must be true or absent, .*; .*line 2 has 0"),
        (with_message() | {"image": "a.jpg"}, "a chat must have only text; .*line 2 has the column image. Remove"),
        (with_message() | {"functions": [TOOL]}, "functions must be given as tools; .*line 2 has the column functions"),
        (
            {"messages": [QUESTION, ANSWER, QUESTION], "chosen": ANSWER, "rejected": QUESTION},
            "must end with an answer; .*line 2 has it only in the column chosen",
        ),
        (PAIR | {"images": ["a.jpg"]}, "a chat must have only text; .*line 2 has the column images. Remove"),
        (PAIR | {"images": '["a.jpg"]'}, "a chat must have only text; .*line 2 has the column images. Remove"),
        (PAIR | {"images": [None, {"path": "a.jpg"}]}, "must have only text; .*line 2 has the column images. Remove"),
        (PAIR | {"chat_template_kwargs": ["f"]}, r"chat_template_kwargs must be an object; .*line 2 has \['f'\]"),
        ({"conversations": [{"from": "human"}]}, "must have from and value; .*line 2, message 0 is"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "a role must be one of .*message 0 has 'alien'"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, r"a role must be one of .*message 0 has \['human'\]"),
    ],
)
def test_a_bad_chat_is_named(tmp_path, row, message):
    path = write_jsonl(tmp_path / "chats.jsonl", [PAIR, row])
    with pytest.raises(ValueError, match=message) as error:
        chats(path)
    assert str(path) in str(error.value)


def test_rows_that_are_not_chats_can_be_skipped(tmp_path, capsys):
    empty = {"prompt": "2 + 2?", "completion": " "}
    path = write_jsonl(tmp_path / "chats.jsonl", [PAIR, empty, {"text": "2"}, PAIR])
    corpus = ChatCorpus(str(path), skip_invalid=True)
    assert [key for key, _ in corpus.documents()] == ["chats.jsonl:1", "chats.jsonl:4"]
    assert re.fullmatch(
        rf"skipped 2 rows of {path}, which are not valid chats\. The first: a message must not be empty; .*line 2.*\n",
        capsys.readouterr().out,
    )
    strict = ChatCorpus(str(path))
    with pytest.raises(ValueError, match=r"must not be empty; .*\. data\.skip_invalid=true skips rows that"):
        list(strict.documents())
    assert corpus.fingerprint() != strict.fingerprint(), "the cache of a corpus without skipping must not be used"
    pyarrow.parquet.write_table(pa.Table.from_pylist([PAIR, empty]), tmp_path / "chats.parquet")
    counted = [ChatCorpus(str(tmp_path / "chats.parquet"), skip_invalid=skips).count() for skips in (False, True)]
    assert counted == [2, None]


def test_lines_that_are_not_json_objects_can_be_skipped(tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    path.write_text(f'{json.dumps(PAIR)}\n{{"prompt": "2\n[1]\n{json.dumps(PAIR)}\n')
    corpus = ChatCorpus(str(path), skip_invalid=True)
    assert [key for key, _ in corpus.documents()] == ["chats.jsonl:1", "chats.jsonl:4"]
    assert corpus.n_skipped == 2
    assert re.match(rf"skipped 2 rows of .* The first: every line .* {path}, line 2 is not: ", capsys.readouterr().out)
    with pytest.raises(ValueError, match=r"line 2 is not: .*\. data\.skip_invalid=true skips rows that"):
        chats(path)
    (tmp_path / "chats.json").write_text(json.dumps([PAIR, "2"]))
    corpus = ChatCorpus(str(tmp_path / "chats.json"), skip_invalid=True)
    assert len(list(corpus.documents())) == corpus.n_skipped == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl", '{"messages": [', "every line must be a JSON object; .*cut.jsonl, line 1 is not: "),
        ("cut.json", '[{"prompt": "2",\n', "must be a list of objects; .*cut.json, line 2 is not: "),
        ("lines.json", '{"prompt": "2"}\n{}', r"line 2 is not: Extra data: .*\. A file with .* must be named .jsonl$"),
        ("object.json", "{}", "must be a list of objects; .*object.json is a dict"),
        ("texts.json", '["2"]', "must be a list of objects; .*texts.json, row 1 is a str"),
        ("cut.parquet", "PAR1", "cut.parquet must be a Parquet file; it cannot be read: "),
        (
            "chats.txt",
            "hello",
            r"must be a file, folder or glob of .jsonl, .json, .csv, .parquet; got .*chats.txt",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        chats(tmp_path / name)


def test_a_date_that_python_lacks_is_named(tmp_path):
    days = pa.array([10**7], pa.date32())
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "completion": ["b"], "day": days}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet must be a Parquet file; it cannot be read: date value out of"):
        chats(tmp_path / "a.parquet")


def test_a_damaged_page_of_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    rows = pa.Table.from_pylist([{"prompt": str(i) * 50, "completion": "x"} for i in range(2000)])
    pyarrow.parquet.write_table(rows, path, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[200:600] = bytes(400)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a.parquet must be a Parquet file; it cannot be read: "):
        chats(path)


@pytest.fixture
def dataset_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "chats").mkdir()
    return tmp_path / "chats"


def test_a_dataset_is_read_as_files_are(dataset_folder):
    path = write_jsonl(dataset_folder / "train.jsonl", many_chats(5))
    files, dataset = ChatCorpus(str(path)), ChatCorpus(f"hf:{dataset_folder}:train")
    assert [chat.messages for _, chat in dataset.documents()] == [chat.messages for _, chat in files.documents()]
    assert [key for key, _ in dataset.documents()] == list("01234") and dataset.count() == 5
    named = ChatCorpus(f"hf:{dataset_folder}:default:train")
    assert named.fingerprint() == dataset.fingerprint()
    assert [ChatCorpus(f"hf:{dataset_folder}:{part}").count() for part in ("train[1:3]", "default:train[:4]")] == [2, 4]
    write_jsonl(path, many_chats(6))
    assert ChatCorpus(f"hf:{dataset_folder}:train").fingerprint() != dataset.fingerprint()


def test_a_dataset_that_save_to_disk_has_written_is_read(tmp_path):
    rows = datasets.Dataset.from_list(many_chats(5))
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": rows.select([0]), "train": rows}).save_to_disk(tmp_path / "splits")
    expected = [parse_chat(row, "").messages for row in many_chats(5)]
    for name in ("one", "splits"):
        folder = tmp_path / name
        assert chats_of(folder) == chats_of(f"hf:{folder}:train") == expected
        assert chats_of(f"hf:{folder}:train[1:3]") == expected[1:3]
        assert [key for key, _ in ChatCorpus(str(folder)).documents()] == list("01234")
        assert ChatCorpus(str(folder)).fingerprint() == ChatCorpus(f"hf:{folder}:train").fingerprint()
    assert chats_of(f"hf:{tmp_path}/splits:test") == expected[:1]
    assert chats_of(f"hf:{tmp_path}/splits:train[2:]+test") == expected[2:] + expected[:1]
    prints = {ChatCorpus(f"hf:{tmp_path}/splits:{split}").fingerprint() for split in ("train", "test", "train[1:3]")}
    datasets.Dataset.from_list(many_chats(6)).save_to_disk(tmp_path / "one")
    assert len(prints | {ChatCorpus(str(tmp_path / "one")).fingerprint()}) == 4
    with pytest.raises(ValueError, match=r"data.path=hf:.*:val must be a dataset .*: Unknown split .val.\. Should"):
        ChatCorpus(f"hf:{tmp_path}/splits:val").count()
    with pytest.raises(ValueError, match=r"must be a dataset .*: a dataset of save_to_disk has no configs; got"):
        ChatCorpus(f"hf:{tmp_path}/splits:a:train").count()


@pytest.mark.parametrize("kind", ["numpy", "pandas", "arrow"])
def test_the_format_of_a_saved_dataset_is_ignored(kind, tmp_path):
    datasets.Dataset.from_list(many_chats(3)).with_format(kind).save_to_disk(tmp_path)
    assert chats_of(tmp_path) == [parse_chat(row, "").messages for row in many_chats(3)]


def chats_of(path):
    return [chat.messages for chat in chats(path)]


def test_what_a_dataset_lacks_is_named(dataset_folder):
    for path in ("hf:", "hf:name", "hf::train", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match=rf"data.path must be hf:<name>:<split> or .*; got {path}$"):
            ChatCorpus(path)
    with pytest.raises(ValueError, match=r"data.path=hf:.*:train must be a dataset that `datasets` can load"):
        ChatCorpus(f"hf:{dataset_folder / 'nowhere'}:train").count()
    write_jsonl(dataset_folder / "train.jsonl", [{"text": "no chat"}])
    with pytest.raises(ValueError, match=r"hf:.*:train, row 0 has text"):
        list(ChatCorpus(f"hf:{dataset_folder}:train").documents())
