#pragma once
// Rows that several blocks share: blockIdx.x is the row, blockIdx.y its part. Needs types.cuh and row_block.cuh.

// Vectors of a thread: `thread`, `thread + STEP`, ... of the `count` of its block's part. Parts start at multiples of a
// warp access, and differ by at most one of these; the last access may be partial.
template <int THREADS, int V>
struct Part {
  static constexpr int STEP = THREADS;
  int thread, count;
  size_t offset;  // of the part, in elements
  size_t index;   // of the part, among the parts of all rows

  __device__ __forceinline__ explicit Part(int cols) {
    const i64 vectors = cols / V, lines = ceil_div<i64>(vectors, 32);
    const i64 begin = lines * blockIdx.y / gridDim.y * 32, end = lines * (blockIdx.y + 1) / gridDim.y * 32;
    thread = threadIdx.x;
    count = int(min(end, vectors) - begin);
    offset = size_t(blockIdx.x) * cols + size_t(begin) * V;
    index = size_t(blockIdx.x) * gridDim.y + blockIdx.y;
  }
};
