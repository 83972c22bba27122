"""The pages: what each one shows, from the query of its URL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tunebench._device import selects
from tunebench.db.browse import MOST_POINTS, TRIAL_ORDERS, Answer, Browser, DeviceEntry, RunEntry, TrialFilter
from tunebench.db.goal_record import stored_goal
from tunebench.errors import InputError, LookupMiss
from tunebench.outcome import first_error
from tunebench.report.dashboard.catalogue import Catalogue, Line, Snapshot
from tunebench.report.dashboard.column import (
    PLANS,
    PREDICTIONS,
    STALE,
    TRIALS,
    WORKLOADS,
    StaleSpace,
    line_tie,
)
from tunebench.report.dashboard.compared import (
    WITHIN,
    Side,
    option_rows,
    outcome_rows,
    parameter_rows,
    side_of_line,
    side_of_search,
)
from tunebench.report.dashboard.coverage import coverage_of
from tunebench.report.dashboard.history import (
    DRAWN,
    compared_drawing,
    history_drawing,
    prediction_drawing,
    run_drawing,
    small_drawing,
    workload_href,
)
from tunebench.report.dashboard.listing import PAGE_ROWS, Page, Query, choose, page_of
from tunebench.report.dashboard.measurement import described
from tunebench.report.dashboard.plan_file import read_plans
from tunebench.report.dashboard.prediction import METHODS, agreement, compared_predictions
from tunebench.report.dashboard.render import prepare_templates, render
from tunebench.report.dashboard.search_state import STATES, Search, search_of
from tunebench.report.front_section import front_section
from tunebench.report.history import search_histories

__all__ = ["Pages"]

LIVE_MS = 2000
"""Time between two updates of a page that shows something that changes, in milliseconds."""

SLOW_MS = 10_000
"""Time between two updates of other pages."""

MOST_FRONT_TRIALS = 20_000
"""Most trials of a workload whose Pareto front is shown: their records are read."""

RECENT, RUNS = 8, 25
"""Searches of the overview, and of a page of searches."""

LONGEST_SIDE = 1000
"""Most characters of the text that names a side of a comparison."""

KINDS = (
    *("measured", "predicted", "aborted", "pruned", "compile_failed", "launch_failed", "wrong_result"),
    *("timed_out", "crashed", "claimed"),
)


class Pages:
    """Renders the pages of one database.

    Args:
        browser: The database.
        catalogue: What it contains.
        plans: Folder of plans; None for none.

    Attributes:
        database: Path of the database, or URL without password.
        db: Value of `--db` in commands for the database; None for the default one.
        paused: Context in which the catalogue reads no further workload.
    """

    def __init__(self, browser: Browser, catalogue: Catalogue, plans: Path | None = None) -> None:
        self._browser, self._catalogue, self._plans = browser, catalogue, plans
        self.database, self.paused = str(browser.location), catalogue.paused
        self.db = browser.location.option

    def prepare(self) -> None:
        """Render a page and compile all templates, so that the first page is as fast as others."""
        prepare_templates()
        self.overview({})

    def _render(self, template: str, title: str, *, live_ms: int = SLOW_MS, **values: Any) -> str:
        snapshot: Snapshot = values.setdefault("snapshot", self._catalogue.snapshot())
        live_ms = LIVE_MS if snapshot.unread else live_ms
        return render(template, title=title, database=self.database, db=self.db, live_ms=live_ms, **values)

    # -- lists from the catalogue ---------------------------------------------------------------------

    def overview(self, values: Mapping[str, str]) -> str:
        """Render the coverage of devices and operators, and the newest searches."""
        snapshot = self._catalogue.snapshot()
        running = [search for search in self._unfinished() if search.state == "running"]
        recent = self._searches(self._browser.runs(limit=RECENT))
        imported = [line for line in snapshot.lines if line.how == "unverified"]
        return self._render(
            "overview.html",
            "Overview",
            live_ms=LIVE_MS if running else SLOW_MS,
            snapshot=snapshot,
            trials=sum(line.entry.trials for line in snapshot.lines),
            measurements=sum(line.entry.measurements for line in snapshot.lines),
            stale=sum(group.trials for group in snapshot.stale),
            running=len(running),
            recent=recent,
            imported=imported[:RECENT],
            more_imported=len(imported) if len(imported) > RECENT else 0,
            coverage=coverage_of(snapshot),
        )

    def workloads(self, values: Mapping[str, str]) -> str:
        """Render the list of workloads."""
        query = Query("/workloads", values, ("device", "operator", "text", "how", "source"))
        snapshot = self._catalogue.snapshot()
        page = page_of(
            query, list(_filtered(snapshot.lines, query)), WORKLOADS, default="workload", tie=line_tie
        )
        return self._render(
            "workloads.html",
            "Workloads",
            snapshot=snapshot,
            query=query,
            page=page,
            **_choices(snapshot.lines),
        )

    def stale(self, values: Mapping[str, str]) -> str:
        """Render the list of search spaces with stale trials."""
        if not values.get("sort"):
            values = {**values, "sort": "trials", "order": "desc"}
        query = Query("/stale", values, ("device", "operator", "text"))
        snapshot = self._catalogue.snapshot()
        lines = {(line.device.id, line.entry.workload): line for line in snapshot.lines}
        spaces = [
            StaleSpace(line=line, variant=group.variant, trials=group.trials)
            for group in snapshot.stale
            if (line := lines.get((group.device_id, group.workload))) is not None
        ]
        selected = {line_tie(line) for line in _filtered(snapshot.lines, query)}
        rows = [space for space in spaces if line_tie(space.line) in selected]
        page = page_of(
            query, rows, STALE, default="trials", tie=lambda row: f"{line_tie(row.line)}\n{row.variant}"
        )
        served = sum(line.best is not None and line.best.stale for line in snapshot.lines)
        return self._render(
            "stale.html",
            "Stale results",
            snapshot=snapshot,
            query=query,
            page=page,
            served=served,
            trials=sum(group.trials for group in snapshot.stale),
            **_choices(snapshot.lines),
        )

    def predictions(self, values: Mapping[str, str]) -> str:
        """Render predicted times next to measured ones."""
        query = Query("/predictions", values, ("device", "operator", "text", "method"))
        snapshot = self._catalogue.snapshot()
        method = choose("method", query.get("method"), ("", *METHODS))
        rows = [
            prediction
            for prediction in compared_predictions(list(_filtered(snapshot.lines, query)))
            if method in ("", prediction.method)
        ]
        page = page_of(
            query,
            rows,
            PREDICTIONS,
            default="workload",
            tie=lambda row: f"{line_tie(row.line)}\n{row.method}",
        )
        return self._render(
            "predictions.html",
            "Predicted against measured",
            snapshot=snapshot,
            query=query,
            page=page,
            methods=METHODS,
            agreements=agreement(rows),
            drawn=min(len(rows), DRAWN),
            chart=prediction_drawing(rows),
            **_choices(snapshot.lines),
        )

    def plans(self, values: Mapping[str, str]) -> str:
        """Render the plans of a folder."""
        query = Query("/plans", values, ("text",))
        plans = read_plans(self._plans) if self._plans is not None else []
        words = query.get("text").lower()
        rows = [plan for plan in plans if words in f"{plan.name} {dict(plan.job)}".lower()]
        page = page_of(query, rows, PLANS, default="plan", tie=lambda plan: plan.name)
        return self._render("plans.html", "Plans", query=query, page=page, folder=self._plans)

    # -- one workload ---------------------------------------------------------------------------------

    def workload(self, values: Mapping[str, str]) -> str:
        """Render one workload on one device: answers, history, and its trials."""
        names = ("device", "workload", "variant", "kind", "source", "config")
        query = Query("/workload", values, names)
        device, workload = self._device(query.get("device")), query.get("workload")
        snapshot = self._catalogue.snapshot()
        line = self._known_line(device, workload)
        points = self._browser.points(device.id, workload)
        runs = self._searches(self._browser.runs(pair=(device.id, workload), limit=RECENT))
        return self._render(
            "workload.html",
            workload,
            live_ms=LIVE_MS if any(run.state == "running" for run in runs) else SLOW_MS,
            snapshot=snapshot,
            line=line,
            query=query,
            page=self._trials(device.id, query),
            variants=self._browser.variants(device.id, workload),
            kinds=KINDS,
            runs=runs,
            chart=history_drawing(points, line),
            front=self._front(device, workload, line),
            most_points=MOST_POINTS if len(points) == MOST_POINTS else 0,
        )

    def _front(self, device: DeviceEntry, workload: str, line: Line) -> str:
        """Return the section about the objectives of the newest run; empty if it minimised the time."""
        if not stored_goal(self._browser.run_options(workload, device.key)).is_asked:
            return ""
        if line.entry.trials > MOST_FRONT_TRIALS:
            return (
                "<h2>Objectives</h2><p>Too many trials for a chart: a page of the command report has it.</p>"
            )
        [history] = search_histories(self._browser, workloads=[workload], devices=[device.key])
        return front_section(history, heading="h2")

    def _known_line(self, device: DeviceEntry, workload: str) -> Line:
        """Return the line of a workload, from the database if the catalogue has not read it.

        Raises:
            LookupMiss: if there is no trial.
        """
        line = self._catalogue.snapshot().line((device.id, workload))
        if line is not None and line.read:
            return line
        for entry in self._browser.entries(workload):
            if entry.device_id == device.id:
                return Line(device=device, entry=entry, read=True)
        raise LookupMiss(f"{self._browser.location} has no trial of {workload!r} on {device.key}")

    def _trials(self, device_id: int, query: Query) -> Page[Any]:
        order = choose("sort", query.order, tuple(TRIAL_ORDERS))
        select = TrialFilter(
            variant=query.get("variant"),
            kind=choose("kind", query.get("kind"), ("", *KINDS)),
            source=choose("source", query.get("source"), ("", "current", "stale")),
            config=query.get("config"),
        )
        cursor = query.place
        if cursor is not None and (len(cursor[1]) != 2 or not isinstance(cursor[1][1], int)):
            raise InputError("the place in the list is of another list; open the first page again")
        numeric = order in ("time", "bound", "recorded")
        if cursor is not None and isinstance(cursor[1][0], str) == numeric:
            raise InputError("the place in the list is of another order; open the first page again")
        trials = self._browser.trials(
            device_id,
            query.get("workload"),
            select=select,
            order=order,
            descending=query.descending,
            place=None if cursor is None else (cursor[0], (cursor[1][0], cursor[1][1])),
            limit=PAGE_ROWS,
        )
        rows = trials.rows
        return Page(
            rows=rows,
            total=None,
            headers=query.headers(TRIALS, "time"),
            previous=query.to("before", rows[0].cursor) if rows and trials.before else "",
            next=query.to("after", rows[-1].cursor) if rows and trials.after else "",
            first=query.link() if cursor is not None and (trials.before or not rows) else "",
        )

    def trial(self, number: int) -> str:
        """Render one trial with its measurements and their samples.

        Args:
            number: Id of the trial.

        Raises:
            LookupMiss: if there is no such trial.
        """
        trial = self._browser.trial(number)
        if trial is None:
            raise LookupMiss(f"{self._browser.location} has no trial {number}")
        devices = {device.id: device for device in self._browser.devices()}
        if trial.device_id not in devices:
            raise LookupMiss(f"the device of trial {number} is not in {self._browser.location}")
        records = self._browser.trial_records(number)[::-1]
        return self._render(
            "trial.html",
            f"Trial {number}",
            trial=trial,
            device=devices[trial.device_id],
            records=[described(record) for record in records],
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
            shown, more = self._all(query, state)
        return self._render(
            "searches.html",
            "Searches",
            live_ms=LIVE_MS if running else SLOW_MS // 2,
            query=query,
            states=STATES,
            running=[(search, self._small(search.run)) for search in running],
            searches=shown,
            next=more,
            first=query.link() if query.place else "",
        )

    def _all(self, query: Query, state: str) -> tuple[list[Search], str]:
        """Return a page of searches, of all or one state, and the URL of the next page."""
        before = None
        if query.place is not None:
            try:
                moment, run_id = query.place[1]
                before = (datetime.fromisoformat(str(moment)), str(run_id))
            except ValueError:
                raise InputError(
                    "the place in the list is of another list; open the first page again"
                ) from None
        runs = self._browser.runs(before=before, state=state, limit=RUNS + 1)
        shown = self._searches(runs[:RUNS])
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
            raise LookupMiss(f"{self._browser.location} has no search {run_id!r}")
        (search,) = self._searches([run])
        points = self._browser.run_points(run_id)
        return self._render(
            "search.html",
            run.workload,
            live_ms=LIVE_MS if search.state == "running" else SLOW_MS,
            search=search,
            meaning=STATES[search.state],
            newest=points[: -RUNS - 1 : -1],
            failures=self._browser.failures(run_id) if run.progress.failed else [],
            chart=run_drawing(points, search.bound_us, self._answer(run)),
        )

    def _answer(self, run: RunEntry) -> Answer | None:
        """Return the answer of `lookup` for the workload of a run on its device, if it is read."""
        line = self._catalogue.snapshot().line((run.device_id, run.workload))
        return line.best if line is not None else None

    # -- comparison -----------------------------------------------------------------------------------

    def compare(self, sides: Sequence[str]) -> str:
        """Render two searches, or the results of two workloads, side by side.

        Args:
            sides: ``search ID`` or ``workload DEVICE WORKLOAD`` for each; other than two show the choice.
        """
        if len(sides) != 2:
            many = f"{len(sides)} are selected. " if sides else ""
            recent = self._searches(self._browser.runs(limit=RUNS))
            advice = f"{many}Select two to compare."
            return self._render("compare.html", "Compare", sides=(), advice=advice, recent=recent)
        first, second = (self._side(text) for text in sides)
        parameters = parameter_rows(first, second)
        ends_us = [side.converged_us for side in (first, second)]
        fastest_us = min((us for us in ends_us if us is not None), default=None)
        return self._render(
            "compare.html",
            "Compare",
            sides=(first, second),
            to_its_fastest=[
                side.measurements_to(None if us is None else WITHIN * us)
                for side, us in zip((first, second), ends_us, strict=True)
            ],
            to_fastest=[
                side.measurements_to(None if fastest_us is None else WITHIN * fastest_us)
                for side in (first, second)
            ],
            facts=dict.fromkeys([*first.facts, *second.facts]),
            options=option_rows(first, second),
            parameters=parameters,
            differing=sum(row[1] != row[2] for row in parameters),
            outcomes=list(outcome_rows(first, second)),
            chart=compared_drawing([("A", first.points), ("B", second.points)]),
        )

    def _side(self, text: str) -> Side:
        """Return the side that a text names, with the trial of its best time.

        Raises:
            InputError: if the text has another form.
            LookupMiss: if there is no such search, device or workload.
        """
        kind, _, name = text[:LONGEST_SIDE].partition(" ")
        if kind == "search":
            run = self._browser.run(name)
            if run is None:
                raise LookupMiss(f"{self._browser.location} has no search {name!r}")
            side = side_of_search(self._searches([run])[0], self._browser.run_points(name))
            trial_id = side.best_trial
        elif kind == "workload":
            key, _, workload = name.partition(" ")
            line = self._known_line(self._device(key), workload)
            side = side_of_line(line, workload_href(line), self._browser.points(line.device.id, workload))
            trial_id = line.best.trial_id if line.best is not None else side.best_trial
        else:
            raise InputError(f"side must be 'search ID' or 'workload DEVICE WORKLOAD', got {text[:80]!r}")
        return replace(side, best=None if trial_id is None else self._browser.trial(trial_id))

    def _unfinished(self) -> list[Search]:
        return self._searches(self._browser.unfinished_runs())

    def _searches(self, runs: Iterable[RunEntry]) -> list[Search]:
        runs, devices = list(runs), self._catalogue.snapshot().devices
        if any(run.device_id not in devices for run in runs):  # newer than the last look of the catalogue
            devices = {device.id: device for device in self._browser.devices()}
        now = self._browser.now()
        failing = [run.id for run in runs if run.progress.failed and run.progress.best_us is None]
        reasons = self._browser.first_failures(failing) if failing else {}
        return [
            search_of(run, devices.get(run.device_id), now, first_error(reasons.get(run.id, "")))
            for run in runs
        ]

    def _small(self, run: RunEntry) -> str:
        return small_drawing(self._browser.run_points(run.id), run.workload)

    def _device(self, key: str) -> DeviceEntry:
        for device in self._browser.devices():
            if device.key == key:
                return device
        raise LookupMiss(f"{self._browser.location} has no device {key!r}")


# -- filters and parts -------------------------------------------------------------------------------------


def _filtered(lines: Iterable[Line], query: Query) -> Iterator[Line]:
    """Yield the lines that a query selects."""
    origin = choose("how", query.get("how"), ("", "measured", "predicted", "unverified", "failed", "none"))
    source = choose("source", query.get("source"), ("", "current", "stale"))
    device, operator, text = query.get("device"), query.get("operator"), query.get("text").lower()
    for line in lines:
        best = line.best
        if (
            (not device or selects(device, line.device.key))
            and operator in ("", line.operator)
            and text in line.entry.workload.lower()
            and (not origin or origin == (line.how or "none"))
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
