"""Variants of scatter_add: sums of the rows of a matrix by an index."""
