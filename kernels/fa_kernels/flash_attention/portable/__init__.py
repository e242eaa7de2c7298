"""The portable attention kernels, in Triton. forward.py is the file to read first.

forward.py       the forward pass, with the online softmax of ../softmax.py
backward.py      the backward pass: a kernel for dK and dV, and a kernel for dQ
columns.py       loads, stores and matmuls of heads whose width is not a power of two
decode.py        attention of a few queries over a KV cache, with the phases in decode_tile.py
cache.py         the layout of the KV cache, and the kernel that appends to it
repair.py        runs the tiles of forward.py and backward.py again, where the Hopper kernels have marked NaN
"""
