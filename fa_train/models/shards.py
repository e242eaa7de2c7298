"""The part of a sharded tensor that this rank holds, and the norm of sharded tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def local(x: Tensor) -> Tensor:
    """Returns this rank's shard of x, without a copy. Returns x unchanged if it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """Gathers x from all ranks. Returns x unchanged if it is not sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm of all elements of the tensors, () fp32. Either all tensors are sharded, or none is.

    Sharded tensors must have one mesh, and must be sharded along the same mesh dimensions.
    """
    first = tensors[0]
    parts = [local(x) for x in tensors]
    # torch's get_total_norm is not used, because it would round the norm of bf16 gradients to bf16. Since version 2.14,
    # torch refuses `dtype` for sharded tensors, so this rank's parts are passed.
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts, 2.0, dtype=torch.float32)))
    if not isinstance(first, DTensor):
        return norm
    placements = [Partial() if placement.is_shard() else Replicate() for placement in first.placements]
    return DTensor.from_local(norm.square(), first.device_mesh, placements, run_check=False).full_tensor().sqrt()


def own_rows(parameter: Tensor) -> tuple[Tensor, slice]:
    """Returns this rank's part of a parameter without copying it, and the range of rows in this part.

    If the parameter is a plain tensor, every rank has all rows. FSDP2 splits the rows as torch.chunk does, so the last
    ranks can have fewer rows or none.
    """
    if not isinstance(parameter, DTensor):
        return parameter, slice(0, parameter.shape[0])
    own, start = parameter.to_local(), 0
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(dim=0), "FSDP2 shards rows"
            per_rank = -(-parameter.shape[0] // parameter.device_mesh.size(dimension))
            start = min(per_rank * parameter.device_mesh.get_local_rank(dimension), parameter.shape[0])
    return own, slice(start, start + own.shape[0])
