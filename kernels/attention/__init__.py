"""Variants of attention."""
