"""Hides library messages that are wrong or useless in a run of train.py."""

import logging
import warnings


def silence_libraries() -> None:
    """Sets log levels and warning filters. Call this function after the import of Lightning, which sets a log level."""
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)  # importing Lightning sets the log level INFO
    for reporter in ("profilers", "callbacks.model_summary"):  # these loggers print reports that the user wants
        logging.getLogger(f"lightning.pytorch.{reporter}").setLevel(logging.INFO)
    # with memory=selective or offload, torch warns that compiled blocks must have no in-place operators. Our blocks
    # have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # torch 2.13 warns about the enums of torchao 0.18, which Liger imports on a GPU
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    # torch 2.15's own kernel for outer products does not set enable_fp_fusion, so Triton 3.9 warns
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION is unset")
    # Lightning 2.6 uses a deprecated function of torch in every run
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    # resuming within an epoch is exact, because the data module starts at the checkpoint's step
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
    # the last step is always logged, so a short run has metrics
    warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging interval")
    # torch 2.13 warns that more synchronisation may be needed, because Lightning constructs DDP on another stream
    warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
    # val/loss is already a mean over all ranks
    warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")
    # the data module prints its own message if no data are held out
    warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
    # the CSV logger deletes no files, because keep_earlier_metrics renames them first
    warnings.filterwarnings(
        "ignore", message=".*Previous log files in this directory will be deleted when the new ones"
    )
