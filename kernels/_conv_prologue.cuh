#pragma once
// Tiles of images whose pixels a function is applied to on their way to shared memory, in fprop: what is multiplied is
// `Prologue` of them, rounded to the type they are stored in; what lies in the padding stays zero. Needs _conv.cuh,
// _conv_simt.cuh, and before it the struct `Prologue`: operator()(x, scale, shift) of f32, HAS_SCALE and HAS_SHIFT.

// As HeldTile. The function is applied when a tile is stored, so that loads stay under way while others are multiplied.
template <class T, class S, int X, int K, int VEC, bool ALONG_K>
struct PrologueHeldTile : HeldTile<T, S, X, K, VEC, ALONG_K> {
  using Base = HeldTile<T, S, X, K, VEC, ALONG_K>;
  static constexpr int NUMBERS = ALONG_K ? VEC : 1;  // of a vector that an access meets
  static_assert(S::X_COUNT <= 32, "a bit for each access");

  const T* scale;  // of the group's first channel; not read unless the function names it
  const T* shift;  // likewise
  Vec<T, NUMBERS> scales[S::K_COUNT], shifts[S::K_COUNT];
  u32 inside[S::K_COUNT];  // which accesses lie in an image

  __device__ __forceinline__ PrologueHeldTile(const T* given_scale, const T* given_shift)
      : scale(given_scale), shift(given_shift) {}

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
      const I channel = P::CHANNEL_LAST ? mine.low : mine.high;
      if constexpr (Prologue::HAS_SCALE)
        scales[k] = exists ? load_vec<NUMBERS>(scale + channel) : Vec<T, NUMBERS>{};
      if constexpr (Prologue::HAS_SHIFT)
        shifts[k] = exists ? load_vec<NUMBERS>(shift + channel) : Vec<T, NUMBERS>{};
    }
  }

  __device__ __forceinline__ void store(float* tile) {
    if (!S::busy()) return;
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k)
#pragma unroll
      for (int i = 0; i < S::X_COUNT; ++i) {
        if (!(inside[k] >> i & 1u)) continue;
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
          const int number = ALONG_K ? e : 0;
          const float factor = Prologue::HAS_SCALE ? to_float(scales[k].at[number]) : 0.0f;
          const float added = Prologue::HAS_SHIFT ? to_float(shifts[k].at[number]) : 0.0f;
          this->held[k][i].at[e] = from_float<T>(Prologue()(to_float(this->held[k][i].at[e]), factor, added));
        }
      }
    Base::store(tile);
  }
};
