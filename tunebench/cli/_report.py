"""What `tunebench tune` prints for people: what a run found, how sure that is, and what is proved of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tunebench.cli._output import table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.executor import Fleet
    from tunebench.measure.comparison import Comparison
    from tunebench.tuning import Report

__all__ = ["fleet_of", "render_all", "time_of"]


def fleet_of(fleet: Fleet) -> list[str]:
    """Return what there is to tell of the workers of a cluster."""
    lost = [f"{len(fleet.lost)} lost"] if fleet.lost else []
    retried = [f"{fleet.retried} trials begun again"] if fleet.retried else []
    return [f"{fleet.workers} worker{'' if fleet.workers == 1 else 's'}", *lost, *retried]


def time_of(us: float | None) -> str | None:
    """Return a time as people read it."""
    if us is None:
        return None
    return f"{us / 1e3:.3f} ms" if us >= 1e4 else f"{us:.2f} us"


def render_all(reports: Sequence[Report], to: Console) -> None:
    """Print what was found for each device."""
    for report in reports:
        _render(report, to)


def _render(report: Report, to: Console) -> None:
    to.print(f"{report.workload} on {report.device}")
    if report.median_us is None:
        to.print("no configuration succeeded")
    else:
        to.print(f"  variant  {report.variant}")
        to.print(f"  config   {report.config}", soft_wrap=True)
        to.print(table("", ">time", ">best is faster by", "", rows=_comparison(report, report.median_us)))
        for line in (*_ties(report), *_proof(report)):
            to.print(line, soft_wrap=True)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(report.trials.items())) or "none"
    audited = f" ({report.audited} audited)" if report.audited else ""
    to.print(f"  trials   {counts}; {report.masked} pruned by bound{audited}; {report.cached} known before")
    for source in report.warm:
        text = f"{source.records} records of {source.workload} on {source.device}, {source.use}"
        to.print(f"  warm     {source.variant}: {text}", soft_wrap=True)
    if report.unlikely:
        winners = f"{report.unlikely_winners:.2g} of them expected to be faster"
        to.print(f"  unlikely {report.unlikely} configurations passed over, open still; {winners}")
    if report.fleet is not None:
        to.print(f"  cluster  {', '.join(fleet_of(report.fleet))}")
        for told in (*(f"lost {one}" for one in report.fleet.lost), *report.fleet.refused):
            to.print(f"           {told}", soft_wrap=True)
    seconds = ", ".join(f"{name.removesuffix('_s')} {value:.1f}" for name, value in report.seconds.items())
    to.print(f"  seconds  {seconds}")
    for reason in report.skipped.values():
        to.print(f"  skipped  {reason}", soft_wrap=True)
    to.print(f"  database {report.database}", soft_wrap=True)


def _comparison(report: Report, best_us: float) -> Iterator[tuple[object, ...]]:
    how = "predicted, not measured" if report.how == "predicted" else "measured"
    ends = report.ci_us or report.interval_us
    interval = f" [{time_of(ends[0])}, {time_of(ends[1])}]" if ends else ""
    what = f"{how}, the default" if report.is_default else how
    yield f"best ({what})", f"{time_of(best_us)}{interval}", None, None
    if report.default_us is not None and not report.is_default:
        yield (
            "default configuration",
            time_of(report.default_us),
            f"{report.default_us / best_us:.2f}x",
            _confidence(report.versus.get("default")),
        )
    runner_up = report.versus.get("runner_up")
    if runner_up is not None:
        yield "runner-up", None, f"{runner_up.ratio:.2f}x", _confidence(runner_up)
    for place, baseline in enumerate(report.baselines):
        said = _confidence(report.versus.get("baseline")) if place == 0 else None
        yield baseline.name, time_of(baseline.median_us), f"{baseline.median_us / best_us:.2f}x", said
    label = "bound (rates assumed)" if report.assumed else "bound"
    yield label, time_of(report.bound_us) if report.bound_us else "none", None, None


def _confidence(versus: Comparison | None) -> str | None:
    if versus is None:
        return None
    interval = f"[{versus.low:.2f}, {versus.high:.2f}]"
    return f"{interval} tie" if versus.tied else f"{interval}, {100 * versus.probability:.1f} % sure"


def _ties(report: Report) -> Iterator[str]:
    if report.ties:
        first = report.ties[0]
        more = f" and {len(report.ties) - 1} more" if len(report.ties) > 1 else ""
        yield f"  ties     within noise: {first.variant} {first.config}{more}"


def _proof(report: Report) -> Iterator[str]:
    """Tell what is proved of the best, of which variants, and what stands in the way."""
    proof = report.optimality_proof
    if proof is None:
        gap = f"; {report.gap:.2f} times the bound" if report.gap is not None else ""
        yield f"  proof    none: the time is predicted{gap}"
        return
    assumed = " (rates assumed)" if report.assumed else ""
    closed = f"{proof.timed} timed, {proof.bounded} closed by bound, {proof.impossible} cannot run"
    if proof.proved:
        yield f"  proof    optimal in its space{assumed}: {closed}"
    else:
        counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in proof.open.items())
        gap = f"gap {proof.gap:.2f}" if proof.gap is not None else "no bound on what is open"
        yield f"  proof    {gap}{assumed}: {proof.open_count} open ({counts}); {closed}"
    left_out = [variant for variant in report.outside if variant not in report.skipped]
    if left_out:
        yield f"  outside  not searched, so nothing is said of: {', '.join(left_out)}"
