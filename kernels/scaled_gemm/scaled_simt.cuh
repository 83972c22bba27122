#pragma once
// Tiles of gemm_simt.cuh whose quantised elements are scaled on their way to shared memory, in f32. Needs types.cuh,
// gemm.cuh, gemm_simt.cuh and scales.cuh.

// A RegisterTile of lines along K, K elements each. A packed tile has two elements of 4 bits in each stored byte, the
// first one in the lower bits; VEC counts stored elements. The scale of an access is loaded with it: groups are at
// least as long as an access and start at multiples of it.
template <class T, bool PACKED, class Map, int X, int K, int VEC, int THREADS>
struct ScaledTile : RegisterTile<T, X, PACKED ? K / 2 : K, true, VEC, THREADS> {
  static constexpr int PER = PACKED ? 2 : 1, EXTENT = X, LENGTH = K, PITCH = X + 4, ELEMENTS = K * PITCH;
  using Base = RegisterTile<T, X, K / PER, true, VEC, THREADS>;
  using Walk = typename Base::Walk;

  Map map;
  int row, k;  // of this thread's first access of the next tile
  float scale[Walk::COUNT], shift[Walk::COUNT];

  // `line_pitch` counts stored elements; `first_row` is that of the tile.
  __device__ __forceinline__ ScaledTile(const T* corner, i64 line_pitch, int x_left, const Map& given, int first_row)
      : Base(corner, line_pitch, x_left), map(given), row(first_row + Walk::line()), k(Walk::place() * VEC * PER) {}

  __device__ __forceinline__ void load_part(int count) {
    Base::load_part(count / PER);
    load_scales(count);
  }
  __device__ __forceinline__ void load(bool any) {
    Base::load(any);
    load_scales(any ? K : 0);
  }

  __device__ __forceinline__ void store(float* shared) const {
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) {
      if (!Walk::takes(i)) continue;
      float* const line = shared + Walk::line() + Walk::line_step(i);
      const int at = (Walk::place() + Walk::place_step(i)) * VEC * PER;
      float values[VEC * PER];
      scaled_access(i, values);
#pragma unroll
      for (int e = 0; e < VEC * PER; ++e) line[(at + e) * PITCH] = values[e];
    }
  }

  // The scaled elements of this thread's access i.
  __device__ __forceinline__ void scaled_access(int i, float (&values)[VEC * PER]) const {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      if constexpr (PACKED) {
        const int both = this->held[i].at[j];
        values[2 * j] = scaled(i, float(((both & 15) ^ 8) - 8));
        values[2 * j + 1] = scaled(i, float(both >> 4));
      } else {
        values[j] = scaled(i, float(widen(this->held[i].at[j])));
      }
    }
  }

 private:
  __device__ __forceinline__ float scaled(int i, float element) const {
    return Map::HAS_SHIFT ? fmaf(element, scale[i], shift[i]) : element * scale[i];
  }
  // Elements beyond K or X are zero, also with a shift.
  __device__ __forceinline__ void load_scales(int count) {
    const int room = count - Walk::place() * VEC * PER;
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) {
      const int step = Walk::place_step(i) * VEC * PER;
      const bool inside = Walk::takes(i) && Walk::line_step(i) < this->x_room && step < room;
      const i64 place = inside ? map.place(row + Walk::line_step(i), k + step) : 0;
      scale[i] = inside ? to_float(map.scale[place]) : 0.0f;
      if constexpr (Map::HAS_SHIFT) shift[i] = inside ? to_float(map.shift[place]) : 0.0f;
    }
    k += count;
  }
};
