"""Positions in documents and rotary embeddings."""

import math

import pytest
import torch

from fa_train.models.rope import document_positions, rotary_table, rotate

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("cu_seqlens", "positions"),
    [
        pytest.param(None, [0, 1, 2, 3, 4, 5], id="one-document"),
        pytest.param([0, 2, 6], [0, 1, 0, 1, 2, 3], id="two"),
        pytest.param([0, 0, 3, 3, 4, 6, 6], [0, 1, 2, 0, 0, 1], id="empty-and-padded"),
        pytest.param([0, 4], [0, 1, 2, 3, 0, 1], id="tokens-past-the-last"),
    ],
)
def test_positions_restart_with_each_document(cu_seqlens, positions):
    cu_seqlens = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    assert document_positions(cu_seqlens, 6, CPU).tolist() == positions


def test_rotation_is_the_papers():
    # channel 0 turns with channel 2 by one radian a token, 1 with 3 by 100**-0.5
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    rotated = rotate(x, rotary_table(torch.tensor([3]), head_dim=4, theta=100.0))
    expected = [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)]
    torch.testing.assert_close(rotated[0, 0], torch.tensor(expected))


def test_equals_transformers_llama():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, positions = torch.randn(5, 2, 8), torch.randn(5, 1, 8), torch.arange(5)
    table = rotary_table(positions, 8, 10000.0)
    cos, sin = (torch.cat((x, x), dim=-1)[None] for x in table)
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for ours, x in zip((rotate(q, table), rotate(k, table)), theirs, strict=True):
        torch.testing.assert_close(ours, x[0].transpose(0, 1))


@pytest.mark.parametrize("shift", [1, 4096, 1_000_000])
def test_scores_depend_on_the_distance_only(shift):
    q, k, positions = torch.randn(6, 1, 16), torch.randn(6, 1, 16), torch.arange(6)

    def scores(offset: int) -> torch.Tensor:
        table = rotary_table(positions + offset, 16, 10000.0)
        return torch.einsum("ihd,jhd->ij", rotate(q, table), rotate(k, table))

    # fp32 angles would be off by 0.03 at one million
    torch.testing.assert_close(scores(shift), scores(0), rtol=1e-5, atol=1e-5)


def test_low_precision_is_rotated_in_fp32():
    x = torch.randn(3, 2, 8).to(torch.bfloat16)
    table = rotary_table(torch.tensor([0, 1, 9999]), 8, 10000.0)
    rotated = rotate(x, table)
    assert rotated.dtype == torch.float32
    assert torch.equal(rotated, rotate(x.float(), table))
