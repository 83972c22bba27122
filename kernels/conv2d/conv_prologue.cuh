#pragma once
// Prologue of convolutions on the FP32 units (fprop): a function applied to pixels on their way to shared memory.
// Padding stays zero. Needs conv.cuh, conv_simt.cuh and prologue.cuh.

// A HeldTile with a prologue, which is applied when the tile is stored, so that loads overlap with multiplications.
template <class T, class S, int X, int K, int VEC, bool ALONG_K>
struct PrologueHeldTile : HeldTile<T, S, X, K, VEC, ALONG_K> {
  using Base = HeldTile<T, S, X, K, VEC, ALONG_K>;
  static_assert(S::X_COUNT <= 32, "a bit for each access");

  PrologueVectors<T> vectors;  // from the group's first channel on
  PrologueNumbers<T, VEC, ALONG_K> numbers[S::K_COUNT];
  u32 inside[S::K_COUNT];  // accesses inside an image, one bit each

  explicit __device__ __forceinline__ PrologueHeldTile(const PrologueVectors<T>& given) : vectors(given) {}

  template <class Reader, class P, class I>
  __device__ __forceinline__ void load(const Reader& reader, const P& product, const Digits<I>& at) {
    Base::load(reader, product, at);
    Digits<I> mine = product.moved(at, reader.first);
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k) {
      if (k > 0) mine = product.moved(mine, reader.step);
      const bool exists = product.inside_k(mine);
      const Place<I> column = exists ? product.a_column(mine) : Place<I>{0, FAR_OUTSIDE<I>, 0};
      inside[k] = 0;
#pragma unroll
      for (int i = 0; i < S::X_COUNT; ++i) inside[k] |= u32(product.inside_image(reader.rows[i], column)) << i;
      numbers[k].load(vectors, P::CHANNEL_LAST ? mine.low : mine.high, exists);
    }
  }

  __device__ __forceinline__ void store(float* tile) {
    if (!S::busy()) return;
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k)
#pragma unroll
      for (int i = 0; i < S::X_COUNT; ++i)
        if (inside[k] >> i & 1u) numbers[k].apply(this->held[k][i]);
    Base::store(tile);
  }
};
