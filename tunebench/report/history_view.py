"""The page of search histories: an overview, and a section for each workload and device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tunebench._figure import duration, ratio, significant
from tunebench.db.record import Record
from tunebench.objective import quantities_of
from tunebench.outcome import Measured, first_error, time_us
from tunebench.report.best_kernel import BestKernel
from tunebench.report.best_section import baselines_section, configuration_section, roofline_section
from tunebench.report.chart import (
    bar_chart,
    stacked_bar,
)
from tunebench.report.front_section import front_section, metric_text
from tunebench.report.history import SearchHistory, best_records, record_us
from tunebench.report.page import (
    breakable,
    config_cell,
    count_cell,
    data_table,
    figure,
    folded,
    legend,
    page,
    ratio_cell,
    safe,
    tiles,
    time_cell,
)
from tunebench.report.search_section import effects_section, search_section

__all__ = ["SuiteCounts", "history_page"]

MOST_METRICS = 6
"""Most metrics in a table."""

MOST_ROWS = 50
"""Most configurations in a table."""


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
    parts += [_section(index, history) for index, history in enumerate(histories)]
    return page("Tuning report" if suite is None else f"Tuning report of {suite.name}", "\n".join(parts))


# -- overview ------------------------------------------------------------------------------------------------


def _suite(histories: Sequence[SearchHistory], suite: SuiteCounts | None) -> Iterator[str]:
    """Yield the time of one pass of a suite on each device, and its workloads without a record."""
    if suite is None:
        return
    for device in dict.fromkeys(history.device for history in histories):
        by_workload = {history.workload: history for history in histories if history.device == device}
        timed = {
            name: time_us(h.best.result.outcome) or 0.0
            for name, h in by_workload.items()
            if h.best is not None
        }
        before_us = {name: us * (by_workload[name].speedup or 1.0) for name, us in timed.items()}
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
    for index, history in enumerate(histories):
        fastest = history.figures.fastest_baseline
        best_us = time_us(history.best.result.outcome) if history.best is not None else None
        row = [
            f'<a href="#history{index}">{breakable(history.workload)}</a>',
            breakable(history.device),
            count_cell(len(history.records)),
            time_cell(best_us),
            safe(history.best.result.outcome.kind if history.best else ""),
            ratio_cell(history.speedup),
            ratio_cell(fastest[1].ratio if fastest is not None else None),
            ratio_cell(history.bound_ratio, ""),
        ]
        if suite is not None:
            count = suite.counts[history.workload]
            row[2:2] = [str(count), time_cell(None if best_us is None else count * best_us)]
        rows.append(row)
    filled = [column for column in range(len(columns)) if any(row[column] for row in rows)]
    return data_table(
        [columns[column] for column in filled], ([row[column] for column in filled] for row in rows)
    )


# -- one search history --------------------------------------------------------------------------------------


def _section(index: int, history: SearchHistory) -> str:
    kernel = history.kernel or BestKernel()
    parts = [
        f'<section id="history{index}"><h2>{safe(history.workload)}</h2><p>{safe(history.device)}</p>',
        _tiles(history, kernel),
    ]
    if history.best is not None:
        parts += [
            front_section(history),
            search_section(history, kernel),
            baselines_section(history),
            roofline_section(history, kernel),
        ]
        parts.append(configuration_section(history.best, kernel))
    parts += [
        effects_section(history.effects),
        _configurations(history),
        _outcomes(history),
        _effort(history),
    ]
    return "\n".join((*filter(None, parts), _environment(history), "</section>"))


def _tiles(history: SearchHistory, kernel: BestKernel) -> str:
    best = history.best
    if best is None:
        return tiles({"records": f"{len(history.records):,}", "best time": "none succeeded"})
    facts = {f"best time, {best.result.outcome.kind}": duration(record_us(best))}
    if history.optimum_us is not None:
        facts["optimum of the recording / best"] = f"{history.optimum_us / record_us(best):.3f}"
    if history.speedup is not None:
        facts["speedup over default"] = f"{ratio(history.speedup)}x"
    fastest = history.figures.fastest_baseline
    if fastest is not None:
        facts[f"speedup over {fastest[0]}"] = f"{ratio(fastest[1].ratio)}x"
    if history.figures.tie_count:
        same = "as fast, within noise" if isinstance(best.result.outcome, Measured) else "same prediction"
        facts[same] = f"{history.figures.tie_count:,}"
    gap = kernel.gaps[-1] if kernel.gaps and isinstance(best.result.outcome, Measured) else None
    if gap is not None:
        proved = gap == 1 and (history.described is None or not history.described.assumed)
        facts["optimality gap"] = "1, proved" if proved else ratio(gap)
    elif history.bound_ratio is not None:
        facts["best / lowest bound"] = ratio(history.bound_ratio)
    failures = sum(count for _, _, count in history.failures)
    trials = len({record.key for record in history.records})
    return tiles(facts | {"trials": f"{trials:,}", "failures": f"{failures:,}"})


def _configurations(history: SearchHistory) -> str:
    best = best_records(history.records)
    if not best:
        return ""
    shown = best[:MOST_ROWS]
    registers = any(record.result.resources.registers is not None for record in shown)
    stale = any(record.stale for record in shown)
    metrics = list(dict.fromkeys(name for record in shown for name in _metrics(record)))[:MOST_METRICS]
    rows = (
        (
            time_cell(time_us(record.result.outcome)),
            record.result.outcome.kind,
            safe(record.key.variant),
            config_cell(record.key.config),
            time_cell(record.bound_us),
            *(_metric_cell(record, name) for name in metrics),
            *([str(record.result.resources.registers or "")] * registers),
            *(["stale" if record.stale else "current"] * stale),
        )
        for record in shown
    )
    columns = [">time", "how", "variant", "configuration", ">lower bound"]
    columns += [f">{safe(name)}" for name in metrics] + [">registers"] * registers + ["source"] * stale
    more = f"<p>The fastest {MOST_ROWS} of {len(best)}.</p>" if len(best) > MOST_ROWS else ""
    return f"<h3>Fastest configurations</h3>{more}{data_table(columns, rows)}"


def _metrics(record: Record) -> Mapping[str, float]:
    """Return the metrics of a record, and its error if it is known."""
    quantities = quantities_of(record.result.outcome)
    metrics = getattr(record.result.outcome, "metrics", {})
    return {**metrics, **({"error": quantities["error"]} if "error" in quantities else {})}


def _metric_cell(record: Record, name: str) -> str:
    value = _metrics(record).get(name)
    return "" if value is None else safe(metric_text(name, value))


def _outcomes(history: SearchHistory) -> str:
    counts = {kind.replace("_", " "): count for kind, count in sorted(history.outcomes.items())}
    section = f"<h3>Outcomes</h3>{figure(bar_chart(counts, name='Trials of each outcome', unit=''))}"
    if history.failures:
        rows = ((str(n), safe(kind.replace("_", " ")), safe(reason)) for kind, reason, n in history.failures)
        section += "<h3>Failures</h3>" + data_table((">times", "failure", "reason"), rows)
    return section


def _effort(history: SearchHistory) -> str:
    effort = history.effort
    shares = {"compile": effort.compile_s, "verify": effort.verify_s, "measure": effort.measure_s}
    shares["overhead"] = history.overhead_s
    if not any(shares.values()):
        return ""
    marks = [
        (f"part{index}", f"{name}: {significant(s, 3)} s") for index, (name, s) in enumerate(shares.items())
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
    cells = ((group, safe(name.replace("_", " ")), safe(_plain(value))) for group, name, value in rows)
    return f"<h3>Environment</h3>{data_table(('of', 'name', 'value'), cells)}" if rows else ""


def _plain(value: object) -> str:
    if isinstance(value, float):
        return significant(value, 6)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(entry)}" for name, entry in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(_plain, value))
    return first_error(str(value)) if "\n" in str(value) else str(value)
