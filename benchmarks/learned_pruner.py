"""What the calibrated pruner passes over, and what it misses by that, on recorded spaces.

    python -m benchmarks.learned_pruner [--seeds 20] [--jobs 2] [--samplers random] [--by bound] [--data FOLDER]

FOLDER holds recorded spaces by kernel: `gemm/RTX_3090.json.gz` and so on. For each seed and sampler, a space
is searched with the pruner and without it: knowing the kernel's other devices, and knowing none. A search
learns of the device under test only what it asks for; the whole recording serves the account alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the searches themselves run side by side

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tunebench.cache_file import read
from tunebench.tuning.replay import PostponedCheck, Space, replay

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "recorded"
SAMPLERS = ("surrogate", "random")
BY = ("devices", "bound")
"""What configurations are judged by: their times on the kernel's other devices, or their bounds alone."""

EARLY, LATE = 50, 200
"""Configurations asked for when the account is made."""

LOST = 0.01
"""Share of the best time by which a run must differ to count as lost or gained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One device under test.

    Attributes:
        path: Its recording.
        elsewhere: Those of other devices that are known beforehand.
        sampler: By name.
    """

    path: Path
    elsewhere: tuple[Path, ...]
    sampler: str

    def __str__(self) -> str:
        known = ", ".join(_name(other) for other in self.elsewhere) or "its bound"
        return f"{self.path.parent.name} {_name(self.path)}, by {known}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One seed of a case, with the pruner and without.

    Attributes:
        rows: Of the space.
        early: What is passed over after `EARLY` configurations.
        late: What is passed over after `LATE`.
        with_us: Best time with the pruner.
        without_us: Best time without.
    """

    rows: int
    early: PostponedCheck
    late: PostponedCheck
    with_us: float
    without_us: float


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="searches of each kind")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that search")
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS, choices=SAMPLERS)
    parser.add_argument("--by", nargs="+", default=BY, choices=BY, help="what chances are taken from")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recorded spaces")
    options = parser.parse_args()
    cases = list(_cases(options.data, options.samplers, options.by))
    if not cases:
        print(f"no recorded spaces in {options.data}")
        return
    runs = [(case, seed) for case in cases for seed in range(options.seeds)]
    found: dict[Case, list[Pair]] = {case: [] for case in cases}
    with ProcessPoolExecutor(options.jobs) as pool:
        pairs = track(pool.map(run, *zip(*runs, strict=True)), total=len(runs), console=Console(stderr=True))
        for (case, _), pair in zip(runs, pairs, strict=True):
            found[case].append(pair)
    Console(width=240).print(_table(found))


def _cases(folder: Path, samplers: Sequence[str], by: Sequence[str]) -> Iterator[Case]:
    """Return every described space, with the kernel's other devices and without, for each sampler."""
    for path in sorted(folder.glob("*/*.json.gz")):
        if path.stem.endswith("_T4.json") or _space(path).bounds is None:
            continue
        others = tuple(other for other in sorted(path.parent.glob("*.json.gz")) if other != path)
        others = tuple(other for other in others if not other.stem.endswith("_T4.json"))
        known = ([others] if others and "devices" in by else []) + ([()] if "bound" in by else [])
        for elsewhere, sampler in itertools.product(known, samplers):
            yield Case(path=path, elsewhere=elsewhere, sampler=sampler)


@functools.cache
def _space(path: Path) -> Space:
    return Space.of(read(path))


def _name(path: Path) -> str:
    return path.name.removesuffix(".json.gz").replace("_", " ")


def run(case: Case, seed: int) -> Pair:
    """Search with the pruner, for as long as `EARLY` and for as long as `LATE`, and without it."""
    space, elsewhere = _space(case.path), [_space(other).recording for other in case.elsewhere]
    search = functools.partial(replay, space, seed=seed, sampler=case.sampler, elsewhere=elsewhere)
    early, late = (search(trials=trials, learned_pruner=True) for trials in (EARLY, LATE))
    without = search(trials=LATE)
    return Pair(
        rows=len(space.recording.table),
        early=early.postponed,
        late=late.postponed,
        with_us=late.best_us[-1],
        without_us=without.best_us[-1],
    )


def _table(found: dict[Case, list[Pair]]) -> Table:
    columns = ("passed over", "expected", "missed", "of winners")
    table = Table(
        "space", "sampler", *(f"{c} ({n})" for n in (EARLY, LATE) for c in columns), "lost", "gained"
    )
    for case, pairs in found.items():
        figures = [figure for when in ("early", "late") for figure in _account(pairs, when)]
        ratio = np.array([pair.with_us / pair.without_us for pair in pairs])
        lost, gained = (ratio > 1 + LOST).sum(), (ratio < 1 / (1 + LOST)).sum()
        table.add_row(
            str(case), case.sampler, *figures, f"{lost} of {len(pairs)}", f"{gained} of {len(pairs)}"
        )
    return table


def _account(pairs: Sequence[Pair], when: str) -> Iterator[str]:
    """Return the share passed over, its expected and measured miss rates, and the winners missed."""
    passed: list[PostponedCheck] = [getattr(pair, when) for pair in pairs]
    count = sum(each.count for each in passed)
    yield f"{count / sum(pair.rows for pair in pairs):.3f}"
    yield f"{sum(each.winners for each in passed) / max(1, count):.1e}"
    yield f"{sum(each.missed for each in passed) / max(1, count):.1e}"
    yield f"{sum(each.missed for each in passed)} of {sum(each.faster for each in passed)}"


if __name__ == "__main__":
    main()
