"""Interfaces of other tuners: `tunebench.compat.kernel_tuner`."""
