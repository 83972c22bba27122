#pragma once
// Bias of attention scores. Needs types.cuh and reduce.cuh.

// Lowest finite bias: lower ones, such as the most negative f32, count as this one. As an exponent of 2 it is above
// NO_SCORE.
constexpr float LOWEST_BIAS = -1e29f;

__device__ __forceinline__ float hidden_score() { return __int_as_float(0xff800000); }  // minus infinity

// Bias of the scores: strides are 0 along axes that it lacks.
template <class T>
struct Bias {
  const T* data;
  i64 of_batch, of_head, of_query;  // strides
  int heads;                        // of q, in an item of the batch

  // Biases of the first query of a head; `index` counts the heads of the whole batch.
  __device__ __forceinline__ const T* head(i64 index) const {
    const i64 item = index / heads;
    return data + item * of_batch + (index - item * heads) * of_head;
  }
  // Biases of a row of q; `index` counts the rows of the whole batch.
  __device__ __forceinline__ const T* row(i64 index, int seq_q) const {
    const i64 of = index / seq_q;
    return head(of) + (index - of * seq_q) * of_query;
  }
};

// Sum of score and bias, as an exponent of 2; `unit` turns scores into exponents of 2.
template <class T>
__device__ __forceinline__ float add_bias(float score, float unit, T bias) {
  float value = to_float(bias);
  if (value < LOWEST_BIAS && value != hidden_score()) value = LOWEST_BIAS;
  return multiply_add(score, unit, value * LOG2_E);
}

// Sum of the bias and the term -lse log2 e of the gradients, as an exponent of 2; minus infinity where the bias hides
// the score.
template <class T>
__device__ __forceinline__ float add_bias_to_term(float term, T bias) {
  const float value = to_float(bias);
  return value <= LOWEST_BIAS ? hidden_score() : multiply_add(value, LOG2_E, term);
}
