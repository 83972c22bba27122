"""Layernorm on the CPU: rows in parallel, statistics in passes over chunks that stay in the first cache.

`statistics=two_pass` sums a row for its mean, then squared deviations for its variance. `statistics=merged`
computes both of a chunk in one pass, relative to the mean of the elements before it, and merges them into
those of the row. Bias and residual are added in the same kernel. `tunebench.kernels.common.numba_norm` has
the code that rmsnorm shares.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tunebench.kernels.common.numba_norm import (
    CONSTRAINTS,
    PARAMETERS,
    NumbaCpuForwardNorm,
    Statistics,
    merged,
    two_pass,
)
from tunebench.space import Config, Parameter, Space
from tunebench.workloads.operators.layernorm import LayerNorm

SPACE = Space(
    (
        Parameter("statistics", ("two_pass", "merged"), "algorithm for mean and variance of a row"),
        *PARAMETERS,
    ),
    CONSTRAINTS,
)


class NumbaCpuLayerNorm(NumbaCpuForwardNorm[LayerNorm]):
    """Forward variant for every size, type and prologue."""

    operator = LayerNorm
    space = SPACE
    more: ClassVar[dict[str, Any]] = {"statistics": "merged"}

    def statistics(self, config: Config) -> Statistics:
        """Return the function that the parameter `statistics` names."""
        return merged if config["statistics"] == "merged" else two_pass


VARIANT = NumbaCpuLayerNorm()
