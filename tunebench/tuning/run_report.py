"""The report of a run: its best as the database has it, the proof, and what made the times unreliable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from tunebench._figure import significant
from tunebench.db.figures import BaselineComparison, Figures
from tunebench.db.goal_record import goal_records
from tunebench.db.reader import MOST_ANSWERS
from tunebench.db.record import NewMeasurement, Record, figures_of
from tunebench.device import Device
from tunebench.kernels import variants
from tunebench.measure.baseline import Baseline
from tunebench.objective import quantities_of
from tunebench.outcome import Effort, Measured, Predicted, time_us
from tunebench.search.optimality_proof import OptimalityProof
from tunebench.space import Config
from tunebench.tuning.finalist import (
    DISAGREEMENT,
    TimedConfig,
    predicted_choices,
    predicted_ties,
    predicted_verdict,
)
from tunebench.tuning.proof import bound_ratio, bounded_spaces, optimality_proof_of
from tunebench.tuning.run_context import RunContext
from tunebench.tuning.workload_report import FrontPoint, Report, Served, Tie

__all__ = ["finish", "goal_front", "record_predictions", "search_figures", "stored_best"]

REFERENCE_DRIFT = 1.5
"""Ratio of the reference kernel's times in different rounds above which the report mentions it."""

INTERRUPTED = 0.1
"""Share of interrupted runs above which the report mentions them."""


def record_predictions(context: RunContext) -> None:
    """Record the choice of each variant as its finalist, so that all readers of the records take the same.

    The choice is what a lookup names without records, if it is verified. The best of all variants is
    recorded first: a lookup returns the earlier record of equal ones. Nothing is recorded if the records
    already say so.
    """
    timed = context.state.timed
    if not timed:
        return
    defaults = {candidate.search.key: candidate for candidate in timed if candidate.is_default}
    preferred = {
        key: tunable.unmeasured()
        for key, tunable in context.variants.items()
        if not tunable.variant.is_predicted_by_code  # what was tried has better predictions than the table
    }
    choices = predicted_choices(timed, preferred)
    verdicts = [
        predicted_verdict(
            choice,
            defaults.get(choice.search.key),
            search_figures(context),
            predicted_ties(choice, timed),
        )
        for choice in choices
    ]
    by_variant = {answer.key.variant: answer for answer in _answers_of_search(context)}
    stored = [by_variant.get(choice.search.key) for choice in choices]
    if all(
        answer is not None
        and (answer.purpose, answer.key.config, answer.verdict) == ("finalist", choice.config, verdict)
        for answer, choice, verdict in zip(stored, choices, verdicts, strict=True)
    ):
        return
    records = {
        (record.key.variant, record.key.config): record
        for record in context.setup.store.history(str(context.workload), context.setup.target.device.key)
        if isinstance(record.result.outcome, Predicted) and not record.stale
    }
    context.recorder.record(
        *(
            NewMeasurement(
                key=context.recorder.key(choice.search.key, choice.config),
                result=dataclasses.replace(records[choice.search.key, choice.config].result, effort=Effort()),
                purpose="finalist",
                bound_us=choice.bound_us,
                verdict=verdict,
            )
            for choice, verdict in zip(choices, verdicts, strict=True)
        )
    )


def search_figures(context: RunContext) -> Figures:
    """Return the figures of the search that each of its records stores."""
    is_known = context.bound_us > 0 and context.gap_is_meaningful and not context.audit.violations
    return Figures(
        bound_us=context.bound_us if is_known else None,
        searched=tuple(sorted(context.variants)),
    )


def stored_best(context: RunContext) -> Record | None:
    """Return the record that a lookup would return now, among those that this run could find again."""
    return next(_answers_of_search(context), None)


def goal_front(context: RunContext) -> list[Record]:
    """Return the best of the objectives, or their Pareto front, among what this run could find again.

    It is empty if the plan has neither objectives nor requirements.
    """
    if not context.goal.is_asked:
        return []
    setup = context.setup
    history = setup.store.history(str(context.workload), setup.target.device.key)
    return goal_records(_found_again(context, history), context.goal)


def _answers_of_search(context: RunContext) -> Iterator[Record]:
    """Yield the records that a lookup may return, best first, which this run could find again."""
    setup = context.setup
    entries = setup.store.best(str(context.workload), setup.target.device.key, limit=MOST_ANSWERS)
    return _found_again(context, entries)


def _found_again(context: RunContext, entries: Iterable[Record]) -> Iterator[Record]:
    """Yield the records that this run could find again; failures of the same configurations stay, too."""
    setup = context.setup
    for entry in entries:
        tunable, outcome = context.variants.get(entry.key.variant), entry.result.outcome
        if tunable is None or tunable.table.row(entry.key.config) is None:
            continue
        current = context.revision(entry.key.variant, entry.key.config) == entry.key.revision
        same_cache = getattr(outcome, "cache", setup.plan.protocol.cache) == setup.plan.protocol.cache
        other_kind = Measured if setup.predicts else Predicted
        if current and same_cache and not isinstance(outcome, other_kind):
            yield entry


def finish(context: RunContext) -> Report:
    """Close the run in the database, unless it was stopped early, and return its report.

    The best, its time and its comparisons are those of the database (`tunebench.db.figures`), so that a
    lookup and every page name the same ones.
    """
    setup, state, finals = context.setup, context.state, context.state.finals
    seconds = context.recorder.seconds(state.busy_s)
    masked = sum(search.masked for search in context.searches)
    unlikely = [search.unlikely(context.best_us) for search in context.searches]
    if setup.predicts and not state.interrupted:
        record_predictions(context)
    if not state.interrupted and not state.cut_short:
        context.recorder.finish(masked, state.cached, seconds)
    else:
        context.recorder.leave()
    front = goal_front(context)
    best = next(iter(front), None) if context.goal.is_asked else stored_best(context)
    outcome = best.result.outcome if best is not None else None
    median_us = time_us(outcome) if outcome is not None else None
    records = setup.store.history(str(context.workload), setup.target.device.key)
    figures = figures_of(best, records) if best is not None else Figures()
    cache = setup.plan.protocol.cache
    proof = optimality_proof_of(
        records,
        bounded_spaces(context.workload, context.variants.values(), cache),
        np.inf if median_us is None else median_us,
        cache,
    )
    is_default = best is not None and best.verdict.versus_default == "itself"
    default = figures.default
    timed = _timed(context, best)
    return Report(
        workload=str(context.workload),
        device=setup.target.device.key,
        how=("predicted" if setup.predicts else "measured") if best is not None else None,
        variant=best.key.variant if best is not None else None,
        config=best.key.config if best is not None else None,
        median_us=median_us,
        ci_us=getattr(outcome, "ci_us", None),
        interval_us=getattr(outcome, "interval_us", None),
        is_default=is_default,
        default_us=median_us if is_default else (default.time_us if default is not None else None),
        default_failure=_default_failure(context, timed) if not is_default and default is None else None,
        noise=tuple(_noise(context, timed)),
        baselines=tuple(_baselines(figures, finals.baselines.baselines() if finals else ())),
        bound_us=0.0 if context.audit.violations else min(context.bound_us, median_us or np.inf),
        gap=_gap(context, proof, figures.bound_us),
        # A prediction proves nothing, and a lower bound on the time nothing about other objectives.
        optimality_proof=None if setup.predicts or not context.goal.is_time else proof,
        assumed=setup.target.device.assumed,
        measured_rates=_measured_rates(setup.target.device),
        outside=tuple(sorted({v.key for v in variants(context.workload)} - context.variants.keys())),
        versus=_versus(figures),
        ties=tuple(
            Tie(variant=tied.variant, config=Config(tied.config), median_us=tied.time_us)
            for tied in figures.ties
        ),
        tie_count=figures.tie_count or 0,
        violations=context.audit.violations,
        audited=context.budget.audited,
        trials=dict(state.outcomes),
        masked=masked,
        cached=state.cached,
        seconds=seconds,
        finals_s=state.finals_s,
        database=str(setup.store.location),
        interrupted=state.interrupted,
        skipped={**context.skipped, **(finals.baselines.failures if finals else {})},
        warm=context.sources,
        unlikely=sum(postponed.count for postponed in unlikely),
        unlikely_winners=sum(postponed.winners for postponed in unlikely),
        pool=state.pool,
        stopped=state.stopped,
        versus_baselines=figures.baselines,
        failures=tuple(sorted(state.failures.values(), key=lambda failure: -failure.count)),
        unresumed=context.recorder.unresumed,
        is_earlier=best is not None and best.run_id != context.recorder.run_id,
        served=_served(context, best) if context.goal.is_time else None,
        metrics=dict(quantities_of(outcome)) if outcome is not None else {},
        objectives=tuple(map(str, context.goal.objectives)),
        require=tuple(map(str, context.goal.requirements)),
        front=tuple(_front_point(context, record) for record in front),
    )


def _front_point(context: RunContext, record: Record) -> FrontPoint:
    outcome = record.result.outcome
    values = context.goal.values(outcome)
    us = time_us(outcome)
    assert values is not None, record
    assert us is not None, record
    return FrontPoint(
        variant=record.key.variant,
        config=record.key.config,
        time_us=us,
        values=dict(zip((objective.name for objective in context.goal.chosen), values, strict=True)),
        is_default=record.verdict.versus_default == "itself",
    )


def _gap(context: RunContext, proof: OptimalityProof, bound_us: float | None) -> float | None:
    """Return the optimality gap: that of the proof, or of the lower bound at measured rates.

    There is none if the rates of the device are assumed.

    Args:
        context: The run.
        proof: The proof of the best.
        bound_us: Lower bound that the record of the best states, in microseconds; None without one.
    """
    if not context.setup.target.device.assumed:
        return proof.gap
    return bound_ratio(proof.best_us, bound_us) if bound_us else None


def _measured_rates(device: Device) -> str | None:
    """Return the measured rates that gaps rest on, as text; None if they rest on those of the device."""
    if not device.assumed or device.measured_gb_s is None or device.measured_gflop_s is None:
        return None
    return f"{significant(device.measured_gb_s, 3)} GB/s, {significant(device.measured_gflop_s, 3)} GFLOP/s"


def _timed(context: RunContext, best: Record | None) -> TimedConfig | None:
    """Return the best among the configurations of this run; None if another process found it."""
    if best is None:
        return None
    best_key = (best.key.variant, best.key.config)
    return next(
        (timed for timed in context.state.timed if (timed.search.key, timed.config) == best_key), None
    )


def _baselines(figures: Figures, timed: Iterable[Baseline]) -> Iterator[Baseline]:
    """Yield the baselines of the best, with samples if they were timed by this run."""
    samples_us = {(baseline.name, baseline.median_us): baseline.samples_us for baseline in timed}
    for name, versus in figures.baselines.items():
        us = versus.time_us
        assert us is not None, name
        yield Baseline(
            name=name,
            median_us=us,
            ci_us=versus.ci_us or (us, us),  # earlier versions did not store it
            samples_us=samples_us.get((name, us), ()),
        )


def _versus(figures: Figures) -> dict[str, BaselineComparison]:
    """Return the comparisons with a confidence interval, by rival."""
    fastest = figures.fastest_baseline
    rivals = {"default": figures.default, "runner_up": figures.runner_up}
    rivals["baseline"] = fastest[1] if fastest is not None else None
    return {name: versus for name, versus in rivals.items() if versus is not None and versus.is_known}


def _served(context: RunContext, best: Record | None) -> Served | None:
    """Return the answer of a lookup if it differs from the best of this search; else None."""
    setup = context.setup
    loaded = {variant.key for variant in variants(context.workload)}
    answers = setup.store.best(str(context.workload), setup.target.device.key, limit=MOST_ANSWERS)
    served = next((answer for answer in answers if not answer.stale and answer.key.variant in loaded), None)
    if served is None or best is None or served.id == best.id:
        return None
    us = time_us(served.result.outcome)
    assert us is not None, served
    kind, cache = served.result.outcome.kind, getattr(served.result.outcome, "cache", None)
    return Served(variant=served.key.variant, config=served.key.config, time_us=us, how=kind, cache=cache)


def _default_failure(context: RunContext, best: TimedConfig | None) -> str | None:
    """Return why the default of the best's variant has no time; None if it did not fail."""
    if best is None:
        return None
    defaults = [timed for timed in context.state.timed if timed.is_default and timed.search is best.search]
    in_finals = next((timed.failure for timed in defaults if timed.failed), None)
    return in_finals or context.state.failed_defaults.get(best.search.key)


def _noise(context: RunContext, best: TimedConfig | None) -> Iterator[str]:
    """Yield the reasons why the times of the finalist rounds are unreliable."""
    finals = context.state.finals.finalists if context.state.finals else []
    busy = max(best.conditions("busy_elsewhere"), default=None) if best is not None else None
    if busy is not None:  # as its record says it to a lookup
        yield f"other programs used {100 * busy:.0f} % of the processor while the best was timed"
    interrupted = max((share for timed in finals for share in timed.conditions("interrupted")), default=0.0)
    if interrupted > INTERRUPTED:
        had = min(share for timed in finals for share in timed.conditions("processor_share"))
        yield (
            f"{100 * interrupted:.0f} % of their runs waited for a free core, up to {100 * (1 - had):.0f} % "
            "of the time; this waiting is left out of the times"
        )
    reference_us = [us for timed in finals for us in timed.conditions("reference_us")]
    if reference_us and max(reference_us) > REFERENCE_DRIFT * min(reference_us):
        drift = max(reference_us) / min(reference_us)
        yield f"a reference kernel took up to {drift:.1f} times as long in one round as in another"
    if best is not None and best.disagreement > DISAGREEMENT:
        yield (
            f"the best took {significant(best.search_us)} us in the search, and "
            f"{significant(best.median()[0])} us in the finals, which were repeated"
        )
