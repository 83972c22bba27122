"""Fit the constants of predicted collectives, and report errors for devices left out of the fit.

    python -m benchmarks.collective_fit [--data FOLDER]

FOLDER contains `predict/nccl_*.csv.gz` and `training/vtrain_allreduce.csv` (its README names the sources).
The curves of `tests/data/nccl_tests.toml` are used as well. All are times of nccl-tests in a loop. Those of
devices without peer access are apart (`staged_curves`): a share of the bandwidth of PCI Express is their only
constant (`staged_share`), since it differs between machines by more than the rest of the law.

Constants (`CollectiveConstants`; the share of a PCI Express link that remains in groups of more than two; the
latency of a network) are shared by all devices. Latencies of software and host differ between machines with
the same GPU by up to half, so each machine has a pace in the fit, a factor on its latencies. The
paces of GPUs have a geometric mean of 1, and predictions use 1. The loss is that of the logarithm of
predicted over measured time, quadratic below 30 % and linear above. GPUs have equal weights. Constants have
wide log-normal priors around first guesses, which were chosen with the data in view.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunebench import device as devices
from tunebench.training.interconnect.cluster import Cluster, Link, ProcessGroup, link_of, links
from tunebench.training.interconnect.collective import (
    REACHES,
    Collective,
    CollectiveConstants,
    bus_gb_s,
    collective_us,
)

Array = NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"

MACHINES = {
    "a100_sxm": ("a100-80-sxm", "A100"),
    "h100_sxm": ("h100-sxm", "H100, H200"),
    "b200_sxm": ("b200", "B200, GB200"),
    "gb200": ("b200", "B200, GB200"),
    "rtx_pro_6000_server": ("rtx-pro-6000-server", "RTX PRO 6000"),
}
"""Product whose links a file of collectives has, and the GPU that is left out of a fit together."""

GPUS = {
    "a100-80-sxm": "A100",
    "a100-40-sxm": "A100",
    "h100-sxm": "H100, H200",
    "h200-sxm": "H100, H200",
}

COLLECTIVE: dict[str, Collective] = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}

GUESSES = {
    "base_us": (6.0, 2.0),
    "steps": (1.6, 0.25),
    "low_latency_share": (0.25, 0.4),
    "larger_us": (5.0, 1.0),
    "ll128_share": (0.4, 0.25),
    "bulk_steps": (3.0, 0.25),
    "last_part": (0.36, 0.25),
    "ramp": (0.3, 0.25),
    "pairs_share": (0.85, 0.25),
    "switch_us": (10.0, 0.25),
    "switch_share": (0.85, 0.25),
    "group_share": (0.6, 0.3),
    "network_latency_us": (6.0, 0.5),
}
"""First guess and standard deviation of the logarithm of each constant."""

PACED = ("base_us", "steps", "larger_us", "bulk_steps", "switch_us")
"""Constants that the pace of a machine multiplies."""

PACE_DEVIATION = 0.5
KNEE = 0.3
FEW = 100
"""Times of a GPU that have half the weight of many."""

EQUAL = 1000.0
"""Weight of the times of a GPU, relative to that of a prior."""

SIZES = {
    "below 64 KB": (0, 1 << 16),
    "64 KB to 1 MB": (1 << 16, 1 << 20),
    "1 to 32 MB": (1 << 20, 1 << 25),
} | {"from 32 MB": (1 << 25, 1 << 62)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Fitted constants: those of the law, and two of links (`tunebench/links.toml`)."""

    law: CollectiveConstants
    group_share: float
    network_latency_us: float

    @classmethod
    def of(cls, constants: Mapping[str, float]) -> Fitted:
        """Return the constants of the given names."""
        links = {name: constants[name] for name in ("group_share", "network_latency_us")}
        rest = {name: value for name, value in constants.items() if name not in links}
        return cls(law=CollectiveConstants(**rest), **links)

    def paced(self, pace: float) -> Fitted:
        """Return the constants of a machine of another pace."""
        law = replace(self.law, **{name: getattr(self.law, name) * pace for name in PACED})
        return replace(self, law=law)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Measured times of one collective, by bytes of the tensor, on one machine."""

    machine: str
    gpu: str
    collective: Collective
    group: ProcessGroup
    nbytes: Array
    us: Array

    def predict(self, fitted: Fitted | None = None) -> Array:
        """Return the times by the given constants, or else by those installed."""
        if fitted is None:
            return collective_us(self.collective, self.nbytes, self.group)
        inside, between = self.group.inside, self.group.between
        if inside.group_share < 1:
            inside = replace(inside, group_share=fitted.group_share)
        if self.group.nodes > 1:
            between = replace(between, latency_us=fitted.network_latency_us)
        group = replace(self.group, inside=inside, between=between)
        return collective_us(self.collective, self.nbytes, group, fitted.law)


def curves(folder: Path = DATA) -> list[Curve]:
    """Read every measured curve, without times that are those of the host."""
    curves_measured = [curve for name in MACHINES for curve in _sweep(folder, name)]
    direct = [curve for curve in _nccl_tests() if curve.group.inside.peer_access]
    return curves_measured + list(_vtrain(folder)) + direct


def staged_curves() -> list[Curve]:
    """Read the measured curves of devices without peer access."""
    return [curve for curve in _nccl_tests() if not curve.group.inside.peer_access]


def staged_share(data: list[Curve]) -> dict[str, float]:
    """Return the share of the bandwidth with peer access that each machine reaches with its largest message.

    Args:
        data: Curves of devices without peer access; those of one machine are joined by a geometric mean.
    """
    logarithms = defaultdict(list)
    for curve in data:
        inside = curve.group.inside
        peer = replace(inside, efficiency=links()[inside.name.removesuffix("-no-p2p")].efficiency)
        direct_us = collective_us(curve.collective, curve.nbytes, replace(curve.group, inside=peer))
        logarithms[curve.machine].append(np.log(direct_us[-1] / curve.us[-1]))
    return {machine: float(np.exp(np.mean(values))) for machine, values in logarithms.items()}


def staged_report(data: list[Curve]) -> str:
    """Return the measured and predicted bus bandwidth of the largest message of each curve, as Markdown."""
    lines = ["| machine | GPUs | measured GB/s | predicted GB/s | share |", "|---" * 5 + "|"]
    shares = staged_share(data)
    for curve in data:
        count, nbytes = curve.group.size, curve.nbytes[-1]
        measured = bus_gb_s(curve.collective, nbytes, curve.us[-1], count)
        predicted = bus_gb_s(curve.collective, nbytes, curve.predict()[-1], count)
        share = shares[curve.machine]
        lines.append(f"| {curve.machine} | {count} | {measured:.2f} | {predicted:.2f} | {share:.2f} |")
    return "\n".join(lines)


def _sweep(folder: Path, name: str) -> Iterable[Curve]:
    product, gpu = MACHINES[name]
    link = link_of(devices.find(product), network=False)
    groups = defaultdict(list)
    with gzip.open(folder / "predict" / f"nccl_{name}.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["op_name"], int(row["num_gpus"]), row["nccl_dtype"]
            itemsize = 2 if row["nccl_dtype"] == "half" else 1
            groups[key].append((int(row["message_elements"]) * itemsize, float(row["latency_ms"]) * 1e3))
    for (collective, count, dtype), rows in groups.items():
        nbytes, us = np.array(rows, dtype=np.float64).T
        yield Curve(
            machine=name,
            gpu=gpu,
            collective=COLLECTIVE[collective],
            group=_node(count, link if dtype == "half" else replace(link, reduces=False)),
            nbytes=nbytes,
            us=us,
        )


def _vtrain(folder: Path) -> Iterable[Curve]:
    link = link_of(devices.find("a100-80-sxm"), network=False)
    groups = defaultdict(list)
    with (folder / "training" / "vtrain_allreduce.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["device"] == "a100":  # V100: rings depend on which devices of the mesh take part
                groups[int(row["gpus"])].append((float(row["bytes"]), float(row["out_of_place_us"])))
    for count, rows in groups.items():
        nbytes, us = np.array(rows).T
        yield Curve(
            machine="vtrain",
            gpu="A100",
            collective="all-reduce",
            group=_node(count, link),
            nbytes=nbytes,
            us=us,
        )


def _node(count: int, link: Link) -> ProcessGroup:
    return ProcessGroup(local=count, nodes=1, inside=link, between=link)


def _nccl_tests() -> Iterable[Curve]:
    text = (ROOT / "tests/data/nccl_tests.toml").read_text(encoding="utf-8")
    for entry in tomllib.loads(text)["curve"]:
        sizes = np.array(entry["log2_bytes"])
        is_fitted = sizes >= entry.get("host_bound", 0)
        count, nodes = entry.get("gpus", 8 * entry["nodes"]), entry["nodes"]
        product = devices.find(entry["device"])
        cluster = Cluster.of(product, devices=count, nodes=nodes, link=entry.get("link"))
        yield Curve(
            machine=entry.get("machine", entry["name"].removeprefix(f"{count} x ")),
            gpu=GPUS.get(product.name, product.name),
            collective="all-reduce",
            group=cluster.group(count),
            nbytes=2.0 ** sizes[is_fitted],
            us=np.array(entry["us"])[is_fitted],
        )


def fit(data: list[Curve]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the fitted constants and the pace of each machine.

    Args:
        data: Curves to fit to.
    """
    from scipy.optimize import least_squares

    guesses, deviations = np.array(list(GUESSES.values())).T
    machines = list(dict.fromkeys(machine_curve.machine for machine_curve in data))
    gpu_of = {machine_curve.machine: machine_curve.gpu for machine_curve in data}
    gpus = [
        np.array([gpu_of[machine] == gpu for machine in machines]) for gpu in dict.fromkeys(gpu_of.values())
    ]
    rows = defaultdict(int, {})
    for curve in data:
        rows[curve.gpu] += len(curve.us)

    def residuals(point: Array) -> Array:
        offset, log_pace = point[: len(guesses)], point[len(guesses) :]
        law = Fitted.of(dict(zip(GUESSES, guesses * np.exp(offset), strict=True)))
        laws = {name: law.paced(pace) for name, pace in zip(machines, np.exp(log_pace), strict=True)}
        terms = [offset / deviations, log_pace / PACE_DEVIATION]
        terms.append(np.array([30 * np.mean([log_pace[which].mean() for which in gpus])]))
        for curve in data:
            missed = np.log(curve.predict(laws[curve.machine]) / curve.us) / KNEE
            weight = np.sqrt(EQUAL / (rows[curve.gpu] + FEW))
            terms.append(weight * np.sqrt(np.sqrt(1 + missed**2) - 1))
        return np.concatenate(terms)

    solution = least_squares(residuals, np.zeros(len(guesses) + len(machines)), xtol=1e-5, ftol=1e-5).x
    constants = guesses * np.exp(solution[: len(guesses)])
    paces = np.exp(solution[len(guesses) :])
    return dict(zip(GUESSES, map(float, constants), strict=True)), dict(
        zip(machines, map(float, paces), strict=True)
    )


def ratios(data: list[Curve]) -> list[Array]:
    """Return predicted over measured times of each curve, by the installed constants."""
    return [curve.predict() / curve.us for curve in data]


def held_out(data: list[Curve]) -> tuple[list[Array], list[Array]]:
    """Return predicted over measured times by constants fitted without the curve's GPU.

    The second list has the machine's pace from one measured time: its smallest all-reduce on most devices.
    """
    plain: dict[int, Array] = {}
    calibrated: dict[int, Array] = {}
    for gpu in dict.fromkeys(curve.gpu for curve in data):
        fitted = Fitted.of(fit([curve for curve in data if curve.gpu != gpu])[0])
        left_out = [(index, curve) for index, curve in enumerate(data) if curve.gpu == gpu]
        paces = {
            name: _pace([curve for _, curve in left_out if curve.machine == name], fitted)
            for name in MACHINES
        }
        for index, curve in left_out:
            plain[index] = curve.predict(fitted) / curve.us
            paced = fitted.paced(paces.get(curve.machine, 1.0))
            calibrated[index] = curve.predict(paced) / curve.us
    return [plain[index] for index in range(len(data))], [calibrated[index] for index in range(len(data))]


def _pace(data: list[Curve], fitted: Fitted) -> float:
    sums = [curve for curve in data if curve.collective == "all-reduce"]
    if not sums:
        return 1.0
    largest = max(sums, key=lambda curve: curve.group.size)
    smallest = int(largest.nbytes.argmin())
    return float(largest.us[smallest] / largest.predict(fitted)[smallest])


def report(data: list[Curve], predictions: Mapping[str, list[Array]]) -> str:
    """Return tables of mean absolute errors, by machine, number of devices and size, as Markdown.

    Args:
        data: Measured curves.
        predictions: Predicted over measured times of each curve, by the name of a prediction.
    """
    parts = []
    for title, key in (
        ("machine", lambda curve: curve.machine),
        ("collective", lambda curve: curve.collective),
        ("machine and GPUs", lambda curve: f"{curve.machine}, {curve.group.size}"),
    ):
        parts += [f"| {title} | times | {' | '.join(predictions)} |", "|---" * (2 + len(predictions)) + "|"]
        for name in dict.fromkeys(map(key, data)):
            which = [index for index, curve in enumerate(data) if key(curve) == name]
            cells = [_error([values[index] for index in which]) for values in predictions.values()]
            parts.append(f"| {name} | {sum(len(data[i].us) for i in which)} | {' | '.join(cells)} |")
        parts.append("")
    parts += [
        f"| machine and bytes | times | {' | '.join(predictions)} |",
        "|---" * (2 + len(predictions)) + "|",
    ]
    for name in dict.fromkeys(curve.machine for curve in data):
        for label, (low, high) in SIZES.items():
            picked = [
                (index, (curve.nbytes >= low) & (curve.nbytes < high))
                for index, curve in enumerate(data)
                if curve.machine == name
            ]
            count = sum(int(where.sum()) for _, where in picked)
            if count:
                cells = [_error([v[index][where] for index, where in picked]) for v in predictions.values()]
                parts.append(f"| {name}, {label} | {count} | {' | '.join(cells)} |")
    return "\n".join(parts)


def _error(values: list[Array]) -> str:
    missed = np.concatenate(values) - 1
    return f"{np.abs(missed).mean():.1%} ({missed.mean():+.1%})"


def interval(data: list[Curve], machine_ratios: list[Array]) -> tuple[float, float, float]:
    """Return the 5th and 95th percentile of measured over predicted times, and the share within `REACHES`.

    Every GPU has the same weight.
    """
    under = np.concatenate([1 / ratio for ratio in machine_ratios])
    rows: dict[str, int] = defaultdict(int)
    for curve in data:
        rows[curve.gpu] += len(curve.us)
    weights = np.concatenate([np.full(len(curve.us), 1 / (rows[curve.gpu] + 100)) for curve in data])
    order = np.argsort(under)
    below = np.cumsum(weights[order]) / weights.sum()
    low, high = (float(under[order][np.searchsorted(below, share)]) for share in (0.05, 0.95))
    inside = (under >= REACHES[0]) & (under <= REACHES[1])
    return low, high, float((inside * weights).sum() / weights.sum())


def main() -> None:
    """Print the constants, the pace of each machine and tables of errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measured collectives")
    options = parser.parse_args()
    print(staged_report(staged_curves()), end="\n\n")
    data = curves(options.data)
    constants, paces = fit(data)
    print("constants", {name: round(value, 3) for name, value in constants.items()})
    print("pace", {name: round(value, 2) for name, value in paces.items()})
    plain, calibrated = held_out(data)
    predictions: dict[str, list[Any]] = {
        "installed constants": ratios(data),
        "GPU left out": plain,
        "GPU left out, pace from one time": calibrated,
    }
    print(report(data, predictions))
    for name, values in predictions.items():
        low, high, inside = interval(data, values)
        print(f"{name}: 90 % of times in {low:.2f} to {high:.2f} of predicted; {inside:.0%} within {REACHES}")


if __name__ == "__main__":
    main()
