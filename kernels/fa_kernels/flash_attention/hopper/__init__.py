"""Warp-specialised attention kernels for Hopper (sm_90), written in Gluon. TMA loads their inputs."""
