"""Fuzzers of imported files, databases and workload texts, with one command each."""
