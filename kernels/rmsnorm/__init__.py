"""Variants of rmsnorm."""
