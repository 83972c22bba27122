#pragma once
// Rows that do not all start at a multiple of an access. Needs types.cuh, reduce.cuh and row_block.cuh.

// As Share, for rows of at least 2 V elements. Accesses of V elements are aligned in memory, and lie within the row:
// `count` and `offset` are those of these vectors. The elements before the first and after the last vector, the row's
// edges, are accessed one by one, so that no thread touches another row or memory beyond the tensor. The base has the
// start of the row.
template <int ROW_THREADS, int ROWS, int V>
struct EdgedShare : Share<ROW_THREADS, ROWS, V> {
  using Base = Share<ROW_THREADS, ROWS, V>;
  static constexpr int EDGES = ceil_div(2 * (V - 1), ROW_THREADS);  // of a thread, at most
  int count, before, edges;  // vectors, and elements of both edges, of the row; 0 if the row is beyond the end
  size_t offset;

  __device__ __forceinline__ EdgedShare(int rows, int cols) : Base(rows, cols) {
    const bool exists = Base::count > 0;
    before = (V - int(Base::offset % V)) % V;
    count = exists ? (cols - before) / V : 0;
    edges = exists ? cols - count * V : 0;
    offset = Base::offset + before;
#ifndef TUNEBENCH_EMULATE
    // The same number, but the compiler does not see how it is computed: NVRTC 13 would store some vectors by elements.
    offset = offset >> 32 << 32 | __byte_perm(u32(offset), 0, 0x3210);
#endif
  }

  // Calls `f(element, n)` for the thread's elements of the edges, counted from the first vector.
  template <class F>
  __device__ __forceinline__ void each_edge(F f) const {
    each_vector<EDGES>(Base::thread, Base::STEP, edges,
                       [&](int edge, int n) { f(edge < before ? edge - before : edge - before + count * V, n); });
  }
};

// Elements that are loaded already, for functions that load vectors.
struct Loaded {
  template <int V>
  __device__ __forceinline__ void load(int, float (&)[V]) const {}
};
