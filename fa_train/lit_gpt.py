"""The LightningModule, which trains a GPT. The next-token loss is averaged over all labels of an optimizer step."""

import inspect
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fa_train.bounds import Seed
from fa_train.checkpoints.architecture import ADAPTER, ARCHITECTURE, differences
from fa_train.checkpoints.base import REFERENCE, drop_base, restore_base
from fa_train.data.packing.collate import Batch
from fa_train.flops import attention_pairs
from fa_train.memory.loss import IGNORE_INDEX
from fa_train.memory.planner.plan import require_precision
from fa_train.models.float8 import Float8, use_float8
from fa_train.models.gpt import GPT
from fa_train.models.lora import adapter_values
from fa_train.models.shards import local, norm_of
from fa_train.optim.resume import (
    TRAINED_WEIGHTS,
    keep_own_settings,
    require_same_kind,
    require_same_names,
    trained_weights,
)
from fa_train.parallel.ddp import require_averaged
from fa_train.parallel.fsdp import (
    CONTEXT_GROUP,
    FullyShardedStrategy,
    context_ranks,
    is_sharded,
    require_known_sharding,
)

SKIPPED, SKIPPED_IN_A_ROW = "skipped_steps", "skipped_in_a_row"  # a checkpoint stores skip counts under these keys
# FOR_MICRO_BATCH or FOR_UPDATE is part of each seed, so that micro-batches and updates get different random numbers
FOR_MICRO_BATCH, FOR_UPDATE = 1, 2


class LitGPT(L.LightningModule):
    """Trains a GPT on next-token loss.

    A batch is a packed stream: tokens, labels and position_ids (total,) int64, cu_seqlens (n_docs + 1,) int32.
    Each optimizer step sets three tensors on the device, which are computed over all micro-batches and all ranks.
    `step_loss` is the loss in nats per label. `step_grad_norm` is the gradient norm before clipping. `total_pairs` is
    the result of attention_pairs, summed over all steps since the run started or was resumed.
    The micro-batches of a step may have different numbers of tokens. A subclass that computes another loss overrides
    `loss_sum`, which training and validation use. Lightning's Tuner needs update_attr=False in lr_find, because
    `optimizer` determines the learning rate.
    optimizer: a function that takes the model, or an optimizer class such as torch.optim.SGD. An optimizer class gets
    the parameters that require gradients, or the model if its constructor has a parameter `model`.
    float8: the float8 recipe of the blocks' linear layers (fa_train.models.float8), or None to use no float8.
    Raises: ValueError if trainer.precision or trainer.gradient_clip_algorithm is not supported. `use_float8` can
    raise further errors.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
        compile_model: bool,
        seed: Seed,
        float8: Float8 | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer, self.scheduler, self.seed = optimizer, scheduler, seed
        self.step_loss = self.step_grad_norm = torch.tensor(float("nan"))
        self._trained_before: list[list[str]] | None = None  # the checkpoint's `TRAINED_WEIGHTS`
        self._skips_before = (0, 0)  # the checkpoint's `SKIPPED` and `SKIPPED_IN_A_ROW`, or 0 in a new run
        self._start_sums(self.device)
        if float8 is not None:
            use_float8(model, float8)
        if compile_model:
            model.compile_blocks()

    def setup(self, stage: str) -> None:
        require_precision(str(self.trainer.precision))
        if self.trainer.gradient_clip_algorithm == "value":
            raise ValueError("trainer.gradient_clip_algorithm must be norm; got value")
        self._trained_before = None  # an earlier fit may have loaded another checkpoint
        if stage == TrainerFn.FITTING:  # Lightning's tuners train before on_fit_start
            self._start_sums(self.trainer.strategy.root_device)
            # Lightning wraps the model in DDP after `setup` and before on_fit_start
            self._trained_at_start = {parameter: parameter.requires_grad for parameter in self.parameters()}
        else:
            self._val_sums = torch.zeros(2, dtype=torch.float64, device=self.trainer.strategy.root_device)

    def configure_model(self) -> None:
        """Shards the model if the run has a FullyShardedStrategy. Lightning may call this method more than once.

        Raises: ValueError if the run would train with one of Lightning's strategies that shard.
        """
        if not self._has_trainer():
            return
        strategy = self.trainer.strategy
        if self._is_fitting():
            require_known_sharding(strategy)
        if isinstance(strategy, FullyShardedStrategy) and not is_sharded(self.model):
            if strategy.context > 1:
                self.model.share_context(CONTEXT_GROUP, strategy.head_groups)
            self.trainer.precision_plugin.convert_module(self)  # Lightning would convert dtypes too late
            strategy.shard(self.model, str(self.trainer.precision))

    def on_fit_start(self) -> None:
        if self._trained_before:  # FullyShardedStrategy loads a checkpoint after this hook, and checks the names itself
            require_same_names(trained_weights(self, self.trainer.optimizers), self._trained_before)
        self._start_sums(self.device)

    def _start_sums(self, device: torch.device) -> None:
        """Sets all sums and counts of a run to their initial values."""
        self.micro_batch_tokens = 0  # the number of tokens in rank 0's first micro-batch, or 0 if none has run yet
        self._scaled_step = -1  # the step whose gradients `configure_gradient_clipping` rescaled last
        # the sums are not registered as buffers, because trainer.precision=bf16-true would convert buffers to bf16
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # a step's loss, labels and attention_pairs
        self.total_pairs = torch.zeros((), dtype=torch.float64, device=device)
        self._val_sums = torch.zeros(2, dtype=torch.float64, device=device)  # a validation's loss and labels
        self._start_skips(device)
        # longest_skip starts at 0 in each run, so that a run can resume after more skips than max_skipped_steps
        self.longest_skip = torch.zeros_like(self.skipped_steps)

    def _start_skips(self, device: torch.device) -> None:
        self.skipped_steps, self._skipped_in_a_row = torch.tensor(self._skips_before, device=device)

    def _has_trainer(self) -> bool:
        """Returns whether there is a trainer. In load_from_checkpoint, Lightning calls some hooks without a trainer."""
        try:
            return self.trainer is not None
        except RuntimeError:
            return False

    def _is_fitting(self) -> bool:
        return self._has_trainer() and self.trainer.state.fn == TrainerFn.FITTING

    def loss_sum(self, batch: Batch) -> Tensor:
        """Returns the loss in nats, summed over the labels of a batch."""
        cu_seqlens: Tensor | None = batch["cu_seqlens"]
        if len(batch["cu_seqlens"]) == 2:  # a single document needs no document mask
            cu_seqlens = None
        return self.model(
            batch["tokens"],
            cu_seqlens,
            batch["position_ids"],
            batch["labels"],
            mean_seqlen=batch.get("mean_seqlen"),
            traffic=batch.get("traffic"),
            last_positions=batch.get("last_positions"),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        require_averaged(self.trainer.strategy.model, self._trained_at_start, self.trainer.optimizers)
        of_shard = [batch["context_rank"]] if "context_rank" in batch else []
        self._seed_generators(FOR_MICRO_BATCH, batch.get("first_row", batch_idx), *of_shard)
        loss, labels = self.loss_sum(batch), batch["labels"]
        # with context parallelism, all ranks of a context group count the same documents, so each rank adds only its
        # fraction of the pairs
        pairs = attention_pairs(self.model.windows, batch["cu_seqlens"].diff()) / context_ranks(self.trainer.strategy)
        self._sums += torch.stack([loss.detach().double(), count_labels(labels), pairs])
        # The number of labels in the step is not yet known, so all micro-batches divide the loss by the same number of
        # tokens on all ranks. After the last micro-batch, `configure_gradient_clipping` rescales the gradients.
        if not self.micro_batch_tokens:
            self.micro_batch_tokens = self.trainer.strategy.broadcast(max(labels.numel(), 1))
        return loss / self.micro_batch_tokens

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Rescales gradients to a mean over the step's labels, and clips them.

        If the gradients contain NaN or infinity, the step is skipped.

        Example: a step has two micro-batches of 8 tokens, with 3 and 5 labels. Their summed losses are S1 and S2.
        training_step returns S1 / 8 and S2 / 8, and Lightning divides both by the number of micro-batches. The
        gradients are therefore those of (S1 + S2) / 16. The mean loss per label is (S1 + S2) / 8, so the gradients must
        be multiplied by 16 / 8. In the code, 16 is `nominal` and 8 is `labels`.

        Lightning calls this hook between the backward pass and the optimizer's update.
        Raises: ValueError if no micro-batch was passed to LitGPT.training_step, or if the optimizer evaluates the loss
        again in a step of several micro-batches.
        """
        if not self.micro_batch_tokens:
            raise ValueError(
                f"{type(self).__name__}.training_step must call LitGPT.training_step, which counts tokens and labels; "
                "got no call. To compute another loss, override loss_sum instead of training_step"
            )
        micro_batches, step = self.trainer.accumulate_grad_batches, self.trainer.global_step
        if micro_batches > 1 and self._scaled_step == step:  # Lightning has repeated only the last micro-batch
            raise ValueError(
                f"{type(optimizer).__name__} computes the loss several times in a step, so a step must have one "
                f"micro-batch per device; got {micro_batches}. Increase data.micro_batch_size"
            )
        self._scaled_step = step
        loss, labels, pairs = self._of_all_ranks(self._sums)
        self._sums.zero_()
        self.step_loss = loss / labels  # the loss is NaN in a step without labels
        self.total_pairs = self.total_pairs + pairs
        labels = labels.clamp(min=1)
        # Lightning has divided gradients by the number of micro-batches, and DDP or FSDP has divided gradients by the
        # number of ranks
        nominal = self.micro_batch_tokens * self.trainer.accumulate_grad_batches * self.trainer.world_size
        scale = (nominal / labels).float()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.step_grad_norm = self._norm(gradients) * scale
        if gradient_clip_val:
            scale = scale * (gradient_clip_val / (self.step_grad_norm + 1e-6)).clamp(max=1.0)
        skipped = ~self.step_grad_norm.isfinite()  # the norm is equal on all ranks
        self._count_skips(skipped)
        scale_or_skip(optimizer, gradients, scale, skipped)
        self._seed_generators(FOR_UPDATE)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Returns the norm of the gradients of the whole model, () fp32, equal on all ranks."""
        norm = norm_of(gradients)
        strategy = self.trainer.strategy
        if isinstance(strategy, FullyShardedStrategy) and strategy.replicas > 1:
            # Replicas may add the terms of the norm in different orders, so their norms may differ slightly. The
            # broadcast keeps the weights of all replicas equal.
            dist.broadcast(norm, src=0)
        return norm

    def _of_all_ranks(self, sums: Tensor) -> Tensor:
        """Returns the sum of `sums` over all ranks. Lightning's reduce would make the host wait for the GPU."""
        total = sums.clone()
        if self.trainer.world_size > 1:
            dist.all_reduce(total)
        return total

    def _seed_generators(self, *purpose: int) -> None:
        """Seeds the default generators of the CPU and the GPU from (purpose, seed, step).

        torch.manual_seed is slower, because it visits every device type that torch supports.
        """
        key = [*purpose, self.seed, self.trainer.global_step]
        seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _count_skips(self, skipped: Tensor) -> None:
        self.skipped_steps = self.skipped_steps + skipped
        self._skipped_in_a_row = (self._skipped_in_a_row + 1) * skipped
        self.longest_skip = torch.maximum(self.longest_skip, self._skipped_in_a_row)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Updates the weights, and then frees the gradients and removes the gradient scale from the optimizer.

        Without this method, Lightning would keep the gradients during the next forward pass.
        """
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        forget_scale(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        optimizer.zero_grad(set_to_none=True)
        # Lightning's tuners repeat step 0. Without this reset, a repetition would look like a repeated loss.
        self._scaled_step = -1

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._val_sums += torch.stack([self.loss_sum(batch).double(), count_labels(batch["labels"])])

    def on_validation_epoch_end(self) -> None:
        loss, labels = self._of_all_ranks(self._val_sums)
        self._val_sums.zero_()
        # val/loss is NaN without labels. In trainer.fit, Monitor logs val/loss. trainer.validate returns only logged
        # metrics.
        self.log("val/loss", loss / labels, logger=not self._is_fitting())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = new_optimizer(self.optimizer, self.model)
        scheduler = self.scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "scheduler must be a schedule that needs no metric; got ReduceLROnPlateau. To use it, override "
                "configure_optimizers in a subclass of LitGPT, and name the metric there"
            )
        keep_own_settings(optimizer, scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the frozen base model's weights to the checkpoint, and continues the counts of skipped steps.

        If a checkpoint of an older version has no counts of skipped steps, the counts start at 0.
        Prints the settings of the run that differ from the settings in the checkpoint.
        Raises: CheckpointError if the checkpoint is from another model, or its adapter was trained on another base
        model.
        """
        restore_base(self.model, checkpoint)
        if REFERENCE not in checkpoint:  # the checkpoint holds all weights, so the next checkpoints must hold them too
            self.model.base_weights = frozenset()
        self._skips_before = checkpoint.get(SKIPPED, 0), checkpoint.get(SKIPPED_IN_A_ROW, 0)
        self._start_skips(self.skipped_steps.device)  # FullyShardedStrategy loads a checkpoint after on_fit_start
        changes = differences("model", self.model.config.values(), checkpoint.get(ARCHITECTURE))
        changes += differences("adapter", adapter_values(self.model), checkpoint.get(ADAPTER))
        show = self.trainer.print if self._has_trainer() else print
        for change in changes:
            show(f"warning: {change}")
        if self._is_fitting():
            self._trained_before = checkpoint.get(TRAINED_WEIGHTS)
            for saved in checkpoint.get("optimizer_states", []):  # FullyShardedStrategy has removed them
                require_same_kind(self.optimizer, saved)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Removes the frozen base model from a checkpoint, and resets Lightning's counters to the last optimizer step.

        After a signal or an error, a checkpoint can be saved in the middle of a step. A run that resumes from the
        middle of a step starts the step again.
        """
        checkpoint[ARCHITECTURE] = self.model.config.values()
        checkpoint[ADAPTER] = adapter_values(self.model)
        checkpoint[SKIPPED], checkpoint[SKIPPED_IN_A_ROW] = self.skipped_steps.item(), self._skipped_in_a_row.item()
        checkpoint[TRAINED_WEIGHTS] = trained_weights(self, self.trainer.optimizers)
        drop_base(self.model, checkpoint)
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        completed = self.trainer.global_step * self.trainer.accumulate_grad_batches
        if progress["current"]["processed"] != completed:
            for counts in (progress["current"], progress["total"]):
                counts.update(ready=completed, started=completed, processed=completed, completed=completed)


def new_optimizer(make: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    """Returns the optimizer that `make` returns for the model, or for its parameters (see LitGPT)."""
    kind = getattr(make, "func", make)  # the function or class inside a functools.partial
    if isinstance(kind, type) and issubclass(kind, Optimizer) and "model" not in inspect.signature(kind).parameters:
        return make([parameter for parameter in model.parameters() if parameter.requires_grad])
    return make(model)


def count_labels(labels: Tensor) -> Tensor:
    """Returns the number of labels that are not -100, as an fp64 scalar."""
    return (labels != IGNORE_INDEX).sum().double()


def scale_or_skip(optimizer: Optimizer, gradients: list[Tensor], scale: Tensor, skipped: Tensor) -> None:
    """Multiplies the gradients by `scale`. If `skipped` is true, the optimizer's next step changes nothing.

    Optimizers with `_step_supports_amp_scaling`, such as torch's fused AdamW, scale the gradients or skip the update
    inside their kernels. For optimizers without `_step_supports_amp_scaling`, the host waits until the GPU has computed
    `skipped`. The host also waits before a step in which SGD creates momentum buffers.
    Shapes: scale () fp32, skipped () bool.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not starts_momentum(optimizer):
        # torch.amp.GradScaler also reads _step_supports_amp_scaling, and sets grad_scale and found_inf. The optimizer
        # divides the gradients by grad_scale, and changes nothing if found_inf is 1.
        optimizer.grad_scale, optimizer.found_inf = scale.reciprocal(), skipped.float()  # type: ignore[attr-defined]
    elif skipped.item():
        optimizer.zero_grad(set_to_none=True)  # an optimizer skips parameters without gradient
    else:
        torch._foreach_mul_([local(gradient) for gradient in gradients], scale)


def starts_momentum(optimizer: Optimizer) -> bool:
    """Returns whether the next step of torch's SGD creates momentum buffers.

    If fused SGD skipped such a step inside its kernel, the momentum buffers would hold uninitialized memory.
    """
    return isinstance(optimizer, SGD) and any(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in (group["params"] if group["momentum"] else ())
        if parameter.grad is not None
    )


def forget_scale(optimizer: Optimizer) -> None:
    """Removes the values that `scale_or_skip` has set, so that a later `optimizer.step()` does not use them."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
