#pragma once
// The product of conv.cuh on tensor cores, multiplied as in gemm_mma.cuh (sm_80 on): tiles of both operands keep the
// order of global memory, several steps ahead in shared memory. Needs types.cuh, ptx.cuh, gemm.cuh, gemm_mma.cuh and
// conv.cuh.

// The share S of a tile, X by K, that one thread copies to shared memory, VEC elements per access.
template <class T, class S, int X, int K, int VEC, bool LINES_ALONG_K>
struct CopiedTile {
  using Share = S;
  static constexpr bool ALONG_K = LINES_ALONG_K;
  static constexpr int WIDTH = VEC;
  static constexpr int STEPS = K / MMA_K<T>;
  static constexpr int LENGTH = ALONG_K ? K : X, ELEMENTS = X * K, BYTES = VEC * int(sizeof(T));
  static constexpr bool BY_LDMATRIX = ALONG_K || sizeof(T) == 2;  // ldmatrix transposes 16-bit elements only
  using Layout = Swizzled<T, LENGTH, BY_LDMATRIX ? 1 : 2>;

  static __device__ __forceinline__ T* place(T* tile, int k, int i) {
    return tile + (ALONG_K ? Layout::offset(S::x(i), S::k(k)) : Layout::offset(S::k(k), S::x(i)));
  }

  template <class Reader, class P, class I>
  static __device__ __forceinline__ void copy(T* tile, const Reader& reader, const P& product, const Digits<I>& at) {
    if constexpr (BYTES == 16) {
      reader.each(product, at, [&](int k, int i, const T* address, bool inside) {
        cp_async_cg(place(tile, k, i), address, inside ? BYTES : 0);
      });
    } else if constexpr (BYTES >= 4) {
      reader.each(product, at, [&](int k, int i, const T* address, bool inside) {
        cp_async_ca<BYTES>(place(tile, k, i), address, inside ? BYTES : 0);
      });
    } else {  // too narrow for asynchronous copies: reads all elements before it stores the first
      T held[S::K_COUNT][S::X_COUNT];
      reader.each(product, at, [&](int k, int i, const T* address, bool inside) {
        held[k][i] = inside ? *address : from_float<T>(0.0f);
      });
      if (!S::busy()) return;
#pragma unroll
      for (int k = 0; k < S::K_COUNT; ++k)
#pragma unroll
        for (int i = 0; i < S::X_COUNT; ++i) *place(tile, k, i) = held[k][i];
    }
  }
};

// Used in place of PixelPrologue (conv_prologue_mma.cuh) by convolutions without a prologue.
struct NoPrologue {
  template <class Tile, class T, class Reader, class P, class D>
  __device__ __forceinline__ void apply(T*, const Reader&, const P&, const D&) const {}
};

// Stores sums through shared memory, 16 rows of the warp at a time, so that accesses to global memory are VEC
// neighbours wide. `staging` belongs to the warp: STAGING_FLOATS<Grid> floats, 16-byte aligned.
template <class Grid, class E, int VEC, class P, class D>
__device__ __forceinline__ void store_staged_sums(const float (&sums)[Grid::M / 16][Grid::N / 8][4], float* staging,
                                                  const P& product, const D& destination) {
  constexpr int PITCH = STAGING_PITCH<Grid>, TO_NEXT = P::C_ALONG_N ? 1 : PITCH;  // from a sum to its neighbour
  constexpr int TOGETHER = (P::C_ALONG_N ? Grid::N : 16) / VEC;  // accesses that are contiguous in memory
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < Grid::M / 16; ++i) {
#pragma unroll
    for (int j = 0; j < Grid::N / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_vec(staging + (lane / 4 + 8 * half) * PITCH + 8 * j + lane % 4 * 2,
                  Vec<float, 2>{sums[i][j][2 * half], sums[i][j][2 * half + 1]});
    __syncwarp();
    // Not unrolled: the code of an access is long, and its data is in shared memory rather than in registers.
#pragma unroll 1
    for (int index = lane; index < 16 * Grid::N / VEC; index += 32) {
      const int inner = index % TOGETHER * VEC, outer = index / TOGETHER;
      const int row = P::C_ALONG_N ? outer : inner, column = P::C_ALONG_N ? inner : outer;
      float run[VEC];
#pragma unroll
      for (int e = 0; e < VEC; ++e) run[e] = staging[row * PITCH + column + e * TO_NEXT];
      destination.template store<E, VEC>(product, Grid::row() + 16 * i + row, Grid::column() + column, run);
    }
    __syncwarp();
  }
}
