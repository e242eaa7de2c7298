"""Tests positions within documents, and rotary embeddings."""

import math

import pytest
import torch

from fa_kernels.rotary import rotate_heads
from fa_train.models.rope import RotaryTable, document_positions, last_positions, rope_scaling, rotary_table

CPU = torch.device("cpu")


def rotate(x: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Rotates all heads of x in fp32, as the model does."""
    return rotate_heads(x, table.cos, table.sin, x.shape[1], torch.float32)


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
    # Per token, channels 0 and 2 rotate by one radian, and channels 1 and 3 by 100**-0.5 radians.
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

    # angles in fp32 would have an error of 0.03 at one million tokens
    torch.testing.assert_close(scores(shift), scores(0), rtol=1e-5, atol=1e-5)


def test_low_precision_is_rotated_in_fp32():
    x = torch.randn(3, 2, 8).to(torch.bfloat16)
    table = rotary_table(torch.tensor([0, 1, 9999]), 8, 10000.0)
    rotated = rotate(x, table)
    assert rotated.dtype == torch.float32
    assert torch.equal(rotated, rotate(x.float(), table))


SCALINGS = [
    pytest.param({"rope_type": "linear", "factor": 4.0}, id="linear"),
    pytest.param({"rope_type": "dynamic", "factor": 2.0}, id="dynamic"),
    pytest.param({"rope_type": "yarn", "factor": 8.0}, id="yarn"),
    pytest.param(
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.7, "truncate": False}, id="yarn-untruncated"
    ),
    pytest.param({"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3}, id="yarn-mscale"),
    pytest.param({"rope_type": "yarn", "factor": 8.0, "mscale": 0, "mscale_all_dim": 0.0}, id="yarn-mscale-zero"),
    pytest.param({"rope_type": "yarn", "factor": 8.0, "beta_fast": 8.0, "beta_slow": 2.0}, id="yarn-betas"),
    pytest.param(
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, id="llama-3.2"
    ),
    pytest.param(
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0}, id="llama3-wide"
    ),
]


@pytest.mark.parametrize("parameters", SCALINGS)
def test_scalings_equal_transformers(parameters):
    """head_dim, theta and the trained length are those of Llama 3."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim, theta, trained, total = 128, 500000.0, 8192, 20000
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=trained,
        rope_parameters=parameters | {"rope_theta": theta},
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, CPU, seq_len=total)
    scaling = rope_scaling(parameters, trained)
    position_ids = torch.arange(total)
    ours = scaling.frequencies(theta, head_dim, position_ids)
    # transformers computes in fp32
    torch.testing.assert_close(ours[-1] if ours.dim() == 2 else ours, frequencies.double(), rtol=1e-5, atol=0)
    assert scaling.magnitude == pytest.approx(magnitude)
    table = rotary_table(position_ids[:9], head_dim, theta, scaling)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    torch.testing.assert_close(table.cos.square() + table.sin.square(), torch.full((9, 64), magnitude**2))


def test_dynamic_ntk_counts_each_document_for_itself():
    scaling = rope_scaling({"rope_type": "dynamic", "factor": 2.0}, 4)
    packed = rotary_table(torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0]), 8, 100.0, scaling)
    alone = [rotary_table(torch.arange(length), 8, 100.0, scaling) for length in (3, 7, 1)]
    torch.testing.assert_close(packed.cos, torch.cat([table.cos for table in alone]))
    assert torch.equal(alone[0].cos, rotary_table(torch.arange(3), 8, 100.0).cos), "short documents are as trained"
    assert not torch.allclose(alone[1].cos, rotary_table(torch.arange(7), 8, 100.0).cos)


@pytest.mark.parametrize(
    ("position_ids", "last"),
    [
        pytest.param([0, 1, 2], [2, 2, 2], id="one"),
        pytest.param([0, 0, 1, 0, 0, 1, 2], [0, 1, 1, 0, 2, 2, 2], id="documents"),
        pytest.param([5, 6, 7, 3], [7, 7, 7, 3], id="from-the-middle"),
    ],
)
def test_each_token_gets_the_last_position_of_its_document(position_ids, last):
    assert last_positions(torch.tensor(position_ids)).tolist() == last


def test_both_spellings_of_a_scaling_are_read():
    named = rope_scaling({"type": "linear", "factor": 2}, None)
    assert named == rope_scaling({"rope_type": "linear", "factor": 2.0}, 77)
    assert rope_scaling({"rope_type": "default"}, None) is None
    own = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 5}
    assert rope_scaling(own, 77).original_max_position_embeddings == 5, "an explicit value takes precedence"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        pytest.param({"rope_type": "su", "factor": 2.0}, "default, linear, dynamic, yarn, llama3; got su", id="type"),
        pytest.param({"factor": 2.0}, "rope_type must be one of .*; got None", id="no-type"),
        pytest.param({"rope_type": "linear"}, "missing: factor; unknown: none", id="no-factor"),
        pytest.param({"rope_type": "linear", "factor": 2.0, "fast": 1}, "missing: none; unknown: fast", id="unknown"),
        pytest.param({"rope_type": "default", "factor": 2.0}, "takes nothing else; .* unknown: factor", id="default"),
        pytest.param({"rope_type": "yarn", "factor": 2.0}, "missing: original_max_position_embeddings", id="length"),
        pytest.param({"rope_type": "linear", "factor": "2"}, "factor must be a positive number; got 2", id="text"),
        pytest.param({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1; got 0.5", id="shrinking"),
        pytest.param(
            {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 8, "high_freq_factor": 0.5},
            "high_freq_factor must be at least low_freq_factor=1.0; got 0.5",
            id="bands",
        ),
    ],
)
def test_impossible_scalings_are_named(parameters, message):
    with pytest.raises(ValueError, match=message):
        rope_scaling(parameters, None)
