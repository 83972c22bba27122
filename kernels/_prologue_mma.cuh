#pragma once
// Tiles of _gemm_mma.cuh whose elements a function is applied to in shared memory, once they have arrived. Needs _ptx.cuh,
// _gemm.cuh, _gemm_mma.cuh and _prologue.cuh.

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

// As multiply_ahead, with the function applied to each tile of A before it is multiplied.
template <class Grid, int STAGES, int K, class TileA, class TileB, class T>
__device__ __forceinline__ void multiply_prologue(Wide<T> (&sums)[Grid::M / 16][SUM_COLUMNS<Grid, TileB> / 8][4],
                                                  TileA& of_a, TileB& of_b, int k, T* shared) {
  constexpr int STAGE = TileA::ELEMENTS + TileB::ELEMENTS;
  int to_copy = k, filled = 0;  // of k; the buffer that is filled next
  const auto copy_next = [&] {
    if (to_copy > 0) {
      T* const buffer = shared + filled * STAGE;
      of_a.copy(buffer, to_copy);
      of_b.copy(buffer + TileA::ELEMENTS, to_copy);
      to_copy -= K;
    }
    filled = filled + 1 == STAGES ? 0 : filled + 1;
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) copy_next();

  int read = 0;  // the buffer that is multiplied next
#pragma unroll 1
  for (int k_left = k; k_left > 0; k_left -= K) {
    cp_async_wait<STAGES - 2>();
    T* const buffer = shared + read * STAGE;
    of_a.apply(buffer, k_left);
    __syncthreads();  // this tile is there for all, and all have read the buffer that is filled now
    copy_next();
    mma_tiles<Grid, TileA, TileB>(sums, buffer, buffer + TileA::ELEMENTS);
    read = read + 1 == STAGES ? 0 : read + 1;
  }
}
