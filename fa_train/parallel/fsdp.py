"""Shards weights, gradients and optimizer states over ranks (ZeRO-3, arXiv:1910.02054), with torch's FSDP2.

Each rank keeps a shard of every parameter: some of the parameter's rows. Weights are gathered in groups. The
weights of a group are gathered before its modules run. `shard` makes these groups:

| group | dtype with bf16-mixed | how long the gathered weights exist |
|:--|:--|:--|
| each block | bf16 | during its forward and its backward; in between only if reshard_after_forward is false |
| the head, if untied | bf16 | from its forward to its backward, because the model's backward begins with the head |
| the learned positions; the token embedding, if untied | fp32 | during its forward and its backward |
| the rest: the last norm, and the token embedding if tied to the head | fp32 | the whole micro-batch |

The gradients of a group are averaged and sharded as soon as the group's backward pass has computed them.

With replicas > 1 (HSDP), the ranks are divided into replicas of equal size. Each replica holds the whole model, sharded
over the ranks of the replica. Gradients are also averaged between replicas, once per step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from fa_train.bounds import PositiveInt
from fa_train.checkpoints.base import require_fit
from fa_train.checkpoints.files import read_file, shapes
from fa_train.models.gpt import GPT
from fa_train.optim.resume import (
    TRAINED_WEIGHTS,
    require_same_kind,
    require_same_names,
    require_same_weights,
    trained_weights,
)
from fa_train.parallel.background_save import BackgroundSave
from fa_train.parallel.context.operators import new_context_group, register_group
from fa_train.parallel.sharded_checkpoint import (
    FolderReader,
    load_into,
    read_meta,
    saved_optimizer,
    stored_weights,
    write_folder,
)
from fa_train.private_names import replace_private

CONTEXT_GROUP = "context"
SHARDED_MESH = "data_parallel"  # Lightning's name for the mesh dimension of data-parallel ranks


def shard(
    model: GPT,
    mesh: DeviceMesh,
    precision: str,
    *,
    reshard_after_forward: bool = True,
    reduce_dtype: torch.dtype = torch.float32,
) -> None:
    """Shards the model's parameters over the ranks. No device ever holds the whole model.

    mesh: a device mesh of shape (ranks,), or with HSDP (replicas, ranks per replica).
    precision: trainer.precision. With bf16-mixed, all shards are in fp32. The weights of blocks and of an untied head
    are gathered in bf16, the dtype that autocast computes in. All other weights are gathered in fp32.
    """
    # inputs are not cast to bf16, because autocast keeps the hidden states between blocks in fp32
    policy = partial(MixedPrecisionPolicy, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    rounded, exact = policy(torch.bfloat16 if precision == "bf16-mixed" else None), policy(None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=rounded, reshard_after_forward=reshard_after_forward)
    if model.position_embedding is not None:
        fully_shard(model.position_embedding, mesh=mesh, mp_policy=exact)
    if not model.config.tied:
        fully_shard(model.token_embedding, mesh=mesh, mp_policy=exact)
        fully_shard(model.head, mesh=mesh, mp_policy=rounded, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=exact)


def is_sharded(model: GPT) -> bool:
    """Returns whether `shard` was called on the model."""
    return isinstance(model, FSDPModule)


class FullyShardedStrategy(ModelParallelStrategy):
    """A Lightning strategy that shards the model, or several copies of the model, over the ranks.

    A checkpoint is a folder with one part per rank. Any number of ranks can load the folder. The strategy can also load
    the checkpoint file of an unsharded run.
    replicas: the number of copies of the model. Each copy of the model is sharded over consecutive ranks. More than one
    copy means HSDP.
    reshard_after_forward: whether blocks are freed after their forward, and gathered again for their backward. In a
    run of train.py, fa_train.training replaces "auto" with true or false before the run starts. Elsewhere, "auto" means
    true.
    reduce_once: whether gradients are averaged only in the last micro-batch of a step. With reduce_once, each rank
    holds whole gradients until the last micro-batch.
    reduce_dtype: the dtype in which gradients are sent and averaged.
    context: the number of consecutive ranks that share each packed stream of tokens (fa_train.parallel.context). If
    context is 1, ranks do not share streams.
    head_groups: the number of groups of KV heads, as in fa_train.parallel.context.attention.ContextAttention.
    """

    def __init__(
        self,
        replicas: PositiveInt,
        reshard_after_forward: bool | Literal["auto"],
        reduce_once: bool,
        reduce_dtype: Literal["float32", "bfloat16"],
        context: PositiveInt = 1,
        head_groups: PositiveInt = 1,
    ) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=True)
        self.context, self.head_groups = context, head_groups
        self.replicas = replicas
        self.reshard_after_forward: bool | Literal["auto"] = reshard_after_forward
        self.reduce_once, self.reduce_dtype = reduce_once, reduce_dtype

    def setup_environment(self) -> None:
        replace_private("lightning", self, "_data_parallel_size", self.num_nodes * self.num_processes)
        super().setup_environment()
        if self.context > 1:
            make_context_groups(self.context)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the weights. Lightning's own method would copy the weights to unpinned host memory."""
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state, without a copy."""
        assert self.model is not None
        return get_optimizer_state_dict(self.model, optimizer)

    def shard(self, model: GPT, precision: str) -> None:
        """Shards a model that is on the meta device, and gives this rank its part of the weights."""
        mesh = self.device_mesh[SHARDED_MESH]
        if self.replicas > 1:
            sizes = (self.replicas, self.world_size // self.replicas)
            mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("replicate", "shard"))
        dtype: torch.dtype = getattr(torch, self.reduce_dtype)
        shard(model, mesh, precision, reshard_after_forward=self.reshard_after_forward is not False, reduce_dtype=dtype)
        model.materialise(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Postpones the averaging of gradients until the last micro-batch of a step.

        If reduce_once is false, gradients are averaged within each replica after every micro-batch, and only the
        averaging between replicas waits for the last micro-batch. Lightning enters this context manager for the
        backward pass of every micro-batch except the last.
        """
        model = cast(FSDPModule, self._gpt)
        # set_requires_all_reduce has no effect without replicas, because only replicas need an all-reduce
        communicates = model.set_requires_gradient_sync if self.reduce_once else model.set_requires_all_reduce
        communicates(False)
        try:
            yield
        finally:
            communicates(True)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: BackgroundSave | None = None
    ) -> None:
        """Writes each rank's part into the folder, in the background if `storage_options` is given.

        Raises: CheckpointError on all ranks if any rank fails.
        """
        folder = Path(self.broadcast(filepath))
        state = {"state_dict": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{i}": values for i, values in enumerate(checkpoint.pop("optimizer_states", []))}
        if storage_options is None:
            write_folder(state, checkpoint, folder)
        else:
            storage_options.start(
                (state, checkpoint),
                lambda copied: write_folder(copied[0], copied[1], folder, storage_options),
                folder,
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        is_folder = self.broadcast(path.is_dir())  # rank 0 decides for all ranks whether to load a folder or a file
        return self._load_folder(path) if is_folder else self._load_whole(path)

    def _load_folder(self, folder: Path) -> dict[str, Any]:
        """Loads this rank's shards. Raises: CheckpointError if the checkpoint is damaged or from another model."""
        assert self.model is not None
        checkpoint = read_meta(folder)
        stored = shapes(stored_weights(FolderReader(folder).read_metadata()))
        require_fit(self._gpt, stored, checkpoint, str(folder))
        saved = saved_optimizer(folder)
        self._require_same_optimizer(saved)
        own = get_model_state_dict(self.model)
        values: dict[str, Any] = {"state_dict": {name: weight for name, weight in own.items() if name in stored}}
        load_into(values, folder, alone=False)
        set_model_state_dict(self.model, values["state_dict"], options=StateDictOptions(strict=False))
        for i, optimizer in enumerate(self.optimizers):
            ours: Any = get_optimizer_state_dict(self.model, optimizer)
            # a parameter that has never had a gradient has no state in the checkpoint
            ours["state"] = {name: state for name, state in ours["state"].items() if name in saved["state"]}
            load_into({f"optimizer_{i}": ours}, folder, alone=False)
            set_optimizer_state_dict(self.model, optimizer, ours, options=StateDictOptions(strict=False))
        return checkpoint

    def _load_whole(self, path: Path) -> dict[str, Any]:
        """Loads the checkpoint file of an unsharded run. Each rank copies its shard of each tensor.

        In the file, optimizer states are numbered in the order of the parameters in the optimizer's groups. Lightning's
        own loader cannot be used, because that loader expects the order of parameters in the model. Torch's option
        full_state_dict is used for weights only. With full_state_dict, torch sends tensors between ranks, but gloo
        cannot send the low bits of adamw_master, which are int16.
        """
        assert self.model is not None
        checkpoint = read_file(path, mmap=True)
        weights = checkpoint.pop("state_dict")
        require_fit(self._gpt, shapes(weights), checkpoint, str(path))
        for saved in checkpoint["optimizer_states"]:
            self._require_same_optimizer(saved)
        if self.optimizers:
            require_same_names(trained_weights(self.model, self.optimizers), checkpoint.get(TRAINED_WEIGHTS))
        set_model_state_dict(self.model, weights, options=StateDictOptions(full_state_dict=True, strict=False))
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        # a validation has no optimizers
        for optimizer, saved in zip(self.optimizers, checkpoint.pop("optimizer_states"), strict=bool(self.optimizers)):
            require_same_weights(optimizer, saved)
            own = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
            groups = [group | {"params": [own[i] for i in group["params"]]} for group in saved["param_groups"]]
            like: Any = get_optimizer_state_dict(self.model, optimizer)["state"]
            states = {
                own[i]: {field: _filled(like[own[i]][field], value) for field, value in state.items()}
                for i, state in saved["state"].items()
            }
            by_name: dict[str, Any] = {"state": states, "param_groups": groups}
            # a parameter that has never had a gradient has no state
            set_optimizer_state_dict(self.model, optimizer, by_name, options=StateDictOptions(strict=False))
        return checkpoint

    def _require_same_optimizer(self, saved: Mapping[str, Any]) -> None:
        if self.optimizers:
            require_same_kind(cast(Any, self.lightning_module).optimizer, saved)

    @property
    def _gpt(self) -> GPT:
        model = self.lightning_module.model if self.lightning_module is not None else None
        assert isinstance(model, GPT)
        return model


def make_context_groups(context: int) -> None:
    """Makes process groups of `context` consecutive ranks each, and registers this rank's group for attention."""
    world_size = dist.get_world_size()
    for first in range(0, world_size, context):
        group = new_context_group(range(first, first + context))
        if first <= dist.get_rank() < first + context:
            register_group(CONTEXT_GROUP, group)


def context_ranks(strategy: Strategy) -> int:
    """Returns the number of ranks that share each packed stream, or 1 for a strategy without context parallelism."""
    return strategy.context if isinstance(strategy, FullyShardedStrategy) else 1


def _filled(shard: Any, full: Any) -> Any:
    """Copies this rank's part of a whole tensor to the DTensor `shard`, without communication, and returns `shard`.

    Returns `full` if `shard` is not a DTensor.
    """
    if not isinstance(shard, DTensor):
        return full
    # With src_data_rank=None, each rank takes its rows from the tensor that it has read, without communication. The
    # rows may be a view of the tensor, so they are copied.
    shard.copy_(distribute_tensor(full.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None))
    return shard


def require_no_averaging(trainer: L.Trainer) -> None:
    """Raises: ValueError if the model is sharded and a callback averages weights."""
    if not isinstance(trainer.strategy, FullyShardedStrategy):
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):  # the callback's `setup` copies the model
            raise ValueError(
                f"strategy=fsdp cannot average weights; got the callback {type(callback).__name__}. Choose strategy=ddp"
            )


def require_known_sharding(strategy: Strategy) -> None:
    """Checks that several ranks do not train a LitGPT with one of Lightning's strategies that shard.

    With ModelParallelStrategy, no gradients of a LitGPT would be averaged. With FSDPStrategy and DeepSpeedStrategy,
    each rank would clip gradients by the norm of only the rank's shards.
    Raises: ValueError if the strategy is one of these three, and the run has several ranks.
    """
    if isinstance(strategy, FullyShardedStrategy):
        return
    if isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy) and strategy.world_size > 1:
        raise ValueError(
            "a LitGPT on several devices needs DDPStrategy or fa_train.parallel.fsdp.FullyShardedStrategy; got "
            f"{type(strategy).__name__}"
        )
