#pragma once
// Terms of queries and rounding that the kernels of attention gradients share. Needs types.cuh and reduce.cuh.

constexpr int TERMS_THREADS = 256;

// Terms of each query: (-lse log2 e, sum of do * o). LANES lanes share a row, with VEC elements per access; heads are
// `pitch` queries apart. If blocks add to sums of gradients, clears `cleared` lines of them, each of SUM_COLUMNS.
template <class C>
__global__ void __launch_bounds__(TERMS_THREADS)
attention_terms(const typename C::In* __restrict__ o, const typename C::In* __restrict__ dout,
                const float* __restrict__ lse, float* __restrict__ terms, float* __restrict__ sums, i64 rows,
                int seq_q, int pitch, i64 cleared) {
  using In = typename C::In;
  const i64 place = i64(blockIdx.x) * (TERMS_THREADS / C::LANES) + int(threadIdx.x) / C::LANES;
  const i64 head = place / pitch, row = head * seq_q + (place - head * pitch);
  const bool exists = place < rows && place - head * pitch < seq_q;
  float sum = 0.0f;
  if (exists) {
    for (int at = int(threadIdx.x) % C::LANES * C::VEC; at < C::HEAD_DIM; at += C::LANES * C::VEC) {
      const Vec<In, C::VEC> a = load_vec<C::VEC>(o + row * C::HEAD_DIM + at);
      const Vec<In, C::VEC> b = load_vec<C::VEC>(dout + row * C::HEAD_DIM + at);
#pragma unroll
      for (int e = 0; e < C::VEC; ++e) sum = multiply_add(to_float(a.at[e]), to_float(b.at[e]), sum);
    }
  }
  if constexpr (C::ADDS_DQ) {
    if (place < cleared)
      for (int at = int(threadIdx.x) % C::LANES * 4; at < C::SUM_COLUMNS; at += C::LANES * 4)
        store_vec(sums + place * C::SUM_COLUMNS + at, Vec<float, 4>{});
  }
  sum = warp_reduce<C::LANES>(sum, Sum());
  if (exists && threadIdx.x % C::LANES == 0) store_vec(terms + 2 * place, Vec<float, 2>{-lse[row] * LOG2_E, sum});
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
