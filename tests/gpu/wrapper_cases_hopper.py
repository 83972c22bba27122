"""Cases of the PTX wrappers that only Hopper (sm_90a) has: one or two per wrapper.

Bulk copies move the operands to shared memory: the 64 elements of 16 bits of a thread are a line of 128
bytes. Barriers come first, then copies, then matrix products, which use both, then im2col copies, clusters
and multicasts: the first differing case names the cause.
"""

from __future__ import annotations

from typing import Any, Literal

from tests.gpu.wrapper_case import Kind, Operand, WrapperCase
from tunebench.variant import PixelBox

__all__ = ["CASES"]

HOPPER: dict[str, Any] = {
    "minimum_cc": (9, 0),
    "maximum_cc": (9, 0),
    "files": ("types", "ptx", "ptx_hopper"),
}
LINE = Operand("m", 32)
ELEMENT = {"f16": "half_t", "bf16": "bf16_t"}

BARRIERS = """
  __shared__ __align__(8) u64 barrier_at[1];
  const u32 barrier = shared_address(barrier_at);
"""


def _barrier() -> WrapperCase:
    """Write, arrive and wait, twice: the writes of all threads must be visible after the wait."""
    body = f"""{BARRIERS}  __shared__ u32 passed[64];
  if (threadIdx.x == 0) {{
    mbarrier_init(barrier, 64);
    fence_mbarrier_init();
  }}
  __syncthreads();
  for (int phase = 0; phase < 2; ++phase) {{
    passed[threadIdx.x] = m[phase];
    mbarrier_arrive(barrier);
    mbarrier_wait(barrier, u32(phase));
    r[phase] = passed[(threadIdx.x + 37) % 64];
    __syncthreads();
  }}"""
    covers = ("mbarrier_init", "fence_mbarrier_init", "mbarrier_arrive", "mbarrier_wait")
    return WrapperCase("mbarrier", (Operand("m", 2),), body, (Operand("r", 2),), covers, threads=64, **HOPPER)


def _expect(nbytes: int, *copies: str) -> str:
    """Return the code by which one thread prepares the barrier for copies, and starts them."""
    calls = "".join(f"    {call};\n" for call in (f"mbarrier_arrive_expect_tx(barrier, {nbytes})", *copies))
    return f"""  if (threadIdx.x == 0) {{
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
{calls}  }}
"""


def _copied(name: str, copy: str, covers: tuple[str, ...], **shape: Any) -> WrapperCase:
    """Copy 64 lines to shared memory, and compare every byte."""
    body = f"""{BARRIERS}  __shared__ __align__(1024) u32 box[64 * 32];
{_expect(64 * 128, copy)}  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (int i = 0; i < 32; ++i) r[i] = box[32 * threadIdx.x + i];"""
    outputs = (Operand("r", 32),)
    return WrapperCase(name, (LINE,), body, outputs, covers, boxes=(64,), threads=64, **shape, **HOPPER)


def _copy(rank: Literal[2, 3], x: int, y: int) -> WrapperCase:
    """Copy a box that starts at (x, y), possibly outside the tensor."""
    at = {2: f"{x}, {y}", 3: f"{x}, {y}, int(blockIdx.x)"}[rank]
    copy = f"prefetch_tensor_map(map0); copy_box_{rank}d(shared_address(box), map0, {at}, barrier)"
    covers = (f"copy_box_{rank}d", "prefetch_tensor_map", "mbarrier_arrive_expect_tx")
    return _copied(f"copy_box_{rank}d at ({x}, {y})", copy, covers, rank=rank)


def _stored() -> WrapperCase:
    """Store 64 lines by three boxes of 32, the first and the last of which reach beyond the tensor."""
    body = """__shared__ __align__(1024) u32 lines[96 * 32];
  const int line = int(threadIdx.x) + 8;
  EACH(32) lines[32 * line + (i / 4 ^ line % 8) * 4 + i % 4] = m[i];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    EACH(3) {
      store_box_3d(shared_address(lines) + 4096 * i, map0, 0, 32 * i - 8, int(blockIdx.x));
      commit_stores();
    }
    wait_for_stores<0>();
  }"""
    covers = ("store_box_3d", "commit_stores", "wait_for_stores")
    shape: dict[str, Any] = {"result_box": 32, "threads": 64, **HOPPER}
    return WrapperCase("store_box_3d", (LINE,), body, (Operand("r", 32, "stored"),), covers, **shape)


def _pixels(
    lower: tuple[int, int],
    upper: tuple[int, int],
    stride: int,
    start: tuple[int, int],
    tap: tuple[int, int],
    channel: int = 0,
) -> WrapperCase:
    """Copy 64 pixels of a filter tap, from pixel `start` of the block's image; pairs are (x, y)."""
    at = f"{channel}, {start[0]}, {start[1]}, int(blockIdx.x), {tap[0]}, {tap[1]}"
    name = f"copy_pixels_4d from {start} on, {lower} to {upper} by {stride}, tap {tap}"
    pixels = PixelBox(lower=lower, upper=upper, strides=(stride, stride))
    copy = f"copy_pixels_4d(shared_address(box), map0, {at}, barrier)"
    return _copied(name, copy, ("copy_pixels_4d",), pixel_box=pixels)


def _product(kind: Kind, n: int, *, a_along_m: bool = False, b_along_n: bool = False) -> WrapperCase:
    """Multiply (64, K) by (K, n) in four steps; the first 64 threads hold A, the next n threads B."""
    # K-major: a step advances 32 bytes within a line. M- or N-major: 16 lines; a panel has 64 columns of N.
    of_a = "2048 * step, 8192" if a_along_m else "32 * step, 0"
    of_b = "2048 * step, 8192" if b_along_n else "32 * step, 0"
    element, sums = {"i8": "s8"}.get(kind, kind), "i32" if kind == "i8" else "float"
    if kind in ("e4m3", "i8"):
        call, wrapper = f"wgmma_m64k32_{element}<{n}>", f"wgmma_m64k32_{element}"
    else:
        element, flags = ELEMENT[kind], f"{str(a_along_m).lower()}, {str(b_along_n).lower()}"
        call, wrapper = f"wgmma_m64k16<{element}, {n}, {flags}>", "wgmma_m64k16"
    at = "int(blockIdx.x), barrier"
    copies = (f"copy_box_3d(of_a, map0, 0, 0, {at})", f"copy_box_3d(of_b, map1, 0, 64, {at})")
    body = f"""{BARRIERS}  __shared__ __align__(1024) u8 lines[{(64 + n) * 128}];
  const u32 of_a = shared_address(lines), of_b = of_a + 64 * 128;
{_expect((64 + n) * 128, *copies)}  __syncthreads();
  {sums} sums[{n // 8}][4] = {{}};
  if (threadIdx.x < 128) {{
    mbarrier_wait(barrier, 0);
    wgmma_fence();
    for (int step = 0; step < 4; ++step) {{
      const u64 a = matrix_descriptor_128(of_a + {of_a}, 1024);
      const u64 b = matrix_descriptor_128(of_b + {of_b}, 1024);
      {call}(sums, a, b, step > 0);
    }}
    wgmma_commit();
    wgmma_wait<0>();
    settle(sums);
  }}
  EACH({n // 2}) d[i] = sums[i / 4][i % 4];"""
    covers = (wrapper, "wgmma_fence", "wgmma_commit", "wgmma_wait", "settle")
    inputs, outputs = (Operand("m", 32, kind),), (Operand("d", n // 2, "i32" if kind == "i8" else "f32"),)
    return WrapperCase(call, inputs, body, outputs, covers, boxes=(64, n), threads=64 + n, **HOPPER)


def _product_of_registers(kind: Kind, n: int, *, b_along_n: bool = False) -> WrapperCase:
    """As `_product`, with A in registers."""
    of_b = "2048 * step, 8192" if b_along_n else "32 * step, 0"
    call = f"wgmma_m64k8_tf32_registers<{n}>"
    if kind != "tf32":
        call = f"wgmma_m64k16_registers<{ELEMENT[kind]}, {n}, {str(b_along_n).lower()}>"
    copy = "copy_box_3d(of_b, map0, 0, 64, int(blockIdx.x), barrier)"
    body = f"""{BARRIERS}  __shared__ __align__(1024) u8 lines[{n} * 128];
  __shared__ u32 pairs[64][33];
  const u32 of_b = shared_address(lines), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
{_expect(n * 128, copy)}  if (threadIdx.x < 64) EACH(32) pairs[threadIdx.x][i] = m[i];
  __syncthreads();
  float sums[{n // 8}][4] = {{}};
  if (threadIdx.x < 128) {{
    u32 of_a[4][4];
    EACH(16) of_a[i / 4][i % 4] = pairs[row + i % 2 * 8][i / 4 * 8 + threadIdx.x % 4 + i % 4 / 2 * 4];
    mbarrier_wait(barrier, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {{
      const u64 b = matrix_descriptor_128(of_b + {of_b}, 1024);
      {call}(sums, of_a[step], b, step > 0);
    }}
    wgmma_commit();
    computed_by_now(float(row));
    wgmma_wait<0>();
    settle(sums);
  }}
  EACH({n // 2}) d[i] = sums[i / 4][i % 4];"""
    covers = (call.partition("<")[0], "computed_by_now")
    inputs, outputs = (Operand("m", 32, kind),), (Operand("d", n // 2, "f32"),)
    return WrapperCase(call, inputs, body, outputs, covers, boxes=(n,), threads=64 + n, **HOPPER)


def _product_of_stores() -> WrapperCase:
    """As `_product` of f16 with n = 64, but threads store the swizzled lines themselves."""
    body = """__shared__ __align__(1024) u32 lines[128 * 32];
  EACH(32) lines[32 * threadIdx.x + (i / 4 ^ threadIdx.x % 8) * 4 + i % 4] = m[i];
  fence_proxy_async();
  __syncthreads();
  const u32 of_a = shared_address(lines), of_b = of_a + 64 * 128;
  float sums[8][4] = {};
  wgmma_fence();
  for (int step = 0; step < 4; ++step)
    wgmma_m64k16<half_t, 64, false, false>(sums, matrix_descriptor_128(of_a + 32 * step, 0, 1024),
                                           matrix_descriptor_128(of_b + 32 * step, 0, 1024), step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  settle(sums);
  EACH(32) d[i] = sums[i / 4][i % 4];"""
    inputs, outputs = (Operand("m", 32, "f16"),), (Operand("d", 32, "f32"),)
    return WrapperCase("fence_proxy_async", inputs, body, outputs, threads=128, **HOPPER)


def _additions() -> WrapperCase:
    """Add to the words of two other threads of the block; every word gets two sums."""
    body = """float* const words = reinterpret_cast<float*>(outputs);
  EACH(4) words[4 * at + i] = 0.0f;
  __syncthreads();
  add_to_global(words + 4 * (at ^ 1), m);
  add_to_global(words + 4 * (at ^ 7), m);
  __syncthreads();
  EACH(4) r[i] = atomicAdd(words + 4 * at + i, 0.0f);"""
    inputs, outputs = (Operand("m", 4, "f32"),), (Operand("r", 4, "f32"),)
    return WrapperCase("add_to_global", inputs, body, outputs, **HOPPER)


def _registers() -> WrapperCase:
    """Move registers from one warpgroup to the other; both must keep their values."""
    body = """if (threadIdx.x < 128) {
    give_registers<40>();
  } else {
    take_registers<208>();
  }
  EACH(8) r[i] = m[i] * 3u + 1u;"""
    covers, inputs, outputs = ("give_registers", "take_registers"), (Operand("m", 8),), (Operand("r", 8),)
    return WrapperCase("setmaxnreg", inputs, body, outputs, covers, threads=256, blocks_per_sm=2, **HOPPER)


# Dynamic shared memory, visible to all blocks of the cluster: 64 lines and a barrier after them.
SHARED = """extern __shared__ __align__(1024) u8 shared[];
  u32* const lines = reinterpret_cast<u32*>(shared);
  const u32 barrier = shared_address(shared + 8192), rank = cluster_rank();
"""
IN_A_CLUSTER: dict[str, Any] = {"cluster": 2, "smem_bytes": 8192 + 8, **HOPPER}


def _cluster_barrier() -> WrapperCase:
    """Arrive at the barrier of the other block of the cluster, and wait at this block's barrier."""
    body = f"""{SHARED}  if (threadIdx.x == 0) {{
    mbarrier_init(barrier, 32);
    fence_mbarrier_init();
  }}
  lines[threadIdx.x] = m[0];
  cluster_arrive();
  cluster_wait();
  mbarrier_arrive_remote(cluster_address(barrier, rank ^ 1u));
  mbarrier_wait(barrier, 0);
  r[0] = rank, r[1] = lines[31 - threadIdx.x];
  cluster_arrive();
  cluster_wait();"""
    covers = ("cluster_rank", "cluster_address", "cluster_arrive", "cluster_wait", "mbarrier_arrive_remote")
    return WrapperCase("cluster", (Operand("m", 1),), body, (Operand("r", 2),), covers, **IN_A_CLUSTER)


def _multicast(name: str, at: str, **shape: Any) -> WrapperCase:
    """In a cluster of two, each block multicasts one half of 64 lines to both blocks."""
    body = f"""{SHARED}{_expect(64 * 128)}  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) {name}(shared_address(shared) + rank * 4096, map0, {at}, barrier, 3);
  mbarrier_wait(barrier, 0);
  for (int i = 0; i < 32; ++i) r[i] = lines[32 * threadIdx.x + i];
  cluster_arrive();
  cluster_wait();"""
    outputs = (Operand("r", 32),)
    return WrapperCase(name, (LINE,), body, outputs, boxes=(32,), threads=64, **shape, **IN_A_CLUSTER)


CASES: tuple[WrapperCase, ...] = (
    _barrier(),
    _additions(),
    _registers(),
    _copy(2, 0, 0),
    _copy(3, 0, 0),
    _copy(3, 8, -3),
    _copy(3, -16, 40),
    _stored(),
    *(_product("f16", n) for n in (64, 128, 192, 256)),
    _product("bf16", 128),
    *(_product("e4m3", n) for n in (64, 128, 192, 256)),
    *(_product("i8", n) for n in (64, 128, 192, 256)),
    _product("f16", 128, a_along_m=True),
    _product("f16", 128, b_along_n=True),
    _product("bf16", 256, a_along_m=True, b_along_n=True),
    *(_product_of_registers("f16", n, b_along_n=True) for n in (64, 128, 192, 256)),
    _product_of_registers("bf16", 128, b_along_n=True),
    _product_of_registers("bf16", 256),
    *(_product_of_registers("tf32", n) for n in (64, 128, 192, 256)),
    _product_of_stores(),
    # 3 x 3 with padding: first tap from an image's first pixel; last tap from one image into the next.
    _pixels((-1, -1), (-1, -1), 1, (-1, -1), (0, 0)),
    _pixels((-1, -1), (-1, -1), 1, (2, 5), (2, 2)),
    # By twos, over rows that end between two; without padding; other corners, and channels beyond the last.
    _pixels((-1, -1), (-1, -1), 2, (1, 3), (1, 2)),
    _pixels((0, 0), (-2, -2), 1, (3, 1), (1, 2)),
    _pixels((-3, 1), (2, -1), 3, (0, 4), (4, 0), channel=40),
    _cluster_barrier(),
    _multicast("copy_box_3d_multicast", "0, int(rank) * 32, int(blockIdx.x / 2)"),
    _multicast(
        "copy_pixels_4d_multicast",
        "0, -1, int(rank) * 4 - 1, int(blockIdx.x / 2), 2, 1",
        pixel_box=PixelBox(lower=(-1, -1), upper=(-1, -1), strides=(1, 1)),
    ),
)
"""In the order in which a GPU runs them: each case uses what the cases before it have shown to work."""
