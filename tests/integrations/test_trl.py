"""Tests TRL's unchanged SFTTrainer, with packing and peft's LoRA, on models that use this project's attention."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from fa_train.integrations import transformers as fa
from tests.integrations.support.models import VOCAB, tiny
from tests.support.operators import Operators
from tests.support.tolerance import assert_as_accurate

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

LENGTHS = 7, 4, 9  # words per document; each document gets one additional token
STEPS = 2


def documents() -> Dataset:
    return Dataset.from_dict({"text": [" ".join(f"w{i % 50}" for i in range(n * n, n * n + n)) for n in LENGTHS]})


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(VOCAB - 3))]
    of_words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def trainer_of(model: Any, folder: str) -> Any:
    config = trl.SFTConfig(
        folder, packing=True, max_length=24, max_steps=STEPS, learning_rate=0.03, lr_scheduler_type="constant",
        per_device_train_batch_size=1, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False,
        disable_tqdm=True,
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"])
    return trl.SFTTrainer(model, args=config, train_dataset=documents(), processing_class=tokenizer(), peft_config=lora)


def logits_and_gradients(model: Any, weight: Tensor, *parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Joins the inputs `parts` end to end.

    Returns the logits, and the gradients of sum(logits * weight) with respect to the trained parameters.
    """
    model.zero_grad()
    logits = torch.cat([model(**inputs, use_cache=False).logits for inputs in parts], dim=1)
    (logits * weight.to(logits.dtype)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return logits.detach(), torch.cat([(x / x.abs().max().clamp_min(1e-30)).flatten() for x in gradients])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        # Every token goes to every expert, so the matmuls of a document do not depend on other documents.
        pytest.param("gpt_oss-sinks", {"num_experts_per_tok": 2}, id="gpt_oss"),
        pytest.param("gemma3-windows", {}, id="gemma3"),
    ],
)
def test_sft_trainer_packs_documents_that_do_not_see_each_other(name, fields, tmp_path):
    fa.register()
    model = tiny(name, **fields)
    model.set_attn_implementation(fa.NAME)
    trainer = trainer_of(model, str(tmp_path))
    with Operators() as seen:
        trainer.train()
    n_layers = model.config.num_hidden_layers
    assert seen.names.count("flash_attention.backward.default") == STEPS * n_layers
    assert seen.names.count("flash_attention.forward.default") == 2 * STEPS * n_layers  # checkpointing recomputes
    assert not [x for x in seen.names if "scaled_dot_product" in x]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == STEPS and losses[1] < losses[0] - 0.01

    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["cu_seq_lens_q"].tolist() == [0, 10, 18, 23]
    packed = {key: value for key, value in batch.items() if key not in ("labels", "seq_idx")}
    separate = [{"input_ids": ids} for ids in packed["input_ids"].split([10, 8, 5], dim=1)]
    weight = torch.randn(1, 23, VOCAB)
    trained = trainer.model.eval()
    results = {}
    for run, dtype, implementation, parts in (
        ("exact", torch.float64, "eager", separate),
        ("eager", torch.float32, "eager", separate),
        ("ours", torch.float32, fa.NAME, [packed]),
    ):
        model.set_attn_implementation(implementation)
        results[run] = logits_and_gradients(trained.to(dtype), weight, *parts)
    for i, what in enumerate(("logits", "gradients")):
        assert_as_accurate(what, results["ours"][i], results["exact"][i], results["eager"][i])

    changed = packed | {"input_ids": packed["input_ids"].clone()}
    changed["input_ids"][:, 10:18] += 1
    with torch.no_grad():
        before, after = (trained(**inputs, use_cache=False).logits for inputs in (packed, changed))
    same = (before == after).all(-1)[0]
    assert same[:10].all() and same[18:].all() and not same[10:18].any()
