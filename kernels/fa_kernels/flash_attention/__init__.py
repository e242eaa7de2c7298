"""Flash attention. docs/attention.md explains the algorithm. A call of a public function runs these modules in order:

    interface.py       the public functions. checks.py checks their arguments, and features.py groups their options.
    schedule.py        says which keys each query sees. On a GPU, schedule_kernel.py computes the schedule.
    ops.py             makes attention differentiable, and visible to torch.compile and profilers.
    backend.py         chooses the kernels. launch/record.py repeats the launches of an earlier call.
    portable/          the Triton kernels for all GPUs.
    hopper/            the Gluon kernels for sm_90.

flash_attn_with_kvcache (kvcache.py) calls portable/cache.py and portable/decode.py without a schedule.

The portable and the Hopper kernels share the following modules:

    tile_order.py      which tile and head each program processes
    scores.py          the soft cap, and ALiBi (only in the portable kernels)
    delta.py           delta = rowsum(dO * O), which the backward pass needs
    nan_isolation.py   keeps NaN of one document away from other documents
    structure.py       makes classes that hold several values in kernels

Only the portable kernels use masks.py (which blocks of keys a tile of queries visits, and which of these blocks need a
mask), softmax.py (the online softmax) and tiles.py (the tile sizes). In a kernel's file, the functions that the kernel
calls come first, then the kernel, then the function that launches the kernel.
"""
