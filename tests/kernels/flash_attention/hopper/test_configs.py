"""Tests the configurations that the host chooses for the Hopper kernels.

Triton's compilation hooks, such as `jit_post_compile_hook`, receive the arguments of a kernel as JSON.
"""

import json

import pytest
import torch

from fa_kernels.flash_attention.hopper.backward.fused_config import CAPPED_CONFIGS, CONFIGS
from fa_kernels.flash_attention.hopper.forward.config import FORWARD_CONFIGS, OTHER_CONFIGS
from fa_kernels.flash_attention.hopper.forward.kernel import uses_sections
from fa_kernels.flash_attention.schedule import build_schedule


@pytest.mark.parametrize("configs", [CONFIGS, CAPPED_CONFIGS, FORWARD_CONFIGS, *OTHER_CONFIGS.values()])
def test_configurations_can_be_written_as_json(configs):
    assert [json.loads(json.dumps(config)) for config in configs.values()] == [list(x) for x in configs.values()]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([300], True, id="one-short"),
        pytest.param([9000], True, id="one-long"),
        pytest.param([300] * 30, False, id="packed-short"),
        pytest.param([1000] * 9, False, id="packed-medium"),
        pytest.param([5000] * 2, True, id="packed-long"),
        pytest.param([70_000] * 2, True, id="packed-very-long"),
    ],
)
def test_packed_documents_below_4096_tokens_run_with_all_heads_at_the_same_time(lengths, expected):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    schedule = build_schedule(cu_seqlens, cu_seqlens, sum(lengths), sum(lengths), causal=True, padded=len(lengths) > 1)
    assert uses_sections(schedule) == expected
