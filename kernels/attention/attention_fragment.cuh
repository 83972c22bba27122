#pragma once
// Scores of attention in the fragments of mma.sync and wgmma: lane l has rows g = l / 4 and g + 8 of each 16 rows, and
// columns 2 (l % 4) and 2 (l % 4) + 1 of each 8 keys. Needs types.cuh, reduce.cuh and attention_forward.cuh.

// Sets masked scores to minus infinity. `seen` holds the number of keys that rows g and g + 8 attend to, counted from
// the first key of this warp.
template <int IN_M, int KEYS>
__device__ __forceinline__ void hide_scores(float (&scores)[IN_M][KEYS / 8][4], const int (&seen)[IN_M][2]) {
  const int place = int(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < IN_M; ++i)
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * j + place + e % 2 >= seen[i][e / 2]) scores[i][j][e] = no_key();
}

// Turns scores into exponentials relative to the maximum so far. `factors` are the factors for earlier sums and
// results. `unit` turns scores into exponents of 2. Sums are over this thread's columns.
template <int IN_M, int KEYS>
__device__ __forceinline__ void exponentiate(float (&scores)[IN_M][KEYS / 8][4], RowState (&rows)[IN_M][2],
                                             float (&factors)[IN_M][2], float unit) {
#pragma unroll
  for (int i = 0; i < IN_M; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowState& row = rows[i][half];
      float top = row.top;
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) top = fmaxf(top, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
      top = warp_reduce_max<4>(top);
      const float factor = fast_exp2((row.top - top) * unit), shift = top * unit;
      float total = f32_op(row.total * factor);
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[i][j][e] = fast_exp2(multiply_add(scores[i][j][e], unit, -shift));
          total = f32_op(total + scores[i][j][e]);
        }
      row.top = top, row.total = total, factors[i][half] = factor;
    }
}

template <int IN_M, int COLUMNS>
__device__ __forceinline__ void rescale(float (&results)[IN_M][COLUMNS / 8][4], const float (&factors)[IN_M][2]) {
#pragma unroll
  for (int i = 0; i < IN_M; ++i)
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) results[i][j][e] = f32_op(results[i][j][e] * factors[i][e / 2]);
}

// Adds the sums of the four threads that share rows.
template <int IN_M>
__device__ __forceinline__ void gather_sums(RowState (&rows)[IN_M][2]) {
#pragma unroll
  for (int m = 0; m < 2 * IN_M; ++m) rows[m / 2][m % 2].total = warp_reduce_sum<4>(rows[m / 2][m % 2].total);
}

// Merges the warps that share rows but have different keys, into the first ROW_WARPS warps. All threads of the block
// must call it; `exchange` is shared, EXCHANGE_FLOATS, and free for this use.
template <int ROW_WARPS, int KEY_WARPS, int IN_M, int COLUMNS>
constexpr int EXCHANGE_FLOATS = (KEY_WARPS - 1) * ROW_WARPS * 32 * IN_M * (COLUMNS / 2 + 4);

template <int ROW_WARPS, int KEY_WARPS, int COLUMNS, int IN_M>
__device__ __forceinline__ void merge_keys(float (&results)[IN_M][COLUMNS / 8][4], RowState (&rows)[IN_M][2],
                                           float* exchange, float unit) {
  // Lanes of the same position exchange groups of four numbers, stored side by side.
  constexpr int FIRST = 32 * ROW_WARPS, OTHERS = (KEY_WARPS - 1) * FIRST;
  const int thread = int(threadIdx.x);
  if (thread >= FIRST) {
    float* const target = exchange + 4 * (thread - FIRST);
#pragma unroll
    for (int i = 0; i < IN_M; ++i) {
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const float(&four)[4] = results[i][j];
        store_vec(target + (i * COLUMNS / 8 + j) * 4 * OTHERS, Vec<float, 4>{four[0], four[1], four[2], four[3]});
      }
      store_vec(target + (IN_M * COLUMNS / 8 + i) * 4 * OTHERS,
                Vec<float, 4>{rows[i][0].top, rows[i][0].total, rows[i][1].top, rows[i][1].total});
    }
  }
  __syncthreads();
  if (thread >= FIRST) return;
#pragma unroll
  for (int warp = 0; warp < KEY_WARPS - 1; ++warp) {
    const float* const source = exchange + 4 * (thread + warp * FIRST);
#pragma unroll
    for (int i = 0; i < IN_M; ++i) {
      const Vec<float, 4> other = load_vec<4>(source + (IN_M * COLUMNS / 8 + i) * 4 * OTHERS);
      float mine[2], theirs[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RowState& row = rows[i][half];
        const float top = fmaxf(row.top, other.at[2 * half]);
        mine[half] = fast_exp2((row.top - top) * unit), theirs[half] = fast_exp2((other.at[2 * half] - top) * unit);
        row.top = top, row.total = row.total * mine[half] + other.at[2 * half + 1] * theirs[half];
      }
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const Vec<float, 4> four = load_vec<4>(source + (i * COLUMNS / 8 + j) * 4 * OTHERS);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          results[i][j][e] = results[i][j][e] * mine[e / 2] + four.at[e] * theirs[e / 2];
      }
    }
  }
}
