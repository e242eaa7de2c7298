"""Tests how many groups of heads run at the same time: as many as fit in the L2 cache, but at least one."""

import pytest
import torch

from fa_kernels.flash_attention.tile_order import fewest_kv_heads, heads_per_section, kv_heads_per_section


def meta(total, heads, head_dim):
    return torch.empty(total, heads, head_dim, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("total", "n_heads", "n_kv_heads", "expected"),
    [
        pytest.param(2048, 32, 8, 32, id="all"),
        pytest.param(2**17, 32, 8, 4, id="just-one-group"),
        pytest.param(2**17 + 1, 32, 8, 4, id="not-even-one"),
        pytest.param(2**16, 32, 8, 8, id="two-groups"),
        pytest.param(2**16, 8, 8, 2, id="two-heads"),
    ],
)
def test_keys_and_values_of_a_section_fit(total, n_heads, n_kv_heads, expected):
    """With head_dim 64 and 2^17 tokens, K and V of one KV head fill the L2 budget."""
    k = meta(total, n_kv_heads, 64)
    assert heads_per_section(k, k, n_heads) == expected


def test_wider_values_and_wider_numbers_count():
    k, v = meta(2**16, 4, 64), meta(2**16, 4, 192)
    assert heads_per_section(k, v, 4) == 1
    assert heads_per_section(k.float(), k.float(), 4) == 1


@pytest.mark.parametrize(("total", "expected"), [(1024, 8), (2**14, 4), (2**15, 2), (2**20, 1)])
def test_queries_of_a_section_fit(total, expected):
    """The budget counts Q and dO (2 bytes per element) and dQ (4 bytes) of the two query heads that share a KV head."""
    assert kv_heads_per_section(meta(total, 16, 16), 8, n_tiles=total // 128, programs=4) == expected


@pytest.mark.parametrize(
    ("n_kv_heads", "expected"),
    [
        pytest.param(4, 4, id="all"),
        pytest.param(5, 5, id="one-head-would-be-left"),
        pytest.param(8, 4, id="two-sections"),
        pytest.param(11, 6, id="6-and-5"),
    ],
)
def test_a_section_has_two_tiles_for_each_program(n_kv_heads, expected):
    """One KV head fills the L2 budget, but has only 64 tiles for 128 programs. A section (the heads that run at the
    same time) needs at least four KV heads to have two tiles for each program.
    """
    q = meta(2**13, 4 * n_kv_heads, 128)
    assert kv_heads_per_section(q, n_kv_heads, n_tiles=64, programs=128) == expected


@pytest.mark.parametrize(("n_kv_heads", "expected"), [(1, 1), (2, 2), (5, 3), (8, 2)])
def test_a_section_has_the_fewest_kv_heads(n_kv_heads, expected):
    q = meta(2**17, n_kv_heads, 128)
    assert kv_heads_per_section(q, n_kv_heads, n_tiles=1024, programs=128, fewest=2) == expected


def test_one_kv_head_at_a_time_if_queries_are_a_part_of_a_long_document():
    assert fewest_kv_heads(total_k=65536, total_q=16384, crosses_documents=True) == 1


def test_two_kv_heads_at_a_time_with_packed_documents():
    assert fewest_kv_heads(total_k=65536, total_q=65536, crosses_documents=True) == 2
    assert fewest_kv_heads(total_k=65536, total_q=65536, crosses_documents=False) == 1
