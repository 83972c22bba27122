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

// Sums of 64 rows of gemm_wgmma.cuh, separate for each matrix. In place, to save registers.
template <class Activation, int IN_N>
__device__ __forceinline__ void gate(float (&gates)[1][IN_N][4], const float (&ups)[1][IN_N][4]) {
#pragma unroll
  for (int j = 0; j < IN_N; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) gates[0][j][e] = Activation()(gates[0][j][e]) * ups[0][j][e];
}
