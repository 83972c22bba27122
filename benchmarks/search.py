"""Search efficiency of the samplers of tunebench and Kernel Tuner on recorded spaces.

    python -m benchmarks.search [compare|warm|overhead] [--seeds 20] [--spaces gemm/RTX_3090,…]
                                [--samplers surrogate,tpe,…] [--jobs 1] [--out search.json] [--data DIR]

`compare`: efficiency, the time of the optimum divided by the best time so far, after 25, 50, 100 and 200
distinct configurations, failures included, as a mean over seeds. The samplers are those of tunebench and four
strategies of Kernel Tuner with its default options (`pip install 'tunebench[peers]'`; skipped without it).
`tpe` is Optuna's TPE; each invalid or repeated proposal is moved to the nearest open configuration.

`warm`: efficiency after 25 and 50 configurations with the other devices of the kernel known to the search.
For comparison: the efficiency of measuring only the fastest 1, 25 or 50 configurations of the other devices.

`overhead`: time from an outcome to the next proposal, on synthetic spaces.

Intervals are 95 %, by bootstrap over seeds. Each result is saved at once. The same command runs only what is
missing, also after Ctrl-C, and searches again where a sampler has changed since. Exit status: 0; 6 if
recorded spaces are missing; 130 after Ctrl-C.
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
    DATA,
    OURS,
    WARM_CHECKPOINTS,
    Data,
    Results,
    Search,
    elsewhere,
    interval,
    markdown,
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
    "convolution_milo/W6600",
    "dedispersion_milo/A100",
    "pnpoly/RTX_2080_Ti",
)
"""Default recorded spaces, as kernel and device. The devices of one kernel share a folder."""

PROPOSALS = 100
"""Proposals over which the overhead of a sampler is measured."""

PROGRESS_EVERY = 10
"""Searches between two progress lines in a log; a terminal shows a progress bar."""


def complete(searches: Sequence[Search], results: Results, data: Data, jobs: int) -> int:
    """Run the missing searches; return 0, or 130 after Ctrl-C.

    Args:
        searches: All searches.
        results: File of the results.
        data: Folder of the recorded spaces.
        jobs: Number of worker processes.
    """
    missing = [search for search in searches if results.get(search) is None]
    todo = [search for search in missing if version(search.sampler) is not None]
    print(f"{len(todo)} of {len(searches)} searches to run", file=sys.stderr)
    if len(todo) < len(missing):
        print(
            "skipped: Kernel Tuner's strategies, not installed (pip install 'tunebench[peers]')",
            file=sys.stderr,
        )
    console = Console(stderr=True)
    bar = functools.partial(track, total=len(todo), console=console, disable=not console.is_terminal)
    try:
        for number, result in enumerate(bar(run_all(todo, data, jobs), "searching"), start=1):
            results.add(result)
            if not console.is_terminal and (number % PROGRESS_EVERY == 0 or number == len(todo)):
                print(f"{number}/{len(todo)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return 130
    return 0


# -- report --------------------------------------------------------------------------------------------------


def figure(samples: Array) -> str:
    """Return the mean of samples as text, with its interval if there is more than one seed."""
    if len(samples) == 1:
        return f"{samples.mean():.3f}"
    low, high = interval(samples)
    return f"{samples.mean():.3f} ({low:.3f} to {high:.3f})"


def figures(
    results: Results, searches: Sequence[Search], counts: Sequence[int], seeds: int
) -> tuple[str, ...]:
    """Return the number of complete seeds, and the mean efficiency after each count.

    The result is empty if no seed has all searches.

    Args:
        results: File of the results.
        searches: Searches to average, one per space.
        counts: Numbers of trials.
        seeds: Number of seeds to look for.
    """
    rows = []
    for seed in range(seeds):
        results_of = [results.get(dataclasses.replace(search, seed=seed)) for search in searches]
        measured = [
            [result.efficiency[count] for count in counts] for result in results_of if result is not None
        ]
        if len(measured) == len(searches):
            rows.append(measured)
    if not rows:
        return ()
    samples = np.array(rows)
    return str(len(rows)), *(figure(samples[:, :, i]) for i in range(len(counts)))


def groups(spaces: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the row groups of a table: each space, and all spaces together."""
    return {space: [space] for space in spaces} | ({"all": spaces} if len(spaces) > 1 else {})


def comparison(results: Results, spaces: Sequence[str], samplers: Sequence[str], seeds: int) -> str:
    """Return a table of the efficiency of each sampler, by space and as the mean over spaces.

    Args:
        results: File of the results.
        spaces: Names of the recorded spaces.
        samplers: Names of the samplers.
        seeds: Number of seeds.
    """
    rows = []
    for name, group in groups(spaces).items():
        for sampler in samplers:
            searches = [Search(space=space, sampler=sampler) for space in group]
            if measured := figures(results, searches, CHECKPOINTS, seeds):
                rows.append((name, sampler, *measured))
    return markdown(("space", "sampler", "seeds", *(f"after {count}" for count in CHECKPOINTS)), rows)


def taken_over(space: Space, recordings: Sequence[RecordedSpace], count: int) -> float:
    """Return the efficiency of measuring only the fastest configurations of other devices.

    They are ordered by the mean of log(time / optimum) over the other devices. Configurations that failed or
    are missing on one of those come last; configurations that do not exist in this space are skipped.

    Args:
        space: The recorded space of this device.
        recordings: Recorded spaces of the other devices.
        count: Number of configurations to measure.
    """
    columns = [
        np.log(times_us / np.nanmin(times_us)) for times_us in space.prospects(recordings).elsewhere_us
    ]
    order = np.argsort(np.nan_to_num(np.mean(columns, axis=0), nan=np.inf, posinf=np.inf), kind="stable")
    here_us = space.recording.times_us[order[:count]]
    return 0.0 if np.isnan(here_us).all() else float(space.recording.optimum_us / np.nanmin(here_us))


def transfer(results: Results, data: Data, searches: Sequence[Search], seeds: int) -> str:
    """Return a table of the efficiency with and without other devices, and of their fastest configurations.

    Args:
        results: File of the results.
        data: Folder of the recorded spaces.
        searches: Searches with a warm start.
        seeds: Number of seeds.
    """
    rows = []
    sources = {search.space: search.elsewhere for search in searches}
    for name, group in groups(tuple(sources)).items():
        for sampler in dict.fromkeys(search.sampler for search in searches):
            cold = [Search(space=space, sampler=sampler) for space in group]
            warm = [dataclasses.replace(search, elsewhere=sources[search.space]) for search in cold]
            for start, of_group in (("cold", cold), ("warm", warm)):
                if measured := figures(results, of_group, WARM_CHECKPOINTS, seeds):
                    rows.append((name, f"{sampler}, {start}", measured[0], "-", *measured[1:]))
        shares = [_taken_over(data, space, sources[space]) for space in group]
        cells = [f"{share:.3f}" for share in np.mean(shares, axis=0)]
        rows.append((name, "fastest of the other devices", "-", *cells))
    head = (f"after {count}" for count in (1, *WARM_CHECKPOINTS))
    return markdown(("space", "configurations from", "seeds", *head), rows)


def _taken_over(data: Data, space: str, spaces: Sequence[str]) -> list[float]:
    recordings = [data.space(source).recording for source in spaces]
    return [taken_over(data.space(space), recordings, count) for count in (1, *WARM_CHECKPOINTS)]


def overhead(samplers: Sequence[str]) -> str:
    """Return a table of the overhead of samplers, in milliseconds."""
    rows = []
    for count, values in sampler_overhead.SIZES.items():
        for sampler in samplers:
            took = sampler_overhead.thinking(sampler, values, PROPOSALS)
            measured = (took.first_s, *(statistic(took.then_s) for statistic in (np.mean, np.median, np.max)))
            rows.append([f"{count:,}", sampler, *(f"{1e3 * seconds:.1f}" for seconds in measured)])
    return markdown(
        ["configurations", "sampler", "first proposal, ms", "mean, ms", "median, ms", "longest, ms"], rows
    )


# -- command line --------------------------------------------------------------------------------------------


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    samplers = (*OURS, *kernel_tuner_search.STRATEGIES)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("compare", "warm", "overhead"), default="compare")
    parser.add_argument("--seeds", type=int, default=20, help="searches per sampler and space, default 20")
    parser.add_argument("--spaces", default=",".join(SPACES), help="recorded spaces, comma-separated")
    parser.add_argument("--samplers", help=f"samplers, comma-separated: {', '.join(samplers)}")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes, default 1")
    parser.add_argument(
        "--out", type=Path, default=Path("search.json"), help="file of the results, default search.json"
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recorded spaces")
    options = parser.parse_args(arguments)
    options.spaces = options.spaces.split(",")
    usual = samplers if options.part == "compare" else ("surrogate",)
    options.samplers = tuple(options.samplers.split(",")) if options.samplers else usual
    allowed = samplers if options.part == "compare" else OURS
    if unknown := set(options.samplers) - set(allowed):
        parser.error(
            f"unknown sampler {', '.join(sorted(unknown))} for {options.part}; known: {', '.join(allowed)}"
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the missing searches, print the table and return the exit status."""
    options = _arguments(arguments)
    if options.part == "overhead":
        print(overhead(options.samplers))
        return 0
    data, results = Data(options.data), Results(options.out)
    if not data.has_all(options.spaces):
        return 6
    search_cases = [
        Search(space=space, sampler=sampler) for space in options.spaces for sampler in options.samplers
    ]
    if options.part == "warm":
        family = [space for space in {*SPACES, *options.spaces} if data.path(space).exists()]
        search_cases = [
            dataclasses.replace(search_case, elsewhere=elsewhere(search_case.space, family))
            for search_case in search_cases
        ]
        search_cases = [search_case for search_case in search_cases if search_case.elsewhere]
    searches = [
        dataclasses.replace(search_case, seed=seed)
        for seed in range(options.seeds)
        for search_case in search_cases
    ]
    status = complete(searches, results, data, options.jobs)
    if options.part == "warm":
        print(transfer(results, data, search_cases, options.seeds))
    else:
        print(comparison(results, options.spaces, options.samplers, options.seeds))
    return status


if __name__ == "__main__":
    sys.exit(main())
