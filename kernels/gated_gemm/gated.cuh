#pragma once
// Epilogue of a gated product: activation(gate) * up, from the sums of both products. Needs types.cuh.

// Sums of gemm_mma.cuh: a warp's columns of the second matrix follow those of the first.
template <class Activation, int IN_M, int IN_N>
__device__ __forceinline__ void gate(float (&results)[IN_M][IN_N][4], const float (&sums)[IN_M][2 * IN_N][4]) {
#pragma unroll
  for (int i = 0; i < IN_M; ++i)
#pragma unroll
    for (int j = 0; j < IN_N; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) results[i][j][e] = Activation()(sums[i][j][e]) * sums[i][IN_N + j][e];
}

// Sums of gemm_simt.cuh.
template <class Activation, int M, int N>
__device__ __forceinline__ void gate(float (&results)[M][N], const float (&sums)[M][2 * N]) {
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) results[i][j] = Activation()(sums[i][j]) * sums[i][N + j];
}

// Sums of gemm_wgmma.cuh: BLOCKS times 64 rows of both matrices at once, or of the first matrix and then of the second.
// The results replace the sums of the first matrix to save registers.
template <class Activation, int BLOCKS, int IN_N, int COUNT, int WIDTH>
__device__ __forceinline__ void gate_in_place(float (&sums)[COUNT][1][WIDTH][4]) {
  constexpr bool JOINED = WIDTH == 2 * IN_N;
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
    for (int j = 0; j < IN_N; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float up = JOINED ? sums[i][0][IN_N + j][e] : sums[BLOCKS + i][0][j][e];
        sums[i][0][j][e] = Activation()(sums[i][0][j][e]) * up;
      }
}
