"""Text of kernels to emulate, and variants with an injected fault."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunebench.kernels import include
from tunebench.space import Config
from tunebench.variant import CudaVariant
from tunebench.workload import Workload

HELPERS = "".join(include(f"{name}.cuh") for name in ("types", "ptx", "reduce", "epilogue"))
SIGNATURE = (
    "__global__ void toy(const float* x, float* y, float factor, int n) {\n  const int t = threadIdx.x;\n"
)
X = np.arange(1, 65, dtype=np.float32)


class Faulty:
    """A variant with an injected fault: one text of its source is replaced."""

    def __init__(self, variant: CudaVariant[Any], right: str, wrong: str) -> None:
        self._variant, self._right, self._wrong = variant, right, wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self._variant, name)

    def source(self, workload: Workload, config: Config) -> str:
        text = self._variant.source(workload, config)
        assert self._right in text
        return text.replace(self._right, self._wrong)
