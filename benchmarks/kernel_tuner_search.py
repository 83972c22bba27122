"""Searches by another tuner: Kernel Tuner's strategies, simulated on a recording.

Kernel Tuner (`pip install 'tunebench[peers]'`) is asked as its users ask it: a cache file, simulation mode, a
strategy by name with its default options, and a budget in distinct configurations. Its space is the
recording: what was recorded is valid, failures among it, and nothing else.

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
"""Strategies that are compared, by Kernel Tuner's names; its versions 1.3 do not have all of them."""


@functools.cache
def version() -> str | None:
    """Return the installed version of Kernel Tuner, None if there is none."""
    try:
        return importlib.metadata.version("kernel-tuner")
    except importlib.metadata.PackageNotFoundError:
        return None


def search(recording: RecordedSpace, strategy: str, *, trials: int, seed: int) -> ReplayTrace:
    """Search a recording by one of Kernel Tuner's strategies.

    Args:
        recording: What stands in for the device.
        strategy: By Kernel Tuner's name.
        trials: Distinct configurations that it may ask for, failures among them.
        seed: Of Python's and NumPy's global generators, from which strategies draw.
    """
    random.seed(seed)
    np.random.seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache.json"
        cache.write_text(json.dumps(cache_of(recording)), encoding="utf-8")
        results = _simulate(recording, cache, strategy, trials)
    names = recording.table.space.names
    rows = [recording.table.row({name: result[name] for name in names}) for result in results]
    assert None not in rows, "asked for what was not recorded"
    return replayed(recording, rows, trials=trials, seed=seed)


def cache_of(recording: RecordedSpace) -> dict[str, Any]:
    """Return a recording as the content of a cache file: parameters, and time in ms or a word for a failure.

    The entries come last: from the closing brackets Kernel Tuner tells whether a file is whole.
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
    """Return what a strategy evaluated, in order; a configuration that it comes back to is there again."""
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
    """Let nothing be printed or warned of: which parameters are a block's sizes matters to real kernels."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def replayed(recording: RecordedSpace, rows: Iterable[int], *, trials: int, seed: int) -> ReplayTrace:
    """Return a search by the rows it asked for, in order; those that it asked for before do not count."""
    times_us = np.where(np.isnan(recording.times_us), np.inf, recording.times_us)
    asked = list(dict.fromkeys(rows))[:trials]
    best_us = np.minimum.accumulate(times_us[asked])
    return ReplayTrace(seed=seed, best_us=tuple(best_us.tolist()), exhausted=len(asked) < trials)
