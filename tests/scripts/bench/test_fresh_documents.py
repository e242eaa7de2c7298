"""Tests the batches and the table of scripts/bench/fresh_documents.py."""

import pytest
import torch

from scripts.bench import fresh_documents
from scripts.bench.fresh_documents import PASSES, Shape, parse_arguments, random_documents, table
from scripts.bench.host import Sample


def test_batches_fill_the_tokens_with_different_numbers_of_documents():
    batches = random_documents(65536, 20)
    assert {sum(lengths) for lengths in batches} == {65536}
    assert len({len(lengths) for lengths in batches}) > 5
    assert all(64 <= length <= 512 for lengths in batches for length in lengths[:-1])
    assert random_documents(65536, 20) == batches


def test_the_table_has_medians_and_rates():
    shape = Shape(64, 2, 1)
    of_forward = 2 * 2 * 64 * (10000**2 + 2800**2)
    samples = {
        ("ours", PASSES[0]): [Sample(5.0, 0.6), Sample(1.0, 3.0), Sample(2.0, 2.0)],
        ("ours", PASSES[1]): [Sample(4.0, 0.75)],
    }
    lines = table(samples, shape, [(10000, 2800)])
    assert f"| forward | ours | 6.0 | {of_forward / 6.0 * 1e-6:.0f} | 2.0 |" in lines
    assert f"| forward + backward | ours | 7.0 | {3.5 * of_forward / 7.0 * 1e-6:.0f} | 4.0 |" in lines


def test_wrong_numbers_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--calls", "0"])
    assert "--calls must be positive; got 0" in capsys.readouterr().err


@pytest.mark.gpu
def test_both_passes_are_measured():
    documents = random_documents(1024, 3)
    batches = [torch.tensor((0, *x)).cumsum(0).to("cuda", torch.int32) for x in documents]
    ours = {"ours": fresh_documents.attentions()["ours"]}
    samples = fresh_documents.measure(ours, Shape(64, 4, 2), batches, 1024, rounds=2, calls=3)
    assert {len(x) for x in samples.values()} == {2} and len(samples) == 2
    assert all(0 < sample.us <= sample.total_us for x in samples.values() for sample in x)
