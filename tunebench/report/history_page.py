"""The page of search histories: an overview, and a section for each workload and device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tunebench._figure import duration, significant
from tunebench.db.record import Record
from tunebench.outcome import Aborted, Measured, first_error, time_us
from tunebench.report.best_kernel import BestKernel
from tunebench.report.chart import (
    Bar,
    Line,
    Point,
    bar_chart,
    gap_chart,
    history_chart,
    interval_chart,
    slice_chart,
    stacked_bar,
)
from tunebench.report.history import ParameterEffect, SearchHistory, best_records
from tunebench.report.page import (
    config_cell,
    data_table,
    figure,
    folded,
    legend,
    number_cell,
    page,
    safe,
    tiles,
    time_cell,
)
from tunebench.report.roofline_chart import roofline_chart
from tunebench.report.svg import rate_text

__all__ = ["SuiteCounts", "history_page"]

MOST_POINTS = 3000
"""Most trials in a chart; of a longer history, evenly spaced trials and every new best one are drawn."""
MOST_ROWS = 50
"""Most configurations in a table."""
MOST_SLICES, MOST_SLICE_POINTS = 8, 60
"""Most parameters with a chart of their values, and most points of each value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteCounts:
    """How often one pass of a suite runs each workload.

    Attributes:
        name: Name of the suite.
        counts: Number of calls by canonical text of the workload.
    """

    name: str
    counts: Mapping[str, int] = field(default_factory=dict)


def history_page(
    histories: Sequence[SearchHistory], *, database: str, suite: SuiteCounts | None = None
) -> str:
    """Return the report of search histories as one HTML page.

    Args:
        histories: The search histories.
        database: Path of the database, or URL without password; or the file of a recording.
        suite: Suite whose workloads these are; None for any workloads.
    """
    source = f"<p>Source: {safe(database)}</p>"
    if len(histories) == 1 and suite is None:
        return page("Tuning report", source + _section(0, histories[0]))
    parts = [source, *_suite(histories, suite), _overview(histories, suite)]
    parts += [_section(place, history) for place, history in enumerate(histories)]
    return page("Tuning report" if suite is None else f"Tuning report of {suite.name}", "\n".join(parts))


# -- overview ------------------------------------------------------------------------------------------------


def _suite(histories: Sequence[SearchHistory], suite: SuiteCounts | None) -> Iterator[str]:
    """Yield the time of one pass of a suite on each device, and its workloads without a record."""
    if suite is None:
        return
    for device in dict.fromkeys(history.device for history in histories):
        there = {history.workload: history for history in histories if history.device == device}
        timed = {
            name: time_us(h.best.result.outcome) or 0.0 for name, h in there.items() if h.best is not None
        }
        before_us = {name: us * (there[name].speedup or 1.0) for name, us in timed.items()}
        after = sum(suite.counts[name] * us for name, us in timed.items())
        before = sum(suite.counts[name] * us for name, us in before_us.items())
        facts = {
            "workloads with a time": f"{len(timed)} of {len(suite.counts)}",
            "one pass of these": duration(after),
            "by the defaults": duration(before),
            "speedup": f"{before / after:.2f}x" if after else "-",
        }
        yield f"<h2>{safe(device)}</h2>{tiles(facts)}"
        missing = [name for name in suite.counts if name not in timed]
        if missing:
            items = "".join(f"<li>{safe(name)}</li>" for name in missing)
            yield folded(f"{len(missing)} workloads without a time", f"<ul>{items}</ul>")


def _overview(histories: Sequence[SearchHistory], suite: SuiteCounts | None) -> str:
    columns = ["workload", "device", ">records", ">best", "how", ">speedup over default", ">over library"]
    columns += [">best / bound"]
    if suite is not None:
        columns[2:2] = [">calls", ">all calls"]
    rows = []
    for place, history in enumerate(histories):
        best_us = time_us(history.best.result.outcome) if history.best is not None else None
        row = [
            f'<a href="#history{place}">{safe(history.workload)}</a>',
            safe(history.device),
            str(len(history.records)),
            time_cell(best_us),
            safe(history.best.result.outcome.kind if history.best else ""),
            number_cell(history.speedup, 3, "x"),
            number_cell(min(history.library_ratios.values(), default=None), 3, "x"),
            number_cell(history.bound_ratio, 3),
        ]
        if suite is not None:
            count = suite.counts[history.workload]
            row[2:2] = [str(count), time_cell(None if best_us is None else count * best_us)]
        rows.append(row)
    return data_table(columns, rows)


# -- one search history --------------------------------------------------------------------------------------


def _section(place: int, history: SearchHistory) -> str:
    kernel = history.kernel or BestKernel()
    parts = [
        f'<section id="history{place}"><h2>{safe(history.workload)}</h2><p>{safe(history.device)}</p>',
        _tiles(history, kernel),
    ]
    if history.best is not None:
        parts += [_search(history, kernel), _baselines(history), _roofline(history, kernel)]
        parts.append(_winner(history.best, kernel))
    parts += [_effects(history.effects), _configurations(history), _outcomes(history), _effort(history)]
    return "\n".join((*filter(None, parts), _environment(history), "</section>"))


def _tiles(history: SearchHistory, kernel: BestKernel) -> str:
    best = history.best
    if best is None:
        return tiles({"records": str(len(history.records)), "best time": "none succeeded"})
    facts = {f"best time, {best.result.outcome.kind}": duration(_us(best))}
    if history.optimum_us is not None:
        facts["optimum of the recording / best"] = f"{history.optimum_us / _us(best):.3f}"
    if history.speedup is not None:
        facts["speedup over default"] = f"{history.speedup:.2f}x"
    for name, ratio in sorted(history.library_ratios.items(), key=lambda item: item[1])[:1]:
        facts[f"speedup over {name}"] = f"{ratio:.2f}x"
    gap = kernel.gaps[-1] if kernel.gaps and isinstance(best.result.outcome, Measured) else None
    if gap is not None:
        facts["optimality gap"] = "1, proved" if gap == 1 else significant(gap)
    elif history.bound_ratio is not None:
        facts["best / lowest bound"] = significant(history.bound_ratio)
    failures = sum(count for _, _, count in history.failures)
    trials = len({record.key for record in history.records})
    return tiles(facts | {"trials": str(trials), "failures": str(failures)})


def _search(history: SearchHistory, kernel: BestKernel) -> str:
    points = list(_points(history.records))
    drawn = _thinned(points)
    lines = list(_lines(history))
    svg = history_chart(drawn, lines, trials=len(history.records), name="Time of each trial")
    marks = [(style, style) for style in dict.fromkeys(point.style for point in drawn)]
    marks += [
        ("best", "best so far"),
        *((line.style, f"{line.label}: {duration(line.us)}") for line in lines),
    ]
    found = f"<h3>Search history</h3>{figure(svg)}{legend(marks)}"
    if len(drawn) < len(points):
        found += f"<p>{len(drawn)} of {len(points)} trials with a time are drawn.</p>"
    return found + _gaps(history, kernel)


def _gaps(history: SearchHistory, kernel: BestKernel) -> str:
    chart = figure(gap_chart(kernel.gaps, name="Best time over lowest open bound after each trial"))
    if not chart:
        return ""
    meaning = "Best time so far over the lowest lower bound of a configuration that may still be faster."
    if history.best is not None and isinstance(history.best.result.outcome, Measured):
        proof = "At 1 the best is proved optimal in its search space."
        return f"<h3>Optimality gap</h3><p>{meaning} {proof}</p>{chart}"
    return f"<h3>Predicted time over lower bound</h3><p>{meaning} A predicted time proves nothing.</p>{chart}"


def _points(records: Sequence[Record]) -> Iterator[Point]:
    for trial, record in enumerate(records, start=1):
        outcome = record.result.outcome
        us = min(outcome.samples_us) if isinstance(outcome, Aborted) else time_us(outcome)
        style = "finalist" if record.purpose == "finalist" else outcome.kind
        if us is not None:
            title = f"{trial}: {duration(us)}, {style}, {record.key.variant} {record.key.config}"
            yield Point(trial=trial, us=us, style=style, title=title)


def _thinned(points: list[Point]) -> list[Point]:
    step, best_us, drawn = -(-len(points) // MOST_POINTS), float("inf"), []
    for place, point in enumerate(points):
        new_best = point.style != "aborted" and point.us < best_us
        if new_best:
            best_us = point.us
        if new_best or place % step == 0:
            drawn.append(point)
    return drawn


def _lines(history: SearchHistory) -> Iterator[Line]:
    if history.bound_us is not None:
        yield Line(style="bound", label="lowest bound of the trials", us=history.bound_us)
    if history.default is not None:
        yield Line(style="default", label="default configuration", us=_us(history.default))
    if history.optimum_us is not None:
        yield Line(style="library", label="optimum of the recording", us=history.optimum_us)
    if history.best is not None:
        for name, ratio in history.library_ratios.items():
            yield Line(style="library", label=name, us=_us(history.best) * ratio)


def _baselines(history: SearchHistory) -> str:
    best = history.best
    if best is None or not history.baselines:
        return ""
    best_us, outcome = _us(best), best.result.outcome
    ends = outcome.ci_us if isinstance(outcome, Measured) else (None, None)
    bars = [Bar(label="best", value=best_us, note=duration(best_us), style="bar", low=ends[0], high=ends[1])]
    rows = []
    for name, found in history.baselines.items():
        ratio, low, high = found["ratio"], found["low"], found["high"]
        us, whiskers = best_us * ratio, (None, None) if high is None else (best_us * low, best_us * high)
        note = f"{duration(us)}, {ratio:.2f}x"
        bars.append(Bar(label=name, value=us, note=note, style="other", low=whiskers[0], high=whiskers[1]))
        interval = f"at least {low:.2f}" if high is None else f"{low:.2f} to {high:.2f}"
        rows.append((safe(name), time_cell(us), number_cell(ratio, 4, "x"), interval))
    bound_us = history.bound_us
    line = None
    if bound_us is not None:
        line = Bar(label="bound", value=bound_us, note=f"lower bound {duration(bound_us)}", style="bound")
    columns = ("baseline", ">time", ">speedup of best over this (higher is better)", ">95 % interval")
    svg = interval_chart(bars, name="Time of the best, the default and libraries", line=line)
    return f"<h3>Best against default and libraries</h3>{figure(svg)}{data_table(columns, rows)}"


def _roofline(history: SearchHistory, kernel: BestKernel) -> str:
    roof = kernel.roofline
    if roof is None or history.best is None or not roof.flops:
        return ""
    best_us = _us(history.best)
    times = {f"best, {history.best.result.outcome.kind}": (best_us, "measured")}
    if history.default is not None and history.default is not history.best:
        times["default"] = (_us(history.default), "default-dot")
    times |= {name: (best_us * ratio, "library-dot") for name, ratio in history.library_ratios.items()}
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


def _winner(best: Record, kernel: BestKernel) -> str:
    rows = [(f"<code>{safe(name)}</code>", safe(str(value))) for name, value in best.key.config.items()]
    found = (
        f"<h3>Best configuration</h3><p><code>{safe(best.key.variant)}</code> "
        f"{config_cell(best.key.config)}</p>"
        f'<div class="pair">{data_table(("parameter", "value"), rows)}'
        f"{data_table(('resource', 'use'), _resources(best, kernel))}</div>"
    )
    if kernel.changed:
        found += "<p>The source has changed since this was measured; the current source is shown.</p>"
    if kernel.source:
        lines = kernel.source.count("\n")
        found += folded(f"Source of the kernel, {lines} lines", f"<pre>{safe(kernel.source)}</pre>")
    elif kernel.missing:
        found += f"<p>Source and resources: {safe(kernel.missing)}.</p>"
    return found


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
        held = block.occupancy
        if held is not None:
            share = held.warps / held.most_warps
            limits = safe(", ".join(held.limited_by))
            yield "occupancy", f"{held.warps} of {held.most_warps} warps ({share:.0%}), limited by {limits}"
            yield "blocks per SM", str(held.blocks)
    if waves is not None:
        yield (
            "waves",
            f"{significant(waves.count)} of {waves.blocks} blocks, {waves.used:.0%} of SM time in use",
        )
    verification = getattr(outcome, "verification", None)
    if verification is not None:
        worst = f", largest error {verification.worst:.2g} of the tolerance" if verification.worst else ""
        yield "verification", safe(f"{verification.how}{worst}")
    if isinstance(outcome, Measured):
        yield "samples", f"{len(outcome.samples_us)}, {outcome.cache} caches"


def _effects(effects: Sequence[ParameterEffect]) -> str:
    if not effects:
        return ""
    several = len({effect.variant for effect in effects}) > 1
    named = {
        f"{effect.variant.split('/')[-1]}: {effect.name}" if several else effect.name: effect
        for effect in effects
    }
    shares = {name: 100 * effect.importance for name, effect in named.items()}
    most = sorted(named.items(), key=lambda item: -item[1].importance)[:MOST_SLICES]
    slices = "".join(
        f"<figure>{slice_chart(_sampled(effect.times_us), name=f'Times by {name}', title=name)}</figure>"
        for name, effect in most
    )
    rows = (
        (
            safe(effect.variant),
            safe(effect.name),
            safe(value),
            str(len(effect.times_us[value])),
            time_cell(us),
        )
        for effect in effects
        for value, us in effect.medians_us.items()
    )
    table = data_table(("variant", "parameter", "value", ">trials", ">median"), rows)
    return (
        "<h3>Parameter importance</h3>"
        "<p>Share of the variance of log time that a parameter alone explains.</p>"
        + figure(bar_chart(shares, name="Parameter importance", unit=" %"))
        + "<h3>Times by parameter value</h3><p>A point is a trial, a bar the median.</p>"
        + f'<div class="slices">{slices}</div>'
        + folded("Median time by parameter value", table)
    )


def _sampled(groups: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return at most so many times of each group, evenly spaced in their order, the extremes included."""
    found = {}
    for label, times in groups.items():
        ordered = sorted(times)
        count = min(len(ordered), MOST_SLICE_POINTS)
        found[label] = [ordered[round(n * (len(ordered) - 1) / max(1, count - 1))] for n in range(count)]
    return found


def _configurations(history: SearchHistory) -> str:
    best = best_records(history.records)
    if not best:
        return ""
    shown = best[:MOST_ROWS]
    registers = any(record.result.resources.registers is not None for record in shown)
    stale = any(record.stale for record in shown)
    rows = (
        (
            time_cell(time_us(record.result.outcome)),
            record.result.outcome.kind,
            safe(record.key.variant),
            config_cell(record.key.config),
            time_cell(record.bound_us),
            *([str(record.result.resources.registers or "")] * registers),
            *(["stale" if record.stale else "current"] * stale),
        )
        for record in shown
    )
    columns = [">time", "how", "variant", "configuration", ">lower bound"]
    columns += [">registers"] * registers + ["source"] * stale
    more = f"<p>The fastest {MOST_ROWS} of {len(best)}.</p>" if len(best) > MOST_ROWS else ""
    return f"<h3>Fastest configurations</h3>{more}{data_table(columns, rows)}"


def _outcomes(history: SearchHistory) -> str:
    counts = {kind.replace("_", " "): count for kind, count in sorted(history.outcomes.items())}
    found = f"<h3>Outcomes</h3>{figure(bar_chart(counts, name='Trials of each outcome', unit=''))}"
    if history.failures:
        rows = ((str(n), safe(kind.replace("_", " ")), safe(reason)) for kind, reason, n in history.failures)
        found += "<h3>Failures</h3>" + data_table((">times", "failure", "reason"), rows)
    return found


def _effort(history: SearchHistory) -> str:
    effort = history.effort
    shares = {"compile": effort.compile_s, "verify": effort.verify_s, "measure": effort.measure_s}
    shares["overhead"] = history.overhead_s
    if not any(shares.values()):
        return ""
    marks = [
        (f"part{place}", f"{name}: {significant(s, 3)} s") for place, (name, s) in enumerate(shares.items())
    ]
    wall_s = sum(run.wall_s for run in history.runs)
    several = f"{len(history.runs)} finished runs" if len(history.runs) > 1 else "The finished run"
    runs = f"{several} took {significant(wall_s, 3)} s. " if history.runs else ""
    return (
        f"<h3>Time spent</h3><p>{runs}Compilation, verification and measurement are summed over workers, "
        "which work at the same time.</p>"
        + figure(stacked_bar(shares, name="Time spent", unit=" s"))
        + legend(marks)
    )


def _environment(history: SearchHistory) -> str:
    best, device = history.best, history.described
    rows: list[tuple[str, str, object]] = []
    if device is not None:
        facts = {
            "name": device.name,
            "architecture": device.architecture,
            "SMs or cores": device.sm_count,
            "highest clock, MHz": device.max_clock_mhz,
            "memory bandwidth, GB/s": device.dram_gb_s,
            "memory, GiB": significant(device.memory_bytes / 2**30) if device.memory_bytes else None,
            "last-level cache, MiB": significant(device.l2_bytes / 2**20) if device.l2_bytes else None,
        }
        rows += [("device", name, value) for name, value in facts.items() if value]
    rows += [("version", name, value) for name, value in history.versions.items()]
    if best is not None:
        conditions = dict(best.result.conditions) | dict(getattr(best.result.outcome, "conditions", {}))
        rows += [("condition of the best", name, value) for name, value in conditions.items()]
        rows.append(("record of the best", "recorded at", f"{best.recorded_at:%Y-%m-%d %H:%M} UTC"))
        rows.append(("record of the best", "revision of the source", best.key.revision))
    cells = ((what, safe(name.replace("_", " ")), safe(_plain(value))) for what, name, value in rows)
    return f"<h3>Environment</h3>{data_table(('of', 'name', 'value'), cells)}" if rows else ""


def _plain(value: object) -> str:
    if isinstance(value, float):
        return significant(value, 6)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(each)}" for name, each in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(_plain, value))
    return first_error(str(value)) if "\n" in str(value) else str(value)


def _us(record: Record) -> float:
    us = time_us(record.result.outcome)
    return float("nan") if us is None else us
