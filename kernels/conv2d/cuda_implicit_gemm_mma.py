"""conv2d in CUDA C++ as an implicit GEMM on tensor cores by mma.sync (sm_80 on): f16, bf16 and tf32.

The product is that of `cuda_implicit_gemm`, in all directions and layouts, summed in f32. cp.async copies
tiles into `stages` buffers of shared memory: `stages - 1` steps along K are in flight while one is
multiplied. The copy itself fills padding with zeros. Buffers keep the order of global memory and are
swizzled, so that ldmatrix reads them, transposing where needed, without bank conflicts. Results go to global
memory through shared memory, in accesses as wide as alignment allows.

cp.async copies 4 bytes or more. Where fewer bytes are contiguous (16-bit images with an odd number of
channels, or of layout nchw with a filter of several taps), the operand goes through registers instead, and a
step waits for its loads.

Source: PTX ISA, "Warp-level matrix instructions" and "cp.async"; Chetlur et al., "cuDNN: Efficient Primitives
for Deep Learning", 2014, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import mma_tile, prologue
from tunebench.kernels.common.cuda import first_product
from tunebench.kernels.common.product_execution import (
    START_CLOCKS,
    resident,
    staged_results,
    with_results,
)
from tunebench.kernels.conv2d import _conv, _execution
from tunebench.kernels.conv2d._conv import alignment, product
from tunebench.kernels.conv2d._implicit_gemm import ImplicitGemm, Tile, steps_per_part
from tunebench.space import Config, Parameter, Space, Table, takes_config
from tunebench.variant import Costs, Execution
from tunebench.workloads.operators.conv2d import Conv2d

MAX_COPIES = 32
"""Most accesses per thread to the tiles of one step, each with its own address."""
OTHER_REGISTERS, SPARE_REGISTERS = 35, 40
"""Registers per thread for sizes, digits and addresses, and those that the compiler takes in addition."""


# -- space ------------------------------------------------------------------------------------------------


def tile_is_useful(bm: Any, bn: Any, workload: Conv2d) -> Any:
    """A tile must have less than twice the rows and columns of C unless no smaller one exists."""
    whole = product(workload)
    return ((bm == 16) | (bm < 2 * whole.m)) & ((bn == 16) | (bn < 2 * whole.n))


def stages_have_steps(bk: Any, walk: Any, stages: Any, workload: Conv2d) -> Any:
    """There must be at least as many steps as copies under way."""
    whole = product(workload)
    return (stages == 2) | (stages <= whole.steps(whole.taps, bk, walk) + 1)


def _smem_bytes(workload: Conv2d, config: Any) -> Any:
    """Return the shared memory of a block in bytes; results are always staged."""
    names = (name for name in mma_tile.TILE if name != "staged")
    return mma_tile.smem_bytes({"staged": 1, **{name: config[name] for name in names}}, workload.dtype)


def _accesses(workload: Conv2d, config: Mapping[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return the accesses per thread to a tile of A and to one of B: across it, and along K."""
    bm, bn, bk = (config[name] for name in ("bm", "bn", "bk"))
    threads = mma_tile.threads(config["warps_m"], config["warps_n"])
    vec_a, vec_b, _ = alignment(workload, "flat")
    along_a, along_b = _conv.along_k(workload)
    a = _conv.share(bm, bk, vec_a, threads, along_a)
    return a, _conv.share(bn, bk, vec_b, threads, along_b)


def _registers(workload: Conv2d, config: Mapping[str, Any]) -> Any:
    """Return an estimate of the registers per thread: sums, fragments, and addresses of copies."""
    (rows, deep_a), (columns, deep_b) = _accesses(workload, config)
    bm, bn, warps_m, warps_n = (config[name] for name in ("bm", "bn", "warps_m", "warps_n"))
    fragments = 4 * (bm // warps_m + bn // warps_n) // 16
    copies = rows * deep_a + columns * deep_b
    sums = bm * bn // mma_tile.threads(warps_m, warps_n)
    return sums + fragments + copies + 3 * rows + columns + OTHER_REGISTERS


@takes_config("bm", "bn", "bk", "warps_m", "warps_n", "stages")
def shared_memory_fits(config: Mapping[str, Any], workload: Conv2d, device: Device) -> Any:
    """The buffers must fit in the shared memory of a block."""
    return _smem_bytes(workload, config) <= device.smem_per_block_bytes


@takes_config("bm", "bn", "bk", "warps_m", "warps_n", "stages", "min_blocks")
def registers_suffice(config: Mapping[str, Any], workload: Conv2d, device: Device) -> Any:
    """`min_blocks` must fit on an SM with few spills, and use fewer registers than the compiler would."""
    min_blocks = config["min_blocks"]
    threads = min_blocks * mma_tile.threads(config["warps_m"], config["warps_n"])
    smem = min_blocks * (_smem_bytes(workload, config) + device.smem_reserved_bytes)
    (rows, deep_a), (columns, deep_b) = _accesses(workload, config)
    needed, room = _registers(workload, config), np.minimum(device.registers_per_sm // threads, 255)
    fits = (needed <= room) & (rows * deep_a + columns * deep_b <= MAX_COPIES)
    together = (threads <= device.threads_per_sm) & (smem <= device.smem_per_sm_bytes)
    return fits & ((min_blocks == 1) | (together & (needed + SPARE_REGISTERS > room)))


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64, 128, 256), "rows of C per block"),
        Parameter("bn", (16, 32, 64, 128, 256), "columns of C per block"),
        Parameter("warps_m", (1, 2, 4), "warps of a block along rows"),
        Parameter("warps_n", (1, 2, 4), "warps of a block along columns"),
        Parameter("bk", (16, 32, 64), "length of a step along K"),
        _conv.WALK,
        Parameter("stages", (2, 3, 4), "buffers in shared memory; copies run stages - 1 steps ahead"),
        _conv.SPLIT,
        _conv.RASTER,
        Parameter("min_blocks", (1, 2, 3), "resident blocks per SM: limits registers per thread"),
    ),
    (
        mma_tile.warps_cover_the_tile,
        mma_tile.work_is_worth_the_warps,
        tile_is_useful,
        mma_tile.tile_is_compact,
        lambda bk, workload: bk * itemsize(workload.dtype) <= 128,
        _conv.walk_is_useful,
        lambda bk, walk, workload: _conv.step_is_useful(bk, walk, 16, workload),
        stages_have_steps,
        shared_memory_fits,
        registers_suffice,
        _conv.split_is_useful,
        _conv.order_matters,
    ),
)


# -- source -----------------------------------------------------------------------------------------------

SOURCE = """
// One tile of C, or a partial sum of it: `parts` blocks share K and write sums `part_size` elements apart.
template <class T, class Out, class I, Direction DIRECTION, Layout LAYOUT, Walk WALK, int BM, int BN, int BK,
          int WARPS_M, int WARPS_N, int VEC_A, int VEC_B, int VEC_C, int STAGES, class E, int MIN_BLOCKS>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, MIN_BLOCKS)
conv_mma(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ scale,
         const T* __restrict__ bias, const T* __restrict__ residual,@PARAMETERS@ Out* __restrict__ out,
         I n, I c, I h, I w, I k, I r, I s, I p, I q, I stride, I pad, I pad_w, I dilation,
         I groups, I tap_skip, I tap_shift, I row_classes, I column_classes, I row_tiles, I column_tiles,
         I rows_first, I parts, i64 part_size) {
  using P = Product<DIRECTION, LAYOUT, WALK, I, BK>;
  using Grid = WarpGrid<BM, BN, WARPS_M, WARPS_N>;
  using ShareA = Share<BM, BK, VEC_A, Grid::THREADS, P::A_ALONG_K>;
  using ShareB = Share<BN, BK, VEC_B, Grid::THREADS, P::B_ALONG_K>;
  using TileA = CopiedTile<T, ShareA, BM, BK, VEC_A, P::A_ALONG_K>;
  using TileB = CopiedTile<T, ShareB, BN, BK, VEC_B, P::B_ALONG_K>;

  const Sizes<I> sizes = {n, c, h, w, k, r, s, p, q, stride, pad, pad_w, dilation, groups, tap_skip,
                          tap_shift, row_classes, column_classes};
  const BlockWork<I> work = work_of_block(TileCounts<I>{row_tiles, column_tiles, rows_first, parts}, sizes);
  const P product(sizes, work.residue_class);
  const Destination<T, Out, I> to = {out + work.part * part_size, scale, bias, residual,
                                     work.group, work.row * BM, work.column * BN};
  // The grid may have more blocks than tiles; some residue classes have fewer pixels than the first.
  if (to.group >= groups || to.row >= product.m) return;

  const Steps<I> steps = steps_of_part(product.steps, work.part, parts);
  const ReaderA<T, I, P, ShareA> from_a(a, product, to.group, to.row);
  const ReaderB<T, I, P, ShareB> from_b(b, product, to.group, to.column);
  T* const shared = reinterpret_cast<T*>(dynamic_shared());
  constexpr int STAGE = TileA::ELEMENTS + TileB::ELEMENTS;
  float sums[Grid::M / 16][Grid::N / 8][4] = {};

  const Digits<I> whole_step = product.whole_step();
  Digits<I> at = product.at_step(steps.begin);
  I to_copy = steps.count;
  int filled = 0;  // the buffer to fill next
  // A group of copies is closed even if it is empty: the wait counts groups.
  const auto copy_next = [&] {
    if (to_copy > 0) {
      T* const buffer = shared + filled * STAGE;
      TileA::copy(buffer, from_a, product, at);
      TileB::copy(buffer + TileA::ELEMENTS, from_b, product, at);
      at = product.next_step(at, whole_step);
      --to_copy;
    }
    filled = filled + 1 == STAGES ? 0 : filled + 1;
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) copy_next();

  int read = 0;  // the buffer to multiply next
  @PROLOGUE@;
#pragma unroll 1
  for (I left = steps.count; left > 0; --left) {
    cp_async_wait<STAGES - 2>();  // this thread's copies of this step have arrived
    prologue.template apply<TileA>(shared + read * STAGE, from_a, product, whole_step);
    __syncthreads();              // those of all threads too, and all have read the buffer to fill next
    copy_next();
    const T* const buffer = shared + read * STAGE;
    mma_tiles<Grid, TileA, TileB>(sums, buffer, buffer + TileA::ELEMENTS);
    read = read + 1 == STAGES ? 0 : read + 1;
  }

  cp_async_wait<0>();
  __syncthreads();  // all have read the buffers, which now stage sums
  float* const staging = reinterpret_cast<float*>(shared) + int(threadIdx.x) / 32 * STAGING_FLOATS<Grid>;
  store_staged_sums<Grid, E, VEC_C>(sums, staging, product, to);
}
"""


# -- the variant ------------------------------------------------------------------------------------------

USUAL = (
    (128, 256, 2, 4, 64, 3),
    (256, 128, 4, 2, 64, 3),
    (128, 128, 2, 2, 64, 4),
    (128, 64, 2, 2, 64, 4),
    (64, 128, 2, 2, 64, 4),
    (64, 64, 2, 2, 128, 4),
    (128, 32, 4, 1, 64, 4),
    (32, 64, 2, 2, 128, 4),
    (64, 32, 2, 2, 128, 4),
    (32, 32, 2, 2, 128, 4),
    (64, 16, 4, 1, 64, 4),
    (16, 64, 1, 4, 128, 4),
    (16, 16, 1, 1, 64, 4),
)
"""Tiles that an expert would try, largest first: bm, bn, warps_m, warps_n, bytes of a step, stages."""


class CudaImplicitGemmMma(ImplicitGemm):
    """f16, bf16 and tf32 of any size, layout, direction and epilogue on sm_80 and later."""

    name = "cuda_implicit_gemm_mma"
    space = SPACE
    minimum_cc = (8, 0)
    entry = "conv_mma"
    headers = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "conv", "conv_mma")
    prologue_header = "conv_prologue_mma"
    text = SOURCE
    without_prologue = {"PARAMETERS": "", "PROLOGUE": "NoPrologue prologue"}
    with_prologue = {
        "PARAMETERS": " const T* __restrict__ pre_scale, const T* __restrict__ pre_shift,",
        "PROLOGUE": """const I channel = to.group * product.depth;
  PixelPrologue<T, I> prologue = {product.at_step(steps.begin),
                                  {pre_scale + channel, pre_shift + channel}}""",
    }
    extents = ("bm", "bn", "bk", "warps_m", "warps_n")
    usual = USUAL
    least_step = 16
    summing_cost = (5e6, 640)

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why tensor cores or 64-bit offsets cannot do this workload, or None if they can."""
        if workload.dtype == "f32":
            return f"{self.key} multiplies f16, bf16 and tf32; f32 has no tensor-core instruction"
        return super().limits(workload, device)

    def usual_configs(self, workload: Conv2d, tile: Tile, split: int) -> Iterator[Config]:
        """Yield the usual configuration of a tile."""
        whole = product(workload)
        bm, bn, warps_m, warps_n, step_bytes, deepest = tile
        flat = workload.direction == "wgrad" or (workload.r * workload.s > 1 and whole.depth % 16 != 0)
        extent = max(1, whole.taps) * whole.depth if flat else whole.depth
        target_bk = step_bytes // itemsize(workload.dtype)
        bk = max(
            b for b in (16, 32, 64) if b == 16 or (b <= target_bk and (extent % b == 0 or extent >= 8 * b))
        )
        walk = "flat" if flat else "by_tap"
        steps = int(whole.steps(whole.taps, np.array(bk), np.array(walk)))
        values: dict[str, Any] = {"bm": bm, "bn": bn, "warps_m": warps_m, "warps_n": warps_n, "bk": bk}
        values |= {"walk": walk, "stages": max(2, min(deepest, steps + 1)), "split": split}
        yield Config({**values, "raster": "columns", "min_blocks": 1})

    def warps_and_overhead(self, tile: Tile) -> tuple[int, float]:
        """Return the warps of a block, and the cost of reading a tile, which grows with its edges."""
        bm, bn, warps_m, warps_n, *_ = tile
        return warps_m * warps_n, 48 / bm + 48 / bn

    def access_widths(self, workload: Conv2d, config: Config) -> tuple[int, int, int]:
        """Return the elements per access to A, B and C."""
        a, b, c = alignment(workload, config["walk"])
        return a, b, c if config["split"] == 1 else min(c, 4)

    def block_threads(self, config: Config) -> int:
        """Return the threads of a block."""
        return int(mma_tile.threads(config["warps_m"], config["warps_n"]))

    def smem_bytes(self, workload: Conv2d, config: Any) -> Any:
        """Return the shared memory of a block, in bytes."""
        return _smem_bytes(workload, config)

    def pipeline_steps(self, config: Config) -> int:
        """Return two steps more than there are buffers, so that every buffer is used again."""
        return int(config["stages"]) + 2

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count whole tiles: padding and parts beyond an edge of C or beyond K are multiplied as zeros.

        Copies of 16 bytes bypass L1, but padding is not copied, so that no traffic from L2 is certain.
        """
        names = ("bm", "bn", "warps_m", "warps_n")
        bm, bn, warps_m, warps_n = (table[name].astype(np.float64) for name in names)
        length = steps_per_part(workload, table)
        line_bytes, threads = length * itemsize(workload.dtype), mma_tile.threads(warps_m, warps_n)
        blocks, full_blocks = self.blocks(workload, table)
        products, fragments = mma_tile.instructions(table, line_bytes)
        most_registers = device.registers_per_sm // (threads * table["min_blocks"])
        return Costs(
            blocks=blocks,
            full_blocks=full_blocks,
            threads=threads,
            smem_bytes=_smem_bytes(workload, table),
            registers=np.minimum(bm * bn / threads + 16, most_registers),
            mma_flop=2 * bm * bn * length,
            mma_dtype=workload.dtype,
            smem_traffic_bytes=512 * fragments + line_bytes * (bm + bn),
            instructions=products + fragments,
            # A warp adds 32 bytes of K to a sum by one instruction, and the next instruction needs that sum.
            chain_clocks=np.where(
                length > 0, first_product(device) + line_bytes / 32 * device.mma_latency, 0.0
            ),
            serial_launches=np.where(table["split"] > 1, 2, 1),
            execution=self._execution(workload, table, length, device),
        )

    def _execution(self, workload: Conv2d, table: Table, length: Any, device: Device) -> Execution:
        """Count the main loop, the epilogue, and the traffic of whole tiles."""
        names = ("bm", "bn", "bk", "warps_m", "warps_n")
        bm, bn, bk, warps_m, warps_n = (table[name].astype(np.float64) for name in names)
        size, whole = itemsize(workload.dtype), product(workload)
        vec_a, vec_b = (_execution.by_walk(workload, table, operand) for operand in (0, 1))
        copies_a, copies_b = bm / vec_a, bn / vec_b
        # Elements too narrow for cp.async go through registers, and every step waits for them.
        held_a, held_b = vec_a * size < 4, vec_b * size < 4
        loop = mma_tile.main_loop(
            table,
            workload.dtype,
            length,
            # With a prologue, a thread also loads what it has copied of A, and stores it again.
            copies=copies_a * (1 + held_a + 2 * workload.has_pre) + copies_b * (1 + held_b),
            passing_l1=size * ((vec_a * size < 16) * bm + (vec_b * size < 16) * bn),
            along_k=_conv.along_k(workload),
            device=device,
        )
        addresses = copies_a * _execution.ADDRESSING["A"] + copies_b * _execution.ADDRESSING["B"]
        threads = mma_tile.threads(warps_m, warps_n)
        at_once = device.sm_count * resident(threads, loop.registers, _smem_bytes(workload, table), device)
        tiles = whole.tiles(bm, bn)
        traffic = _execution.traffic_of(
            workload,
            table,
            device,
            whole,
            height=np.where(table["raster"] == "rows", np.ceil(whole.m / bm), 1.0),
            wave=np.minimum(tiles * table["split"], at_once),
        )
        results = _execution.results_of(
            workload,
            table,
            alignment(workload, "by_tap")[2],
            lambda size, vec, residual: staged_results(
                bm, bn, bm / warps_m, bn / warps_n, size, vec, residual
            ),
        )
        return with_results(
            loop,
            results,
            device,
            instructions=length * (addresses + prologue.operations_of_element(workload) * bm) / 32,
            l2_bytes=length * (traffic.line_a + traffic.line_b),
            memory_waits=(held_a | held_b) * length / bk,
            barriers=1.0,
            serial_clocks=START_CLOCKS,
            further_clocks=traffic.sum_clocks,
            memory_bytes=traffic.memory_bytes,
        )

    def claims(self, workload: Conv2d, config: Config) -> tuple[str, ...]:
        """Return tensor-core instructions, ldmatrix for 16-bit elements, and cp.async of 4 bytes or more."""
        size = itemsize(workload.dtype)
        by_ldmatrix = size == 2 or any(_conv.along_k(workload))
        asynchronous = max(alignment(workload, config["walk"])[:2]) * size >= 4
        return ("HMMA", *(["LDSM"] if by_ldmatrix else []), *(["LDGSTS"] if asynchronous else []))


VARIANT = CudaImplicitGemmMma()
