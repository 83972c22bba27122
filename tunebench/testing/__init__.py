"""Contract suites for variants, samplers and executors, and a PostgreSQL server to test stores with.

The suites import pytest, which `tunebench` itself does not require.
"""
