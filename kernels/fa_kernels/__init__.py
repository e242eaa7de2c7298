"""Flash attention in Triton, with the API of the flash-attn package, and small kernels that training needs.

flash_attention/    attention; its __init__.py lists the modules in reading order
launch/             records and repeats kernel launches, which saves host time
rmsnorm.py          the residual addition and RMSNorm
rotary.py           rotary position embedding
glu.py              SwiGLU and GeGLU
nf4.py              dequantization of NF4 weights
rows.py             copies and sums of rows, for context parallelism
device.py           properties of the GPU
columns_of_head.py  how the columns of a head are split into blocks
torch_private.py    private functions of torch that save host time
"""

from fa_kernels.flash_attention.interface import flash_attn_func, flash_attn_varlen_func
from fa_kernels.flash_attention.kvcache import flash_attn_with_kvcache
from fa_kernels.flash_attention.packed_forms import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
