"""Flash attention in Triton, with the names and meanings of the flash-attn package."""

from kernels.flash_attention.interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
