"""Processor time of a call of a tuned Triton kernel up to the launch, with Triton's autotuner and with ours.

    python -m benchmarks.triton_overhead [--calls 20000]

The launch itself does nothing, so that no GPU is needed: what is compared is the Python code of a call whose
key is known. Needs the extras `triton` and `torch`.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import time
from typing import Any

import torch
import triton
from triton.runtime.jit import KernelInterface

import tunebench.triton

ROUNDS = 9


def product(a: Any, b: Any, c: Any, m: int, n: int, k: int, BM: int, BN: int) -> None:
    """Stand for a kernel with the arguments of a product."""


class Launches(KernelInterface):  # type: ignore[misc]
    """A kernel whose launch does nothing."""

    def __init__(self) -> None:
        self.fn = product
        self.arg_names = list(inspect.signature(product).parameters)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Launch nothing."""


def call_us(kernel: Any, calls: int) -> float:
    """Return the processor time of a call, in microseconds."""
    a = torch.empty(8, 8)
    launch = kernel[(1,)]
    begun = time.process_time()
    for _ in range(calls):
        launch(a, a, a, 8, 8, 8)
    return (time.process_time() - begun) / calls * 1e6


def main() -> None:
    """Time both in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20000)
    calls = parser.parse_args().calls
    configs = [triton.Config({"BM": block, "BN": block}) for block in (64, 128)]
    key = ["m", "n", "k"]
    kernels = {
        "launch without autotune": Launches(),
        "triton.autotune": triton.autotune(configs, key)(Launches()),
        "tunebench.triton.autotune": tunebench.triton.autotune(configs, key)(Launches()),
    }
    known = (8, 8, 8, *[torch.float32] * 3)
    kernels["tunebench.triton.autotune"].cache[known] = configs[0]
    kernels["triton.autotune"].cache[8, 8, 8, *["torch.float32"] * 3] = configs[0]
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(ROUNDS):
        for name, kernel in kernels.items():
            times[name].append(call_us(kernel, calls))
    for name, rounds in times.items():
        sys.stdout.write(f"{name}: {statistics.median(rounds):.2f} us of processor time per call\n")


if __name__ == "__main__":
    main()
