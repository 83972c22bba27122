"""A linear or integer program that HiGHS minimises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tunebench._highs import silent_solver

__all__ = ["IntegerProgram", "Solution"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The result of a solve.

    Attributes:
        values: A value for each variable; none without a solution.
        bound: Lower bound of the objective; infinite if there is no solution.
        optimal: Whether the values are proven optimal, or proven not to exist.
    """

    values: list[float] | None
    bound: float
    optimal: bool


class IntegerProgram:
    """Variables between 0 and an upper limit, linear rows, and a cost to minimise."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._integer: list[bool] = []
        self._most: list[float] = []
        self._rows: list[Mapping[int, float]] = []

    def variable(
        self, *, lower: float = 0.0, upper: float = 1.0, cost: float = 0.0, integer: bool = False
    ) -> int:
        """Add a variable and return its number."""
        self._lower.append(lower)
        self._upper.append(upper)
        self._cost.append(cost)
        self._integer.append(integer)
        return len(self._lower) - 1

    def at_most(self, row: Mapping[int, float], upper: float) -> None:
        """Require that the sum of coefficients times variables is at most a number."""
        self._rows.append(row)
        self._most.append(upper)

    def solve(self, limit_s: float, *, relaxed: bool = False) -> Solution:
        """Minimise the cost.

        Args:
            limit_s: Time limit in seconds.
            relaxed: Whether integer variables may have fractional values.

        Raises:
            MissingDependency: HiGHS is not installed.
        """
        highs = silent_solver()
        import highspy

        highs.setOptionValue("parallel", "off")
        highs.setOptionValue("time_limit", limit_s)
        for option in ("mip_rel_gap", "mip_abs_gap"):
            highs.setOptionValue(option, 0.0)
        for option in ("mip_feasibility_tolerance", "primal_feasibility_tolerance"):
            highs.setOptionValue(option, 1e-9)
        count = len(self._lower)
        columns = np.arange(count, dtype=np.int32)
        highs.addVars(count, np.array(self._lower), np.array(self._upper))
        highs.changeColsCost(count, columns, np.array(self._cost))
        integers = np.flatnonzero(self._integer).astype(np.int32)
        if not relaxed:
            kinds = np.full(len(integers), highspy.HighsVarType.kInteger)
            highs.changeColsIntegrality(len(integers), integers, kinds)
        starts = np.cumsum([0, *map(len, self._rows)], dtype=np.int32)
        members = np.array([column for row in self._rows for column in row], dtype=np.int32)
        values = np.array([value for row in self._rows for value in row.values()], dtype=float)
        row_lower, row_upper = np.full(len(self._rows), -math.inf), np.array(self._most)
        highs.addRows(len(self._rows), row_lower, row_upper, len(members), starts[:-1], members, values)
        highs.run()
        return self._solution(highs, highspy, bool(len(integers)) and not relaxed)

    def _solution(self, highs: object, highspy: object, integer: bool) -> Solution:
        """Return what the solver found."""
        status, info = highs.getModelStatus(), highs.getInfo()  # type: ignore[attr-defined]
        statuses = highspy.HighsModelStatus  # type: ignore[attr-defined]
        if status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):
            return Solution(values=None, bound=math.inf, optimal=True)
        optimal = status == statuses.kOptimal
        bound = info.mip_dual_bound if integer else info.objective_function_value if optimal else 0.0
        feasible = info.primal_solution_status == highspy.kSolutionStatusFeasible  # type: ignore[attr-defined]
        values = list(highs.getSolution().col_value) if feasible else None  # type: ignore[attr-defined]
        return Solution(values=values, bound=bound if math.isfinite(bound) else 0.0, optimal=optimal)
