#pragma once
// Division of a product along k too, where c has too few tiles to keep a GPU busy: a block sums some steps of k (BK
// each) of a tile. Partial sums of a tile go to a slot of the scratch, BM x BN sums row-major; a second kernel adds the
// slots of each tile in the order of k, so that results do not depend on the order of blocks. Needs types.cuh,
// epilogue.cuh and gemm.cuh.
//
// Source: Osama et al., "Stream-K: work-centric parallel decomposition for dense matrix-matrix multiplication on the
// GPU", PPoPP 2023.

// A number as a type.
template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};

// Steps of one tile that a block sums.
struct Segment {
  u32 tile;
  int first, count;  // steps of k
  i64 slot;          // slot of the sum; -1 for the whole sum of a tile
};

// The slots of a tile in the order of k; none if one block computed all of it.
struct Slots {
  i64 first, others;  // first slot of the others
  int stride, count;

  __device__ __forceinline__ i64 at(int i) const { return i == 0 ? first : others + i64(i - 1) * stride; }
};

// A division assigns steps to blocks and slots to tiles. `tiles` is the number of tiles of the batch, `parts` the
// number of blocks that share the work; `body` is called with each segment of this block.

// One block per tile.
struct WholeTiles {
  static constexpr bool SOME_WHOLE = true, SOME_PARTS = false;

  template <class Body>
  static __device__ __forceinline__ void each_segment(int, int steps, int, const Body& body) {
    body(Segment{blockIdx.x, 0, steps, -1});
  }
};

// Split-K: `parts` blocks per tile share its steps evenly; with fewer steps than blocks, some blocks have none.
struct SplitK {
  static constexpr bool SOME_WHOLE = false, SOME_PARTS = true;

  template <class Body>
  static __device__ __forceinline__ void each_segment(int, int steps, int parts, const Body& body) {
    const u32 tile = blockIdx.x / u32(parts), part = blockIdx.x - tile * u32(parts);
    const int first = int(i64(steps) * part / parts), end = int(i64(steps) * (part + 1) / parts);
    body(Segment{tile, first, end - first, i64(blockIdx.x)});
  }
  static __device__ __forceinline__ Slots slots_of(u32 tile, int, int, int parts) {
    const i64 first = i64(tile) * parts;
    return {first, first + 1, 1, parts};
  }
};

// Stream-K: the steps of all tiles, end to end, are divided evenly among `parts` blocks, one or more steps each.
// A block may end a tile, compute whole tiles, and begin another: two slots per block suffice.
struct StreamK {
  static constexpr bool SOME_WHOLE = true, SOME_PARTS = true;

  // First step of a block's share, counted over all tiles.
  static __device__ __forceinline__ i64 begin(i64 block, i64 total, int parts) { return total * block / parts; }
  // The block that computes a step: the last one that begins at it or before it.
  static __device__ __forceinline__ int owner(i64 step, i64 total, int parts) {
    return int(((step + 1) * parts - 1) / total);
  }

  template <class Body>
  static __device__ __forceinline__ void each_segment(int tiles, int steps, int parts, const Body& body) {
    const i64 total = i64(tiles) * steps, end = begin(blockIdx.x + 1, total, parts);
#pragma unroll 1
    for (i64 step = begin(blockIdx.x, total, parts); step < end;) {
      const u32 tile = u32(step / steps);
      const int first = int(step - i64(tile) * steps), count = int(min(i64(steps - first), end - step));
      // Only a block's first segment begins within a tile, and only its last one ends within a tile that it began.
      body(Segment{tile, first, count, count == steps ? -1 : 2 * i64(blockIdx.x) + (first == 0)});
      step += count;
      if (step < end) __syncthreads();  // all have finished with the shared memory that the next segment overwrites
    }
  }
  static __device__ __forceinline__ Slots slots_of(u32 tile, int tiles, int steps, int parts) {
    const i64 total = i64(tiles) * steps, step = i64(tile) * steps;
    const int first = owner(step, total, parts), last = owner(step + steps - 1, total, parts);
    return {2 * i64(first) + 1, 2 * i64(first + 1), 2, first == last ? 0 : last - first + 1};
  }
};

// Destination of a segment's partial sum: a slot has room for all columns of a tile; rows beyond c are not stored.
template <int BM, int BN, class Sum>
__device__ __forceinline__ Target<Sum> slot_target(Sum* partial, i64 slot, int rows) {
  return {partial + slot * (BM * BN), BN, rows, BN};
}
template <int BN, class Sum>
__device__ __forceinline__ Finish<Sum, Identity, false> keep_sum() {
  return {nullptr, BN};
}

// End of a segment, in elements of k.
template <int BK>
__device__ __forceinline__ int end_of(const Segment& segment, int steps, int k) {
  return segment.first + segment.count == steps ? k : (segment.first + segment.count) * BK;
}

constexpr int FINISH_THREADS = 128, FINISH_ROWS = 16;

// c = epilogue(sum of the slots), FINISH_ROWS of one tile per block. C has the constants of the product.
template <class C>
__global__ void __launch_bounds__(FINISH_THREADS)
finish_tiles(const Wide<typename C::In>* __restrict__ partial, const typename C::Out* __restrict__ bias,
             const typename C::Out* __restrict__ residual, typename C::Out* __restrict__ c, int m, int n, int k,
             int group_m, int tiles, int parts) {
  using Out = typename C::Out;
  using Sum = Wide<typename C::In>;
  constexpr int WIDTH = C::VEC_C < 4 ? C::VEC_C : 4, PER_ROW = C::BN / WIDTH, SLICES = C::BM / FINISH_ROWS;
  const u32 index = blockIdx.x / SLICES;
  const Slots slots = C::Division::slots_of(index, tiles, tiles_of(k, C::BK), parts);
  const TileIndex tile = tile_at(index, tiles_of(m, C::BM), tiles_of(n, C::BN), group_m);
  const int row0 = tile.m * C::BM, column0 = tile.n * C::BN, slice = int(blockIdx.x % SLICES) * FINISH_ROWS;
  const i64 corner = tile.batch * (i64(m) * n) + i64(row0) * n + column0;
  const FinishOf<C> finish = {bias + column0, n - column0, residual + corner, n};
  if (slots.count == 0) return;  // c is complete already
  for (int at = threadIdx.x; at < FINISH_ROWS * PER_ROW; at += FINISH_THREADS) {
    const int row = slice + at / PER_ROW, column = at % PER_ROW * WIDTH;
    if (row >= m - row0 || column >= n - column0) continue;
    Vec<Sum, WIDTH> sum = {};
#pragma unroll 4
    for (int i = 0; i < slots.count; ++i) {
      const Vec<Sum, WIDTH> part = load_vec<WIDTH>(partial + slots.at(i) * (C::BM * C::BN) + row * C::BN + column);
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) sum.at[e] += part.at[e];
    }
    const Vec<float, WIDTH> bias_values = finish.template bias_of<WIDTH>(column);
    const Vec<Out, WIDTH> added = finish.template residual_of<WIDTH>(row, column);
    Vec<Out, WIDTH> wide;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) wide.at[e] = finish(sum.at[e], bias_values.at[e], added.at[e]);
    store_vec(c + corner + i64(row) * n + column, wide);
  }
}
