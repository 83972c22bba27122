"""Cost of a lookup by database size: a repeated lookup, the first answer of a fresh process, and memory.

    python -m benchmarks.lookup [--records 1000 10000 100000 1000000] [--repeats 9] [--only-locked]

Every workload has 100 records of one variant on one device. A fresh process is measured from before its start
to its answer, alternately with a bare Python interpreter; medians. `first_ms` is the very first process,
which checks with the variant whether the record is stale. Later processes read the result of that check from
the cache folder.

`locked` are milliseconds of lookups of a process that runs already, while another process holds an exclusive
lock: wall and processor time of the first lookup, which copies the file, of the lookup of another workload,
and of a repeated one with a check of the file; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import tunebench
from tunebench.db import MeasurementBatch, NewMeasurement, RunStart, TrialKey, open_store
from tunebench.device import described
from tunebench.kernels import variant
from tunebench.outcome import Measured, Result, Verification
from tunebench.workloads import parse

DEVICE = described()["h100-sxm"]
VARIANT = variant("gemm/cuda_mma")
EACH = 100
RIGHT = Verification(how="reference", detail="every element")

CHILD = """
import time
{imports}
{ask}
ended = time.time()
resident = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
print(ended, resident.split()[1])
"""
LOOKUP = (
    "import warnings; warnings.simplefilter('ignore')\n"
    "answer = tunebench.lookup_workload({workload!r}, device='h100-sxm', db={db!r})\n"
    "assert answer.how == {how!r}, answer"
)


def workloads(count: int) -> Iterator[str]:
    """Yield workloads: matrix products of many sizes."""
    for number in range(count):
        yield f"gemm:m={64 * (number % 500 + 1)},n={128 * (number // 500 + 1)},k=4096,dtype=f16"


def fill(path: Path, records: int) -> None:
    """Create a database of random times.

    Only the best record of each workload has the current revision; the others are never checked.

    Args:
        path: Database file.
        records: Number of records.
    """
    rng = np.random.default_rng(0)
    table = VARIANT.configs(parse(next(workloads(1))), DEVICE)
    configs = [table.config(int(row)) for row in rng.choice(len(table), EACH, replace=False)]
    with open_store(path) as store:
        for text in workloads(records // EACH):
            workload, times = parse(text), rng.uniform(50.0, 100.0, EACH)
            best = int(times.argmin())
            measurements = []
            for index, (config, us) in enumerate(zip(configs, times.tolist(), strict=True)):
                revision = VARIANT.revision(workload, config) if index == best else "unasked"
                key = TrialKey(
                    device=DEVICE.key, workload=text, variant=VARIANT.key, revision=revision, config=config
                )
                outcome = Measured(
                    median_us=us,
                    ci_us=(us, us),
                    samples_us=(us,),
                    cache="cold",
                    verification=RIGHT,
                    conditions={},
                )
                measurements.append(NewMeasurement(key=key, result=Result(outcome=outcome)))
            start = RunStart(device=DEVICE, workload=text, sampler="bound", seed=0)
            store.add([MeasurementBatch(start=start, measurements=tuple(measurements))])


def fresh(imports: str, ask: str = "") -> tuple[float, float]:
    """Run a fresh process, and return its milliseconds from start to answer and its memory in MiB.

    Args:
        imports: Import statements of the process.
        ask: Statements that look up the answer.
    """
    script = CHILD.format(imports=imports, ask=ask)
    began = time.time()
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    ended, kilobytes = run.stdout.split()
    return (float(ended) - began) * 1e3, int(kilobytes) / 1024


def cold(db: Path, workload: str, how: str, repeats: int) -> dict[str, float]:
    """Return time and memory of the first answer of a fresh process, in total and beyond a bare interpreter.

    Args:
        db: Database file.
        workload: Workload to look up.
        how: Expected kind of answer.
        repeats: Number of processes.
    """
    ask = LOOKUP.format(workload=workload, db=str(db), how=how)
    imports = (
        "import tunebench\ntunebench.lookup_workload = __import__('tunebench.answer').answer.lookup_workload"
    )
    first_ms, _ = fresh(imports, ask)
    rounds = [(fresh(""), fresh(imports, ask)) for _ in range(repeats)]  # alternate: load affects both
    return {
        "first_ms": first_ms,
        "ms": statistics.median(asked[0] for _, asked in rounds),
        "beyond_python_ms": statistics.median(asked[0] - bare[0] for bare, asked in rounds),
        "beyond_python_mib": statistics.median(asked[1] - bare[1] for bare, asked in rounds),
    }


def hot(db: Path) -> dict[str, float]:
    """Return the nanoseconds of a repeated lookup, and of a dictionary lookup by the same keyword arguments.

    They are timed in turn, 500 calls at a time; the ratios are medians over the turns.
    """
    os.environ["TUNEBENCH_DB"] = str(db)
    cache: dict[object, int] = {}

    def by_dictionary(
        operator: str, *, device: object = None, db: object = None, strict: bool = False, **dimensions: object
    ) -> object:
        return cache[(operator, device, db, strict, *dimensions.items())]

    cache["gemm", "h100-sxm", None, False, ("m", 64), ("n", 128), ("k", 4096), ("dtype", "f16")] = 1
    keywords = "('gemm', m=64, n=128, k=4096, dtype='f16', device='h100-sxm')"
    asked = {
        "dictionary": f"by_dictionary{keywords}",
        "keywords": f"lookup{keywords}",
        "text": "lookup('gemm:m=64,n=128,k=4096,dtype=f16', device='h100-sxm')",
    }
    names = {"by_dictionary": by_dictionary, "lookup": tunebench.lookup}
    turns = [
        {name: timeit.timeit(call, globals=names, number=500) / 500 * 1e9 for name, call in asked.items()}
        for _ in range(400)
    ]
    figures = {f"{name}_ns": min(turn[name] for turn in turns) for name in asked}
    for name in ("keywords", "text"):
        figures[f"{name}_over_dictionary"] = statistics.median(
            turn[name] / turn["dictionary"] for turn in turns
        )
    return figures


HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2].split(";"):
    connection.execute(statement).fetchall()
print("held", flush=True)
sys.stdin.read()
"""
LOCKS = {
    "wal": "PRAGMA journal_mode = WAL; PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE; "
    "CREATE TABLE IF NOT EXISTS filler (x); INSERT INTO filler VALUES (1); COMMIT; BEGIN EXCLUSIVE",
    "journal": "PRAGMA journal_mode = DELETE; BEGIN EXCLUSIVE",
}


def locked(db: Path, repeats: int) -> dict[str, dict[str, object]]:
    """Return the milliseconds of lookups while another process has locked the database.

    Args:
        db: Database file.
        repeats: Number of locks.
    """
    cache = tunebench.answer._cache.lookup_cache
    texts = [text for text, _ in zip(workloads(3), range(3), strict=False)]
    times: dict[str, dict[str, list[tuple[float, float]]]] = {}
    answered: dict[str, str] = {}

    def ask(lock: str, name: str, text: str) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        answer = tunebench.answer.lookup_workload(text, device="h100-sxm", db=db)
        spent = (time.perf_counter() - began, time.process_time() - cpu)
        times.setdefault(lock, {}).setdefault(name, []).append(spent)
        if name == "first":
            answered[lock] = answer.how

    for text in texts:  # what only the first lookups of a process import and check
        tunebench.answer.lookup_workload(text, device="h100-sxm", db=db)
    for lock, statements in LOCKS.items():
        for _ in range(repeats):
            for view in cache.views.values():
                view.close()
            cache.views, cache.asked, cache.answers = {}, {}, {}
            with subprocess.Popen(
                [sys.executable, "-c", HOLDER, str(db), statements],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as holder:
                assert holder.stdout is not None
                assert holder.stdout.readline() == "held\n"
                ask(lock, "first", texts[0])
                ask(lock, "other", texts[1])
                cache.due = 0.0
                ask(lock, "repeated", texts[0])
                holder.communicate()
    return {
        lock: {
            "how": answered[lock],
            **{
                f"{name}_{kind}_ms": 1e3 * statistics.median(spent[column] for spent in spans)
                for name, spans in by_name.items()
                for column, kind in enumerate(("wall", "cpu"))
            },
        }
        for lock, by_name in times.items()
    }


def kept_bytes(db: Path, count: int) -> float:
    """Return the memory of each cached answer of a process, in bytes.

    Args:
        db: Database file.
        count: Number of different lookups.
    """
    import tracemalloc

    chosen = list(workloads(count))
    tunebench.answer.lookup_workload(chosen[0], device="h100-sxm", db=db)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for text in chosen[1:]:
        tunebench.answer.lookup_workload(text, device="h100-sxm", db=db)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / (count - 1)


def main() -> None:
    """Print a JSON line of results for each database size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--records", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000], help="database sizes"
    )
    parser.add_argument("--repeats", type=int, default=9, help="fresh processes per figure, default 9")
    parser.add_argument("--only-locked", action="store_true", help="only lookups of a locked database")
    options = parser.parse_args()
    warnings.simplefilter("ignore", tunebench.Unmeasured)
    warnings.simplefilter("ignore", RuntimeWarning)  # of locked databases
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNEBENCH_CACHE"] = folder
        for records in options.records:
            db = Path(folder) / f"{records}.db"
            began = time.perf_counter()
            fill(db, records)
            filled_s = time.perf_counter() - began
            size = {"records": records, "mib": db.stat().st_size / 2**20, "filled_s": filled_s}
            while_locked = locked(db, options.repeats)
            if options.only_locked:
                print(json.dumps({**size, "locked": while_locked}), flush=True)
                db.unlink()
                continue
            workload = next(workloads(1))
            lookups = {
                "exact": (workload, "measured here"),
                "nearest": ("gemm:m=100,n=200,k=4000,dtype=f16", "neighbour"),
                "predicted": ("softmax:rows=64,cols=64,dtype=f32", "predicted"),
            }
            row = {name: cold(db, text, origin, options.repeats) for name, (text, origin) in lookups.items()}
            print(
                json.dumps(
                    {
                        **size,
                        "locked": while_locked,
                        "hot": hot(db),
                        "kept_bytes": kept_bytes(db, min(1000, records // EACH)),
                        **row,
                    }
                ),
                flush=True,
            )
            db.unlink()


if __name__ == "__main__":
    main()
