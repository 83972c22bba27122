"""Variants of grouped_gemm."""
