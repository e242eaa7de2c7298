"""Float8 training: torchao computes the matrix products of the blocks' linear layers in float8 (arXiv:2209.05433).

Weights, gradients and optimizer states keep their dtypes. Embeddings, norms, the attention function and the head do not
use float8. Both operands of every product are multiplied by a scale and rounded to 8 bits. Inputs and weights are
rounded to e4m3, and gradients of outputs to e5m2. Each tensor has one scale, which is computed from the tensor's
largest magnitude at each use. Float8 therefore has no state, and checkpoints have the same format as without float8.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from fa_train.models.gpt import GPT
from fa_train.models.lora import adapted
from fa_train.private_names import TESTED

Float8 = Literal["tensorwise"]  # one scale per tensor

MULTIPLE = 16  # torch._scaled_mm needs matrices whose inner dimension and number of columns are multiples of 16
LOWEST_CAPABILITY = (8, 9)  # the compute capability of the first GPUs with float8 products


def use_float8(model: GPT, recipe: Float8, *, emulate: bool = False) -> None:
    """Makes the linear layers of all blocks compute in float8. Call `use_float8` before the blocks are compiled.

    The parameters and their names do not change.
    emulate: whether to round operands to float8 but multiply them in fp32. Emulation works on every device.
    Raises: ValueError if torchao is not installed. Also raises the errors of `require_float8_model`.
    """
    require_float8_model(model)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # the import takes seconds
    except ImportError as error:
        wanted = f"torchao=={TESTED['torchao']}"
        raise ValueError(f"lit_gpt.float8 needs {wanted}; got {error}. Run `pip install {wanted}`") from error
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(
        model.blocks, config=config, module_filter_fn=lambda module, _: type(module) is nn.Linear
    )
    model.choose_ffns()  # blocks whose linear layers compute in float8 use DenseFFN


def require_float8_model(model: GPT) -> None:
    """Checks that the model can use float8.

    Raises: ValueError if the model has adapters, linear layers whose sizes are not multiples of 16, or memory settings
    that float8 does not support.
    """
    if next(adapted(model), None) is not None:
        raise ValueError("lit_gpt.float8 needs adapter=none; got LoRA adapters")
    if model.memory.mlp_chunk is not None:
        raise ValueError(f"lit_gpt.float8 needs memory.mlp_chunk=null; got {model.memory.mlp_chunk}")
    if model.memory.offload == "all":
        raise ValueError("lit_gpt.float8 needs memory.offload=false or true; got all")
    for path, layer in model.blocks.named_modules():
        if isinstance(layer, nn.Linear) and (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE):
            raise ValueError(
                f"lit_gpt.float8 needs linear layers whose sizes are multiples of {MULTIPLE}; "
                f"block {path.replace('.', ': ', 1)} has {layer.in_features} inputs and {layer.out_features} outputs"
            )


def require_float8_gpu(device: torch.device) -> None:
    """Raises: ValueError if the device is not a GPU that can multiply float8 matrices."""
    if device.type != "cuda":
        raise ValueError(f"lit_gpt.float8 needs a CUDA GPU; got trainer.accelerator={device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        wanted, found = (".".join(map(str, version)) for version in (LOWEST_CAPABILITY, capability))
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"lit_gpt.float8 needs a GPU of compute capability {wanted} or higher; {name} has {found}")
