"""Kernels for NVIDIA GPUs (Hopper): page order, compilation, plans, launches."""
