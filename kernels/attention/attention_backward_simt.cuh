#pragma once
// Products of attention gradients on general-purpose cores: tiles as f32 in shared memory, sums in registers. Needs
// types.cuh.

// Threads of a tile: 16 along columns, the others along rows. A thread has every ACROSS-th row; every 16th column of
// the scores, and every 16th group of four columns of the gradients.
template <class C>
struct Threads {
  static constexpr int ALONG = 16, ACROSS = C::THREADS / ALONG;
  static __device__ __forceinline__ int row() { return int(threadIdx.x) / ALONG; }
  static __device__ __forceinline__ int column() { return int(threadIdx.x) % ALONG; }
};

// Distance of lines in shared memory: an odd number of groups of four, so that groups of one position in eight lines
// are in different banks.
__host__ __device__ constexpr int pitch_of(int length) { return length / 4 % 2 == 0 ? length + 4 : length; }

// Copies LINES lines of a matrix, of which `room` exist, as f32; the others become zero.
template <class C, int LINES>
__device__ __forceinline__ void copy_widened(float* tile, const typename C::In* source, int room) {
  constexpr int PER_LINE = C::DEPTH / C::VEC, WIDTH = C::VEC < 4 ? C::VEC : 4;
#pragma unroll 4
  for (int index = threadIdx.x; index < LINES * PER_LINE; index += C::THREADS) {
    const int line = index / PER_LINE, at = index % PER_LINE * C::VEC;
    Vec<typename C::In, C::VEC> held = {};
    if (line < room && at < C::HEAD_DIM) held = load_vec<C::VEC>(source + line * C::HEAD_DIM + at);
#pragma unroll
    for (int first = 0; first < C::VEC; first += WIDTH) {
      Vec<float, WIDTH> wide;
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) wide.at[e] = to_float(held.at[first + e]);
      store_vec(tile + line * pitch_of(C::DEPTH) + at + first, wide);
    }
  }
}

// sums += rows of `x` times rows of `u`, along the head.
template <class C, int A, int B>
__device__ __forceinline__ void multiply_rows(float (&sums)[A][B], const float* x, const float* u) {
  constexpr int PITCH = pitch_of(C::DEPTH);
  x += Threads<C>::row() * PITCH;
  u += Threads<C>::column() * PITCH;
#pragma unroll 2
  for (int at = 0; at < C::DEPTH; at += 4) {
    Vec<float, 4> left[A], right[B];
#pragma unroll
    for (int a = 0; a < A; ++a) left[a] = load_vec<4>(x + a * Threads<C>::ACROSS * PITCH + at);
#pragma unroll
    for (int b = 0; b < B; ++b) right[b] = load_vec<4>(u + b * Threads<C>::ALONG * PITCH + at);
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int a = 0; a < A; ++a)
#pragma unroll
        for (int b = 0; b < B; ++b) sums[a][b] = multiply_add(left[a].at[e], right[b].at[e], sums[a][b]);
  }
}

// A thread's part of a gradient: groups of four columns of its rows.
template <class C, int A>
struct Gradient {
  static constexpr int FOURS = C::DEPTH / 4, EACH = ceil_div(FOURS, Threads<C>::ALONG);
  Vec<float, 4> sums[A][EACH] = {};

  static __device__ __forceinline__ bool takes(int i) {
    return (i + 1) * Threads<C>::ALONG <= FOURS || Threads<C>::column() + i * Threads<C>::ALONG < FOURS;
  }
  static __device__ __forceinline__ int column(int i) { return 4 * (Threads<C>::column() + i * Threads<C>::ALONG); }

  // Adds P W: lines of STEP factors by lines of the head.
  __device__ __forceinline__ void add(const float* p, const float* w) {
    constexpr int PITCH = pitch_of(C::DEPTH), PITCH_P = pitch_of(C::STEP);
    p += Threads<C>::row() * PITCH_P;
#pragma unroll 1
    for (int j = 0; j < C::STEP; j += 4) {
      Vec<float, 4> factors[A];
#pragma unroll
      for (int a = 0; a < A; ++a) factors[a] = load_vec<4>(p + a * Threads<C>::ACROSS * PITCH_P + j);
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          if (!takes(i)) continue;
          const Vec<float, 4> line = load_vec<4>(w + (j + e) * PITCH + column(i));
#pragma unroll
          for (int a = 0; a < A; ++a)
#pragma unroll
            for (int c = 0; c < 4; ++c)
              sums[a][i].at[c] = multiply_add(factors[a].at[e], line.at[c], sums[a][i].at[c]);
        }
    }
  }
  // Scales and stores it as `room` rows.
  __device__ __forceinline__ void store(typename C::In* target, int room, float factor) const {
    constexpr int WIDTH = C::VEC < 4 ? C::VEC : 4;
#pragma unroll
    for (int a = 0; a < A; ++a) {
      const int row = Threads<C>::row() + a * Threads<C>::ACROSS;
      if (row >= room) break;
#pragma unroll
      for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int c = 0; c < 4; c += WIDTH) {
          if (!takes(i) || column(i) + c >= C::HEAD_DIM) continue;
          Vec<typename C::In, WIDTH> rounded;
#pragma unroll
          for (int e = 0; e < WIDTH; ++e)
            rounded.at[e] = from_float<typename C::In>(factor * sums[a][i].at[c + e]);
          store_vec(target + row * C::HEAD_DIM + column(i) + c, rounded);
        }
    }
  }
};
