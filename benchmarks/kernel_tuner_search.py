"""Search with Kernel Tuner's strategies, in simulation mode on a recorded space.

Kernel Tuner (`pip install 'tunebench[peers]'`) is called through its public interface: a cache file,
simulation mode, a strategy with its default options, and a budget in distinct configurations. Its space is
exactly the recorded one: the recorded configurations, failures included.

Source: van Werkhoven, "Kernel Tuner: A search-optimizing GPU code auto-tuner" (2019); strategies as released
in kernel-tuner 1.5.0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import random
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tunebench.cache_file import RecordedSpace
from tunebench.tuning.replay import ReplayTrace

STRATEGIES = ("adaptive_tabu_greywolf", "genetic_algorithm", "hybrid_vndx", "random_sample")
"""Kernel Tuner strategies to compare; version 1.3 does not have all of them."""


@functools.cache
def version() -> str | None:
    """Return the installed version of Kernel Tuner, or None if it is not installed."""
    try:
        return importlib.metadata.version("kernel-tuner")
    except importlib.metadata.PackageNotFoundError:
        return None


def search(recording: RecordedSpace, strategy: str, *, trials: int, seed: int) -> ReplayTrace:
    """Search a recorded space with one of Kernel Tuner's strategies.

    Args:
        recording: The recorded space, which replaces the device.
        strategy: Kernel Tuner's name of the strategy.
        trials: Budget in distinct configurations, failures included.
        seed: Seed of the global random generators of Python and NumPy, from which the strategies draw.
    """
    random.seed(seed)
    np.random.seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache.json"
        cache.write_text(json.dumps(cache_of(recording)), encoding="utf-8")
        results = _simulate(recording, cache, strategy, trials)
    names = recording.table.space.names
    rows = [recording.table.row({name: result[name] for name in names}) for result in results]
    assert None not in rows, "Kernel Tuner evaluated a configuration that was not recorded"
    return replayed(recording, rows, trials=trials, seed=seed)


def cache_of(recording: RecordedSpace) -> dict[str, Any]:
    """Return the content of a Kernel Tuner cache file for a recorded space.

    Each entry has the parameters and the time in ms, or the name of a failure. The entries come last, because
    Kernel Tuner recognizes a complete file by its closing brackets.
    """
    names = recording.table.space.names
    entries = {}
    for row in range(len(recording.table)):
        config = dict(recording.table.config(row))
        time = "RuntimeFailedConfig" if row in recording.failures else recording.times_us[row] / 1e3
        entries[",".join(str(config[name]) for name in names)] = {**config, "time": time}
    return {
        "device_name": recording.device,
        "kernel_name": recording.kernel,
        "problem_size": list(recording.problem) or [1],
        "tune_params_keys": list(names),
        "tune_params": {p.name: list(p.values) for p in recording.table.space.parameters},
        "cache": entries,
    }


def _simulate(recording: RecordedSpace, cache: Path, strategy: str, trials: int) -> list[dict[str, Any]]:
    """Return the results of a strategy in order, including configurations that it evaluated again."""
    valid = {tuple(recording.table.config(row).values()) for row in range(len(recording.table))}
    with _quiet():
        import kernel_tuner
        from constraint import FunctionConstraint

        results, _ = kernel_tuner.tune_kernel(
            recording.kernel,
            "",
            recording.problem or (1,),
            [],
            {p.name: list(p.values) for p in recording.table.space.parameters},
            restrictions=[FunctionConstraint(lambda *values: values in valid)],
            strategy=strategy,
            strategy_options={"max_fevals": trials},
            cache=str(cache),
            simulation_mode=True,
            quiet=True,
        )
    return list(results)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output and warnings; the warning about names of block sizes matters only for real kernels."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def replayed(recording: RecordedSpace, rows: Iterable[int], *, trials: int, seed: int) -> ReplayTrace:
    """Return the trace of a search from the rows that it evaluated.

    Args:
        recording: The recorded space.
        rows: Rows in order; only the first evaluation of a row counts.
        trials: Number of distinct configurations to keep.
        seed: Seed of the search.
    """
    times_us = np.where(np.isnan(recording.times_us), np.inf, recording.times_us)
    distinct = list(dict.fromkeys(rows))[:trials]
    best_us = np.minimum.accumulate(times_us[distinct])
    return ReplayTrace(seed=seed, best_us=tuple(best_us.tolist()), exhausted=len(distinct) < trials)
