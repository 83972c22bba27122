"""Profiling of the workloads that a torch program runs; counts and times go to the database."""
