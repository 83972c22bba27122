"""Errors of every variant of the package on extreme inputs: the table of `docs/guide/numerics.md`.

`python -m tests.kernels.extreme_inputs` prints it, in a few minutes.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests.kernels import kernel_checks as checks
from tests.kernels.cuda_cases import WORKLOADS
from tests.support import package_variants
from tunebench import workloads
from tunebench.device import local_cpu
from tunebench.emulate.emulator import emulate
from tunebench.emulate.numba_simulator import simulate
from tunebench.variant import CudaVariant, NumbaCpuVariant, NumbaCudaVariant
from tunebench.workload import Workload

TARGETS: Mapping[str, tuple[type[Any], Callable[..., dict[str, Any]]]] = {
    "Numba, processor": (NumbaCpuVariant, checks.run_on_cpu),
    "CUDA C++, emulated": (CudaVariant, emulate),
    "Numba-CUDA, simulated": (NumbaCudaVariant, simulate),
}
"""Base class of the variants of each target, and the function that runs a configuration."""


def errors(target: str) -> dict[tuple[str, str], list[float]]:
    """Return the largest error of each case with the default configuration, by operator and type."""
    base, run = TARGETS[target]
    device = local_cpu() if base is NumbaCpuVariant else checks.H100
    shares: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for variant in package_variants(base):
        for text in WORKLOADS[variant.operator.operator]:
            workload: Workload = workloads.parse(text)
            if variant.refuses(workload, device) is not None:
                continue
            config = variant.default(workload, device)
            if base is not NumbaCpuVariant:
                workload = variant.emulation_workload(workload, config)
            inputs = checks.with_extremes(workload)
            error = checks.worst(workload, inputs, run(variant, workload, config, inputs))
            shares[workload.operator, workload.dtype].append(error)
    return shares


def table() -> str:
    """Return the number of cases and their largest error, by operator, type and target."""
    by_target = {target: errors(target) for target in TARGETS}
    lines = [f"| operator | type | {' | '.join(TARGETS)} |", f"|---|---|{'--:|' * len(TARGETS)}"]
    for operator, dtype in sorted({key for shares in by_target.values() for key in shares}):
        cells = [shares.get((operator, dtype), []) for shares in by_target.values()]
        texts = [f"{len(cell)} ({max(cell):.2f})" if cell else "" for cell in cells]
        lines.append(f"| {operator} | {dtype} | {' | '.join(texts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
