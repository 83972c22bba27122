#pragma once
// Tiles, masks, terms of queries and rounding that the kernels of attention gradients share. Needs types.cuh and
// reduce.cuh.

// Row tile of a block: rows of one head, of queries or of keys.
struct RowTile {
  int head, first;  // head of the whole batch; first row
};

// The tile of this block. Tiles with the most work come first, so that the others fill idle SMs. With BY_HEAD, blocks
// that run at the same time have the same head and share what they read; otherwise they have the same length.
template <bool BY_HEAD, bool LAST_IS_LONGEST>
__device__ __forceinline__ RowTile row_tile_of_block(int rows, int tile_rows) {
  const u32 tiles = u32(rows - 1) / u32(tile_rows) + 1, heads = gridDim.x / tiles;
  const u32 tile = BY_HEAD ? blockIdx.x % tiles : blockIdx.x / heads;
  const u32 head = BY_HEAD ? blockIdx.x / tiles : blockIdx.x % heads;
  return {int(head), int(LAST_IS_LONGEST ? tiles - 1 - tile : tile) * tile_rows};
}

// Tiles of the other side that a row tile iterates over, starting at `first`.
struct Range {
  int first, count;
};

// Mask. The ends of both sequences are aligned if causal: query i attends to keys up to i + seq_k - seq_q.
template <bool CAUSAL>
struct Sight {
  int seq_q, seq_k;

  __device__ __forceinline__ bool operator()(int query, int key) const {
    return key < seq_k && (!CAUSAL || key <= query + (seq_k - seq_q));
  }
  // Whether each of `queries` queries attends to each of `keys` keys.
  __device__ __forceinline__ bool all(int query, int key, int keys) const {
    return (*this)(query, key + keys - 1);
  }
  // Tiles of keys that any of `queries` queries attends to.
  __device__ __forceinline__ Range keys_of(int query, int queries, int tile) const {
    int end = seq_k;
    if constexpr (CAUSAL) end = max(0, min(seq_q, query + queries) + (seq_k - seq_q));
    return {0, (end + tile - 1) / tile};
  }
  // Tiles of queries that attend to `key`, or to any key after it.
  __device__ __forceinline__ Range queries_of(int key, int tile) const {
    const int first = CAUSAL ? max(0, key - (seq_k - seq_q)) / tile : 0;
    return {first, (seq_q - 1) / tile + 1 - first};
  }
};

constexpr int TERMS_THREADS = 256;

// Terms of each query: (-lse log2 e, sum of do * o). LANES lanes share a row, with VEC elements per access; heads are
// `pitch` queries apart. Clears the sums of dq if blocks add to them.
template <class C>
__global__ void __launch_bounds__(TERMS_THREADS)
attention_terms(const typename C::In* __restrict__ o, const typename C::In* __restrict__ dout,
                const float* __restrict__ lse, float* __restrict__ terms, float* __restrict__ dq_sums, i64 rows,
                int seq_q, int pitch) {
  using In = typename C::In;
  const i64 row = i64(blockIdx.x) * (TERMS_THREADS / C::LANES) + int(threadIdx.x) / C::LANES;
  float sum = 0.0f;
  if (row < rows) {
    for (int at = int(threadIdx.x) % C::LANES * C::VEC; at < C::HEAD_DIM; at += C::LANES * C::VEC) {
      const i64 place = row * C::HEAD_DIM + at;
      const Vec<In, C::VEC> a = load_vec<C::VEC>(o + place), b = load_vec<C::VEC>(dout + place);
#pragma unroll
      for (int e = 0; e < C::VEC; ++e) {
        sum = multiply_add(to_float(a.at[e]), to_float(b.at[e]), sum);
        if constexpr (C::ADDS_DQ) dq_sums[place + e] = 0.0f;
      }
    }
  }
  sum = warp_reduce<C::LANES>(sum, Sum());
  if (row < rows && threadIdx.x % C::LANES == 0) {
    const i64 head = row / seq_q, place = head * pitch + (row - head * seq_q);
    store_vec(terms + 2 * place, Vec<float, 2>{-lse[row] * LOG2_E, sum});
  }
}

// Rounds dq from its sums, 8 elements per thread.
template <class C>
__global__ void __launch_bounds__(TERMS_THREADS)
attention_round(const float* __restrict__ dq_sums, typename C::In* __restrict__ dq, i64 vectors, float scale) {
  const i64 vector = i64(blockIdx.x) * TERMS_THREADS + threadIdx.x;
  if (vector >= vectors) return;
  Vec<typename C::In, 8> rounded;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Vec<float, 4> part = load_vec<4>(dq_sums + vector * 8 + half * 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) rounded.at[half * 4 + e] = from_float<typename C::In>(scale * part.at[e]);
  }
  store_vec(dq + vector * 8, rounded);
}
