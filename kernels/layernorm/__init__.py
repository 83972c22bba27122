"""Variants of layernorm."""
