"""Variants of conv2d."""
