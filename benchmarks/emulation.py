"""Cost of emulation: build time and speed of a matrix product on the host, in multiply-adds per second.

    python -m benchmarks.emulation [--size 256]

Each kernel runs in its default configuration in three modes: plain, with AddressSanitizer, and with watch,
which counts accesses and finds races. Times are processor seconds of the child process, the shortest of three
runs. The first build of a mode includes the emulator's runtime.
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
    """Return the processor time of all finished child processes, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Return the processor time of the processes that a call starts, in seconds."""
    began = used()
    run(*arguments, timeout_s=600)
    return used() - began


def main() -> None:
    """Print the speed and the build time of each kernel and mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="m, n and k, default 256")
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
                later = min(seconds(run, *arguments) for _ in range(3))
                print(
                    f"{key:15} {dtype}  {mode:8}  {size**3 / later / 1e6:8.1f} million multiply-adds/s"
                    f"  {first - later:5.2f} s build time"
                )


if __name__ == "__main__":
    main()
