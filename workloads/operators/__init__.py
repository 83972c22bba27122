"""Operators, one module each: dimensions, float64 reference, FLOPs, compulsory bytes and tolerance."""
