"""What a lookup returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from tunebench._deprecation import warn_renamed
from tunebench.space import Config

if TYPE_CHECKING:
    from tunebench.outcome import CacheState

__all__ = ["EXACT", "Answer", "BaselineComparison", "How", "Unmeasured"]

How = Literal["measured here", "same architecture", "neighbour", "other architecture", "predicted"]
"""How an answer is known (see `tunebench.answer`)."""

EXACT: tuple[How, ...] = ("measured here", "same architecture")
"""What was timed for this very problem on this device, or on another one of its architecture."""


class Unmeasured(UserWarning):
    """An answer rests on other problems, other architectures, or a model: nobody timed this one here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """How the configuration stands to a library, by rounds in which both were timed.

    Attributes:
        ratio: The library's time over its own: above 1, it is faster than the library.
        low: Lower end of the 95 % interval.
        high: Upper end; None if it is not known.
    """

    ratio: float
    low: float
    high: float | None

    @property
    def faster(self) -> bool:
        """Whether it is faster than the library beyond noise."""
        return self.low > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best that is known for one problem on one device, and how it is known.

    Attributes:
        workload: Canonical text of the problem.
        device: Key of the device it was measured on or predicted for.
        how: How it is known.
        because: The same in words: what was measured where, and what was made of it.
        variant: `Variant.key` of the implementation; `tunebench.kernels.variant` finds it.
        config: Its configuration.
        expected_us: Median that was measured, or the time that is expected.
        ci_us: 95 % confidence interval of the median; None unless it was measured for this problem.
        interval_us: What nine of ten times lie between, of a prediction whose record tells; None otherwise.
        bound_us: The bound it was held against, if there was one.
        cache: Cache state it was timed in; None for a prediction.
        verification: How its result was proved right; a prediction may be ``"not verified"``.
        revision: Source it was compiled from, of the record that it rests on; today's for a prediction.
        recorded_at: When that record was made, UTC; None where there is none.
        database: Where the record stands: a path, or a URL without password; for one that comes with the
            package, the index that was made of it.
        baselines: How it stands to libraries, by name, such as ``"torch"``. Of a neighbour that was timed on
            this device, what was found there, with wider intervals; empty where they were not timed with it.
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

    @property
    def exact(self) -> bool:
        """Whether this very problem was timed, here or on a device of the same architecture."""
        return self.how in EXACT

    @property
    def libraries(self) -> Mapping[str, BaselineComparison]:
        """Old name of `baselines`."""
        warn_renamed("Answer.libraries", "Answer.baselines")
        return self.baselines

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        data = {name: getattr(self, name) for name in self.__slots__}
        baselines = {name: dataclasses.asdict(comparison) for name, comparison in self.baselines.items()}
        return {
            **data,
            "config": dict(self.config),
            "recorded_at": self.recorded_at.isoformat() if self.recorded_at is not None else None,
            "baselines": baselines,
            "libraries": baselines,  # old name, for this version
        }
