"""How well predicted times rank the configurations of recorded spaces.

    python -m benchmarks.forecast_ranking [--data DIR] [--out FILE]

DIR holds recorded spaces by kernel, for example `gemm/RTX_3090.json.gz`. Each described space is predicted
four times: with the constants of `forecast.execution`, which were fitted to these spaces, and with constants
fitted without its device, without its kernel, and without both. A fit starts at the shipped constants rounded
to one digit of physical meaning (`START`) and is drawn towards them, so that few spaces do not decide all
constants. The table lists, for each space:

- Spearman's rank correlation of predicted and measured times;
- first, ten: the optimum's time over the measured time of the configuration predicted to be fastest, and of
  the fastest of the ten predicted to be fastest;
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.sampler_replays import DATA, markdown, space_at
from tunebench.forecast import interval_us, predict_us
from tunebench.forecast.execution import CONSTANTS, ExecutionConstants
from tunebench.tuning.replay import Space

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

START = ExecutionConstants(
    fma=0.9,
    load_store=0.8,
    shared=0.8,
    l2=0.8,
    l2_over_dram=2.8,
    address_instructions=1.0,
    memory_clocks=500,
    l2_clocks=150,
    shared_clocks=30,
    barrier_clocks=30,
    code_bytes=64e3,
    code_penalty=0.5,
    pipes=3.0,
    waits=3.0,
)
"""Where fits start: latencies as published for these architectures, shares near the peak."""

FITTED = (
    *("fma", "load_store", "shared", "l2", "l2_over_dram", "address_instructions", "memory_clocks"),
    *("l2_clocks", "shared_clocks", "barrier_clocks", "code_bytes", "code_penalty", "pipes", "waits"),
)
"""Constants that are fitted; those for memory and tensor cores come from other data."""

PRIOR = 0.015
"""Weight of the squared logarithmic distance to `START` in the objective of a fit."""

SAMPLED, FASTEST = 900, 250
"""Random and fastest configurations of a space that a fit sees."""

STEPS = 1500
"""Steps of a fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recorded space with the description of its kernel and device.

    Attributes:
        name: Kernel and device.
        space: The space.
    """

    name: str
    space: Space

    @property
    def kernel(self) -> str:
        """Name of the kernel, which may have several spaces."""
        return self.space.recording.kernel

    @property
    def device(self) -> str:
        """Name of the device."""
        return self.space.device.name if self.space.device is not None else ""

    @property
    def times_us(self) -> Array:
        """Measured times; NaN for configurations that failed."""
        return self.space.recording.times_us

    def predicted_us(self, constants: ExecutionConstants, rows: Array | slice = slice(None)) -> Array:
        """Return predicted times.

        Args:
            constants: Constants of the model.
            rows: Configurations; all by default.
        """
        space = self.space
        assert space.bounds is not None
        assert space.costs is not None
        assert space.device is not None
        bounds = dataclasses.replace(
            space.bounds,
            us=space.bounds.us[rows],
            floors={name: floor[rows] for name, floor in space.bounds.floors.items()},
        )
        costs = _of_rows(space.costs, rows, len(space.bounds))
        costs = dataclasses.replace(
            costs, execution=_of_rows(costs.execution, rows, len(space.bounds)) if costs.execution else None
        )
        return predict_us(bounds, costs, space.device, space.traffic, cache="warm", constants=constants)


def _of_rows(record: Any, rows: Any, length: int) -> Any:
    """Return a record of columns with some rows of each."""
    columns = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    shortened = {
        name: column[rows]
        for name, column in columns.items()
        if isinstance(column, np.ndarray) and column.shape == (length,)
    }
    return dataclasses.replace(record, **shortened)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How well a space was ranked; the columns of the table."""

    space: str
    left_out: str
    spearman: float
    first: float
    ten: float
    ties: float
    factor: float
    error: float
    covered: float
    width: float


def ranking(case: Case, constants: ExecutionConstants, left_out: str) -> Ranking:
    """Compare predicted with measured times.

    Args:
        case: The space.
        constants: Constants of the model.
        left_out: What the fit of the constants did not see.
    """
    assert case.space.bounds is not None
    predicted, measured = case.predicted_us(constants), case.times_us
    succeeded = np.isfinite(measured)
    best_us = np.nanmin(measured)
    order = np.argsort(np.where(succeeded, predicted, np.inf), kind="stable")
    low, high = interval_us(predicted, case.space.bounds)
    logs = np.log(predicted[succeeded] / measured[succeeded])
    inside = (low <= measured) & (measured <= high)
    return Ranking(
        space=case.name,
        left_out=left_out,
        spearman=_spearman(predicted[succeeded], measured[succeeded]),
        first=float(best_us / measured[order[0]]),
        ten=float(best_us / np.nanmin(measured[order[:10]])),
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


def fitted(cases: Sequence[Case]) -> ExecutionConstants:
    """Return constants fitted to some spaces.

    The objective is the mean absolute logarithmic error of each space around its own mean, with fast
    configurations weighted by the square of their efficiency, plus 0.3 of that mean, plus `PRIOR`.

    Args:
        cases: The spaces.
    """
    from scipy.optimize import minimize

    samples = [_sample(case) for case in cases]
    start = np.array([getattr(START, name) for name in FITTED])

    def loss(logs: Array) -> float:
        constants = dataclasses.replace(START, **dict(zip(FITTED, start * np.exp(logs), strict=True)))
        total = 0.0
        for case, rows, weights in samples:
            errors = np.log(case.predicted_us(constants, rows) / case.times_us[rows])
            mean = float(errors @ weights)
            total += float(np.abs(errors - mean) @ weights) + 0.3 * abs(mean)
        return total / len(samples) + PRIOR * float(logs @ logs)

    corners = np.vstack([np.zeros(len(start)), 0.4 * np.eye(len(start))])
    options = {"initial_simplex": corners, "maxiter": STEPS, "adaptive": True, "xatol": 1e-3, "fatol": 1e-5}
    best = minimize(loss, corners[0], method="Nelder-Mead", options=options)
    return dataclasses.replace(START, **dict(zip(FITTED, map(float, start * np.exp(best.x)), strict=True)))


def _sample(case: Case) -> tuple[Case, Array, Array]:
    """Return configurations of a space for a fit, with weights of sum 1."""
    times = case.times_us
    fastest = np.argsort(np.where(np.isfinite(times), times, np.inf))[: int(np.isfinite(times).sum())]
    drawn = np.random.default_rng(0).choice(fastest, min(SAMPLED, len(fastest)), replace=False)
    rows = np.unique(np.concatenate([fastest[:FASTEST], drawn]))
    weights = (np.nanmin(times) / times[rows]) ** 2
    return case, rows, weights / weights.sum()


def cases_of(folder: Path) -> list[Case]:
    """Return the described spaces of a folder."""
    cases = []
    for path in sorted(folder.glob("*/*.json.gz")):
        if path.stem.endswith("_T4.json"):
            continue
        space = space_at(path)
        if space.bounds is not None:
            name = f"{path.parent.name} {path.name.removesuffix('.json.gz').replace('_', ' ')}"
            cases.append(Case(name=name, space=space))
    return cases


def rankings(cases: Sequence[Case]) -> Iterable[Ranking]:
    """Yield the rankings of all spaces, with everything seen and with parts left out.

    Args:
        cases: The spaces.
    """
    fits: dict[tuple[str, ...], ExecutionConstants] = {}
    for left_out in ("nothing", "device", "kernel", "kernel and device"):
        for case in cases:
            if left_out == "nothing":
                yield ranking(case, CONSTANTS, left_out)
                continue
            seen = [
                other
                for other in cases
                if not ("device" in left_out and other.device == case.device)
                and not ("kernel" in left_out and other.kernel == case.kernel)
            ]
            if not seen:
                continue
            key = tuple(other.name for other in seen)
            if key not in fits:
                fits[key] = fitted(seen)
            yield ranking(case, fits[key], left_out)


def table(results: Sequence[Ranking]) -> str:
    """Return the results as a Markdown table, with the mean of each part.

    Args:
        results: The rankings.
    """
    head = [field.name.replace("_", " ") for field in dataclasses.fields(Ranking)]
    rows = []
    for left_out in dict.fromkeys(result.left_out for result in results):
        part = [dataclasses.astuple(result) for result in results if result.left_out == left_out]
        means = [float(np.mean([row[column] for row in part])) for column in range(2, len(head))]
        for name, _, *figures in (*part, ("mean", left_out, *means)):
            rows.append([name, left_out, *(f"{figure:.3f}" for figure in figures)])
    return markdown(head, rows)


def main() -> None:
    """Fit, predict, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of recorded spaces")
    parser.add_argument("--out", type=Path, help="JSON file for the rankings")
    parser.add_argument("--fit", action="store_true", help="print constants fitted to all spaces, and end")
    options = parser.parse_args()
    cases = cases_of(options.data)
    if not cases:
        print(f"no recorded spaces of described kernels and devices in {options.data}")
        return
    if options.fit:
        print(fitted(cases))
        return
    total = 4 * len(cases)
    results = list(track(rankings(cases), total=total, console=Console(stderr=True)))
    print(table(results))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(dataclasses.asdict(result)) for result in results)
        options.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
