#pragma once
// Wrappers of PTX instructions, each with the same in plain C++ for emulation.
// Needs types.cuh. All need sm_80 or later, except ldmatrix (sm_75) and products of e4m3 (sm_89).
//
// Fragments: lane l has group g = l / 4 and place t = l % 4. Source: PTX ISA, "Matrix Fragments for mma.m16n8k16"
// (and m16n8k8, m16n8k32), "Warp-level matrix load instruction: ldmatrix".

// ---- matrix multiply-accumulate: D (16, 8) f32 or i32 += A (16, K) B (K, 8) -------------------------------
//   d[0..1] = D[g][2t, 2t + 1]          d[2..3] = D[g + 8][2t, 2t + 1]
//   16-bit, K = 16: a[0] = A[g][2t, 2t + 1], a[1] = A[g + 8][2t, 2t + 1],
//                   a[2] = A[g][2t + 8, 2t + 9], a[3] = A[g + 8][2t + 8, 2t + 9]
//                   b[0] = B[2t, 2t + 1][g], b[1] = B[2t + 8, 2t + 9][g]
//   tf32,   K = 8:  a[0] = A[g][t], a[1] = A[g + 8][t], a[2] = A[g][t + 4], a[3] = A[g + 8][t + 4]
//                   b[0] = B[t][g], b[1] = B[t + 4][g]
//   8-bit,  K = 32: a[0] = A[g][4t .. 4t + 3], a[1] = A[g + 8][4t .. 4t + 3],
//                   a[2] = A[g][4t + 16 .. 4t + 19], a[3] = A[g + 8][4t + 16 .. 4t + 19]
//                   b[0] = B[4t .. 4t + 3][g], b[1] = B[4t + 16 .. 4t + 19][g]

#ifdef TUNEBENCH_EMULATE
namespace on_host {
using namespace emulated;

template <class D>
struct MmaOperands {
  D d[4];
  u32 a[4], b[2];
};
template <class D>
struct MmaResult {
  D d[4];
};

// Elements of one 32-bit register along K, the lowest first: four 8-bit elements, two 16-bit ones, or one tf32 (whose
// low 13 bits are not read).
template <class T>
struct MmaRegister {
  static constexpr int elements = 2;
  static float element(u32 reg, int i) { return to_float(T{u16(reg >> (16 * i))}); }
};
template <>
struct MmaRegister<float> {
  static constexpr int elements = 1;
  static float element(u32 reg, int) { return __uint_as_float(reg & 0xffffe000u); }
};
template <>
struct MmaRegister<e4m3_t> {
  static constexpr int elements = 4;
  static float element(u32 reg, int i) { return to_float(e4m3_t{u8(reg >> (8 * i))}); }
};
template <>
struct MmaRegister<i8> {
  static constexpr int elements = 4;
  static i32 element(u32 reg, int i) { return i8(reg >> (8 * i)); }
};

// Unpacks the fragments of all lanes, multiplies, and returns each lane its part of D.
template <class T>
void mma_whole_warp(Lanes<const MmaOperands<Wide<T>>> in, Lanes<MmaResult<Wide<T>>> out) {
  constexpr int E = MmaRegister<T>::elements, K = 8 * E;
  Wide<T> A[16][K], B[K][8], D[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int reg = 0; reg < 4; ++reg)
      for (int i = 0; i < E; ++i)
        A[g + 8 * (reg % 2)][E * t + i + 4 * E * (reg / 2)] = MmaRegister<T>::element(in[lane].a[reg], i);
    for (int reg = 0; reg < 2; ++reg)
      for (int i = 0; i < E; ++i)
        B[E * t + i + 4 * E * reg][g] = MmaRegister<T>::element(in[lane].b[reg], i);
    for (int i = 0; i < 4; ++i) D[g + 8 * (i / 2)][2 * t + i % 2] = in[lane].d[i];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < K; ++k)
      for (int n = 0; n < 8; ++n) D[m][n] += A[m][k] * B[k][n];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) out[lane].d[i] = D[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

template <class T>
void mma(const char* name, Wide<T> (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  const MmaOperands<Wide<T>> mine = {{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const auto result = whole_warp<MmaResult<Wide<T>>>(name, mine, mma_whole_warp<T>);
  for (int i = 0; i < 4; ++i) d[i] = result.d[i];
}

}  // namespace on_host
#endif

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef TUNEBENCH_EMULATE
  on_host::mma<half_t>("mma.m16n8k16.f16", d, a, b);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef TUNEBENCH_EMULATE
  on_host::mma<bf16_t>("mma.m16n8k16.bf16", d, a, b);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Operands must come from to_tf32.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef TUNEBENCH_EMULATE
  on_host::mma<float>("mma.m16n8k8.tf32", d, a, b);
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// sm_89 on. Its sums have fewer fraction bits than an f32 (see workloads/common/accumulation.py).
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef TUNEBENCH_EMULATE
  on_host::mma<e4m3_t>("mma.m16n8k32.e4m3", d, a, b);
#else
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// A sum beyond the range of i32 wraps around.
__device__ __forceinline__ void mma_m16n8k32_s8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef TUNEBENCH_EMULATE
  on_host::mma<i8>("mma.m16n8k32.s8", d, a, b);
#else
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// x y + z of two f16 each.
__device__ __forceinline__ u32 multiply_add_f16x2(u32 x, u32 y, u32 z) {
#ifdef TUNEBENCH_EMULATE
  u32 result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto value = [&](u32 pair) { return to_float(half_t{u16(pair >> shift)}); };
    result |= u32(from_float<half_t>(value(x) * value(y) + value(z)).bits) << shift;
  }
  return result;
#else
  u32 result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
#endif
}

// Four elements of e4m3, exactly, as f16: the first and the third, and the second and the fourth. With the exponent's
// bits in the place of those of f16 a number is 2^-8 of its value, and NaN is 1.875. Times 37376, NaN alone exceeds the
// largest f16, 65504; infinity times 0 is NaN again.
__device__ __forceinline__ void e4m3_to_f16(u32 elements, u32 (&pairs)[2]) {
  const u32 small[2] = {(elements << 7 & 0x3f803f80u) | (elements << 8 & 0x80008000u),
                        (elements >> 1 & 0x3f803f80u) | (elements & 0x80008000u)};
  constexpr u32 MINUS_ZERO = 0x80008000u, LARGE = 0x78907890u, SCALE = 0x5c005c00u;  // 37376, 2^8
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 infinite_if_nan = multiply_add_f16x2(small[i], LARGE, MINUS_ZERO);  // added, it keeps the sign of zeros
    pairs[i] = multiply_add_f16x2(small[i], SCALE, multiply_add_f16x2(infinite_if_nan, 0u, MINUS_ZERO));
  }
}

// mma_m16n8k32_e4m3 for devices without it: two products of f16, with the terms of k in another order.
__device__ __forceinline__ void mma_m16n8k32_by_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of k
    u32 upper[2], lower[2], of_b[2];
    e4m3_to_f16(a[2 * half], upper);
    e4m3_to_f16(a[2 * half + 1], lower);
    e4m3_to_f16(b[half], of_b);
    const u32 of_a[4] = {upper[0], lower[0], upper[1], lower[1]};
    mma_m16n8k16_f16(d, of_a, of_b);
  }
}

// The 8-bit instruction by element type: mma_m16n8k32<i8>(d, a, b).
template <class T>
__device__ __forceinline__ void mma_m16n8k32(Wide<T> (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k32<e4m3_t>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if defined(TUNEBENCH_EMULATE) || __CUDA_ARCH__ >= 890
  mma_m16n8k32_e4m3(d, a, b);
#else
  mma_m16n8k32_by_f16(d, a, b);
#endif
}
template <>
__device__ __forceinline__ void mma_m16n8k32<i8>(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k32_s8(d, a, b);
}

// The 16-bit instruction by element type: mma_m16n8k16<half_t>(d, a, b).
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k16<half_t>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16_f16(d, a, b);
}
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16_t>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  mma_m16n8k16_bf16(d, a, b);
}

// ---- bytes of registers ------------------------------------------------------------------------------------

// Byte i of the result is byte s of `low` (s from 0 to 3) or of `high` (4 to 7), where s is hexadecimal digit i of
// SELECTOR.
template <u32 SELECTOR>
__device__ __forceinline__ u32 pick_bytes(u32 low, u32 high) {
  static_assert((SELECTOR & 0xffff8888u) == 0, "four digits from 0 to 7");
#ifdef TUNEBENCH_EMULATE
  const u64 both = u64(high) << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= u32(both >> (8 * (SELECTOR >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  return result;
#else
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "n"(SELECTOR));
  return result;
#endif
}

// ---- loading fragments from shared memory -----------------------------------------------------------------
// Each 8 x 8 matrix of 16-bit elements has its row r at the address that lane 8 * matrix + r passes (a multiple
// of 16 bytes; with x2 the addresses of lanes 16 on are not read). Register i of a lane holds M[g][2t, 2t + 1] of
// matrix i; transposed, M[2t, 2t + 1][g].

#ifdef TUNEBENCH_EMULATE
namespace on_host {
using namespace emulated;

struct MatrixRow {
  const void* address;
};
struct MatrixRegisters {
  u32 reg[4];
};

template <int MATRICES, bool TRANSPOSED>
void ldmatrix_whole_warp(Lanes<const MatrixRow> in, Lanes<MatrixRegisters> out) {
  for (int matrix = 0; matrix < MATRICES; ++matrix) {
    u16 M[8][8];
    for (int row = 0; row < 8; ++row) {
      const void* address = in[8 * matrix + row].address;
      check_shared(address, 16, "ldmatrix");
      tell_shared_read(8 * matrix + row, address, 16);
      for (int column = 0; column < 8; ++column) M[row][column] = static_cast<const u16*>(address)[column];
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const u16 low = TRANSPOSED ? M[2 * t][g] : M[g][2 * t], high = TRANSPOSED ? M[2 * t + 1][g] : M[g][2 * t + 1];
      out[lane].reg[matrix] = u32(low) | u32(high) << 16;
    }
  }
}

template <int MATRICES, bool TRANSPOSED>
void ldmatrix(u32 (&d)[MATRICES], const void* row) {
  const MatrixRow mine = {row};
  const auto result = whole_warp<MatrixRegisters>("ldmatrix", mine, ldmatrix_whole_warp<MATRICES, TRANSPOSED>);
  for (int i = 0; i < MATRICES; ++i) d[i] = result.reg[i];
}

}  // namespace on_host
#else
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}
#endif

__device__ __forceinline__ void ldmatrix_x4(u32 (&d)[4], const void* row) {
#ifdef TUNEBENCH_EMULATE
  on_host::ldmatrix<4, false>(d, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&d)[4], const void* row) {
#ifdef TUNEBENCH_EMULATE
  on_host::ldmatrix<4, true>(d, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x2(u32 (&d)[2], const void* row) {
#ifdef TUNEBENCH_EMULATE
  on_host::ldmatrix<2, false>(d, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(shared_address(row))
               : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&d)[2], const void* row) {
#ifdef TUNEBENCH_EMULATE
  on_host::ldmatrix<2, true>(d, row);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(shared_address(row))
               : "memory");
#endif
}

// ---- asynchronous copies from global to shared memory -----------------------------------------------------
// Both addresses are multiples of BYTES. The first `source_bytes` are copied and the rest of BYTES is zeroed; with 0,
// `source` is not read and may be any address of the right alignment. A copy is visible to its thread after
// cp_async_wait of its group, and to other threads after a following barrier.

// Through L1 (`ca`: BYTES is 4, 8 or 16).
template <int BYTES>
__device__ __forceinline__ void cp_async_ca(void* target, const void* source, int source_bytes = BYTES) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async.ca copies 4, 8 or 16 bytes");
#ifdef TUNEBENCH_EMULATE
  emulated::copy_async(target, source, BYTES, source_bytes);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(target)), "l"(source), "n"(BYTES),
               "r"(source_bytes)
               : "memory");
#endif
}

// Past L1 (`cg`: 16 bytes).
__device__ __forceinline__ void cp_async_cg(void* target, const void* source, int source_bytes = 16) {
#ifdef TUNEBENCH_EMULATE
  emulated::copy_async(target, source, 16, source_bytes, /*past_l1=*/true);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source),
               "r"(source_bytes)
               : "memory");
#endif
}

// Closes this thread's group of copies, which may be empty.
__device__ __forceinline__ void cp_async_commit() {
#ifdef TUNEBENCH_EMULATE
  emulated::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the N latest groups of this thread are in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
#ifdef TUNEBENCH_EMULATE
  emulated::wait_for_copies(N);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
