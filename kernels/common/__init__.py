"""Code that kernels of several operators share, by topic."""
