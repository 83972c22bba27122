"""Pages of the dashboard on a database of a million trials: time to the first byte and to the whole page.

    python -m benchmarks.dashboard [--trials 1000000] [--repeat 20] [--folder FOLDER]

Writes a synthetic database to a temporary folder, as an SQLite file and as a PostgreSQL database (if its
server is installed), starts `tunebench dashboard` on each, and requests every page over HTTP. Publishes
`benchmarks/results/dashboard.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import http.client
import json
import math
import os
import platform
import random
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tunebench.db import RunStart, new_owner, open_store
from tunebench.db.schema import measurement_table, run_table, trial_table
from tunebench.device import described
from tunebench.testing.postgres import serving, unavailable

RESULTS = Path(__file__).parent / "results" / "dashboard.md"
DEVICES = ("a100-40-pcie", "a100-80-sxm", "h100-pcie", "h100-sxm", "h200-sxm", "l40s", "rtx-3090", "rtx-4090")
VARIANTS = {"gemm": ("cuda_mma", "cuda_simt"), "softmax": ("cuda_online",), "layernorm": ("cuda_welford",)}
PER_PAIR = 500
"""Trials of a workload on a device, so that a million trials are 2,000 such pairs."""
SAMPLES = 12
STALE, RUNNING, FINALISTS, STARTS = 0.05, 3, 4, 5
RESOURCES = json.dumps({"registers": 168, "dynamic_smem_bytes": 98304, "spill_bytes": 0, "code_bytes": 8192})
FIRST = datetime(2026, 1, 1, tzinfo=UTC)

Row = tuple[Any, ...]


def workloads(number: int) -> list[str]:
    """Return the texts of that many workloads of three operators."""
    texts = []
    for at in range(number):
        size = 128 * (1 + at // 4)
        texts.append(
            (
                f"gemm:m={size},n=4096,k=4096,dtype=f16",
                f"gemm:m={size},n=1024,k=8192,dtype=bf16,trans=nt",
                f"softmax:rows={size},cols=2048,dtype=f16",
                f"layernorm:rows={size},cols=4096,dtype=bf16",
            )[at % 4]
        )
    return texts


# -- the database ------------------------------------------------------------------------------------


def rows(trials: int, devices: Sequence[int]) -> Iterator[tuple[list[Row], list[Row], list[Row]]]:
    """Yield the rows of `run`, `trial` and `measurement`, one search at a time.

    Args:
        trials: Number of trials.
        devices: Ids of the devices.
    """
    draw = random.Random(0)
    pairs = max(1, trials // PER_PAIR)
    texts = workloads(math.ceil(pairs / len(devices)))
    number = 0
    for pair in range(pairs):
        workload, device_id = texts[pair // len(devices)], devices[pair % len(devices)]
        run_id, began = uuid.UUID(int=pair + 1).hex, FIRST + timedelta(hours=pair)
        ids = range(pair * PER_PAIR + 1, (pair + 1) * PER_PAIR + 1)
        base_us = math.exp(draw.uniform(1.0, 7.0))
        times_us = {trial_id: base_us * (1 + draw.expovariate(1.5)) for trial_id in ids}
        fastest = sorted(ids, key=times_us.__getitem__)[:FINALISTS]
        purposes = [
            *((trial_id, "search") for trial_id in ids),
            *((trial_id, "finalist") for trial_id in fastest),
        ]
        measured = []
        for at, (trial_id, purpose) in enumerate(purposes):
            number += 1
            key = (number, trial_id, run_id, purpose)
            moment = began + timedelta(seconds=6 * at)
            measured.append(_measurement(draw, key, times_us[trial_id], 0.7 * base_us, moment))
        end = _text(began + timedelta(seconds=6 * len(purposes)))
        run = (
            run_id,
            device_id,
            workload,
            "bound",
            0,
            "elsewhere",
            '{"tunebench": "0.2.0"}',
            _text(began),
            end,
        )
        trial_rows = [_trial(draw, trial_id, device_id, workload) for trial_id in ids]
        yield [(*run, 0, 0, 3000.0, 900.0, 200.0, 1500.0, 400.0, PER_PAIR, None)], trial_rows, measured


def _trial(draw: random.Random, trial_id: int, device_id: int, workload: str) -> Row:
    at = trial_id % PER_PAIR
    config = {"block_m": 32 * (1 + at % 8), "block_n": 32 * (1 + at // 8 % 8), "stages": 2 + at // 64 % 4}
    config |= {"warps": 4 + 4 * (at // 256), "split": at % 3}
    operator = workload.partition(":")[0]
    variant = f"{operator}/{VARIANTS[operator][at % len(VARIANTS[operator])]}"
    text = ",".join(f"{name}={value}" for name, value in config.items())
    stale = draw.random() < STALE
    return (trial_id, device_id, workload, variant, "r1", text, json.dumps(config), "done", None, None, stale)


def _measurement(
    draw: random.Random, key: tuple[int, int, str, str], us: float, bound_us: float, moment: datetime
) -> Row:
    """Return a row of `measurement`; its key is id, trial, run and purpose."""
    finalist = key[3] == "finalist"
    luck = 0.0 if finalist else draw.random()
    failed, aborted = luck > 0.93, 0.85 < luck <= 0.93
    samples = [] if failed else [round(us * draw.uniform(0.99, 1.02), 4) for _ in range(SAMPLES)]
    time_us = None if failed or aborted else us
    comparison = None
    if finalist:
        libraries = {
            name: {"ratio": draw.uniform(0.8, 1.6), "low": 0.8, "high": 1.7} for name in ("cublas", "torch")
        }
        comparison = json.dumps({"default": {"ratio": 1.4, "low": 1.3, "high": 1.5}, "libraries": libraries})
    detail: dict[str, Any] = {"above_us": 2 * us} if aborted else {}
    if time_us:
        detail = {
            "conditions": {"sm_clock_mhz": 1980},
            "verification": {"detail": "all elements", "worst": 0.2},
        }
    return (
        *key,
        "compile_failed" if failed else "aborted" if aborted else "measured",
        *(time_us, time_us and us * 0.995, time_us and us * 1.005, None),
        *(time_us and "cold", time_us and "reference"),
        "error: too much shared memory" if failed else None,
        bound_us,
        None if failed else json.dumps(samples),
        *(json.dumps(detail), RESOURCES, '{"driver": "580.1", "host": "node7"}', 1.2, 0.1, 0.4, key[1]),
        *(_text(moment), min(samples, default=None), "faster" if comparison else None, comparison),
    )


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f")


def write(path: Path, trials: int) -> None:
    """Write the synthetic database to a new SQLite file, and three searches that run now.

    Args:
        path: The file.
        trials: Number of trials.
    """
    with open_store(path) as store:
        for name in DEVICES:
            store.begin_run(
                RunStart(device=described()[name], workload="softmax:rows=1,cols=1", sampler="bound", seed=0)
            )
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("DELETE FROM run")
        devices = [row for (row,) in connection.execute("SELECT id FROM device ORDER BY id")]
        inserts = [_insert(table) for table in (run_table, trial_table, measurement_table)]
        for parts in rows(trials, devices):
            for insert, part in zip(inserts, parts, strict=True):
                connection.executemany(insert, part)
        now, owner = _text(datetime.now(UTC)), new_owner()
        newest = connection.execute("SELECT id FROM run ORDER BY id DESC LIMIT ?", (RUNNING,)).fetchall()
        for (run_id,) in newest:
            start = "UPDATE run SET finished_at = NULL, started_at = ?, host = ? WHERE id = ?"
            connection.execute(start, (now, owner, run_id))
            connection.execute("UPDATE measurement SET recorded_at = ? WHERE run_id = ?", (now, run_id))
        connection.commit()
        connection.execute("ANALYZE")


def _insert(table: sa.Table) -> str:
    names = [column.name for column in table.columns]
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


def copy(path: Path, url: str) -> None:
    """Copy the SQLite file into an empty PostgreSQL database.

    Args:
        path: The file.
        url: URL of the database.
    """
    import psycopg

    open_store(url).close()
    with contextlib.closing(sqlite3.connect(path)) as source, psycopg.connect(url) as target:
        for table in ("device", "run", "trial", "measurement"):
            names = [row[1] for row in source.execute(f"PRAGMA table_info({table})")]
            stale = names.index("stale") if "stale" in names else None
            times = [at for at, name in enumerate(names) if name.endswith("_at")]
            listed = ", ".join(names)
            with target.cursor().copy(f"COPY {table} ({listed}) FROM STDIN".encode()) as sink:
                for row in source.execute(f"SELECT {listed} FROM {table}"):
                    values = list(row)
                    if stale is not None:
                        values[stale] = bool(values[stale])
                    for at in times:
                        values[at] = values[at] and f"{values[at]}+00"
                    sink.write_row(values)
        for table in ("device", "trial", "measurement"):
            target.execute(f"SELECT setval('{table}_id_seq', (SELECT max(id) FROM {table}))".encode())
        target.commit()
        target.autocommit = True
        target.execute("VACUUM ANALYZE")


# -- the measurement ---------------------------------------------------------------------------------


class Server:
    """A running `tunebench dashboard`.

    Args:
        db: Path or URL of the database.
    """

    def __init__(self, db: str) -> None:
        began = time.perf_counter()
        command = [sys.executable, "-m", "tunebench", "dashboard", "--db", db, "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:(\d+)/", self._process.stdout.readline())
        assert match is not None, "the dashboard did not start"
        self.port, self.start_s = int(match[1]), time.perf_counter() - began

    def get(self, path: str) -> tuple[float, float, str]:
        """Return milliseconds to the first byte and to the whole page, and the page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        began = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        first = answer.read(1)
        first_ms = (time.perf_counter() - began) * 1000
        text = (first + answer.read()).decode()
        whole_ms = (time.perf_counter() - began) * 1000
        connection.close()
        assert answer.status == 200, f"{path}: {answer.status}"
        return first_ms, whole_ms, text

    def memory_mib(self) -> float:
        """Return the greatest resident memory so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def processor_s(self) -> float:
        """Return the processor time so far."""
        fields = (
            Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the server."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=60)


def pages(server: Server) -> dict[str, str]:
    """Return the measured pages by name; those of a workload, a trial and a search are taken from lists."""

    def found(path: str, pattern: str) -> str:
        return html.unescape(re.findall(pattern, server.get(path)[2])[0])

    def sides(path: str) -> str:
        values = re.findall(r'name="side" value="([^"]*)"', server.get(path)[2])[:2]
        return urllib.parse.urlencode([("side", html.unescape(value)) for value in values])

    workload = found("/workloads", r'href="(/workload\?[^"]*)"')
    return {
        "overview": "/",
        "workloads": "/workloads",
        "workloads by gap": "/workloads?sort=gap&order=desc",
        "searches": "/searches",
        "stale": "/stale",
        "predictions": "/predictions",
        "one workload": workload,
        "one trial": found(workload, r'href="(/trials/\d+)"'),
        "one search": found("/searches", r'href="(/searches/\w+)"'),
        "failed searches": "/searches?state=failed",
        "two searches": f"/compare?{sides('/searches')}",
        "two workloads": f"/compare?{sides('/workloads')}",
    }


def first_pages(db: str) -> list[float]:
    """Return the time of the first page after each of `STARTS` starts of the command, in milliseconds."""
    durations = []
    for _ in range(STARTS):
        server = Server(db)
        durations.append(server.get("/")[1])
        server.close()
    return sorted(durations)


def measure(db: str, repeat: int) -> tuple[list[str], dict[str, float]]:
    """Return the rows of the table of pages, and figures of the server.

    Args:
        db: Path or URL of the database.
        repeat: Requests of each page.
    """
    first_ms = first_pages(db)
    server = Server(db)
    try:
        began = time.perf_counter()
        server.get("/")
        list_ms = server.get("/workloads")[1]
        while "Reading the database" in server.get("/")[2]:
            time.sleep(0.5)
        figures = {
            "start_s": server.start_s,
            "first_ms": statistics.median(first_ms),
            "slowest_first_ms": first_ms[-1],
            "list_ms": list_ms,
            "read_s": time.perf_counter() - began,
            "read_processor_s": server.processor_s(),
        }
        lines = [line(server, name, path, repeat) for name, path in pages(server).items()]
        return lines, {**figures, "memory_mib": server.memory_mib()}
    finally:
        server.close()


def line(server: Server, name: str, path: str, repeat: int) -> str:
    """Request a page several times, and return its row of the table."""
    before = server.processor_s()
    times = [server.get(path) for _ in range(repeat)]
    processor_ms = (server.processor_s() - before) / repeat * 1000
    first, whole = (sorted(durations[at] for durations in times) for at in (0, 1))
    size = len(times[0][2].encode()) / 1024
    figures = (
        statistics.median(first),
        statistics.median(whole),
        whole[math.ceil(0.9 * repeat) - 1],
        whole[-1],
    )
    return f"| {name} | {' | '.join(f'{figure:.0f}' for figure in (*figures, processor_ms, size))} |"


def section(title: str, db: str, repeat: int, size_mb: float) -> str:
    """Measure the pages of one database, and return the text for the results."""
    lines, figures = measure(db, repeat)
    head = (
        "| page | first byte, median ms | whole page, median ms | 90th percentile | slowest "
        "| processor ms | KiB |\n"
        "|---|---|---|---|---|---|---|"
    )
    return f"""## {title}

{head}
{chr(10).join(lines)}

- database: {size_mb:,.0f} MB
- command until it listens: {figures["start_s"]:.1f} s
- first page right after the start: {figures["first_ms"]:.0f} ms (median of {STARTS} starts, slowest \
{figures["slowest_first_ms"]:.0f} ms)
- list of workloads before their times are read: {figures["list_ms"]:.0f} ms
- until the times of all workloads are read, in the background: {figures["read_s"]:.0f} s \
({figures["read_processor_s"]:.0f} s of processor time)
- most resident memory of the dashboard: {figures["memory_mib"]:.0f} MiB
"""


def introduction(trials: int, repeat: int) -> str:
    """Return what was measured, and where."""
    return f"""# Dashboard

`python -m benchmarks.dashboard` writes a synthetic database of {trials:,} trials: {trials // PER_PAIR:,}
workloads (on {len(DEVICES)} devices in all) with {PER_PAIR} trials and {FINALISTS} finalists each, and
{SAMPLES} samples a measurement. {STALE:.0%} of the trials are stale, and {RUNNING} searches run. Each page
is requested {repeat} times over HTTP, one request after another; the work of the browser is not included.
Processor time is that of the dashboard, without the PostgreSQL server, which has 16 MB of shared buffers.
The machine has {os.cpu_count()} processors ({platform.machine()}, Python {platform.python_version()}) and had
other work at the same time: load {os.getloadavg()[0]:.1f}.
"""


def main() -> None:
    """Write the databases, measure, and publish the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="keep and reuse the SQLite file of this folder")
    arguments = parser.parse_args()
    sections = []
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / f"dashboard-{arguments.trials}.db"
        if not path.exists():
            write(path, arguments.trials)
        sections.append(section("SQLite", str(path), arguments.repeat, path.stat().st_size / 1e6))
        if (missing := unavailable()) is None:
            url = stack.enter_context(serving()).new_database()
            copy(path, url)
            engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
            with engine.connect() as connection:
                size = connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one()
            engine.dispose()
            sections.append(section("PostgreSQL", url, arguments.repeat, size / 1e6))
        else:
            sections.append(f"## PostgreSQL\n\nNot measured: {missing}.\n")
    RESULTS.write_text(
        "\n".join([introduction(arguments.trials, arguments.repeat), *sections]), encoding="utf-8"
    )
    print(RESULTS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
