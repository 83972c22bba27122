"""Cost of lower bounds: microseconds per 1000 configurations, in one process and one thread.

    python -m benchmarks.bound [--rows 1000000]

Two measurements: the costs and bounds of all configurations of some spaces of tunebench, and the bounds of
random synthetic costs with every column set. The synthetic blocks have either at least 128 threads, which
fill the partitions of an SM, or any number of threads.
"""

from __future__ import annotations

import argparse
import functools
import timeit
from collections.abc import Callable

import numpy as np

from tunebench import device as devices
from tunebench.bound import bound
from tunebench.kernels import variant as find
from tunebench.variant import Costs
from tunebench.workload import Traffic
from tunebench.workloads import parse

SPACES = (
    ("gemm/cuda_simt", "gemm:m=4096,n=4096,k=4096,dtype=f32", "a10"),
    ("gemm/cuda_mma", "gemm:m=512,n=512,k=4096,dtype=f16", "a100-80-sxm"),
    ("softmax/cuda_block", "softmax:rows=4096,cols=4096,dtype=f32", "h100-sxm"),
)
REPEATS = 7


def fastest_s(work: Callable[[], object]) -> float:
    """Return the shortest time of `REPEATS` runs, in seconds."""
    return min(timeit.repeat(work, number=1, repeat=REPEATS))


def made_up(rows: int, least_threads: int) -> Costs:
    """Return random costs, with every column set.

    Args:
        rows: Number of configurations.
        least_threads: Fewest threads of a block.
    """
    rng = np.random.default_rng(0)
    full = rng.integers(1, 10_000, rows).astype(np.float64)
    work = ("fma", "mma_flop", "sfu", "smem_traffic_bytes", "fill_bytes", "accesses", "instructions")
    columns = {name: rng.uniform(0, 1e7, rows) for name in (*work, "chain_clocks")}
    return Costs(
        blocks=full + 0.5,
        full_blocks=full,
        threads=rng.integers(least_threads, 1025, rows),
        smem_bytes=rng.integers(0, 100_000, rows),
        registers=rng.integers(16, 256, rows),
        mma_dtype="f16",
        **columns,
    )


def main() -> None:
    """Print the time of costs and bounds for each space and for synthetic costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="synthetic configurations")
    rows = parser.parse_args().rows
    for key, text, name in SPACES:
        chosen, workload, device = find(key), parse(text), devices.find(name)
        table, traffic = chosen.configs(workload, device), workload.traffic()
        counted = chosen.costs(workload, table, device)
        costs = fastest_s(functools.partial(chosen.costs, workload, table, device))
        bounds = fastest_s(functools.partial(bound, counted, traffic, device, rows=len(table)))
        to_us = 1e9 / len(table)
        print(f"{key} {text} on {name}, {len(table)} configurations:")
        print(f"  costs {costs * to_us:.0f} us, bounds {bounds * to_us:.0f} us per 1000 configurations")
    h100, nothing = devices.find("h100-sxm"), Traffic(read_bytes=0, write_bytes=0)
    for least in (128, 1):
        bounds = fastest_s(functools.partial(bound, made_up(rows, least), nothing, h100))
        print(
            f"{rows} synthetic configurations of at least {least} threads: "
            f"{1e9 * bounds / rows:.0f} us per 1000 configurations"
        )
    single_s = fastest_s(functools.partial(bound, made_up(1, 128), nothing, h100))
    print(f"one configuration: {1e6 * single_s:.0f} us")


if __name__ == "__main__":
    main()
