"""Searches of recorded spaces, by whatever sampler: made once each, and kept in a file."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from pebble import ProcessPool

import tunebench
from benchmarks import kernel_tuner_search
from tunebench.cache_file import read
from tunebench.tuning.replay import CHECKPOINTS, Space, replay

BLIND = "surrogate-blind"
"""The default sampler, told nothing of the kernel: neither bounds nor what follows from parameters."""

OURS = ("surrogate", BLIND, "bound", "random", "tpe")
"""Samplers of tunebench; any other is a strategy of Kernel Tuner."""

WARM_CHECKPOINTS = tuple(count for count in CHECKPOINTS if count <= 50)
"""What is known of other devices helps early, or not at all."""

SOURCES = ("search/**/*.py", "tuning/replay.py", "bound.py", "kernels/recorded_kernel.py", "recording/*.py")
"""Files of tunebench on which the result of a search depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search of one recording; the recordings of `elsewhere` are known beforehand."""

    space: str
    sampler: str
    seed: int = 0
    elsewhere: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Configurations asked for after which its efficiency is told."""
        return WARM_CHECKPOINTS if self.elsewhere else CHECKPOINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a search.

    Attributes:
        search: Which.
        by: The sampler's version: a result of another one does not stand.
        asked: Distinct configurations that it asked for; fewer than it might if it ended by itself.
        efficiency: The optimum's time over the best so far, by the number asked for; 0 before a success.
    """

    search: Search
    by: str
    asked: int
    efficiency: Mapping[int, float]

    def record(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        told = {str(count): round(share, 5) for count, share in self.efficiency.items()}
        return {**dataclasses.asdict(self.search), "by": self.by, "asked": self.asked, "efficiency": told}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Found:
        """Read what `record` returns."""
        space, sampler, seed = (record[name] for name in ("space", "sampler", "seed"))
        search = Search(space=space, sampler=sampler, seed=seed, elsewhere=tuple(record["elsewhere"]))
        told = {int(count): float(share) for count, share in record["efficiency"].items()}
        return cls(search=search, by=record["by"], asked=record["asked"], efficiency=told)


@dataclass(frozen=True, slots=True)
class Data:
    """A folder of recordings: `<kernel>/<device>.json.gz`."""

    folder: Path

    def path(self, space: str) -> Path:
        """Return the file of a space."""
        return self.folder / f"{space}.json.gz"

    def space(self, name: str) -> Space:
        """Return a recording with what is known of its kernel and device."""
        return _space(self.path(name))


@functools.cache
def _space(path: Path) -> Space:
    return Space.of(read(path))


def elsewhere(space: str, among: Iterable[str]) -> tuple[str, ...]:
    """Return the spaces, of some, that are of the same kernel on other devices."""
    family = Path(space).parent
    return tuple(sorted({other for other in among if other != space and Path(other).parent == family}))


# -- making them ---------------------------------------------------------------------------------------------


def run(search: Search, data: Data) -> Found:
    """Make one search, as far as its last checkpoint."""
    space, trials = data.space(search.space), max(search.checkpoints)
    if search.sampler in OURS:
        known = [data.space(other).recording for other in search.elsewhere]
        seen, sampler = space, search.sampler
        if sampler == BLIND:
            seen, sampler = dataclasses.replace(space, costs=None, bounds=None), "surrogate"
        done = replay(seen, trials=trials, seed=search.seed, sampler=sampler, elsewhere=known)
    else:
        done = kernel_tuner_search.search(space.recording, search.sampler, trials=trials, seed=search.seed)
    told = done.efficiency(space.recording.optimum_us)
    return Found(
        search=search,
        by=version(search.sampler) or "",
        asked=len(done.best_us),
        efficiency={count: told[count] for count in search.checkpoints},
    )


@functools.cache
def version(sampler: str) -> str | None:
    """Return what a sampler's results depend on, None if it is not installed."""
    if sampler not in OURS:
        installed = kernel_tuner_search.version()
        return None if installed is None else f"kernel-tuner {installed}"
    ours = f"tunebench {tunebench.__version__} {fingerprint(Path(tunebench.__file__).parent)}"
    return f"{ours}, optuna {optuna.__version__}" if sampler == "tpe" else ours


def fingerprint(root: Path) -> str:
    """Return a digest of the package's sources that matter; comments and layout do not count."""
    files = sorted(path for pattern in SOURCES for path in root.glob(pattern))
    trees = [ast.dump(ast.parse(path.read_text(encoding="utf-8"))) for path in files]
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:12]


def run_all(todo: Sequence[Search], data: Data, jobs: int) -> Iterator[Found]:
    """Yield the result of each search as it comes, from this process or from so many others."""
    if jobs == 1:
        yield from (run(search, data) for search in todo)
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a job is one thread
    context = multiprocessing.get_context("spawn")
    with ProcessPool(max_workers=jobs, initializer=_ignore_interrupts, context=context) as pool:
        try:
            running = {pool.schedule(run, args=[search, data]) for search in todo}
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
        except BaseException:  # Ctrl-C, or a reader that has had enough
            pool.stop()
            raise


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# -- keeping them --------------------------------------------------------------------------------------------


class Results:
    """What was found, in a JSON file that is whole after every search."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = self._load()

    def _load(self) -> dict[Search, Found]:
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else '{"searches": []}'
        return {found.search: found for found in map(Found.of, json.loads(text)["searches"])}

    def get(self, search: Search) -> Found | None:
        """Return what a search found, None if it was not made to its end by the sampler of today.

        What is not installed cannot have changed.
        """
        found = self._found.get(search)
        if found is None or not set(search.checkpoints) <= set(found.efficiency):
            return None
        return found if version(search.sampler) in (None, found.by) else None

    def add(self, found: Found) -> None:
        """Keep one result, beside what other processes have added meanwhile."""
        self._found = self._load() | {found.search: found}
        ordered = sorted(self._found.values(), key=lambda each: dataclasses.astuple(each.search))
        lines = ",\n".join(json.dumps(each.record()) for each in ordered)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.write_text(f'{{"searches": [\n{lines}\n]}}\n', encoding="utf-8")
        fresh.replace(self._path)
