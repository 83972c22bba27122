"""Variants of gemm."""
