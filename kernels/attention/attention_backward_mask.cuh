#pragma once
// Mask of attention gradients. Needs attention_backward_tiles.cuh.

// The ends of both sequences are aligned if causal: query i attends to keys up to i + seq_k - seq_q.
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

