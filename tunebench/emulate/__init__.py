"""Execution of CUDA kernels on the host, without a GPU."""
