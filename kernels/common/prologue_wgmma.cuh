#pragma once
// Products of gemm_wgmma.cuh whose left operand has a prologue: the function is applied in registers. For 16-bit types.
// Needs registers_wgmma.cuh and prologue.cuh.

// The numbers of the prologue for two neighbours along K. Without PAIRS, `end` may be odd.
template <class T, bool PAIRS>
struct NumbersOfPair {
  PrologueNumbers<T, 2, true> of_both;
  int left;  // elements within K

  __device__ __forceinline__ void load(const PrologueVectors<T>& vectors, int k, int end) {
    left = end - k;
    if constexpr (PAIRS) {
      of_both.load(vectors, k, left > 0);
    } else {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        PrologueNumbers<T, 1, true> one;
        one.load(vectors, k + e, left > e);
        if constexpr (Prologue::HAS_SCALE) of_both.scale.at[e] = one.scale.at[0];
        if constexpr (Prologue::HAS_SHIFT) of_both.shift.at[e] = one.shift.at[0];
      }
    }
  }

  // Elements beyond K stay zero, even if the function of zero is not zero.
  __device__ __forceinline__ void apply(u32& two) const {
    Vec<T, 2> elements = {T{u16(two)}, T{u16(two >> 16)}};
    of_both.apply(elements);
    const u32 low = left > 0 ? u32(elements.at[0].bits) : 0, high = left > 1 ? u32(elements.at[1].bits) : 0;
    two = low | high << 16;
  }
};

// Reads the operands of one step and applies the prologue. `stage` is the stage of the ring that holds it.
template <class C, int PARTS, int COUNT>
__device__ __forceinline__ void load_applied(u32 (&operands)[PARTS][COUNT][4], const u8* stage, int first_row, int at,
                                             int k, const PrologueVectors<typename C::In>& vectors) {
  using In = typename C::In;
  const int pair = int(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    NumbersOfPair<In, C::A_K_CONTIGUOUS> numbers[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) numbers[half].load(vectors, at + WGMMA_K<In> * part + 8 * half + pair, k);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      load_rows<typename C::TileA>(operands[part][i], stage, first_row + 64 * i, WGMMA_K<In> * part);
#pragma unroll
      for (int r = 0; r < 4; ++r) numbers[r / 2].apply(operands[part][i][r]);
    }
  }
}

// As `multiply`, with the prologue.
template <class C, int COUNT, class Turns>
__device__ __forceinline__ void multiply_applied(const u8* ring, u32 buffers, int k,
                                                 const PrologueVectors<typename C::In>& vectors,
                                                 float (&sums)[COUNT][1][C::BN / 8][4], int first_row,
                                                 Ring<C::STAGES>& place, u32 steps, Turns& turn) {
  const auto load = [&](auto& operands, const u8* stage, u32 step) {
    load_applied<C>(operands, stage, first_row, int(step) * C::BK, k, vectors);
  };
  multiply_loaded<C>(ring, buffers, load, [](const auto&) {}, sums, place, steps, turn);
}
