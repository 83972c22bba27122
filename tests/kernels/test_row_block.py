"""Rows that are kept in registers do not spill."""

from __future__ import annotations

import numpy as np
import pytest

from tunebench import kernels
from tunebench.compile import unavailable
from tunebench.device import representative
from tunebench.variant import CudaVariant
from tunebench.workloads import parse


@pytest.mark.skipif(bool(unavailable("cuda")), reason=str(unavailable("cuda")))
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
    from tunebench.compile.nvrtc import compile_cuda

    variant, device = kernels.variant(key), representative(architecture)
    assert isinstance(variant, CudaVariant)
    vectors = set()
    for cols in (32768, 40960):
        workload = parse(text.format(cols=cols))
        table = variant.configs(workload, device)
        largest = (table["cache"] == "registers") & (table["row_threads"] == 1024)
        for row in np.flatnonzero(largest):
            config = table.config(row)
            vectors.add(config["vector"])
            assert compile_cuda(variant, workload, config, device).resources.spill_bytes == 0, config
    assert len(vectors) >= 3
