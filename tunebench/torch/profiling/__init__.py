"""Profiling of the workloads that a torch program runs."""
