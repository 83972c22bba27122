"""What is done with each wrapper of an instruction that Hopper alone has: a case or two a wrapper.

Matrices come to shared memory by bulk copies of the operands themselves: 64 elements of 16 bits a thread
are a line of 128 bytes. First the barriers alone, then copies, then products, which need both: the first
case that differs names the culprit.
"""

from __future__ import annotations

from typing import Any

from tests.gpu._case import Case, Kind, Operand
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


def _barrier() -> Case:
    """Each thread arrives when it has written, twice over: what others read after the wait must be there."""
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
    return Case("mbarrier", (Operand("m", 2),), body, (Operand("r", 2),), covers, threads=64, **HOPPER)


def _copy(rank: int, x: int, y: int) -> Case:
    """Copy a box that begins at (x, y), also outside of the operands, and look at each byte of it."""
    at = {2: f"{x}, {y}", 3: f"{x}, {y}, int(blockIdx.x)"}[rank]
    body = f"""{BARRIERS}  __shared__ __align__(1024) u32 box[64 * 32];
  if (threadIdx.x == 0) {{
    prefetch_tensor_map(map0);
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, 64 * 128);
    copy_box_{rank}d(shared_address(box), map0, {at}, barrier);
  }}
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (int i = 0; i < 32; ++i) r[i] = box[32 * threadIdx.x + i];"""
    covers = (f"copy_box_{rank}d", "prefetch_tensor_map", "mbarrier_arrive_expect_tx")
    name = f"copy_box_{rank}d at ({x}, {y})"
    boxes = {"boxes": (64,)} if rank == 3 else {"boxes": (64,), "rank": 2}
    return Case(name, (LINE,), body, (Operand("r", 32),), covers, threads=64, **boxes, **HOPPER)


def _pixels(
    lower: tuple[int, int],
    upper: tuple[int, int],
    stride: int,
    start: tuple[int, int],
    tap: tuple[int, int],
    channel: int = 0,
) -> Case:
    """Copy 64 pixels of a tap, from `start` of the block's image on; pairs are x, y."""
    at = f"{channel}, {start[0]}, {start[1]}, int(blockIdx.x), {tap[0]}, {tap[1]}"
    body = f"""{BARRIERS}  __shared__ __align__(1024) u32 box[64 * 32];
  if (threadIdx.x == 0) {{
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, 64 * 128);
    copy_pixels_4d(shared_address(box), map0, {at}, barrier);
  }}
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (int i = 0; i < 32; ++i) r[i] = box[32 * threadIdx.x + i];"""
    name = f"copy_pixels_4d from {start} on, {lower} to {upper} by {stride}, tap {tap}"
    shape = {"boxes": (64,), "pixel_box": PixelBox(lower=lower, upper=upper, strides=(stride, stride))}
    return Case(name, (LINE,), body, (Operand("r", 32),), ("copy_pixels_4d",), threads=64, **shape, **HOPPER)


def _product(kind: Kind, n: int, *, a_along_m: bool = False, b_along_n: bool = False) -> Case:
    """Multiply (64, K) by (K, n) in four steps; lines of A are the first 64 threads', of B the next n."""
    # Lines along K: a step is 32 bytes further in it. Along M or N: 16 lines further, and 64 of N a panel.
    of_a = "2048 * step, 8192" if a_along_m else "32 * step, 0"
    of_b = "2048 * step, 8192" if b_along_n else "32 * step, 0"
    if kind == "e4m3":
        call, wrapper = f"wgmma_m64k32_e4m3<{n}>", "wgmma_m64k32_e4m3"
    else:
        element, flags = ELEMENT[kind], f"{str(a_along_m).lower()}, {str(b_along_n).lower()}"
        call, wrapper = f"wgmma_m64k16<{element}, {n}, {flags}>", "wgmma_m64k16"
    body = f"""{BARRIERS}  __shared__ __align__(1024) u8 lines[{(64 + n) * 128}];
  const u32 of_a = shared_address(lines), of_b = of_a + 64 * 128;
  if (threadIdx.x == 0) {{
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, {(64 + n) * 128});
    copy_box_3d(of_a, map0, 0, 0, int(blockIdx.x), barrier);
    copy_box_3d(of_b, map1, 0, 64, int(blockIdx.x), barrier);
  }}
  __syncthreads();
  float sums[{n // 8}][4] = {{}};
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
    takes, gives = (Operand("m", 32, kind),), (Operand("d", n // 2, "f32"),)
    return Case(call, takes, body, gives, covers, boxes=(64, n), threads=64 + n, **HOPPER)


def _product_of_registers(kind: Kind, n: int, *, b_along_n: bool = False) -> Case:
    """As `_product`, where each thread gathers what it has of A in registers."""
    of_b = "2048 * step, 8192" if b_along_n else "32 * step, 0"
    call = f"wgmma_m64k16_registers<{ELEMENT[kind]}, {n}, {str(b_along_n).lower()}>"
    body = f"""{BARRIERS}  __shared__ __align__(1024) u8 lines[{n} * 128];
  __shared__ u32 pairs[64][33];
  const u32 of_b = shared_address(lines), row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  if (threadIdx.x == 0) {{
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, {n} * 128);
    copy_box_3d(of_b, map0, 0, 64, int(blockIdx.x), barrier);
  }}
  if (threadIdx.x < 64) EACH(32) pairs[threadIdx.x][i] = m[i];
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
    covers = ("wgmma_m64k16_registers", "computed_by_now")
    takes, gives = (Operand("m", 32, kind),), (Operand("d", n // 2, "f32"),)
    return Case(call, takes, body, gives, covers, boxes=(n,), threads=64 + n, **HOPPER)


def _registers() -> Case:
    """One warpgroup gives registers to the other; what both hold stays what it was."""
    body = """if (threadIdx.x < 128) {
    give_registers<40>();
  } else {
    take_registers<208>();
  }
  EACH(8) r[i] = m[i] * 3u + 1u;"""
    covers, takes, gives = ("give_registers", "take_registers"), (Operand("m", 8),), (Operand("r", 8),)
    return Case("setmaxnreg", takes, body, gives, covers, threads=256, blocks_per_sm=2, **HOPPER)


# What blocks of a cluster see of each other is dynamic shared memory: 64 lines, and a barrier behind them.
SHARED = """extern __shared__ __align__(1024) u8 shared[];
  u32* const lines = reinterpret_cast<u32*>(shared);
  const u32 barrier = shared_address(shared + 8192), rank = cluster_rank();
"""
IN_A_CLUSTER: dict[str, Any] = {"cluster": 2, "smem_bytes": 8192 + 8, **HOPPER}


def _cluster_barrier() -> Case:
    """Each thread arrives in the other block of the cluster, and waits for the other's threads in its own."""
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
    return Case("cluster", (Operand("m", 1),), body, (Operand("r", 2),), covers, **IN_A_CLUSTER)


def _multicast() -> Case:
    """Each block of a cluster of two copies half of a box, the upper or the lower, to both."""
    half = "shared_address(shared) + rank * 4096, map0, 0, int(rank) * 32, int(blockIdx.x / 2)"
    body = f"""{SHARED}  if (threadIdx.x == 0) {{
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, 64 * 128);
  }}
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) copy_box_3d_multicast({half}, barrier, 3);
  mbarrier_wait(barrier, 0);
  for (int i = 0; i < 32; ++i) r[i] = lines[32 * threadIdx.x + i];
  cluster_arrive();
  cluster_wait();"""
    name, gives = "copy_box_3d_multicast", (Operand("r", 32),)
    return Case(name, (LINE,), body, gives, boxes=(32,), threads=64, **IN_A_CLUSTER)


def _multicast_of_pixels() -> Case:
    """Each block of a cluster of two copies half of a column, of the first block's image, to both."""
    half = "shared_address(shared) + rank * 4096, map0, 0, -1, int(rank) * 4 - 1, int(blockIdx.x / 2), 2, 1"
    body = f"""{SHARED}  if (threadIdx.x == 0) {{
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, 64 * 128);
  }}
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) copy_pixels_4d_multicast({half}, barrier, 3);
  mbarrier_wait(barrier, 0);
  for (int i = 0; i < 32; ++i) r[i] = lines[32 * threadIdx.x + i];
  cluster_arrive();
  cluster_wait();"""
    shape = {"boxes": (32,), "pixel_box": PixelBox(lower=(-1, -1), upper=(-1, -1), strides=(1, 1))}
    name, gives = "copy_pixels_4d_multicast", (Operand("r", 32),)
    return Case(name, (LINE,), body, gives, threads=64, **shape, **IN_A_CLUSTER)


CASES: tuple[Case, ...] = (
    _barrier(),
    _copy(2, 0, 0),
    _copy(3, 0, 0),
    _copy(3, 8, -3),
    _copy(3, -16, 40),
    # 3 x 3 with padding from an image's first pixel on; its last tap, from within one image into the next.
    _pixels((-1, -1), (-1, -1), 1, (-1, -1), (0, 0)),
    _pixels((-1, -1), (-1, -1), 1, (2, 5), (2, 2)),
    # By twos, over rows that end between two; without padding; other corners, and channels beyond the last.
    _pixels((-1, -1), (-1, -1), 2, (1, 3), (1, 2)),
    _pixels((0, 0), (-2, -2), 1, (3, 1), (1, 2)),
    _pixels((-3, 1), (2, -1), 3, (0, 4), (4, 0), channel=40),
    *(_product("f16", n) for n in (64, 128, 192, 256)),
    _product("bf16", 128),
    _product("f16", 128, a_along_m=True),
    _product("f16", 128, b_along_n=True),
    _product("bf16", 256, a_along_m=True, b_along_n=True),
    *(_product_of_registers("f16", n, b_along_n=True) for n in (64, 128, 192, 256)),
    _product_of_registers("bf16", 128, b_along_n=True),
    _product_of_registers("bf16", 256),
    *(_product("e4m3", n) for n in (64, 128, 192, 256)),
    _registers(),
    _cluster_barrier(),
    _multicast(),
    _multicast_of_pixels(),
)
