#pragma once
// Takes the place of attention_backward_mask.cuh for causal masks that are aligned with the first key (ALIGNED_FIRST),
// or that have a window: a query attends only to the WINDOW keys up to its own (0: to all). Needs both constants and
// attention_backward_tiles.cuh.

template <bool CAUSAL>
struct Sight {
  int seq_q, seq_k;
  int rows;  // of a block

  __device__ __forceinline__ int before() const { return ALIGNED_FIRST ? 0 : seq_k - seq_q; }
  __device__ __forceinline__ bool operator()(int query, int key) const {
    const int last = query + before();
    return key < seq_k && key <= last && (WINDOW == 0 || key > last - WINDOW);
  }
  // Whether each of several queries is certain to attend to each of `keys` keys.
  __device__ __forceinline__ bool all(int query, int key, int keys) const {
    return WINDOW == 0 && (*this)(query, key + keys - 1);
  }
  // Tiles of keys that any of `queries` queries attends to.
  __device__ __forceinline__ Range keys_of(int query, int queries, int tile) const {
    const int end = min(seq_k, min(seq_q, query + queries) + before());
    const int first = WINDOW == 0 ? 0 : max(0, query + 1 + before() - WINDOW) / tile;
    return {first, (end + tile - 1) / tile - first};
  }
  // Tiles of queries that attend to any key of the block that starts at `key`.
  __device__ __forceinline__ Range queries_of(int key, int tile) const {
    const int first = max(0, key - before());
    const int end = WINDOW == 0 ? seq_q : min(seq_q, min(seq_k, key + rows) - 1 - before() + WINDOW);
    return {first / tile, first < end ? (end - 1) / tile + 1 - first / tile : 0};
  }
};
