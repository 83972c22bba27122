"""Metrics of measurements, and the goal of a search: objectives, and requirements of its best.

    quantity      a number of a measurement: `time_us`, a size, a parameter, an observed value (`energy_j`)
    metric        a quantity with a name that is computed of others: ``GFLOP/s=flops/time_us/1e3``
    objective     a quantity or expression to minimise or to maximise: ``energy_j``, ``GFLOP/s:max``
    requirement   what every configuration in question must satisfy: ``error<=1e-3``

Metrics that were observed or computed are stored with a measurement (`Measured.metrics`), so that objectives
can be asked of records as well.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tunebench import expression
from tunebench._lazy import np
from tunebench.errors import InputError, UnknownName, quoted
from tunebench.outcome import Measured, Outcome, Predicted, Resources, Verification, time_us
from tunebench.workload import Workload
from tunebench.workloads.common.expression_value import evaluate

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ERRORS",
    "FUNCTION",
    "TIME",
    "TIME_ONLY",
    "Goal",
    "Metric",
    "MetricSource",
    "Objective",
    "Requirement",
    "is_dominated",
    "quantities_of",
    "resource_quantities",
    "workload_quantities",
]

TIME = "time_us"
"""The quantity that is minimised if no objective is given."""

ERRORS: Mapping[str, str] = {
    "error": "relative",
    "absolute_error": "absolute",
    "tolerance_share": "worst",
}
"""Quantities of the error against the reference, with the fields of `Verification`."""

MetricSource = str | Callable[..., float]
"""Computes a metric: an expression, or a function whose arguments are named as quantities."""

FUNCTION = "<function "
"""Start of the text that replaces a function in the options of a run."""

MAX_NAME = 100
"""Largest length of the name of a metric."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that is computed of other quantities.

    Attributes:
        name: Its name, any printable text.
        source: Expression of `tunebench.expression`, or function whose arguments are named as quantities.

    Raises:
        InputError: The name is invalid, or the expression or function cannot be used.
        UnknownName: The expression calls an unknown function.
    """

    name: str
    source: MetricSource

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME or not self.name.isprintable() or "=" in self.name:
            raise InputError(
                f"the name of a metric has 1 to {MAX_NAME} printable characters without =; got "
                f"{quoted(self.name)}"
            )
        if not callable(self.source) and not isinstance(self.source, str):
            raise InputError(f"metric {self.name} must be an expression or a function; got {self.source!r}")
        _ = self.arguments

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the quantities that it is computed of."""
        if isinstance(self.source, str):
            return expression.names(expression.parse(self.source))
        parameters = inspect.signature(self.source).parameters.values()
        if any(parameter.kind in _UNNAMED for parameter in parameters):
            raise InputError(f"metric {self.name}: the arguments of its function must be named as quantities")
        return tuple(parameter.name for parameter in parameters if parameter.default is parameter.empty)

    def value(self, quantities: Mapping[str, float]) -> float | None:
        """Return its value; None if a quantity is unknown, or the value is not finite.

        Args:
            quantities: Quantities by name.

        Raises:
            InputError: The function fails.
        """
        if any(name not in quantities for name in self.arguments):
            return None
        chosen = {name: quantities[name] for name in self.arguments}
        if isinstance(self.source, str):
            arrays = {name: np.asarray(value, np.float64) for name, value in chosen.items()}
            value = float(evaluate(expression.parse(self.source), arrays)[0])
        else:
            try:
                value = float(self.source(**chosen))
            except Exception as error:
                raise InputError(f"metric {self.name} raised {type(error).__name__}: {error}") from error
        return value if math.isfinite(value) else None

    def text(self) -> str:
        """Return the expression, or for a function a text that changes with its code."""
        if isinstance(self.source, str):
            return self.source
        code = getattr(self.source, "__code__", None)
        marks = (code.co_code, code.co_consts, code.co_names) if code is not None else (self.source,)
        digest = hashlib.sha256(repr(marks).encode()).hexdigest()[:12]
        return f"{FUNCTION}{getattr(self.source, '__qualname__', 'function')} {digest}>"


_UNNAMED = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
)
_DIRECTIONS = {"min": False, "max": True}
_COMPARISON = re.compile(r"(.+?)(<=|>=|<|>)(.+)")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A quantity, or an expression of quantities, to minimise or to maximise.

    Attributes:
        name: The quantity, the metric or the expression.
        maximize: Whether greater is better.
    """

    name: str
    maximize: bool = False

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Return the objective of a text such as ``energy_j`` or ``GFLOP/s:max``.

        Raises:
            InputError: The text is empty, or its direction is neither ``min`` nor ``max``.
        """
        name, colon, direction = text.strip().rpartition(":")
        if not colon:
            name, direction = direction, "min"
        if direction not in _DIRECTIONS or not name.strip():
            raise InputError(f"an objective is NAME, NAME:min or NAME:max; got {quoted(text)}")
        return cls(name=name.strip(), maximize=_DIRECTIONS[direction])

    def __str__(self) -> str:
        return f"{self.name}{':max' if self.maximize else ''}"

    @property
    def is_time(self) -> bool:
        """Whether it is the time, to minimise."""
        return self.name == TIME and not self.maximize


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A comparison of a quantity with a number, such as ``error<=1e-3``.

    Attributes:
        name: The quantity, the metric or the expression.
        comparison: ``<=``, ``>=``, ``<`` or ``>``.
        limit: The number.
    """

    name: str
    comparison: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """Return the requirement of a text.

        Raises:
            InputError: The text has another form.
        """
        match = _COMPARISON.fullmatch(text.strip())
        limit = _number(match[3]) if match is not None else None
        if match is None or limit is None:
            raise InputError(
                f"a requirement compares a metric with a number, such as error<=1e-3; got {quoted(text)}"
            )
        return cls(name=match[1].strip(), comparison=match[2], limit=limit)

    def __str__(self) -> str:
        return f"{self.name}{self.comparison}{self.limit!r}"

    def holds(self, value: float | None) -> bool:
        """Return whether a value satisfies it; an unknown one does not."""
        return value is not None and _COMPARE[self.comparison](value, self.limit)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a search optimises, and the metrics it computes.

    Attributes:
        metrics: Metrics, computed in this order of quantities and of those before.
        objectives: The objectives; several have a Pareto front. Empty minimises the time.
        requirements: What a configuration must satisfy to be the best, or part of the front.

    Raises:
        InputError: Two objectives or metrics have one name, or a metric is named as a quantity.
    """

    metrics: tuple[Metric, ...] = ()
    objectives: tuple[Objective, ...] = ()
    requirements: tuple[Requirement, ...] = ()

    def __post_init__(self) -> None:
        for kind, names in (
            ("objective", [objective.name for objective in self.objectives]),
            ("metric", [metric.name for metric in self.metrics]),
        ):
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise InputError(f"{kind} {quoted(repeated)} is given twice")
        for metric in self.metrics:
            if metric.name in (TIME, *ERRORS):
                raise InputError(f"{metric.name} is measured: give the metric another name")
        for computed in self._computed:
            _ = computed.arguments  # an expression that cannot be parsed is refused now

    @classmethod
    def parse(
        cls,
        *,
        metrics: Mapping[str, MetricSource] | None = None,
        objectives: Sequence[str] = (),
        require: Sequence[str] = (),
    ) -> Goal:
        """Return a goal from texts.

        Args:
            metrics: Metrics by name.
            objectives: Such as ``energy_j`` or ``GFLOP/s:max``.
            require: Such as ``error<=1e-3``.

        Raises:
            InputError: A text is invalid; the message names it.
            UnknownName: An expression calls an unknown function.
        """
        return cls(
            metrics=tuple(Metric(name, source) for name, source in (metrics or {}).items()),
            objectives=tuple(map(Objective.parse, objectives)),
            requirements=tuple(map(Requirement.parse, require)),
        )

    @property
    def is_time(self) -> bool:
        """Whether the time alone is minimised, so that lower bounds on the time prune."""
        return all(objective.is_time for objective in self.objectives)

    @property
    def is_asked(self) -> bool:
        """Whether it names objectives or requirements, so that it decides which configuration is the best."""
        return bool(self.objectives or self.requirements)

    @property
    def chosen(self) -> tuple[Objective, ...]:
        """The objectives; the time if none is given."""
        return self.objectives or (Objective(name=TIME),)

    @property
    def directions(self) -> tuple[Literal["minimize", "maximize"], ...]:
        """Direction of each objective, as Optuna names it."""
        return tuple("maximize" if objective.maximize else "minimize" for objective in self.chosen)

    @property
    def _asked(self) -> tuple[str, ...]:
        """Names of the objectives and of what is required, each once."""
        names = [objective.name for objective in self.objectives]
        names += [requirement.name for requirement in self.requirements]
        return tuple(dict.fromkeys(names))

    @property
    def _computed(self) -> tuple[Metric, ...]:
        """The metrics, and every objective and requirement that is no quantity of an outcome by itself."""
        taken = {TIME, *ERRORS, *(metric.name for metric in self.metrics)}
        return (*self.metrics, *(Metric(name, name) for name in self._asked if name not in taken))

    def check(self, names: Sequence[str]) -> None:
        """Check that every metric, objective and requirement uses known quantities.

        Args:
            names: The known quantities.

        Raises:
            UnknownName: One uses another name.
        """
        known = {TIME, *ERRORS, *names}
        for metric in self._computed:
            if metric.name not in known:
                for name in metric.arguments:
                    if name not in known:
                        raise UnknownName("quantity of a metric", name, sorted(known))
            known.add(metric.name)

    def completed(self, outcome: Outcome, quantities: Mapping[str, float]) -> Outcome:
        """Return a success with all metrics of this goal; other outcomes are returned as they are.

        Args:
            outcome: The outcome, with its observed metrics.
            quantities: Sizes, parameters and resources by name.

        Raises:
            InputError: The function of a metric fails.
        """
        computed = self._computed
        if not computed or not isinstance(outcome, Measured | Predicted):
            return outcome
        known = {**quantities, **quantities_of(outcome)}
        metrics = dict(outcome.metrics)
        for metric in computed:
            value = metric.value(known)
            if value is None:  # a recorded metric may have any name
                value = known.get(metric.name)
            if value is not None:
                known[metric.name] = metrics[metric.name] = value
        return dataclasses.replace(outcome, metrics=metrics)

    def allows(self, outcome: Outcome) -> bool:
        """Return whether a completed outcome satisfies every requirement."""
        known = quantities_of(outcome)
        return all(requirement.holds(known.get(requirement.name)) for requirement in self.requirements)

    def lacks(self, outcome: Outcome) -> bool:
        """Return whether a completed outcome lacks an objective or a metric that is required."""
        known = quantities_of(outcome)
        return any(name not in known for name in self._asked)

    def values(self, outcome: Outcome) -> tuple[float, ...] | None:
        """Return the value of each objective of a completed outcome.

        None if it has no time, lacks an objective, or does not satisfy the requirements.
        """
        if time_us(outcome) is None or not self.allows(outcome):
            return None
        known = quantities_of(outcome)
        values = [known.get(objective.name) for objective in self.chosen]
        finite = tuple(value for value in values if value is not None and math.isfinite(value))
        return finite if len(finite) == len(values) else None

    def costs(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the values of the objectives so that less is better."""
        pairs = zip(self.chosen, values, strict=True)
        return tuple(-value if objective.maximize else value for objective, value in pairs)

    def front(self, outcomes: Sequence[Outcome]) -> list[int]:
        """Return the indices of the outcomes that no other one dominates, best of the first objective first.

        With one objective, it is the best alone.

        Args:
            outcomes: Completed outcomes.
        """
        costs = {
            index: self.costs(values)
            for index, outcome in enumerate(outcomes)
            if (values := self.values(outcome)) is not None
        }
        if not costs:
            return []
        dominated = is_dominated(np.array(list(costs.values())))
        front = [index for index, worse in zip(costs, dominated, strict=True) if not worse]
        front.sort(key=costs.__getitem__)
        return front[:1] if len(self.chosen) == 1 else front

    def stored(self) -> dict[str, Any]:
        """Return the goal as plain data, for the options of a run; a function is named by its code."""
        return {
            "metrics": {metric.name: metric.text() for metric in self.metrics},
            "objectives": list(map(str, self.objectives)),
            "require": list(map(str, self.requirements)),
        }


TIME_ONLY = Goal()
"""The goal without objectives: the least time."""


def is_dominated(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which points another point dominates: nowhere worse, and better or earlier somewhere.

    Of equal points the first is not dominated.

    Args:
        costs: Costs of each point, `(n, objectives)`, to minimise.
    """
    order = np.lexsort((np.arange(len(costs)), *costs.T[::-1]))
    dominated = np.zeros(len(costs), bool)
    front: list[int] = []
    for index in order:  # a point can only be dominated by one that comes before it in this order
        better = costs[front] <= costs[index]
        dominated[index] = bool(better.all(axis=1).any()) if front else False
        if not dominated[index]:
            front.append(int(index))
    return dominated


# -- quantities --------------------------------------------------------------------------------------------


def quantities_of(outcome: Outcome) -> dict[str, float]:
    """Return the quantities that an outcome has by itself: its metrics, time and errors."""
    if not isinstance(outcome, Measured | Predicted):
        return {}
    us = time_us(outcome)
    assert us is not None, outcome
    return {**outcome.metrics, TIME: us, **_errors(outcome.verification)}


def _errors(verification: Verification) -> dict[str, float]:
    fields = ((name, getattr(verification, field)) for name, field in ERRORS.items())
    return {name: value for name, value in fields if value is not None}


@functools.lru_cache(maxsize=256)
def _workload_quantities(workload: Workload) -> tuple[tuple[str, float], ...]:
    return tuple(_numbers_of(workload))


def _numbers_of(workload: Workload) -> Iterator[tuple[str, float]]:
    yield "flops", float(workload.flops())
    yield "bytes", float(workload.traffic().total_bytes)
    for field in dataclasses.fields(workload):
        value = getattr(workload, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield field.name, float(value)


def workload_quantities(workload: Workload) -> dict[str, float]:
    """Return the sizes of a workload by name, its `flops`, and the `bytes` that any kernel must move."""
    return dict(_workload_quantities(workload))


def resource_quantities(config: Mapping[str, Any], resources: Resources) -> dict[str, float]:
    """Return the numbers among the parameters of a configuration, and the resources of its binary.

    Args:
        config: The configuration.
        resources: Resources of its binary; unknown ones are left out.
    """
    numbers = {name: value for name, value in config.items() if isinstance(value, int | float)}
    used = {name: value for name, value in dataclasses.asdict(resources).items() if value is not None}
    return {name: float(value) for name, value in {**used, **numbers}.items()}
