#pragma once
// Terms of queries and rounding that the kernels of attention gradients share. Needs types.cuh and reduce.cuh.

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
