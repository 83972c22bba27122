"""Rows of one, two and three elements: fewer than a group of threads or an access."""

from __future__ import annotations

import pytest

from tests.kernels.kernel_checks import H100, assert_emulates_right
from tests.support import needs_compiler
from tunebench import kernels
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
    workload = parse(text)
    served = 0
    for variant in kernels.variants(workload):
        if isinstance(variant, CudaVariant) and variant.refuses(workload, H100) is None:
            config = variant.default(workload, H100)
            assert_emulates_right(variant, workload, config, sanitize=True)
            served += 1
    assert served
