"""Warp-specialised attention kernels for Hopper (sm_90), written in Gluon. TMA loads their inputs.

docs/hopper.md explains Gluon, lists the function of each role, and says in which order to read the files.
"""
