#pragma once
// Scores of attention as operands of tensor cores: the result of one product is an operand of the next in the same
// registers. Needs types.cuh and ptx.cuh.

// 16 rows by 16 columns of scores, number `step`, rounded to T.
template <class T, int N>
__device__ __forceinline__ void round_operand(u32 (&operand)[4], const float (&scores)[N][4], int step) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float(&pair)[4] = scores[2 * step + r / 2];
    operand[r] = pack2<T>(pair[r % 2 * 2], pair[r % 2 * 2 + 1]);
  }
}
