#pragma once
// The product of conv.cuh on the FP32 units, multiplied as in gemm_simt.cuh: tiles of both operands go through
// registers to shared memory, where they are [K][PITCH] f32. Needs types.cuh, gemm.cuh, gemm_simt.cuh and conv.cuh.

// The share S of a tile, X by K, that one thread has loaded and not yet stored.
template <class T, class S, int X, int K, int VEC, bool ALONG_K>
struct HeldTile {
  // Where lines run along K the tile is transposed: 4 more floats per line spread the stores over the banks.
  static constexpr int PITCH = X + (ALONG_K ? 4 : 0), FLOATS = K * PITCH;

  Vec<T, VEC> held[S::K_COUNT][S::X_COUNT];

  template <class Reader, class P, class I>
  __device__ __forceinline__ void load(const Reader& reader, const P& product, const Digits<I>& at) {
    reader.each(product, at, [&](int k, int i, const T* address, bool inside) {
      if (inside) {
        held[k][i] = load_vec<VEC>(address);
      } else {
#pragma unroll
        for (int e = 0; e < VEC; ++e) held[k][i].at[e] = from_float<T>(0.0f);
      }
    });
  }

  __device__ __forceinline__ void store(float* tile) const {
    if (!S::busy()) return;
    constexpr int WIDTH = ALONG_K ? 1 : VEC < 4 ? VEC : 4;
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k)
#pragma unroll
      for (int i = 0; i < S::X_COUNT; ++i)
#pragma unroll
        for (int e = 0; e < VEC; e += WIDTH) {
          Vec<float, WIDTH> values;
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) values.at[j] = to_float(held[k][i].at[e + j]);
          store_vec(tile + S::k(k) * PITCH + S::x(i) + e * (ALONG_K ? PITCH : 1), values);
        }
  }
};

// Lanes of a warp along n: a warp is as close to 4 x 8 threads as the tile allows, to read few bytes.
template <int BM, int BN, int TM, int TN>
__host__ __device__ constexpr int usual_lanes_n() {
  const int lanes_n = BN / TN < 8 ? BN / TN : 8;
  return BM / TM < 32 / lanes_n ? 32 / (BM / TM) : lanes_n;
}

// Stores a thread's sums, VEC neighbours per access.
template <class Grid, class E, int VEC, class P, class D>
__device__ __forceinline__ void store_sums_of(const float (&sums)[Grid::M][Grid::N], const P& product,
                                              const D& destination) {
  constexpr int DOWN = P::C_ALONG_N ? 1 : VEC, ACROSS = P::C_ALONG_N ? VEC : 1;
#pragma unroll
  for (int j = 0; j < Grid::N; j += ACROSS)
#pragma unroll
    for (int i = 0; i < Grid::M; i += DOWN) {
      float run[VEC];
#pragma unroll
      for (int e = 0; e < VEC; ++e) run[e] = P::C_ALONG_N ? sums[i][j + e] : sums[i + e][j];
      const int row = Grid::row() + i / Grid::CHUNK_M * Grid::STEP_M + i % Grid::CHUNK_M;
      const int column = Grid::column() + j / Grid::CHUNK_N * Grid::STEP_N + j % Grid::CHUNK_N;
      destination.template store<E, VEC>(product, row, column, run);
    }
}
