"""Variants of strided_reduction: reductions of an expression of operands in any memory layout."""
