#pragma once
// Matrix product of a block on tensor cores by mma.sync (sm_80 on): global memory -> shared memory by cp.async, several
// tiles ahead -> fragments by ldmatrix -> mma. Needs types.cuh, ptx.cuh and gemm.cuh.
//
// A tile is X x K: X rows of op(A), or X columns of op(B), by K of the summed dimension. In shared memory it keeps the
// order of global memory: lines of K elements where k is contiguous there, else lines of X elements.

// Extent of one mma along K: 32 bytes, which is 32 elements of e4m3 or i8, 16 of f16 or bf16, 8 of tf32 (stored as
// f32).
template <class T>
constexpr int MMA_K = 32 / int(sizeof(T));

// Offset of element (line, at) of a tile: 16-byte chunks of a line are permuted by the line, so that a warp's
// simultaneous reads are in different banks. STEP 1 is for ldmatrix (8 lines, one chunk of each), STEP 2 for reads of 4
// lines, two chunks of each.
template <class T, int LENGTH, int STEP>
struct Swizzled {
  static constexpr int CHUNK = PER_16_BYTES<T>, CHUNKS = LENGTH / CHUNK;
  static constexpr int PERIOD = CHUNKS < 8 ? CHUNKS : 8, LINES_PER_128_BYTES = 8 / PERIOD;
  static_assert(LENGTH % CHUNK == 0 && 8 % PERIOD == 0 && PERIOD % STEP == 0, "whole chunks, a power of two of them");

  static __device__ __forceinline__ int offset(int line, int at) {
    const int moved = at / CHUNK ^ line / LINES_PER_128_BYTES % (PERIOD / STEP) * STEP;
    return line * LENGTH + moved * CHUNK + at % CHUNK;
  }
};

// The same for 8-bit elements that ldmatrix transposes: it reads the lines 0, 1, 4, 5, 8, … or 2, 3, 6, 7, … together.
template <class T, int LENGTH>
struct SwizzledInPairs : Swizzled<T, LENGTH, 1> {
  using Whole = Swizzled<T, LENGTH, 1>;

  static __device__ __forceinline__ int offset(int line, int at) {
    const int rank = line / 4 * 2 + line % 2;
    const int moved = at / Whole::CHUNK ^ rank / Whole::LINES_PER_128_BYTES % Whole::PERIOD;
    return line * LENGTH + moved * Whole::CHUNK + at % Whole::CHUNK;
  }
};

template <class T, int LENGTH, bool K_CONTIGUOUS>
struct LayoutOf {
  using type = Swizzled<T, LENGTH, K_CONTIGUOUS || sizeof(T) == 2 ? 1 : 2>;
};
template <int LENGTH>
struct LayoutOf<e4m3_t, LENGTH, false> {
  using type = SwizzledInPairs<e4m3_t, LENGTH>;
};
template <int LENGTH>
struct LayoutOf<i8, LENGTH, false> {
  using type = SwizzledInPairs<i8, LENGTH>;
};

// ---- global to shared memory -------------------------------------------------------------------------------

// A tile that moves along K, and one thread's copies of it, VEC elements each.
template <class T, int X, int K, bool K_CONTIGUOUS, int VEC, int THREADS>
struct AsyncTile {
  static constexpr bool ALONG_K = K_CONTIGUOUS;
  static constexpr int STEPS = K / MMA_K<T>;
  static constexpr int LENGTH = K_CONTIGUOUS ? K : X, ELEMENTS = X * K, BYTES = VEC * int(sizeof(T));
  static constexpr bool BY_LDMATRIX = K_CONTIGUOUS || sizeof(T) <= 2;  // ldmatrix transposes 16-bit elements
  using Walk = LineWalk<ELEMENTS / LENGTH, LENGTH / VEC, THREADS>;
  using Layout = typename LayoutOf<T, LENGTH, K_CONTIGUOUS>::type;

  const T* source;  // of this thread's first copy
  i64 pitch;        // elements between lines in global memory
  int x_room;       // extent of X beyond that copy

  // `corner` is the first tile's first element, `x_left` the extent of X from there on.
  __device__ __forceinline__ AsyncTile(const T* corner, i64 line_pitch, int x_left)
      : source(corner + Walk::line() * line_pitch + Walk::place() * VEC),
        pitch(line_pitch),
        x_room(x_left - (K_CONTIGUOUS ? Walk::line() : Walk::place() * VEC)) {}

  // Copies the tile and moves on. Elements beyond `k_left` or beyond X become zero, which adds nothing to sums.
  __device__ __forceinline__ void copy(T* shared, int k_left) {
    const int k_room = k_left - (K_CONTIGUOUS ? Walk::place() * VEC : Walk::line());
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) {
      if (!Walk::takes(i)) continue;
      const int line = Walk::line_step(i), at = Walk::place_step(i) * VEC;
      // A copy is either inside or outside: VEC divides the contiguous extent.
      const bool inside = (K_CONTIGUOUS ? line : at) < x_room && (K_CONTIGUOUS ? at : line) < k_room;
      T* const target = shared + Layout::offset(Walk::line() + line, Walk::place() * VEC + at);
      const T* const from = source + line * pitch + at;
      if constexpr (BYTES == 16)
        cp_async_cg(target, from, inside ? BYTES : 0);
      else
        cp_async_ca<BYTES>(target, from, inside ? BYTES : 0);
    }
    source += K_CONTIGUOUS ? i64(K) : K * pitch;
  }
};

// ---- shared memory to fragments ----------------------------------------------------------------------------

// load_fragment for 8-bit elements in lines along X. ldmatrix transposes pairs of neighbours in X: a lane gets k from
// 4t to 4t + 3 of x = 2g and of x = 2g + 1, where the operand has g and g + 8 of X. `straighten` reorders the sums
// afterwards.
template <class Tile, bool OF_B, class T>
__device__ __forceinline__ void load_pairs(u32 (&registers)[4], const T* tile, int x, int k) {
  const int matrix = int(threadIdx.x) % 32 / 8, row = int(threadIdx.x) % 8;
  const int line = k + matrix / 2 * 16 + row / 2 * 4 + matrix % 2 * 2 + row % 2;
  u32 pairs[4];
  ldmatrix_x4_trans(pairs, tile + Tile::Layout::offset(line, x));
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of K
    registers[OF_B ? half : 2 * half] = pick_bytes<0x6420>(pairs[2 * half], pairs[2 * half + 1]);
    registers[OF_B ? half + 2 : 2 * half + 1] = pick_bytes<0x7531>(pairs[2 * half], pairs[2 * half + 1]);
  }
}

// Four registers hold X 16 by MMA_K of a tile, from (x, k) on: an operand of A (register 1 is the upper half of X, 2
// that of K), or, with OF_B, two operands of B (register 1 is the upper half of K, 2 that of X).
template <class Tile, bool OF_B, class T>
__device__ __forceinline__ void load_fragment(u32 (&registers)[4], const T* tile, int x, int k) {
  using Layout = typename Tile::Layout;
  constexpr int HALF_K = MMA_K<T> / 2;
  const int lane = threadIdx.x % 32;
  if constexpr (!Tile::ALONG_K && sizeof(T) == 1) {
    load_pairs<Tile, OF_B>(registers, tile, x, k);
  } else if constexpr (Tile::BY_LDMATRIX) {
    const int matrix = lane / 8, row = lane % 8;
    const int x_half = OF_B ? matrix / 2 : matrix % 2, k_half = OF_B ? matrix % 2 : matrix / 2;
    if constexpr (Tile::ALONG_K)
      ldmatrix_x4(registers, tile + Layout::offset(x + 8 * x_half + row, k + HALF_K * k_half));
    else
      ldmatrix_x4_trans(registers, tile + Layout::offset(k + HALF_K * k_half + row, x + 8 * x_half));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int x_half = OF_B ? i / 2 : i % 2, k_half = OF_B ? i % 2 : i / 2;
      const T element = tile[Layout::offset(k + HALF_K * k_half + lane % 4, x + 8 * x_half + lane / 4)];
      registers[i] = __float_as_uint(element);
    }
  }
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) registers[i] = to_tf32(__uint_as_float(registers[i]));
  }
}

template <class T>
__device__ __forceinline__ void mma(Wide<T> (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (sizeof(T) == 4)
    mma_m16n8k8_tf32(d, a, b);
  else if constexpr (sizeof(T) == 2)
    mma_m16n8k16<T>(d, a, b);
  else
    mma_m16n8k32<T>(d, a, b);
}

// Layout of warps over BM x BN results; each warp has M x N of them, in operands of 16 x 8.
template <int BM, int BN, int WARPS_M, int WARPS_N>
struct WarpGrid {
  static constexpr int M = BM / WARPS_M, N = BN / WARPS_N, THREADS = 32 * WARPS_M * WARPS_N;
  static_assert(M * WARPS_M == BM && N * WARPS_N == BN && M % 16 == 0 && N % 16 == 0, "warps cover the tile");

  static __device__ __forceinline__ int row() { return int(threadIdx.x) / 32 / WARPS_N * M; }
  static __device__ __forceinline__ int column() { return int(threadIdx.x) / 32 % WARPS_N * N; }
};

// Columns of sums per warp: those of a second matrix B follow those of the first.
template <class Grid, class TileB>
constexpr int SUM_COLUMNS = MATRICES_OF<TileB>* Grid::N;

// sums += tile of A times tile of B. Loads the fragments of the next step while it multiplies this one's.
template <class Grid, class TileA, class TileB, class T>
__device__ __forceinline__ void mma_tiles(Wide<T> (&sums)[Grid::M / 16][SUM_COLUMNS<Grid, TileB> / 8][4], const T* a,
                                          const T* b) {
  constexpr int STEPS = TileA::STEPS, IN_M = Grid::M / 16, IN_N = SUM_COLUMNS<Grid, TileB> / 16;
  constexpr int IN_MATRIX = Grid::N / 16, MATRIX = TileB::ELEMENTS / MATRICES_OF<TileB>;
  u32 of_a[2][IN_M][4], of_b[2][IN_N][4];
  const auto load = [&](int step) {
#pragma unroll
    for (int i = 0; i < IN_M; ++i)
      load_fragment<TileA, false>(of_a[step % 2][i], a, Grid::row() + 16 * i, step * MMA_K<T>);
#pragma unroll
    for (int j = 0; j < IN_N; ++j)
      load_fragment<TileB, true>(of_b[step % 2][j], b + j / IN_MATRIX * MATRIX,
                                 Grid::column() + j % IN_MATRIX * 16, step * MMA_K<T>);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (step + 1 < STEPS) load(step + 1);
#pragma unroll
    for (int i = 0; i < IN_M; ++i)
#pragma unroll
      for (int j = 0; j < 2 * IN_N; ++j) {
        const u32* const pair = of_b[step % 2][j / 2] + 2 * (j % 2);
        const u32 operand[2] = {pair[0], pair[1]};
        mma<T>(sums[i][j], of_a[step % 2][i], operand);
      }
  }
}

// One of two values of another lane.
template <class Sum>
__device__ __forceinline__ Sum of_lane(int lane, bool second, Sum a, Sum b) {
  const Sum of_a = __shfl_sync(0xffffffffu, a, lane), of_b = __shfl_sync(0xffffffffu, b, lane);
  return second ? of_b : of_a;
}

// Reorders sums if an operand was loaded by load_pairs: row 2g of 16 is in the place of row g and row 2g + 1 in the
// place of row g + 8; columns likewise.
template <class Grid, bool A_IN_PAIRS, bool B_IN_PAIRS, class Sum>
__device__ __forceinline__ void straighten(Sum (&sums)[Grid::M / 16][Grid::N / 8][4]) {
  const int g = int(threadIdx.x) % 32 / 4, t = int(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < Grid::M / 16; ++i) {
    if constexpr (A_IN_PAIRS) {
#pragma unroll
      for (int j = 0; j < Grid::N / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Sum even = sums[i][j][e], odd = sums[i][j][e + 2];
          sums[i][j][e] = of_lane(g / 2 * 4 + t, g % 2 != 0, even, odd);
          sums[i][j][e + 2] = of_lane((g / 2 + 4) * 4 + t, g % 2 != 0, even, odd);
        }
    }
    if constexpr (B_IN_PAIRS) {
      // Two neighbouring operands: of columns 4t to 4t + 3 the first has the even ones, the second the odd ones.
#pragma unroll
      for (int j = 0; j < Grid::N / 8; j += 2)
#pragma unroll
        for (int half = 0; half < 4; half += 2) {  // of the rows
          const Sum even[2] = {sums[i][j][half], sums[i][j][half + 1]};
          const Sum odd[2] = {sums[i][j + 1][half], sums[i][j + 1][half + 1]};
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const int lane = g * 4 + side * 2 + t / 2;
            sums[i][j + side][half] = of_lane(lane, t % 2 != 0, even[0], even[1]);
            sums[i][j + side][half + 1] = of_lane(lane, t % 2 != 0, odd[0], odd[1]);
          }
        }
    }
  }
}

// Prologue hook of the main loop, for a thread's own copies after they have arrived, before the barrier that makes them
// visible to the others. Without a prologue it does nothing; prologue_mma.cuh overloads it.
template <class Tile, class T>
__device__ __forceinline__ void arrived(Tile&, T*, int) {}

// The main loop. sums += a row of tiles of A times a column of tiles of B, over the next `k` of K. STAGES buffers of
// shared memory rotate: one is multiplied while copies fill the others.
template <class Grid, int STAGES, int K, class TileA, class TileB, class T>
__device__ __forceinline__ void multiply_ahead(Wide<T> (&sums)[Grid::M / 16][SUM_COLUMNS<Grid, TileB> / 8][4],
                                               TileA& of_a, TileB& of_b, int k, T* shared) {
  constexpr int STAGE = TileA::ELEMENTS + TileB::ELEMENTS;
  int to_copy = k, filled = 0;  // of k; the buffer to fill next
  // A group of copies is closed even if it is empty: the wait counts groups.
  const auto copy_next = [&] {
    if (to_copy > 0) {
      T* const buffer = shared + filled * STAGE;
      of_a.copy(buffer, to_copy);
      of_b.copy(buffer + TileA::ELEMENTS, to_copy);
      to_copy -= K;
    }
    filled = filled + 1 == STAGES ? 0 : filled + 1;
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) copy_next();

  int read = 0;  // the buffer to multiply next
#pragma unroll 1
  for (int k_left = k; k_left > 0; k_left -= K) {
    cp_async_wait<STAGES - 2>();
    T* const buffer = shared + read * STAGE;
    arrived(of_a, buffer, k_left);
    __syncthreads();  // this tile is visible to all, and all have read the buffer to fill next
    copy_next();
    mma_tiles<Grid, TileA, TileB>(sums, buffer, buffer + TileA::ELEMENTS);
    read = read + 1 == STAGES ? 0 : read + 1;
  }
}

// ---- results -----------------------------------------------------------------------------------------------

// Stores results directly from the fragments: a pair of neighbours per thread, in one access where VEC allows.
template <class Grid, int VEC, class Sum, class Out, class Finishing>
__device__ __forceinline__ void store_fragments(const Sum (&sums)[Grid::M / 16][Grid::N / 8][4],
                                                const Target<Out>& target, const Finishing& finish) {
  constexpr int WIDTH = VEC < 2 ? 1 : 2;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Grid::N / 8; ++j)
#pragma unroll
    for (int first = 0; first < 2; first += WIDTH) {
      const int column = Grid::column() + 8 * j + lane % 4 * 2 + first;
      if (column >= target.columns) continue;
      const Vec<float, WIDTH> bias = finish.template bias_of<WIDTH>(column);
#pragma unroll
      for (int i = 0; i < Grid::M / 8; ++i) {
        const int row = Grid::row() + 8 * i + lane / 4;
        if (row >= target.rows) continue;
        const Vec<Out, WIDTH> residual = finish.template residual_of<WIDTH>(row, column);
        Vec<Out, WIDTH> wide;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e)
          wide.at[e] = finish(sums[i / 2][j][i % 2 * 2 + first + e], bias.at[e], residual.at[e]);
        store_vec(target.corner + row * target.pitch + column, wide);
      }
    }
}

// Sums per warp for staging 16 rows of its results: 8 more per row spread them over the banks.
template <class Grid>
constexpr int STAGING_PITCH = Grid::N + 8;
template <class Grid>
constexpr int STAGING_FLOATS = 16 * STAGING_PITCH<Grid>;

// Stores results through shared memory, 16 rows of the warp at a time, so that accesses to global memory are contiguous
// and VEC elements wide. `staging` belongs to the warp: STAGING_FLOATS<Grid> sums, 16-byte aligned.
template <class Grid, int VEC, class Sum, class Out, class Finishing>
__device__ __forceinline__ void store_staged(const Sum (&sums)[Grid::M / 16][Grid::N / 8][4], Sum* staging,
                                             const Target<Out>& target, const Finishing& finish) {
  constexpr int PITCH = STAGING_PITCH<Grid>, PER_ROW = Grid::N / VEC, WIDTH = VEC < 4 ? VEC : 4;
  constexpr int ACCESSES = 16 * PER_ROW, TURNS = ACCESSES / 32;
  constexpr int AT_ONCE = Finishing::AT_ONCE < TURNS ? Finishing::AT_ONCE : TURNS;  // all are powers of two
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Grid::M / 16; ++i) {
#pragma unroll
    for (int j = 0; j < Grid::N / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_vec(staging + (lane / 4 + 8 * half) * PITCH + 8 * j + lane % 4 * 2,
                  Vec<Sum, 2>{sums[i][j][2 * half], sums[i][j][2 * half + 1]});
    __syncwarp();
    // Not unrolled: the code of an activation is long, and its data is in shared memory rather than in registers.
#pragma unroll 1
    for (int first = lane; first < ACCESSES; first += 32 * AT_ONCE) {
      const auto row = [&](int turn) { return Grid::row() + 16 * i + (first + 32 * turn) / PER_ROW; };
      const auto column = [&](int turn) { return Grid::column() + (first + 32 * turn) % PER_ROW * VEC; };
      const auto inside = [&](int turn) { return row(turn) < target.rows && column(turn) < target.columns; };
      Vec<Out, VEC> residual[AT_ONCE] = {};
#pragma unroll
      for (int turn = 0; turn < AT_ONCE; ++turn)
        if (inside(turn)) residual[turn] = finish.template residual_of<VEC>(row(turn), column(turn));
#pragma unroll
      for (int turn = 0; turn < AT_ONCE; ++turn) {
        if (!inside(turn)) continue;
        const Sum* const staged = staging + (row(turn) - Grid::row() - 16 * i) * PITCH + column(turn) - Grid::column();
        const Vec<float, VEC> bias = finish.template bias_of<VEC>(column(turn));
        Vec<Out, VEC> wide;
#pragma unroll
        for (int j = 0; j < VEC; j += WIDTH) {
          const Vec<Sum, WIDTH> part = load_vec<WIDTH>(staged + j);
#pragma unroll
          for (int e = 0; e < WIDTH; ++e)
            wide.at[j + e] = finish(part.at[e], bias.at[j + e], residual[turn].at[j + e]);
        }
        store_vec(target.corner + row(turn) * target.pitch + column(turn), wide);
      }
    }
    __syncwarp();
  }
}

// Stores a block's results, directly or, if STAGED, through `shared`, where the tiles were.
template <class Grid, bool STAGED, int VEC, class Sum, class Out, class Finishing>
__device__ __forceinline__ void store_results(const Sum (&sums)[Grid::M / 16][Grid::N / 8][4], void* shared,
                                              const Target<Out>& target, const Finishing& finish) {
  if constexpr (STAGED) {
    cp_async_wait<0>();
    __syncthreads();  // all have read the buffers, which now stage results
    Sum* const staging = static_cast<Sum*>(shared) + int(threadIdx.x) / 32 * STAGING_FLOATS<Grid>;
    store_staged<Grid, VEC>(sums, staging, target, finish);
  } else {
    store_fragments<Grid, VEC>(sums, target, finish);
  }
}
