"""Rows per second that `tunebench predict --workloads` predicts, from file to file.

    python -m benchmarks.predict_rows [--rows 100000] [--device h100-sxm]

The rows are distinct workloads of six operators, drawn with a seed, so that no row can reuse the result of
another. One process on one core; the time includes reading, parsing, predicting and writing, but not the
start of Python. Peak memory is printed as well: it must not grow with the number of rows.
"""

from __future__ import annotations

import argparse
import csv
import random
import resource
import tempfile
import time
from pathlib import Path

from tunebench import device as devices
from tunebench.forecast import predict_all
from tunebench.forecast.table import predict_table
from tunebench.workloads import parse


def workload_text(rng: random.Random) -> str:
    """Return the text of a workload drawn at random."""
    m, n, k = (rng.randint(1, 16384) for _ in range(3))
    dtype = rng.choice(("f16", "bf16", "f32"))
    match rng.randrange(6):
        case 0:
            return f"gemm:m={m},n={n},k={k},dtype={dtype}"
        case 1:
            return f"gemm:m={m},n={n},k={k},dtype={dtype},batch={rng.randint(2, 64)},trans=nt"
        case 2:
            return f"softmax:rows={m},cols={n},dtype={dtype}"
        case 3:
            return f"layernorm:rows={m},cols={n},dtype={dtype}"
        case 4:
            return f"elementwise:rows={m},cols={n},dtype={dtype},expression=gelu(x)"
        case _:
            return f"attention:batch={m % 64 + 1},heads=16,seq_q={n},head_dim=64,dtype=bf16,causal=true"


def write(path: Path, rows: int, seed: int) -> None:
    """Write a table of distinct workloads."""
    rng, drawn = random.Random(seed), set[str]()
    while len(drawn) < rows:
        drawn.add(workload_text(rng))
    texts = sorted(drawn)
    rng.shuffle(texts)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["workload"], *([text] for text in texts)])


def main() -> None:
    """Time the prediction of a table and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = devices.find(options.device)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "in.csv"), Path(folder, "out.csv")
        write(source, options.rows, options.seed)
        predict_all([parse("gemm:m=1,n=1,k=1,dtype=f16")], device)  # warm up: load modules and the predictor
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        wall, cpu = time.perf_counter(), time.process_time()
        tally = predict_table(source, device, out)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if tally.rejected:
        raise SystemExit(f"{tally.rejected} rows were rejected: {tally.faults[0]}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{tally.rows} distinct rows: {tally.rows / wall:,.0f} rows/s of wall time,")
    print(f"{tally.rows / cpu:,.0f} rows/s of CPU time; {(peak - before) / 1024:.0f} MiB more than before")


if __name__ == "__main__":
    main()
