"""The page that compares the best times of two databases or two devices."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean

from tunebench.report.chart import ratio_chart
from tunebench.report.comparison import ComparedTime, DatabaseComparison
from tunebench.report.page import data_table, figure, legend, number_cell, page, safe, tiles, time_cell

__all__ = ["comparison_page"]

MOST_BARS = 40
"""Largest number of workloads in the chart, which shows the largest ratios of times."""


def comparison_page(comparison: DatabaseComparison) -> str:
    """Return the comparison of two databases or devices as one HTML page, with regressions marked.

    Args:
        comparison: The comparison.
    """
    times = comparison.times
    verdicts = Counter(time.verdict for time in times)
    facts = {"times compared": str(len(times)), "regressions": str(verdicts["regression"])}
    facts |= {"improvements": str(verdicts["improvement"]), "same": str(verdicts["same"])}
    if times:
        mean = math.exp(fmean(math.log(time.speedup) for time in times))
        facts["geometric mean of A / B"] = f"{mean:.3f}x"
    parts = [f"<p>A: {safe(comparison.before)}<br>B: {safe(comparison.after)}</p>", tiles(facts)]
    if not times:
        parts.append("<p>No workload has a time of the same kind and cache state in both.</p>")
    else:
        parts += [_chart(times), "<h2>Times</h2>", _table(times)]
    for title, workloads in (("Only in A", comparison.missing), ("Only in B", comparison.new)):
        if workloads:
            items = "".join(f"<li>{safe(workload)}</li>" for workload in workloads)
            parts.append(f"<h2>{title}</h2><ul>{items}</ul>")
    return page("Comparison of best times", "\n".join(parts))


def _table(times: tuple[ComparedTime, ...]) -> str:
    """Return the table of the times; a device that all of them share is above it."""
    devices = {_device(time) for time in times}
    several = len(devices) > 1
    columns = ["workload", *(["device"] * several), "how", ">A", ">B", ">A / B (higher is better)", "verdict"]
    above = "" if several else f"<p>Device: {safe(devices.pop())}</p>"
    return above + data_table(columns, (_row(time, several) for time in times))


def _device(time: ComparedTime) -> str:
    same = time.before_device == time.after_device
    return time.after_device if same else f"{time.before_device} → {time.after_device}"


def _row(time: ComparedTime, with_device: bool) -> tuple[str, ...]:
    return (
        safe(time.workload),
        *([safe(_device(time))] * with_device),
        safe(time.kind),
        time_cell(time.before_us),
        time_cell(time.after_us),
        number_cell(time.speedup, unit="x"),
        f'<span class="{time.verdict}">{time.verdict}</span>',
    )


def _chart(times: tuple[ComparedTime, ...]) -> str:
    largest = sorted(times, key=lambda time: -abs(math.log(time.speedup)))[:MOST_BARS]
    shown = sorted(largest, key=lambda time: time.speedup)
    repeated = Counter(time.workload for time in shown)
    labels = {
        f"{time.workload}{f' on {time.after_device}' if repeated[time.workload] > 1 else ''}": time
        for time in shown
    }
    ratios = {label: (time.speedup, time.verdict) for label, time in labels.items()}
    verdicts = dict.fromkeys(time.verdict for time in shown)
    more = f"<p>The {MOST_BARS} of {len(times)} that differ most.</p>" if len(times) > MOST_BARS else ""
    return (
        "<h2>A / B, higher is better</h2>"
        + more
        + figure(ratio_chart(ratios, name="Speedup of each workload"))
        + legend((f"fill-{verdict}", verdict) for verdict in verdicts)
    )
