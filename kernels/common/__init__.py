"""Code that the kernels of several operators share, by topic."""
