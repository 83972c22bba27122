"""Variants of gated_gemm."""
