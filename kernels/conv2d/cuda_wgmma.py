"""conv2d in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16 and bf16, images with channels last.

Persistent blocks compute one tile of bm x bn results after the other, as in gemm/cuda_wgmma: a producer
warpgroup fills a ring of `stages` buffers by TMA, and one to three consumers multiply from there. TMA gathers
the pixels: it walks over them row by row and image by image, and fills the padding with zeros ("im2col
mode"). A copy names the position of the filter's first tap and the distance of the tap from there.

direction rows             columns              sums over               pixels are copied of
fprop     pixels of y      filters              taps, channels          x (A)
dgrad     pixels of dx     channels             taps, filters           dy (A)
wgrad     filters          taps, channels       pixels of y             x (B)

dgrad with a stride takes the pixels of dx one residue class of the stride after the other, each with the taps
that reach it. One tensor map serves all classes; each class counts as many pixels as the largest. wgrad has
one tap per 64 columns. Where tiles are few, K is split and a second kernel sums the parts.

Limits: layout nhwc. TMA copies lines of multiples of 16 bytes, so that channels are multiples of 8, and of 64
in groups. Fields of a tensor map are narrow: strides go to 8, padding and filters to about 128 pixels.

Source: PTX ISA, "im2col mode", "wgmma", "cp.async.bulk.tensor"; CUDA Driver API, "cuTensorMapEncodeIm2col";
CUTLASS 3, implicit GEMM on sm_90.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.kernels.common import gemm, prologue, wgmma_tile
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.product_execution import with_results
from tunebench.kernels.common.wgmma_tile import LINE_BYTES, MOST_EXTENT
from tunebench.kernels.conv2d import _conv, _conv_emulation, _conv_pixels, _execution
from tunebench.kernels.conv2d._conv_pixels import PANEL_CHANNELS, axes, product
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.conv2d import Conv2d

PRODUCER_REGISTERS = 56
"""Registers per thread of the producer, which counts pixels and taps. With 40, code for clusters spills."""


def _steps(workload: Conv2d, bk: Any) -> Any:
    """Return the most steps along K of a tile."""
    whole = product(workload)
    return whole.taps * ceil_div(whole.depth, bk)


# -- space --------------------------------------------------------------------------------------------------


def tile_is_useful(bm: Any, bn: Any, split: Any, workload: Conv2d) -> Any:
    """Tiles must be less than twice as large as C unless no smaller one exists, and be countable."""
    whole = product(workload)
    worthwhile = ((bm < 2 * whole.m) | (bm == 64)) & ((bn < 2 * whole.n) | (bn == 64))
    return worthwhile & (whole.tiles(1.0 * bm, 1.0 * bn) * split <= gemm.MAX_BLOCKS / 4)


def steps_are_useful(bk: Any, workload: Conv2d) -> Any:
    """A step must have 64 channels or pixels, or 128 if it is less than twice K, and end with its group."""
    whole = product(workload)
    ends_with_group = (whole.groups == 1) | (workload.direction == "wgrad") | (whole.depth % bk == 0)
    return (bk == PANEL_CHANNELS) | ((bk < 2 * whole.depth) & ends_with_group)


def stages_have_tiles(bk: Any, stages: Any, split: Any, workload: Conv2d) -> Any:
    """The ring must hold the steps of two tiles at most."""
    return (stages == 2) | (stages <= 2 * ceil_div(_steps(workload, bk), split))


def cluster_has_tiles(bm: Any, bn: Any, cluster_m: Any, cluster_n: Any, workload: Conv2d) -> Any:
    """A cluster has one or two blocks, and there must be a tile for each."""
    whole = product(workload)
    both_busy = ((cluster_m == 1) | (bm < whole.m)) & ((cluster_n == 1) | (bn < whole.n))
    return (cluster_m * cluster_n <= 2) & both_busy


def split_is_useful(bm: Any, bn: Any, bk: Any, split: Any, workload: Conv2d, device: Device) -> Any:
    """K is split only where tiles are few, into 4 steps or more, with sums that fit in the scratch."""
    few = product(workload).tiles(1.0 * bm, 1.0 * bn) * (split // 2) < 2 * device.sm_count
    long = _steps(workload, bk) >= 4 * split
    small = 4.0 * split * workload.outputs()[0].size <= _conv.MAX_SCRATCH_BYTES
    return (split == 1) | (few & long & small)


def parts_are_few(split: Any, group_m: Any, min_blocks: Any) -> Any:
    """Where K is split, tiles are few: their order does not matter, and min_blocks must be 1."""
    return (split == 1) | ((group_m == 1) & (min_blocks == 1))


_SMEM = ("bm", "bn", "bk", "consumers", "stages")


def _smem_bytes(workload: Conv2d, config: Any) -> Any:
    """Return the shared memory of a block in bytes, for a configuration or a table of them."""
    return wgmma_tile.smem_bytes({"staged": 1, **{name: config[name] for name in _SMEM}}, workload.dtype)


SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of C per tile"),
        Parameter("bn", (64, 128, 192, 256), "columns of C per tile"),
        Parameter("bk", (64, 128), "length of a step along K: channels of a tap, or pixels"),
        Parameter("stages", (2, 3, 4, 5, 6, 7, 8), "buffers of the ring in shared memory"),
        Parameter("consumers", (1, 2, 3), "warpgroups that multiply"),
        Parameter("pingpong", (0, 1), "1: each consumer multiplies its own tile while another stores"),
        Parameter("cluster_m", (1, 2), "blocks of a cluster along rows, which share columns of B"),
        Parameter("cluster_n", (1, 2), "blocks of a cluster along columns, which share rows of A"),
        _conv.SPLIT,
        Parameter("group_m", (1, 4, 8, 16), "rows of tiles that concurrent blocks share in L2"),
        Parameter("min_blocks", (1, 2), "resident blocks per SM"),
    ),
    (
        tile_is_useful,
        wgmma_tile.consumers_share_the_tile,
        wgmma_tile.sums_stay_in_registers(producer_registers=PRODUCER_REGISTERS),
        steps_are_useful,
        stages_have_tiles,
        cluster_has_tiles,
        wgmma_tile.shared_memory_fits(*_SMEM),
        split_is_useful,
        parts_are_few,
        lambda bm, cluster_m, group_m, workload: (
            (group_m == 1) | (group_m * cluster_m * bm < 2 * product(workload).m)
        ),
    ),
)

# -- source -------------------------------------------------------------------------------------------------

SOURCE = """
// One tile of C after the other, or partial sums of it: `parts` share K, and write sums `part_size` elements
// apart. C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
conv_wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
           const typename C::In* __restrict__ scale, const typename C::In* __restrict__ bias,
           const typename C::In* __restrict__ residual, typename C::Out* __restrict__ out, int n, int c,
           int h, int w, int k, int r, int s, int p, int q, int stride, int pad, int pad_w, int dilation,
           int groups, int tap_skip, int tap_shift, int row_classes, int column_classes, int grid_height,
           int grid_width, int grid_top, int grid_left, int first_row_class, int first_column_class,
           int group_m, int parts, i64 part_size) {
  const BlockMemory<C> memory;
  const Sizes<i32> sizes = {n, c, h, w, k, r, s, p, q, stride, pad, pad_w, dilation, groups, tap_skip,
                            tap_shift, row_classes, column_classes};
  const PixelGrid grid = {grid_height, grid_width, grid_top, grid_left, C::DIRECTION == DGRAD ? 1 : stride};
  const ConvProduct<C> product = {sizes, grid, first_row_class, first_column_class, parts};
  const Tiles<C> tiles(product.m(), product.n(), product.times(), group_m);
  const Destination<typename C::In, typename C::Out, i64> output = {out, scale, bias, residual, 0, 0, 0};
  by_role<C>(
      memory.barriers, [&] { produce<C>(a_map, b_map, memory.buffers, memory.barriers, tiles, product); },
      [&](int consumer) { consume<C>(output, part_size, memory, tiles, consumer, product); });
}
"""


# -- defaults -----------------------------------------------------------------------------------------------

USUAL = (
    # bm, bn, consumers; largest first
    (128, 256, 2),
    (256, 128, 2),
    (128, 192, 2),
    (128, 128, 2),
    (256, 64, 2),
    (128, 64, 2),
    (64, 256, 1),
    (64, 128, 1),
    (64, 64, 1),
)
"""Tiles that libraries ship."""


def _estimate(workload: Conv2d, device: Device, config: Config) -> float:
    """Return the estimated time of a configuration, in clocks of an SM that multiplies, to order them."""
    bm, bn, bk, split = (config[name] for name in ("bm", "bn", "bk", "split"))
    whole, sms = product(workload), device.sm_count
    # Length along K on the busiest SM: of the longest tiles, which begin first, or of all tiles.
    longest = ceil_div(whole.tiles(bm, bn, most_taps=True) * split, sms) * _steps(workload, bk) * bk / split
    length = max(longest, whole.work(bm, bn, bk, "by_tap") / (bm * bn) / sms)
    # The cost of multiplying a step grows with the tile's area, that of reading it with its edges; an SM does
    # 2048 multiply-adds per clock.
    clocks = length * (bm * bn + 48 * (bm + bn)) / 2048
    # A second launch takes some microseconds; parts are written and read at about 2000 bytes per clock.
    summing = 5000 + split * workload.outputs()[0].size / 250 if split > 1 else 0
    return float(clocks + summing)


# -- the variant --------------------------------------------------------------------------------------------


class CudaWgmmaConv(CudaVariant[Conv2d]):
    """f16 and bf16 images of layout nhwc in all directions, on Hopper."""

    name = "cuda_wgmma"
    operator = Conv2d
    space = SPACE
    minimum_cc = (9, 0)
    maximum_cc = (9, 0)

    def target(self, device: Device) -> str:
        """Return sm_90a: only this target has wgmma and setmaxnreg."""
        return "sm_90a"

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why wgmma or TMA cannot do this workload, or None if they can."""
        if reason := prologue.refusal(self.key, workload):
            return reason
        w = workload
        if w.dtype not in ("f16", "bf16") or w.layout != "nhwc":
            return f"{self.key} multiplies f16 and bf16 of layout nhwc, not {w.dtype} of layout {w.layout}"
        # Lines of x and w have c channels, those of dy have k.
        if w.c % 8 or (w.direction != "fprop" and w.k % 8):
            return f"{self.key} copies by TMA: lines of channels must be multiples of 16 bytes"
        if w.groups > 1 and ((w.c // w.groups) % PANEL_CHANNELS or (w.k // w.groups) % PANEL_CHANNELS):
            return (
                f"{self.key} copies {PANEL_CHANNELS} channels at a time: groups must have a multiple of that"
            )
        if max(axis.reach for axis in axes(w)) > (max_offset := _conv_pixels.MOST_OFFSET):
            return f"{self.key} copies by TMA: taps must be within {max_offset} pixels of the first"
        whole = product(w)
        if max(whole.m, whole.n, whole.depth, *w.padded, *w.inputs()[0].shape) > MOST_EXTENT:
            return f"{self.key} supports dimensions of up to {MOST_EXTENT} elements"
        try:
            _conv_pixels.pixel_map(w, w.inputs()[0], PANEL_CHANNELS)
        except InputError as error:
            return f"{self.key} copies pixels by TMA: {error}"
        if not any(tile_is_useful(bm, bn, 1, w) for bm, bn, _ in USUAL):
            return f"{w.outputs()[0].shape} has too many tiles for {self.key}"
        return None

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return the usual tile and number of parts of K with the lowest estimated time."""
        ordered = sorted(
            self._usual(workload, device), key=lambda config: _estimate(workload, device, config)
        )
        return self.space.first_valid(ordered, workload=workload, device=device)

    def _usual(self, workload: Conv2d, device: Device) -> Iterator[Config]:
        """Yield the usual tiles with the most stages that fit; as clusters of two if they fill the device."""
        whole, bk = product(workload), PANEL_CHANNELS
        for (bm, bn, consumers), split in itertools.product(USUAL, _conv.SPLITS):
            room = device.smem_per_block_bytes - _smem_bytes(
                workload, {"bm": bm, "bn": bn, "bk": bk, "consumers": consumers, "stages": 0}
            )
            of_k = max(2, 2 * ceil_div(_steps(workload, bk), split))
            deepest = min(8, of_k, room // ((bm + bn) * LINE_BYTES + 16))
            paired = bm < whole.m and whole.tiles(bm, bn) >= device.sm_count
            cluster_m = 2 if paired else 1
            groups = (1,) if split > 1 else (1, 4, 8)
            yield Config(
                {
                    "bm": bm,
                    "bn": bn,
                    "bk": bk,
                    "stages": int(deepest),
                    "consumers": consumers,
                    "pingpong": 0,
                    "cluster_m": cluster_m,
                    "cluster_n": 1,
                    "split": split,
                    "group_m": max(g for g in groups if g == 1 or g * cluster_m * bm < 2 * whole.m),
                    "min_blocks": 1,
                }
            )

    def tiles(self, workload: Conv2d, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of rows, columns and K; wgrad rounds the channels of a tap up to 64."""
        if workload.direction != "wgrad":
            return _conv.tiles(workload, {**config, "walk": "by_tap"})
        w, whole = workload, product(workload)
        panels = whole.n // PANEL_CHANNELS
        return (
            Tiling(dimension="k", extent=whole.m, tile=config["bm"]),
            Tiling(dimension="c", extent=w.c // w.groups, tile=PANEL_CHANNELS),
            Tiling(dimension="r*s*c/64", extent=panels, tile=config["bn"] // PANEL_CHANNELS),
            Tiling(dimension="n*p*q", extent=whole.depth, tile=config["bk"]),
        )

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count tiles as blocks, as persistent blocks share tiles. Parts beyond the edge multiply zeros."""
        names = ("bm", "bn", "bk", "consumers", "split")
        bm, bn, bk, consumers, split = (table[name].astype(np.float64) for name in names)
        size, whole = itemsize(workload.dtype), product(workload)
        # Parts differ by one step at most. The shortest part of a class with most taps is a lower bound for
        # them.
        length = np.floor(_steps(workload, bk) / split) * bk
        full = bm * bn * length
        tiles = whole.tiles(bm, bn) * split
        return Costs(
            # Counted by work: blocks of other classes have fewer taps.
            blocks=np.minimum(tiles, whole.work(bm, bn, bk, "by_tap") / np.maximum(1.0, full)),
            full_blocks=whole.tiles(bm, bn, most_taps=True) * split,
            threads=wgmma_tile.threads(consumers),
            smem_bytes=_smem_bytes(workload, table),
            mma_flop=2 * full,
            mma_dtype=workload.dtype,
            # Written once and read once. How often wgmma reads an operand that its warps share is not
            # published.
            smem_traffic_bytes=2 * size * length * (bm + bn),
            fill_bytes=self._fill_bytes(workload, table),
            # Four warps issue each product of 64 rows, whether the tile has one consumer or all.
            instructions=4 * bm / 64 * length * size / 32,
            # As in gemm/cuda_wgmma: products of 64 x bn that add to the same sums take bn / 2 clocks each.
            # The first one waits for a copy, unless the tile before hides that wait.
            chain_clocks=np.where((tiles <= device.sm_count) & (length > 0), device.l2_latency, 0.0)
            + length * size / 32 * bn / 2 / np.where(table["pingpong"] == 1, consumers, 1),
            serial_launches=np.where(split > 1, 2, 1),
            execution=self._execution(workload, table, length, device),
        )

    def _execution(self, workload: Conv2d, table: Table, length: Any, device: Device) -> Execution:
        """Count the steps of a tile, its epilogue, and the traffic in the order of persistent blocks."""
        names = ("bm", "bn", "cluster_m", "cluster_n", "split")
        bm, bn, cluster_m, cluster_n, split = (table[name].astype(np.float64) for name in names)
        size, whole = itemsize(workload.dtype), product(workload)
        tiles = whole.tiles(bm, bn) * split
        loop = wgmma_tile.main_loop(
            table, size, length, products=1, columns=bn, passes_of_b=1, tiles=tiles, device=device
        )
        traffic = _execution.traffic_of(
            workload,
            table,
            device,
            whole,
            height=table["group_m"] * cluster_m,
            wave=np.minimum(tiles, device.sm_count * table["min_blocks"]),
        )
        results = _execution.results_of(
            workload,
            table,
            _conv.alignment(workload, "by_tap")[2],
            functools.partial(wgmma_tile.results, table),
        )
        return with_results(
            loop,
            results,
            device,
            # Blocks of a cluster read a part each of what they share.
            l2_bytes=length * (traffic.line_a / cluster_n + traffic.line_b / cluster_m),
            further_clocks=traffic.sum_clocks,
            memory_bytes=traffic.memory_bytes,
        )

    def _fill_bytes(self, workload: Conv2d, table: Table) -> Any:
        """Return the fewest bytes of filters, or of dy in wgrad, that a block copies; pixels may be padding.

        Each block of a cluster reads a part of the shared tile. Whether the other parts pass the same port is
        not known, so they are not counted.
        """
        names = ("bm", "bn", "bk", "cluster_m", "cluster_n", "split")
        bm, bn, bk, cluster_m, cluster_n, split = (table[name].astype(np.float64) for name in names)
        whole, wgrad = product(workload), workload.direction == "wgrad"
        extent, tile, parts = (whole.m, bm, cluster_n) if wgrad else (whole.n, bn, cluster_m)
        steps = np.floor(_steps(workload, bk) / split)
        last = extent - (ceil_div(extent, tile) - 1) * tile
        if workload.direction == "fprop":  # parts are groups of filters, whose lines run along K
            shortest = whole.depth - (ceil_div(whole.depth, bk) - 1) * bk
            length = np.where(split == 1, whole.taps * whole.depth, steps * shortest)
            return itemsize(workload.dtype) * np.maximum(0, last - (parts - 1) * tile / parts) * length
        # Parts are groups of lines along K: in a short step, a part may be empty.
        short_steps = np.where(whole.depth % bk == 0, 0, np.minimum(steps, whole.taps))
        alone = (parts == 1) & (split == 1)
        length = np.where(alone, whole.taps * whole.depth, (steps - short_steps) * bk / parts)
        return itemsize(workload.dtype) * last * length

    def claims(self, workload: Conv2d, config: Config) -> tuple[str, ...]:
        """Return warpgroup products, copies by boxes and by pixels, and setmaxnreg if registers move."""
        moved = ["USETMAXREG"] if wgmma_tile.registers_move(config) else []
        return ("HGMMA", "UTMALDG.3D", "UTMALDG.IM2COL", *moved)

    def source(self, workload: Conv2d, config: Config) -> str:
        """Return the kernel for this workload's direction and types and this configuration, for all sizes."""
        names = ("bm", "bn", "bk", "stages", "consumers", "cluster_m", "cluster_n", "min_blocks")
        choices: dict[str, str | bool | int] = {name.upper(): config[name] for name in names}
        stored, split = ctype(workload.dtype), config["split"]
        widest = _conv.alignment(workload, "by_tap")[2]
        k_contiguous_a = "false" if workload.direction == "wgrad" else "true"
        k_contiguous_b = "true" if workload.direction == "fprop" else "false"
        choices |= {
            "In": stored,
            "Out": stored if split == 1 else "float",
            "Apply": _conv.epilogue(workload, split),
            "DIRECTION": ("fprop", "dgrad", "wgrad").index(workload.direction),
            "STRIDED": workload.direction == "dgrad" and workload.stride > 1,
            "THREADS": wgmma_tile.threads(config["consumers"]),
            "PINGPONG": bool(config["pingpong"]),
            "STAGING_BYTES": wgmma_tile.staging_bytes(config["consumers"]),
            "VEC_C": widest if split == 1 else min(widest, 4),
            **wgmma_tile.moved_registers(config, PRODUCER_REGISTERS),
            "TileA": f"PanelTile<In, BM, BK, {k_contiguous_a}, CLUSTER_N>",
            "TileB": f"PanelTile<In, BN, BK, {k_contiguous_b}, CLUSTER_M>",
        }
        of_gemm = ("types", "ptx", "epilogue", "gemm", "gemm_mma", "ptx_hopper", "gemm_wgmma")
        shared = helpers(*of_gemm, "conv", "conv_wgmma")
        return shared + _conv.injected(workload) + gemm.constants("Choice", **choices) + SOURCE

    def scratch(self, workload: Conv2d, config: Config) -> tuple[Tensor, ...]:
        """Return the partial sums, if K is split."""
        return _conv.scratch(workload, config["split"])

    def launches(self, workload: Conv2d, config: Config) -> tuple[Launch, ...]:
        """Return the launch of persistent blocks, and that of the sum of the parts if K is split."""
        whole, split, out = product(workload), config["split"], workload.outputs()[0]
        bm, bn, cluster_m, cluster_n = (config[name] for name in ("bm", "bn", "cluster_m", "cluster_n"))
        classes = sum(c.count for c in whole.classes)
        rows, columns = ceil_div(whole.m, bm * cluster_m), ceil_div(whole.n, bn * cluster_n)
        clusters = rows * columns * classes * whole.groups * split
        height, width = axes(workload)
        grid = (height.pixels, width.pixels, height.first, width.first)
        first_class = (axis.taps.index(max(axis.taps)) for axis in (height, width))
        numbers = (*_conv.sizes(workload), *grid, *first_class, config["group_m"], split)
        smem = _smem_bytes(workload, config)
        first = Launch(
            entry="conv_wgmma<Choice>",
            grid=(clusters * cluster_m * cluster_n, 1, 1),
            block=(wgmma_tile.threads(config["consumers"]), 1, 1),
            arguments=(
                *_conv_pixels.maps(workload, config),
                *_conv.epilogue_tensors(workload),
                out.name if split == 1 else "partial",
                *(Scalar("int", number) for number in numbers),
                Scalar("long long", out.size),
            ),
            smem_bytes=int(smem),
            cluster=cluster_m * cluster_n,
            blocks_per_sm=config["min_blocks"],
        )
        return (
            (first,) if split == 1 else (first, _conv.sum_of_parts(workload, split, wide=out.size >= 2**30))
        )

    def emulation_workload(self, workload: Conv2d, config: Config) -> Conv2d:
        """Return a workload of few tiles with the same edges."""
        steps = max(config["stages"] + 2, min(config["split"], 16))
        bm, bn = config["bm"], config["bn"]
        if workload.direction == "wgrad":  # rows and columns are exchanged
            bm, bn = bn, bm
        tile = _conv_emulation.Tile(m=bm, n=bn, k=config["bk"], steps=steps, walk="by_tap")
        small = _conv_emulation.emulation_workload(workload, tile)
        if small.groups == 1:
            return small
        c, k = (ceil_div(x // small.groups, PANEL_CHANNELS) * PANEL_CHANNELS for x in (small.c, small.k))
        return dataclasses.replace(small, c=c * small.groups, k=k * small.groups)


VARIANT = CudaWgmmaConv()
