"""Micro-batches depend only on the seed and the position in the run, even if the run is killed and resumed."""

import gc
import json
import multiprocessing
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from fa_train.data.batches import MicroBatches, PackedRows
from fa_train.data.datamodule import hf_data, sft_data, synthetic_data, text_data
from fa_train.data.packing.rows import IGNORE_INDEX, fingerprint
from tests.data.support.chats import CHATML, PAIR, PLAIN, chat_tokenizer, many_chats, save_tokenizer, write_jsonl
from tests.data.support.fitting import Killed, Recorder, fit
from tests.data.support.numbered import OPTIONS, Numbered
from tests.data.support.numbered import make as make_best_fit


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch):
    """Shortens epochs from 2**26 to 2**14 tokens, because every run takes time to shuffle all documents of an epoch."""
    monkeypatch.setattr("fa_train.data.sources.synthetic.N_TOKENS", 2**14)


@pytest.fixture(autouse=True)
def _frozen_again():
    """Calls gc.freeze again, because a run with data workers calls gc.unfreeze when it ends."""
    yield
    if not gc.get_freeze_count():
        gc.freeze()


def make(**changes):
    return synthetic_data(**(dict(vocab_size=50, document_len=10, length_sigma=0) | OPTIONS | changes))


@pytest.mark.parametrize("name", ["seq_len", "batch_size", "micro_batch_size", "max_steps"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be positive; got 0"):
        make(**{name: 0})


def test_micro_batches_must_divide_the_batch():
    assert make().accumulation(world_size=2) == 2
    with pytest.raises(ValueError, match=r"batch_size must be a multiple of 6 \(.*size=2 \* 3 processes\); got 8"):
        make().accumulation(world_size=3)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_rows_hold_documents_of_varying_length(packing):
    data = make(document_len=4, length_sigma=1.0, packing=packing)
    documents = data.source.documents(held_out=False)
    report = data.packing_report()
    assert len(set(documents.lengths.tolist())) > 20
    assert report.documents == len(documents) and report.tokens_packed == documents.lengths.sum()
    assert report.held_out.tokens_in == data.source.documents(held_out=True).lengths.sum()
    positions = PackedRows(data, held_out=False, shuffle=True).batch(0, 32)["position_ids"].view(32, 16)
    starts = (positions == 0).sum(dim=1)  # the number of documents in each row
    assert len(set(starts.tolist())) > 1


def rows_of(batches):
    return sorted(torch.cat(batches).view(-1, 16).tolist())


def test_a_step_has_the_same_rows_on_any_number_of_gpus():
    rows = PackedRows(make(), held_out=False, shuffle=True)

    def step(world_size, size):
        count = 8 // (size * world_size)
        ranks = [MicroBatches(rows, size, rank, world_size, step_rows=8) for rank in range(world_size)]
        batches = [ranks[rank][5 * count + i] for i in range(count) for rank in range(world_size)]
        return rows_of([batch["tokens"] for batch in batches])

    assert step(1, 8) == step(2, 2) == step(4, 1) == rows_of([rows.batch(40, 8)["tokens"]])


def test_ranks_that_share_a_micro_batch_need_a_function_that_divides_it():
    rows = PackedRows(make(), held_out=False, shuffle=True)
    with pytest.raises(ValueError, match="2 ranks that share a micro-batch need `shard`; got None"):
        MicroBatches(rows, 1, 0, 2, context=2)


@pytest.mark.parametrize("val_rows", [1, 3, pytest.param(99, id="more-than-there-are")])
@pytest.mark.parametrize(("world_size", "size"), [(1, 1), (1, 3), (1, 32), (2, 3), (3, 1), (8, 4)])
def test_every_row_is_validated_once_by_any_number_of_gpus(world_size, size, val_rows, monkeypatch):
    """Micro-batches are filled up with rows that have no labels."""
    monkeypatch.setattr("fa_train.data.sources.synthetic.N_TOKENS", 150)
    ranks, printed = [], []
    for rank in range(world_size):
        data = make(micro_batch_size=size, batch_size=size, val_rows=val_rows)
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        data.trainer = SimpleNamespace(
            world_size=world_size, global_rank=rank, strategy=strategy, print=printed.append, limit_val_batches=1.0
        )
        ranks.append(list(data.val_dataloader()))
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for batches in ranks for batch in batches]
    assert all(len(batch["tokens"]) == 16 * size for batch in batches)
    labels = rows_of([batch["labels"] for batch in batches])
    counted = [row for row in labels if set(row) != {IGNORE_INDEX}]
    rows = PackedRows(make(val_rows=val_rows), held_out=True, shuffle=True)
    assert 3 < rows.per_epoch < 99
    said = f"validation: {val_rows} of {rows.per_epoch} rows (data.val_rows)"
    assert printed == ([said] * world_size if val_rows < rows.per_epoch else [])
    assert counted == rows_of([rows.batch(0, min(val_rows, rows.per_epoch))["labels"]])


def test_no_validation_without_rows_to_validate_on():
    data = make(val_rows=0)
    assert data.val_dataloader() == []


def test_epochs_shuffle_anew_and_repeat_by_seed(monkeypatch):
    monkeypatch.setattr("fa_train.data.sources.synthetic.N_TOKENS", 400)
    rows = PackedRows(make(), held_out=False, shuffle=True)
    first, second = (rows.batch(start, rows.per_epoch)["tokens"] for start in (0, rows.per_epoch))
    assert not torch.equal(first, second)
    again = PackedRows(make(), held_out=False, shuffle=True).batch(rows.per_epoch, rows.per_epoch)["tokens"]
    assert torch.equal(second, again)
    other = PackedRows(make(seed=2), held_out=False, shuffle=True).batch(0, rows.per_epoch)["tokens"]
    assert not torch.equal(first, other)


def concatenated(tmp_path):
    return make()


def best_fit(tmp_path):
    return make_best_fit(np.random.default_rng(0).integers(1, 30, 60))


def chats(tmp_path):
    path = write_jsonl(tmp_path / "chats.jsonl", many_chats())
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    return sft_data(str(path), tokenizer, None, str(tmp_path / "cache"), packing="best_fit", **OPTIONS)


@pytest.mark.parametrize("make_data", [concatenated, best_fit, chats])
def test_a_run_killed_twice_goes_on_where_it_stopped(tmp_path, make_data):
    whole = fit(tmp_path / "whole", Recorder(), make_data(tmp_path))
    assert len(whole) == 24 and not torch.equal(whole[0], whole[12])
    ckpt_path = None
    for step in (2, 5):
        cut = Recorder(die_at=step)
        with pytest.raises(Killed):
            fit(tmp_path / "cut", cut, make_data(tmp_path), ckpt_path)
        assert torch.equal(torch.cat(cut.seen), torch.cat(whole[0 if step == 2 else 8 : 4 * step]))
        ckpt_path = tmp_path / "cut" / "last.ckpt"
    rest = fit(tmp_path / "cut", Recorder(), make_data(tmp_path), ckpt_path)
    assert torch.equal(torch.cat(rest), torch.cat(whole[20:]))


@pytest.mark.parametrize("size", [1, 4])
def test_a_resumed_run_may_take_other_micro_batches(tmp_path, size):
    """The first run stops after 5 steps, which are 20 micro-batches of 2 rows each.

    With one row per micro-batch, a step of the resumed run has 8 micro-batches. The number of micro-batches of the
    first run, 20, is not a multiple of 8.
    """
    whole = fit(tmp_path / "whole", Recorder(), make())
    with pytest.raises(Killed):
        fit(tmp_path / "cut", Recorder(die_at=5), make())
    rest = fit(tmp_path / "cut", Recorder(), make(micro_batch_size=size), tmp_path / "cut" / "last.ckpt")
    assert len(rest) == 8 // size and rows_of(rest) == rows_of(whole[20:])


@pytest.mark.slow
def test_data_workers_are_forked_whatever_the_default(tmp_path):
    whole = fit(tmp_path / "whole", Recorder(), make())
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert all(map(torch.equal, fit(tmp_path / "forked", Recorder(), make(num_workers=1)), whole))
    finally:
        multiprocessing.set_start_method(None, force=True)
    assert gc.get_freeze_count() == 0  # after a run, no object is excluded from garbage collection


class RecordsFrozen(Recorder):
    """Records how many objects the garbage collector ignores in each step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen[-1] = gc.get_freeze_count()
        return loss


@pytest.mark.slow
def test_objects_can_be_collected_after_a_run_was_killed(tmp_path):
    killed = RecordsFrozen(die_at=1)
    with pytest.raises(Killed):
        fit(tmp_path, killed, make(num_workers=1))
    assert min(killed.seen) > 0 and gc.get_freeze_count() == 0


def test_the_packing_is_reported_once_at_the_start(tmp_path, capsys):
    data = best_fit(tmp_path)
    fit(tmp_path, Recorder(), data)
    printed = capsys.readouterr().out
    assert printed.count(data.packing_report().text()) == 1
    assert printed.count("this run: ") == 1 and "no validation" not in printed


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize(
    ("n_bytes", "held_out", "validated"),
    [
        pytest.param(60, "0 documents, 0 tokens", False, id="too-short"),
        pytest.param(198, "the last 4 tokens of the longest document", True, id="tail"),
    ],
)
def test_a_run_says_its_epochs_and_what_is_held_out(n_bytes, held_out, validated, packing, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x" * n_bytes)
    options = OPTIONS | {"packing": packing}
    data = text_data(str(tmp_path / "a.txt"), "text", None, str(tmp_path / "cache"), **options)
    fit(tmp_path, Recorder(), data)
    printed = capsys.readouterr().out
    steps, rows, per_epoch = data.max_steps, data.batch_size, data.packing_report().rows
    epochs = f"{steps * rows} rows, {steps * rows / per_epoch:.2f} epochs (an epoch has {per_epoch / rows:.1f} steps)"
    assert f"\nthis run: {steps} steps of {rows} rows, {epochs}\n" in printed
    assert f"\n  held out for validation: {held_out}\n" in printed
    assert ("no validation: the data have too few tokens to hold out any of them\n" not in printed) == validated


def test_chats_of_a_validation_file_are_held_out_and_masked(tmp_path):
    train, val = (write_jsonl(tmp_path / f"{name}.jsonl", many_chats(n)) for name, n in (("train", 40), ("val", 3)))
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    data = sft_data(str(train), tokenizer, None, str(tmp_path / "cache"), str(val), packing="best_fit", **OPTIONS)
    trained, held_out = (data.source.documents(held_out=held_out) for held_out in (False, True))
    assert (len(trained), len(held_out)) == (40, 3)
    assert held_out.loss_mask is not None


@pytest.mark.parametrize(
    ("template", "added", "changed"),
    [
        pytest.param(CHATML, [], [], id="equal"),
        pytest.param(PLAIN, [], ["chat_template"], id="template"),
        pytest.param(CHATML, ["<new>"], ["vocabulary"], id="vocabulary"),
    ],
)
def test_a_resumed_run_says_that_its_tokenizer_has_changed(template, added, changed, tmp_path):
    path = write_jsonl(tmp_path / "chats.jsonl", many_chats(3))
    tokenizers = chat_tokenizer(), chat_tokenizer(template)
    tokenizers[1].add_tokens(added)
    folders = [str(tmp_path / name) for name in ("saved", "own")]
    for tokenizer, folder in zip(tokenizers, folders, strict=True):
        tokenizer.save_pretrained(folder)
    saved, own = (sft_data(str(path), folder, None, str(tmp_path / "cache"), **OPTIONS) for folder in folders)
    own.load_state_dict(saved.state_dict())
    assert [line.partition("=")[0] for line in own._changes()] == [
        f"the checkpoint was written with data.tokenizer.{name}" for name in changed
    ]


class Shifted(Numbered):
    def __getitem__(self, index):
        return super().__getitem__(index) + 1


def test_the_fingerprint_of_documents_depends_on_lengths_and_tokens():
    documents = Numbered([3, 5, 70]), Numbered([3, 5, 70]), Numbered([3, 6, 69]), Shifted([3, 5, 70])
    first, equal, other_lengths, other_tokens = map(fingerprint, documents)
    assert first == equal and len({first, other_lengths, other_tokens}) == 3


def chats_with_validation(tmp_path, lengths, **changes):
    """Returns a data module with short chats for training, and with held-out chats whose answers have given lengths."""
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "2?", "completion": "4"}] * 9)
    held_out = [{"prompt": "2?", "completion": "4" * n} for n in lengths]
    val = write_jsonl(tmp_path / "val.jsonl", held_out)
    tokenizer, options = save_tokenizer(tmp_path / "tokenizer"), OPTIONS | {"seq_len": 64, "packing": "best_fit"}
    return sft_data(str(train), tokenizer, None, str(tmp_path / "cache"), str(val), **options | changes)


@pytest.mark.parametrize(
    ("policy", "cut", "fate", "lost"),
    [
        pytest.param("drop", "0 split, 0 truncated, 2 dropped", "they are dropped", True, id="drop"),
        pytest.param("truncate", "0 split, 2 truncated, 0 dropped", "their ends are cut off", True, id="truncate"),
        pytest.param("split", "2 split, 0 truncated, 0 dropped", "they are split", False, id="split"),
    ],
)
def test_held_out_chats_that_do_not_fit_are_reported(policy, cut, fate, lost, tmp_path):
    report = chats_with_validation(tmp_path, [2, 3, 99, 99], long_documents=policy).packing_report()
    assert re.search(rf"\n  held out for validation: 4 documents, \d+ tokens; documents: {cut}\n", report.text())
    assert f"\n  warning: 2 of 4 held-out chats are longer than seq_len=64; {fate}" in report.text()
    [(packed, n_lost)] = re.findall(r"\n  held-out labels \d+: (\d+) packed, (\d+) lost; ", report.text())
    assert int(packed) > 0 and (int(n_lost) > 0) == lost
    metrics = report.metrics()
    assert metrics["packing/documents_held_out"] == 4 and metrics["packing/documents_dropped"] == 0
    assert metrics["packing/held_out_documents_dropped"] == 2 * (policy == "drop")
    assert metrics["packing/held_out_labels_in"] - metrics["packing/held_out_labels_packed"] == int(n_lost)


def test_held_out_chats_that_fit_cause_no_warning(tmp_path):
    text = chats_with_validation(tmp_path, [2, 3]).packing_report().text()
    assert "warning" not in text and "0 dropped\n" in text and "; documents:" not in text


@pytest.mark.parametrize(("policy", "n_rows", "n_dropped"), [("drop", 0, 3), ("truncate", 3, 0)])
def test_a_validation_without_a_label_is_refused_before_training(policy, n_rows, n_dropped, tmp_path, capsys):
    """Each prompt fills a row, so truncation removes all labels."""
    chats_with_validation(tmp_path, [1])
    write_jsonl(tmp_path / "val.jsonl", [{"prompt": "2" * 99, "completion": "4"}] * 3)
    given = str(tmp_path / "train.jsonl"), str(tmp_path / "tokenizer"), None, str(tmp_path / "cache")
    options = OPTIONS | {"seq_len": 64, "packing": "best_fit", "long_documents": policy}
    data = sft_data(*given, str(tmp_path / "val.jsonl"), **options)
    message = f"at least one label; got {n_rows} rows without labels. Of 3 held-out documents .* dropped {n_dropped}"
    recorder = Recorder()
    for start in (data.holds_out, lambda: fit(tmp_path, recorder, data)):
        with pytest.raises(ValueError, match=message):
            start()
        assert not recorder.seen and "too few tokens" not in capsys.readouterr().out
    without = sft_data(*given, str(tmp_path / "val.jsonl"), **options | {"val_rows": 0})
    assert not without.holds_out() and without.val_dataloader() == []


def test_a_validation_uses_rows_of_all_lengths_and_the_same_for_every_seed(tmp_path):
    """`packing=best_fit` puts rows with long documents before all other rows."""
    rows = [{"prompt": "2?", "completion": "4" * n} for n in [30] * 20 + [2] * 200]
    train, val = (write_jsonl(tmp_path / f"{name}.jsonl", rows) for name in ("train", "val"))
    tokenizer, options = save_tokenizer(tmp_path / "tokenizer"), OPTIONS | {"seq_len": 64, "val_rows": 10}
    labels = []
    for seed in (1, 2):
        more = options | {"seed": seed, "packing": "best_fit"}
        data = sft_data(str(train), tokenizer, None, str(tmp_path / "cache"), str(val), **more)
        packed = PackedRows(data, held_out=True, shuffle=True)
        assert packed.per_epoch > 20
        labels.append([packed.batch(index, 1) for index in range(10)])
    documents = [len(row["cu_seqlens"].unique()) - 1 for row in labels[0]]
    assert min(documents) < 4 and max(documents) > 4, documents
    for one, other in zip(*labels, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])


def test_read_and_skipped_files_are_reported(tmp_path):
    chats_with_validation(tmp_path, [2])
    train = tmp_path / "train"
    train.mkdir()
    for name in ("a.jsonl", "b.JSONL", ".a.jsonl", "c.jsonl.gz"):
        write_jsonl(train / name, [{"prompt": "2?", "completion": name}])
    given = str(tmp_path / "tokenizer"), None, str(tmp_path / "cache"), str(tmp_path / "val.jsonl")
    report = sft_data(str(train), *given, packing="best_fit", **OPTIONS | {"seq_len": 64}).packing_report()
    assert "\n  files: 3 read; skipped 1 .jsonl.gz, 1 names that begin with a dot\n" in report.text()
    assert (report.documents, report.held_out.documents) == (2, 1) and "warning" not in report.text()
    given = *given[:-1], str(train / "a.jsonl")
    report = sft_data(str(train), *given, packing="best_fit", **OPTIONS | {"seq_len": 64}).packing_report()
    assert "\n  warning: 1 of 1 files for validation are also read for training, such as " in report.text()


@pytest.mark.parametrize("end", ["<|im_end|>", "<|end|>"])
def test_the_report_warns_if_a_template_has_no_end_token(end, tmp_path):
    chats = str(write_jsonl(tmp_path / "chats.jsonl", many_chats(5)))
    tokenizer = save_tokenizer(tmp_path / "tokenizer", CHATML.replace("<|im_end|>", end))
    data = sft_data(chats, tokenizer, None, str(tmp_path / "cache"), packing="best_fit", **OPTIONS)
    warning = f"\n  warning: {tokenizer}'s chat template must end an answer with a special token"
    assert (warning in data.packing_report().text()) == (end == "<|end|>")


REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"


def test_skipped_rows_are_reported_if_the_tokens_come_from_the_cache(tmp_path, capsys):
    train, val = (write_jsonl(tmp_path / f"{name}.jsonl", many_chats(5)) for name in ("train", "val"))
    rejected = json.dumps({"system": "be brief.", **PAIR}) + "\n"
    train.write_text(rejected + train.read_text() + '{"prompt": \n' + '{"text": "no chat"}\n' + rejected)
    val.write_text(val.read_text() + "no JSON\n")
    tokenizer = save_tokenizer(tmp_path / "tokenizer", REFUSES_SYSTEM + CHATML)
    given = str(train), tokenizer, None, str(tmp_path / "cache"), str(val)
    message = f"{tokenizer}'s chat template rejects {train}, line 1: no system prompts"
    for first in (True, False):
        data = sft_data(*given, skip_invalid=True, packing="best_fit", **OPTIONS)
        data.prepare_data()
        printed = capsys.readouterr().out
        assert printed.startswith("skipped 2 rows of") == first
        assert (f"skipped 2 rows of {train}, which cannot be encoded. The first: {message}\n" in printed) == first
        report = data.packing_report()
        assert "\n  skipped 5 rows that are not valid chats\n" in report.text()
        assert report.metrics()["packing/rows_skipped"] == 5 and report.documents == 5
    train.write_text(rejected)  # without skip_invalid, the message names the row
    message += (
        ". data.skip_invalid=true skips chats that the template rejects; with data=mix, write data.sources.<name>"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        sft_data(*given[:4], packing="best_fit", **OPTIONS).prepare_data()


@pytest.mark.parametrize("kind", [str, Path])
def test_files_may_be_given_as_text_or_as_path(kind, tmp_path):
    for name in ("path", "val_path"):
        write_jsonl(tmp_path / f"{name}.jsonl", many_chats(5))
    files = [kind(tmp_path / f"{name}.jsonl") for name in ("path", "val_path")]
    tokenizer, cache = save_tokenizer(tmp_path / "tokenizer"), str(tmp_path / "cache")
    data = sft_data(files[0], tokenizer, None, cache, files[1], packing="best_fit", **OPTIONS)
    assert data.layouts(held_out=True)[""].report.documents == 5
    write_jsonl(tmp_path / "texts.jsonl", [{"text": "a text"}] * 3)
    data = text_data(kind(tmp_path / "texts.jsonl"), "text", None, cache, packing="best_fit", **OPTIONS)
    data.prepare_data()
    assert data.source.corpus.name == str(tmp_path / "texts.jsonl")


def test_a_named_split_of_a_dataset_is_the_validation(tmp_path):
    """Without val_split, about two of the 100 training documents would be held out."""
    splits = {"train": ["a text"] * 100, "validation": ["held out"] * 3, "empty": [" "]}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
    ).save_to_disk(tmp_path / "texts")
    counts = {}
    for split in ("validation", None, "empty", "nowhere"):
        given = str(tmp_path / "texts"), None, "train", "text", None, str(tmp_path / "cache")
        data = hf_data(*given, split, packing="best_fit", **OPTIONS)
        message = (
            "^data.val_split=empty must have a document with text" if split == "empty" else "^the split nowhere of"
        )
        with pytest.raises(ValueError, match=message) if split in ("empty", "nowhere") else nullcontext():
            counts[split] = [data.layouts(held_out=held_out)[""].report.documents for held_out in (False, True)]
    assert counts["validation"] == [100, 3] and sum(counts[None]) == 100 and list(counts) == ["validation", None]


@pytest.mark.parametrize("empty", ["path", "val_path"])
def test_named_validation_files_are_never_trained_on(empty, tmp_path):
    paths = {name: write_jsonl(tmp_path / f"{name}.jsonl", many_chats(5)) for name in ("path", "val_path")}
    write_jsonl(paths[empty], [{"text": "no chat"}] * 3)
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    given = str(paths["path"]), tokenizer, None, str(tmp_path / "cache"), str(paths["val_path"])
    data = sft_data(*given, skip_invalid=True, packing="best_fit", **OPTIONS)
    with pytest.raises(ValueError, match=rf"^data\.{empty}={paths[empty]} must have a document with text; it has none"):
        data.prepare_data()
    with pytest.raises(ValueError, match=rf"^data\.{empty}={paths[empty]}: a chat must have messages"):
        sft_data(*given, packing="best_fit", **OPTIONS).prepare_data()
