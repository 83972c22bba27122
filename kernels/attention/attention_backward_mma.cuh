#pragma once
// Products of attention gradients on tensor cores (from sm_80): rows of a warp by rows of the other side in shared
// memory. Needs types.cuh, ptx.cuh, reduce.cuh, gemm.cuh, gemm_mma.cuh, attention_operand.cuh and
// attention_backward.cuh.

// Address of element (line, at) in lines of LENGTH 16-bit elements, such that the 16-byte chunks of one position in
// eight lines are in different banks: chunks are permuted if their number is a power of two, else lines are padded by a
// chunk.
template <class T, int LENGTH>
struct Lines {
  static constexpr int CHUNK = PER_16_BYTES<T>, CHUNKS = LENGTH / CHUNK;
  static constexpr bool SWIZZLED = (CHUNKS & (CHUNKS - 1)) == 0;
  static constexpr int PITCH = SWIZZLED ? LENGTH : LENGTH + CHUNK;
  static_assert(CHUNKS % 2 == 0, "an even number of chunks and one more is odd");

  static __device__ __forceinline__ int offset(int line, int at) {
    if constexpr (SWIZZLED)
      return Swizzled<T, LENGTH, 1>::offset(line, at);
    else
      return line * PITCH + at;
  }
};

// Issues copies of LINES lines of a matrix whose lines have WIDTH elements; lines from `room` on, and elements beyond
// WIDTH, are zero.
template <class T, int LINES, int LENGTH, int WIDTH, int THREADS>
__device__ __forceinline__ void copy_lines(T* tile, const T* source, int room) {
  using Line = Lines<T, LENGTH>;
  constexpr int TOTAL = LINES * Line::CHUNKS;
#pragma unroll
  for (int i = 0; i < ceil_div(TOTAL, THREADS); ++i) {
    const int index = int(threadIdx.x) + i * THREADS, line = index / Line::CHUNKS, at = index % Line::CHUNKS * Line::CHUNK;
    if (TOTAL % THREADS != 0 && index >= TOTAL) break;
    const bool inside = line < room && at < WIDTH;
    cp_async_cg(tile + Line::offset(line, at), source + (inside ? line * WIDTH + at : 0), inside ? 16 : 0);
  }
}

// These lines as an operand whose summed dimension runs ALONG them, or across them (see load_fragment).
template <class T, int LENGTH, bool ALONG>
struct LinesOf {
  static constexpr bool ALONG_K = ALONG, BY_LDMATRIX = true;
  using Layout = Lines<T, LENGTH>;
};

// Calls body(r, n, i) for each of this thread's elements i of operands (16, 8) n of rows r.
template <int R, int N, class Body>
__device__ __forceinline__ void each_element(const Body& body) {
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) body(r, n, i);
}

// sums of two adjacent operands (16, 8) += one left operand times both right operands, as load_fragment returns them.
template <class T>
__device__ __forceinline__ void multiply_pair(float (&first)[4], float (&second)[4], const u32 (&left)[4],
                                              const u32 (&right)[4]) {
  const u32 of_first[2] = {right[0], right[1]}, of_second[2] = {right[2], right[3]};
  mma_m16n8k16<T>(first, left, of_first);
  mma_m16n8k16<T>(second, left, of_second);
}

// ---- products of a warp --------------------------------------------------------------------------------------

// sums (16 R, 8 N) += X U^T: lines of `x` starting at x_line by lines of `u` starting at u_line, LENGTH elements each.
template <int LENGTH, class T, int R, int N>
__device__ __forceinline__ void multiply_lines(float (&sums)[R][N][4], const T* x, int x_line, const T* u, int u_line) {
  using Along = LinesOf<T, LENGTH, true>;
  constexpr int AHEAD = LENGTH <= 128 ? LENGTH / 16 : 4;  // with longer lines the compiler would keep too many operands at once
#pragma unroll AHEAD
  for (int at = 0; at < LENGTH; at += 16) {
    u32 left[R][4], right[4];
#pragma unroll
    for (int r = 0; r < R; ++r) load_fragment<Along, false>(left[r], x, x_line + 16 * r, at);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      load_fragment<Along, true>(right, u, u_line + 8 * n, at);
#pragma unroll
      for (int r = 0; r < R; ++r) multiply_pair<T>(sums[r][n], sums[r][n + 1], left[r], right);
    }
  }
}

// sums (16 R, LENGTH) += P W, where P (16 R, 8 N) is rounded to T, and row i of W is line first_line + i of `w`.
template <int LENGTH, class T, int R, int N>
__device__ __forceinline__ void multiply_rounded(float (&sums)[R][LENGTH / 8][4], const float (&p)[R][N][4], const T* w,
                                                 int first_line) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    u32 left[R][4], right[4];
#pragma unroll
    for (int r = 0; r < R; ++r) round_operand<T>(left[r], p[r], n / 2);
#pragma unroll
    for (int at = 0; at < LENGTH; at += 16) {
      load_fragment<LinesOf<T, LENGTH, false>, true>(right, w, at, first_line + 8 * n);
#pragma unroll
      for (int r = 0; r < R; ++r) multiply_pair<T>(sums[r][at / 8], sums[r][at / 8 + 1], left[r], right);
    }
  }
}

// Writes P (16 R, 8 N), rounded, to lines of a tile, starting at `line` and `at`.
template <class Line, class T, int R, int N>
__device__ __forceinline__ void store_rounded(T* tile, int line, int at, const float (&p)[R][N][4], float factor) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        T* const place = tile + Line::offset(line + 16 * r + 8 * half + lane / 4, at + 8 * n + lane % 4 * 2);
        *reinterpret_cast<u32*>(place) = pack2<T>(p[r][n][2 * half] * factor, p[r][n][2 * half + 1] * factor);
      }
}

// Scales and stores sums (16 R, LENGTH) as `room` rows of WIDTH elements, through the warp's lines of a tile that no
// thread reads any more.
template <int LENGTH, int WIDTH, class T, int R>
__device__ __forceinline__ void store_rows(T* target, int room, T* tile, int line, const float (&sums)[R][LENGTH / 8][4],
                                           float factor) {
  using Line = Lines<T, LENGTH>;
  constexpr int PER_ROW = WIDTH / Line::CHUNK;
  __syncwarp();
  store_rounded<Line>(tile, line, 0, sums, factor);
  __syncwarp();
#pragma unroll 4
  for (int index = int(threadIdx.x) % 32; index < 16 * R * PER_ROW; index += 32) {
    const int row = index / PER_ROW, at = index % PER_ROW * Line::CHUNK;
    if (row >= room) break;
    store_vec(target + row * WIDTH + at, load_vec<Line::CHUNK>(tile + Line::offset(line + row, at)));
  }
}

// Adds the product of dS and K to sums of dq in global memory, `room` rows of WIDTH. `ds` has a line of STEP queries
// for each of KEYS keys, `keys` a line of LENGTH elements. Warps divide the queries in units of 16 first, then the
// columns, some at a time, since their sums of dk and dv stay in registers meanwhile.
template <int LENGTH, int WIDTH, int KEYS, int STEP, int WARPS, class T>
__device__ __forceinline__ void add_to_queries(float* dq_sums, int room, const T* ds, const T* keys) {
  constexpr int BY_QUERY = WARPS < STEP / 16 ? WARPS : STEP / 16, BY_COLUMN = WARPS / BY_QUERY;
  constexpr int R = STEP / BY_QUERY / 16, COLUMNS = LENGTH / BY_COLUMN, SOME = COLUMNS % 32 == 0 ? 32 : 16;
  static_assert(BY_QUERY * BY_COLUMN == WARPS && COLUMNS * BY_COLUMN == LENGTH && COLUMNS % 16 == 0, "warps share it");
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, row = warp / BY_COLUMN * 16 * R;
#pragma unroll 1
  for (int column = warp % BY_COLUMN * COLUMNS, end = column + COLUMNS; column < end; column += SOME) {
    float sums[R][SOME / 8][4] = {};
#pragma unroll 2
    for (int key = 0; key < KEYS; key += 16) {
      u32 left[R][4], right[4];
#pragma unroll
      for (int r = 0; r < R; ++r) load_fragment<LinesOf<T, STEP, false>, false>(left[r], ds, row + 16 * r, key);
#pragma unroll
      for (int at = 0; at < SOME; at += 16) {
        load_fragment<LinesOf<T, LENGTH, false>, true>(right, keys, column + at, key);
#pragma unroll
        for (int r = 0; r < R; ++r) multiply_pair<T>(sums[r][at / 8], sums[r][at / 8 + 1], left[r], right);
      }
    }
    each_element<R, SOME / 8>([&](int r, int n, int i) {
      const int query = row + 16 * r + i / 2 * 8 + lane / 4, at = column + 8 * n;
      if (query < room && at < WIDTH) atomicAdd(dq_sums + query * WIDTH + at + lane % 4 * 2 + i % 2, sums[r][n][i]);
    });
  }
}
