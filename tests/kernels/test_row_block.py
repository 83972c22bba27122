"""Rows that are kept in registers do not spill."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.kernel_checks import compiled
from tests.support import needs_nvrtc
from tunebench import kernels
from tunebench.device import representative
from tunebench.workloads import parse


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_75", "sm_100"])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("softmax/cuda_block", "softmax:rows=8,cols={cols},dtype=f32,prologue=scale+mask"),
        ("softmax/cuda_block_backward", "softmax:rows=8,cols={cols},dtype=f32,log=true,direction=backward"),
        ("layernorm/cuda_block", "layernorm:rows=8,cols={cols},dtype=f16"),
    ],
)
def test_longest_rows_in_registers_do_not_spill(key: str, text: str, architecture: str) -> None:
    variant, device = kernels.variant(key), representative(architecture)
    vectors = set()
    for cols in (32768, 40960):
        workload = parse(text.format(cols=cols))
        table = variant.configs(workload, device)
        largest = (table["cache"] == "registers") & (table["row_threads"] == 1024)
        for row in np.flatnonzero(largest):
            config = table.config(row)
            vectors.add(config["vector"])
            compiled(variant, workload, device, config)
    assert len(vectors) >= 3
