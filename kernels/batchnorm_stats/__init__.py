"""Variants of batchnorm_stats."""
