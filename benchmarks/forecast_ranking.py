"""How well predicted times rank the configurations of recorded spaces.

    python -m benchmarks.forecast_ranking [--data DIR] [--out FILE]

DIR holds recorded spaces by kernel, for example `gemm/RTX_3090.json.gz`. No constant of
`tunebench.forecast.execution` was fitted to such spaces. The table lists, for each space:

- Spearman's rank correlation of predicted and measured times;
- first, ten: the optimum's time over the measured time of the configuration predicted to be fastest, and of
  the fastest of the ten predicted to be fastest; ten random: the mean of the fastest of ten random ones;
- ties: share of configurations whose predicted time equals the shortest within 0.1 %;
- factor: geometric mean of predicted over measured times;
- error: median of |log(predicted / measured)| as a factor; covered, width: share of measured times within the
  90 % interval, and the ratio of its ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.sampler_replays import DATA, markdown, space_at
from tunebench.forecast import interval_us
from tunebench.tuning.replay import Space

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

DRAWS = 10_000
"""Random samples of ten configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How well a space was ranked; the columns of the table."""

    space: str
    spearman: float
    first: float
    ten: float
    ten_random: float
    ties: float
    factor: float
    error: float
    covered: float
    width: float


def ranking(name: str, space: Space) -> Ranking:
    """Compare predicted with measured times.

    Args:
        name: Name of the space.
        space: A space whose kernel and device are described.
    """
    predicted, measured = space.predicted_us(), space.recording.times_us
    assert predicted is not None
    assert space.bounds is not None
    succeeded = np.isfinite(measured)
    best_us = np.nanmin(measured)
    order = np.argsort(np.where(succeeded, predicted, np.inf), kind="stable")
    low, high = interval_us(predicted, space.bounds)
    logs = np.log(predicted[succeeded] / measured[succeeded])
    inside = (low <= measured) & (measured <= high)
    drawn = np.random.default_rng(0).choice(measured[succeeded], (DRAWS, 10))
    return Ranking(
        space=name,
        spearman=_spearman(predicted[succeeded], measured[succeeded]),
        first=float(best_us / measured[order[0]]),
        ten=float(best_us / np.nanmin(measured[order[:10]])),
        ten_random=float((best_us / drawn.min(axis=1)).mean()),
        ties=float((predicted[succeeded] <= 1.001 * predicted[succeeded].min()).mean()),
        factor=math.exp(logs.mean()),
        error=math.exp(float(np.median(np.abs(logs)))),
        covered=float(inside[succeeded].mean()),
        width=float(np.median(high / low)),
    )


def _spearman(predicted: Array, measured: Array) -> float:
    ranks = [_ranks(predicted), _ranks(measured)]
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: Array) -> Array:
    """Return ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Array = (last - (counts + 1) / 2)[inverse]
    return ranks


def described_spaces(folder: Path) -> dict[str, Space]:
    """Return the spaces of a folder whose kernel and device are described, by name.

    Args:
        folder: Folder of recorded spaces.
    """
    spaces = {
        f"{path.parent.name}/{path.name.removesuffix('.json.gz')}": space_at(path)
        for path in sorted(folder.glob("*/*.json.gz"))
        if not path.stem.endswith("_T4.json")
    }
    return {name: space for name, space in spaces.items() if space.bounds is not None}


def table(rankings: Sequence[Ranking]) -> str:
    """Return rankings as a Markdown table, with their mean.

    Args:
        rankings: One for each space.
    """
    head = [field.name.replace("_", " ") for field in dataclasses.fields(Ranking)]
    rows = [dataclasses.astuple(entry) for entry in rankings]
    means = [float(np.mean(column)) for column in list(zip(*rows, strict=True))[1:]]
    named = [*rows, ("mean", *means)]
    return markdown(head, [[name, *(f"{figure:.3f}" for figure in figures)] for name, *figures in named])


def main() -> None:
    """Rank all described spaces, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recorded spaces")
    parser.add_argument("--out", type=Path, help="JSON file for the rankings")
    options = parser.parse_args()
    rankings = [ranking(name, space) for name, space in described_spaces(options.data).items()]
    if not rankings:
        print(f"no recorded spaces of described kernels and devices in {options.data}")
        return
    print(table(rankings))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(dataclasses.asdict(entry)) for entry in rankings)
        options.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
