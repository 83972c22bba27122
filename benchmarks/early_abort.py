"""Kernel time saved by early abort of slow configurations, on recorded spaces with raw samples.

    python -m benchmarks.early_abort [FILE ...] [--seeds 20] [--after 1] [--factor 1.5] [--json]

The benchmark runs every configuration of a space in random order. As in `tunebench.measure.timing`, it aborts
a configuration whose fastest sample after the first `--after` exceeds `--factor` times the median of the
incumbent. The saving is the fraction of the time of all samples that is not spent. The optimum is lost if the
configuration with the lowest median is aborted. FILE is a Kernel Tuner cache file; by default, all files next
to the checkout.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.sampler_replays import DATA
from tunebench.measure.timing import Protocol

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Result of one random order of a space.

    Attributes:
        share: Fraction of the time of all samples that was not spent.
        given_up: Fraction of the configurations that were aborted.
        lost: Whether the configuration with the lowest median was aborted.
    """

    share: float
    given_up: float
    lost: bool


def read(path: Path) -> Array:
    """Return the samples of every successful configuration, `(configurations, repeats)`, in milliseconds."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        entries = json.load(file)["cache"].values()
    samples = [entry["times"] for entry in entries if isinstance(entry.get("time"), int | float)]
    repeats = min(map(len, samples))
    return np.array([taken[:repeats] for taken in samples])


def abort(samples: Array, order: NDArray[np.int64], *, after: int, factor: float) -> Saved:
    """Run configurations in order, and abort those much slower than the incumbent.

    Args:
        samples: Samples `(configurations, repeats)`.
        order: Indices of the configurations, each once.
        after: Number of samples before the decision.
        factor: Limit as a multiple of the incumbent's median.
    """
    medians = np.median(samples[order], axis=1)
    first = samples[order, :after].min(axis=1)
    given_up = np.zeros(len(order), bool)
    incumbent = np.inf
    for row, (median, fastest) in enumerate(zip(medians, first, strict=True)):
        given_up[row] = fastest > factor * incumbent
        if not given_up[row]:
            incumbent = min(incumbent, median)
    spared = samples[order][given_up, after:].sum()
    return Saved(
        share=float(spared / samples.sum()),
        given_up=float(given_up.mean()),
        lost=bool(given_up[np.argmin(medians)]),
    )


def space_of(path: Path) -> str:
    """Return the name of a space: its folder and file name."""
    return f"{path.parent.name}/{path.name.partition('.')[0]}"


def main() -> None:
    """Print the saving for each recorded space."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="Kernel Tuner cache files")
    parser.add_argument("--seeds", type=int, default=20, help="random orders, default 20")
    parser.add_argument("--after", type=int, default=1, help="samples before the decision, default 1")
    parser.add_argument(
        "--factor", type=float, default=Protocol().abort_factor, help="limit over the incumbent"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    files = options.files or sorted(p for p in DATA.glob("*/*.json.gz") if "_T4" not in p.name)
    if not files:
        print(f"no recorded spaces in {DATA}; name cache files of Kernel Tuner")
        return
    rows = []
    for path in files:
        samples = read(path)
        orders = [np.random.default_rng(seed).permutation(len(samples)) for seed in range(options.seeds)]
        runs = [abort(samples, order, after=options.after, factor=options.factor) for order in orders]
        rows.append(
            {
                "space": space_of(path),
                "configurations": len(samples),
                "repeats": samples.shape[1],
                "saved": float(np.mean([run.share for run in runs])),
                "least": min(run.share for run in runs),
                "given_up": float(np.mean([run.given_up for run in runs])),
                "lost": sum(run.lost for run in runs),
            }
        )
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"abort after {options.after} samples above {options.factor:g} x incumbent, "
        f"{options.seeds} random orders"
    )
    for row in rows:
        print(
            f"{row['space']:30} {row['configurations']:6} configurations of {row['repeats']:2} samples: "
            f"saved {row['saved']:.3f} of kernel time (lowest {row['least']:.3f}), "
            f"aborted {row['given_up']:.3f} of configurations, lost the optimum in {row['lost']} orders"
        )


if __name__ == "__main__":
    main()
