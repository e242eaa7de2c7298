"""Makes tiny tokenizers with chat templates, and random chats."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = ["system: be brief.\n\n", "the weather in Rome is sunny\n", "2 + 2 is 4.", "assistant\nuser\ntool\n", "ü ∑ 🙂"]
HEAD = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
BODY = (
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}"
)
TAIL = "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
TOOLS = "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
CHATML = TOOLS + HEAD + BODY + TAIL
WITH_BLOCKS = (
    TOOLS + HEAD + "{% if message.role == 'assistant' %}{% generation %}" + BODY + "{% endgeneration %}"
    "{% else %}" + BODY + "{% endif %}" + TAIL
)  # fmt: skip
# A chat template without special tokens: "user: hi\nassistant: ho\n". A single token can contain the end of a word,
# spaces and newlines.
PLAIN = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# Leaves out the reasoning of every message except the last, as the templates of reasoning models do.
FORGETFUL = HEAD + "{{ '<think>' if loop.last and message.role == 'assistant' }}" + BODY + TAIL


def chat_tokenizer(template=CHATML, *, trim_offsets=False):
    """Trains a byte-level BPE tokenizer that has the special tokens of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(LINES * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, eos_token="<|im_end|>", pad_token="<pad>"
    )


def save_tokenizer(folder, template=CHATML, **options):
    """Saves a tokenizer and returns its folder, which can be used as `data.tokenizer`."""
    chat_tokenizer(template, **options).save_pretrained(folder)
    return str(folder)


def chat_message(role, content, **fields):
    return {"role": role, "content": content, **fields}


CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SEVERAL_ANSWERS = {
    "messages": [
        chat_message("system", "be brief."),
        chat_message("user", "2 + 2?"),
        chat_message("assistant", "4."),
        chat_message("user", "the weather 🙂"),
        chat_message("assistant", None, tool_calls=[CALL]),
        chat_message("tool", "sunny"),
        chat_message("assistant", "sunny in Rome\n\n"),
    ],
    "tools": [TOOL],
}
PAIR = {"prompt": "2 + 2?", "completion": "is 4."}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def many_chats(n=60):
    """Returns chats of many lengths, the same chats in every call."""
    return [
        {
            "messages": [
                chat_message("user", f"{i} + {i}?"),
                chat_message("assistant", "the weather is sunny " * (i % 7 + 1) + str(2 * i)),
            ]
        }
        for i in range(n)
    ]
