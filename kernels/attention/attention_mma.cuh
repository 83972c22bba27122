#pragma once
// Attention of a warp on tensor cores by mma.sync (from sm_80): tiles of q, k and v by cp.async, scores and
// results in fragments. Needs types.cuh, ptx.cuh, gemm.cuh, gemm_mma.cuh, reduce.cuh, attention_forward.cuh
// and attention_fragment.cuh.

// Lines of LENGTH elements, a multiple of 16, padded by 16 bytes: the chunks of one position in eight lines are in
// different banks, and all addresses are one address plus constants. (A swizzle would save the 16 bytes, but need an
// address for each 16 elements of a line, and registers are scarcer here.)
template <class T, int LENGTH>
struct PaddedLines {
  static constexpr int PITCH = LENGTH + PER_16_BYTES<T>;
  static __device__ __forceinline__ int offset(int line, int at) { return line * PITCH + at; }
};

// A tile of LINES lines of q, k or v: HEAD_DIM elements each, and zeros up to DIM, a multiple of 16. As an operand, its
// summed dimension runs ALONG the lines (of q and k) or across them (of v).
template <class T, int LINES, int HEAD_DIM, bool ALONG>
struct LineTile {
  static constexpr int LENGTH = HEAD_DIM, DIM = ceil_div(HEAD_DIM, 16) * 16, CHUNKS = DIM / PER_16_BYTES<T>;
  static constexpr bool ALONG_K = ALONG, BY_LDMATRIX = true;
  using Layout = PaddedLines<T, DIM>;
  static constexpr int ELEMENTS = LINES * Layout::PITCH;

  // Copies the lines for which `exists` is true from the address `line_at`; others become zero and add nothing.
  template <int THREADS, class LineAt, class Exists>
  static __device__ __forceinline__ void copy(T* shared, const LineAt& line_at, const Exists& exists) {
    constexpr int COPIES = LINES * CHUNKS, EACH = ceil_div(COPIES, THREADS);
    constexpr bool STEADY = THREADS % CHUNKS == 0;  // a thread copies the same chunk of each of its lines
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int index = int(threadIdx.x) + i * THREADS;
      if (COPIES % THREADS != 0 && index >= COPIES) continue;
      const int line = STEADY ? int(threadIdx.x) / CHUNKS + i * (THREADS / CHUNKS) : index / CHUNKS;
      const int at = (STEADY ? int(threadIdx.x) % CHUNKS : index % CHUNKS) * PER_16_BYTES<T>;
      const bool there = exists(line) && (HEAD_DIM == DIM || at < HEAD_DIM);
      cp_async_cg(shared + Layout::offset(line, at), line_at(line) + at, there ? 16 : 0);
    }
  }
};

// Scores of ROWS rows and KEYS keys: q times k, starting at (row, key) of the tiles. Q returns fragments of q.
template <class TileK, int IN_M, int KEYS, class T, class Q>
__device__ __forceinline__ void multiply_scores(float (&scores)[IN_M][KEYS / 8][4], const Q& q, const T* k, int key) {
#pragma unroll
  for (int step = 0; step < TileK::DIM / 16; ++step) {
    u32 of_q[IN_M][4];
    q(of_q, step);
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j) {
      u32 of_k[4];
      load_fragment<TileK, true>(of_k, k, key + 16 * j, 16 * step);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 operand[2] = {of_k[2 * half], of_k[2 * half + 1]};
#pragma unroll
        for (int i = 0; i < IN_M; ++i) mma<T>(scores[i][2 * j + half], of_q[i], operand);
      }
    }
  }
}

// results += exponentials times v. The result of the first product is an operand of the second in the same registers.
template <class TileV, int IN_M, int KEYS, class T>
__device__ __forceinline__ void multiply_values(float (&results)[IN_M][TileV::DIM / 8][4],
                                                const float (&scores)[IN_M][KEYS / 8][4], const T* v, int key) {
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    u32 of_p[IN_M][4];
#pragma unroll
    for (int i = 0; i < IN_M; ++i) round_operand<T>(of_p[i], scores[i], step);
#pragma unroll
    for (int j = 0; j < TileV::DIM / 16; ++j) {
      u32 of_v[4];
      load_fragment<TileV, true>(of_v, v, 16 * j, key + 16 * step);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 operand[2] = {of_v[2 * half], of_v[2 * half + 1]};
#pragma unroll
        for (int i = 0; i < IN_M; ++i) mma<T>(results[i][2 * j + half], of_p[i], operand);
      }
    }
  }
}

// ---- results -----------------------------------------------------------------------------------------------
// For 16 IN_M rows of a warp, starting at `row` of the tile; rows after `last_row` do not exist. `states` hold full
// sums.

// As the type of o, through the warp's lines of shared memory starting at `line`, so that accesses to global memory are
// 16 bytes wide and adjacent.
template <class Tile, int IN_M, class T, class Rows>
__device__ __forceinline__ void store_rows(const float (&results)[IN_M][Tile::DIM / 8][4],
                                           const RowState (&states)[IN_M][2], const Rows& rows, int row, int last_row,
                                           T* shared, int line, T* o, float* lse, float unit) {
  constexpr int CHUNK = PER_16_BYTES<T>, PER_LINE = Tile::LENGTH / CHUNK;
  const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < IN_M; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowState& state = states[i][half];
      const float factor = state.inverse();
      const int at = 16 * i + 8 * half + g;
#pragma unroll
      for (int j = 0; j < Tile::DIM / 8; ++j) {
        const u32 pair = pack2<T>(results[i][j][2 * half] * factor, results[i][j][2 * half + 1] * factor);
        *reinterpret_cast<u32*>(shared + Tile::Layout::offset(line + at, 8 * j + 2 * t)) = pair;
      }
      if (t == 0 && row + at <= last_row) lse[rows.at(row + at)] = state.log2_sum(unit) * LN_2;
    }
  __syncwarp();
#pragma unroll
  for (int first = 0; first < 16 * IN_M * PER_LINE; first += 32) {
    const int index = first + lane, at = index / PER_LINE, column = index % PER_LINE * CHUNK;
    if (at >= 16 * IN_M || row + at > last_row) continue;
    const T* const source = shared + Tile::Layout::offset(line + at, column);
    store_vec(o + rows.at(row + at) * Tile::LENGTH + column, load_vec<CHUNK>(source));
  }
}

// As f32, with the logarithms of sums, for attention_combine.
template <class Tile, int IN_M, class Rows>
__device__ __forceinline__ void store_part(const float (&results)[IN_M][Tile::DIM / 8][4],
                                           const RowState (&states)[IN_M][2], const Rows& rows, int row, int last_row,
                                           float* partial, float* partial_lse, float unit) {
  const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < IN_M; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of_thread = row + 16 * i + 8 * half + g;
      if (of_thread > last_row) continue;
      const RowState& state = states[i][half];
      const float factor = state.inverse();
      const i64 place = rows.at(of_thread);
      float* const target = partial + place * Tile::LENGTH;
#pragma unroll
      for (int j = 0; j < Tile::LENGTH / 8; ++j)
        store_vec(target + 8 * j + 2 * t,
                  Vec<float, 2>{results[i][j][2 * half] * factor, results[i][j][2 * half + 1] * factor});
      if (t == 0) partial_lse[place] = state.log2_sum(unit);
    }
}
