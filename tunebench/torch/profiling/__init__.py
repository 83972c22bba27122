"""Profiling of the workloads that a torch program runs: counts and times, stored as demand in the database."""
