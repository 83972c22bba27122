"""One operator a module: dimensions, float64 reference, FLOPs, compulsory bytes, tolerance."""
