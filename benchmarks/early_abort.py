"""What giving up hopeless configurations saves: kernel time, on recorded spaces with their raw samples.

    python -m benchmarks.early_abort [FILE ...] [--seeds 20] [--after 1] [--factor 1.5] [--json]

A tuner runs every configuration of a space in random order. One whose fastest sample after so many exceeds
`factor` times the median of the best so far is given up, as `tunebench.measure.timing` does. What is saved is
the share of the time of all samples; the optimum is lost if the configuration of least median was given up.
Files are Kernel Tuner's cache files; without any, those beside the checkout.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tunebench.measure.timing import Protocol

RECORDED = Path(__file__).resolve().parents[2] / "shared" / "data" / "recorded"

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one order of a space has come to.

    Attributes:
        share: Of the time of all samples, what was not spent.
        given_up: Share of the configurations that were given up.
        lost: Whether the configuration of the least median was among them.
    """

    share: float
    given_up: float
    lost: bool


def read(path: Path) -> Array:
    """Return the samples of every configuration that has them, `(configurations, repeats)`, in ms."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        entries = json.load(file)["cache"].values()
    samples = [entry["times"] for entry in entries if isinstance(entry.get("time"), int | float)]
    repeats = min(map(len, samples))
    return np.array([taken[:repeats] for taken in samples])


def abort(samples: Array, order: NDArray[np.int64], *, after: int, factor: float) -> Saved:
    """Run configurations in an order, giving up what is hopeless against the best before.

    Args:
        samples: `(configurations, repeats)`.
        order: The configurations, each once.
        after: Samples that decide.
        factor: Of the incumbent's median.
    """
    medians = np.median(samples[order], axis=1)
    first = samples[order, :after].min(axis=1)
    given_up = np.zeros(len(order), bool)
    incumbent = np.inf
    for place, (median, fastest) in enumerate(zip(medians, first, strict=True)):
        given_up[place] = fastest > factor * incumbent
        if not given_up[place]:
            incumbent = min(incumbent, median)
    spared = samples[order][given_up, after:].sum()
    return Saved(
        share=float(spared / samples.sum()),
        given_up=float(given_up.mean()),
        lost=bool(given_up[np.argmin(medians)]),
    )


def space_of(path: Path) -> str:
    """Return a name for a file: its folder and itself."""
    return f"{path.parent.name}/{path.name.partition('.')[0]}"


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--after", type=int, default=1)
    parser.add_argument("--factor", type=float, default=Protocol().abort_factor)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    files = given.files or sorted(p for p in RECORDED.glob("*/*.json.gz") if "_T4" not in p.name)
    if not files:
        print(f"no recorded spaces in {RECORDED}; name files of Kernel Tuner")
        return
    rows = []
    for path in files:
        samples = read(path)
        orders = [np.random.default_rng(seed).permutation(len(samples)) for seed in range(given.seeds)]
        runs = [abort(samples, order, after=given.after, factor=given.factor) for order in orders]
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
    if given.json:
        print(json.dumps(rows))
        return
    print(f"given up after {given.after} samples at {given.factor:g} times the best, {given.seeds} orders")
    for row in rows:
        print(
            f"{row['space']:30} {row['configurations']:6} configurations of {row['repeats']:2} samples: "
            f"saved {row['saved']:.3f} of kernel time (least {row['least']:.3f}), "
            f"gave up {row['given_up']:.3f}, lost the optimum {row['lost']} times"
        )


if __name__ == "__main__":
    main()
