"""gemm in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16, bf16, tf32, e4m3, i8.

Sums are f32, or i32 for i8. Persistent blocks compute one tile of bm x bn results after the other. A producer
warpgroup copies tiles of a and b by TMA into a ring of `stages` buffers; one to three consumer warpgroups
multiply from there, with one group of wgmma always in flight, and store. Consumers share the rows of one tile
(cooperative), or take turns with whole tiles (pingpong): one stores while another multiplies. Blocks of a
cluster share copies: of two blocks with the same rows of a, each copies one half of the tile to both.

The producer releases registers to the consumers. Copies fill tiles beyond the edge with zeros; stores skip
them. Threads store, or (`staged` is 2) bulk copies of boxes that warps have gathered in shared memory, while
the warps continue.

A prologue is applied in registers: each warp reads its rows of a from shared memory, and wgmma takes them
from its registers, while it still multiplies those of the step before.

wgmma ignores the lower 13 bits of f32 elements, but tf32 rounds to nearest. Elements of a are rounded in
registers, those of b in shared memory by the three warps of the producer warpgroup that copy nothing. They
transpose b, too, where k is not contiguous.

Where c has few tiles, `split_k` blocks share the steps of each along k, and a second kernel sums the parts.

Limits: TMA needs row lengths that are multiples of 16 bytes. wgmma takes 8-bit operands only if k is
contiguous in both. tf32 has no prologue. Products of tf32 or with a prologue do not divide k.

Source: PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg"; CUTLASS 3, "Efficient GEMM in
CUDA" (warp specialisation, pingpong and cooperative kernels).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm, prologue, wgmma_tile
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.cuda_expression import filled
from tunebench.kernels.common.gemm_variant import Constants
from tunebench.kernels.common.wgmma_gemm import RING, Tiles, WgmmaGemm, constraints
from tunebench.space import Config, Parameter, Space, takes_config
from tunebench.variant import Argument, Launch, Scalar, TensorMap, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.gemm import Gemm

HELD = ("bm", "bn", "bk", "consumers", "pingpong", "min_blocks")
"""Parameters that decide the registers of a consumer."""

NUMBERS = {True: 28, False: 44}
"""Registers of a consumer for the numbers and intermediate values of a prologue, by whether it is cheap."""


ROUNDING_REGISTERS = 40
"""Registers per thread of the producer's warpgroup for tf32: three of its warps round b."""


def producer_registers(workload: Gemm) -> int:
    """Return the registers per thread of the producer's warpgroup."""
    return ROUNDING_REGISTERS if workload.dtype == "tf32" else wgmma_tile.PRODUCER_REGISTERS


@takes_config(*HELD)
def operands_stay_in_registers(config: Mapping[str, Any], workload: Gemm) -> Any:
    """With a prologue or for tf32, the operands of two steps must fit in registers beside the sums."""
    if not workload.has_pre and workload.dtype != "tf32":
        return True
    bm, bn, bk, consumers, pingpong, min_blocks = (config[name] for name in HELD)
    operands = 2 * 4 * wgmma_tile.rows(bm, consumers, pingpong) // 64 * (bk * itemsize(workload.dtype) // 32)
    other_registers = wgmma_tile.OTHER_REGISTERS + (
        NUMBERS[prologue.is_cheap(workload)] if workload.has_pre else 0
    )
    needed = wgmma_tile.sums(bm, bn, consumers, pingpong) + operands + other_registers
    launched = wgmma_tile.launched_registers(consumers, min_blocks)
    room = wgmma_tile.consumer_registers(consumers, min_blocks, producer_registers(workload))
    product_registers = bn // 2 + wgmma_tile.INSTRUCTION_REGISTERS + 4
    return (needed <= room) & (product_registers <= launched)


def turned_steps_are_squares(bk: Any, workload: Gemm) -> Any:
    """A step of b that is transposed in shared memory must be one line."""
    return (bk == 32) | (workload.dtype != "tf32") | (workload.trans[1] == "t")


def boxes_are_stored(staged: Any, workload: Gemm) -> Any:
    """Bulk copies store rows of c whose lengths are multiples of 16 bytes."""
    return (staged < 2) | (gemm.widths(workload)[2] * itemsize(workload.out) == 16)


def parts_are_plain(split_k: Any, staged: Any, workload: Gemm) -> Any:
    """Parts of k have no prologue and no tf32, and threads store them."""
    plain = not workload.has_pre and workload.dtype != "tf32"
    return (split_k == 1) | (plain & (staged < 2))


def parts_are_few(split_k: Any, group_m: Any, min_blocks: Any) -> Any:
    """Where k is divided, tiles are few: their order does not matter, and min_blocks must be 1."""
    return (split_k == 1) | ((group_m == 1) & (min_blocks == 1))


SPLIT_K = Parameter("split_k", gemm.SPLITS, "blocks that share the steps of a tile")
DIVISION = (parts_are_plain, parts_are_few, gemm.split_is_useful)
"""Constraints of `SPLIT_K`."""

STAGED = Parameter(
    "staged", (0, 1, 2), "1: store results through shared memory, in wide accesses; 2: by bulk copies"
)

SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of c per tile"),
        Parameter("bn", (64, 128, 192, 256), "columns of c per tile"),
        Parameter("bk", (32, 64, 128, 256), "elements of k per step, in one buffer"),
        *(STAGED if parameter.name == "staged" else parameter for parameter in RING),
        SPLIT_K,
    ),
    (
        *constraints(gemm),
        operands_stay_in_registers,
        turned_steps_are_squares,
        boxes_are_stored,
        *DIVISION,
    ),
)

USUAL = (
    # bm, bn, consumers, pingpong; largest first
    (128, 256, 2, 0),
    (256, 128, 2, 0),
    (128, 192, 2, 0),
    (128, 128, 2, 0),
    (128, 64, 2, 0),
    (64, 128, 1, 0),
    (64, 64, 1, 0),
    (128, 192, 2, 1),
    (128, 128, 2, 1),
    (64, 256, 2, 1),
    (64, 128, 2, 1),
)
"""Tiles that libraries ship."""

# A prologue, the type tf32, `staged` and `split_k` fill in the words between @.
SOURCE = """
// c = activation(op(a) op(b) + bias) + residual. C has all compile-time constants.
template <class C>
__global__ void __launch_bounds__(C::THREADS, C::MIN_BLOCKS)
gemm_wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,@C_MAP@
           const typename C::Out* __restrict__ bias, const typename C::Out* __restrict__ residual,@PARAMETERS@
           typename C::Out* __restrict__ c, int m, int n, int k, int batch, int group_m@PARTS@) {
  using Out = typename C::Out;
  const BlockMemory<C> memory;
  const @TILES@;
  const auto sum = [&](auto&&... state) { @MULTIPLY@, state...); };
  const auto store = [&](const auto& sums, int i, const TileIndex& first, int rows) {
    const i64 at = first.batch * (i64(m) * n) + i64(first.m) * n + first.n;
    const FinishOf<C> finish = {bias + first.n, n - first.n, residual + at, n};
    @STORE@
  };
  @MULTIPLY_TILES@<C>(memory, tiles, k, sum, store, a_map, b_map);@FINISH@
}
"""


BOX_ROWS = 16
"""Rows of c that one bulk copy stores: those of a warp."""

BY_THREADS = {
    "C_MAP": "",
    "PARTS": "",
    "TILES": "Tiles<C> tiles(m, n, batch, group_m)",
    "STORE": "store_rows<C>(sums[i], memory.staging, Target<Out>{c + at, n, rows, n - first.n}, finish);",
    "FINISH": "",
}
BY_BOXES = {
    **BY_THREADS,
    "C_MAP": " const __grid_constant__ TensorMap c_map,",
    "STORE": "store_boxes<C>(sums[i], memory.staging, c_map, first, rows, finish);",
    "FINISH": "\n  finish_stores();",
}
IN_PARTS = {
    **BY_THREADS,
    "PARTS": ", Wide<typename C::In>* __restrict__ partial, int parts",
    "TILES": "PartTiles<C> tiles(m, n, batch, group_m, parts, k)",
    "STORE": "store_rows<C, 4>(sums[i], memory.staging, tiles.target(partial, first, rows), "
    "keep_sum<C::BN, Wide<typename C::In>>());",
}
"""Words of the kernel's source, by who stores results: threads, bulk copies, or threads parts of them.

In parts, k is the length of a part.
"""


class CudaWgmmaGemm(WgmmaGemm[Gemm]):
    """f16, bf16, tf32, e4m3 and i8 on Hopper."""

    name = "cuda_wgmma"
    operator = Gemm
    operation = gemm
    space = SPACE
    usual: ClassVar[Tiles] = USUAL
    dtypes: ClassVar[tuple[str, ...]] = ("f16", "bf16", "tf32", "e4m3", "i8")
    entry = "gemm_wgmma"
    headers = ("types", "ptx", "epilogue", "gemm", "gemm_parts", "gemm_mma", "ptx_hopper", "gemm_wgmma")
    text = SOURCE

    def limits(self, workload: Gemm, device: Device) -> str | None:
        """Return why wgmma or TMA cannot do this workload, or None if they can."""
        if workload.dtype == "tf32" and workload.has_pre:
            return f"{self.key} does not support a prologue of tf32: pre={workload.pre}"
        return super().limits(workload, device)

    def product(self, workload: Gemm) -> Gemm:
        """Return the workload itself."""
        return workload

    def passes_of_b(self, workload: Gemm) -> int:
        """Return 2 for tf32, whose elements of b are copied, and then rounded, and otherwise 1."""
        return 2 if workload.dtype == "tf32" else 1

    def producer_registers(self, workload: Gemm) -> int:
        """Return the registers per thread of the producer's warpgroup."""
        return producer_registers(workload)

    def choices(self, workload: Gemm, config: Config) -> Constants:
        """Return the compile-time constants that depend on the configuration."""
        chosen = super().choices(workload, config)
        if workload.dtype == "tf32" and workload.trans[1] == "n":
            chosen["TileB"] = "TurnedTile<In, BN, BK, CLUSTER_M>"
        return {**chosen, "Division": gemm.division(config)}

    def preamble(self, workload: Gemm) -> str:
        """Return the source of the activation, if it is an expression, and of the prologue or of tf32."""
        injected = gemm.injected(workload)
        if workload.dtype == "tf32":
            return injected + helpers("registers_wgmma", "tf32_wgmma")
        if workload.has_pre:
            return injected + helpers("registers_wgmma") + prologue.preamble(workload, "prologue_wgmma")
        return injected

    def kernel_text(self, workload: Gemm, config: Config) -> str:
        """Return the source of the kernel, with a prologue if the workload has one."""
        parameters, multiply, tiles = "", self.multiplied, "multiply_tiles"
        if workload.has_pre:
            vectors = "PrologueVectors<typename C::In>{pre_scale, pre_shift}"
            parameters = prologue.PARAMETERS
            multiply = f"multiply_applied<C>(memory.ring, memory.buffers, k, {vectors}"
        if workload.dtype == "tf32":
            multiply, tiles = "multiply_rounded<C>(memory.ring, memory.buffers", "multiply_rounded_tiles"
        boxes, divided = config["staged"] == 2, config["split_k"] > 1
        results = BY_BOXES if boxes else IN_PARTS if divided else BY_THREADS
        source = filled(self.text, PARAMETERS=parameters, MULTIPLY=multiply, MULTIPLY_TILES=tiles, **results)
        return helpers(*["stores_wgmma"] * boxes, *["parts_wgmma"] * divided) + source

    def maps(self, workload: Gemm, config: Config) -> Iterator[TensorMap]:
        """Yield the tensor maps of a and b, and that of c if bulk copies store it."""
        yield from super().maps(workload, config)
        if config["staged"] == 2:
            (c,) = workload.outputs()
            yield wgmma_tile.panel_map(c, True, BOX_ROWS, 0, 1)

    def claims(self, workload: Gemm, config: Config) -> tuple[str, ...]:
        """Return gemm's instructions, ldmatrix where a passes through registers, and bulk stores."""
        by_ldmatrix = workload.has_pre or (workload.dtype == "tf32" and workload.trans[0] == "n")
        more = (["LDSM"] if by_ldmatrix else []) + (["UTMASTG"] if config["staged"] == 2 else [])
        return (*super().claims(workload, config), *more)

    def arguments(self, workload: Gemm, config: Config) -> tuple[Argument, ...]:
        """Return bias, residual, scale and shift of a prologue, c, then sizes."""
        _, _, bias, residual, *further, group_m = gemm.arguments(workload, config["group_m"])
        prologue_operands = prologue.operands(workload) if workload.has_pre else ()
        return (bias, residual, *prologue_operands, *further, Scalar("int", workload.batch), group_m)

    def tiles(self, workload: Gemm, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of m, n and k. All parts of a tile have the same number of steps."""
        of_m, of_n, of_k = super().tiles(workload, config)
        return (of_m, of_n, dataclasses.replace(of_k, tile=config["bk"] * config["split_k"]))

    def launches(self, workload: Gemm, config: Config) -> tuple[Launch, ...]:
        """Return the launch of the product, and that of the sum of its parts if k is divided."""
        (product,) = super().launches(workload, config)
        parts, (bm, bn, bk) = config["split_k"], (config[name] for name in ("bm", "bn", "bk"))
        if parts == 1:
            return (product,)
        length = ceil_div(ceil_div(workload.k, bk), parts) * bk
        m, n, k, of_part, batch, group_m, tiles, of_tile = (
            Scalar("int", int(size))
            for size in (
                *(workload.m, workload.n, workload.k, length, workload.batch, config["group_m"]),
                *(gemm.blocks(workload, bm, bn), parts),
            )
        )
        numbers = (m, n, of_part, batch, group_m)
        first = dataclasses.replace(
            product,
            grid=(product.grid[0] * parts, 1, 1),
            arguments=(
                *self.maps(workload, config),
                *(*gemm.added(workload), "c", *numbers, "partial", of_tile),
            ),
        )
        return (first, gemm.finish_launch(workload, config, (m, n, k, group_m, tiles, of_tile)))

    def scratch(self, workload: Gemm, config: Config) -> tuple[Tensor, ...]:
        """Return the partial sums, if k is divided."""
        return gemm.scratch(workload, config)

    def _usual(self, workload: Gemm, device: Device) -> Iterator[Config]:
        """Yield the usual tiles, with each division of k that the space has."""
        for config, split in itertools.product(super()._usual(workload, device), gemm.SPLITS):
            yield Config({**config, "split_k": split, "group_m": config["group_m"] if split == 1 else 1})

    def emulation_workload(self, workload: Gemm, config: Config) -> Gemm:
        """Return a workload of few tiles with the same edges; each part of k fills the ring if it can."""
        steps = max(config["stages"], min((config["stages"] + 1) * config["split_k"], 24) - 1)
        return gemm.shrink(workload, config, steps, affordable_fma=wgmma_tile.AFFORDABLE_FMA)


VARIANT = CudaWgmmaGemm()
