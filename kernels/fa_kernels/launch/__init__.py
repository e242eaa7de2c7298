"""Records and repeats kernel launches, which saves host time.

record.py             records the launches of a call, and repeats them for other tensors of the same shapes
triton_launcher.py    Triton's private launcher, which record.py calls
descriptors.py        TMA descriptors of tensors, for the Hopper kernels
"""
