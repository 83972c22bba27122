"""Fault injection: tuners and servers are killed at random, and every committed record must survive.

    python -m tests.faults [PART ...] [--kills 200]

The parts are:

- ``sqlite``: four tuners write to one file; SIGKILL ends one of them at a random moment, again and again.
- ``postgresql``: four tuners write to one server; the server is killed and restarted.
- ``cli``: ``tunebench tune --device cpu`` is killed with all its processes.
- ``signals``: ``tunebench tune`` is ended by SIGKILL (a half of the times), SIGTERM or SIGINT; no process,
  temporary file or claim may remain (see `signal_soak`).
- ``power``: the power is cut at random moments of a trace of a tuner (see `power_cuts`).
- ``kernels``: no tuner is killed, but kernels fail in every way (see `kernel_faults`).
- ``busy``: eight programs use all processors while right kernels are tuned (see `kernel_faults`).
- ``disk``, ``clock``, ``beside``, ``versions``: commands and the dashboard on a full disk (needs root),
  commands with a clock that goes backwards, beside each other on one file, and of this and an earlier version
  on one file (see `command_faults`); only on request.

Each tuner writes every committed measurement to a journal (see `journaled_tuning`). After every kill the
database is checked, and each line of the journal must be in it exactly once. Two readers run lookups
meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import journaled_tuning
from tests.faults.command_faults import COMMAND_FAULTS
from tests.faults.journal_check import FaultCounts
from tests.faults.signal_soak import signal_soak
from tests.faults.soak import cli_soak, server_soak, sqlite_soak
from tunebench.testing.postgres import serving, unavailable


def main() -> None:
    """Print the counts of each part as JSON; exit with 1 if a fault was found."""
    if sys.argv[1:2] == ["journal"]:
        sys.exit(journaled_tuning.run_cli(*sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], help="parts (default: all)")
    parser.add_argument("--kills", type=int, default=200, help="number of kills (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--json", type=Path, help="file for the counts (default: none)")
    options = parser.parse_args()
    parts = options.parts or ["sqlite", "postgresql", "cli", "signals", "power", "kernels", "busy"]
    counts: dict[str, Any] = {}
    for part in parts:
        with tempfile.TemporaryDirectory() as name:
            os.environ["TUNEBENCH_CACHE"] = str(Path(name) / "cache")
            counts[part] = _run(part, Path(name), options.kills, options.seed)
        print(part, json.dumps(counts[part]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(counts, indent=2) + "\n")
    sys.exit(bool(re.search(r'"faults": [1-9]', json.dumps(counts))))


def _run(part: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    if part == "power":
        from tests.faults import power_cuts

        return {
            name: power_cuts.cuts(folder / name, kills, seed=seed, network=name == "rollback")
            for name in ("log", "rollback")
        }
    if part == "kernels":
        from tests.faults.kernel_faults import kernel_faults

        ended = kernel_faults(folder, every=True)
        print(ended.table(), *ended.wrong, sep="\n")
        return {
            "kernels": len(ended.outcomes),
            "exit_codes": ended.exit_codes,
            "repeated": ended.repeated,
            "processor_s": round(ended.processor_s),
            "faults": len(ended.wrong),
        }
    if part in COMMAND_FAULTS:
        commands = COMMAND_FAULTS[part](folder)
        return {**dataclasses.asdict(commands), "faults": commands.faults}
    if part == "busy":
        from tests.faults.kernel_faults import busy_machine

        busy = busy_machine(folder)
        return {**dataclasses.asdict(busy), "faults": len(busy.lost) + sum(map(bool, busy.exit_codes))}
    if part == "postgresql":
        reason = unavailable()
        if reason is not None:
            return {"skipped": reason}
        with serving(flushed=True) as server:
            return _figures(server_soak(server, folder, kills, seed=seed))
    if part == "signals":
        signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT] * math.ceil(kills / 4)
        return _figures(signal_soak(folder, signals[:kills], seed=seed))
    soak: Callable[..., FaultCounts] = {"sqlite": sqlite_soak, "cli": cli_soak}[part]
    return _figures(soak(folder, kills if part == "sqlite" else max(1, kills // 40), seed=seed))


def _figures(counts: FaultCounts) -> dict[str, Any]:
    return {**{name: getattr(counts, name) for name in counts.__slots__}, "faults": counts.faults}


if __name__ == "__main__":
    main()
