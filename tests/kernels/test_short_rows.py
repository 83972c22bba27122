"""Rows of one, two and three elements: fewer than a group of threads or an access."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import needs_compiler
from tunebench import kernels
from tunebench.device import representative
from tunebench.emulate.emulator import emulate
from tunebench.measure.verify import InputSet, worst_error
from tunebench.variant import CudaVariant
from tunebench.workloads import parse


@needs_compiler
@pytest.mark.parametrize(
    "text",
    [
        "softmax:rows=35,cols=1,dtype=f32,log=true",
        "softmax:rows=35,cols=1,dtype=f32,direction=backward",
        "softmax:rows=35,cols=2,dtype=f16,log=true,direction=backward",
        "cross_entropy:rows=35,cols=1,dtype=f32",
        "cross_entropy:rows=72,cols=1,dtype=f16,direction=backward",
        "cross_entropy:rows=40,cols=3,dtype=f16,direction=backward",
    ],
)
def test_defaults_are_correct_for_short_rows(text: str) -> None:
    workload, device = parse(text), representative("sm_90")
    inputs = workload.draw(np.random.default_rng(1))
    references = InputSet(workload=workload, seed=1, inputs=inputs).references
    served = 0
    for variant in kernels.variants(workload):
        if isinstance(variant, CudaVariant) and variant.refuses(workload, device) is None:
            config = variant.default(workload, device)
            outputs = emulate(variant, workload, config, inputs, sanitize=True)
            assert worst_error(workload, outputs, references) <= 1, variant
            served += 1
    assert served
