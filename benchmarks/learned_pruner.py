"""Configurations postponed and winners missed by the learned pruner, on recorded spaces.

    python -m benchmarks.learned_pruner [--seeds 20] [--jobs 2] [--samplers random] [--by bound] [--data DIR]

DIR holds recorded spaces by kernel, for example `gemm/RTX_3090.json.gz`. For each seed and sampler, a space
is searched with and without the pruner: once with the recorded spaces of the kernel's other devices, and once
without. A search sees only the configurations that it tries; the complete recorded space is used only to
count the winners missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # searches run in parallel processes, one thread each

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

from benchmarks.sampler_replays import DATA, space_at
from tunebench.tuning.replay import PostponedCheck, replay

SAMPLERS = ("surrogate", "random")
BY = ("devices", "bound")
"""Evidence for the pruner: times on the kernel's other devices, or lower bounds only."""

EARLY, LATE = 50, 200
"""Trials after which the postponed configurations are counted."""

LOST = 0.01
"""Difference of the best times, as a fraction, from which a search counts as lost or gained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One device under test.

    Attributes:
        path: Recorded space of the device.
        elsewhere: Recorded spaces of other devices, known to the search.
        sampler: Name of the sampler.
    """

    path: Path
    elsewhere: tuple[Path, ...]
    sampler: str

    def __str__(self) -> str:
        sources = ", ".join(_name(other) for other in self.elsewhere) or "its bound"
        return f"{self.path.parent.name} {_name(self.path)}, by {sources}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Searches of a case with one seed, with and without the pruner.

    Attributes:
        rows: Number of configurations of the space.
        early: Postponed configurations after `EARLY` trials.
        late: Postponed configurations after `LATE` trials.
        with_us: Best time with the pruner, in microseconds.
        without_us: Best time without the pruner, in microseconds.
    """

    rows: int
    early: PostponedCheck
    late: PostponedCheck
    with_us: float
    without_us: float


def main() -> None:
    """Run all searches in parallel and print a table with a row per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="searches per case, default 5")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="worker processes, default: one per core"
    )
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS, choices=SAMPLERS, help="default: both")
    parser.add_argument("--by", nargs="+", default=BY, choices=BY, help="evidence for the pruner")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recorded spaces")
    options = parser.parse_args()
    cases = list(_cases(options.data, options.samplers, options.by))
    if not cases:
        print(f"no recorded spaces in {options.data}")
        return
    runs = [(case, seed) for case in cases for seed in range(options.seeds)]
    pairs_of: dict[Case, list[Pair]] = {case: [] for case in cases}
    with ProcessPoolExecutor(options.jobs) as pool:
        pairs = track(pool.map(run, *zip(*runs, strict=True)), total=len(runs), console=Console(stderr=True))
        for (case, _), pair in zip(runs, pairs, strict=True):
            pairs_of[case].append(pair)
    Console(width=240).print(_table(pairs_of))


def _cases(folder: Path, samplers: Sequence[str], by: Sequence[str]) -> Iterator[Case]:
    """Yield a case per sampler for every space with lower bounds, with and without the other devices."""
    for path in sorted(folder.glob("*/*.json.gz")):
        if path.stem.endswith("_T4.json") or space_at(path).bounds is None:
            continue
        other_paths = tuple(
            candidate for candidate in sorted(path.parent.glob("*.json.gz")) if candidate != path
        )
        other_paths = tuple(candidate for candidate in other_paths if not candidate.stem.endswith("_T4.json"))
        source_sets = ([other_paths] if other_paths and "devices" in by else []) + (
            [()] if "bound" in by else []
        )
        for elsewhere, sampler in itertools.product(source_sets, samplers):
            yield Case(path=path, elsewhere=elsewhere, sampler=sampler)


def _name(path: Path) -> str:
    return path.name.removesuffix(".json.gz").replace("_", " ")


def run(case: Case, seed: int) -> Pair:
    """Run a case: `EARLY` and `LATE` trials with the pruner, and `LATE` trials without."""
    space, elsewhere = space_at(case.path), [space_at(source).recording for source in case.elsewhere]
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


def _table(pairs_of: dict[Case, list[Pair]]) -> Table:
    columns = ("postponed", "expected faster", "measured faster", "winners missed")
    table = Table(
        "space", "sampler", *(f"{c} ({n})" for n in (EARLY, LATE) for c in columns), "lost", "gained"
    )
    for case, pairs in pairs_of.items():
        figures = [figure for when in ("early", "late") for figure in _account(pairs, when)]
        ratio = np.array([pair.with_us / pair.without_us for pair in pairs])
        lost, gained = (ratio > 1 + LOST).sum(), (ratio < 1 / (1 + LOST)).sum()
        table.add_row(
            str(case), case.sampler, *figures, f"{lost} of {len(pairs)}", f"{gained} of {len(pairs)}"
        )
    return table


def _account(pairs: Sequence[Pair], when: str) -> Iterator[str]:
    """Yield the cells after one number of trials.

    They are the fraction of configurations postponed, the expected and the measured fraction of those that is
    faster than the best, and the number of faster configurations that were postponed.
    """
    passed: list[PostponedCheck] = [getattr(pair, when) for pair in pairs]
    count = sum(pruner.count for pruner in passed)
    yield f"{count / sum(pair.rows for pair in pairs):.3f}"
    yield f"{sum(pruner.winners for pruner in passed) / max(1, count):.1e}"
    yield f"{sum(pruner.missed for pruner in passed) / max(1, count):.1e}"
    yield f"{sum(pruner.missed for pruner in passed)} of {sum(pruner.faster for pruner in passed)}"


if __name__ == "__main__":
    main()
