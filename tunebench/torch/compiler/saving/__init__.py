"""Compiled models in files, which another process runs without tracing, planning or compiling.

- `archive`: the file: members with their hashes
- `description`: what a model needs, to compare it with what is there
- `program`: the graph of an exported program with calls of kernels
- `kernel`: kernels of a file, and the operator that runs them
- `save`, `load`: the public functions
"""
