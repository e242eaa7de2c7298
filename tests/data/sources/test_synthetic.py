"""Random documents have the wanted lengths, and are equal in all runs."""

import math
import zlib

import numpy as np
import pytest

from fa_train.data.sources import synthetic
from fa_train.data.sources.synthetic import SyntheticSource


def lengths_of(document_len, sigma, held_out=False):
    return SyntheticSource(50, document_len, sigma).documents(held_out=held_out).lengths


def test_documents_of_equal_length_keep_their_tokens(monkeypatch):
    """The expected checksum was computed before the setting data.length_sigma existed."""
    monkeypatch.setattr(synthetic, "N_TOKENS", 2**14)
    documents = SyntheticSource(50257, 1000, 0).documents(held_out=True)
    assert documents.lengths.tolist() == [1000] * 17 and documents.lengths.dtype == np.int64
    assert documents[0].dtype == np.int32
    assert zlib.crc32(documents[0].tobytes() + documents[16].tobytes()) == 825864670


def test_lengths_are_log_normal():
    """2**26 tokens are about 10,000 documents, so the standard error of the median's logarithm is about 0.013."""
    lengths = lengths_of(4096, 1.0)
    logs = np.log(lengths / 4096)
    assert abs(np.median(logs)) < 0.05
    low, high = np.quantile(logs, [0.1587, 0.8413])  # quantiles one standard deviation below and above the median
    assert low == pytest.approx(-1, abs=0.07) and high == pytest.approx(1, abs=0.07)


@pytest.mark.parametrize(
    ("document_len", "shortest"),
    [pytest.param(100, 16, id="16-tokens"), pytest.param(5, 5, id="the-median")],
)
def test_lengths_have_limits(document_len, shortest, monkeypatch):
    monkeypatch.setattr(synthetic, "N_TOKENS", 2**18)
    lengths = lengths_of(document_len, 50.0)
    assert set(lengths.tolist()) >= {shortest, 32 * document_len}
    assert (lengths.min(), lengths.max()) == (shortest, 32 * document_len)


def test_a_sigma_that_overflows_gives_the_limits(monkeypatch):
    monkeypatch.setattr(synthetic, "N_TOKENS", 2**14)
    assert set(lengths_of(100, 1e300).tolist()) == {16, 3200}


@pytest.mark.parametrize("sigma", [0, 0.5, 3.0])
@pytest.mark.parametrize("document_len", [1, 16, 1000, pytest.param(2**15, id="longer-than-an-epoch")])
def test_an_epoch_has_enough_tokens_and_documents(document_len, sigma, monkeypatch):
    monkeypatch.setattr(synthetic, "N_TOKENS", 2**14)
    lengths = lengths_of(document_len, sigma)
    assert len(lengths) >= 2 and lengths.sum() >= 2**14
    assert len(lengths) == 2 or lengths[:-1].sum() < 2**14, "no document more than needed"


def test_the_first_lengths_may_be_too_short(monkeypatch):
    """If an epoch has few documents, the lengths that are drawn first often add up to too few tokens."""
    monkeypatch.setattr(synthetic, "N_TOKENS", 2**14)
    for document_len in range(2**11, 2**14, 2**10):
        for held_out in (False, True):
            assert lengths_of(document_len, 0.5, held_out).sum() >= 2**14


def test_lengths_repeat_and_held_out_documents_differ(monkeypatch):
    monkeypatch.setattr(synthetic, "N_TOKENS", 2**14)
    first, again, held_out = lengths_of(100, 1.0), lengths_of(100, 1.0), lengths_of(100, 1.0, held_out=True)
    assert np.array_equal(first, again)
    assert first[:20].tolist() != held_out[:20].tolist()


@pytest.mark.parametrize("sigma", [-0.5, math.inf, math.nan])
def test_a_wrong_sigma_is_refused(sigma):
    with pytest.raises(ValueError, match=rf"data\.length_sigma must be finite and at least 0; got {sigma}"):
        SyntheticSource(50, 10, sigma)
