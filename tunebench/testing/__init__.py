"""Contract suites for variants, samplers, executors and stores, and servers and faults to test them with.

These modules import pytest (and some hypothesis), which `tunebench` itself does not require.
"""
