"""scaled_gemm in CUDA C++ on the FP32 units: any type, scale and size, multiplied and summed in f32.

Steps of a and b go through registers to shared memory, as in gemm's cuda_simt, and become scaled f32 on the
way. Weights of 4 bits are unpacked there. It is meant for few rows, as in decoding, where the bytes of the
weights limit the time, and for GPUs and types for which there is no variant on tensor cores.

Source: Volkov and Demmel, "Benchmarking GPUs to tune dense linear algebra", 2008; Frantar et al., "GPTQ",
2022.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common import simt_gemm
from tunebench.kernels.common.gemm_variant import Constants
from tunebench.kernels.common.simt_gemm import SimtGemm, usual_tiles
from tunebench.kernels.scaled_gemm import _scaled
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs
from tunebench.workloads.operators.scaled_gemm import ScaledGemm

SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128), "rows of c per block"),
        Parameter("bn", (16, 32, 64, 128), "columns of c per block"),
        Parameter("tm", (1, 2, 4, 8), "rows of c per thread"),
        Parameter("tn", (2, 4, 8), "columns of c per thread"),
        simt_gemm.LANES_N,
        simt_gemm.BK,
        simt_gemm.STAGES,
        simt_gemm.GROUP_M,
    ),
    simt_gemm.constraints(_scaled, other_registers=48),
)

USUAL = usual_tiles(
    (128, 64, 8, 4, 8, 8),
    (64, 64, 4, 4, 8, 16),
    (32, 64, 4, 4, 16, 16),
    (32, 32, 2, 4, 8, 32),
    (16, 32, 2, 4, 8, 16),
    (16, 16, 2, 2, 8, 32),
)
"""Tiles of gemm's cuda_simt, largest first."""

SOURCE = """
// c = (scale_a a) (scale_b b + shift)^T + bias. C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
scaled_simt(const typename C::InA* __restrict__ a, const typename C::InB* __restrict__ b,
            const float* __restrict__ scale_a, const typename C::Scale* __restrict__ scale_b,
            const typename C::Scale* __restrict__ shift, const typename C::Out* __restrict__ bias,
            typename C::Out* __restrict__ c, int m, int n, int k, int group_m) {
  using Out = typename C::Out;
  using Grid = ThreadGrid<C::BM, C::BN, C::TM, C::TN, C::LANES_N>;
  constexpr Scales OF_B = Scales(C::SCALES), OF_A = OF_B == Scales::BLOCK ? Scales::GROUP : OF_B;
  using MapA = ScaleMap<float, OF_A, C::GROUP, false>;
  using MapB = ScaleMap<typename C::Scale, OF_B, C::GROUP, C::HAS_SHIFT>;
  using TileB = ScaledTile<typename C::InB, C::B_IS_PACKED, MapB, C::BN, C::BK, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a thread for each part of the tile");

  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  const TileIndex tile = tile_of_block(tiles_of(m, C::BM), tiles_of(n, C::BN), group_m);
  const int row = tile.m * C::BM, column = tile.n * C::BN;  // the rest beyond them never overflows an int
  const i64 groups = ceil_div(k, C::GROUP), pitch_b = k / TileB::PER;
  TileB of_b(b + column * pitch_b, pitch_b, n - column, MapB{scale_b, shift, groups}, column);
  float sums[C::TM][C::TN] = {};
  if constexpr (C::A_HAS_SCALE) {
    using TileA = ScaledTile<typename C::InA, false, MapA, C::BM, C::BK, C::VEC_A, C::THREADS>;
    TileA of_a(a + i64(row) * k, k, m - row, MapA{scale_a, nullptr, groups}, row);
    multiply_buffered<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);
  } else {
    using TileA = RegisterTile<typename C::InA, C::BM, C::BK, true, C::VEC_A, C::THREADS>;
    TileA of_a(a + i64(row) * k, k, m - row);
    multiply_buffered<Grid, C::STAGES, C::BK>(sums, of_a, of_b, k, shared);
  }

  const Target<Out> target = {c + i64(row) * n + column, n, m - row, n - column};
  store_sums<Grid, C::VEC_C>(sums, target, Finish<Out, Identity, C::HAS_BIAS>{bias + column, n - column});
}
"""


class CudaSimtScaledGemm(SimtGemm[ScaledGemm]):
    """Any size, type and kind of scales."""

    name = "cuda_simt"
    operator = ScaledGemm
    operation = _scaled
    space = SPACE
    usual = USUAL
    entry = "scaled_simt"
    headers = ("types", "epilogue", "gemm", "gemm_simt", "scales", "scaled_simt")
    text = SOURCE

    def choices(self, workload: ScaledGemm, config: Config) -> Constants:
        """Return the constants of the configuration; a step of packed b has half as many bytes."""
        constants = super().choices(workload, config)
        if workload.weight == "i4":
            constants["VEC_B"] = min(int(constants["VEC_B"]), config["bk"] // _scaled.PACKED)
        return constants

    def costs(self, workload: ScaledGemm, table: Table, device: Device) -> Costs:
        """Count the product of f32; memory moves the bytes of the quantised matrices."""
        costs = super().costs(workload, table, device)
        assert costs.execution is not None
        moved: Any = costs.execution.memory_bytes * _scaled.bytes_share(workload)
        moved = moved.clip(min=float(workload.traffic().total_bytes))
        execution = dataclasses.replace(costs.execution, memory_bytes=moved)
        return dataclasses.replace(costs, execution=execution)


VARIANT = CudaSimtScaledGemm()
