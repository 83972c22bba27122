"""`tunebench show`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench._figure import significant
from tunebench.cli import _completion
from tunebench.cli._choice import ConfigRequest
from tunebench.cli._option import Json, device_filter
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import duration, emit, table
from tunebench.errors import InputError
from tunebench.outcome import Predicted, first_error, time_us

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.db.record import Record, TrialKey

__all__ = ["command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRequest(ConfigRequest):
    """The options of a configuration, or of records; by default, of the records of all devices."""

    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME|FILE",
            help="Device: a name, or a file that describes one. Default: all devices with records; with "
            "--sass, --ptx or --resources GPU, else CPU.",
            show_default=False,
            autocompletion=_completion.devices,
        ),
    ] = None


@grouped_options("request", ShowRequest)
def command(
    request: ShowRequest,
    limit: Annotated[int, typer.Option(min=1, help="Number of fastest configurations to show.")] = 10,
    sass: Annotated[
        bool, typer.Option("--sass", help="Show the machine code of one configuration (SASS on a GPU).")
    ] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="Show the PTX of one configuration.")] = False,
    resources: Annotated[
        bool,
        typer.Option("--resources", help="Show registers, shared memory and occupancy of one configuration."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the records of a workload: the fastest configurations, and failures by class.

    Without --device and --arch, the records of all devices are shown. --sass, --ptx and --resources compile
    one configuration and show its binary instead; no GPU is needed.
    """
    views = [name for name, is_asked in (("sass", sass), ("ptx", ptx), ("resources", resources)) if is_asked]
    if len(views) > 1:
        raise InputError("--sass, --ptx and --resources exclude one another")
    if views:
        from tunebench.cli._inspection import inspect

        inspect(request.choice(), views[0], as_json)
    elif request.variant or request.config:
        raise InputError("--variant and --config need --sass, --ptx or --resources")
    else:
        _show_records(request, limit, as_json)


def _show_records(request: ShowRequest, limit: int, as_json: bool) -> None:
    from tunebench.db.record import RECORDED
    from tunebench.db.store import open_store
    from tunebench.report import best_records
    from tunebench.workloads import parse

    text = request.workload if request.workload.startswith(RECORDED) else str(parse(request.workload))
    select = device_filter(request.device, request.arch)
    with open_store(request.db, read_only=True) as store:
        keys = select({space.device for space in store.spaces()})
        history = [record for record in store.history(text) if record.key.device in keys]
        # The choice among predictions is recorded once more, as a finalist: it is no further prediction.
        entries = [record for record in history if record.purpose != "finalist" or not _is_predicted(record)]
        answers = [store.best(text, key, limit=1) for key in {record.key.device for record in entries}]
    served = {record.key: record for answer in answers for record in answer if not record.stale}
    best = _shown(best_records(entries), served, limit)
    outcomes = Counter(entry.result.outcome.kind for entry in entries)
    reasons: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        reason = getattr(entry.result.outcome, "reason", None)
        if reason is not None:
            reasons[entry.result.outcome.kind, first_error(reason)] += 1
    violating = [entry for entry in entries if entry.violates_bound]
    data = {
        "workload": text,
        "measurements": len(entries),
        "outcomes": dict(outcomes),
        "failures": [{"kind": k, "reason": r, "count": n} for (k, r), n in reasons.most_common()],
        "best": [{**_describe(entry), "served": entry in served.values()} for entry in best],
        "violations": [_describe(entry) for entry in violating],
    }

    def render(to: Console) -> None:
        to.print(f"{text}: {_count(entries)}")
        ranked: list[Mapping[str, Any]] = data["best"]  # type: ignore[assignment]
        rows = (
            (rank, _time(d), _how(d), d["device"], d["variant"]) for rank, d in enumerate(ranked, start=1)
        )
        to.print(table(">", ">time", "how", "device", "variant", rows=rows))
        for rank, described in enumerate(ranked, start=1):  # on lines of their own, which can be copied
            to.print(f"{rank:>2}  {described['config']}", soft_wrap=True)
            values = (f"{name} {significant(value)}" for name, value in described["metrics"].items())
            if metrics := ", ".join(values):
                to.print(f"    {metrics}", soft_wrap=True)
        for violation in violating:
            to.print(
                (
                    f"warning: faster than its lower bound of {significant(violation.bound_us or 0.0)} us: "
                    f"{violation.key.variant} {violation.key.config}"
                ),
                soft_wrap=True,
            )
        to.print(", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items())))
        if reasons:
            failures = ((n, kind, reason) for (kind, reason), n in reasons.most_common())
            to.print(table(">times", "failure", "reason", rows=failures))

    emit(as_json, data, render)


def _is_predicted(entry: Record) -> bool:
    return isinstance(entry.result.outcome, Predicted)


def _shown(best: Sequence[Record], served: Mapping[TrialKey, Record], limit: int) -> list[Record]:
    """Return the fastest records and those that lookup returns, even if they are slower."""
    shown = [served.get(record.key, record) for record in best[:limit]]
    return [*shown, *(record for record in served.values() if record not in shown)]


def _count(entries: Sequence[Record]) -> str:
    """Return the number of predictions and of trials that were run, in words."""
    predicted = sum(map(_is_predicted, entries))
    parts = [(len(entries) - predicted, "measurement"), (predicted, "prediction")]
    counted = [f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in parts if count]
    return ", ".join(counted) or "no measurements"


def _time(described: Mapping[str, Any]) -> str:
    """Return a time, for a prediction with its 90 % interval."""
    low_us, high_us = described["low_us"], described["high_us"]
    interval = f" [{duration(low_us)}, {duration(high_us)}]" if low_us else ""
    return f"{duration(described['time_us'])}{interval}"


def _how(described: Mapping[str, Any]) -> str:
    """Return how a time is known, its comparison with the default, and whether lookup returns it."""
    comparison = {
        "itself": ", default",
        "faster": ", faster than default",
        "not faster": ", not faster than default",
    }
    cache = ", warm caches" if described["cache"] == "warm" else ""
    served = ", returned by lookup" if described["served"] else ""
    return f"{described['kind']}{cache}{comparison.get(described['versus_default'], '')}{served}"


def _describe(entry: Record) -> dict[str, Any]:
    outcome = entry.result.outcome
    return {
        "device": entry.key.device,
        "variant": entry.key.variant,
        "config": str(entry.key.config),
        "kind": outcome.kind,
        "cache": getattr(outcome, "cache", None),
        "time_us": time_us(outcome),
        "metrics": dict(getattr(outcome, "metrics", {})),
        "low_us": getattr(outcome, "low_us", None),
        "high_us": getattr(outcome, "high_us", None),
        "purpose": entry.purpose,
        "bound_us": entry.bound_us,
        "violates_bound": entry.violates_bound,
        "versus_default": entry.verdict.versus_default,
        "comparison": dict(entry.verdict.comparison),
        "recorded_at": entry.recorded_at.isoformat(),
        "stale": entry.stale,
    }
