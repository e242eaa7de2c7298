"""The part of a sharded tensor that this rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(x: Tensor) -> Tensor:
    """Returns this rank's shard of x, without a copy. Returns x unchanged if it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """Gathers x from all ranks. Returns x unchanged if it is not sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


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
