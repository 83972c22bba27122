"""grouped_gemm in Numba-CUDA in the style of Numba's documentation: gemm's kernel, with a walk to the group.

A block computes one tile of c, or none: the grid has as many blocks as the split of rows with the most tiles,
and each block walks from group to group until it reaches its tile. The tile is computed as in gemm's
numba_cuda: shared arrays, and tm x tn results per thread, spread over the tile.

Limits: f32 input and output (tf32 is multiplied in f32, more exactly than required).

Source: Numba documentation, "CUDA Python, Examples: matrix multiplication".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.kernels.common.numba_cuda_gemm import NumbaCudaTiledGemm, space_of
from tunebench.kernels.grouped_gemm import _grouped
from tunebench.space import Config
from tunebench.workloads.operators.grouped_gemm import GroupedGemm


class NumbaCudaGroupedGemm(NumbaCudaTiledGemm[GroupedGemm]):
    """f32, of any size, layout of b and split of rows."""

    name = "numba_cuda"
    operator = GroupedGemm
    operation = _grouped
    space = space_of(_grouped, with_group=False)

    def arguments(self, workload: GroupedGemm) -> tuple[str, ...]:
        """Return a, b, offsets and c."""
        return ("a", "b", "offsets", "c")

    def emulation_workload(self, workload: GroupedGemm, config: Config) -> GroupedGemm:
        """Return a workload of a few tiles, not quite full: the simulator is slow."""
        bm, bn, bk = (config[name] for name in ("bm", "bn", "bk"))
        tiles_m = 2 if bm * bn * bk <= 4096 else 1
        return dataclasses.replace(
            workload,
            groups=min(workload.groups, 3),
            m=min(workload.m, tiles_m * bm - 3),
            n=min(workload.n, bn - 5),
            k=min(workload.k, 2 * bk - 3),
        )

    def kernel(self, workload: GroupedGemm, config: Config) -> Callable[..., None]:  # noqa: C901 - may call nothing
        """Return the kernel `(a, b, offsets, c)`."""
        from numba import cuda, float32

        BM, BN, BK, TM, TN = (config[name] for name in ("bm", "bn", "bk", "tm", "tn"))
        ROWS, COLUMNS = BM // TM, BN // TN  # of threads
        THREADS = ROWS * COLUMNS
        A_SHAPE, B_SHAPE = (BM, BK + 1), (BK, BN + 1)
        transposed, zero = workload.trans == "nt", np.float32(0)

        def multiply(a: Any, b: Any, offsets: Any, c: Any) -> None:  # noqa: C901 - likewise
            tile_a = cuda.shared.array(A_SHAPE, float32)
            tile_b = cuda.shared.array(B_SHAPE, float32)
            sums = cuda.local.array((TM, TN), float32)
            groups, n, k = b.shape[0], c.shape[1], a.shape[1]

            # Walk to the group of this block's tile. Tiles of a group are numbered column by column.
            tiles_n = (n + BN - 1) // BN
            tile, z = cuda.blockIdx.x, 0
            tiles_m = (offsets[1] - offsets[0] + BM - 1) // BM
            while z < groups and tile >= tiles_m * tiles_n:
                tile -= tiles_m * tiles_n
                z += 1
                tiles_m = (offsets[z + 1] - offsets[z] + BM - 1) // BM if z < groups else 0
            if z == groups:
                return  # all threads of the block return
            row0, column0 = offsets[z] + tile % tiles_m * BM, tile // tiles_m * BN
            end = offsets[z + 1]

            x, y = cuda.threadIdx.x, cuda.threadIdx.y
            for i in range(TM):
                for j in range(TN):
                    sums[i, j] = zero
            for k0 in range(0, k, BK):
                for index in range(y * COLUMNS + x, BM * BK, THREADS):
                    i, kk = index // BK, index % BK
                    value = zero
                    if row0 + i < end and k0 + kk < k:
                        value = a[row0 + i, k0 + kk]
                    tile_a[i, kk] = value
                for index in range(y * COLUMNS + x, BN * BK, THREADS):
                    j, kk = (index // BK, index % BK) if transposed else (index % BN, index // BN)
                    value = zero
                    if column0 + j < n and k0 + kk < k:
                        value = b[z, column0 + j, k0 + kk] if transposed else b[z, k0 + kk, column0 + j]
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
                    if row < end and column < n:
                        c[row, column] = sums[i, j]

        return multiply


VARIANT = NumbaCudaGroupedGemm()
