"""Tests the count of visible pairs, the results, the table and the arguments of scripts/bench/features.py."""

import pytest
import torch

from fa_kernels.flash_attention.schedule import build_schedule
from scripts.bench.features import (
    Feature,
    Inputs,
    attention,
    features,
    gradients,
    log_normal_lengths,
    parse_arguments,
    rows,
)

LENGTHS, EQUAL = (20, 12), (32, 32)
PLAIN = Feature("causal", LENGTHS, {"causal": True})


def test_pairs_are_the_schedules():
    for feature in features(seqlen=2048, n_heads=4, head_dim=192, window=100):
        cu = torch.tensor([0, *feature.lengths]).cumsum(0).to(torch.int32)
        masks = {name: feature.arguments[name] for name in ("causal", "window_size") if name in feature.arguments}
        schedule = build_schedule(cu, cu, 2048, 2048, **masks)
        assert feature.pairs == (schedule.key_end - schedule.key_start).sum().item(), feature.name


def test_names_are_unique_and_narrow_values_are_of_192():
    names = {d: [feature.name for feature in features(2048, 4, d, 100)] for d in (128, 192)}
    assert all(len(set(of_one)) == len(of_one) for of_one in names.values())
    assert set(names[192]) - set(names[128]) == {"values of 128 columns"}


@pytest.mark.parametrize(
    ("changed", "tolerance"),
    [
        # rounding to four significant bits changes a weighted mean of values near 1 by about 1/16
        pytest.param(Feature("fp8", EQUAL, {"causal": True}, fp8=True), 0.3, id="fp8"),
        pytest.param(Feature("pages", EQUAL, {"causal": True}, page_size=16), 0.0, id="pages"),
    ],
)
def test_the_same_attention_of_other_storage(changed, tolerance, device):
    torch.manual_seed(0)
    inputs = Inputs(device, torch.float16)
    plain = Feature("causal", EQUAL, {"causal": True})
    o, expected = (attention(feature, inputs, n_heads=4, head_dim=16)() for feature in (changed, plain))
    assert (o.float() - expected.float()).abs().max() <= tolerance


@pytest.mark.slow
def test_gradients_are_of_q_k_and_v_and_take_in_those_of_lse(device):
    torch.manual_seed(0)
    inputs = Inputs(device, torch.float16)
    with_lse = Feature("lse", LENGTHS, {"causal": True, "return_lse": True})
    narrow = Feature("narrow", LENGTHS, {"causal": True}, n_kv_heads=2, v_head_dim=8)
    dq, dk, dv = gradients(PLAIN, inputs, 4, 16)()
    dq_lse, _, dv_lse = gradients(with_lse, inputs, 4, 16)()
    torch.testing.assert_close(dv, dv_lse)
    assert dq.shape == dk.shape == (32, 4, 16) and not torch.allclose(dq, dq_lse, atol=0.1)
    assert [x.shape for x in gradients(narrow, inputs, 4, 16)()] == [(32, 4, 16), (32, 2, 16), (32, 2, 8)]


def test_rows_are_shares_of_plain_causal():
    half = Feature("half", (16, 16), {"causal": True})
    fp8 = Feature("fp8", LENGTHS, {"causal": True}, fp8=True)
    broken = Feature("broken", LENGTHS, {"causal": True})
    forward, backward = {"causal": 2.0, "half": 1.0, "fp8": 1.5}, {"causal": 5.0, "half": 3.0}
    assert rows([PLAIN, half, fp8, broken], 64, forward, backward, {"broken": "RuntimeError: no"}) == [
        "| 64 | causal | 1.000 | 2.000 | 1.000 | 5.000 | 1.000 |",
        f"| 64 | half | {2 * 136 / (210 + 78):.3f} | 1.000 | 0.500 | 3.000 | 0.600 |",
        "| 64 | fp8 | 1.000 | 1.500 | 0.750 | – | – |",
        "| 64 | broken | 1.000 | RuntimeError: no |  |  |  |",
    ]


def test_documents_fill_the_row():
    lengths = log_normal_lengths(65536)
    assert sum(lengths) == 65536 and lengths == log_normal_lengths(65536) and len(set(lengths)) > 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heads", "6"], "--heads must be a multiple of 4; got 6"),
        (["--seqlen", "1000"], "--seqlen must be a multiple of 2048; got 1000"),
        (["--jobs", "0"], "must be positive; got 0"),
        (["--head-dims", "300"], "multiples of 8 from 8 to 256; got [300]"),
    ],
    ids=str,
)
def test_bad_arguments_end_with_a_message(arguments, said, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert said in capsys.readouterr().err
