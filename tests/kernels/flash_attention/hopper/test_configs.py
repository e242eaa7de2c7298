"""Tests the configurations that the host chooses for the Hopper kernels.

Triton's compilation hooks, such as `jit_post_compile_hook`, receive the arguments of a kernel as JSON.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from fa_kernels.flash_attention import hopper
from fa_kernels.flash_attention.hopper.backward.fused_config import CAPPED_CONFIGS, CONFIGS, FusedConfig
from fa_kernels.flash_attention.hopper.forward.config import FORWARD_CONFIGS, OTHER_CONFIGS, ForwardConfig
from fa_kernels.flash_attention.hopper.forward.kernel import uses_sections
from fa_kernels.flash_attention.schedule import build_schedule


@pytest.mark.parametrize("configs", [CONFIGS, CAPPED_CONFIGS, FORWARD_CONFIGS, *OTHER_CONFIGS.values()])
def test_configurations_can_be_written_as_json(configs):
    assert [json.loads(json.dumps(config)) for config in configs.values()] == [list(x) for x in configs.values()]


def test_kernels_read_only_fields_of_configurations():
    """Triton 3.8 turns a NamedTuple into a tuple that has the fields, but not the properties and methods."""
    files = Path(hopper.__file__).parent.rglob("*.py")
    read = {name for path in files for name in re.findall(r"\bCONFIG\.(\w+)", path.read_text())}
    assert "consumers" in read and read <= {*FusedConfig._fields, *ForwardConfig._fields}


def test_registers_of_a_program_are_those_that_it_starts_with():
    """`setmaxnreg` waits forever for registers that no other warpgroup gives up."""
    for config in [x for configs in (FORWARD_CONFIGS, *OTHER_CONFIGS.values()) for x in configs.values()]:
        registers = config.consumers * config.consumer_registers + config.producer_registers
        assert registers <= (config.consumers + 1) * config.start_registers


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
