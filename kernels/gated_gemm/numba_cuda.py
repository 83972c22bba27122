"""gated_gemm in Numba-CUDA in the style of Numba's documentation: gemm's kernel with two matrices b.

Threads of a block are laid out like c, and a thread's tm x tn results are spread over the tile, as in gemm's
numba_cuda. A thread reads each value of a from shared memory once for both products.

Limits: f32 input and output (tf32 is multiplied in f32, more exactly than required).

Source: Numba documentation, "CUDA Python, Examples: matrix multiplication"; Shazeer, "GLU Variants Improve
Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.kernels.common.numba_cuda_gemm import NumbaCudaTiledGemm, space_of
from tunebench.kernels.common.numba_expression import in_cuda
from tunebench.kernels.gated_gemm import _gated
from tunebench.space import Config
from tunebench.workloads.operators.gated_gemm import GatedGemm


class NumbaCudaGatedGemm(NumbaCudaTiledGemm[GatedGemm]):
    """f32, of any size, layout and activation."""

    name = "numba_cuda"
    operator = GatedGemm
    operation = _gated
    space = space_of(_gated)

    def arguments(self, workload: GatedGemm) -> tuple[str, ...]:
        """Return a, b_gate, b_up and c."""
        return ("a", "b_gate", "b_up", "c")

    def kernel(self, workload: GatedGemm, config: Config) -> Callable[..., None]:  # noqa: C901 - may call nothing
        """Return the kernel `(a, b_gate, b_up, c)`."""
        from numba import cuda, float32

        BM, BN, BK, TM, TN = (config[name] for name in ("bm", "bn", "bk", "tm", "tn"))
        ROWS, COLUMNS = BM // TM, BN // TN  # of threads
        THREADS, GROUP_M = ROWS * COLUMNS, config["group_m"]
        A_SHAPE, B_SHAPE = (BM, BK + 1), (BK, BN + 1)
        transposed = workload.trans == "nt"
        activate, zero = in_cuda(workload.activation), np.float32(0)

        def multiply(a: Any, b_gate: Any, b_up: Any, c: Any) -> None:  # noqa: C901 - likewise
            tile_a = cuda.shared.array(A_SHAPE, float32)
            tile_gate = cuda.shared.array(B_SHAPE, float32)
            tile_up = cuda.shared.array(B_SHAPE, float32)
            gates = cuda.local.array((TM, TN), float32)
            ups = cuda.local.array((TM, TN), float32)
            m, n, k = c.shape[0], c.shape[1], a.shape[1]

            # Concurrent blocks share rows of a and columns of b: see `tile_of_block` in gemm.cuh.
            tiles_m, tiles_n = (m + BM - 1) // BM, (n + BN - 1) // BN
            tile = cuda.blockIdx.x
            first = tile // (GROUP_M * tiles_n) * GROUP_M
            height = min(GROUP_M, tiles_m - first)
            row0 = (first + tile % (GROUP_M * tiles_n) % height) * BM
            column0 = tile % (GROUP_M * tiles_n) // height * BN

            x, y = cuda.threadIdx.x, cuda.threadIdx.y
            for i in range(TM):
                for j in range(TN):
                    gates[i, j] = zero
                    ups[i, j] = zero
            for k0 in range(0, k, BK):
                for index in range(y * COLUMNS + x, BM * BK, THREADS):
                    i, kk = index // BK, index % BK
                    value = zero
                    if row0 + i < m and k0 + kk < k:
                        value = a[row0 + i, k0 + kk]
                    tile_a[i, kk] = value
                for index in range(y * COLUMNS + x, BN * BK, THREADS):
                    j, kk = (index // BK, index % BK) if transposed else (index % BN, index // BN)
                    gate = zero
                    up = zero
                    if column0 + j < n and k0 + kk < k:
                        gate = b_gate[column0 + j, k0 + kk] if transposed else b_gate[k0 + kk, column0 + j]
                        up = b_up[column0 + j, k0 + kk] if transposed else b_up[k0 + kk, column0 + j]
                    tile_gate[kk, j] = gate
                    tile_up[kk, j] = up
                cuda.syncthreads()
                for kk in range(BK):
                    for i in range(TM):
                        for j in range(TN):
                            gates[i, j] += tile_a[y + i * ROWS, kk] * tile_gate[kk, x + j * COLUMNS]
                            ups[i, j] += tile_a[y + i * ROWS, kk] * tile_up[kk, x + j * COLUMNS]
                cuda.syncthreads()

            for i in range(TM):
                for j in range(TN):
                    row, column = row0 + y + i * ROWS, column0 + x + j * COLUMNS
                    if row < m and column < n:
                        c[row, column] = activate(gates[i, j]) * ups[i, j]

        return multiply


VARIANT = NumbaCudaGatedGemm()
