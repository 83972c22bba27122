"""Variants of softmax."""
