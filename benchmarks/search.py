"""How close samplers come to the optimum of recorded spaces, ours and others', in one go.

    python -m benchmarks.search [compare|warm|overhead] [--seeds 20] [--spaces gemm/RTX_3090,…]
                                [--samplers surrogate,tpe,…] [--jobs 1] [--out search.json] [--data DIR]

`compare`: efficiency (the optimum's time over the best so far) after 25, 50, 100 and 200 distinct
configurations asked for, failures among them, as a mean over seeds. Samplers are those of tunebench, where
`tpe` is Optuna's TPE with each invalid or repeated proposal moved to the nearest open configuration, and four
strategies of Kernel Tuner with its default options (`pip install 'tunebench[peers]'`; left out without it).

`warm`: the same after 25 and 50 where the other devices of a space are known beforehand; beside it, what
taking over the fastest configuration of the others gives, and measuring their first 25 and 50 again.

`overhead`: the time from an outcome to the next proposal, on synthetic spaces.

Intervals are 95 % by bootstrap over seeds. Results are kept as they come; the same command goes on from
there, also after Ctrl-C, and searches again where a sampler has changed since. Exit status: 0, 6 if
recordings are missing, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import kernel_tuner_search, sampler_overhead
from benchmarks.sampler_replays import (
    OURS,
    WARM_CHECKPOINTS,
    Data,
    Results,
    Search,
    elsewhere,
    run_all,
    version,
)
from tunebench.cache_file import RecordedSpace
from tunebench.tuning.replay import CHECKPOINTS, Space

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

SPACES = (
    "gemm/RTX_2080_Ti",
    "gemm/RTX_3090",
    "convolution/RTX_2080_Ti",
    "convolution/RTX_3060_laptop",
    "convolution_milo/A100",
    "dedispersion_milo/A100",
)
"""Recordings by default: kernel and device. Devices of one kernel stand in one folder."""

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "recorded"
"""Where recordings are by default: beside the checkout."""

PROPOSALS = 100
"""Over so many a sampler's thinking is timed."""

TOLD_EVERY = 10
"""Searches after which a log is told how far it is; a terminal has a bar."""

RESAMPLES = 10_000
"""Draws of the bootstrap."""


def complete(wanted: Sequence[Search], results: Results, data: Data, jobs: int) -> int:
    """Make the searches that are not made yet; returns 130 if Ctrl-C came between."""
    missing = [search for search in wanted if results.get(search) is None]
    todo = [search for search in missing if version(search.sampler) is not None]
    print(f"{len(todo)} of {len(wanted)} searches to make", file=sys.stderr)
    if len(todo) < len(missing):
        print("left out: Kernel Tuner's strategies (pip install 'tunebench[peers]')", file=sys.stderr)
    console = Console(stderr=True)
    bar = functools.partial(track, total=len(todo), console=console, disable=not console.is_terminal)
    try:
        for number, found in enumerate(bar(run_all(todo, data, jobs), "searching"), start=1):
            results.add(found)
            if not console.is_terminal and (number % TOLD_EVERY == 0 or number == len(todo)):
                print(f"{number}/{len(todo)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return 130
    return 0


# -- what is told --------------------------------------------------------------------------------------------


def interval(samples: Array) -> tuple[float, float]:
    """Return the 95 % interval of the mean of (seeds, spaces) samples, by bootstrap over seeds.

    Seeds are drawn for all spaces at once: a seed may begin alike in spaces that are alike.
    """
    drawn = np.random.default_rng(0).integers(len(samples), size=(RESAMPLES, len(samples)))
    low, high = np.percentile(samples.mean(axis=1)[drawn].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def figure(samples: Array) -> str:
    """Return a mean as text, and its interval where there is more than one seed."""
    if len(samples) == 1:
        return f"{samples.mean():.3f}"
    low, high = interval(samples)
    return f"{samples.mean():.3f} ({low:.3f} to {high:.3f})"


def figures(
    results: Results, searches: Sequence[Search], counts: Sequence[int], seeds: int
) -> tuple[str, ...]:
    """Return how many seeds all of some searches were made with, and how close they came after each count.

    Nothing is returned where there is none.
    """
    rows = []
    for seed in range(seeds):
        found = [results.get(dataclasses.replace(search, seed=seed)) for search in searches]
        told = [[each.efficiency[count] for count in counts] for each in found if each is not None]
        if len(told) == len(searches):
            rows.append(told)
    if not rows:
        return ()
    samples = np.array(rows)
    return str(len(rows)), *(figure(samples[:, :, i]) for i in range(len(counts)))


def groups(spaces: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return what a table has rows for: each space, and all of them."""
    return {space: [space] for space in spaces} | ({"all": spaces} if len(spaces) > 1 else {})


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def comparison(results: Results, spaces: Sequence[str], samplers: Sequence[str], seeds: int) -> str:
    """Return the efficiency of each sampler in each space, and its mean over spaces, as a table."""
    rows = []
    for name, group in groups(spaces).items():
        for sampler in samplers:
            searches = [Search(space=space, sampler=sampler) for space in group]
            if told := figures(results, searches, CHECKPOINTS, seeds):
                rows.append((name, sampler, *told))
    return markdown(("space", "sampler", "seeds", *(f"after {count}" for count in CHECKPOINTS)), rows)


def taken_over(space: Space, others: Sequence[RecordedSpace], count: int) -> float:
    """Return the efficiency of measuring here the first so many of the others' order: the fastest of them.

    The order is that of the mean of log(time / optimum) over the other devices. What failed on one of them,
    or is not known there, comes last; what is no configuration here is passed over.
    """
    columns = [np.log(times_us / np.nanmin(times_us)) for times_us in space.prospects(others).elsewhere_us]
    order = np.argsort(np.nan_to_num(np.mean(columns, axis=0), nan=np.inf, posinf=np.inf), kind="stable")
    here_us = space.recording.times_us[order[:count]]
    return 0.0 if np.isnan(here_us).all() else float(space.recording.optimum_us / np.nanmin(here_us))


def transfer(results: Results, data: Data, made: Sequence[Search], seeds: int) -> str:
    """Return what knowing other devices is worth, to each sampler and without any, as a table."""
    rows = []
    known = {search.space: search.elsewhere for search in made}
    for name, group in groups(tuple(known)).items():
        for sampler in dict.fromkeys(search.sampler for search in made):
            cold = [Search(space=space, sampler=sampler) for space in group]
            warm = [dataclasses.replace(search, elsewhere=known[search.space]) for search in cold]
            for how, searches in (("cold", cold), ("warm", warm)):
                if told := figures(results, searches, WARM_CHECKPOINTS, seeds):
                    rows.append((name, f"{sampler}, {how}", told[0], "-", *told[1:]))
        shares = [_taken_over(data, space, known[space]) for space in group]
        cells = [f"{share:.3f}" for share in np.mean(shares, axis=0)]
        rows.append((name, "the others' fastest, measured again", "-", *cells))
    head = (f"after {count}" for count in (1, *WARM_CHECKPOINTS))
    return markdown(("space", "by", "seeds", *head), rows)


def _taken_over(data: Data, space: str, others: Sequence[str]) -> list[float]:
    recordings = [data.space(other).recording for other in others]
    return [taken_over(data.space(space), recordings, count) for count in (1, *WARM_CHECKPOINTS)]


def overhead(samplers: Sequence[str]) -> str:
    """Return how long samplers think, as a table."""
    rows = []
    for count, values in sampler_overhead.SIZES.items():
        for sampler in samplers:
            took = sampler_overhead.thinking(sampler, values, PROPOSALS)
            told = (took.first_s, *(statistic(took.then_s) for statistic in (np.mean, np.median, np.max)))
            rows.append([f"{count:,}", sampler, *(f"{1e3 * seconds:.1f}" for seconds in told)])
    return markdown(["configurations", "sampler", "ms to the first", "then mean", "median", "most"], rows)


# -- the command ---------------------------------------------------------------------------------------------


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    known = (*OURS, *kernel_tuner_search.STRATEGIES)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("compare", "warm", "overhead"), default="compare")
    parser.add_argument("--seeds", type=int, default=20, help="searches of each sampler in each space")
    parser.add_argument("--spaces", default=",".join(SPACES), help="recordings, by commas")
    parser.add_argument("--samplers", help=f"by commas, of {', '.join(known)}")
    parser.add_argument("--jobs", type=int, default=1, help="processes that search")
    parser.add_argument("--out", type=Path, default=Path("search.json"), help="where results are kept")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recordings")
    asked = parser.parse_args(arguments)
    asked.spaces = asked.spaces.split(",")
    usual = known if asked.part == "compare" else ("surrogate",)
    asked.samplers = tuple(asked.samplers.split(",")) if asked.samplers else usual
    allowed = known if asked.part == "compare" else OURS
    if unknown := set(asked.samplers) - set(allowed):
        parser.error(f"no sampler {', '.join(sorted(unknown))} for {asked.part}; known: {', '.join(allowed)}")
    return asked


def main(arguments: list[str] | None = None) -> int:
    """Search what is not searched yet, and print the figures of all that was asked for."""
    asked = _arguments(arguments)
    if asked.part == "overhead":
        print(overhead(asked.samplers))
        return 0
    data, results = Data(asked.data), Results(asked.out)
    if absent := [space for space in asked.spaces if not data.path(space).exists()]:
        print(f"no recording of {', '.join(absent)} in {asked.data}: --data names another", file=sys.stderr)
        return 6
    each = [Search(space=space, sampler=sampler) for space in asked.spaces for sampler in asked.samplers]
    if asked.part == "warm":
        family = [space for space in {*SPACES, *asked.spaces} if data.path(space).exists()]
        each = [dataclasses.replace(one, elsewhere=elsewhere(one.space, family)) for one in each]
        each = [one for one in each if one.elsewhere]
    wanted = [dataclasses.replace(one, seed=seed) for seed in range(asked.seeds) for one in each]
    status = complete(wanted, results, data, asked.jobs)
    if asked.part == "warm":
        print(transfer(results, data, each, asked.seeds))
    else:
        print(comparison(results, asked.spaces, asked.samplers, asked.seeds))
    return status


if __name__ == "__main__":
    sys.exit(main())
