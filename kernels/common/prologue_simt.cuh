#pragma once
// Tiles of gemm_simt.cuh with a prologue, which is applied on the way to shared memory. Needs gemm.cuh, gemm_simt.cuh
// and prologue.cuh.

// A RegisterTile with a prologue. The function is applied when the tile is stored, so that loads overlap with
// multiplications; its numbers are loaded with the tile.
template <class T, int X, int K, bool K_CONTIGUOUS, int VEC, int THREADS>
struct PrologueTile : RegisterTile<T, X, K, K_CONTIGUOUS, VEC, THREADS> {
  using Base = RegisterTile<T, X, K, K_CONTIGUOUS, VEC, THREADS>;
  using Walk = typename Base::Walk;

  PrologueVectors<T> vectors;  // at this thread's first k of the next tile
  int room;                    // extent of K beyond this thread's first k, in the loaded tile
  PrologueNumbers<T, VEC, K_CONTIGUOUS> numbers[Walk::COUNT];

  // The vectors begin at the first tile's first k.
  __device__ __forceinline__ PrologueTile(const T* corner, i64 line_pitch, int x_left, const PrologueVectors<T>& given)
      : Base(corner, line_pitch, x_left), vectors{given.scale + first(), given.shift + first()}, room(0) {}

  __device__ __forceinline__ void load_part(int count) {
    Base::load_part(count);
    load_numbers(count);
  }
  __device__ __forceinline__ void load(bool any) {
    Base::load(any);
    load_numbers(any ? K : 0);
  }

  // Elements beyond K stay zero, even if the function of zero is not zero.
  __device__ __forceinline__ void store(Wide<T>* shared) {
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i)
      if (Walk::takes(i) && step(i) < room) numbers[i].apply(this->held[i]);
    Base::store(shared);
  }

 private:
  // Along K: the thread's first element, and the distance of its access i from there.
  static __device__ __forceinline__ int first() { return K_CONTIGUOUS ? Walk::place() * VEC : Walk::line(); }
  static __device__ __forceinline__ constexpr int step(int i) {
    return K_CONTIGUOUS ? Walk::place_step(i) * VEC : Walk::line_step(i);
  }

  __device__ __forceinline__ void load_numbers(int count) {
    room = count - first();
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) numbers[i].load(vectors, step(i), Walk::takes(i) && step(i) < room);
    vectors.scale += count;
    vectors.shift += count;
  }
};
