#pragma once
// Rows of a block of forward attention, and constants of masked scores. Needs types.cuh.

// Initial maximum: below any score, and finite, so that a row without keys has no NaN.
constexpr float NO_SCORE = -1e30f;
constexpr float LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float no_key() { return __int_as_float(0xff800000); }  // minus infinity

// Rows of a tile are queries of one head or, PACKED, of all heads that share keys: query 0 of each of them, query 1,
// ....
template <bool PACKED>
struct QueryRows {
  i64 first;  // row 0 in q, o and lse
  int seq_q, group, count;

  // `index` counts heads of q, or, PACKED, of k.
  __device__ __forceinline__ QueryRows(int index, int queries, int heads_a_key)
      : first(i64(index) * (PACKED ? heads_a_key : 1) * queries),
        seq_q(queries),
        group(heads_a_key),
        count(PACKED ? queries * heads_a_key : queries) {}
  __device__ __forceinline__ int query(int row) const { return PACKED ? row / group : row; }
  __device__ __forceinline__ i64 at(int row) const {
    return PACKED ? first + i64(row % group) * seq_q + row / group : first + row;
  }
};

