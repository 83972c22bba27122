"""Variants of strided_elementwise: chains of operations on operands in any memory layout."""
