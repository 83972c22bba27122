"""Torch functions served by tuned kernels."""
