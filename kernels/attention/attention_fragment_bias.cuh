#pragma once
// Biases and windows of scores in the fragments of attention_fragment.cuh, and rows that attend to no key. Needs
// attention_fragment.cuh and, if there are biases, attention_bias.cuh.

// Adds biases to scores and turns them into exponents of 2. `lines` are the biases of rows g and g + 8, aligned to VEC
// elements; `first_key` is the first key of this warp, and `seq_k` keys exist.
template <int VEC, int IN_M, int KEYS, class Line>
__device__ __forceinline__ void add_biases(float (&scores)[IN_M][KEYS / 8][4], const Line (&lines)[IN_M][2],
                                           int first_key, int seq_k, float unit) {
#pragma unroll
  for (int i = 0; i < IN_M; ++i)
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; e += VEC) {
        const int key = first_key + 8 * j + int(threadIdx.x) % 4 * 2 + e % 2;
        if (key >= seq_k) continue;  // hide_scores hides it
        const auto biases = load_vec<VEC>(lines[i][e / 2] + key);
#pragma unroll
        for (int c = 0; c < VEC; ++c) scores[i][j][e + c] = add_bias(scores[i][j][e + c], unit, biases.at[c]);
      }
}

// Sets the scores of keys ahead of the window to minus infinity. `starts` holds the first keys that rows g and g + 8
// attend to; `first_key` is the first key of this warp.
template <int IN_M, int KEYS>
__device__ __forceinline__ void hide_ahead(float (&scores)[IN_M][KEYS / 8][4], const int (&starts)[IN_M][2],
                                           int first_key) {
  const int place = first_key + int(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < IN_M; ++i)
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * j + place + e % 2 < starts[i][e / 2]) scores[i][j][e] = no_key();
}

// Sets the sum of rows whose keys are all hidden to 1, so that their results are 0 and their logarithms finite.
template <int IN_M>
__device__ __forceinline__ void settle_hidden_rows(RowState (&rows)[IN_M][2]) {
#pragma unroll
  for (int m = 0; m < 2 * IN_M; ++m)
    if (rows[m / 2][m % 2].total == 0.0f) rows[m / 2][m % 2].total = 1.0f;
}
