#pragma once
// Tiles of gemm_mma.cuh with a prologue, which is applied in shared memory after the copies have arrived. Needs
// ptx.cuh, gemm.cuh, gemm_mma.cuh and prologue.cuh.

// An AsyncTile with a prologue. Each thread applies the function to the elements that it copied itself, which it sees
// after it has waited for its copies; the barrier that makes them visible to the others comes after.
template <class T, int X, int K, bool K_CONTIGUOUS, int VEC, int THREADS>
struct PrologueAsyncTile : AsyncTile<T, X, K, K_CONTIGUOUS, VEC, THREADS> {
  using Base = AsyncTile<T, X, K, K_CONTIGUOUS, VEC, THREADS>;
  using Walk = typename Base::Walk;

  PrologueVectors<T> vectors;  // at this thread's first k of the next tile that arrives

  // The vectors begin at the first tile's first k.
  __device__ __forceinline__ PrologueAsyncTile(const T* corner, i64 line_pitch, int x_left,
                                               const PrologueVectors<T>& given)
      : Base(corner, line_pitch, x_left), vectors{given.scale + first(), given.shift + first()} {}

  // Applies the function to this thread's part of a tile with `k_left` of K, and moves on along the vectors.
  // Elements beyond K stay zero, even if the function of zero is not zero.
  __device__ __forceinline__ void apply(T* shared, int k_left) {
    const int k_room = k_left - first();
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) {
      const int line = Walk::line_step(i), at = Walk::place_step(i) * VEC, step = K_CONTIGUOUS ? at : line;
      if (!Walk::takes(i) || step >= k_room) continue;
      T* const place = shared + Base::Layout::offset(Walk::line() + line, Walk::place() * VEC + at);
      PrologueNumbers<T, VEC, K_CONTIGUOUS> numbers;
      numbers.load(vectors, step, true);
      Vec<T, VEC> elements = load_vec<VEC>(place);
      numbers.apply(elements);
      store_vec(place, elements);
    }
    vectors.scale += K;
    vectors.shift += K;
  }

 private:
  static __device__ __forceinline__ int first() { return K_CONTIGUOUS ? Walk::place() * VEC : Walk::line(); }
};

template <class T, int X, int K, bool K_CONTIGUOUS, int VEC, int THREADS>
__device__ __forceinline__ void arrived(PrologueAsyncTile<T, X, K, K_CONTIGUOUS, VEC, THREADS>& tile, T* shared,
                                        int k_left) {
  tile.apply(shared, k_left);
}
