"""One measurement on the page of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebench._figure import significant
from tunebench.db.record import Record
from tunebench.objective import TIME, quantities_of
from tunebench.outcome import first_error
from tunebench.report.dashboard.chart import sample_chart

__all__ = ["described"]


def described(record: Record) -> dict[str, Any]:
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
            ("Metrics", {name: value for name, value in quantities_of(outcome).items() if name != TIME}),
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
    texts: dict[str, Any] = {}
    for name, value in comparison.items():
        if isinstance(value, Mapping) and "ratio" not in value:
            texts |= {f"{name}: {inner}": text for inner, text in _flat(value).items()}
        elif isinstance(value, Mapping):
            texts[name] = ", ".join(
                f"{part} {significant(number) if isinstance(number, float) else number}"
                for part, number in value.items()
            )
        else:
            texts[name] = value
    return texts
