"""Variants of scaled_gemm."""
