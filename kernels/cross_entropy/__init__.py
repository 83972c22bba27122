"""Variants of cross_entropy."""
