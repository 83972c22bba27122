"""Checks for tests of single kernels: planted faults, results against the tolerance, instruction counts."""

from __future__ import annotations

import collections
import struct
from typing import Any

import numpy as np

from tunebench.binary import cubin
from tunebench.space import Config
from tunebench.workload import Workload

HGMMA, QGMMA, UTMALDG, USETMAXREG = 0x1F0, 0x1F3, 0x1B4, 0x1C8
"""Lower 9 bits of an instruction of 128, as nvdisasm decodes them for sm_90a."""


def planted(variant: Any, old: str, new: str) -> Any:
    """Return the variant with `new` in place of `old` in its source, a fault on purpose.

    If `old` does not occur exactly once, `source` raises LookupError, which no test takes for a wrong result.
    """

    class Changed(type(variant)):  # type: ignore[misc]
        def source(self, workload: Any, config: Config) -> str:
            text = super().source(workload, config)
            if text.count(old) != 1:
                raise LookupError(f"{text.count(old)} places to plant a fault, not one: {old!r}")
            return str(text.replace(old, new))

    return Changed()


def assert_right(workload: Workload, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Check every element of every output against the operator's tolerance; NaN is always wrong."""
    tolerance = workload.tolerance()
    exact = {name: value.astype(np.float64) for name, value in inputs.items()}
    for name, reference in workload.reference(exact).items():
        allowed = tolerance.eps_out * np.abs(reference.value) + tolerance.eps_acc * reference.scale
        error = np.abs(outputs[name].astype(np.float64) - reference.value)
        assert np.all(error <= allowed), name


def opcodes(payload: bytes, bits: int) -> collections.Counter[int]:
    """Return the number of instructions of a cubin by their `bits` lower bits; each has 128 bits."""
    found: collections.Counter[int] = collections.Counter()
    for section in cubin._sections(payload):
        if section.name.startswith(".text."):
            found.update(word % 2**bits for word, _ in struct.iter_unpack("<QQ", section.data))
    return found
