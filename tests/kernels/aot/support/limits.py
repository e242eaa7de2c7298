"""The cases that are compiled without a GPU, and the limits on their registers, spills and shared memory.

A limit is the larger of the values for Triton 3.6 and 3.8, plus a margin. With Triton 3.9, some kernels need more
registers or spill more, so they have larger limits at the end of this file. Some of these kernels were measured
(scripts/results/torch_2_15_h200_202611.md).
"""

from triton import __version__

# {(arch, head_dim, pass): (registers per thread, bytes of spill stores, tensor-core instruction)} of the portable
# kernels for one document
PORTABLE = {
    ("sm80", 64, "fwd"): (255, 48, "HMMA"),
    ("sm80", 64, "dkdv"): (255, 16, "HMMA"),
    ("sm80", 64, "dq"): (255, 48, "HMMA"),
    ("sm80", 96, "fwd"): (255, 16, "HMMA"),
    ("sm80", 96, "dkdv"): (255, 688, "HMMA"),
    ("sm80", 96, "dq"): (192, 16, "HMMA"),
    ("sm80", 128, "fwd"): (255, 32, "HMMA"),
    ("sm80", 128, "dkdv"): (255, 96, "HMMA"),
    ("sm80", 128, "dq"): (248, 0, "HMMA"),
    ("sm80", 192, "fwd"): (255, 96, "HMMA"),
    ("sm80", 192, "dkdv"): (255, 0, "HMMA"),
    ("sm80", 192, "dq"): (255, 112, "HMMA"),
    ("sm80", 256, "fwd"): (255, 64, "HMMA"),
    ("sm80", 256, "dkdv"): (255, 32, "HMMA"),
    ("sm80", 256, "dq"): (255, 0, "HMMA"),
    ("sm90", 64, "fwd"): (168, 0, "HGMMA"),
    ("sm90", 64, "dkdv"): (255, 0, "HGMMA"),
    ("sm90", 64, "dq"): (168, 0, "HGMMA"),
    ("sm90", 96, "fwd"): (208, 0, "HGMMA"),
    ("sm90", 96, "dkdv"): (255, 176, "HGMMA"),
    ("sm90", 96, "dq"): (192, 0, "HGMMA"),
    ("sm90", 128, "fwd"): (255, 0, "HGMMA"),
    ("sm90", 128, "dkdv"): (255, 128, "HGMMA"),
    ("sm90", 128, "dq"): (248, 0, "HGMMA"),
    ("sm90", 192, "fwd"): (255, 0, "HGMMA"),
    ("sm90", 192, "dkdv"): (255, 320, "HGMMA"),
    ("sm90", 192, "dq"): (248, 0, "HGMMA"),
    ("sm90", 256, "fwd"): (255, 80, "HGMMA"),
    ("sm90", 256, "dk"): (255, 16, "HGMMA"),
    ("sm90", 256, "dv"): (255, 32, "HGMMA"),
    ("sm90", 256, "dq"): (255, 0, "HGMMA"),
    ("sm100", 64, "fwd"): (176, 0, "UTCHMMA"),
    ("sm100", 64, "dkdv"): (255, 0, "UTCHMMA"),
    ("sm100", 64, "dq"): (176, 0, "UTCHMMA"),
    ("sm100", 96, "fwd"): (208, 0, "UTCHMMA"),
    ("sm100", 96, "dkdv"): (255, 192, "UTCHMMA"),
    ("sm100", 96, "dq"): (192, 32, "UTCHMMA"),
    ("sm100", 128, "fwd"): (216, 0, "UTCHMMA"),
    ("sm100", 128, "dkdv"): (255, 256, "UTCHMMA"),
    ("sm100", 128, "dq"): (184, 0, "UTCHMMA"),
    ("sm100", 192, "fwd"): (248, 48, "UTCHMMA"),
    ("sm100", 192, "dkdv"): (232, 0, "UTCHMMA"),
    ("sm100", 192, "dq"): (176, 0, "UTCHMMA"),
    ("sm100", 256, "fwd"): (255, 144, "UTCHMMA"),
    ("sm100", 256, "dk"): (255, 256, "UTCHMMA"),
    ("sm100", 256, "dv"): (255, 96, "UTCHMMA"),
    ("sm100", 256, "dq"): (208, 0, "UTCHMMA"),
}
# The portable kernels that isolate NaN, compiled for sm90. {(head_dim, pass): (registers per thread, bytes of spill
# stores, tensor-core instruction)}
ISOLATING = {
    (64, "contain_fwd"): (168, 0, "HGMMA"),
    (64, "contain_dkdv"): (255, 0, "HGMMA"),
    (64, "contain_dq"): (152, 0, "HGMMA"),
    (96, "contain_fwd"): (208, 0, "HGMMA"),
    (96, "contain_dkdv"): (255, 256, "HGMMA"),
    (96, "contain_dq"): (192, 0, "HGMMA"),
    (128, "contain_fwd"): (255, 0, "HGMMA"),
    (128, "contain_dkdv"): (255, 320, "HGMMA"),
    (128, "contain_dq"): (248, 0, "HGMMA"),
    (192, "contain_fwd"): (255, 0, "HGMMA"),
    (192, "contain_dkdv"): (255, 800, "HGMMA"),
    (192, "contain_dq"): (255, 16, "HGMMA"),
    (256, "contain_fwd"): (255, 32, "HGMMA"),
    (256, "contain_dk"): (255, 64, "HGMMA"),
    (256, "contain_dv"): (255, 128, "HGMMA"),
    (256, "contain_dq"): (255, 0, "HGMMA"),
}
# Limits of the repair kernels, which run after a Hopper kernel and recompute the tiles that contain NaN. Two programs
# of a repair kernel fit on a multiprocessor, except for the backward with head_dim 256.
REPAIRS = {
    (64, "repair_fwd"): (144, 0, "HGMMA"),
    (64, "repair_bwd"): (255, 0, "HGMMA"),
    (96, "repair_fwd"): (216, 0, "HGMMA"),
    (96, "repair_bwd"): (255, 128, "HGMMA"),
    (128, "repair_fwd"): (255, 0, "HGMMA"),
    (128, "repair_bwd"): (255, 160, "HGMMA"),
    (256, "repair_fwd"): (255, 112, "HGMMA"),
    (256, "repair_bwd"): (255, 928, "HGMMA"),
}
# {(arch, head_dim, pass): (bytes of spill stores, tensor-core instruction)} of fp32 kernels with three TF32 matmuls per
# product. Kernels whose tiles have fewer than 64 rows use HMMA on every GPU.
OF_4_BYTES = {
    ("sm80", 64, "fwd"): (32, "HMMA"),
    ("sm80", 64, "dkdv"): (80, "HMMA"),
    ("sm80", 64, "dq"): (0, "HMMA"),
    ("sm80", 96, "fwd"): (128, "HMMA"),
    ("sm80", 96, "dkdv"): (0, "HMMA"),
    ("sm80", 96, "dq"): (64, "HMMA"),
    ("sm80", 128, "fwd"): (32, "HMMA"),
    ("sm80", 128, "dkdv"): (352, "HMMA"),
    ("sm80", 128, "dq"): (96, "HMMA"),
    ("sm80", 192, "fwd"): (48, "HMMA"),
    ("sm80", 192, "dkdv"): (16, "HMMA"),
    ("sm80", 192, "dq"): (0, "HMMA"),
    ("sm80", 256, "fwd"): (16, "HMMA"),
    ("sm80", 256, "dkdv"): (704, "HMMA"),
    ("sm80", 256, "dq"): (160, "HMMA"),
    ("sm90", 64, "fwd"): (32, "HGMMA"),
    ("sm90", 64, "dkdv"): (144, "HGMMA"),
    ("sm90", 64, "dq"): (0, "HGMMA"),
    ("sm90", 96, "fwd"): (368, "HGMMA"),
    ("sm90", 96, "dkdv"): (784, "HGMMA"),
    ("sm90", 96, "dq"): (80, "HGMMA"),
    ("sm90", 128, "fwd"): (736, "HGMMA"),
    ("sm90", 128, "dkdv"): (1984, "HMMA"),
    ("sm90", 128, "dq"): (144, "HMMA"),
    ("sm90", 192, "fwd"): (96, "HMMA"),
    ("sm90", 192, "dkdv"): (1568, "HMMA"),
    ("sm90", 192, "dq"): (720, "HMMA"),
    ("sm90", 256, "fwd"): (256, "HMMA"),
    ("sm90", 256, "dkdv"): (720, "HMMA"),
    ("sm90", 256, "dq"): (576, "HMMA"),
    ("sm100", 64, "fwd"): (64, "UTCHMMA"),
    ("sm100", 64, "dkdv"): (16, "HMMA"),
    ("sm100", 64, "dq"): (0, "HMMA"),
    ("sm100", 96, "fwd"): (992, "UTCHMMA"),
    ("sm100", 96, "dkdv"): (0, "HMMA"),
    ("sm100", 96, "dq"): (208, "HMMA"),
    ("sm100", 128, "fwd"): (176, "HMMA"),
    ("sm100", 128, "dkdv"): (272, "HMMA"),
    ("sm100", 128, "dq"): (144, "HMMA"),
    ("sm100", 192, "fwd"): (176, "HMMA"),
    ("sm100", 192, "dkdv"): (16, "HMMA"),
    ("sm100", 192, "dq"): (48, "HMMA"),
    ("sm100", 256, "fwd"): (96, "HMMA"),
    ("sm100", 256, "dkdv"): (912, "HMMA"),
    ("sm100", 256, "dq"): (288, "HMMA"),
}
TENSOR_MEMORY = 512  # columns, on sm100
# Largest allowed ratio of shared_bytes to the shared memory that Triton reports. shared_bytes assumes the largest
# layout that the compiler can choose.
SURPLUS = {"sm80": 1.25, "sm90": 1.1, "sm100": 1.25}
# cases with dtypes that are not in the tables above, or with a v_head_dim that differs from head_dim
UNUSUAL = (
    *("sm90-256-192-dk-2", "sm90-192-128-dkdv-2", "sm80-128-128-dkdv-4"),
    *("sm90-128-128-fwd-1", "sm90-80-80-fwd-1", "sm90-16-16-fwd-1"),
)
# The row strides of heads with 72 and 136 columns are not multiples of 16 elements, even if the rows are contiguous.
UNALIGNED = [*(f"sm90-72-72-{direction}-2" for direction in ("fwd", "dkdv", "dq")), "sm90-136-136-fwd-2"]
UNALIGNED_DECODE = "sm90-72-64-dense"
# {case: (registers per thread, bytes of spill stores, tensor-core instruction)} of the decoding kernels. A tile for one
# query has 16 rows, too few for wgmma.
DECODE = {
    "sm80-64-1-dense": (104, 0, "HMMA"),
    "sm80-128-1-dense": (248, 0, "HMMA"),
    "sm80-128-64-paged": (255, 176, "HMMA"),
    "sm80-256-4096-dense": (255, 80, "HMMA"),
    "sm89-128-1-dense": (248, 0, "HMMA"),
    "sm89-128-64-paged": (255, 224, "HMMA"),
    "sm89-256-4096-dense": (255, 128, "HMMA"),
    "sm90-64-1-dense": (168, 0, "HMMA"),
    "sm90-128-1-dense": (248, 0, "HMMA"),
    "sm90-64-64-paged": (216, 0, "HGMMA"),
    "sm90-96-64-paged": (255, 0, "HGMMA"),
    "sm90-128-64-paged": (255, 0, "HGMMA"),
    "sm90-256-4096-dense": (255, 0, "HGMMA"),
    "sm100-128-1-dense": (248, 0, "HMMA"),
    "sm100-128-64-paged": (255, 0, "UTCHMMA"),
    "sm100-256-4096-dense": (255, 160, "UTCHMMA"),
    "sm120-128-1-dense": (248, 0, "HMMA"),
    "sm120-128-64-paged": (255, 112, "HMMA"),
    "sm120-256-4096-dense": (255, 80, "HMMA"),
}
SCHEDULE = {"sm80": 96, "sm89": 96, "sm90": 96, "sm100": 96, "sm120": 96}  # registers per thread
# {head_dim-length_class-dtype-out_dtype-features: bytes of spill stores} of the Hopper forward kernels. If a case
# has the feature `marks`, the kernel processes several documents.
FORWARD_SPILLS = {
    "64-long-bf16-bf16-plain": 16,
    "64-long-bf16-bf16-marks": 16,
    "64-long-fp16-fp32-sinks+softcap+marks": 32,
    "64-medium-bf16-bf16-plain": 8,
    "64-medium-fp16-fp32-sinks+softcap+marks": 8,
    "64-short-bf16-bf16-marks": 8,
    "64-short-fp16-fp32-sinks+softcap+marks": 8,
    "96-short-bf16-bf16-marks": 8,
    "96-long-bf16-bf16-marks": 8,
    "96-long-fp16-fp32-sinks+softcap+marks": 8,
    "96-very_long-bf16-bf16-marks": 8,
    "96-medium-bf16-bf16-marks": 8,
    "96-medium-fp16-fp32-sinks+softcap+marks": 8,
    "128-medium-bf16-bf16-plain": 8,
    "128-medium-bf16-bf16-marks": 24,
    "128-medium-fp16-fp32-sinks+softcap+marks": 32,
    "128-short-bf16-bf16-marks": 16,
    "128-short-fp16-fp32-sinks+softcap+marks": 8,
    "128-very_long-bf16-bf16-plain": 8,
    "256-short-bf16-bf16-marks": 32,
    "256-medium-bf16-bf16-marks": 16,
    "256-long-bf16-bf16-plain": 56,
    "256-long-bf16-bf16-marks": 56,
    "256-long-fp16-fp16-sinks+softcap+marks": 56,
}
# {case: bytes of spill stores} of the Hopper backward kernels. aot/hopper_backward.py explains the names of the cases.
# Few of the spills are inside the inner loops.
BACKWARD_SPILLS = {
    "bf16-128-1-0-0": 128, "bf16-64-1-0-0": 16, "fp16-64-1-0-0": 32,
    "bf16-128-1-0-1": 80, "bf16-64-1-0-1": 16, "bf16-96-1-0-1": 104, "fp16-96-1-0-0": 16,
    "fp16-128-4-0-1": 112, "fp16-64-4-0-1": 16, "bf16-128-4-0-0": 96, "bf16-64-4-0-1": 16,
    "bf16-128-1-1-1": 136, "bf16-64-4-1-1": 48, "bf16-64-1-1-1": 32, "fp16-64-1-1-1": 16,
    "bf16-96-1-0-0": 88, "bf16-96-4-0-1": 104, "bf16-96-4-1-1": 136, "fp16-96-1-1-1": 80,
    "fp16-96-4-0-1": 40, "fp16-128dkdv-1-1-0": 72, "fp16-128dkdv-4-1-1": 80, "fp16-128dq-1-1-0": 16,
    "fp16-128dq-4-1-1": 16,
    "bf16-64ordered-1-0-0": 16, "bf16-64ordered-4-1-1": 16, "fp16-64ordered-1-0-0": 16, "fp16-64ordered-4-1-1": 16,
    "bf16-96ordered-4-0-1": 80, "bf16-96ordered-1-1-1": 120, "fp16-96ordered-1-0-0": 16, "fp16-96ordered-4-1-1": 80,
    "bf16-128ordered-1-1-1": 144, "bf16-128ordered-4-0-1": 104, "fp16-128ordered-4-0-1": 104,
    "bf16-256dkdv-1-0-0": 32, "bf16-256dkdv-4-1-1": 32,
    "bf16-256dq-1-0-0": 384, "bf16-256dq-4-1-1": 384,
}  # fmt: skip

if [int(number) for number in __version__.split(".")[:2]] >= [3, 9]:
    FORWARD_SPILLS |= {"256-short-bf16-bf16-marks": 56, "256-long-bf16-bf16-marks": 64}
    BACKWARD_SPILLS |= {
        "bf16-64-1-0-0": 288, "bf16-64-1-0-1": 352, "bf16-64-4-0-1": 280, "bf16-64-4-1-1": 240, "bf16-64-1-1-1": 256,
        "bf16-64ordered-1-0-0": 112, "bf16-64ordered-4-1-1": 224,
        "bf16-96-1-0-0": 120, "bf16-96-1-0-1": 120, "bf16-96-4-0-1": 120,
    }  # fmt: skip
    ISOLATING[256, "contain_fwd"] = (255, 64, "HGMMA")
    DECODE |= {"sm90-64-64-paged": (224, 0, "HGMMA"), "sm90-256-4096-dense": (255, 48, "HGMMA")}
    OF_4_BYTES |= {("sm80", 128, "dkdv"): (448, "HMMA"), ("sm90", 64, "dkdv"): (560, "HGMMA")}


def case_of(arch: str, head_dim: int, direction: str, itemsize: int = 2) -> str:
    return f"{arch}-{head_dim}-{head_dim}-{direction}-{itemsize}"
