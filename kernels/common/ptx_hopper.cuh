#pragma once
// Wrappers of PTX instructions that only Hopper has (sm_90a), each with a call of the emulator's model (in
// shim/hopper.h). Needs types.cuh and ptx.cuh.
//
// Shared memory is addressed by 32-bit addresses (`shared_address`). Source: PTX ISA, the section that each group
// names.

// Opaque: encoded by the host, read by TMA. A kernel takes it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
  u8 bytes[128];
};

#ifdef TUNEBENCH_EMULATE
inline u32 shared_address(const void* pointer) { return emulated::shared_address(pointer); }
#endif

// ---- asynchronous barriers ("mbarrier") --------------------------------------------------------------------
// A barrier is 8 bytes of shared memory. It ends a phase after `count` arrivals when no expected bytes are outstanding,
// and then begins the next phase. Phases have parity 0, 1, 0, …; a wait for parity 1 of a new barrier returns
// immediately.

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
#ifdef TUNEBENCH_EMULATE
  emulated::mbarrier_init(barrier, count);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}

// Makes initialised barriers of this thread visible to TMA and to the cluster; other threads must wait at a barrier
// after this call.
__device__ __forceinline__ void fence_mbarrier_init() {
#ifdef TUNEBENCH_EMULATE
  emulated::fence_mbarrier_init();
#else
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
#ifdef TUNEBENCH_EMULATE
  emulated::mbarrier_arrive(barrier, 0);
#else
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Arrives at a barrier of a block of the cluster: `barrier` comes from cluster_address. It does not make this thread's
// writes visible to the other block: that would flush all memory, and is not needed to report that a buffer has been
// read.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier) {
#ifdef TUNEBENCH_EMULATE
  emulated::mbarrier_arrive(barrier, 0);
#else
  asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Arrives, and makes the phase wait for that many bytes of bulk copies, too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
#ifdef TUNEBENCH_EMULATE
  emulated::mbarrier_arrive(barrier, bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Waits for the end of the phase of this parity; writes of threads that arrived in it are then visible.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
#ifdef TUNEBENCH_EMULATE
  emulated::mbarrier_wait(barrier, parity);
#else
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
#endif
}

// Makes accesses to shared memory, of this thread and of those it has synchronised with, visible to bulk copies and
// wgmma that follow: these are of another proxy ("Async Proxy"). Required where one follows ordinary loads or stores of
// the same bytes; after waiting for a copy or a product, none is required.
__device__ __forceinline__ void fence_proxy_async() {
#ifdef TUNEBENCH_EMULATE
  emulated::fence_proxy_async();
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- bulk tensor copies ("cp.async.bulk.tensor") -----------------------------------------------------------
// Asynchronous copies, first those from global to shared memory: the box of the map whose first element has these coordinates,
// innermost first. Elements outside the tensor are zeros. `target` is a multiple of 128 bytes; the barrier counts all
// bytes of the box when they have arrived. One thread copies a whole box.

__device__ __forceinline__ void copy_box_2d(u32 target, const TensorMap& map, int x, int y, u32 barrier) {
#ifdef TUNEBENCH_EMULATE
  const int corner[] = {x, y};
  emulated::copy_box(target, &map, 2, corner, barrier, 0);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
#endif
}

__device__ __forceinline__ void copy_box_3d(u32 target, const TensorMap& map, int x, int y, int z, u32 barrier) {
#ifdef TUNEBENCH_EMULATE
  const int corner[] = {x, y, z};
  emulated::copy_box(target, &map, 3, corner, barrier, 0);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
#endif
}

// Copies to the same offset in every block of the cluster whose bit in `blocks` is set; each block's own barrier, at
// the offset of `barrier`, counts the bytes.
__device__ __forceinline__ void copy_box_3d_multicast(u32 target, const TensorMap& map, int x, int y, int z,
                                                      u32 barrier, u16 blocks) {
#ifdef TUNEBENCH_EMULATE
  const int corner[] = {x, y, z};
  emulated::copy_box(target, &map, 3, corner, barrier, blocks);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
      : "memory");
#endif
}

// Copies a column of pixels ("im2col mode") of a tensor map of images by width, height and channels, from the pixel
// with the filter's first tap at (x, y) of image `image` on, which must be in the map's box of pixels. For each pixel
// it copies channels from `channel` on, of the pixel at distance (right, down), where another tap of the filter is.
__device__ __forceinline__ void copy_pixels_4d(u32 target, const TensorMap& map, int channel, int x, int y, int image,
                                               u16 right, u16 down, u32 barrier) {
#ifdef TUNEBENCH_EMULATE
  const int corner[] = {channel, x, y, image};
  const u16 offsets[] = {right, down};
  emulated::copy_pixels(target, &map, 4, corner, offsets, barrier, 0);
#else
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
      "%5}], [%6], {%7, %8};" ::"r"(target),
      "l"(&map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(barrier), "h"(right), "h"(down)
      : "memory");
#endif
}

__device__ __forceinline__ void copy_pixels_4d_multicast(u32 target, const TensorMap& map, int channel, int x, int y,
                                                         int image, u16 right, u16 down, u32 barrier, u16 blocks) {
#ifdef TUNEBENCH_EMULATE
  const int corner[] = {channel, x, y, image};
  const u16 offsets[] = {right, down};
  emulated::copy_pixels(target, &map, 4, corner, offsets, barrier, blocks);
#else
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], {%7, %8}, %9;" ::"r"(target),
      "l"(&map), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(barrier), "h"(right), "h"(down), "h"(blocks)
      : "memory");
#endif
}

// Copies a box from shared memory to the tensor. Elements outside the tensor are not written. `source` is a multiple of
// 128 bytes. Other threads' writes to it need fence_proxy_async, and a barrier, before.
__device__ __forceinline__ void store_box_3d(u32 source, const TensorMap& map, int x, int y, int z) {
#ifdef TUNEBENCH_EMULATE
  const int corner[] = {x, y, z};
  emulated::store_box(source, &map, 3, corner);
#else
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
               "r"(x), "r"(y), "r"(z), "r"(source)
               : "memory");
#endif
}

// Closes this thread's group of copies to global memory.
__device__ __forceinline__ void commit_stores() {
#ifdef TUNEBENCH_EMULATE
  emulated::commit_stores();
#else
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until all groups of this thread but the N latest have read their shared memory. Required before that memory is
// written again, and before the block exits.
template <int N>
__device__ __forceinline__ void wait_for_stores() {
#ifdef TUNEBENCH_EMULATE
  emulated::wait_for_stores(N);
#else
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#endif
}

// Prefetches a tensor map before its first use.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
#ifdef TUNEBENCH_EMULATE
  (void)map;
#else
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// ---- products of a warpgroup ("Asynchronous warpgroup level matrix instructions") ---------------------------
// A warpgroup is four warps, the first of which has a number divisible by four. All its threads make each of these
// calls.

// Descriptor of a matrix in shared memory for wgmma ("Matrix Descriptor Format"). X is M of A, or N of B. Lines have
// the 128 bytes of the swizzle with which they were copied; `start` is within the first line of a multiple of 1024.
//   K-major (lines along K): `stride` is the distance between groups of 8 lines; `leading` is not used.
//   X-major (lines along X, of 16-bit types): `stride` is the distance between groups of 8 lines, `leading`
//   that between groups of 64 of X.
__device__ __forceinline__ u64 matrix_descriptor_128(u32 start, u32 leading, u32 stride) {
  return u64((start & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | u64(1) << 62;
}

// Required before the first product, and after registers of a product were used otherwise.
__device__ __forceinline__ void wgmma_fence() {
#ifdef TUNEBENCH_EMULATE
  emulated::warpgroup_fence();
#else
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Closes this warpgroup's group of products.
__device__ __forceinline__ void wgmma_commit() {
#ifdef TUNEBENCH_EMULATE
  emulated::warpgroup_commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most the N latest groups are in flight. Sums also need `settle` before they are used.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
#ifdef TUNEBENCH_EMULATE
  emulated::warpgroup_wait(N);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

template <class T>
constexpr bool IS_INTEGER = false;
template <>
constexpr bool IS_INTEGER<i32> = true;

// No instruction: keeps the compiler from using sums before the preceding wait.
template <class Sum, int N>
__device__ __forceinline__ void settle(Sum (&sums)[N][4]) {
#ifdef TUNEBENCH_EMULATE
  emulated::settle(sums[0], 4 * N);
#else
#pragma unroll
  for (int j = 0; j < N; ++j)
    if constexpr (IS_INTEGER<Sum>)
      asm volatile("" : "+r"(sums[j][0]), "+r"(sums[j][1]), "+r"(sums[j][2]), "+r"(sums[j][3])::"memory");
    else
      asm volatile("" : "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3])::"memory");
#endif
}

// Makes the compiler compute `value`, which is never -1, before the following code. Otherwise it may move a wait for
// products ahead of work that should overlap with them.
__device__ __forceinline__ void computed_by_now(float value) {
#ifdef TUNEBENCH_EMULATE
  (void)value;
#else
  asm volatile("{\n.reg .pred p;\nsetp.eq.f32 p, %0, 0fBF800000;\n@p st.shared.f32 [%1], %0;\n}" ::"f"(value), "r"(0)
               : "memory");
#endif
}

template <class T>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<bf16_t> = true;
template <class T>
constexpr bool IS_I8 = false;
template <>
constexpr bool IS_I8<i8> = true;

#ifndef TUNEBENCH_EMULATE
// Sums of f32 (c is "+f") or i32 ("+r").
#define WGMMA_SUMS_8(c, d, j)                                                                                 \
  c(d[j][0]), c(d[j][1]), c(d[j][2]), c(d[j][3]), c(d[j + 1][0]), c(d[j + 1][1]), c(d[j + 1][2]), c(d[j + 1][3])
#define WGMMA_SUMS_32(c, d, j) \
  WGMMA_SUMS_8(c, d, j), WGMMA_SUMS_8(c, d, j + 2), WGMMA_SUMS_8(c, d, j + 4), WGMMA_SUMS_8(c, d, j + 6)
#define WGMMA_SUMS_64(c, d) WGMMA_SUMS_32(c, d, 0)
#define WGMMA_SUMS_128(c, d) WGMMA_SUMS_64(c, d), WGMMA_SUMS_32(c, d, 8)
#define WGMMA_SUMS_192(c, d) WGMMA_SUMS_128(c, d), WGMMA_SUMS_32(c, d, 16)
#define WGMMA_SUMS_256(c, d) WGMMA_SUMS_192(c, d), WGMMA_SUMS_32(c, d, 24)
#define WGMMA_NAMES_64                                                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31"
#define WGMMA_NAMES_128                                                                                            \
  WGMMA_NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
                 "%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_NAMES_192                                                                                             \
  WGMMA_NAMES_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87," \
                  "%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_NAMES_256                                                                                           \
  WGMMA_NAMES_192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114," \
                  "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// Operands after the N / 2 sums: the descriptors, whether to accumulate, and, for 16-bit types, which operand is
// X-major.
#define WGMMA_BEGIN(n, kind, of_a, of_b, add)                                                         \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n kind " {"       \
  WGMMA_NAMES_##n "}, " of_a ", " of_b ", p"
#define WGMMA_16_BIT(n, type, of_a, of_b, add, major_a, major_b)                                      \
  asm volatile(WGMMA_BEGIN(n, "k16.f32." type "." type, of_a, of_b, add) ", 1, 1, " major_a ", " major_b ";\n}" \
               : WGMMA_SUMS_##n("+f", sums)                                                                 \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(A_ALONG_M)), "n"(int(B_ALONG_N))       \
               : "memory")
#define WGMMA_E4M3(n, of_a, of_b, add)                                                                \
  asm volatile(WGMMA_BEGIN(n, "k32.f32.e4m3.e4m3", of_a, of_b, add) ", 1, 1;\n}"                      \
               : WGMMA_SUMS_##n("+f", sums)                                                           \
               : "l"(a), "l"(b), "r"(int(accumulate))                                                 \
               : "memory")
#define WGMMA_S8(n, of_a, of_b, add)                                                                  \
  asm volatile(WGMMA_BEGIN(n, "k32.s32.s8.s8", of_a, of_b, add) ";\n}"                                \
               : WGMMA_SUMS_##n("+r", sums)                                                           \
               : "l"(a), "l"(b), "r"(int(accumulate))                                                 \
               : "memory")
#define WGMMA_16_BIT_OF_ANY_N(type)                             \
  if constexpr (N == 64)                                        \
    WGMMA_16_BIT(64, type, "%32", "%33", "%34", "%35", "%36");  \
  else if constexpr (N == 128)                                  \
    WGMMA_16_BIT(128, type, "%64", "%65", "%66", "%67", "%68"); \
  else if constexpr (N == 192)                                  \
    WGMMA_16_BIT(192, type, "%96", "%97", "%98", "%99", "%100"); \
  else                                                          \
    WGMMA_16_BIT(256, type, "%128", "%129", "%130", "%131", "%132")
#define WGMMA_REGISTERS(n, type, of_a, of_b, add, major_b)                                            \
  asm volatile(WGMMA_BEGIN(n, "k16.f32." type "." type, of_a, of_b, add) ", 1, 1, " major_b ";\n}"          \
               : WGMMA_SUMS_##n("+f", sums)                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),            \
                 "n"(int(B_ALONG_N))                                                                  \
               : "memory")
#define WGMMA_REGISTERS_OF_ANY_N(type)                                              \
  if constexpr (N == 64)                                                            \
    WGMMA_REGISTERS(64, type, "{%32,%33,%34,%35}", "%36", "%37", "%38");            \
  else if constexpr (N == 128)                                                      \
    WGMMA_REGISTERS(128, type, "{%64,%65,%66,%67}", "%68", "%69", "%70");           \
  else if constexpr (N == 192)                                                      \
    WGMMA_REGISTERS(192, type, "{%96,%97,%98,%99}", "%100", "%101", "%102");        \
  else                                                                              \
    WGMMA_REGISTERS(256, type, "{%128,%129,%130,%131}", "%132", "%133", "%134")
#define WGMMA_TF32_REGISTERS(n, of_a, of_b, add)                                                      \
  asm volatile(WGMMA_BEGIN(n, "k8.f32.tf32.tf32", of_a, of_b, add) ", 1, 1;\n}"                       \
               : WGMMA_SUMS_##n("+f", sums)                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate))             \
               : "memory")
#endif

// Instantiated widths.
template <int N>
constexpr bool IS_WGMMA_WIDTH = N == 64 || N == 128 || N == 192 || N == 256;

// D (64, N) = A (64, K) B (K, N), plus D if `accumulate`, with sums in f32: m64nNk16 of f16 and bf16, m64nNk32 of e4m3.
// The descriptors locate A and B; A_ALONG_M and B_ALONG_N mark X-major operands (16-bit types only). In warp w
// of the warpgroup, the lane with group g = lane / 4 and place t = lane % 4 has
//   sums[j][0..1] = D[16 w + g][8 j + 2 t, 8 j + 2 t + 1]    sums[j][2..3] = D[16 w + g + 8][the same]
template <class T, int N, bool A_ALONG_M, bool B_ALONG_N>
__device__ __forceinline__ void wgmma_m64k16(float (&sums)[N / 8][4], u64 a, u64 b, bool accumulate) {
  static_assert(IS_WGMMA_WIDTH<N> && sizeof(T) == 2, "f16 or bf16");
#ifdef TUNEBENCH_EMULATE
  const auto value = [](const void* element) { return to_float(*static_cast<const T*>(element)); };
  const char* const type = IS_BF16<T> ? "bf16" : "f16";
  emulated::warpgroup_multiply({a, b, value, type, sizeof(T), N, A_ALONG_M, B_ALONG_N, accumulate}, sums[0]);
#else
  if constexpr (IS_BF16<T>) {
    WGMMA_16_BIT_OF_ANY_N("bf16");
  } else {
    WGMMA_16_BIT_OF_ANY_N("f16");
  }
#endif
}

// The same with A in registers, 16 of K, in the layout of mma_m16n8k16: in warp w,
//   a[0] = A[16 w + g][2 t, 2 t + 1], a[1] = A[16 w + g + 8][the same], a[2] and a[3] likewise from 2 t + 8 on.
// The registers must not change until the product has been waited for.
template <class T, int N, bool B_ALONG_N>
__device__ __forceinline__ void wgmma_m64k16_registers(float (&sums)[N / 8][4], const u32 (&a)[4], u64 b,
                                                       bool accumulate) {
  static_assert(IS_WGMMA_WIDTH<N> && sizeof(T) == 2, "f16 or bf16");
#ifdef TUNEBENCH_EMULATE
  const auto value = [](const void* element) { return to_float(*static_cast<const T*>(element)); };
  const char* const type = IS_BF16<T> ? "bf16" : "f16";
  emulated::warpgroup_multiply({0, b, value, type, sizeof(T), N, false, B_ALONG_N, accumulate, a}, sums[0]);
#else
  if constexpr (IS_BF16<T>) {
    WGMMA_REGISTERS_OF_ANY_N("bf16");
  } else {
    WGMMA_REGISTERS_OF_ANY_N("f16");
  }
#endif
}

// The same of tf32 with A in registers, 8 of K, in the layout of mma_m16n8k8_tf32: in warp w,
//   a[0] = A[16 w + g][t], a[1] = A[16 w + g + 8][t], a[2] and a[3] likewise at t + 4.
// Elements are f32, of which the product ignores the lower 13 bits, in registers and in shared memory alike: operands
// must have been rounded (`to_tf32`). B is K-major.
template <int N>
__device__ __forceinline__ void wgmma_m64k8_tf32_registers(float (&sums)[N / 8][4], const u32 (&a)[4], u64 b,
                                                           bool accumulate) {
  static_assert(IS_WGMMA_WIDTH<N>, "other widths are not written out");
#ifdef TUNEBENCH_EMULATE
  const auto value = [](const void* element) {
    return __uint_as_float(*static_cast<const u32*>(element) & 0xffffe000u);
  };
  emulated::warpgroup_multiply({0, b, value, "tf32", 4, N, false, false, accumulate, a}, sums[0]);
#else
  if constexpr (N == 64)
    WGMMA_TF32_REGISTERS(64, "{%32,%33,%34,%35}", "%36", "%37");
  else if constexpr (N == 128)
    WGMMA_TF32_REGISTERS(128, "{%64,%65,%66,%67}", "%68", "%69");
  else if constexpr (N == 192)
    WGMMA_TF32_REGISTERS(192, "{%96,%97,%98,%99}", "%100", "%101");
  else
    WGMMA_TF32_REGISTERS(256, "{%128,%129,%130,%131}", "%132", "%133");
#endif
}

template <int N>
__device__ __forceinline__ void wgmma_m64k32_e4m3(float (&sums)[N / 8][4], u64 a, u64 b, bool accumulate) {
  static_assert(IS_WGMMA_WIDTH<N>, "other widths are not written out");
#ifdef TUNEBENCH_EMULATE
  const auto value = [](const void* element) { return to_float(*static_cast<const e4m3_t*>(element)); };
  emulated::warpgroup_multiply({a, b, value, "e4m3", 1, N, false, false, accumulate}, sums[0]);
#else
  if constexpr (N == 64)
    WGMMA_E4M3(64, "%32", "%33", "%34");
  else if constexpr (N == 128)
    WGMMA_E4M3(128, "%64", "%65", "%66");
  else if constexpr (N == 192)
    WGMMA_E4M3(192, "%96", "%97", "%98");
  else
    WGMMA_E4M3(256, "%128", "%129", "%130");
#endif
}

// The same of i8 with sums in i32, which wrap around.
template <int N>
__device__ __forceinline__ void wgmma_m64k32_s8(i32 (&sums)[N / 8][4], u64 a, u64 b, bool accumulate) {
  static_assert(IS_WGMMA_WIDTH<N>, "other widths are not written out");
#ifdef TUNEBENCH_EMULATE
  const auto value = [](const void* element) { return float(*static_cast<const i8*>(element)); };
  emulated::warpgroup_multiply({a, b, value, "s8", 1, N, false, false, accumulate}, sums[0]);
#else
  if constexpr (N == 64)
    WGMMA_S8(64, "%32", "%33", "%34");
  else if constexpr (N == 128)
    WGMMA_S8(128, "%64", "%65", "%66");
  else if constexpr (N == 192)
    WGMMA_S8(192, "%96", "%97", "%98");
  else
    WGMMA_S8(256, "%128", "%129", "%130");
#endif
}

// The instruction by element type; it takes 32 bytes of K.
template <class T, int N, bool A_ALONG_M, bool B_ALONG_N>
__device__ __forceinline__ void wgmma_m64(Wide<T> (&sums)[N / 8][4], u64 a, u64 b, bool accumulate) {
  if constexpr (sizeof(T) == 1) {
    static_assert(!A_ALONG_M && !B_ALONG_N, "8-bit operands are K-major");
    if constexpr (IS_I8<T>)
      wgmma_m64k32_s8<N>(sums, a, b, accumulate);
    else
      wgmma_m64k32_e4m3<N>(sums, a, b, accumulate);
  } else {
    wgmma_m64k16<T, N, A_ALONG_M, B_ALONG_N>(sums, a, b, accumulate);
  }
}

// The same with A in registers.
template <class T, int N, bool B_ALONG_N>
__device__ __forceinline__ void wgmma_m64_registers(float (&sums)[N / 8][4], const u32 (&a)[4], u64 b, bool accumulate) {
  if constexpr (sizeof(T) == 4) {
    static_assert(!B_ALONG_N, "32-bit operands are K-major");
    wgmma_m64k8_tf32_registers<N>(sums, a, b, accumulate);
  } else {
    wgmma_m64k16_registers<T, N, B_ALONG_N>(sums, a, b, accumulate);
  }
}

// ---- additions to global memory ("red") -----------------------------------------------------------------------

// Adds four f32 to four neighbours, each of which is atomic by itself. `target` is a multiple of 16 bytes.
__device__ __forceinline__ void add_to_global(float* target, const float (&values)[4]) {
#ifdef TUNEBENCH_EMULATE
  emulated::check_aligned(target, 16, "add_to_global");
  for (int i = 0; i < 4; ++i) atomicAdd(target + i, values[i]);
#else
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
#endif
}

// ---- registers ("setmaxnreg") -------------------------------------------------------------------------------
// All warps of a warpgroup call one of these. The kernel needs a register limit from __launch_bounds__, and the warps
// of a block may hold no more registers than at launch: an increase waits until other warps have released theirs.

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
#ifdef TUNEBENCH_EMULATE
  emulated::set_registers(REGISTERS, emulated::Registers::given);
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
#ifdef TUNEBENCH_EMULATE
  emulated::set_registers(REGISTERS, emulated::Registers::taken);
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

// ---- clusters ("barrier.cluster", "mapa") --------------------------------------------------------------------

// Rank of this block in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
#ifdef TUNEBENCH_EMULATE
  return emulated::cluster_rank();
#else
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
}

// The address in block `rank` of the cluster that corresponds to this address here.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
#ifdef TUNEBENCH_EMULATE
  return emulated::cluster_address(address, rank);
#else
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
#endif
}

// All threads of all blocks of the cluster call both; independent work may be placed between them.
__device__ __forceinline__ void cluster_arrive() {
#ifdef TUNEBENCH_EMULATE
  emulated::cluster_arrive();
#else
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#ifdef TUNEBENCH_EMULATE
  emulated::cluster_wait();
#else
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
