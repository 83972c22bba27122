"""The result of a lookup."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from tunebench._deprecation import warn_renamed
from tunebench._notebook import html_table
from tunebench.db.figures import BaselineComparison
from tunebench.space import Config

if TYPE_CHECKING:
    from tunebench.outcome import CacheState

__all__ = ["EXACT", "HERE", "Answer", "BaselineComparison", "How", "Unmeasured"]

How = Literal[
    "measured here", "imported", "same architecture", "neighbour", "other architecture", "predicted"
]
"""Source of an answer (see `tunebench.answer`)."""

HERE: tuple[How, ...] = ("measured here", "imported")
"""Answers that were measured for this workload on this device, by this database or the one of an import."""

EXACT: tuple[How, ...] = (*HERE, "same architecture")
"""Answers that were measured for this workload on this device, or on another device of its architecture."""


class Unmeasured(UserWarning):
    """The workload was not measured on this architecture: the answer is inferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Best known variant and configuration for a workload on a device.

    Attributes:
        workload: Canonical text of the workload.
        device: Key of the device that was measured or predicted.
        how: Source of the answer.
        because: Explanation of the source: what was measured where.
        variant: `Variant.key` of the implementation; `tunebench.kernels.variant` returns it.
        config: The configuration.
        expected_us: Measured median, or expected time, in microseconds.
        ci_us: 95 % confidence interval of the median; None unless this workload was measured.
        interval_us: 90 % prediction interval of a stored prediction; None otherwise.
        bound_us: Lower bound of all configurations of the search, in microseconds, as its report states it.
            Of records that do not state it, the bound of this configuration; None if unknown.
        cache: Cache state of the measurement; None for a prediction.
        verification: Method of verification; ``"not verified"`` is possible for a prediction.
        revision: Hash of the source of the record; of the current source for a prediction.
        recorded_at: Time of the record, UTC; None if there is no record.
        database: Database of the record: a path, or a URL without password; for a bundled record its index.
        baselines: Comparison with each baseline, such as ``"torch"``. For a neighbour on this device, the
            neighbour's comparison with wider intervals and no times; empty if no baseline was measured in its
            rounds.
        ties: Number of configurations that are as fast: within noise if measured, with the same time if
            predicted; None if unknown.
        warning: Why the current records could not be read: the database is locked, or its server does not
            answer. None if they could.
        metrics: Metrics of the record, if an objective was asked.
    """

    workload: str
    device: str
    how: How
    because: str
    variant: str
    config: Config
    expected_us: float
    ci_us: tuple[float, float] | None
    bound_us: float | None
    cache: CacheState | None
    verification: str
    revision: str
    recorded_at: datetime | None
    database: str
    interval_us: tuple[float, float] | None = None
    baselines: Mapping[str, BaselineComparison] = dataclasses.field(default_factory=dict)
    ties: int | None = None
    warning: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether this workload was measured, on this device or another one of its architecture."""
        return self.how in EXACT

    @property
    def libraries(self) -> Mapping[str, BaselineComparison]:
        """Deprecated name of `baselines`."""
        warn_renamed("Answer.libraries", "Answer.baselines")
        return self.baselines

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        from tunebench._figure import significant

        rows = (
            ("variant", self.variant),
            ("configuration", self.config),
            ("time", f"{significant(self.expected_us)} us ({self.how})"),
            ("lower bound", None if self.bound_us is None else f"{significant(self.bound_us)} us"),
            ("because", self.because),
        )
        return html_table(f"{self.workload} on {self.device}", rows)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        data = {name: getattr(self, name) for name in self.__slots__}
        baselines = {name: comparison.to_json() for name, comparison in self.baselines.items()}
        return {
            **data,
            "config": dict(self.config),
            "recorded_at": self.recorded_at.isoformat() if self.recorded_at is not None else None,
            "baselines": baselines,
            "libraries": baselines,  # deprecated name of baselines
        }
