"""Kernels for Hopper (sm_90), in Gluon: warp specialised, fed by TMA."""
