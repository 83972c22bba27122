#pragma once
// Common parts of every matrix product around its main loop: the tile of a block, and the epilogue of a sum.
// Needs types.cuh and an activation of epilogue.cuh.

// Dynamic shared memory; 128-byte aligned, so that elements are in the banks that layouts expect.
__device__ __forceinline__ u8* dynamic_shared() {
  extern __shared__ __align__(128) u8 bytes[];
  return bytes;
}

// ---- which tile ------------------------------------------------------------------------------------------

struct TileIndex {
  int batch, m, n;
};

// Tile number `index`. Tiles are numbered in groups of `group_m` rows of tiles, column by column, so that concurrent
// blocks share rows of A and columns of B in L2.
__device__ __forceinline__ TileIndex tile_at(u32 index, int tiles_m, int tiles_n, int group_m) {
  // Unsigned divisions are shorter; the grid has fewer than 2^31 blocks, so no product here overflows.
  const u32 per_product = u32(tiles_m) * u32(tiles_n);
  const u32 batch = index / per_product, tile = index - batch * per_product;
  const u32 height = min(u32(group_m), u32(tiles_m)), per_group = height * u32(tiles_n);
  const u32 first = tile / per_group * height, within = tile % per_group;
  const u32 rows = min(height, u32(tiles_m) - first);  // the last group may be lower
  return {int(batch), int(first + within % rows), int(within / rows)};
}

// The tile of this block in a one-dimensional grid (y and z are limited to 65535).
__device__ __forceinline__ TileIndex tile_of_block(int tiles_m, int tiles_n, int group_m) {
  return tile_at(blockIdx.x, tiles_m, tiles_n, group_m);
}

// Number of tiles of `tile` that cover `extent` (1 or more); does not overflow near 2^31.
__device__ __forceinline__ int tiles_of(int extent, int tile) { return (extent - 1) / tile + 1; }

// First element of the tile that starts at row (or column) `x` of op(A) (or op(B)) and at `k`; `pitch` is the distance
// between lines of the matrix as stored, in elements.
template <bool K_CONTIGUOUS, class T>
__device__ __forceinline__ const T* tile_corner(const T* matrix, int x, int k, i64 pitch) {
  return matrix + (K_CONTIGUOUS ? x * pitch + k : k * pitch + x);
}
template <bool K_CONTIGUOUS, class T>
__device__ __forceinline__ const T* tile_corner(const T* matrix, int x, i64 pitch) {
  return tile_corner<K_CONTIGUOUS>(matrix, x, 0, pitch);
}

// Assignment of a tile's accesses to threads: thread by thread along a line of PER_LINE accesses, then line by line.
// A thread's access i is a constant step from its first, so that one pointer serves all of them.
template <int LINES, int PER_LINE, int THREADS>
struct LineWalk {
  static constexpr int TOTAL = LINES * PER_LINE, COUNT = ceil_div(TOTAL, THREADS);  // per block, per thread
  static_assert(PER_LINE % THREADS == 0 || THREADS % PER_LINE == 0, "steps are constant");

  static __device__ __forceinline__ int line() { return int(threadIdx.x) / PER_LINE; }
  static __device__ __forceinline__ int place() { return int(threadIdx.x) % PER_LINE; }
  static __device__ __forceinline__ constexpr int line_step(int i) { return i * THREADS / PER_LINE; }
  static __device__ __forceinline__ constexpr int place_step(int i) { return i * THREADS % PER_LINE; }
  // Whether this thread has access i: threads may outnumber the accesses of a small tile.
  static __device__ __forceinline__ bool takes(int i) {
    return TOTAL % THREADS == 0 || int(threadIdx.x) + i * THREADS < TOTAL;
  }
};

// Tiles of two matrices B that are multiplied by the same tiles of A. They move together; in shared memory the second
// tile follows the first.
template <class Tile>
struct TilePair : Tile {
  static constexpr int ELEMENTS = 2 * Tile::ELEMENTS;
  Tile second;

  __device__ __forceinline__ TilePair(const Tile& one, const Tile& other) : Tile(one), second(other) {}
  // Interface of a tile that is copied by cp.async,
  template <class T>
  __device__ __forceinline__ void copy(T* shared, int k_left) {
    Tile::copy(shared, k_left);
    second.copy(shared + Tile::ELEMENTS, k_left);
  }
  // and of a tile that goes through registers.
  __device__ __forceinline__ void load_part(int count) {
    Tile::load_part(count);
    second.load_part(count);
  }
  __device__ __forceinline__ void load(bool any) {
    Tile::load(any);
    second.load(any);
  }
  template <class T>
  __device__ __forceinline__ void store(T* shared) const {
    Tile::store(shared);
    second.store(shared + Tile::ELEMENTS);
  }
};

// Number of matrices B of a tile.
template <class Tile>
constexpr int MATRICES_OF = 1;
template <class Tile>
constexpr int MATRICES_OF<TilePair<Tile>> = 2;

// ---- epilogue ----------------------------------------------------------------------------------------------

// The epilogue: adds the bias of a column, applies the activation and adds the residual, each if present, all in f32,
// and rounds. Integer sums are not changed.
template <class Out, class Activation, bool HAS_BIAS, bool HAS_RESIDUAL = false>
struct Finish {
  // Accesses to c whose parts of the residual a thread reads together; the code is repeated for each.
  static constexpr int AT_ONCE = !HAS_RESIDUAL ? 1 : Activation::IS_LONG ? 2 : 4;

  const Out* bias;                // at the tile's first column; not read without HAS_BIAS
  int columns;                    // columns of the tile within c
  const Out* residual = nullptr;  // at the tile's first element; not read without HAS_RESIDUAL
  i64 pitch = 0;                  // elements between rows of the residual

  // The bias of WIDTH neighbours; WIDTH divides the number of columns, so that all or none of them are within c.
  template <int WIDTH>
  __device__ __forceinline__ Vec<float, WIDTH> bias_of(int column) const {
    Vec<float, WIDTH> values = {};
    if constexpr (HAS_BIAS) {
      if (column < columns) {
        const Vec<Out, WIDTH> stored = load_vec<WIDTH>(bias + column);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) values.at[e] = to_float(stored.at[e]);
      }
    }
    return values;
  }
  // The residual of WIDTH neighbours within c, as stored: several loads may be in flight.
  template <int WIDTH>
  __device__ __forceinline__ Vec<Out, WIDTH> residual_of(int row, int column) const {
    if constexpr (HAS_RESIDUAL) return load_vec<WIDTH>(residual + row * pitch + column);
    return {};
  }
  __device__ __forceinline__ Out operator()(float sum, float bias_value, Out residual_value) const {
    const float value = Activation()(HAS_BIAS ? sum + bias_value : sum);
    return from_float<Out>(HAS_RESIDUAL ? value + to_float(residual_value) : value);
  }
  __device__ __forceinline__ i32 operator()(i32 sum, float, Out) const { return sum; }
};

// The epilogue of the workload C.
template <class C>
using FinishOf = Finish<typename C::Out, typename C::Activation, C::HAS_BIAS, C::HAS_RESIDUAL>;

// Destination of a tile of results: its corner in a row-major matrix, and the part of the tile within that matrix.
template <class Out>
struct Target {
  Out* corner;
  i64 pitch;  // elements between rows
  int rows, columns;
};
