"""Variants of elementwise: chains of operations generated from an expression."""
