#pragma once
// Rows that several blocks share: blockIdx.x is the row, blockIdx.y the part of it. Needs types.cuh and row_block.cuh.

// What of a row this thread handles: vectors `thread`, `thread + STEP`, … of the `count` of its block's part. Parts
// begin at multiples of what a warp accesses at once, and differ by one of these at most; the last one may be cut.
template <int THREADS, int V>
struct Part {
  static constexpr int STEP = THREADS;
  int thread, count;
  size_t offset;  // of the part, in elements
  size_t index;   // of the part, among those of all rows

  __device__ __forceinline__ explicit Part(int cols) {
    const i64 vectors = cols / V, lines = ceil_div<i64>(vectors, 32);
    const i64 begin = lines * blockIdx.y / gridDim.y * 32, end = lines * (blockIdx.y + 1) / gridDim.y * 32;
    thread = threadIdx.x;
    count = int(min(end, vectors) - begin);
    offset = size_t(blockIdx.x) * cols + size_t(begin) * V;
    index = size_t(blockIdx.x) * gridDim.y + blockIdx.y;
  }
};
