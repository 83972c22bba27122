"""Searches of recorded spaces with any sampler, run once each and saved in a file."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from pebble import ProcessPool

import tunebench
from benchmarks import kernel_tuner_search
from tunebench.cache_file import read
from tunebench.tuning.replay import CHECKPOINTS, Space, replay

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "recorded"
"""Default folder of the recorded spaces: next to the checkout."""

BLIND = "surrogate-blind"
"""The default sampler without bounds and without quantities derived from the parameters."""

OURS = ("surrogate", BLIND, "bound", "random", "tpe")
"""Samplers of tunebench; any other name is a strategy of Kernel Tuner."""

WARM_CHECKPOINTS = tuple(count for count in CHECKPOINTS if count <= 50)
"""Checkpoints of a warm search, in which other devices matter early or not at all."""

RESAMPLES = 10_000
"""Number of bootstrap samples."""

SOURCES = (
    *(
        "search/**/*.py",
        "tuning/replay.py",
        "bound.py",
        "forecast/execution.py",
        "kernels/recorded_kernel.py",
    ),
    "cache_file/*.py",
)
"""Source files of tunebench that determine the result of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search of one recorded space; the spaces of `elsewhere` are known to it (warm start)."""

    space: str
    sampler: str
    seed: int = 0
    elsewhere: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Numbers of trials after which the efficiency is reported."""
        return WARM_CHECKPOINTS if self.elsewhere else CHECKPOINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a search.

    Attributes:
        search: The search.
        by: Version of the sampler; the result of another version is stale.
        asked: Number of distinct configurations tried; below the budget if the search ended by itself.
        efficiency: Time of the optimum over the best time, by number of trials; 0 before the first success.
    """

    search: Search
    by: str
    asked: int
    efficiency: Mapping[int, float]

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        shares = {str(count): round(share, 5) for count, share in self.efficiency.items()}
        return {**dataclasses.asdict(self.search), "by": self.by, "asked": self.asked, "efficiency": shares}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Found:
        """Return the result from its JSON form."""
        space, sampler, seed = (record[name] for name in ("space", "sampler", "seed"))
        search = Search(space=space, sampler=sampler, seed=seed, elsewhere=tuple(record["elsewhere"]))
        shares = {int(count): float(share) for count, share in record["efficiency"].items()}
        return cls(search=search, by=record["by"], asked=record["asked"], efficiency=shares)


@dataclass(frozen=True, slots=True)
class Data:
    """Folder of recorded spaces: `<kernel>/<device>.json.gz`."""

    folder: Path

    def path(self, space: str) -> Path:
        """Return the file of a space."""
        return self.folder / f"{space}.json.gz"

    def space(self, name: str) -> Space:
        """Return a recorded space, with costs and bounds if its kernel and device are described."""
        return space_at(self.path(name))

    def has_all(self, spaces: Iterable[str]) -> bool:
        """Return whether the folder has all of these spaces; name the missing ones on stderr."""
        missing = sorted({space for space in spaces if not self.path(space).exists()})
        if missing:
            print(
                f"no recorded space {', '.join(missing)} in {self.folder}; name another folder with --data",
                file=sys.stderr,
            )
        return not missing


@functools.cache
def space_at(path: Path) -> Space:
    """Return the recorded space of a file."""
    return Space.of(read(path))


def elsewhere(space: str, among: Iterable[str]) -> tuple[str, ...]:
    """Return the spaces of the same kernel on other devices.

    Args:
        space: Name of a space.
        among: Names to choose from.
    """
    family = Path(space).parent
    return tuple(
        sorted({candidate for candidate in among if candidate != space and Path(candidate).parent == family})
    )


# -- tables --------------------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def interval(samples: Array) -> tuple[float, float]:
    """Return the 95 % interval of the mean of samples, by bootstrap over seeds.

    Seeds are drawn for all columns jointly, because searches with one seed may start alike in similar spaces.

    Args:
        samples: A row per seed.
    """
    drawn = np.random.default_rng(0).integers(len(samples), size=(RESAMPLES, len(samples)))
    low, high = np.percentile(samples.mean(axis=1)[drawn].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


# -- running searches ----------------------------------------------------------------------------------------


def run(search: Search, data: Data) -> Found:
    """Run a search up to its last checkpoint.

    Args:
        search: The search.
        data: Folder of the recorded spaces.
    """
    space, trials = data.space(search.space), max(search.checkpoints)
    if search.sampler in OURS:
        recordings = [data.space(source).recording for source in search.elsewhere]
        seen, sampler = space, search.sampler
        if sampler == BLIND:
            seen, sampler = dataclasses.replace(space, costs=None, bounds=None), "surrogate"
        done = replay(seen, trials=trials, seed=search.seed, sampler=sampler, elsewhere=recordings)
    else:
        done = kernel_tuner_search.search(space.recording, search.sampler, trials=trials, seed=search.seed)
    shares = done.efficiency(space.recording.optimum_us)
    return Found(
        search=search,
        by=version(search.sampler) or "",
        asked=len(done.best_us),
        efficiency={count: shares[count] for count in search.checkpoints},
    )


@functools.cache
def version(sampler: str) -> str | None:
    """Return the version that determines a sampler's results, or None if it is not installed."""
    if sampler not in OURS:
        installed = kernel_tuner_search.version()
        return None if installed is None else f"kernel-tuner {installed}"
    ours = f"tunebench {tunebench.__version__} {fingerprint(Path(tunebench.__file__).parent)}"
    return f"{ours}, optuna {optuna.__version__}" if sampler == "tpe" else ours


def fingerprint(root: Path) -> str:
    """Return a digest of the sources in `SOURCES`, without comments and layout."""
    files = sorted(path for pattern in SOURCES for path in root.glob(pattern))
    trees = [ast.dump(ast.parse(path.read_text(encoding="utf-8"))) for path in files]
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:12]


def run_all(todo: Sequence[Search], data: Data, jobs: int) -> Iterator[Found]:
    """Yield the result of each search as soon as it ends.

    Args:
        todo: Searches to run.
        data: Folder of the recorded spaces.
        jobs: Number of worker processes; 1 runs in this process.
    """
    if jobs == 1:
        yield from (run(search, data) for search in todo)
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # one thread per worker process
    context = multiprocessing.get_context("spawn")
    with ProcessPool(max_workers=jobs, initializer=_ignore_interrupts, context=context) as pool:
        try:
            running = {pool.schedule(run, args=[search, data]) for search in todo}
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
        except BaseException:  # Ctrl-C, or the caller stopped the generator
            pool.stop()
            raise


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# -- saving results ------------------------------------------------------------------------------------------


class Results:
    """Results in a JSON file that is complete after every search."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = self._load()

    def _load(self) -> dict[Search, Found]:
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else '{"searches": []}'
        return {entry.search: entry for entry in map(Found.of, json.loads(text)["searches"])}

    def get(self, search: Search) -> Found | None:
        """Return the result of a search, or None if it is missing, incomplete or stale.

        The result of a sampler that is not installed is never stale.
        """
        entry = self._found.get(search)
        if entry is None or not set(search.checkpoints) <= set(entry.efficiency):
            return None
        return entry if version(search.sampler) in (None, entry.by) else None

    def add(self, entry: Found) -> None:
        """Save one result, and keep those that other processes have saved in the meantime."""
        self._found = self._load() | {entry.search: entry}
        ordered = sorted(self._found.values(), key=lambda result: dataclasses.astuple(result.search))
        lines = ",\n".join(json.dumps(result.record()) for result in ordered)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.write_text(f'{{"searches": [\n{lines}\n]}}\n', encoding="utf-8")
        fresh.replace(self._path)
