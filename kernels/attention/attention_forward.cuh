#pragma once
// Online softmax and merge of parts for forward attention. Needs types.cuh, reduce.cuh and
// attention_forward_rows.cuh.
// Source: Dao, "FlashAttention-2", 2023, algorithm 1; Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018.

// Maximum score of a row so far, and the sum of exponentials relative to it, over the columns of this thread.
struct RowState {
  float top = NO_SCORE, total = 0.0f;

  // Base-2 logarithm of the sum, when `total` covers all columns; `unit` turns scores into exponents of 2.
  __device__ __forceinline__ float log2_sum(float unit) const {
    return total > 0.0f ? multiply_add(top, unit, log2f(total)) : no_key();
  }
  __device__ __forceinline__ float inverse() const { return total > 0.0f ? 1.0f / total : 0.0f; }
};

// ---- parts of keys -----------------------------------------------------------------------------------------
// partial (parts, rows, HEAD_DIM) f32 is o of each part of the keys. partial_lse (parts, rows) f32 is the base-2
// logarithm of its sum: minus infinity if a row attends to no key of the part, and o is zero.

// A block merges the parts of a row; each of its warps merges some of them.
template <class T, int HEAD_DIM, int THREADS>
__global__ void __launch_bounds__(THREADS, 1)
attention_combine(const float* __restrict__ partial, const float* __restrict__ partial_lse, T* __restrict__ o,
                  float* __restrict__ lse, i64 rows, int parts) {
  constexpr int WARPS = THREADS / 32, EACH = ceil_div(HEAD_DIM, 32);
  __shared__ float of_warps[WARPS][HEAD_DIM];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 row = blockIdx.x;
  float top = no_key();
  for (int part = lane; part < parts; part += 32) top = fmaxf(top, partial_lse[part * rows + row]);
  top = warp_reduce_max(top);
  float total = 0.0f;
  for (int part = lane; part < parts; part += 32) total += fast_exp2(partial_lse[part * rows + row] - top);
  const float all = top + log2f(warp_reduce_sum(total));
  if (threadIdx.x == 0) lse[row] = all * LN_2;

  float sums[EACH] = {};
#pragma unroll 4
  for (int part = warp; part < parts; part += WARPS) {
    const float weight = fast_exp2(partial_lse[part * rows + row] - all);
    const float* const source = partial + (part * rows + row) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (HEAD_DIM % 32 == 0 || lane + 32 * i < HEAD_DIM)
        sums[i] = multiply_add(weight, source[lane + 32 * i], sums[i]);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (HEAD_DIM % 32 == 0 || lane + 32 * i < HEAD_DIM) of_warps[warp][lane + 32 * i] = sums[i];
  __syncthreads();
  for (int column = threadIdx.x; column < HEAD_DIM; column += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += of_warps[w][column];
    o[row * HEAD_DIM + column] = from_float<T>(sum);
  }
}
