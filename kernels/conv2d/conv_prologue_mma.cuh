#pragma once
// Prologue of convolutions on tensor cores (fprop): a function applied to pixels in shared memory, after cp.async has
// copied them there. Padding stays zero. Needs conv.cuh, conv_mma.cuh and prologue.cuh.

// Called by the main loop for each step, between the wait for the thread's own copies and the barrier. Each thread
// applies the function to the pixels that it copied itself; the barrier then makes them visible to the others.
template <class T, class I>
struct PixelPrologue {
  Digits<I> at;                // where the next step begins
  PrologueVectors<T> vectors;  // from the group's first channel on

  template <class Tile, class Reader, class P>
  __device__ __forceinline__ void apply(T* tile, const Reader& reader, const P& product, const Digits<I>& whole_step) {
    using S = typename Tile::Share;
    if (!S::busy()) return;
    Digits<I> mine = product.moved(at, reader.first);
    at = product.next_step(at, whole_step);
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k) {
      if (k > 0) mine = product.moved(mine, reader.step);
      if (!product.inside_k(mine)) continue;
      const Place<I> column = product.a_column(mine);
      PrologueNumbers<T, Tile::WIDTH, Tile::ALONG_K> numbers;
      numbers.load(vectors, P::CHANNEL_LAST ? mine.low : mine.high, true);
#pragma unroll
      for (int i = 0; i < S::X_COUNT; ++i) {
        if (!product.inside_image(reader.rows[i], column)) continue;
        T* const place = Tile::place(tile, k, i);
        Vec<T, Tile::WIDTH> elements = load_vec<Tile::WIDTH>(place);
        numbers.apply(elements);
        store_vec(place, elements);
      }
    }
  }
};
