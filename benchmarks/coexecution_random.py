"""Random programs under eager PyTorch and `coexecute`: equality of values, side effects and exceptions.

    python -m benchmarks.coexecution_random [--programs 2000] [--out FILE.jsonl] [--table FILE.md]
    python -m benchmarks.coexecution_random --heads --steps 48 [--programs 200]
    python -m benchmarks.coexecution_random --show 17

Program i is made by `benchmarks.random_programs` from seed i. It runs co-executed whenever its path is known,
and a second time in eager iterations whose updates by optimizers are recorded functions after three updates.
With ``--heads`` it runs with heads instead, which are traced at once and used whether or not they are faster;
the programs then are others, whose steps use up to their update only what heads can contain.
Compared are results, inputs after the step, gradients, parameters, buffers, optimizer state, learning rates,
attributes, printed text, recorded effects, exceptions (type and message), settings of torch, the random state
of torch, Python and NumPy, and versions of all tensors.

Programs run in worker processes, so that a crash or a hang is the result of one program. Each result is saved
as one line. The same command runs only what is missing for the present code, also after it was killed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from benchmarks.coexecution import (
    TOLERANCE,
    Record,
    differences,
    engine_revision,
    load,
    run_program,
    save,
    version_differences,
)
from benchmarks.coexecution_time import heads_at_once
from benchmarks.random_programs import random_source, source_program
from tunebench.training import coexecute
from tunebench.training.coexecution import _update
from tunebench.training.coexecution._testing import forced

CHUNK = 25
"""Programs per worker process."""

_CALLS = 3
"""Number of updates by an optimizer before one is recorded."""


def examine(number: int, steps: int, *, heads: bool = False) -> Record:
    """Run a program under eager and co-executed, or with heads, and return what differs."""
    make = source_program(random_source(random.Random(number), traceable=heads), f"<program {number}>")
    expected = run_program(make, lambda step: step, steps, raises=True)
    step = None

    def wrap(plain):  # type: ignore[no-untyped-def]
        nonlocal step
        step = coexecute(plain)
        if heads:
            step._policy.reason = "its heads are compared"
        return step

    with heads_at_once() if heads else forced():
        got = run_program(make, wrap, steps, raises=True)
    report = coexecute.report(step)
    with mock.patch.object(_update, "_CALLS", _CALLS):
        updated = got if heads else run_program(make, wrap, steps, raises=True)
    return {
        "program": number,
        "steps": steps,
        "differences": differences(expected, got)[:5],
        "beyond tolerance": differences(expected, got, TOLERANCE)[:5],
        "versions": version_differences(expected, got)[:5],
        "differences of updates": differences(expected, updated)[:5],
        "updates": coexecute.report(step).updates,
        "raised": len(expected.raised),
        "traced": report.traced,
        "coexecuted": report.coexecuted,
        "diverged": report.diverged,
        "operations": report.operations,
        "heads": report.heads,
        "plain heads": report.plain_heads,
    }


# -- worker --------------------------------------------------------------------------------------------------


def work(first: int, last: int, arguments: argparse.Namespace) -> None:
    """Print the records of programs first to last - 1; exit at the first that exceeds the time limit."""
    warnings.simplefilter("ignore")
    for number in range(first, last):
        faulthandler.dump_traceback_later(arguments.timeout_s, exit=True)
        record = examine(number, arguments.steps, heads=arguments.heads)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(record), flush=True)


def _records(first: int, last: int, arguments: argparse.Namespace) -> Iterator[Record]:
    """Yield the records of programs first to last - 1, computed in other processes."""
    while first < last:
        command = [sys.executable, "-m", "benchmarks.coexecution_random", "--worker", str(first), str(last)]
        command += ["--steps", str(arguments.steps), "--timeout-s", str(arguments.timeout_s)]
        command += ["--heads"] if arguments.heads else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            if line.startswith('{"program"'):
                yield json.loads(line)
                first += 1
        if first < last:
            reason = done.stderr.strip()[-2000:]
            yield {
                "program": first,
                "steps": arguments.steps,
                "error": f"exit status {done.returncode}: {reason}",
            }
            first += 1


# -- table ---------------------------------------------------------------------------------------------------


def _differences(record: Record) -> list[str]:
    """Return what differs from eager beyond rounding, in either run."""
    lines: list[str] = record["beyond tolerance"] + record["differences of updates"]
    return lines


def _differs(record: Record) -> bool:
    """Return whether a program differed from eager, crashed, or exceeded the time limit."""
    return "error" in record or bool(_differences(record))


def table(records: list[Record]) -> str:
    """Return a summary of the records as Markdown."""
    ran = [record for record in records if "error" not in record]
    total = Counter(
        {
            key: sum(record[key] for record in ran)
            for key in ("traced", "coexecuted", "diverged", "updates", "heads")
        }
    )
    rows = [
        ("programs", len(records)),
        (
            "equal to eager to the last bit, side effects included",
            sum(not program_record["differences"] for program_record in ran),
        ),
        (
            f"equal with tensors within {TOLERANCE:g}",
            sum(not program_record["beyond tolerance"] for program_record in ran),
        ),
        (
            "equal to the last bit in eager iterations with recorded updates",
            sum(not program_record["differences of updates"] for program_record in ran),
        ),
        ("different", sum(map(_differs, ran))),
        (
            "different in version counters only",
            sum(
                bool(program_record["versions"]) and not program_record["differences"]
                for program_record in ran
            ),
        ),
        ("crashed or beyond the time limit", len(records) - len(ran)),
        (
            "programs with exceptions that left the step",
            sum(program_record["raised"] > 0 for program_record in ran),
        ),
        (
            "programs with co-executed iterations",
            sum(program_record["coexecuted"] > 0 for program_record in ran),
        ),
        ("programs with divergences", sum(program_record["diverged"] > 0 for program_record in ran)),
        ("programs with updates as recorded functions", sum(record["updates"] > 0 for record in ran)),
        ("programs with heads", sum(record["heads"] > 0 for record in ran)),
        ("iterations traced", total["traced"]),
        ("iterations co-executed", total["coexecuted"]),
        ("iterations diverged", total["diverged"]),
        ("updates as recorded functions", total["updates"]),
        ("iterations with heads", total["heads"]),
    ]
    lines = ["| random programs | count |", "|---|---|", *(f"| {name} | {count} |" for name, count in rows)]
    wrong = list(filter(_differs, records))
    if wrong:
        lines += ["", "| program | difference |", "|---|---|"]
        for program_record in wrong[:20]:
            difference = program_record.get("error") or "; ".join(_differences(program_record)[:2])
            lines.append(
                f"| {program_record['program']} | {' '.join(difference.split())[:200]} |".replace(
                    "||", "\\|\\|"
                )
            )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if a program differs from eager."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coexecution_random")
    parser.add_argument("--programs", type=int, default=2000, help="number of programs (default 2000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first program (default 0)")
    parser.add_argument("--steps", type=int, default=16, help="iterations per program (default 16)")
    parser.add_argument(
        "--timeout-s", type=float, default=60, help="time limit per program in seconds (default 60)"
    )
    parser.add_argument("--heads", action="store_true", help="heads instead of co-executed iterations")
    parser.add_argument(
        "--out", type=Path, help="file of saved results (default random.jsonl, with heads heads.jsonl)"
    )
    parser.add_argument("--table", type=Path, help="file for the summary")
    parser.add_argument(
        "--show", type=int, metavar="N", help="print the source of a program, and what differs"
    )
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    arguments.out = arguments.out or Path("heads.jsonl" if arguments.heads else "random.jsonl")
    if arguments.worker:
        first, last = arguments.worker
        work(first, last, arguments)
        return 0
    if arguments.show is not None:
        print(random_source(random.Random(arguments.show), traceable=arguments.heads))
        print(json.dumps(examine(arguments.show, arguments.steps, heads=arguments.heads), indent=1))
        return 0
    return _run_missing(arguments)


def _run_missing(arguments: argparse.Namespace) -> int:
    revision = engine_revision()
    numbers = range(arguments.first, arguments.first + arguments.programs)
    records = {
        record["program"]: record
        for record in load(arguments.out)
        if (record["steps"], record["revision"]) == (arguments.steps, revision)
        and record["program"] in numbers
    }
    missing = [number for number in numbers if number not in records]
    while missing:
        first = missing[0]
        last = next((n for n in range(first, first + CHUNK) if n not in missing), first + CHUNK)
        for record in _records(first, last, arguments):
            record["revision"] = revision
            save(arguments.out, record)
            records[record["program"]] = record
        missing = [number for number in missing if number >= last]
        wrong = [number for number, record in records.items() if _differs(record)]
        print(f"{len(records)} of {len(numbers)} programs, {len(wrong)} differ {wrong[:10]}", flush=True)
    summary = table([records[number] for number in numbers])
    print(summary)
    if arguments.table:
        arguments.table.write_text(summary, encoding="utf-8")
    return int(any(map(_differs, records.values())))


if __name__ == "__main__":
    sys.exit(main())
