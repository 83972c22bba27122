"""Commands on a database of millions of rows: wall time, processor time and memory.

    python -m benchmarks.large_database [--trials 2500000] [--smaller 250000] [--folder FOLDER]

Writes the synthetic database of `benchmarks.dashboard` with two numbers of trials, and runs each command in a
new process on both. A file that is in the folder already is used. Publishes
`benchmarks/results/large_database.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.dashboard import Server, write

RESULTS = Path(__file__).parent / "results" / "large_database.md"
WORKLOAD = ("--workload", "gemm:m=128,n=4096,k=4096,dtype=f16", "--device", "h100-sxm")
COMMANDS = {
    "lookup": ("lookup", *WORKLOAD),
    "lookup of a near workload": (
        "lookup",
        "--workload",
        "gemm:m=130,n=4096,k=4096,dtype=f16",
        *WORKLOAD[2:],
    ),
    "show": ("show", *WORKLOAD),
    "db stats": ("db", "stats"),
    "db runs": ("db", "runs"),
    "db verify": ("db", "verify"),
}
IDLE_S = 0.3
"""Processor time in ten times as long below which the dashboard counts as idle, in seconds."""

TEXT = """# Large databases

`python -m benchmarks.large_database` on {date}, with {machine}
that had other work at the same time: load {load:.0f}. Each command runs once, in a new process. Memory is the
most resident memory of the process. The time of the dashboard is that from the command to its third page; its
processor time includes the reading of all times in the background.

{table}

- No record is of an installed source, so that a lookup finds no usable one: it tries a fixed number of the
  nearest workloads on this architecture and as many on others, and predicts. The smaller database has fewer.
  A lookup of a usable record [does not depend on the size](lookup/README.md).
- `db verify` reads every row and lists findings (exit code 4). It keeps the ids of trials whose source has
  changed, half of all here, for `--fix`: about 40 bytes each.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a command took.

    Attributes:
        wall_s: Wall time.
        processor_s: Processor time.
        memory_mib: Most resident memory.
        exit_code: Its exit code.
    """

    wall_s: float
    processor_s: float
    memory_mib: float
    exit_code: int


def cost_of(command: tuple[str, ...], db: Path) -> Cost:
    """Run a command on a database in a new process.

    Args:
        command: Words after `tunebench`.
        db: The database.
    """
    words = [sys.executable, "-P", "-m", "tunebench", *command, "--db", str(db)]
    began = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(
        wall_s=time.perf_counter() - began,
        processor_s=usage.ru_utime + usage.ru_stime,
        memory_mib=usage.ru_maxrss / 1024,
        exit_code=process.returncode,
    )


def dashboard_cost(db: Path) -> Cost:
    """Start the dashboard, read its first pages, and end it when it has read all times in the background.

    Args:
        db: The database.
    """
    began = time.perf_counter()
    server = Server(str(db))
    try:
        for path in ("/", "/workloads", "/searches"):
            server.get(path)
        wall_s, used_s = time.perf_counter() - began, -1.0
        while server.processor_s() > used_s + IDLE_S:
            used_s = server.processor_s()
            time.sleep(10 * IDLE_S)
        return Cost(
            wall_s=wall_s, processor_s=server.processor_s(), memory_mib=server.memory_mib(), exit_code=0
        )
    finally:
        server.close()


def rows_of(db: Path) -> tuple[int, int]:
    """Return the numbers of trials and of rows of trials and measurements together."""
    with contextlib.closing(sqlite3.connect(db)) as connection:
        trials, measurements = (
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("trial", "measurement")
        )
    return trials, trials + measurements


def table_of(dbs: list[Path]) -> str:
    """Return a table of the costs of every command on each database.

    Args:
        dbs: The databases, the smaller ones first.
    """
    sizes = [(*rows_of(db), db.stat().st_size / 1e6) for db in dbs]
    heads = [f"{rows:,} rows ({trials:,} trials), {megabytes:,.0f} MB" for trials, rows, megabytes in sizes]
    lines = [f"| command | {' | '.join(heads)} |", "|---|" + "---|" * len(dbs)]
    measures = {name: lambda db, words=words: cost_of(words, db) for name, words in COMMANDS.items()}
    for name, measure in {**measures, "dashboard": dashboard_cost}.items():
        cells = []
        for db in dbs:
            cost = measure(db)
            status = f", exit code {cost.exit_code}" if cost.exit_code else ""
            times = f"{cost.wall_s:.1f} s, {cost.processor_s:.1f} s of processor"
            cells.append(f"{times}, {cost.memory_mib:.0f} MiB{status}")
            print(name, cells[-1], flush=True)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and publish the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=2_500_000)
    parser.add_argument("--smaller", type=int, default=250_000)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dbs = [
            (options.folder or Path(folder)) / f"{trials}.db" for trials in (options.smaller, options.trials)
        ]
        for db in dbs:
            if not db.exists():
                write(db, int(db.stem))
        table = table_of(dbs)
    machine = f"{os.cpu_count()} processors ({platform.machine()}, Python {platform.python_version()})"
    RESULTS.write_text(
        TEXT.format(
            date=f"{datetime.now(UTC):%d %B %Y}", machine=machine, load=os.getloadavg()[0], table=table
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
