"""What emulation costs: multiply-adds a second of a matrix product on the host, and what building it takes.

    python -m benchmarks.emulation [--size 256]

Each kernel in its default configuration, run plainly, under AddressSanitizer, and under watch, which counts
and finds races. Seconds are processor time of its process, the least of three runs; the first build
of a mode includes the emulator's runtime.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from tunebench import kernels
from tunebench.device import representative
from tunebench.emulate.emulator import emulate, watch
from tunebench.workloads import parse

KERNELS = {"gemm/cuda_simt": "f32", "gemm/cuda_mma": "f16"}
MODES: dict[str, Callable[..., Any]] = {
    "plain": emulate,
    "sanitize": lambda *arguments, **options: emulate(*arguments, sanitize=True, **options),
    "watch": watch,
}


def used() -> float:
    """Return the processor seconds of all processes that this one has started."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Return the processor seconds of what a call starts."""
    began = used()
    run(*arguments, timeout_s=600)
    return used() - began


def main() -> None:
    """Print a line for each kernel and mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="m, n and k")
    size = parser.parse_args().size
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TUNEBENCH_CACHE"] = cache
        for key, dtype in KERNELS.items():
            variant, workload = kernels.variant(key), parse(f"gemm:m={size},n={size},k={size},dtype={dtype}")
            config = variant.default(workload, representative("sm_90"))
            inputs = workload.draw(np.random.default_rng(0))
            for mode, run in MODES.items():
                arguments = (variant, workload, config, inputs)
                first = seconds(run, *arguments)
                again = min(seconds(run, *arguments) for _ in range(3))
                print(
                    f"{key:15} {dtype}  {mode:8}  {size**3 / again / 1e6:8.1f} M multiply-adds/s"
                    f"  {first - again:5.2f} s to build"
                )


if __name__ == "__main__":
    main()
