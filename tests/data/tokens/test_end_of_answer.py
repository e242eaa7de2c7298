"""The token that ends an answer is known, and a template without such a token causes a warning."""

import re

import pytest

from fa_train.data.tokens.sft import ChatEncoder
from fa_train.data.tokens.tokenizer import HFTokenizer
from tests.data.support.chats import CHATML, PLAIN, WITH_BLOCKS, save_tokenizer


@pytest.mark.parametrize(
    ("template", "end", "warning"),
    [
        pytest.param(CHATML, "<|im_end|>", None, id="chatml"),
        pytest.param(WITH_BLOCKS, "<|im_end|>", None, id="blocks"),
        pytest.param(WITH_BLOCKS.replace("<|im_end|>", "<pad>"), "<pad>", None, id="not-the-eos"),
        pytest.param(
            CHATML + "{% if not add_generation_prompt %}<pad>{% endif %}",
            "<|im_end|>",
            None,
            id="another-token-ends-the-chat",
        ),
        pytest.param(PLAIN, None, r"with '\\n', which become the tokens Ċ\. ", id="no-special-token"),
        pytest.param(
            CHATML.replace("<|im_end|>", "<|end|>"),
            None,
            r"with '<\|end\|>\\n', which become the tokens < \| e n d \| > Ċ\. ",
            id="a-token-that-the-tokenizer-lacks",
        ),
        pytest.param(
            "{{ messages[0].content }}{% generation %}{{ messages[-1].content }}{% endgeneration %}<|im_end|>",
            None,
            r"with ''\. ",
            id="an-end-without-labels",
        ),
        pytest.param("{{ raise_exception('no chats') }}", None, None, id="rejects-the-test-chat"),
    ],
)
def test_the_end_token_of_an_answer_is_the_first_trained_special_token_after_it(template, end, warning, tmp_path):
    chats = ChatEncoder(HFTokenizer(save_tokenizer(tmp_path, template)))
    assert chats.end_id == (None if end is None else chats.tokenizer.hf.convert_tokens_to_ids(end))
    if warning is None:
        assert chats.end_warning is None
    else:
        assert re.search(f"must end an answer with a special token .*; it ends an answer {warning}", chats.end_warning)
