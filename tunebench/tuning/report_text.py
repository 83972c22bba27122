"""Reports of single workloads, size ranges, profiles and suites as text: the output of `tunebench tune`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tunebench._command import command_line
from tunebench._console import table
from tunebench._figure import duration, ratio, significant
from tunebench._notebook import html_grid, html_table
from tunebench.db.location import locate
from tunebench.kernels import files_of
from tunebench.objective import ERRORS, TIME, Requirement

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.db.figures import BaselineComparison
    from tunebench.executor import PoolStatus
    from tunebench.tuning.summary import TuningSummary, WorkloadResult
    from tunebench.tuning.workload_report import FrontPoint, Report

__all__ = [
    "comparison_rows",
    "failure_lines",
    "html_report",
    "html_summary",
    "pool_parts",
    "render_reports",
    "render_size_range",
    "render_summary",
    "show_command",
    "skipped_lines",
    "time_of",
]

REMEDY = (
    "the order below holds, the times are less exact: stop other programs and run the same command again, "
    "which times the finalists again"
)
"""What to do about noise."""

SHOWN_FAILURES = 3
"""Most reasons of failure that the report of a workload shows."""

SHOWN_LINES = 12
"""Most lines of a reason that it shows."""

SHOWN_FRONT = 12
"""Most configurations of a Pareto front that it shows."""

SHOWN_RUNS = 3
"""Most interrupted runs with other options that it shows, the latest."""


def pool_parts(pool: PoolStatus) -> list[str]:
    """Return the number of workers of a cluster, and of lost workers and retries if there are any."""
    lost = [f"{len(pool.lost)} lost"] if pool.lost else []
    retried = [f"{pool.retried} trials retried"] if pool.retried else []
    return [f"{pool.workers} worker{'' if pool.workers == 1 else 's'}", *lost, *retried]


def time_of(us: float | None) -> str | None:
    """Return a time with its unit, from microseconds."""
    return None if us is None else duration(us)


def _faster(us: float | None, best_us: float | None) -> str | None:
    return f"{ratio(us / best_us)}x" if us is not None and best_us is not None else None


def _variant(report: Report) -> str:
    return f"{report.variant}{' (default)' if report.is_default else ''}"


# -- one workload ------------------------------------------------------------------------------------------


_VERSUS = ("", ">time", ">speedup of best", "95 % interval of the speedup")


def html_report(report: Report) -> str:
    """Return the best of a report, and its comparison with others, as HTML tables for notebooks."""
    rows = [
        ("variant", report.variant or "no configuration succeeded"),
        ("configuration", report.config),
        ("optimality gap", None if report.gap is None else significant(report.gap)),
    ]
    tables = html_table(f"{report.workload} on {report.device}", rows)
    if report.median_us is not None:
        tables += html_grid(*_VERSUS, rows=comparison_rows(report, report.median_us))
    return tables


def render_reports(reports: Sequence[Report], to: Console) -> None:
    """Print the report of each device."""
    for report in reports:
        _render(report, to)


def _render(report: Report, to: Console) -> None:
    to.print(f"{report.workload} on {report.device}")
    _render_best(report, to)
    for line in _search_lines(report):
        to.print(line, soft_wrap=True)


def _render_best(report: Report, to: Console) -> None:
    """Print what made the times unreliable, the best, its comparisons and its proof."""
    if report.noise:
        to.print(f"  noise    {report.noise[0]}", soft_wrap=True)
        for line in (*report.noise[1:], REMEDY):
            to.print(f"           {line}", soft_wrap=True)
    if report.median_us is None:
        asked = f" that satisfies {', '.join(report.require)}" if report.require else ""
        lacking = f", or none has {', '.join(report.objectives)}" if report.objectives else ""
        to.print(f"no configuration succeeded{asked}{lacking}")
        return
    to.print(f"  variant  {report.variant}")
    to.print(f"  config   {report.config}", soft_wrap=True)
    to.print(table(*_VERSUS, rows=comparison_rows(report, report.median_us)))
    if metrics := metrics_line(report):
        to.print(metrics, soft_wrap=True)
    _render_front(report, to)
    for line in (*_ties(report), *_proof(report)):
        to.print(line, soft_wrap=True)


def metrics_line(report: Report) -> str | None:
    """Return the metrics of the best besides its time and errors; None without any."""
    names = [name for name in report.metrics if name != TIME and name not in ERRORS]
    names += [text.name for text in map(Requirement.parse, report.require) if text.name in ERRORS]
    values = ", ".join(f"{name} {significant(report.metrics[name])}" for name in dict.fromkeys(names))
    return f"  metrics  {values}" if values else None


def _render_front(report: Report, to: Console) -> None:
    """Print the objectives, and the Pareto front of several."""
    if report.objectives or report.require:
        goal = ", ".join(report.objectives or (TIME,))
        required = f"; required: {', '.join(report.require)}" if report.require else ""
        to.print(f"  goal     {goal}{required}", soft_wrap=True)
    if len(report.objectives) < 2:
        return
    count = len(report.front)
    to.print(f"  front    {count} configuration{'' if count == 1 else 's'} that no other one dominates:")
    names = list(report.front[0].values)
    rows = ((rank, *front_cells(point)) for rank, point in enumerate(report.front[:SHOWN_FRONT], start=1))
    to.print(table(">", *(f">{name}" for name in names), "variant", rows=rows))
    for rank, point in enumerate(report.front[:SHOWN_FRONT], start=1):
        to.print(f"{rank:>2}  {point.config}", soft_wrap=True)
    if len(report.front) > SHOWN_FRONT:
        to.print(f"    {len(report.front) - SHOWN_FRONT} more: {show_command(report)}")


def front_cells(point: FrontPoint) -> Iterator[str]:
    """Yield the values of a point of the front, times with their unit, and its variant."""
    for name, value in point.values.items():
        yield duration(value) if name == TIME else significant(value)
    yield f"{point.variant}{' (default)' if point.is_default else ''}"


def _search_lines(report: Report) -> Iterator[str]:
    """Yield what the search tried, what failed, and what it took."""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(report.trials.items())) or "none"
    audited = f" ({report.audited} audited)" if report.audited else ""
    yield f"  trials   {counts}; {report.masked} pruned by bound{audited}; {report.cached} known before"
    if report.served is not None:
        yield f"  lookup   returns {report.served}"
    if report.default_failure is not None:
        yield f"  default  failed, so that the best is compared with none: {report.default_failure}"
    yield from failure_lines(report)
    for source in report.warm:
        text = f"{source.records} records of {source.workload} on {source.device}, {source.use}"
        yield f"  warm     {source.variant}: {text}"
    if report.unlikely:
        winners = f"{significant(report.unlikely_winners, 2)} of them expected to be faster"
        yield f"  unlikely {report.unlikely} configurations postponed, still open; {winners}"
    if report.pool is not None:
        yield f"  cluster  {', '.join(pool_parts(report.pool))}"
        for line in (*(f"lost {worker}" for worker in report.pool.lost), *report.pool.refused):
            yield f"           {line}"
    seconds = ", ".join(f"{name.removesuffix('_s')} {value:.1f}" for name, value in report.seconds.items())
    yield f"  seconds  {seconds}"
    for line in skipped_lines(report.skipped):
        yield f"  skipped  {line}"
    yield f"  database {report.database}"
    for run in report.unresumed[-SHOWN_RUNS:]:
        command = run.command(locate(report.database).option)
        yield f"  resume   {run}" + (f"; continue it by `{command}`" if command is not None else "")


def skipped_lines(skipped: Mapping[str, str]) -> Iterator[str]:
    """Yield each reason once; a reason that several variants share is followed by their names."""
    sharing: dict[str, list[str]] = {}
    for key, reason in skipped.items():
        sharing.setdefault(reason.removeprefix(f"{key} "), []).append(key)
    for reason, keys in sharing.items():
        yield skipped[keys[0]] if len(keys) == 1 else f"{reason}: {', '.join(keys)}"


def comparison_rows(report: Report, best_us: float) -> Iterator[tuple[object, ...]]:
    """Yield rows of the best configuration, its rivals and the lower bound: name, time, speedup, interval.

    Args:
        report: A report with a best configuration.
        best_us: Time of that configuration.
    """
    origin = "predicted, not measured" if report.how == "predicted" else "measured"
    bounds = report.ci_us or report.interval_us
    interval = f" [{time_of(bounds[0])}, {time_of(bounds[1])}]" if bounds else ""
    earlier = " by an earlier search" if report.is_earlier else ""
    yield (
        f"best ({origin}{earlier}{', the default' if report.is_default else ''})",
        f"{time_of(best_us)}{interval}",
        None,
        None,
    )
    if report.default_us is not None and not report.is_default:
        yield _versus("default configuration", report.default_us, best_us, report.versus.get("default"))
    if "runner_up" in report.versus:
        yield _versus("runner-up", None, best_us, report.versus["runner_up"])
    for baseline in report.baselines:
        comparison = report.versus_baselines.get(baseline.name)
        yield _versus(baseline.name, baseline.median_us, best_us, comparison)
    bound = time_of(report.bound_us) if report.bound_us else "none"
    if report.measured_rates is not None:
        yield "lower bound", bound, None, f"at measured {report.measured_rates}"
    else:
        yield "lower bound (assumed rates)" if report.assumed else "lower bound", bound, None, None


def _versus(
    name: str, us: float | None, best_us: float, versus: BaselineComparison | None
) -> tuple[object, ...]:
    """Return the row of a rival; speedup and interval are those of the rounds in which both were timed."""
    if versus is None or versus.high is None or versus.probability is None:
        return name, time_of(us), _faster(us, best_us) if versus is None else f"{ratio(versus.ratio)}x", None
    interval = f"[{ratio(versus.low)}, {ratio(versus.high)}]"
    chance = f"{100 * versus.probability:.1f} % probability that best is faster"
    sure = " tie" if versus.tied else f", {chance}"
    return name, time_of(us), f"{ratio(versus.ratio)}x", interval + sure


def failure_lines(report: Report) -> Iterator[str]:
    """Yield the reason of the largest groups of failures, with the first lines of the message."""
    for failure in report.failures[:SHOWN_FAILURES]:
        yield f"  failed   {failure}"
        yield f"           {failure.variant} {failure.config}"
        lines = [line for line in failure.reason.splitlines() if line.strip()]
        if len(lines) > 1:
            yield from (f"           | {line}" for line in lines[:SHOWN_LINES])
    if len(report.failures) > SHOWN_FAILURES:
        yield f"           {len(report.failures) - SHOWN_FAILURES} more reasons: {show_command(report)}"


def show_command(report: Report) -> str:
    """Return the command that lists the records of a report's workload."""
    return command_line(
        "show",
        workload=report.workload,
        device=report.device,
        variant_file=files_of(report.workload.partition(":")[0]),
        db=locate(report.database).option,
    )


def _ties(report: Report) -> Iterator[str]:
    if report.ties:
        fastest, reason = report.ties[0], "same prediction" if report.how == "predicted" else "within noise"
        more = f" and {report.tie_count - 1} more" if report.tie_count > 1 else ""
        yield f"  ties     {reason}: {fastest.variant} {fastest.config}{more}"


def _proof(report: Report) -> Iterator[str]:
    """Yield the lines on the proof of the best configuration, and on variants that were not searched."""
    proof = report.optimality_proof
    if proof is None and report.how == "measured":
        yield "  proof    none: lower bounds are of times, and another objective was asked"
        return
    if proof is None:
        gap = f"; {ratio(report.gap)} times the bound" if report.gap is not None else ""
        yield f"  proof    none: the time is predicted{gap}"
        return
    closed = f"{proof.timed} timed, {proof.bounded} closed by bound, {proof.impossible} cannot run"
    if proof.proved:
        yield f"  proof    optimal in its space{' (assumed rates)' if report.assumed else ''}: {closed}"
    else:
        counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in proof.open.items())
        yield f"  proof    {_gap(report)}: {proof.open_count} open ({counts}); {closed}"
    left_out = [variant for variant in report.outside if variant not in report.skipped]
    if left_out:
        yield f"  outside  not searched, not covered by the proof: {', '.join(left_out)}"


def _gap(report: Report) -> str:
    """Return the optimality gap, or why there is none."""
    if report.gap is not None:
        return f"gap {ratio(report.gap)}{' to measured rates' if report.measured_rates is not None else ''}"
    return "no gap, since the device's rates are assumed" if report.assumed else "no bound on what is open"


# -- several workloads -------------------------------------------------------------------------------------


def render_size_range(reports: Sequence[Report], total: int, to: Console) -> None:
    """Print a line for each size of a range.

    Args:
        reports: The reports of the sizes that were tuned.
        total: Number of sizes of the range.
        to: The console.
    """
    rows = [
        (
            report.workload,
            time_of(report.median_us) or "none succeeded",
            _faster(report.default_us, report.median_us),
            _variant(report),
        )
        for report in reports
    ]
    to.print(table("workload", ">best", ">speedup over default", "variant", rows=rows))
    if len(reports) < total or any(report.interrupted for report in reports):
        to.print(f"{total - len(reports)} of {total} were not tuned; the same command resumes here")


_SUITE = (">share", ">calls", "workload", ">trials", ">before", ">after", ">speedup", "variant")
_PROFILE = (">recorded", ">share", ">calls", "tuned now", ">best", "variant")


def html_summary(summary: TuningSummary) -> str:
    """Return the tuned workloads of a suite or a profile as an HTML table for notebooks."""
    if summary.kind == "profile":
        rows = [_profile_row(result, summary.recorded_us) for result in summary.of("tuned")]
        return html_grid(*_PROFILE, rows=rows, caption=f"profile of {summary.device}")
    rows = [_suite_row(result) for result in summary.results if result.after_us is not None]
    return html_grid(*_SUITE, rows=rows, caption=f"{summary.name} on {summary.device}")


def render_summary(summary: TuningSummary, to: Console) -> None:
    """Print the summary of a suite or a profile."""
    if summary.kind == "profile":
        _render_profile(summary, to)
    else:
        _render_suite(summary, to)
    to.print(f"  database {summary.database}", soft_wrap=True)


def _render_profile(summary: TuningSummary, to: Console) -> None:
    to.print(f"profile of {summary.device}", soft_wrap=True)
    tuned, recorded, untuned = summary.of("tuned"), summary.of("known"), summary.of("left")
    if tuned:
        to.print(table(*_PROFILE, rows=(_profile_row(result, summary.recorded_us) for result in tuned)))
    if recorded:
        to.print(
            f"  known    {len(recorded)} tuned before with the current sources; --retune tunes them again"
        )
    for result in summary.of("unsuited"):
        to.print(f"  unsuited {result.workload}: {result.reason}", soft_wrap=True)
    if untuned:
        to.print(f"  left     {len(untuned)}; the same command resumes with them")
    to.print(f"  covered  {100 * summary.covered:.1f} % of {time_of(summary.recorded_us)} recorded")


def _profile_row(result: WorkloadResult, recorded_us: float) -> tuple[object, ...]:
    assert result.report is not None
    share = f"{100 * result.recorded_us / recorded_us:.1f} %" if recorded_us else None
    best = time_of(result.report.median_us)
    return time_of(result.recorded_us), share, result.count, result.workload, best, _variant(result.report)


def _render_suite(summary: TuningSummary, to: Console) -> None:
    to.print(f"{summary.name} on {summary.device}", soft_wrap=True)
    timed = [result for result in summary.results if result.after_us is not None]
    if timed:
        to.print(table(*_SUITE, rows=map(_suite_row, timed)))
        speedup = f", speedup {summary.before_us / summary.after_us:.2f}x" if summary.after_us else ""
        predicted = " (predicted)" if summary.how == "predicted" else ""
        before, after = time_of(summary.before_us), time_of(summary.after_us)
        to.print(f"  model    {before} before, {after} after{speedup}{predicted}")
    for result in (*summary.without, *(result for result in timed if result.reason)):
        missing = "no configuration succeeded" if result.state == "failed" else "not tuned yet"
        to.print(f"  {result.state:<8} {result.workload}: {result.reason or missing}", soft_wrap=True)
    to.print(f"  trials   {summary.trials} of {summary.total}{_why_fewer(summary)}")
    to.print(f"  seconds  {summary.wall_s:.1f}")


def _suite_row(result: WorkloadResult) -> tuple[object, ...]:
    report = result.report
    assert report is not None
    proved = report.optimality_proof is not None and report.optimality_proof.proved
    return (
        f"{100 * (result.share or 0.0):.1f} %",
        result.count,
        result.workload,
        f"{result.trials}{' (optimal)' if proved else ''}",
        time_of(result.before_us),
        time_of(result.after_us),
        _faster(result.before_us, result.after_us),
        _variant(report),
    )


def _why_fewer(summary: TuningSummary) -> str:
    if summary.interrupted:
        return "; interrupted: all results are kept, the same command resumes here"
    if summary.cut_short:
        return "; time limit reached: the same command resumes here"
    return "; no open configuration could be faster" if summary.trials < summary.total else ""
