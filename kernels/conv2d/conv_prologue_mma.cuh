#pragma once
// Tiles of conv_mma.cuh whose pixels a function is applied to in shared memory, once they have arrived, in fprop; what lies
// in the padding stays zero. Needs conv.cuh, conv_mma.cuh and prologue.cuh.

// As CopiedTile. Each thread applies the function to what it has copied itself, which it sees as soon as it has waited for
// its copies; the barrier that shows them to the others comes after.
template <class T, class S, int X, int K, int VEC, bool LINES_ALONG_K>
struct PrologueCopiedTile : CopiedTile<T, S, X, K, VEC, LINES_ALONG_K> {
  using Base = CopiedTile<T, S, X, K, VEC, LINES_ALONG_K>;

  // `at` is where the step of this tile begins; the vectors begin at the group's first channel.
  template <class Reader, class P, class I>
  static __device__ __forceinline__ void apply(T* tile, const Reader& reader, const P& product, const Digits<I>& at,
                                               const PrologueVectors<T>& vectors) {
    if (!S::busy()) return;
    Digits<I> mine = product.moved(at, reader.first);
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k) {
      if (k > 0) mine = product.moved(mine, reader.step);
      if (!product.inside_k(mine)) continue;
      const Place<I> column = product.a_column(mine);
      PrologueNumbers<T, VEC, LINES_ALONG_K> numbers;
      numbers.load(vectors, P::CHANNEL_LAST ? mine.low : mine.high, true);
#pragma unroll
      for (int i = 0; i < S::X_COUNT; ++i) {
        if (!product.inside_image(reader.rows[i], column)) continue;
        T* const place = Base::place(tile, k, i);
        Vec<T, VEC> elements = load_vec<VEC>(place);
        numbers.apply(elements);
        store_vec(place, elements);
      }
    }
  }
};
