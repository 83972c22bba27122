#pragma once
// Reductions over the lanes of a warp and the threads of a block, and fast functions. Needs no other header.

// ---- fast functions: within 2 units in the last place, subnormals flushed to zero -------------------------

// 2^x.
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef TUNEBENCH_EMULATE
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

constexpr float LOG2_E = 1.4426950408889634f;

// e^x; the error of the product grows with |x|: about |x| units in the last place.
__device__ __forceinline__ float fast_exp(float x) { return fast_exp2(x * LOG2_E); }

// 1 / sqrt(x).
__device__ __forceinline__ float fast_rsqrt(float x) {
#ifdef TUNEBENCH_EMULATE
  emulated::count_special();
  return 1.0f / sqrtf(x);
#else
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// ---- warp -------------------------------------------------------------------------------------------------

struct Max {
  static __device__ __forceinline__ float neutral() { return __int_as_float(0xff800000); }
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  static __device__ __forceinline__ float neutral() { return 0.0f; }
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Returns the reduction over groups of WIDTH consecutive lanes (a power of two) to each lane. All 32 lanes must call
// it.
template <int WIDTH, class Op>
__device__ __forceinline__ float warp_reduce(float value, Op op) {
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2)
    value = op(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

template <int WIDTH = 32>
__device__ __forceinline__ float warp_reduce_max(float value) {
  return warp_reduce<WIDTH>(value, Max());
}

template <int WIDTH = 32>
__device__ __forceinline__ float warp_reduce_sum(float value) {
  return warp_reduce<WIDTH>(value, Sum());
}

// ---- block ------------------------------------------------------------------------------------------------

// Returns the reduction over the THREADS threads of a block (a multiple of 32; x only) to each thread.
// `scratch` is shared, THREADS / 32 floats; it is free again when the function returns. Two barriers.
template <int THREADS, class Op>
__device__ __forceinline__ float block_reduce(float value, float* scratch, Op op) {
  static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps only");
  constexpr int WARPS = THREADS / 32;
  value = warp_reduce<32>(value, op);
  if constexpr (WARPS > 1) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = warp_reduce<32>(lane < WARPS ? scratch[lane] : Op::neutral(), op);
    __syncthreads();
  }
  return value;
}

template <int THREADS>
__device__ __forceinline__ float block_reduce_max(float value, float* scratch) {
  return block_reduce<THREADS>(value, scratch, Max());
}

template <int THREADS>
__device__ __forceinline__ float block_reduce_sum(float value, float* scratch) {
  return block_reduce<THREADS>(value, scratch, Sum());
}
