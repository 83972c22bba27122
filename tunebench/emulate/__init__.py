"""Execution of CUDA kernels on the host, without a GPU; README.md in this folder explains the emulator."""
