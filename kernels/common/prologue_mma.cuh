#pragma once
// Tiles of gemm_mma.cuh whose elements a function is applied to in shared memory, once they have arrived. Needs ptx.cuh,
// gemm.cuh, gemm_mma.cuh and prologue.cuh.

// As AsyncTile. Each thread applies the function to what it has copied itself, which it sees as soon as it has waited for
// its copies; the barrier that shows them to the others comes after.
template <class T, int X, int K, bool K_CONTIGUOUS, int VEC, int THREADS>
struct PrologueAsyncTile : AsyncTile<T, X, K, K_CONTIGUOUS, VEC, THREADS> {
  using Base = AsyncTile<T, X, K, K_CONTIGUOUS, VEC, THREADS>;
  using Walk = typename Base::Walk;

  PrologueVectors<T> vectors;  // from this thread's first k of the next tile that has arrived

  // The vectors begin at the first tile's first k.
  __device__ __forceinline__ PrologueAsyncTile(const T* corner, i64 line_pitch, int x_left,
                                               const PrologueVectors<T>& given)
      : Base(corner, line_pitch, x_left), vectors{given.scale + first(), given.shift + first()} {}

  // Applies the function to this thread's part of a tile of which `k_left` of K exist, and moves on along the vectors.
  // What does not exist along K is zero and stays so, whatever the function makes of zero.
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
