"""gemm in CUDA C++ on tensor cores by mma.sync (sm_80 on): f16, bf16 and tf32, summed in f32.

A block computes bm x bn results, a warp its share of them by m16n8k16 (m16n8k8 for tf32) instructions.
Tiles of a and b travel by cp.async into `stages` buffers of shared memory, so that `stages - 1` of them are
under way while one is multiplied; one barrier a tile. Buffers keep the order of global memory and are
swizzled, so that ldmatrix reads them without bank conflicts, transposing where it must. Results go to
global memory from the fragments, or by way of shared memory in accesses of 16 bytes.

Limits: cp.async copies 4 bytes or more, so that the lines of 16-bit matrices must be of even length.

Source: PTX ISA, "Warp-level matrix instructions" and "cp.async"; Kerr et al., "CUTLASS: fast linear algebra
in CUDA C++" (the hierarchy of tiles).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels import _gemm
from tunebench.kernels._cuda import helpers
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, ceil_div
from tunebench.workloads.operators.gemm import Gemm

MAX_SUMS = 128
"""Sums a thread may keep: beyond that they do not stay in its 255 registers."""

COPY_BYTES = 4
"""Least that cp.async copies."""


def _threads(warps_m: Any, warps_n: Any) -> Any:
    return 32 * warps_m * warps_n


def _smem_bytes(
    workload: Gemm, bm: Any, bn: Any, bk: Any, warps_m: Any, warps_n: Any, stages: Any, staged: Any
) -> Any:
    """Return the shared memory of a block: buffers of tiles, and in their place the results later."""
    tiles = stages * (bm + bn) * bk * itemsize(workload.dtype)
    results = staged * 4 * warps_m * warps_n * 16 * (bn // warps_n + 8)
    return np.maximum(tiles, results)


def warps_cover_the_tile(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A warp must have 16 x 16 results or a multiple, at most 4 times as many one way as the other."""
    m, n = bm // warps_m, bn // warps_n
    return (m >= 16) & (n >= 16) & (m * n <= 32 * MAX_SUMS) & (m <= 4 * n) & (n <= 4 * m)


def tile_is_compact(bm: Any, bn: Any) -> Any:
    """A block's results must be at most 8 times as many one way as the other."""
    return (bm <= 8 * bn) & (bn <= 8 * bm)


def work_is_worth_the_warps(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A block must have 8 warps or fewer, and give each 32 x 32 results if it has more than 4."""
    warps = warps_m * warps_n
    return (warps <= 8) & ((warps <= 4) | (bm * bn >= 1024 * warps))


def shared_memory_fits(
    bm: Any,
    bn: Any,
    bk: Any,
    warps_m: Any,
    warps_n: Any,
    stages: Any,
    staged: Any,
    workload: Gemm,
    device: Device,
) -> Any:
    """The buffers must fit in the shared memory of a block."""
    smem = _smem_bytes(workload, bm, bn, bk, warps_m, warps_n, stages, staged)
    return smem <= device.smem_per_block_bytes


def stages_have_tiles(bk: Any, stages: Any, workload: Gemm) -> Any:
    """There must be as many steps of k as buffers under way, and no step twice as long as k."""
    return ((bk == 16) | (bk < 2 * workload.k)) & ((stages == 2) | (stages <= ceil_div(workload.k, bk) + 1))


def min_blocks_is_of_use(
    bm: Any,
    bn: Any,
    bk: Any,
    warps_m: Any,
    warps_n: Any,
    stages: Any,
    staged: Any,
    min_blocks: Any,
    workload: Gemm,
    device: Device,
) -> Any:
    """`min_blocks` must fit on an SM without spilling the sums, and limit what the compiler would take."""
    threads = _threads(warps_m, warps_n)
    smem = _smem_bytes(workload, bm, bn, bk, warps_m, warps_n, stages, staged) + device.smem_reserved_bytes
    sums = bm * bn // threads
    return (min_blocks == 1) | (
        (min_blocks * threads <= device.threads_per_sm)
        & (min_blocks * smem <= device.smem_per_sm_bytes)
        & (min_blocks * threads * (sums + sums // 4 + 64) <= device.registers_per_sm)
        & (min_blocks * threads * (2 * sums + 64) > device.registers_per_sm)
    )


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of c a block computes"),
        Parameter("bn", (16, 32, 64, 128, 256), "columns of c a block computes"),
        Parameter("warps_m", (1, 2, 4), "warps of a block along m"),
        Parameter("warps_n", (1, 2, 4), "warps of a block along n"),
        Parameter("bk", (16, 32, 64), "steps of k in one buffer"),
        Parameter("stages", (2, 3, 4, 5), "buffers: all but one are under way while it is multiplied"),
        Parameter("staged", (0, 1), "1: results are gathered in shared memory for wide stores"),
        Parameter("group_m", (1, 4, 8), "rows of tiles that blocks running together share"),
        Parameter("min_blocks", (1, 2, 3), "blocks an SM must be able to hold: limits registers"),
    ),
    (
        _gemm.fits,
        tile_is_compact,
        warps_cover_the_tile,
        work_is_worth_the_warps,
        stages_have_tiles,
        shared_memory_fits,
        min_blocks_is_of_use,
        lambda bk, workload: bk * itemsize(workload.dtype) <= 128,
        lambda bm, group_m, workload: (group_m == 1) | (group_m * bm < 2 * workload.m),
    ),
)

USUAL = (
    # bm, bn, warps_m, warps_n, bk in bytes, stages; largest first
    (128, 256, 2, 4, 64, 3),
    (128, 128, 2, 2, 64, 4),
    (128, 64, 2, 2, 64, 4),
    (64, 64, 2, 2, 128, 4),
    (32, 64, 2, 2, 128, 4),
    (32, 32, 2, 2, 128, 4),
    (16, 64, 1, 4, 128, 5),
    (16, 32, 1, 2, 128, 5),
    (16, 16, 1, 1, 128, 5),
)
"""Tiles that libraries ship."""

SOURCE = """
// c = epilogue(op(a) op(b) + bias), one tile a block. C is the problem and the configuration.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gemm_mma(const typename C::In* __restrict__ a, const typename C::In* __restrict__ b,
         const typename C::Out* __restrict__ bias, typename C::Out* __restrict__ c, int m, int n, int k,
         int group_m) {
  using In = typename C::In;
  using Out = typename C::Out;
  using Grid = WarpGrid<C::BM, C::BN, C::WARPS_M, C::WARPS_N>;
  using TileA = AsyncTile<In, C::BM, C::BK, C::A_K_CONTIGUOUS, C::VEC_A, C::THREADS>;
  using TileB = AsyncTile<In, C::BN, C::BK, C::B_K_CONTIGUOUS, C::VEC_B, C::THREADS>;
  static_assert(Grid::THREADS == C::THREADS, "the launch has a warp for each part of the tile");

  const TileIndex tile = tile_of_block(tiles_of(m, C::BM), tiles_of(n, C::BN), group_m);
  const int row = tile.m * C::BM, column = tile.n * C::BN;  // what is left beyond them never overflows
  const i64 pitch_a = C::A_K_CONTIGUOUS ? k : m, pitch_b = C::B_K_CONTIGUOUS ? k : n;
  const In* const corner_a = tile_corner<C::A_K_CONTIGUOUS>(a + tile.batch * (i64(m) * k), row, pitch_a);
  const In* const corner_b = tile_corner<C::B_K_CONTIGUOUS>(b + tile.batch * (i64(k) * n), column, pitch_b);
  TileA of_a(corner_a, pitch_a, m - row);
  TileB of_b(corner_b, pitch_b, n - column);
  const Target<Out> target = {c + tile.batch * (i64(m) * n) + i64(row) * n + column, n, m - row, n - column};

  In* const shared = reinterpret_cast<In*>(dynamic_shared());
  constexpr int STAGE = TileA::ELEMENTS + TileB::ELEMENTS;
  float sums[Grid::M / 16][Grid::N / 8][4] = {};
  int to_copy = k, filled = 0;  // of k; the buffer that is filled next
  // A group of copies is closed also where there is nothing left to copy: waiting counts groups.
  const auto copy_next = [&] {
    if (to_copy > 0) {
      In* const buffer = shared + filled * STAGE;
      of_a.copy(buffer, to_copy);
      of_b.copy(buffer + TileA::ELEMENTS, to_copy);
      to_copy -= C::BK;
    }
    filled = filled + 1 == C::STAGES ? 0 : filled + 1;
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < C::STAGES - 1; ++stage) copy_next();

  int read = 0;  // the buffer that is multiplied next
#pragma unroll 1
  for (int k_left = k; k_left > 0; k_left -= C::BK) {
    cp_async_wait<C::STAGES - 2>();
    __syncthreads();  // this tile is there for all, and all have read the buffer that is filled now
    copy_next();
    const In* const buffer = shared + read * STAGE;
    mma_tiles<Grid, TileA, TileB>(sums, buffer, buffer + TileA::ELEMENTS);
    read = read + 1 == C::STAGES ? 0 : read + 1;
  }

  const Finish<Out, typename C::Activation, C::HAS_BIAS> finish = {bias + column, n - column};
  if constexpr (C::STAGED) {
    cp_async_wait<0>();
    __syncthreads();  // all have read the buffers that results are gathered in
    float* const staging = reinterpret_cast<float*>(shared) + int(threadIdx.x) / 32 * STAGING_FLOATS<Grid>;
    store_staged<Grid, C::VEC_C>(sums, staging, target, finish);
  } else {
    store_fragments<Grid, C::VEC_C>(sums, target, finish);
  }
}
"""


class CudaMmaGemm(CudaVariant[Gemm]):
    """Serves f16, bf16 and tf32 on sm_80 and later."""

    name = "cuda_mma"
    operator = Gemm
    space = SPACE
    minimum_cc = (8, 0)

    def limits(self, workload: Gemm, device: Device) -> str | None:
        """Return what keeps this problem from tensor cores or from cp.async, or None."""
        if workload.dtype not in ("f16", "bf16", "tf32"):
            return (
                f"{self.key} multiplies f16, bf16 and tf32; {workload.dtype} has no tensor-core instruction"
            )
        narrow = min(_gemm.widths(workload)[:2]) * itemsize(workload.dtype)
        if narrow < COPY_BYTES:
            return f"{self.key} copies {COPY_BYTES} bytes or more: lines of a and b must be of even length"
        return _gemm.too_many_blocks(workload, (tile[:2] for tile in USUAL))

    def default(self, workload: Gemm, device: Device) -> Config:
        """Return the usual tile of which the busiest SM has the least to do."""

        def work(config: Config) -> int:
            bm, bn = config["bm"], config["bn"]
            rounds = ceil_div(_gemm.blocks(workload, bm, bn), device.sm_count)
            # Multiplying a tile costs with its area, reading it with its edges.
            return int(rounds * (bm * bn + 48 * (bm + bn)))

        return min((c for c in self._usual(workload) if self._valid(c, workload, device)), key=work)

    def _usual(self, workload: Gemm) -> Iterator[Config]:
        """Yield the usual tiles, as deep as k allows."""
        for bm, bn, warps_m, warps_n, line_bytes, deepest in USUAL:
            wanted = line_bytes // itemsize(workload.dtype)
            bk = max(b for b in (16, 32, 64) if b == 16 or (b <= wanted and b < 2 * workload.k))
            yield Config(
                {
                    "bm": bm,
                    "bn": bn,
                    "warps_m": warps_m,
                    "warps_n": warps_n,
                    "bk": bk,
                    "stages": max(2, min(deepest, ceil_div(workload.k, bk) + 1)),
                    "staged": 1,
                    "group_m": max(g for g in (1, 4, 8) if g == 1 or g * bm < 2 * workload.m),
                    "min_blocks": 1,
                }
            )

    def _valid(self, config: Config, workload: Gemm, device: Device) -> bool:
        only = self.space.restrict(**{name: (value,) for name, value in config.items()})
        return len(only.enumerate(workload=workload, device=device)) == 1

    def costs(self, workload: Gemm, table: Table, device: Device) -> Costs:
        """Count whole tiles: parts beyond the edge of c and the last step of k are multiplied as zeros."""
        size = itemsize(workload.dtype)
        names = ("bm", "bn", "bk", "warps_m", "warps_n")
        bm, bn, bk, warps_m, warps_n = (table[name].astype(np.float64) for name in names)
        warps, padded_k = warps_m * warps_n, ceil_div(workload.k, bk) * bk
        # A warp reads its fragments of 16 x 32 bytes, 512 in all, once a step of 32 bytes of k.
        steps = padded_k * size / 32
        fragments = warps * steps * (bm / warps_m / 16 + bn / warps_n / 16)
        products = warps * steps * (bm / warps_m / 16 * bn / warps_n / 8)
        tiles = _gemm.blocks(workload, bm, bn)
        threads = _threads(warps_m, warps_n)
        return Costs(
            blocks=tiles,
            full_blocks=tiles,
            threads=threads,
            smem_bytes=_smem_bytes(
                workload, bm, bn, bk, warps_m, warps_n, *(table[name] for name in ("stages", "staged"))
            ),
            registers=np.minimum(bm * bn / threads + 16, 65536 // (threads * table["min_blocks"])),
            mma_flop=2 * bm * bn * padded_k,
            mma_dtype=workload.dtype,
            smem_traffic_bytes=512 * fragments + padded_k * size * (bm + bn),
            fill_bytes=self._fill_bytes(workload, bm, bn),
            instructions=products + fragments,
        )

    def _fill_bytes(self, workload: Gemm, bm: Any, bn: Any) -> Any:
        """Return what the least block, at the corner of c, copies past L1: only copies of 16 bytes do."""
        size = itemsize(workload.dtype)
        rows = workload.m - (ceil_div(workload.m, bm) - 1) * bm
        columns = workload.n - (ceil_div(workload.n, bn) - 1) * bn
        wide_a, wide_b = (width * size == 16 for width in _gemm.widths(workload)[:2])
        return (wide_a * rows + wide_b * columns) * workload.k * size

    def claims(self, workload: Gemm, config: Config) -> tuple[str, ...]:
        """Tensor cores, copies past registers, and ldmatrix, which transposes 16-bit elements only."""
        by_ldmatrix = workload.dtype != "tf32" or workload.trans != "tn"
        return ("HMMA", "LDGSTS", *(["LDSM"] if by_ldmatrix else []))

    def source(self, workload: Gemm, config: Config) -> str:
        """Return the kernel for this problem's types and this configuration, for all sizes."""
        vec_a, vec_b, vec_c = _gemm.widths(workload)
        names = ("bm", "bn", "bk", "warps_m", "warps_n", "stages", "min_blocks")
        choices: dict[str, str | bool | int] = {name.upper(): config[name] for name in names}
        choices |= {
            "THREADS": _threads(config["warps_m"], config["warps_n"]),
            "STAGED": bool(config["staged"]),
        }
        choices |= {"VEC_A": vec_a, "VEC_B": vec_b, "VEC_C": vec_c}
        choice = _gemm.constants("Choice", **_gemm.problem(workload), **choices)
        return helpers("types", "ptx", "epilogue", "gemm", "gemm_mma") + choice + SOURCE

    def launches(self, workload: Gemm, config: Config) -> tuple[Launch, ...]:
        """Return one launch of a block a tile."""
        names = ("bm", "bn", "bk", "warps_m", "warps_n", "stages", "staged")
        return (
            Launch(
                entry="gemm_mma<Choice>",
                grid=(_gemm.blocks(workload, config["bm"], config["bn"]), 1, 1),
                block=(_threads(config["warps_m"], config["warps_n"]), 1, 1),
                arguments=_gemm.arguments(workload, config["group_m"]),
                smem_bytes=int(_smem_bytes(workload, *(config[name] for name in names))),
            ),
        )

    def miniature(self, workload: Gemm, config: Config) -> Gemm:
        """Return a problem of few tiles with the same edges."""
        return _gemm.shrink(workload, config, config["stages"])


VARIANT = CudaMmaGemm()
