"""In a chat, only the assistant's messages have labels. The tokens of a chat equal those of its rendered template."""

from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import Qwen2Config
from transformers.utils import chat_template_utils

from fa_train.data.sources.chats import ChatCorpus, parse_chat
from fa_train.data.tokens.sft import ChatEncoder, overlaps_spans
from fa_train.data.tokens.store import Documents, prepare
from fa_train.data.tokens.tokenizer import ByteTokenizer, HFTokenizer
from tests.data.support.chats import (  # fmt: skip
    BODY,
    CALL,
    CHATML,
    FORGETFUL,
    HEAD,
    PAIR,
    PLAIN,
    SEVERAL_ANSWERS,
    TAIL,
    TOOL,
    TOOLS,
    WITH_BLOCKS,
    chat_message,
    save_tokenizer,
    write_jsonl,
)

PROMPT_OF_MESSAGES = {
    "prompt": [chat_message("user", "2 + 2?"), chat_message("assistant", "5."), chat_message("user", "really?")],
    "completion": [chat_message("assistant", "4.")],
}
ROWS = [
    pytest.param(
        SEVERAL_ANSWERS, ["4.<|im_end|>", CALL, "sunny in Rome\n\n<|im_end|>"], id="several-answers-and-tools"
    ),
    pytest.param(PAIR, ["is 4.<|im_end|>"], id="pair"),
    pytest.param(PROMPT_OF_MESSAGES, ["4.<|im_end|>"], id="pair-of-messages"),
]


def encoder(folder, template=CHATML, **options):
    return ChatEncoder(HFTokenizer(save_tokenizer(folder, template, **options)))


def encode(chat_encoder, row):
    [encoded] = chat_encoder.encode_batch([parse_chat(row, "chats.jsonl, line 1")])
    return encoded


def runs(chat_encoder, encoded):
    """Returns the text of each unbroken sequence of tokens that have labels."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.loss_mask.astype(int), [0]]))).reshape(-1, 2)
    return [chat_encoder.tokenizer.hf.decode(encoded.tokens[start:stop]) for start, stop in edges]


@pytest.mark.parametrize("template", [CHATML, WITH_BLOCKS], ids=["by-prefixes", "by-generation-blocks"])
@pytest.mark.parametrize(("row", "answers"), ROWS)
def test_the_assistants_messages_are_trained_on_with_the_token_that_ends_them(tmp_path, template, row, answers):
    chat_encoder = encoder(tmp_path, template)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>'
    assert runs(chat_encoder, encode(chat_encoder, row)) == [call if text is CALL else text for text in answers]


@pytest.mark.parametrize("template", [CHATML, WITH_BLOCKS], ids=["by-prefixes", "by-generation-blocks"])
def test_tokens_and_mask_are_those_of_apply_chat_template(tmp_path, template):
    chat_encoder = encoder(tmp_path, template)
    chat = parse_chat(SEVERAL_ANSWERS, "")
    ids, loss_mask = encode(chat_encoder, SEVERAL_ANSWERS)
    hf = chat_encoder.tokenizer.hf
    assert hf.apply_chat_template(chat.messages, tools=[TOOL], return_dict=True)["input_ids"] == ids.tolist()
    hf.chat_template = WITH_BLOCKS
    masked = hf.apply_chat_template(chat.messages, tools=[TOOL], return_dict=True, return_assistant_tokens_mask=True)
    assert masked["assistant_masks"] == loss_mask.astype(int).tolist()


def test_an_empty_list_of_tool_calls_means_no_calls(tmp_path):
    """The template PLAIN does not render tool calls, so the encoder would reject a chat with tool calls."""
    question, answer = chat_message("user", "2 + 2?"), chat_message("assistant", "4.")
    row = {"messages": [question | {"tool_calls": []}, answer | {"tool_calls": []}]}
    chat_encoder = encoder(tmp_path, PLAIN)
    found, expected = encode(chat_encoder, row), encode(chat_encoder, {"messages": [question, answer]})
    assert found.tokens.tolist() == expected.tokens.tolist() and found.loss_mask.any()


def test_the_template_has_the_variables_of_the_row(tmp_path):
    """TRL reads the same column. SmolTalk 2 has it."""
    chat_encoder = encoder(tmp_path, "{{ '/no_think' if enable_thinking is false }}{{ eos_token }}" + CHATML)
    bare = chat_encoder.render(parse_chat(PAIR, "")).text
    other_eos = chat_encoder.render(parse_chat(PAIR | {"chat_template_kwargs": {"eos_token": "<end>"}}, "")).text
    assert other_eos == "<end>" + bare.removeprefix("<|im_end|>") != bare, "a row can replace special tokens"
    for value in (
        {"enable_thinking": False, "tools": [TOOL], "add_generation_prompt": True, "continue_final_message": True},
        '{"enable_thinking": false}',
    ):
        chat = parse_chat(PAIR | {"chat_template_kwargs": value}, "")
        assert chat_encoder.render(chat).text == "/no_think" + bare
        assert runs(chat_encoder, encode(chat_encoder, PAIR | {"chat_template_kwargs": value})) == ["is 4.<|im_end|>"]


@pytest.mark.parametrize("arguments", [{"city": "\ud800"}, '{"city": "\\ud800"}'], ids=["object", "json-text"])
def test_lone_surrogates_in_tools_and_calls_are_replaced(tmp_path, arguments):
    def row(arguments, text):
        calls = [{"function": {"name": "weather", "arguments": arguments}}]
        messages = [chat_message("user", f"weather{text}"), chat_message("assistant", "", tool_calls=calls)]
        return {"messages": messages, "tools": [{"name": "weather", "description": text}]}

    chat_encoder = encoder(tmp_path, CHATML)
    found, expected = encode(chat_encoder, row(arguments, "\ud800")), encode(chat_encoder, row({"city": "?"}, "?"))
    assert found.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("template", [CHATML, WITH_BLOCKS, PLAIN])
@pytest.mark.parametrize("answer", ["4.", " 4.", "\n4.\n", "ü∑🙂 ", "Rome is sunny"])
def test_the_mask_is_that_of_a_token_by_token_rendering(tmp_path, template, trim_offsets, answer):
    """The loss counts a token if one of its characters belongs to an answer."""
    messages = [
        chat_message("user", "the weather \n"),
        chat_message("assistant", answer),
        chat_message("user", "2"),
        chat_message("assistant", "so"),
    ]
    chat_encoder = encoder(tmp_path, template, trim_offsets=trim_offsets)
    ids, loss_mask = encode(chat_encoder, {"messages": messages})
    whose = b""  # 1 for each byte of the rendered text that belongs to an answer, and 0 for all other bytes
    for message in messages:
        is_answer = message["role"] == "assistant"
        if template == PLAIN:
            parts = [(message["role"] + ": ", 0), (message["content"] + "\n", is_answer)]
        else:
            head, body = "<|im_start|>" + message["role"] + "\n", message["content"] + "<|im_end|>"
            parts = [(head, 0), (body, is_answer), ("\n", 0)]
        whose += b"".join(bytes([mark]) * len(text.encode()) for text, mark in parts)
    expected, begin = [], 0
    for token in chat_encoder.tokenizer.hf.convert_ids_to_tokens(
        ids
    ):  # tokens are byte-level, so one character is one byte, except in special tokens
        expected.append(max(whose[begin : begin + len(token)]))
        begin += len(token)
    assert begin == len(whose)
    assert expected == loss_mask.astype(int).tolist()


@pytest.mark.parametrize(
    ("before", "begin"), [("", "<|im_start|>assistant\n"), ("<|im_start|>", "assistant\n")], ids=["role", "name"]
)
def test_a_completion_is_trained_on_if_its_block_starts_before_the_answer(before, begin, tmp_path):
    """The template's generation block begins with a part of the generation prompt."""
    answer = before + "{% generation %}" + begin + "{{ message.content }}<|im_end|>{% endgeneration %}"
    template = "{% for message in messages %}{% if message.role == 'assistant' %}" + answer + "{% else %}"
    template += "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    prompt = [chat_message("user", "2"), chat_message("assistant", "so"), chat_message("user", "the")]
    chat_encoder = encoder(tmp_path, template)
    ids, loss_mask = encode(chat_encoder, {"prompt": prompt, "completion": "sunny"})
    assert chat_encoder.tokenizer.hf.decode(ids[loss_mask]) == begin + "sunny<|im_end|>"


OF_ASSISTANT = "<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
MARKED_ELSEWHERE = {
    "macro": "{% macro of(message) %}" + OF_ASSISTANT + "{% endmacro %}{{ of(message) }}",
    "variable": "{% set answer %}" + OF_ASSISTANT + "{% endset %}{{ answer }}",
    "filter": "{% filter trim %}" + OF_ASSISTANT + "{% endfilter %}",
    "white-space": OF_ASSISTANT.replace("{% generation %}", " \n {%- generation -%} \n ")
    .replace("\n{%", "\n\n{%")
    .replace("{% endgeneration %}", " {%- endgeneration -%} "),
}


def with_marked_answers(answer):
    return (
        "{% for message in messages %}{% if message.role == 'assistant' %}" + answer + "{% else %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )


@pytest.mark.parametrize("answer", MARKED_ELSEWHERE.values(), ids=MARKED_ELSEWHERE.keys())
def test_the_text_of_a_block_is_trained_on_if_the_block_is_in_a_macro_a_variable_or_a_filter(answer, tmp_path):
    chat_encoder = encoder(tmp_path, with_marked_answers(answer))
    messages = [chat_message(role, text) for text in ("one", "two") for role in ("user", "assistant")]
    assert runs(chat_encoder, encode(chat_encoder, {"messages": messages})) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_block_in_a_comment_marks_no_answers(tmp_path):
    chat_encoder = encoder(tmp_path, "{#- {% generation %} would\nmark the answers. -#}" + CHATML)
    assert runs(chat_encoder, encode(chat_encoder, {"prompt": "2 + 2?", "completion": "4."})) == ["4.<|im_end|>"]


def test_a_template_must_not_change_the_text_of_a_block(tmp_path):
    cut = "{% set answer %}{% generation %}{{ message.content }} {% endgeneration %}{% endset %}{{ answer | trim }}"
    chat_encoder = encoder(tmp_path, with_marked_answers(cut))
    with pytest.raises(ValueError, match=r"must not change the text of a .*chats.jsonl, line 1"):
        encode(chat_encoder, {"prompt": "2 + 2?", "completion": "4."})


def test_an_answer_of_one_word_has_a_label_if_the_generation_prompt_ends_with_a_space(tmp_path):
    """The first token of the answer is " sunny", and its space is in the prompt. transformers labels this token too."""
    chat_encoder, row = encoder(tmp_path, PLAIN), {"prompt": "the", "completion": "sunny"}
    encoded, hf = encode(chat_encoder, row), chat_encoder.tokenizer.hf
    assert runs(chat_encoder, encoded) == [" sunny\n"]
    marked = "{{ message.role + ': ' }}{% generation %}{{ message.content + '\\n' }}{% endgeneration %}"
    hf.chat_template = "user: the\n{% for message in messages[1:] %}" + marked + "{% endfor %}"
    messages = parse_chat(row, "").messages
    masked = hf.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert masked["input_ids"] == encoded.tokens.tolist()
    assert masked["assistant_masks"] == encoded.loss_mask.astype(int).tolist()


# The generation prompt ends with <think>, as in DeepSeek-R1's template. Answers need not begin with <think>.
THINKING_PROMPT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
    "<|im_start|>{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|><think>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "trained_on"),
    [
        pytest.param(THINKING_PROMPT, "<|im_start|>4.<|im_end|>", id="generation-prompt-is-not-in-the-answer"),
        pytest.param(
            FORGETFUL.replace(BODY, "{% generation %}" + BODY + "{% endgeneration %}"),
            "4.<|im_end|>",
            id="reasoning-of-an-earlier-answer-is-removed",
        ),
        pytest.param(
            WITH_BLOCKS.replace(BODY + "{% endgen", BODY + "{% endgeneration %}{% generation %}.{% endgen")
            + "{% if not add_generation_prompt %}{% generation %}<pad>{% endgeneration %}{% endif %}",
            "4.<|im_end|>.<pad>",
            id="several-blocks-for-an-answer-and-one-at-the-end",
        ),
    ],
)
def test_only_the_blocks_of_the_completion_are_trained_on(tmp_path, template, trained_on):
    chat_encoder = encoder(tmp_path, template)
    ids, loss_mask = encode(chat_encoder, PROMPT_OF_MESSAGES)
    assert chat_encoder.tokenizer.hf.decode(ids[loss_mask]) == trained_on


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(
            THINKING_PROMPT.replace("{% endgeneration %}", "{% endgeneration %}{% generation %}.{% endgeneration %}"),
            r"one {% generation %} block for each answer, or .*chats.jsonl, line 1. Set data.chat_template",
            id="several-blocks",
        ),
        pytest.param(
            THINKING_PROMPT.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
            r"directly after the text of its prompt, or .*, line 1, message 3. Set .* to a copy with marked answers$",
            id="no-blocks",
        ),
    ],
)
def test_an_answer_that_does_not_begin_with_the_generation_prompt_needs_one_block(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        encode(encoder(tmp_path, template), PROMPT_OF_MESSAGES)


def test_a_token_across_the_start_of_an_answer_is_trained_on():
    # The text "a:  b" has the tokens "a:" and "  b". The token "  b" starts in the prompt, because the prompt is "a: "
    # and the answer is " b".
    assert overlaps_spans(np.array([[0, 2], [2, 5]]), [(3, 5)]).tolist() == [False, True]
    # in the next two cases, the tokens' offsets do not cover the spaces in front of "b"
    assert overlaps_spans(np.array([[0, 2], [4, 5]]), [(3, 5)]).tolist() == [False, True]
    assert overlaps_spans(np.array([[0, 3], [4, 5]]), [(3, 5)]).tolist() == [False, True]
    # a token that begins inside an answer belongs to the answer, even if it ends outside
    assert overlaps_spans(np.array([[0, 3], [3, 6], [6, 7]]), [(3, 5)]).tolist() == [False, True, False]
    # Some tokenizers insert a space that is not in the text. In the next case, the second token is an inserted space.
    assert overlaps_spans(np.array([[0, 3], [3, 3], [3, 5]]), [(3, 5)]).tolist() == [False, True, True]
    # in the next case, two tokens share one character
    assert overlaps_spans(np.array([[0, 1], [0, 1], [1, 2]]), [(1, 2)]).tolist() == [False, False, True]


def test_a_template_that_forgets_is_named_unless_it_marks_answers(tmp_path):
    two = {
        "messages": [
            chat_message("user", "a"),
            chat_message("assistant", "b"),
            chat_message("user", "c"),
            chat_message("assistant", "d"),
        ]
    }
    chat_encoder = encoder(tmp_path / "forgetful", FORGETFUL)
    with pytest.raises(
        ValueError,
        match=r"render a message independently of later messages.*chats.jsonl, line 1, message 1.*data.chat_template",
    ):
        encode(chat_encoder, two)
    as_rows = [{"prompt": two["messages"][:last], "completion": two["messages"][last : last + 1]} for last in (1, 3)]
    trained_on = [runs(chat_encoder, encode(chat_encoder, row)) for row in as_rows]
    assert trained_on == [["<think>b<|im_end|>"], ["<think>d<|im_end|>"]], "what the error advises"
    assert runs(chat_encoder, encode(chat_encoder, PAIR)) == ["<think>is 4.<|im_end|>"], "one answer is stable"
    blocks = FORGETFUL.replace("{{ message.content", "{% generation %}{{ message.content").replace(
        "'<|im_end|>' }}", "'<|im_end|>' }}{% endgeneration %}"
    )
    assert "endgeneration" in blocks
    encode(encoder(tmp_path / "blocks", blocks), two)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("raise_exception('users begin')", "users begin"),
        ("1 // 0", "ZeroDivisionError: integer division or modulo by zero"),
        ("messages[0].content.index('no such text')", "ValueError: substring not found"),
    ],
)
def test_what_the_template_refuses_is_named(expression, message, tmp_path):
    refusing = "{% if messages[0].role != 'user' %}{{ " + expression + " }}{% endif %}" + CHATML
    with pytest.raises(ValueError, match=rf"chat template rejects chats.jsonl, line 1: {message}"):
        encode(encoder(tmp_path, refusing), SEVERAL_ANSWERS)


def test_the_messages_that_the_template_refuses_are_counted(tmp_path):
    chat_encoder = encoder(tmp_path, "{{ messages[0].role[:0] }}" + CHATML)
    greeting = {"messages": [chat_message("assistant", "4."), chat_message("user", "2")]}
    with pytest.raises(ValueError, match=r"template rejects the first 0 messages of chats.jsonl, line 1: .* element 0"):
        encode(chat_encoder, greeting)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(
            CHATML.replace(TOOLS, ""), "must render tools; .* omits the tools of chats.jsonl, line 1", id="tools"
        ),
        pytest.param(
            TOOLS + PLAIN, "must render tool_calls; .* omits the tool_calls of chats.jsonl, line 1", id="calls"
        ),
    ],
)
def test_a_template_that_leaves_tools_out_is_named(tmp_path, template, message):
    chat_encoder = encoder(tmp_path, template)
    with pytest.raises(ValueError, match=message):
        encode(chat_encoder, SEVERAL_ANSWERS)
    encode(chat_encoder, PAIR)


ASKED, ANSWERED = chat_message("user", "2 + 2?"), chat_message("assistant", "4.")
ANSWERED_WITH_REASONING = [ASKED, chat_message("assistant", "4.", reasoning_content="Two plus two.")]
ANSWERED_AFTER_THINKING = [ASKED, chat_message("assistant", "<think>\nTwo plus two.\n</think>\n\n4.")]
# Renders each content after its last </think>. Renders reasoning_content only if the message is the last one.
REASONING = HEAD + (
    "{% if loop.last and message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content.split('</think>')[-1] | trim }}{{ '<|im_end|>' }}"
) + TAIL  # fmt: skip


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        pytest.param(
            CHATML.replace("in messages %}", "in messages if message.role != 'developer' %}"),
            [chat_message("developer", "be brief."), ASKED, chat_message("assistant", "4.")],
            "content of every message; .* omits the content of chats.jsonl, line 1, message 0, with role developer"
            ".* or give the message the role system",
            id="role",
        ),
        pytest.param(
            CHATML.replace("{{ message.content }}", "{{ message.content if not message.tool_calls }}"),
            [ASKED, chat_message("assistant", "I look.", tool_calls=[CALL])],
            "omits the content of chats.jsonl, line 1, message 1, with role assistant.* or remove the content",
            id="content-next-to-tool-calls",
        ),
        pytest.param(
            CHATML.replace("message.content", "message.content[:0]"),
            [ASKED, chat_message("assistant", "is")],
            "omits the content of chats.jsonl, line 1, message 0, with role user",
            id="every-content",
        ),
        pytest.param(
            CHATML,
            ANSWERED_WITH_REASONING,
            "omits the reasoning_content of chats.jsonl, line 1, message 1",
            id="field-with-reasoning",
        ),
        pytest.param(
            CHATML,
            [*ANSWERED_WITH_REASONING, ASKED, ANSWERED],
            "omits the reasoning_content of chats.jsonl, line 1, message 1",
            id="reasoning-of-an-earlier-answer-that-is-trained-on",
        ),
        pytest.param(
            REASONING,
            ANSWERED_AFTER_THINKING,
            "omits the reasoning of chats.jsonl, line 1, message 1",
            id="reasoning-in-content",
        ),
    ],
)
def test_a_template_that_leaves_a_text_out_is_named(tmp_path, template, messages, message):
    with pytest.raises(ValueError, match=message):
        encode(encoder(tmp_path, template), {"messages": messages})


@pytest.mark.parametrize(
    ("template", "before"),
    [
        pytest.param(REASONING, ANSWERED_WITH_REASONING, id="reasoning-field-of-an-earlier-answer"),
        pytest.param(REASONING, ANSWERED_AFTER_THINKING, id="reasoning-in-the-content-of-an-earlier-answer"),
        pytest.param(
            "{% if messages[0].role != 'system' %}be brief.{% endif %}" + CHATML,
            [chat_message("system", "be brief.")],
            id="default-system-prompt",
        ),
        pytest.param(
            CHATML.replace("message.content", "message.content | trim"), [chat_message("system", " x\n")], id="trimmed"
        ),
        pytest.param(
            CHATML.replace("message.content", "message.content | tojson"),
            [ASKED, chat_message("assistant", "", tool_calls=[CALL]), chat_message("tool", '{"a":\n"ü"}')],
            id="as-json",
        ),
        pytest.param(
            CHATML,
            [ASKED, chat_message("assistant", "", tool_calls=[CALL]), chat_message("tool", "")],
            id="empty-result-of-a-tool",
        ),
        pytest.param(
            "{% if messages[0].content != 'be brief.' %}{{ raise_exception('other text') }}{% endif %}"
            + CHATML.replace("message.content", "message.content | upper"),
            [chat_message("system", "be brief.")],
            id="a-template-that-refuses-other-texts",
        ),
    ],
)
def test_a_template_may_change_texts_and_omit_the_reasoning_of_earlier_answers(tmp_path, template, before):
    encode(encoder(tmp_path, template), {"prompt": [*before, chat_message("user", "the")], "completion": "so"})


def test_a_template_may_reject_the_first_messages_of_a_chat_with_reasoning(tmp_path):
    strict = "{% if messages[-1].tool_calls %}{{ raise_exception('no result') }}{% endif %}" + WITH_BLOCKS
    call = chat_message("assistant", "", reasoning_content="Two plus two.", tool_calls=[CALL])
    encode(encoder(tmp_path, strict), {"messages": [ASKED, call, chat_message("tool", "4"), ASKED, ANSWERED]})


def test_a_template_that_wants_tools_renders_them(tmp_path):
    strict = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
    encode(encoder(tmp_path, strict), SEVERAL_ANSWERS)


def test_a_tokenizer_without_a_template_is_named_and_may_be_given_one(tmp_path):
    folder = save_tokenizer(tmp_path, None)
    with pytest.raises(ValueError, match=f"data.tokenizer must have a chat template; {folder} has none"):
        ChatEncoder(HFTokenizer(folder))
    with pytest.raises(ValueError, match="must be a tokenizer with a chat template; got null, which means bytes"):
        ChatEncoder(ByteTokenizer())
    (tmp_path / "chatml.jinja").write_text(CHATML, encoding="utf-8-sig")
    given = ChatEncoder(HFTokenizer(folder), str(tmp_path / "chatml.jinja"))
    assert runs(given, encode(given, PAIR)) == ["is 4.<|im_end|>"]
    assert given.render(parse_chat(PAIR, "")).text.startswith("<|im_start|>"), "a byte order mark is no text"
    (tmp_path / "refusing.jinja").write_text("{{ raise_exception('no chats') }}")
    refusing = ChatEncoder(HFTokenizer(folder), str(tmp_path / "refusing.jinja"))
    with pytest.raises(ValueError, match=f"^{tmp_path}/refusing.jinja's chat template rejects .*: no chats"):
        encode(refusing, PAIR)
    (tmp_path / "latin1.jinja").write_bytes(b"{# \xe9 #}" + CHATML.encode())
    with pytest.raises(ValueError, match=r"a text file must be UTF-8; .*latin1.jinja, line 1 has the byte 0xe9"):
        ChatEncoder(HFTokenizer(folder), str(tmp_path / "latin1.jinja"))
    with pytest.raises(ValueError, match=r"data.chat_template must be null or a Jinja file; nowhere.jinja"):
        ChatEncoder(HFTokenizer(folder), "nowhere.jinja")


def test_a_tokenizer_of_special_tokens_alone_is_refused(tmp_path):
    """For a folder without a tokenizer, transformers returns a tokenizer with one token instead of an error."""
    Qwen2Config().save_pretrained(tmp_path)
    message = f"data.tokenizer must be a folder or hub name with a tokenizer; got {tmp_path}, whose tokenizer has only"
    with pytest.raises(ValueError, match=message):
        HFTokenizer(str(tmp_path))


def test_stored_chats_keep_the_date_of_the_day_on_which_they_were_tokenised(tmp_path, monkeypatch):
    corpus = ChatCorpus(str(write_jsonl(tmp_path / "chats.jsonl", [PAIR, PAIR])))
    chat_encoder = encoder(tmp_path / "tokenizer", "{{ strftime_now('%d %b %Y') }}" + CHATML)
    days = [datetime(2026, 11, 26), datetime(2026, 11, 27)]
    texts = []
    for day, cache in zip([*days, days[1]], ("cache", "cache", "new"), strict=True):
        monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda day=day: day))
        folder = prepare(corpus, chat_encoder, tmp_path / cache)
        tokens = Documents(folder, held_out=False, vocab_size=400)[0]
        texts.append(chat_encoder.tokenizer.hf.decode(tokens).partition("<|im_start|>")[0])
    assert texts == ["26 Nov 2026", "26 Nov 2026", "27 Nov 2026"]


def test_another_template_is_another_cache_entry(tmp_path):
    identities = {encoder(tmp_path / name, template).identity for name, template in [("a", CHATML), ("b", PLAIN)]}
    assert len(identities) == 2 and encoder(tmp_path / "c").identity in identities
