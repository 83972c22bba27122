#pragma once
// Products of attention by wgmma (sm_90a): 64 rows of a warpgroup by BN lines of the other side, and scores by these
// lines. Needs types.cuh, ptx.cuh, gemm.cuh, gemm_mma.cuh, ptx_hopper.cuh, gemm_wgmma.cuh and attention_operand.cuh. C
// holds the constants of workload and configuration. Tiles are `PanelTile`s by address. The first kind of products sums
// along their lines, the second across them.

// Issues the products of 64 lines of one tile, starting at `first_row`, by all lines of another.
template <class C, class Rows, class Others>
__device__ __forceinline__ void issue_scores(float (&scores)[C::BN / 8][4], u32 rows, int first_row, u32 others) {
#pragma unroll
  for (int step = 0; step < ceil_div(C::HEAD_DIM, 16); ++step)
    wgmma_m64k16<typename C::In, C::BN, false, false>(scores, Rows::operand(rows, first_row, step),
                                                      Others::operand(others, 0, step), step > 0);
  wgmma_commit();
}

// Issues the products of rounded scores by the lines of a tile, added to sums.
template <class C, class Across>
__device__ __forceinline__ void issue_sums(float (&sums)[C::DIM / 8][4], const u32 (&p)[C::BN / 16][4], u32 lines) {
#pragma unroll
  for (int step = 0; step < C::BN / 16; ++step)
    wgmma_m64k16_registers<typename C::In, C::DIM, true>(sums, p[step], Across::operand(lines, 0, step), true);
  wgmma_commit();
}

template <class C>
__device__ __forceinline__ void round_scores(u32 (&p)[C::BN / 16][4], const float (&scores)[C::BN / 8][4]) {
#pragma unroll
  for (int step = 0; step < C::BN / 16; ++step) round_operand<typename C::In>(p[step], scores, step);
}
