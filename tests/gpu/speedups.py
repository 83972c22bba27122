"""Best time of each variant in an acceptance run, and its speedup over the baselines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tunebench.db.record import Record
from tunebench.outcome import Measured
from tunebench.workloads import parse

__all__ = ["bandwidth_shares", "best_of_each", "fusion_gains", "ratios"]

ALL = "best of all"


def best_of_each(entries: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Return the fastest measured configuration of each variant, the fastest variant first.

    Args:
        entries: Database records of one workload on one device.

    Returns:
        By variant: `config` as text, `median_us`, and `bound_us` of that configuration.
    """
    best: dict[str, dict[str, Any]] = {}
    for entry in entries:
        outcome, variant = entry.result.outcome, entry.key.variant
        if not isinstance(outcome, Measured):
            continue
        if variant not in best or outcome.median_us < best[variant]["median_us"]:
            best[variant] = {
                "config": str(entry.key.config),
                "median_us": outcome.median_us,
                "bound_us": entry.bound_us,
            }
    return dict(sorted(best.items(), key=lambda item: float(item[1]["median_us"])))


def ratios(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the speedups over the baselines by workload and path (variant), and their geometric means.

    Args:
        rows: One per workload: `workload`, `paths` (names of variants), `rows` (`name` and `median_us` of
            all).

    Returns:
        `by_workload`: for each workload and path, the time of each baseline over the time of the path; the
        baseline `fastest` is the fastest of them. `geometric_means`: means over the workloads where both were
        timed, with the number of workloads; the path `best of all` is the fastest path of each workload.
        Above 1: the variant is faster.
    """
    by_workload: dict[str, Any] = {}
    for row in rows:
        times = {entry["name"]: entry["median_us"] for entry in row.get("rows", []) if "median_us" in entry}
        ours = {name: us for name, us in times.items() if name in row["paths"]}
        library_times = {name: us for name, us in times.items() if name not in row["paths"]}
        if ours and library_times:
            paths = {**ours, ALL: min(ours.values())}
            compared = {**library_times, "fastest": min(library_times.values())}
            by_workload[row["workload"]] = {
                path: {name: us / own_us for name, us in compared.items()} for path, own_us in paths.items()
            }
    return {"by_workload": by_workload, "geometric_means": _means(by_workload.values())}


def fusion_gains(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the time of each fused workload, the sum of the times of its parts, and the ratio.

    Args:
        rows: Tuning reports, one per workload; fused workloads with an unmeasured part are skipped.
    """
    times = {row["workload"]: row["median_us"] for row in rows if row.get("median_us")}
    gains = {}
    for text, whole_us in times.items():
        parts = [times.get(str(part)) for part in parse(text).unfused()]
        if parts and None not in parts:
            parts_us = math.fsum(us for us in parts if us is not None)
            gains[text] = {"whole_us": whole_us, "parts_us": parts_us, "gain": parts_us / whole_us}
    return gains


def bandwidth_shares(rows: Iterable[Mapping[str, Any]], copy_gb_s: float | None) -> dict[str, float]:
    """Return the bandwidth of each memory-bound workload as a fraction of the bandwidth of a copy.

    Args:
        rows: Tuning reports, one per workload; workloads with matrix products are skipped.
        copy_gb_s: Bandwidth of a large copy (read and written), in GB/s; without it the result is empty.
    """
    if not copy_gb_s:
        return {}
    shares = {}
    for row in rows:
        workload = parse(row["workload"])
        if row.get("median_us") and workload.category != "dot product":
            shares[row["workload"]] = workload.traffic().total_bytes / row["median_us"] / 1e3 / copy_gb_s
    return shares


def _means(ratios_by_workload: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    gathered: dict[str, dict[str, list[float]]] = {}
    for paths in ratios_by_workload:
        for path, compared in paths.items():
            for name, ratio in compared.items():
                gathered.setdefault(path, {}).setdefault(name, []).append(ratio)
    return {
        path: {
            name: {
                "ratio": math.exp(math.fsum(map(math.log, values)) / len(values)),
                "workloads": len(values),
            }
            for name, values in compared.items()
        }
        for path, compared in gathered.items()
    }
