"""The pages: what each one shows, from the query of its URL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tunebench._console import printable
from tunebench._figure import duration, significant
from tunebench.db.browse import (
    MOST_POINTS,
    TRIAL_ORDERS,
    Browser,
    DeviceEntry,
    HistoryPoint,
    RunEntry,
    TrialFilter,
)
from tunebench.db.record import Record
from tunebench.errors import InputError, LookupMiss
from tunebench.outcome import first_error
from tunebench.report import chart
from tunebench.report.dashboard.catalogue import Catalogue, Line, Snapshot
from tunebench.report.dashboard.chart import ScatterPoint, sample_chart, scatter_chart, spark_line
from tunebench.report.dashboard.listing import PAGE_ROWS, Column, Page, Query, choose, page_of
from tunebench.report.dashboard.plan_file import PlanEntry, read_plans
from tunebench.report.dashboard.prediction import (
    METHODS,
    ComparedPrediction,
    agreement,
    compared_predictions,
)
from tunebench.report.dashboard.render import render
from tunebench.report.dashboard.search_state import STATES, Search, search_of

__all__ = ["Pages"]

LIVE_MS = 2000
"""Time between two updates of a page that shows something that changes, in milliseconds."""

SLOW_MS = 10_000
"""Time between two updates of other pages."""

DRAWN = 1000
"""Most measurements that a chart draws; of more, evenly spaced ones and every new best."""

RECENT, RUNS = 8, 25
"""Searches of the overview, and of a page of searches."""

KINDS = (
    *("measured", "predicted", "aborted", "pruned", "compile_failed", "launch_failed", "wrong_result"),
    *("timed_out", "crashed", "claimed"),
)

_TIE = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """Workloads of an operator on a device: measured, only predicted, and all that the database knows."""

    measured: int
    predicted: int
    known: int


class Pages:
    """Renders the pages of one database.

    Args:
        browser: The database.
        catalogue: What it contains.
        plans: Folder of plans; None for none.
    """

    def __init__(self, browser: Browser, catalogue: Catalogue, plans: Path | None = None) -> None:
        self._browser, self._catalogue, self._plans = browser, catalogue, plans

    def _render(self, template: str, title: str, *, live_ms: int = SLOW_MS, **values: Any) -> str:
        found: Snapshot = values.setdefault("snapshot", self._catalogue.snapshot())
        live_ms = LIVE_MS if found.unread else live_ms
        database = str(self._browser.location)
        return render(template, title=title, database=database, live_ms=live_ms, **values)

    # -- lists from the catalogue ---------------------------------------------------------------------

    def overview(self, values: Mapping[str, str]) -> str:
        """Render the coverage of devices and operators, and the newest searches."""
        found = self._catalogue.snapshot()
        running = [search for search in self._unfinished() if search.state == "running"]
        recent = self._searches(self._browser.runs(limit=RECENT))
        return self._render(
            "overview.html",
            "Overview",
            live_ms=LIVE_MS if running else SLOW_MS,
            snapshot=found,
            trials=sum(line.entry.trials for line in found.lines),
            measurements=sum(line.entry.measurements for line in found.lines),
            stale=sum(group.trials for group in found.stale),
            running=len(running),
            recent=recent,
            coverage=_coverage(found),
        )

    def workloads(self, values: Mapping[str, str]) -> str:
        """Render the list of workloads."""
        query = Query("/workloads", values, ("device", "operator", "text", "how", "source"))
        found = self._catalogue.snapshot()
        page = page_of(query, list(_filtered(found.lines, query)), _WORKLOADS, default="workload", tie=_tie)
        return self._render(
            "workloads.html", "Workloads", snapshot=found, query=query, page=page, **_choices(found.lines)
        )

    def stale(self, values: Mapping[str, str]) -> str:
        """Render the list of search spaces with stale trials."""
        query = Query("/stale", values, ("device", "operator", "text"))
        found = self._catalogue.snapshot()
        lines = {(line.device.id, line.entry.workload): line for line in found.lines}
        spaces = [
            _StaleSpace(line=line, variant=group.variant, trials=group.trials)
            for group in found.stale
            if (line := lines.get((group.device_id, group.workload))) is not None
        ]
        kept = {_tie(line) for line in _filtered(found.lines, query)}
        rows = [space for space in spaces if _tie(space.line) in kept]
        page = page_of(
            query, rows, _STALE, default="trials", tie=lambda row: f"{_tie(row.line)}\n{row.variant}"
        )
        served = sum(line.best is not None and line.best.stale for line in found.lines)
        return self._render(
            "stale.html",
            "Stale results",
            snapshot=found,
            query=query,
            page=page,
            served=served,
            trials=sum(group.trials for group in found.stale),
            **_choices(found.lines),
        )

    def predictions(self, values: Mapping[str, str]) -> str:
        """Render predicted times next to measured ones."""
        query = Query("/predictions", values, ("device", "operator", "text", "method"))
        found = self._catalogue.snapshot()
        method = choose("method", query.get("method"), ("", *METHODS))
        rows = [
            each
            for each in compared_predictions(list(_filtered(found.lines, query)))
            if method in ("", each.method)
        ]
        page = page_of(
            query, rows, _PREDICTIONS, default="workload", tie=lambda row: f"{_tie(row.line)}\n{row.method}"
        )
        drawn = rows[:: -(-len(rows) // DRAWN)] if rows else []
        return self._render(
            "predictions.html",
            "Predicted against measured",
            snapshot=found,
            query=query,
            page=page,
            methods=METHODS,
            agreements=agreement(rows),
            drawn=len(drawn),
            chart=scatter_chart(
                [_scatter_point(each) for each in drawn],
                x_title="measured",
                y_title="predicted",
                name="Predicted against measured times",
            ),
            **_choices(found.lines),
        )

    def plans(self, values: Mapping[str, str]) -> str:
        """Render the plans of a folder."""
        query = Query("/plans", values, ("text",))
        found = read_plans(self._plans) if self._plans is not None else []
        wanted = query.get("text").lower()
        rows = [plan for plan in found if wanted in f"{plan.name} {dict(plan.job)}".lower()]
        page = page_of(query, rows, _PLANS, default="plan", tie=lambda plan: plan.name)
        return self._render("plans.html", "Plans", query=query, page=page, folder=self._plans)

    # -- one workload ---------------------------------------------------------------------------------

    def workload(self, values: Mapping[str, str]) -> str:
        """Render one workload on one device: answers, history, and its trials."""
        names = ("device", "workload", "variant", "kind", "source", "config")
        query = Query("/workload", values, names)
        device, workload = self._device(query.get("device")), query.get("workload")
        found = self._catalogue.snapshot()
        line = found.line((device.id, workload))
        if line is None or not line.read:
            line = self._line(device, workload)
        points = self._browser.points(device.id, workload)
        runs = self._searches(self._browser.runs(pair=(device.id, workload), limit=RECENT))
        return self._render(
            "workload.html",
            workload,
            live_ms=LIVE_MS if any(run.state == "running" for run in runs) else SLOW_MS,
            snapshot=found,
            line=line,
            query=query,
            page=self._trials(device.id, query),
            variants=self._browser.variants(device.id, workload),
            kinds=KINDS,
            runs=runs,
            chart=_history(points, line),
            most_points=MOST_POINTS if len(points) == MOST_POINTS else 0,
        )

    def _line(self, device: DeviceEntry, workload: str) -> Line:
        """Return the line of a workload that the catalogue has not read.

        Raises:
            LookupMiss: if there is no trial.
        """
        for entry in self._browser.entries(workload):
            if entry.device_id == device.id:
                return Line(device=device, entry=entry, read=True)
        raise LookupMiss(f"no trial of {workload!r} on {device.key} in {self._browser.location}")

    def _trials(self, device_id: int, query: Query) -> Page[Any]:
        order = choose("sort", query.order, tuple(TRIAL_ORDERS))
        select = TrialFilter(
            variant=query.get("variant"),
            kind=choose("kind", query.get("kind"), ("", *KINDS)),
            source=choose("source", query.get("source"), ("", "current", "stale")),
            config=query.get("config"),
        )
        place = query.place
        if place is not None and (len(place[1]) != 2 or not isinstance(place[1][1], int)):
            raise InputError("the place in the list is of another list; open the first page again")
        numeric = order in ("time", "bound", "recorded")
        if place is not None and isinstance(place[1][0], str) == numeric:
            raise InputError("the place in the list is of another order; open the first page again")
        found = self._browser.trials(
            device_id,
            query.get("workload"),
            select=select,
            order=order,
            descending=query.descending,
            place=None if place is None else (place[0], (place[1][0], place[1][1])),
            limit=PAGE_ROWS,
        )
        rows = found.rows
        return Page(
            rows=rows,
            total=None,
            headers=query.headers(_TRIALS, "time"),
            previous=query.to("before", rows[0].cursor) if rows and found.before else "",
            next=query.to("after", rows[-1].cursor) if rows and found.after else "",
            first=query.link() if place is not None and (found.before or not rows) else "",
        )

    def trial(self, number: int) -> str:
        """Render one trial with its measurements and their samples.

        Args:
            number: Id of the trial.

        Raises:
            LookupMiss: if there is no such trial.
        """
        found = self._browser.trial(number)
        if found is None:
            raise LookupMiss(f"no trial {number} in {self._browser.location}")
        device_id, workload, state, stale = found
        device = next(device for device in self._browser.devices() if device.id == device_id)
        records = self._browser.trial_records(number)[::-1]
        return self._render(
            "trial.html",
            f"Trial {number}",
            number=number,
            device=device,
            workload=workload,
            state=state,
            stale=stale,
            key=records[0].key if records else None,
            records=[_described(record) for record in records],
        )

    # -- searches -------------------------------------------------------------------------------------

    def searches(self, values: Mapping[str, str]) -> str:
        """Render the searches that run now, and earlier ones."""
        query = Query("/searches", values, ("state",))
        state = choose("state", query.get("state"), ("", *STATES))
        unfinished = self._unfinished()
        running = [search for search in unfinished if search.state == "running"]
        if state in ("running", "silent", "interrupted"):
            shown, more = [search for search in unfinished if search.state == state], ""
        else:
            shown, more = self._ended(query, state)
        return self._render(
            "searches.html",
            "Searches",
            live_ms=LIVE_MS if running else SLOW_MS // 2,
            query=query,
            states=STATES,
            running=[(search, self._spark(search.run)) for search in running],
            searches=shown,
            next=more,
            first=query.link() if query.place else "",
        )

    def _ended(self, query: Query, state: str) -> tuple[list[Search], str]:
        """Return a page of all searches, or of those of one state, and the URL of the next page."""
        before = None
        if query.place is not None:
            try:
                moment, run_id = query.place[1]
                before = (datetime.fromisoformat(str(moment)), str(run_id))
            except ValueError:
                raise InputError(
                    "the place in the list is of another list; open the first page again"
                ) from None
        runs = self._browser.runs(before=before, limit=RUNS + 1)
        shown = [search for search in self._searches(runs[:RUNS]) if state in ("", search.state)]
        last = runs[RUNS - 1] if len(runs) > RUNS else None
        return shown, query.to("after", (last.started_at.isoformat(), last.id)) if last is not None else ""

    def search(self, run_id: str) -> str:
        """Render one search: its progress, and its newest measurements.

        Args:
            run_id: Id of the run.

        Raises:
            LookupMiss: if there is no such run.
        """
        run = self._browser.run(run_id)
        if run is None:
            raise LookupMiss(f"no search {run_id!r} in {self._browser.location}")
        (found,) = self._searches([run])
        points = self._browser.run_points(run_id)
        bound_us = run.progress.least_bound_us
        lines = [chart.Line(style="bound", label="lowest bound", us=bound_us)] if bound_us else []
        return self._render(
            "search.html",
            run.workload,
            live_ms=LIVE_MS if found.state == "running" else SLOW_MS,
            search=found,
            meaning=STATES[found.state],
            newest=points[: -RUNS - 1 : -1],
            chart=_drawing(points, lines),
        )

    def _unfinished(self) -> list[Search]:
        return self._searches(self._browser.unfinished_runs())

    def _searches(self, runs: Iterable[RunEntry]) -> list[Search]:
        devices = {device.id: device for device in self._browser.devices()}
        now = self._browser.now()
        return [search_of(run, devices.get(run.device_id), now) for run in runs]

    def _spark(self, run: RunEntry) -> str:
        times = [
            point.time_us if point.kind != "aborted" else None for point in self._browser.run_points(run.id)
        ]
        return spark_line(times, name=f"Best time so far of {printable(run.workload)}")

    def _device(self, key: str) -> DeviceEntry:
        for device in self._browser.devices():
            if device.key == key:
                return device
        raise LookupMiss(f"no device {key!r} in {self._browser.location}")


# -- columns -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _StaleSpace:
    line: Line
    variant: str
    trials: int


def _tie(line: Line) -> str:
    return f"{line.entry.workload}{_TIE}{line.device.key}"


_WORKLOADS: tuple[Column[Line], ...] = (
    Column(name="workload", title="Workload", key=lambda line: line.entry.workload),
    Column(name="device", title="Device", key=lambda line: line.device.key),
    Column(name="time", title="Best time", key=lambda line: line.time_us, right=True),
    Column(
        name="how",
        title="How",
        key=lambda line: line.how,
        minor=True,
        hint="Measured on the device, predicted without one, or measured and not verified (imported)",
    ),
    Column(
        name="bound",
        title="Lowest bound",
        key=lambda line: line.entry.least_bound_us,
        right=True,
        minor=True,
        hint="Lowest lower bound of the configurations that were run or predicted",
    ),
    Column(
        name="gap",
        title="Best / bound",
        key=lambda line: line.gap,
        right=True,
        hint="1 means that no configuration can be faster",
    ),
    Column(
        name="default",
        title="vs default",
        key=lambda line: line.default_ratio,
        right=True,
        minor=True,
        hint="Speedup of the best over the default configuration (higher is better)",
    ),
    Column(
        name="library",
        title="vs library",
        key=lambda line: line.library[1] if line.library else None,
        right=True,
        hint="Speedup of the best over the fastest library (higher is better)",
    ),
    Column(name="trials", title="Trials", key=lambda line: line.entry.trials, right=True, minor=True),
    Column(name="stale", title="Stale", key=lambda line: line.entry.stale, right=True, minor=True),
    Column(
        name="newest",
        title="Newest",
        key=lambda line: line.entry.newest_at.timestamp() if line.entry.newest_at else None,
        minor=True,
    ),
)

_STALE: tuple[Column[_StaleSpace], ...] = (
    Column(name="trials", title="Stale trials", key=lambda row: -row.trials, right=True),
    Column(name="workload", title="Workload", key=lambda row: row.line.entry.workload),
    Column(name="device", title="Device", key=lambda row: row.line.device.key),
    Column(name="variant", title="Variant", key=lambda row: row.variant, minor=True),
    Column(
        name="served",
        title="Answer of lookup",
        key=lambda row: ("stale" if row.line.best.stale else "current") if row.line.best else None,
        hint="Whether lookup returns a stale result, because there is no current one",
    ),
    Column(name="", title="Measure again", minor=True),
)

_PREDICTIONS: tuple[Column[ComparedPrediction], ...] = (
    Column(name="workload", title="Workload", key=lambda row: row.line.entry.workload),
    Column(name="device", title="Device", key=lambda row: row.line.device.key),
    Column(name="method", title="Prediction", key=lambda row: row.method, minor=True),
    Column(name="predicted", title="Predicted", key=lambda row: row.predicted_us, right=True),
    Column(name="measured", title="Measured", key=lambda row: row.measured_us, right=True),
    Column(name="what", title="Of", key=lambda row: row.measured, minor=True),
    Column(name="ratio", title="Predicted / measured", key=lambda row: row.ratio, right=True),
    Column(
        name="error",
        title="Error",
        key=lambda row: row.error,
        right=True,
        minor=True,
        hint="|predicted / measured - 1|",
    ),
)

_PLANS: tuple[Column[PlanEntry], ...] = (
    Column(name="plan", title="File", key=lambda plan: plan.name),
    Column(name="network", title="Network", key=lambda plan: _text_of(plan.job.get("network"))),
    Column(
        name="batch",
        title="Batch",
        key=lambda plan: _number_of(plan.job.get("batch")),
        right=True,
        minor=True,
    ),
    Column(name="", title="Plan"),
    Column(name="step", title="Step", key=lambda plan: plan.number("step_us"), right=True),
    Column(
        name="mfu",
        title="MFU",
        key=lambda plan: plan.number("mfu"),
        right=True,
        hint="Model FLOPs utilisation",
    ),
    Column(
        name="memory",
        title="Memory, GiB",
        key=lambda plan: plan.number("memory_bytes"),
        right=True,
        minor=True,
        hint="Of a device",
    ),
)

_TRIALS: tuple[Column[Any], ...] = (
    Column(name="time", title="Time", right=True),
    Column(name="outcome", title="Outcome"),
    Column(name="config", title="Configuration"),
    Column(name="variant", title="Variant", minor=True),
    Column(name="bound", title="Bound", right=True, minor=True),
    Column(name="recorded", title="Recorded", minor=True),
)


def _text_of(value: object) -> str | None:
    return None if value is None else str(value)


def _number_of(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# -- filters and parts -------------------------------------------------------------------------------------


def _filtered(lines: Iterable[Line], query: Query) -> Iterator[Line]:
    """Yield the lines that a query selects."""
    how = choose("how", query.get("how"), ("", "measured", "predicted", "unverified", "none"))
    source = choose("source", query.get("source"), ("", "current", "stale"))
    device, operator, text = query.get("device"), query.get("operator"), query.get("text").lower()
    for line in lines:
        best = line.best
        if (
            device in ("", line.device.key)
            and operator in ("", line.operator)
            and text in line.entry.workload.lower()
            and (not how or how == (line.how or "none"))
            and (not source or (best is not None and best.stale == (source == "stale")))
        ):
            yield line


def _choices(lines: Iterable[Line]) -> dict[str, Any]:
    """Return the devices and operators that a list can be filtered by."""
    lines = tuple(lines)
    return {
        "devices": sorted({line.device.key for line in lines}),
        "operators": sorted({line.operator for line in lines}),
    }


def _coverage(found: Snapshot) -> tuple[list[str], list[tuple[DeviceEntry, list[_Cell]]]]:
    """Return the operators, and for each device a cell per operator."""
    known: dict[str, set[str]] = {}
    measured: dict[tuple[int, str], int] = {}
    predicted: dict[tuple[int, str], int] = {}
    for line in found.lines:
        known.setdefault(line.operator, set()).add(line.entry.workload)
        if line.fastest("measured") is not None:
            measured[line.device.id, line.operator] = measured.get((line.device.id, line.operator), 0) + 1
        elif line.fastest("predicted") is not None:
            predicted[line.device.id, line.operator] = predicted.get((line.device.id, line.operator), 0) + 1
    operators = sorted(known)
    used = {line.device.id for line in found.lines}
    return operators, [
        (
            device,
            [
                _Cell(
                    measured=measured.get((device.id, operator), 0),
                    predicted=predicted.get((device.id, operator), 0),
                    known=len(known[operator]),
                )
                for operator in operators
            ],
        )
        for device in found.devices.values()
        if device.id in used
    ]


def _history(points: Sequence[HistoryPoint], line: Line) -> str:
    """Return the chart of a workload's history, with its lower bound and the times of baselines."""
    lines = []
    if line.entry.least_bound_us:
        lines.append(chart.Line(style="bound", label="lowest bound", us=line.entry.least_bound_us))
    best = line.best
    if best is not None and line.default_ratio:
        lines.append(chart.Line(style="default", label="default", us=best.time_us * line.default_ratio))
    if best is not None and line.library is not None and line.library[1] > 0:
        name, ratio = line.library
        lines.append(chart.Line(style="library", label=printable(name), us=best.time_us * ratio))
    return _drawing(points, lines)


def _drawing(points: Sequence[HistoryPoint], lines: Sequence[chart.Line]) -> str:
    """Return the chart of a history; of a long one, evenly spaced measurements and every new best."""
    step, best_us, drawn = max(1, -(-len(points) // DRAWN)), float("inf"), []
    for number, point in enumerate(points, start=1):
        if point.time_us is None or point.time_us <= 0:
            continue
        new_best = point.kind != "aborted" and point.time_us < best_us
        if new_best:
            best_us = point.time_us
        if new_best or number % step == 0:
            style = "finalist" if point.purpose == "finalist" else point.kind
            text = f"{number}: {duration(point.time_us)}, {style}, {point.variant} {point.config}"
            href = f"/trials/{point.trial_id}"
            drawn.append(
                chart.Point(trial=number, us=point.time_us, style=style, title=printable(text), href=href)
            )
    if not drawn:
        return ""
    return chart.history_chart(drawn, lines, trials=len(points), name="Time of each measurement")


def _scatter_point(each: ComparedPrediction) -> ScatterPoint:
    entry = each.line.entry
    title = (
        f"{entry.workload} on {each.line.device.product}: predicted {duration(each.predicted_us)}, "
        f"measured {duration(each.measured_us)} ({each.measured})"
    )
    return ScatterPoint(
        x_us=each.measured_us,
        y_us=each.predicted_us,
        style="measured" if each.method == "library" else "finalist",
        title=printable(title),
        href=workload_href(each.line),
    )


def workload_href(line: Line) -> str:
    """Return the URL of the page of a workload on a device."""
    return Query("/workload", {}, ()).link(device=line.device.key, workload=line.entry.workload)


def _described(record: Record) -> dict[str, Any]:
    """Return a measurement as the page of a trial shows it."""
    outcome = record.result.outcome
    samples_us = tuple(getattr(outcome, "samples_us", ()))
    ci_us = getattr(outcome, "ci_us", None)
    median_us = getattr(outcome, "median_us", None)
    effort = record.result.effort
    resources = {
        name: value
        for name in record.result.resources.__dataclass_fields__
        if (value := getattr(record.result.resources, name)) is not None
    }
    comparison = record.verdict.comparison
    return {
        "record": record,
        "outcome": outcome,
        "time_us": median_us if median_us is not None else getattr(outcome, "predicted_us", None),
        "ci_us": ci_us,
        "samples": samples_us,
        "reason": getattr(outcome, "reason", None),
        "first_error": first_error(getattr(outcome, "reason", "")),
        "chart": sample_chart(
            samples_us, median_us=median_us, ci_us=ci_us, name="Samples in the order taken"
        ),
        "tables": [
            ("Resources of the binary", resources),
            ("Conditions", {**record.result.conditions, **getattr(outcome, "conditions", {})}),
            (
                "Time spent, seconds",
                {"compile": effort.compile_s, "verify": effort.verify_s, "measure": effort.measure_s},
            ),
            ("Comparison", _flat(comparison)),
        ],
    }


def _flat(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratios of a comparison as texts, by name."""
    found: dict[str, Any] = {}
    for name, value in comparison.items():
        if isinstance(value, Mapping) and "ratio" not in value:
            found |= {f"{name}: {inner}": text for inner, text in _flat(value).items()}
        elif isinstance(value, Mapping):
            found[name] = ", ".join(
                f"{part} {significant(number) if isinstance(number, float) else number}"
                for part, number in value.items()
            )
        else:
            found[name] = value
    return found
