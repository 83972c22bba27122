#pragma once
// Tiles whose elements a function is applied to on their way to shared memory: what is multiplied is `Prologue` of them,
// rounded to the type they are stored in. Needs _types.cuh, _gemm.cuh, _gemm_simt.cuh, and before it the struct
// `Prologue`: operator()(x, scale, shift) of f32, HAS_SCALE and HAS_SHIFT.

// A vector that has one number for each k; not read unless the function names it.
template <class T>
struct PrologueVectors {
  const T* scale;
  const T* shift;
};

// As RegisterTile. The function is applied when a tile is stored, so that loads stay under way while others are
// multiplied; its numbers are loaded with the tile.
template <class T, int X, int K, bool K_CONTIGUOUS, int VEC, int THREADS>
struct PrologueTile : RegisterTile<T, X, K, K_CONTIGUOUS, VEC, THREADS> {
  using Base = RegisterTile<T, X, K, K_CONTIGUOUS, VEC, THREADS>;
  using Walk = typename Base::Walk;
  static constexpr int NUMBERS = K_CONTIGUOUS ? VEC : 1;  // of a vector that an access meets

  PrologueVectors<T> vectors;  // from this thread's first k of the next tile on
  int room;                    // how far K exists beyond this thread's first k, in the tile that is held
  Vec<T, NUMBERS> scales[Walk::COUNT], shifts[Walk::COUNT];

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

  // What does not exist along K is zero and stays so, whatever the function makes of zero.
  __device__ __forceinline__ void store(Wide<T>* shared) {
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) {
      if (!Walk::takes(i) || step(i) >= room) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const int number = K_CONTIGUOUS ? j : 0;
        const float scale = Prologue::HAS_SCALE ? to_float(scales[i].at[number]) : 0.0f;
        const float shift = Prologue::HAS_SHIFT ? to_float(shifts[i].at[number]) : 0.0f;
        this->held[i].at[j] = from_float<T>(Prologue()(to_float(this->held[i].at[j]), scale, shift));
      }
    }
    Base::store(shared);
  }

 private:
  // Along K: where this thread begins, and how far its access i is from there.
  static __device__ __forceinline__ int first() { return K_CONTIGUOUS ? Walk::place() * VEC : Walk::line(); }
  static __device__ __forceinline__ constexpr int step(int i) {
    return K_CONTIGUOUS ? Walk::place_step(i) * VEC : Walk::line_step(i);
  }

  __device__ __forceinline__ void load_numbers(int count) {
    room = count - first();
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) {
      const bool inside = Walk::takes(i) && step(i) < room;
      if constexpr (Prologue::HAS_SCALE)
        scales[i] = inside ? load_vec<NUMBERS>(vectors.scale + step(i)) : Vec<T, NUMBERS>{};
      if constexpr (Prologue::HAS_SHIFT)
        shifts[i] = inside ? load_vec<NUMBERS>(vectors.shift + step(i)) : Vec<T, NUMBERS>{};
    }
    vectors.scale += count;
    vectors.shift += count;
  }
};
