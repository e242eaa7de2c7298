"""The configurations of the Hopper kernels can be written as JSON.

A configuration is an argument of a kernel. Triton's compilation hooks, such as `jit_post_compile_hook`, receive the
arguments of a kernel as JSON.
"""

import json

import pytest

from fa_kernels.flash_attention.hopper.backward.fused_config import CAPPED_CONFIGS, CONFIGS
from fa_kernels.flash_attention.hopper.forward.config import FORWARD_CONFIGS, OTHER_CONFIGS


@pytest.mark.parametrize("configs", [CONFIGS, CAPPED_CONFIGS, FORWARD_CONFIGS, *OTHER_CONFIGS.values()])
def test_configurations_can_be_written_as_json(configs):
    assert [json.loads(json.dumps(config)) for config in configs.values()] == [list(x) for x in configs.values()]
