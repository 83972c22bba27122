"""scaled_gemm in CUDA C++ on tensor cores by mma.sync (sm_80 on), summed in f32, or in i32 for i8.

Two kernels share the main loop of gemm's cuda_mma. Quantised rows a and weights b of the same type travel by
cp.async; sums are scaled once, so that there are only scales of whole matrices, rows and columns. Quantised
weights for rows of f16 or bf16 go through registers: they are scaled, rounded to the type of a and stored in
shared memory, while the products of the step before are computed.

Limits: cp.async copies 4 bytes or more, so that the row lengths of a (and of b of the same type) must be
multiples of that. k is not divided among blocks.

Source: PTX ISA, "Warp-level matrix instructions" and "cp.async"; Frantar et al., "MARLIN: Mixed-precision
auto-regressive parallel inference on large language models", 2024 (conversion ahead of tensor cores).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import mma_gemm, mma_tile
from tunebench.kernels.common.gemm_variant import Constants
from tunebench.kernels.common.mma_gemm import MmaGemm
from tunebench.kernels.scaled_gemm import _scaled
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs
from tunebench.workloads.operators.scaled_gemm import ScaledGemm

SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of c per block"),
        Parameter("bn", (16, 32, 64, 128, 256), "columns of c per block"),
        *mma_gemm.WARPS,
        mma_gemm.BK,
        mma_gemm.STAGES,
        mma_gemm.STAGED,
        Parameter("group_m", (1, 4, 8), "rows of tiles that concurrent blocks share in L2"),
        Parameter("min_blocks", (1, 2, 3), "resident blocks per SM: limits registers per thread"),
    ),
    (
        *mma_gemm.constraints(_scaled, other_registers=96),
        mma_tile.tile_is_compact,
        mma_gemm.stages_have_tiles,
        mma_gemm.copies_are_few(_scaled),
    ),
)

USUAL = (
    # bm, bn, warps_m, warps_n, bytes of bk, stages; largest first
    (128, 128, 2, 4, 64, 3),
    (128, 64, 2, 2, 64, 4),
    (64, 64, 2, 2, 128, 3),
    (32, 64, 2, 2, 128, 3),
    (32, 32, 2, 2, 128, 4),
    (16, 64, 1, 4, 128, 4),
    (16, 32, 1, 2, 128, 5),
    (16, 16, 1, 1, 128, 5),
    (16, 16, 1, 1, 64, 5),
)
"""Tiles of gated_gemm, whose threads also keep more than the sums of one product in registers."""

_HEAD = """
// c = (scale_a a) (scale_b b + shift)^T + bias. C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
scaled_mma(const typename C::InA* __restrict__ a, const typename C::InB* __restrict__ b,
           const float* __restrict__ scale_a, const typename C::Scale* __restrict__ scale_b,
           const typename C::Scale* __restrict__ shift, const typename C::Out* __restrict__ bias,
           typename C::Out* __restrict__ c, int m, int n, int k, int group_m) {
  using In = typename C::InA;
  using Out = typename C::Out;
  using Grid = WarpGrid<C::BM, C::BN, C::WARPS_M, C::WARPS_N>;
  using TileA = AsyncTile<In, C::BM, C::BK, true, C::VEC_A, C::THREADS>;
  using MapB = ScaleMap<typename C::Scale, Scales(C::SCALES), C::GROUP, C::HAS_SHIFT>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a warp for each part of the tile");

  In* const shared = reinterpret_cast<In*>(dynamic_shared());
  const TileIndex tile = tile_of_block(tiles_of(m, C::BM), tiles_of(n, C::BN), group_m);
  const int row = tile.m * C::BM, column = tile.n * C::BN;  // the rest beyond them never overflows an int
  const MapB of_columns = {scale_b, shift, ceil_div(k, C::GROUP)};
  TileA of_a(a + i64(row) * k, k, m - row);
  Wide<In> sums[Grid::M / 16][Grid::N / 8][4] = {};
  const Target<Out> target = {c + i64(row) * n + column, n, m - row, n - column};
  const Finish<Out, Identity, C::HAS_BIAS> finish = {bias + column, n - column};
"""

_OF_ONE_TYPE = """
  using MapA = ScaleMap<float, Scales(C::SCALES), C::GROUP, false>;
  AsyncTile<In, C::BN, C::BK, true, C::VEC_B, C::THREADS> of_b(b + i64(column) * k, k, n - column);
  multiply_ahead<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);
  float results[Grid::M / 16][Grid::N / 8][4];
  scale_sums<Grid>(results, sums, MapA{scale_a, nullptr, 0}, of_columns, row, column, m, n);
  store_results<Grid, C::STAGED, C::VEC_C>(results, shared, target, finish);
}
"""

_OF_WEIGHTS = """
  using Quantized = ScaledTile<typename C::InB, C::B_IS_PACKED, MapB, C::BN, C::BK, C::VEC_B, C::THREADS>;
  const i64 pitch_b = k / Quantized::PER;
  const Quantized quantized(b + column * pitch_b, pitch_b, n - column, of_columns, column);
  ConvertedTile<In, Quantized, C::VEC_B> of_b(quantized, k);
  multiply_ahead<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);
  store_results<Grid, C::STAGED, C::VEC_C>(sums, shared, target, finish);
}
"""


class CudaMmaScaledGemm(MmaGemm[ScaledGemm]):
    """f16 and bf16 with any weights, and e4m3 and i8 with scales of whole rows, on sm_80 and later."""

    name = "cuda_mma"
    operator = ScaledGemm
    operation = _scaled
    space = SPACE
    usual = USUAL
    dtypes = "f16, bf16, e4m3 and i8"
    entry = "scaled_mma"
    headers = (
        "types",
        "ptx",
        "epilogue",
        "gemm",
        "gemm_simt",
        "gemm_mma",
        "scales",
        "scaled_simt",
        "scaled_mma",
    )
    text = _HEAD

    def limits(self, workload: ScaledGemm, device: Device) -> str | None:
        """Return why tensor cores or cp.async cannot do this workload, or None if they can."""
        if workload.is_quantized and workload.is_grouped:
            return f"{self.key} scales sums, and has no scales that differ along k for {workload.dtype}"
        if workload.is_quantized or workload.dtype == "f32":
            return super().limits(workload, device)
        if _scaled.widths(workload)[0] * itemsize(workload.dtype) < mma_tile.COPY_BYTES:
            return f"{self.key} copies {mma_tile.COPY_BYTES} bytes or more: k must be a multiple of that"
        return _scaled.too_many_blocks(workload, (tile[:2] for tile in USUAL))

    def kernel_text(self, workload: ScaledGemm, config: Config) -> str:
        """Return the kernel for factors of one type, or for quantised weights only."""
        return _HEAD + (_OF_ONE_TYPE if workload.is_quantized else _OF_WEIGHTS)

    def choices(self, workload: ScaledGemm, config: Config) -> Constants:
        """Return the constants of the configuration; a step of packed b has half as many bytes."""
        constants = super().choices(workload, config)
        of_step = config["bk"] // (_scaled.PACKED if workload.weight == "i4" else 1)
        return {**constants, "VEC_B": min(int(constants["VEC_B"]), of_step)}

    def costs(self, workload: ScaledGemm, table: Table, device: Device) -> Costs:
        """Count the product as gemm's cuda_mma does; converted weights pass L1 in their own bytes."""
        costs = super().costs(workload, table, device)
        if workload.is_quantized:
            return costs
        share, size = _scaled.shares(workload, table, device), itemsize(workload.dtype)
        wide_a = _scaled.widths(workload)[0] * size == 16
        assert costs.execution is not None
        moved: Any = costs.execution.memory_bytes * _scaled.bytes_share(workload)
        execution = dataclasses.replace(
            costs.execution,
            memory_bytes=moved.clip(min=float(workload.traffic().total_bytes)),
            # A conversion, a multiplication by the scale and half of a packing for each element of b.
            instructions=costs.execution.instructions
            + 3.0 * table["bn"].astype(np.float64) * share.length / 32,
        )
        fill_bytes = wide_a * share.edge_rows * share.used_length * size
        return dataclasses.replace(costs, fill_bytes=fill_bytes, execution=execution)


VARIANT = CudaMmaScaledGemm()
