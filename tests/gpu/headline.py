"""Steps that time variants against the libraries: `wgmma`, `headline`, `tune` and `retry`.

Each workload is timed with the variant that is predicted fastest, unless that one failed in `wgmma`. If it
hangs, crashes or is wrong, the next one is timed after all other workloads had their turn, so that a broken
variant costs its own figure and no other.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.gpu import speedups
from tests.gpu.acceptance_report import DATABASE
from tests.gpu.acceptance_run import MOST_QUOTED, AcceptanceRun, gpu_candidates
from tests.gpu.acceptance_workloads import HEADLINE, WGMMA, measured
from tests.gpu.carried import CARRIED, CarriedKernel, candidates, is_carried
from tests.gpu.child import ChildLimits
from tests.gpu.interleaved import ContestJob
from tunebench.db.bundled import export_bundled
from tunebench.db.store import open_store
from tunebench.workloads import parse

__all__ = ["headline", "headline_table", "headline_text", "retry", "tune_worst", "wgmma"]

WGMMA_S, HEADLINE_S, TRITON_S = 10.0, 20.0, 40.0
"""Time limits of one program of a workload to be prepared, or to be timed once, in seconds."""
TUNE_S, TUNED_AT_ONCE = 60.0, 3
"""Most seconds to tune a workload, and workloads to tune before their best configurations are compared."""
COMPARE_S = 25.0
"""Time to compare the best configurations with the library, in seconds."""
START_TUNING_S = 12.0
"""Part of the time to tune that processes take to start and finalists to be timed, in seconds."""
END_S = 0.5
LEAST_S = 12.0
"""Time in which a child process can time one workload; with less left, none is started."""
MOST_ENDS = 2
"""Processes that a library may end before it is left out of the step."""
MOST_STARTS = 2
"""Child processes that may end in a row without having run a program."""
TABLE = "headline.md"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Job:
    """A contest, and the variants to use if its variant fails."""

    contest: ContestJob
    others: tuple[str, ...] = ()

    def next(self) -> _Job | None:
        """Return the job with the next variant; without any, the baselines alone; after that, None."""
        if self.contest.variant is None:
            return None
        variant, *further = (*self.others, None)
        contest = dataclasses.replace(self.contest, variant=variant, config="")
        return _Job(contest, tuple(further_variant for further_variant in further if further_variant))


def ranked(session: AcceptanceRun, text: str) -> list[str]:
    """Return the GPU variants of a workload, the one with the fastest predicted default first."""
    if text not in session.ranks:
        predicted = []
        for candidate in gpu_candidates(text, session.device)[0]:
            row = candidate.table.row(candidate.variant.default(parse(text), session.device))
            if row is not None:
                predicted.append((candidate.predicted_us(row), candidate.variant.key))
        session.ranks[text] = [key for _, key in sorted(predicted)]
    return list(session.ranks[text])


# -- the steps -----------------------------------------------------------------------------------------------


def wgmma(session: AcceptanceRun) -> None:
    """Verify and time the default of every variant that uses wgmma, against torch.

    Each variant runs once before one of them runs twice. What passed in an earlier run is not run again.
    """
    before = session.report.before.get("wgmma", {}).get("rows", [])
    done = {(row["workload"], row["variant"]) for row in before if _own_us(row) is not None}
    turns: Counter[str] = Counter()
    jobs: list[tuple[int, _Job]] = []
    for text in WGMMA:
        for key in ranked(session, text):
            if "wgmma" in key and session.match in text and (text, key) not in done:
                turns[key] += 1
                contest = ContestJob(workload=text, variant=key, baselines=("torch",))
                jobs.append((turns[key], _Job(contest)))
    jobs.sort(key=lambda job: job[0])
    _Contests(session, "wgmma").run([job for _, job in jobs], WGMMA_S)


def headline(session: AcceptanceRun, texts: Collection[str] | None = None) -> None:
    """Time the defaults of the headline workloads against torch, then against Triton.

    Triton takes long to compile: it has its turn when every workload has a figure.

    Args:
        session: The run.
        texts: The workloads; None times all.
    """
    texts = HEADLINE if texts is None else texts
    contests = _Contests(session, "headline")
    broken = _broken(session)
    jobs = []
    for text in HEADLINE:
        if session.match in text and text in texts:
            variants = sorted(ranked(session, text), key=broken.__contains__)
            first, *further = [*variants, None]
            contest = ContestJob(workload=text, variant=first, baselines=("torch",))
            jobs.append(_Job(contest, tuple(filter(None, further))))
    contests.run(jobs, HEADLINE_S)
    with_triton = [
        _again(row, "triton")
        for row in contests.rows
        if _own_us(row) is not None and row["workload"] in texts
    ]
    contests.run([_Job(contest) for contest in with_triton], TRITON_S)


def _again(row: Row, library: str) -> ContestJob:
    return ContestJob(workload=row["workload"], variant=row["variant"], baselines=(library,))


def _broken(session: AcceptanceRun) -> set[str]:
    """Return the variants that passed on no workload of the step `wgmma`, which others replace."""
    entry = session.report.steps.get("wgmma", {})
    passed = {row["variant"] for row in entry.get("rows", []) if _own_us(row) is not None}
    return set(entry.get("failed", [])) - passed


def retry(session: AcceptanceRun) -> None:
    """Repeat what failed or was not reached in `wgmma` and `headline` of an earlier run."""
    report, end = session.report, session.until
    rows = report.steps.get("headline", {}).get("rows", [])
    timed = {row["workload"] for row in rows if _ratio(row) is not None}
    missing = [text for text in HEADLINE if text not in timed]
    session.until = (session.clock() + end) / 2
    if not report.steps.get("wgmma", {}).get("complete") or report.steps["wgmma"].get("failed"):
        report.begin("wgmma")
        wgmma(session)
    session.until = end
    if missing:
        report.begin("headline")
        headline(session, missing)
    steps = {name: report.steps.get(name, {}) for name in ("wgmma", "headline")}
    problems = [f"{name}: {text}" for name, step in steps.items() for text in step.get("problems", [])]
    report.put(
        "retry",
        problems=problems,
        retried=missing,
        complete=all(step.get("complete", False) for step in steps.values()),
    )


def tune_worst(session: AcceptanceRun) -> None:
    """Tune the headline workloads, the worst ratio first, then others, and time the best configurations.

    Three workloads share the time; further ones follow if there is time left.
    """
    rows = session.report.steps.get("headline", {}).get("rows", [])
    ratio = {row["workload"]: speedup for row in rows if (speedup := _ratio(row)) is not None}
    worst = sorted(ratio, key=lambda text: ratio[text])
    trials = measured()
    listed = [text for text in dict.fromkeys([*worst, *trials]) if session.match in text]
    contests = _Contests(session, "tune")
    reports: list[Row] = []
    problems: list[str] = []
    for start in range(0, len(listed), TUNED_AT_ONCE):
        batch, best = listed[start : start + TUNED_AT_ONCE], list[Row]()
        for position, text in enumerate(batch):
            share_s = min(TUNE_S, (session.left_s - COMPARE_S) / (len(batch) - position))
            if share_s < LEAST_S:
                break
            report = _tuned(session, text, trials.get(text, 50), share_s, problems)
            if report is not None:
                best.append(report)
                reports.append(report)
                session.report.put("tune", reports=reports, problems=problems[:MOST_QUOTED])
        contests.run([_Job(_best(report)) for report in best], HEADLINE_S)
        if session.left_s < LEAST_S + COMPARE_S:
            break
    copy_gb_s = session.report.steps.get("facts", {}).get("measured", {}).get("ceilings", {}).get("copy_gb_s")
    tuned = {report["workload"] for report in reports}
    session.report.put(
        "tune",
        fusion=speedups.fusion_gains(reports),
        of_copy_bandwidth=speedups.bandwidth_shares(reports, copy_gb_s),
        bundled=_export_bundled(session),
        problems=[*problems, *contests.problems][:MOST_QUOTED],
        undone=[text for text in listed if text not in tuned],
        complete=tuned.issuperset(listed[:TUNED_AT_ONCE]),
    )


def _best(report: Row) -> ContestJob:
    names = {name: report[name] for name in ("workload", "variant", "config")}
    return ContestJob(**names, baselines=("torch",))


def _tuned(session: AcceptanceRun, text: str, trials: int, share_s: float, problems: list[str]) -> Row | None:
    """Tune one workload in a child process; return its report if anything was measured."""
    broken = _broken(session)
    allowed = [key for key in ranked(session, text) if session.hangs.allows(key)]
    usable = [key for key in allowed if key not in broken] or allowed
    if not usable:  # without any, `tune` would try all
        problems.append(f"{text}: every variant hung too often")
        return None
    refused = session.report.steps.get("facts", {}).get("compiled", {})
    if refused.get(usable[0]) is not None:
        return _best_carried(session, text, usable[0], share_s, problems)
    variants = [key for key in usable if refused.get(key) is None]
    search_s = max(1.0, share_s - START_TUNING_S)
    database = str(session.folder / DATABASE)
    arguments = ("tune", text, str(trials), f"{0.8 * search_s / 60:.3f}", database, *variants)
    answer = session.ask(*arguments, most_s=share_s)
    report: Row | None = answer.get("tuned")
    if report is None:
        problems.append(f"{text}: {answer.get('problem', 'no report')}"[:600])
        return None
    with open_store(session.folder / DATABASE, read_only=True) as store:
        report["paths"] = speedups.best_of_each(store.best(text, session.device.key))
    problems += [f"{text}: {violation}" for violation in report["violations"]]
    if not report["median_us"]:
        problems.append(f"{text}: nothing could be measured: {report['trials']}")
        return None
    session.measured += 1
    session.report.say(
        f"tune: {text}: {report['median_us']:.2f} us by {report['variant']} {report['config']}"
    )
    return report


def _best_carried(
    session: AcceptanceRun, text: str, variant: str, share_s: float, problems: list[str]
) -> Row | None:
    """Return the fastest carried configuration of a variant that does not compile here, like a report."""
    (candidate,) = [c for c in gpu_candidates(text, session.device)[0] if c.variant.key == variant]
    kernels = [
        CarriedKernel(candidate.variant, parse(text), candidate.table.config(row), session.device)
        for row in candidates(candidate)
    ]
    jobs = [
        dataclasses.asdict(
            ContestJob(workload=text, variant=variant, config=str(kernel.config), baselines=())
        )
        for kernel in kernels
        if is_carried(session.folder / CARRIED, kernel)
    ]
    timed: list[tuple[float, str]] = []
    limits = ChildLimits(total_s=share_s, answer_s=HEADLINE_S)
    for answer in session.child(["contest", json.dumps(jobs)], limits) if jobs else ():
        if "row" in answer and (own_us := _own_us(answer["row"])) is not None:
            timed.append((own_us, answer["row"]["config"]))
    if not timed:
        problems.append(
            f"{text}: {variant} does not compile here, and no carried configuration could be timed"
        )
        return None
    session.measured += 1
    median_us, config = min(timed)
    session.report.say(f"tune: {text}: {median_us:.2f} us by {variant} {config}, of {len(timed)} carried")
    names = {"workload": text, "variant": variant, "config": config, "median_us": median_us}
    return {**names, "carried": len(timed), "paths": {}}


def _export_bundled(session: AcceptanceRun) -> dict[str, int]:
    """Write the records to bundle into the folder `bundled` and return their number by file name."""
    database = session.folder / DATABASE
    if not database.exists():
        return {}
    with open_store(database, read_only=True) as store:
        return {path.name: count for path, count in export_bundled(store, session.folder / "bundled")}


# -- contests ------------------------------------------------------------------------------------------------


class _Contests:
    """Runs contests in child processes, and keeps the rows of a step's entry of the report.

    Args:
        session: The run.
        step: Name of the step. Rows of its last run stay until the workload is timed again.
    """

    def __init__(self, session: AcceptanceRun, step: str) -> None:
        self._session, self._step = session, step
        earlier = session.report.before.get(step, {}).get("rows", [])
        self._rows: dict[tuple[str, ...], Row] = {self._key(row): row for row in earlier}
        self._now: set[tuple[str, ...]] = set()
        self.problems: list[str] = []
        self._failed: set[str] = set()
        self._ended: Counter[str] = Counter()
        self._starts = 0
        self._put()

    def _key(self, row: Row) -> tuple[str, ...]:
        return (row["workload"], str(row["variant"])) if self._step == "wgmma" else (row["workload"],)

    @property
    def rows(self) -> list[Row]:
        """The latest row of each workload in which its variant was timed."""
        return list(self._rows.values())

    def run(self, jobs: Iterable[_Job], answer_s: float) -> None:
        """Time each job; a failure ends its child process, and the next process goes on with the other jobs.

        Args:
            jobs: The contests.
            answer_s: Time limit of one program to be prepared, or to be timed once, in seconds.
        """
        self._ended.clear()
        waiting = deque(self._allowed(jobs))
        self._starts = 0
        while waiting and self._session.left_s > LEAST_S and self._starts < MOST_STARTS:
            self._run_child(waiting, answer_s)
            waiting = deque(self._allowed(waiting))
        undone = [f"{job.contest.workload} {job.contest.variant or 'baselines'}" for job in waiting]
        undone = [*self._session.report.steps[self._step].get("undone", []), *undone]
        self._put(complete=not undone, undone=undone)

    def _allowed(self, jobs: Iterable[_Job]) -> Iterable[_Job]:
        """Yield the jobs with programs that may run.

        A variant that ended a process in this step is replaced where another one is left, and one that hung
        too often everywhere. A library that ended processes repeatedly is left out.
        """
        broken = tuple(name for name, count in self._ended.items() if count >= MOST_ENDS)
        for first in jobs:
            job: _Job | None = first
            while job is not None and (variant := job.contest.variant) is not None:
                last = not job.others
                if self._session.hangs.allows(variant) and (last or not self._ended[variant]):
                    break
                job = job.next()
            if job is not None:
                without = tuple(dict.fromkeys([*job.contest.without, *broken]))
                yield _Job(dataclasses.replace(job.contest, without=without), job.others)

    def _run_child(self, waiting: deque[_Job], answer_s: float) -> None:
        """Time the waiting jobs in one process, until all are done or the process fails."""
        session, running = self._session, None
        listed = json.dumps([dataclasses.asdict(job.contest) for job in waiting])
        limits = ChildLimits(total_s=session.left_s, answer_s=answer_s)
        for answer in session.child(["contest", listed], limits):
            if "row" in answer:
                self._starts, running = 0, None
                self._add(waiting.popleft(), answer["row"], waiting)
            elif "problem" in answer:
                self._fail(waiting, running, answer)
            else:
                running = answer["running"]

    def _add(self, job: _Job, row: Row, waiting: deque[_Job]) -> None:
        """Keep a row; if the variant failed, the next variant has its turn after all other jobs."""
        own_us, text = _own_us(row), row["workload"]
        self._keep(row)
        self._session.measured += own_us is not None
        if own_us is None and job.contest.variant is not None:
            self._failed.add(job.contest.variant)
            reason = next((r["problem"] for r in row["rows"] if r["name"] == row["variant"]), "not timed")
            self.problems.append(f"{text}: {row['variant']}: {reason}"[:600])
            if (another := job.next()) is not None and another.contest.variant is not None:
                waiting.append(another)
        self._session.report.say(f"{self._step}: {text}: {_line(row)}")
        self._put()

    def _fail(self, waiting: deque[_Job], running: str | None, answer: Mapping[str, Any]) -> None:
        """Blame the program that ran when a process failed, and append what is left of its job."""
        if not waiting:
            return  # everything was timed, and the process did not end
        if self._session.left_s < END_S:
            return  # the end of the step is no fault of the program
        if running is None:
            self._starts += 1
            self.problems.append(f"before any program: {answer['problem']}"[:600])
            self._put()
            return
        self._starts, job = 0, waiting.popleft()
        contest = job.contest
        self.problems.append(f"{contest.workload}: {running}: {answer['problem']}"[:600])
        self._session.report.say(f"{self._step}: WRONG: {self.problems[-1]}"[:300])
        self._ended[running] += 1
        if running == contest.variant:
            self._failed.add(running)
            if "timed_out" in answer:
                self._session.hangs.add(running)
        if (another := self._remaining(job, running)) is not None:
            waiting.append(another)
        self._put()

    def _remaining(self, job: _Job, running: str) -> _Job | None:
        """Return the job without the program that ended the process; None if nothing new is left of it."""
        contest = job.contest
        if any(key[0] == contest.workload for key in self._now):
            return None
        if running == contest.variant:
            another = job.next()
            alone = another is not None and another.contest.variant is None
            return None if alone and self._step == "wgmma" else another
        if running == "inputs":
            less = dataclasses.replace(contest, baselines=())
        else:
            less = dataclasses.replace(contest, without=(*contest.without, running))
        new = less != contest and (contest.variant is not None or less.baselines)
        return _Job(less, job.others) if new else None

    def _keep(self, row: Row) -> None:
        """Add a row, or its new programs to a row of this run; no failure replaces a time."""
        key = self._key(row)
        old = self._rows.get(key)
        if old is None or _own_us(old) is None:
            self._rows[key] = row
        elif key in self._now and _identity(old) == _identity(row):
            timed = [entry for entry in old["rows"] if "median_us" in entry]
            names = {entry["name"] for entry in timed}
            self._rows[key] = {**old, "rows": [*timed, *(r for r in row["rows"] if r["name"] not in names)]}
        elif _own_us(row) is not None and (_ratio(row) is not None or _ratio(old) is None):
            self._rows[key] = row
        self._now.add(key)

    def _put(self, **facts: Any) -> None:
        report = self._session.report
        rows = [{**row, "paths": [row["variant"]]} for row in self.rows]
        figures = {"rows": self.rows, "ratios": speedups.ratios(rows)["geometric_means"]}
        stopped = self._session.hangs.stopped
        problems = self.problems[:MOST_QUOTED]
        failed = sorted(self._failed)
        report.put(self._step, **figures, problems=problems, stopped=stopped, failed=failed, **facts)
        report.text(TABLE, headline_table(report.steps) + "\n")


def _identity(row: Row) -> tuple[str | None, str]:
    return row["variant"], row["config"]


def _own_us(row: Row) -> float | None:
    return next((r.get("median_us") for r in row["rows"] if r["name"] == row["variant"]), None)


def _ratio(row: Row) -> float | None:
    """Return the speedup over the fastest baseline, or None."""
    speedup = [r["speedup"] for r in row["rows"] if "speedup" in r and r["name"] != row["variant"]]
    return min(speedup, default=None)


def _line(row: Row) -> str:
    return ", ".join(
        f"{r['name']} {r['median_us']:.2f} us" if "median_us" in r else f"{r['name']}: {r['problem']}"
        for r in row["rows"]
    )[:400]


# -- the table -----------------------------------------------------------------------------------------------

COLUMNS = ("torch", "triton")
STATE = "cold"
"""Cache state of every time in the table: `gpu_process.INTERLEAVED`."""


def headline_table(steps: Mapping[str, Any]) -> str:
    """Return the headline figures as a table in Markdown: defaults, then tuned configurations."""
    header = ["workload", "variant", "configuration", f"its time, {STATE} caches (µs)"]
    header += ["fastest library", f"its time, {STATE} caches (µs)"]
    header += [f"speedup over {name} (higher is better)" for name in ("the fastest library", *COLUMNS)]
    lines = [header, ["---"] * len(header)]
    for row, state in _headline_rows(steps):
        own_us, ratio, (library, library_us) = _own_us(row), _ratio(row), _fastest_library(row)
        speedup = _speedups(row)
        figures = [ratio, *(speedup.get(name) for name in COLUMNS)]
        cells = [row["workload"], row["variant"] or "none", state, _figure(own_us, 2, "failed")]
        cells += [library, _figure(library_us, 2), *(_figure(figure, 3) for figure in figures)]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def headline_text(steps: Mapping[str, Any]) -> str:
    """Return the headline figures as short lines, to print last: only the end of the output may be kept."""
    rows = list(_headline_rows(steps))
    timed = sum(_ratio(row) is not None for row, state in rows if state == "default")
    lines = [
        f"headline figures: {timed} of {len(HEADLINE)}. Times with {STATE} caches, random inputs. A speedup "
        "above 1: the kernel is faster than the fastest library.",
        f"{'speedup':>8} {'us':>9} {'library us':>10} {'library':<11} workload, variant, configuration",
    ]
    for row, state in rows:
        library, library_us = _fastest_library(row)
        lines.append(
            f"{_figure(_ratio(row), 3, '-'):>8} {_figure(_own_us(row), 2, 'failed'):>9} "
            f"{_figure(library_us, 2, '-'):>10} {library[:11]:<11} {row['workload']}, "
            f"{row['variant'] or 'none'}, {state}"
        )
    return "\n".join(lines)


def _headline_rows(steps: Mapping[str, Any]) -> Iterable[tuple[Row, str]]:
    for step, state in (("headline", "default"), ("tune", "tuned")):
        for row in steps.get(step, {}).get("rows", []):
            if row["workload"] in HEADLINE:
                yield row, state


def _figure(number: float | None, digits: int, missing: str = "") -> str:
    return missing if number is None else f"{number:.{digits}f}"


def _speedups(row: Row) -> dict[str, float]:
    """Return the speedup over the fastest program of each library."""
    speedup: dict[str, float] = {}
    for entry in row["rows"]:
        if "speedup" in entry and entry["name"] != row["variant"]:
            name = next((column for column in COLUMNS if entry["name"].startswith(column)), "torch")
            speedup[name] = min(entry["speedup"], speedup.get(name, entry["speedup"]))
    return speedup


def _fastest_library(row: Row) -> tuple[str, float | None]:
    """Return the name and the time of the fastest baseline."""
    timed = [
        (r["median_us"], r["name"]) for r in row["rows"] if "median_us" in r and r["name"] != row["variant"]
    ]
    if not timed:
        return "", None
    library_us, name = min(timed)
    return name, library_us
