"""What bounds cost: microseconds a thousand configurations, in one process and one thread.

    python benchmarks/bound.py [--rows 1000000]

For some spaces of this package: costs and bounds of all their configurations. And bounds alone of so many made-up
configurations, with every column there is, of blocks that fill the partitions of an SM and of blocks of any size.
"""

from __future__ import annotations

import argparse
import time
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
    """Return the least seconds of some repetitions."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def made_up(rows: int, least_threads: int) -> Costs:
    """Return costs of so many configurations, every column of them random."""
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
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    for key, text, name in SPACES:
        chosen, workload, device = find(key), parse(text), devices.find(name)
        table, traffic = chosen.configs(workload, device), workload.traffic()
        costs = fastest_s(lambda v=chosen, w=workload, t=table, d=device: v.costs(w, t, d))
        counted = chosen.costs(workload, table, device)
        bounds = fastest_s(lambda c=counted, t=traffic, d=device, n=len(table): bound(c, t, d, rows=n))
        per_thousand = 1e9 / len(table)
        print(
            f"{key} {text} on {name}, {len(table)} configurations: "
            f"costs {costs * per_thousand:.0f} us a thousand, bounds {bounds * per_thousand:.0f}"
        )
    h100, nothing = devices.find("h100-sxm"), Traffic(read_bytes=0, write_bytes=0)
    for least in (128, 1):
        counted = made_up(rows, least)
        seconds = fastest_s(lambda c=counted: bound(c, nothing, h100))
        print(
            f"{rows} made-up configurations of {least} threads and more: {1e9 * seconds / rows:.0f} us a thousand"
        )
    one = made_up(1, 128)
    print(f"one configuration: {1e6 * fastest_s(lambda: bound(one, nothing, h100)):.0f} us")


if __name__ == "__main__":
    main()
