#pragma once
// Takes the place of attention_forward_mask.cuh for causal masks that are aligned with the first key (ALIGNED_FIRST),
// or that have a window: a query attends only to the WINDOW keys up to its own (0: to all). Needs types.cuh and both
// constants.

struct KeyTiles {
  int begin, end;  // of the block
  int whole;       // all rows attend to the last keys of earlier tiles
  int ahead;       // earlier tiles have keys ahead of the window of some row
};

// End of the keys that a query attends to.
template <bool CAUSAL>
__device__ __forceinline__ int keys_seen(int query, int seq_q, int seq_k) {
  return min(query + 1 + (ALIGNED_FIRST ? 0 : seq_k - seq_q), seq_k);
}

// First key that a query attends to.
__device__ __forceinline__ int first_key(int query, int seq_q, int seq_k) {
  return WINDOW == 0 ? 0 : max(0, query + 1 + (ALIGNED_FIRST ? 0 : seq_k - seq_q) - WINDOW);
}

template <int BN, bool CAUSAL>
__device__ __forceinline__ KeyTiles key_tiles(int first_query, int last_query, int seq_q, int seq_k, int part,
                                              int parts) {
  const int begin = first_key(first_query, seq_q, seq_k) / BN;
  const int tiles = (keys_seen<CAUSAL>(last_query, seq_q, seq_k) - 1) / BN + 1 - begin;
  const int whole = keys_seen<CAUSAL>(first_query, seq_q, seq_k) / BN;
  const int ahead = (first_key(last_query, seq_q, seq_k) + BN - 1) / BN;
  return {begin + int(i64(tiles) * part / parts), begin + int(i64(tiles) * (part + 1) / parts), whole, ahead};
}
