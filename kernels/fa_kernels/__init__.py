"""Flash attention in Triton, with the API of the flash-attn package."""

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
