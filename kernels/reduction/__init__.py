"""Variants of reduction: sums, means and extremes of an expression, generated from the expression."""
