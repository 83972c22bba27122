#pragma once
// Products of gemm_wgmma.cuh whose sums are promoted: tensor cores sum a group of C::PROMOTE steps, with fewer bits than
// f32 for e4m3; then these sums are added to totals in f32, and the next group starts from zero. Needs types.cuh and
// gemm_wgmma.cuh.

// The turn of a warpgroup that multiplies a tile in several groups: it waits once, and passes in the last group.
template <class Turns>
struct TurnOfGroup {
  const Turns& turn;
  bool is_last;

  __device__ __forceinline__ void take() const {}
  __device__ __forceinline__ void pass() const {
    if (is_last) turn.pass();
  }
};

// As `multiply`, for one matrix B. While this warpgroup adds, none of its products are in flight: those of other
// warpgroups keep the tensor cores busy.
template <class C, int COUNT, class Turns>
__device__ __forceinline__ void multiply_promoted(u32 buffers, float (&totals)[COUNT][1][C::BN / 8][4], int first_row,
                                                  Ring<C::STAGES>& place, u32 steps, Turns& turn) {
  float sums[COUNT][1][C::BN / 8][4] = {};
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
#pragma unroll
    for (int j = 0; j < C::BN / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) totals[i][0][j][e] = 0.0f;
  turn.take();
#pragma unroll 1
  for (u32 first = 0; first < steps; first += C::PROMOTE) {
    const bool is_last = first + C::PROMOTE >= steps;
    TurnOfGroup<Turns> here = {turn, is_last};
    // A group of one step has no loop.
    multiply<C>(buffers, sums, first_row, place, C::PROMOTE > 1 && is_last ? steps - first : C::PROMOTE, here);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int j = 0; j < C::BN / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) totals[i][0][j][e] = f32_op(totals[i][0][j][e] + sums[i][0][j][e]);
  }
}
