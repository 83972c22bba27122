#pragma once
// Matrix product of a block on the FP32 units: global memory -> registers -> shared memory (as f32, or i32 for
// integers) -> registers -> multiply-adds. Needs types.cuh and gemm.cuh.
//
// A tile is X x K: X rows of op(A), or X columns of op(B), by K of the summed dimension. In shared memory it is
// [K][PITCH] of Wide<T>, so that the values a thread multiplies at one k are neighbours.

// A tile that moves along K, and the part of it that one thread carries to shared memory, VEC elements per access.
template <class T, int X, int K, bool K_CONTIGUOUS, int VEC, int THREADS>
struct RegisterTile {
  using Walk = LineWalk<K_CONTIGUOUS ? X : K, (K_CONTIGUOUS ? K : X) / VEC, THREADS>;
  // Where k is contiguous the tile is transposed: 4 more elements per line spread the stores over the banks.
  static constexpr int PITCH = X + (K_CONTIGUOUS ? 4 : 0), ELEMENTS = K * PITCH;
  static_assert((K_CONTIGUOUS ? K : X) % VEC == 0, "an access stays within its line");

  const T* source;  // of this thread's first access
  i64 pitch;        // elements between lines in global memory
  int x_room;       // extent of X beyond that access
  Vec<T, VEC> held[Walk::COUNT];

  // `corner` is the first tile's first element, `x_left` the extent of X from there on.
  __device__ __forceinline__ RegisterTile(const T* corner, i64 line_pitch, int x_left)
      : source(corner + Walk::line() * line_pitch + Walk::place() * VEC),
        pitch(line_pitch),
        x_room(x_left - (K_CONTIGUOUS ? Walk::line() : Walk::place() * VEC)) {}

  // Loads a tile with `count` of K and moves on by `count`; elements beyond that or beyond X are zero.
  __device__ __forceinline__ void load_part(int count) {
    const int k_room = count - (K_CONTIGUOUS ? Walk::place() * VEC : Walk::line());
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) {
      // An access is either inside or outside: VEC divides the contiguous extent.
      fetch(i, (K_CONTIGUOUS ? Walk::place_step(i) * VEC : Walk::line_step(i)) < k_room);
    }
    source += K_CONTIGUOUS ? i64(count) : count * pitch;
  }

  // Loads a tile with all of K and moves on; without `any`, the tile is zero.
  __device__ __forceinline__ void load(bool any) {
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) fetch(i, any);
    source += K_CONTIGUOUS ? i64(K) : K * pitch;
  }

  __device__ __forceinline__ void store(Wide<T>* shared) const {
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) {
      const int line = Walk::line() + Walk::line_step(i), at = (Walk::place() + Walk::place_step(i)) * VEC;
      if (!Walk::takes(i)) continue;
      if constexpr (K_CONTIGUOUS) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) shared[(at + j) * PITCH + line] = widen(held[i].at[j]);
      } else {
        constexpr int WIDTH = VEC < 4 ? VEC : 4;
#pragma unroll
        for (int j = 0; j < VEC; j += WIDTH) {
          Vec<Wide<T>, WIDTH> wide;
#pragma unroll
          for (int e = 0; e < WIDTH; ++e) wide.at[e] = widen(held[i].at[j + e]);
          store_vec(shared + line * PITCH + at + j, wide);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void fetch(int i, bool inside_k) {
    const int line = Walk::line_step(i), at = Walk::place_step(i) * VEC;
    if (Walk::takes(i) && inside_k && (K_CONTIGUOUS ? line : at) < x_room) {
      held[i] = load_vec<VEC>(source + line * pitch + at);
    } else {
#pragma unroll
      for (int j = 0; j < VEC; ++j) held[i].at[j] = T{};
    }
  }
};

// Layout of threads over BM x BN results: a warp has LANES_N lanes along n and the others along m, a thread TM x TN
// results in chunks of up to 4 x 4, so that lanes read neighbouring chunks of shared memory.
template <int BM, int BN, int TM, int TN, int LANES_N>
struct ThreadGrid {
  static constexpr int M = TM, N = TN, LANES_M = 32 / LANES_N;
  static constexpr int CHUNK_M = TM < 4 ? TM : 4, CHUNK_N = TN < 4 ? TN : 4;
  static constexpr int STEP_M = LANES_M * CHUNK_M, STEP_N = LANES_N * CHUNK_N;  // from chunk to chunk
  static constexpr int WARPS_M = BM / (LANES_M * TM), WARPS_N = BN / (LANES_N * TN);
  static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
  static_assert(WARPS_M * LANES_M * TM == BM && WARPS_N * LANES_N * TN == BN, "warps cover the tile");

  // First row and column of this thread in the tile; chunk c starts c * STEP further.
  static __device__ __forceinline__ int row() {
    return int(threadIdx.x) / 32 / WARPS_N * (LANES_M * TM) + int(threadIdx.x) % 32 / LANES_N * CHUNK_M;
  }
  static __device__ __forceinline__ int column() {
    return int(threadIdx.x) / 32 % WARPS_N * (LANES_N * TN) + int(threadIdx.x) % LANES_N * CHUNK_N;
  }
};

template <int COUNT, int CHUNK, int STEP, class T>
__device__ __forceinline__ void read_chunks(T (&values)[COUNT], const T* shared) {
#pragma unroll
  for (int i = 0; i < COUNT; i += CHUNK) {
    const Vec<T, CHUNK> chunk = load_vec<CHUNK>(shared + i / CHUNK * STEP);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) values[i + j] = chunk.at[j];
  }
}

// sums += tile of A times tile of B, both in shared memory in the layout of RegisterTile. With MATRICES 2 a second tile
// of B follows the first one, and its sums follow those of the first.
template <class Grid, int K, int PITCH_A, int PITCH_B, int MATRICES = 1, class T>
__device__ __forceinline__ void multiply_tiles(T (&sums)[Grid::M][MATRICES * Grid::N], const T* a, const T* b) {
  T x[2][Grid::M], y[2][MATRICES][Grid::N];
  const auto read = [&](int k) {
    read_chunks<Grid::M, Grid::CHUNK_M, Grid::STEP_M>(x[k % 2], a + Grid::row() + k * PITCH_A);
#pragma unroll
    for (int z = 0; z < MATRICES; ++z)
      read_chunks<Grid::N, Grid::CHUNK_N, Grid::STEP_N>(y[k % 2][z], b + Grid::column() + (z * K + k) * PITCH_B);
  };
  read(0);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (k + 1 < K) read(k + 1);
#pragma unroll
    for (int i = 0; i < Grid::M; ++i)
#pragma unroll
      for (int j = 0; j < MATRICES * Grid::N; ++j)
        sums[i][j] = multiply_add(x[k % 2][i], y[k % 2][j / Grid::N][j % Grid::N], sums[i][j]);
  }
}

// The main loop. sums += a row of tiles of A times a column of tiles of B, over the next `k` of K. With STAGES 2 tiles
// alternate between two buffers of shared memory, which saves one of two barriers per tile.
template <class Grid, int STAGES, int K, class TileA, class TileB, class T>
__device__ __forceinline__ void multiply_buffered(T (&sums)[Grid::M][MATRICES_OF<TileB> * Grid::N], TileA& of_a,
                                                  TileB& of_b, int k, T* shared) {
  constexpr int STAGE = TileA::ELEMENTS + TileB::ELEMENTS;
  if (k <= 0) return;
  const int part = (k - 1) % K + 1;  // the first step may be short
  of_a.load_part(part);
  of_b.load_part(part);
  of_a.store(shared);
  of_b.store(shared + TileA::ELEMENTS);
  __syncthreads();

  int stage = 0;  // offset of the tile that is multiplied
#pragma unroll 1
  for (int k_left = k - part; k_left >= 0; k_left -= K) {
    // The next tile is loaded while this one is multiplied. After the last one it is zeros, which nobody reads: a
    // branch around the loads would cost registers.
    of_a.load(k_left > 0);
    of_b.load(k_left > 0);
    const T* const here = shared + stage;
    multiply_tiles<Grid, K, TileA::PITCH, TileB::PITCH, MATRICES_OF<TileB>>(sums, here, here + TileA::ELEMENTS);
    if (STAGES == 2)
      stage = STAGE - stage;
    else
      __syncthreads();  // all have read the only buffer
    of_a.store(shared + stage);
    of_b.store(shared + stage + TileA::ELEMENTS);
    __syncthreads();
  }
}

// Finishes and stores a thread's results, VEC elements per access (VEC divides the number of columns).
template <class Grid, int VEC, class Sum, class Out, class Finishing>
__device__ __forceinline__ void store_sums(const Sum (&sums)[Grid::M][Grid::N], const Target<Out>& target,
                                           const Finishing& finish) {
  constexpr int WIDTH = VEC < Grid::CHUNK_N ? VEC : Grid::CHUNK_N;
#pragma unroll
  for (int j = 0; j < Grid::N; j += WIDTH) {
    const int column = Grid::column() + j / Grid::CHUNK_N * Grid::STEP_N + j % Grid::CHUNK_N;
    if (column >= target.columns) continue;
    const Vec<float, WIDTH> bias = finish.template bias_of<WIDTH>(column);
#pragma unroll
    for (int i = 0; i < Grid::M; ++i) {
      const int row = Grid::row() + i / Grid::CHUNK_M * Grid::STEP_M + i % Grid::CHUNK_M;
      if (row >= target.rows) continue;
      const Vec<Out, WIDTH> residual = finish.template residual_of<WIDTH>(row, column);
      Vec<Out, WIDTH> wide;
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) wide.at[e] = finish(sums[i][j + e], bias.at[e], residual.at[e]);
      store_vec(target.corner + row * target.pitch + column, wide);
    }
  }
}
