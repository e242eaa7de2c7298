"""What tests of the Hopper kernels share: where they run, and the tiles that calls may take."""

from typing import get_args

import pytest
import torch

from kernels.flash_attention.hopper import fwd
from kernels.flash_attention.schedule import DocumentLength

NEEDS_SM_90 = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90"
    ),
]


def tiles_of(head_dim: int) -> set[fwd.ForwardTiles]:
    """Those of the forward pass, for documents of any length and any o."""
    return {
        fwd.forward_tiles(head_dim, documents, wide_o)
        for documents in get_args(DocumentLength)
        for wide_o in (False, True)
    }
