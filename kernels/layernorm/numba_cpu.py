"""layernorm on the CPU: rows in parallel, statistics in passes over chunks that stay in the first cache.

`statistics=two_pass` sums a whole row for its mean, then squares of deviations for its variance.
`statistics=merged` takes both of a chunk in one pass, about the mean of what came before it, and merges them
into those of the row. Bias and residual are added on the way. Rows are as in `tunebench.kernels.common.numba_norm`,
which rmsnorm shares.

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
        Parameter("statistics", ("two_pass", "merged"), "how mean and variance of a row are found"),
        *PARAMETERS,
    ),
    CONSTRAINTS,
)


class NumbaCpuLayerNorm(NumbaCpuForwardNorm[LayerNorm]):
    """Serves every size, type and prologue, forward."""

    operator = LayerNorm
    space = SPACE
    more: ClassVar[dict[str, Any]] = {"statistics": "merged"}

    def statistics(self, config: Config) -> Statistics:
        """Return what `statistics` names."""
        return merged if config["statistics"] == "merged" else two_pass


VARIANT = NumbaCpuLayerNorm()
