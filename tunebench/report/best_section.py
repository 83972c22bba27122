"""Sections of a report about the best configuration: rivals, roofline, resources and source."""

from __future__ import annotations

from collections.abc import Iterator

from tunebench._figure import duration, ratio, significant
from tunebench.db.record import Record
from tunebench.outcome import Measured
from tunebench.report.best_kernel import BestKernel
from tunebench.report.chart import Bar, interval_chart
from tunebench.report.history import SearchHistory, record_us
from tunebench.report.page import (
    config_cell,
    data_table,
    figure,
    folded,
    legend,
    ratio_cell,
    safe,
    time_cell,
)
from tunebench.report.roofline_chart import roofline_chart
from tunebench.report.svg import rate_text

__all__ = ["baselines_section", "configuration_section", "roofline_section"]


def baselines_section(history: SearchHistory) -> str:
    """Return the best time next to those of the default and libraries."""
    best = history.best
    if best is None or not history.baselines:
        return ""
    best_us, outcome = record_us(best), best.result.outcome
    bounds = outcome.ci_us if isinstance(outcome, Measured) else (None, None)
    bars = [
        Bar(label="best", value=best_us, note=duration(best_us), style="bar", low=bounds[0], high=bounds[1])
    ]
    rows = []
    for name, versus in history.baselines.items():
        us, (low_us, high_us) = versus.time_us, versus.ci_us or (None, None)
        note = f"{ratio(versus.ratio)}x" if us is None else f"{duration(us)}, {ratio(versus.ratio)}x"
        if us is not None:
            bars.append(Bar(label=name, value=us, note=note, style="other", low=low_us, high=high_us))
        interval = "" if versus.high is None else f"{ratio(versus.low)} to {ratio(versus.high)}"
        rows.append((safe(name), time_cell(us), ratio_cell(versus.ratio), interval))
    bound_us = history.bound_us
    line = None
    if bound_us is not None:
        line = Bar(label="bound", value=bound_us, note=f"lower bound {duration(bound_us)}", style="bound")
    columns = ("baseline", ">time", ">speedup of best over this (higher is better)", ">95 % interval")
    svg = interval_chart(bars, name="Time of the best, the default and libraries", line=line)
    return f"<h3>Best against default and libraries</h3>{figure(svg)}{data_table(columns, rows)}"


def roofline_section(history: SearchHistory, kernel: BestKernel) -> str:
    """Return the roofline with the rates of the best, the default and libraries."""
    roof = kernel.roofline
    if roof is None or history.best is None or not roof.flops:
        return ""
    best_us = record_us(history.best)
    times = {f"best, {history.best.result.outcome.kind}": (best_us, "measured")}
    default = history.figures.default
    if default is not None and default.time_us is not None:
        times["default"] = (default.time_us, "default-dot")
    times |= {name: (us, "library-dot") for name, us in history.library_times_us.items()}
    rates = {name: (roof.flops / (us * 1e3), style) for name, (us, style) in times.items()}
    marks = [("attainable", f"attainable: {rate_text(roof.attainable_gflop_s)}")]
    marks += [(style, f"{name}: {rate_text(rate)}") for name, (rate, style) in rates.items()]
    marks.append(("memory", f"memory: {significant(roof.dram_gb_s)} GB/s"))
    share = roof.us / best_us
    facts = (
        f"{significant(roof.flops / 1e9)} GFLOP and {significant(roof.traffic.total_bytes / 1e6)} MB "
        f"of compulsory traffic: {significant(roof.intensity)} FLOP/byte, {roof.limit} limited. The best "
        f"time reaches {share:.1%} of the roofline ({duration(roof.us)})."
    )
    svg = roofline_chart(roof, rates, name="Roofline")
    return f"<h3>Roofline</h3><p>{facts}</p>{figure(svg)}{legend(marks)}"


def configuration_section(best: Record, kernel: BestKernel) -> str:
    """Return the best configuration with its resources and its source."""
    rows = [(f"<code>{safe(name)}</code>", safe(str(value))) for name, value in best.key.config.items()]
    section = (
        f"<h3>Best configuration</h3><p><code>{safe(best.key.variant)}</code> "
        f"{config_cell(best.key.config)}</p>"
        f'<div class="pair">{data_table(("parameter", "value"), rows)}'
        f"{data_table(('resource', 'use'), _resources(best, kernel))}</div>"
    )
    if kernel.changed:
        section += "<p>The source has changed since this was measured; the current source is shown.</p>"
    if kernel.source:
        lines = kernel.source.count("\n")
        section += folded(f"Source of the kernel, {lines} lines", f"<pre>{safe(kernel.source)}</pre>")
    elif kernel.missing:
        section += f"<p>Source and resources: {safe(kernel.missing)}.</p>"
    return section


def _resources(best: Record, kernel: BestKernel) -> Iterator[tuple[str, str]]:
    used, outcome = best.result.resources, best.result.outcome
    block, waves = kernel.block, kernel.waves
    if used.registers is not None:
        yield "registers per thread", str(used.registers)
    if used.spill_bytes is not None:
        yield "bytes spilled per thread", str(used.spill_bytes)
    if used.static_smem_bytes is not None:
        smem = f"{used.static_smem_bytes} static, {used.dynamic_smem_bytes or 0} dynamic"
        yield "shared memory per block, bytes", smem
    if used.code_bytes is not None:
        yield "machine code, bytes", str(used.code_bytes)
    if block is not None:
        yield "threads per block", str(block.threads)
        occupancy = block.occupancy
        if occupancy is not None:
            share = occupancy.warps / occupancy.most_warps
            limits = safe(", ".join(occupancy.limited_by))
            yield (
                "occupancy",
                f"{occupancy.warps} of {occupancy.most_warps} warps ({share:.0%}), limited by {limits}",
            )
            yield "blocks per SM", str(occupancy.blocks)
    if waves is not None:
        yield (
            "waves",
            f"{significant(waves.count)} of {waves.blocks} blocks, {waves.used:.0%} of SM time in use",
        )
    verification = getattr(outcome, "verification", None)
    if verification is not None:
        worst = (
            f", largest error {significant(verification.worst, 2)} of the tolerance"
            if verification.worst
            else ""
        )
        yield "verification", safe(f"{verification.how}{worst}")
    if isinstance(outcome, Measured):
        yield "samples", f"{len(outcome.samples_us)}, {outcome.cache} caches"
