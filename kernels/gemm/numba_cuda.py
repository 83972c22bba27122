"""gemm in Numba-CUDA in the style of Numba's documentation: tiles in shared arrays, a few results per thread.

Threads of a block are laid out like c. A thread's tm x tn results are spread over the tile, bm / tm rows and
bn / tn columns apart, so that neighbouring threads access neighbouring elements. Each line of a tile has one
padding element, which avoids bank conflicts for transposed matrices.

Limits: f32 input and output (tf32 is multiplied in f32, more exactly than required).

Source: Numba documentation, "CUDA Python, Examples: matrix multiplication".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.kernels.common import gemm
from tunebench.kernels.common.numba_cuda_gemm import NumbaCudaTiledGemm, space_of
from tunebench.kernels.common.numba_expression import in_cuda
from tunebench.kernels.common.numba_prologue import ahead_in_cuda
from tunebench.kernels.common.prologue import operands
from tunebench.space import Config
from tunebench.workloads.common.prologue import vectors
from tunebench.workloads.operators.gemm import Gemm


class NumbaCudaGemm(NumbaCudaTiledGemm[Gemm]):
    """f32, of any size, transpose and epilogue."""

    name = "numba_cuda"
    operator = Gemm
    operation = gemm
    space = space_of(gemm)

    def arguments(self, workload: Gemm) -> tuple[str, ...]:
        """Return a, b, bias, residual, scale, shift and c."""
        return ("a", "b", *gemm.added(workload), *operands(workload), "c")

    def emulation_workload(self, workload: Gemm, config: Config) -> Gemm:
        """Return a workload of one or two tiles, not quite full: the simulator is slow."""
        small = super().emulation_workload(workload, config)
        few = 2 if config["bm"] * config["bn"] * config["bk"] <= 4096 else 1
        return dataclasses.replace(small, batch=min(workload.batch, few))

    def kernel(self, workload: Gemm, config: Config) -> Callable[..., None]:  # noqa: C901 - may call nothing
        """Return the kernel `(a, b, bias, residual, scale, shift, c)`."""
        from numba import cuda, float32

        BM, BN, BK, TM, TN = (config[name] for name in ("bm", "bn", "bk", "tm", "tn"))
        ROWS, COLUMNS = BM // TM, BN // TN  # of threads
        THREADS, GROUP_M = ROWS * COLUMNS, config["group_m"]
        A_SHAPE, B_SHAPE = (BM, BK + 1), (BK, BN + 1)
        a_transposed, b_transposed = workload.trans[0] == "t", workload.trans[1] == "t"
        has_bias, has_residual = workload.has_bias, workload.has_residual
        activates, activate = workload.activation != "none", in_cuda(workload.activation)
        has_ahead, ahead = workload.has_pre, ahead_in_cuda(workload)
        has_scale, has_shift = (name in vectors(workload.pre) for name in ("scale", "shift"))
        zero = np.float32(0)

        def multiply(  # noqa: C901 - likewise
            a: Any, b: Any, bias: Any, residual: Any, scale: Any, shift: Any, c: Any
        ) -> None:
            tile_a = cuda.shared.array(A_SHAPE, float32)
            tile_b = cuda.shared.array(B_SHAPE, float32)
            sums = cuda.local.array((TM, TN), float32)
            m, n = c.shape[1], c.shape[2]
            k = a.shape[1] if a_transposed else a.shape[2]

            # Concurrent blocks share rows of a and columns of b: see `tile_of_block` in gemm.cuh.
            tiles_m, tiles_n = (m + BM - 1) // BM, (n + BN - 1) // BN
            z, tile = cuda.blockIdx.x // (tiles_m * tiles_n), cuda.blockIdx.x % (tiles_m * tiles_n)
            first = tile // (GROUP_M * tiles_n) * GROUP_M
            height = min(GROUP_M, tiles_m - first)
            row0 = (first + tile % (GROUP_M * tiles_n) % height) * BM
            column0 = tile % (GROUP_M * tiles_n) // height * BN

            x, y = cuda.threadIdx.x, cuda.threadIdx.y
            for i in range(TM):
                for j in range(TN):
                    sums[i, j] = zero
            for k0 in range(0, k, BK):
                for index in range(y * COLUMNS + x, BM * BK, THREADS):
                    i, kk = (index % BM, index // BM) if a_transposed else (index // BK, index % BK)
                    value = zero
                    if row0 + i < m and k0 + kk < k:
                        value = a[z, k0 + kk, row0 + i] if a_transposed else a[z, row0 + i, k0 + kk]
                        if has_ahead:
                            factor, added = zero, zero
                            if has_scale:
                                factor = scale[k0 + kk]
                            if has_shift:
                                added = shift[k0 + kk]
                            value = ahead(value, factor, added)
                    tile_a[i, kk] = value
                for index in range(y * COLUMNS + x, BN * BK, THREADS):
                    j, kk = (index // BK, index % BK) if b_transposed else (index % BN, index // BN)
                    value = zero
                    if column0 + j < n and k0 + kk < k:
                        value = b[z, column0 + j, k0 + kk] if b_transposed else b[z, k0 + kk, column0 + j]
                    tile_b[kk, j] = value
                cuda.syncthreads()
                for kk in range(BK):
                    for i in range(TM):
                        for j in range(TN):
                            sums[i, j] += tile_a[y + i * ROWS, kk] * tile_b[kk, x + j * COLUMNS]
                cuda.syncthreads()

            for i in range(TM):
                for j in range(TN):
                    row, column = row0 + y + i * ROWS, column0 + x + j * COLUMNS
                    if row < m and column < n:
                        value = sums[i, j]
                        if has_bias:
                            value += bias[column]
                        if activates:
                            value = activate(value)
                        if has_residual:
                            value += residual[z, row, column]
                        c[z, row, column] = value

        return multiply


VARIANT = NumbaCudaGemm()
