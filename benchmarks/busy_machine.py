"""A softmax tuned on a quiet processor and among busy loops: `python -m benchmarks.busy_machine`.

Tunes the workload of the README on this machine's processor, once as the machine is and once while loops keep
its cores busy, and prints the times of best, default and baselines, the order by time, and the noise that the
report states. The order must be the same; on a quiet machine nothing is stated for the first run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunebench import tune
from tunebench.tuning import Plan, Report

WORKLOAD = "softmax:rows=512,cols=1024,dtype=f32"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run loops in processes of their own within the context."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def times_us(report: Report) -> dict[str, float]:
    """Return the times of best, default and baselines, in microseconds."""
    times = {"best": report.median_us, "default": report.default_us}
    times |= {baseline.name: baseline.median_us for baseline in report.baselines}
    return {name: us for name, us in times.items() if us is not None}


def main() -> None:
    """Tune with and without busy loops, and print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--loops", type=int, default=8)
    options = parser.parse_args()
    for count in (0, options.loops):
        with tempfile.TemporaryDirectory() as folder, busy_loops(count):
            plan = Plan(trials=options.trials, sampler="bound")
            report = tune(WORKLOAD, device="cpu", db=Path(folder, "busy.db"), plan=plan)
        times = times_us(report)
        print(f"{count} busy loops: {report.variant} {report.config}")
        print("  " + ", ".join(f"{name} {us:.1f} us" for name, us in times.items()))
        print("  " + " <= ".join(sorted(times, key=times.__getitem__)))
        for line in report.noise:
            print(f"  noise: {line}")


if __name__ == "__main__":
    main()
