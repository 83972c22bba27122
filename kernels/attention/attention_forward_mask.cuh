#pragma once
// Mask of forward attention: queries attend to all keys, or, if causal, up to the key of their own position, counted
// from the ends of both sequences. Needs types.cuh.

// Key tiles of a block: all but those that none of its rows attends to, or an equal part of them.
struct KeyTiles {
  int begin, end;  // of the block
  int whole;       // all rows attend to all keys of earlier tiles
};

// Number of keys that a query attends to.
template <bool CAUSAL>
__device__ __forceinline__ int keys_seen(int query, int seq_q, int seq_k) {
  return CAUSAL ? query + 1 + seq_k - seq_q : seq_k;
}

template <int BN, bool CAUSAL>
__device__ __forceinline__ KeyTiles key_tiles(int first_query, int last_query, int seq_q, int seq_k, int part,
                                              int parts) {
  const int tiles = (keys_seen<CAUSAL>(last_query, seq_q, seq_k) - 1) / BN + 1;
  const int whole = keys_seen<CAUSAL>(first_query, seq_q, seq_k) / BN;
  if (parts == 1) return {0, tiles, whole};
  return {int(i64(tiles) * part / parts), int(i64(tiles) * (part + 1) / parts), whole};
}

