"""Attention gradients in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16 and bf16, summed in f32.

A first kernel sums do * o over the row of each query. Then a block owns a tile of keys, 64 for each of its
`consumers`, and iterates over the queries that attend to them, of all heads that share the keys, `bn` at a
time. One warpgroup issues bulk tensor copies (TMA) of queries and their terms into a ring of `stages`
buffers. The others recompute scores and probabilities, transposed, from there, and sum dk and dv.

dq is a sum over keys. With dq=atomic, the warpgroups exchange the gradients of scores through shared memory,
multiply them by the keys of the block, and add the product to f32 sums in global memory, in any order; a last
kernel rounds the sums. With dq=second_pass, a kernel whose blocks own queries recomputes the scores:
7 products instead of 5, and reproducible results.

Keys are shared by a group of query heads. With heads=one, a block has one of them, and adds its dk and dv to
sums in global memory, too: more blocks, which balance the SMs if the mask is causal.

A warpgroup waits for a product only after it has issued the next one. Probabilities are computed while dp is
multiplied, and with `early` the gradients of scores while dv is. With `ahead`, the next scores and dk are
multiplied while dq is added, and dk still while the next probabilities are computed.

Limits: TMA reads lines that start at multiples of 16 bytes, so that head_dim must be a multiple of 8. Sums of
dk and dv with head_dim above 128 do not fit in registers. head_dim is padded with zeros to a multiple of 64.

Source: Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, "FlashAttention-3", 2024, section 3.4 and appendix B;
PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg", "red", "fence.proxy".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.attention import _attention_backward as backward
from tunebench.kernels.attention import _attention_forward as _forward
from tunebench.kernels.attention import _attention_wgmma as _wgmma
from tunebench.kernels.attention._attention import mma_refusal, padded, unmodified_refusal
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.gemm import constants
from tunebench.kernels.common.wgmma_tile import launched_registers, threads
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Launch, Scalar, TensorMap, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

MAX_HEAD_DIM = 128
SIDES: tuple[backward.Side, ...] = ("keys", "queries")
TERMS_APART = 2
"""The queries of a head's terms are padded to this multiple: 16 bytes, as TMA requires."""
SUMS_APART = 64
"""The queries of a head's sums of dq, and their terms, are padded to this multiple."""
PRODUCER_REGISTERS = 24
"""Registers per thread of the warpgroup that copies: the least that setmaxnreg takes."""

OTHER_REGISTERS = 16
"""Registers of a multiplying thread in addition to its sums, scores and rounded operands of products."""


def _smem_bytes(workload: Attention, bn: Any, stages: Any, consumers: Any, adds_dq: Any) -> Any:
    """Return the shared memory of a block: rows, the ring, terms, dS, and the parts of all Hopper kernels."""
    lines, barriers = 2 * 64 * consumers + stages * 2 * bn, 2 * stages + consumers + 2
    of_ds = 2 * 64 * consumers * bn * itemsize(workload.dtype)
    return _wgmma.smem_bytes(workload, lines, barriers, consumers) + 8 * stages * bn + adds_dq * of_ds


def registers_suffice(
    bn: Any, consumers: Any, dq: Any, ds: Any, early: Any, ahead: Any, workload: Attention
) -> Any:
    """Sums, scores and rounded operands must stay in registers, sums of a wgmma in those of the launch."""
    dim, operand = _wgmma.dim(workload), bn // 4
    of_ds = operand * (ds == "registers")
    scores = dim + bn + early * operand + (1 + ahead) * of_ds
    of_dq = dim + ahead * bn // 2 + of_ds + (dq == "atomic") * bn * dim // (128 * consumers)
    needed = np.maximum(scores, of_dq) + OTHER_REGISTERS
    return _wgmma.registers_suffice(workload, bn, consumers, needed, PRODUCER_REGISTERS)


def shared_memory_fits(
    bn: Any, stages: Any, consumers: Any, dq: Any, workload: Attention, device: Device
) -> Any:
    """The rows, the ring, dS and the staged results must fit in the shared memory of a block."""
    return _smem_bytes(workload, bn, stages, consumers, dq == "atomic") <= device.smem_per_block_bytes


def tiles_are_useful(bn: Any, consumers: Any, workload: Attention) -> Any:
    """Tiles must not be twice as long as both sequences if smaller tiles exist."""
    return backward.is_useful(workload, 64 * consumers, 64) & backward.is_useful(workload, bn, 64)


def dq_is_shared(bn: Any, consumers: Any, dq: Any, workload: Attention) -> Any:
    """Warpgroups that add to dq must have equal parts of a step's dq, each of 64 queries by 64 columns."""
    return (dq == "second_pass") | (bn // 64 * (_wgmma.dim(workload) // 64) % consumers == 0)


SPACE = Space(
    (
        Parameter("bn", (64, 128), "rows of the other side in a stage"),
        Parameter("consumers", (1, 2, 3), "warpgroups that multiply, 64 rows each"),
        Parameter("stages", (1, 2, 3, 4), "steps in the ring"),
        Parameter("dq", ("atomic", "second_pass"), "dq: atomic sums by blocks of keys, or a second kernel"),
        Parameter("heads", ("all", "one"), "query heads of a block: all that share its keys, or one of them"),
        Parameter("ds", ("registers", "shared"), "where products for dk read the gradients of scores"),
        Parameter("early", (0, 1), "1: dv is multiplied while the gradients of scores are computed"),
        Parameter("ahead", (0, 1), "1: the next scores are multiplied while dq is added"),
        backward.TOGETHER,
    ),
    (
        tiles_are_useful,
        registers_suffice,
        shared_memory_fits,
        dq_is_shared,
        lambda dq, ds: (dq == "atomic") | (ds == "registers"),
        lambda dq, heads, workload: (heads == "all") | ((dq == "atomic") & (workload.group > 1)),
        lambda dq, stages, ahead: (ahead == 0) | ((dq == "atomic") & (stages > 1)),
        backward.lengths_differ,
    ),
)

OF_SCORE = 8.0
"""Instructions of a score: argument, power, difference, product, mask, term, and conversion of two values."""

USUAL = ((128, 2, 3), (128, 2, 2), (64, 2, 3), (64, 2, 2), (64, 1, 3), (64, 1, 2), (64, 1, 1))
"""bn, consumers and stages, largest first."""

SOURCE = """
// One side's gradients from a tile of its rows: dk and dv of keys, or dq of queries. Its rows are X (k, or q)
// and Y (v, or do), and it reads rows U (q, or k) and W (do, or v) of the other side BN at a time: S = X U^T,
// P = exp(scale S - lse), dP = Y W^T, dS = P * (dP - D). It sums P W (dv) and dS U (dk, or dq). With ADDS_DQ,
// blocks of keys also add dS^T X to the sums of dq. With BY_QUERY_HEAD, a block has one head of queries, and
// adds to sums of dk and dv, too.
template <class C, bool OF_QUERIES>
__global__ void __launch_bounds__(C::THREADS, 1)
attention_gradients(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap y_map,
                    const __grid_constant__ TensorMap u_map, const __grid_constant__ TensorMap w_map,
                    const __grid_constant__ TensorMap terms_map, const float* __restrict__ terms,
                    typename C::In* __restrict__ of_p, typename C::In* __restrict__ of_ds, int group,
                    int seq_q, int seq_k, float scale, int terms_pitch, float* __restrict__ sums,
                    i64 of_dk, i64 of_dv, int keys_pitch) {
  u8* const own = swizzled_shared();
  u8* const stages = own + 2 * C::TileX::BYTES;
  u8* const ds_tiles = stages + 2 * C::STAGES * C::TileU::BYTES;
  u8* const staged_terms = ds_tiles + (C::ADDS_DQ ? 2 * C::TileDs::BYTES : 0);
  u8* const staging = staged_terms + 8 * C::STAGES * C::BN;
  const u32 barriers = shared_address(staging + C::STAGING_BYTES), x_at = shared_address(own);
  const u32 own_full = barriers + 8 * (2 * C::STAGES + C::CONSUMERS);
  const Places<C> at = {x_at,         x_at + C::TileX::BYTES, barriers,
                        own_full,     own_full + 8,           shared_address(stages),
                        shared_address(ds_tiles)};
  if (threadIdx.x == 0) {
    mbarrier_init(at.own_full, 1);
    mbarrier_init(at.ds_full, 4 * C::CONSUMERS);
    prepare_barriers<C::STAGES, C::CONSUMERS>(barriers, 4 * C::CONSUMERS);  // every warp releases
  }
  __syncthreads();
  const Sight<C::CAUSAL> sees = {seq_q, seq_k};
  const int rows = OF_QUERIES ? seq_q : seq_k;
  RowTile tile = row_tile_of_block<C::BY_HEAD, OF_QUERIES && C::CAUSAL>(rows, C::BM);
  const Range range =
      OF_QUERIES ? sees.keys_of(tile.first, C::BM, C::BN) : sees.queries_of(tile.first, C::BN);
  constexpr bool ONE_HEAD = OF_QUERIES || C::BY_QUERY_HEAD;
  int other_head = OF_QUERIES ? tile.head / group : tile.head * group;
  if constexpr (C::BY_QUERY_HEAD) other_head = tile.head, tile.head /= group;
  const Part part = {tile, range, ONE_HEAD ? 1 : group, other_head};
  // The shuffle makes the value uniform over the warp for the compiler.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warpgroup == C::CONSUMERS) {
    if constexpr (C::CONSUMER_REGISTERS > 0) give_registers<C::PRODUCER_REGISTERS>();
    if (threadIdx.x == 128 * C::CONSUMERS)
      produce<C, OF_QUERIES>(x_map, y_map, u_map, w_map, terms_map, at, shared_address(staged_terms), part);
    __syncwarp();
  } else {
    if constexpr (C::CONSUMER_REGISTERS > 0) take_registers<C::CONSUMER_REGISTERS>();
    constexpr int STAGED = STAGING_FLOATS<WarpOfGroup<0, STRIP>>;
    float* const of_warp = reinterpret_cast<float*>(staging) + int(threadIdx.x) / 32 * STAGED;
    const float* const columns = reinterpret_cast<const float*>(staged_terms);
    const Access<C> of = {terms, sums, of_dk, of_dv, keys_pitch, columns, ds_tiles, warpgroup, terms_pitch};
    consume<C, OF_QUERIES>(of_p, of_ds, of, at, of_warp, part, sees, scale);
  }
}
"""


class CudaWgmmaAttentionBackward(_wgmma.CudaWgmma):
    """Backward variant for f16 and bf16 on Hopper: causal or not, with grouped queries, any lengths."""

    name = "cuda_wgmma_backward"
    direction = "backward"
    space = SPACE

    def limits(self, workload: Attention, device: Device) -> str | None:
        """Return why a workload cannot use wgmma or TMA, or None."""
        refused = unmodified_refusal(workload, self.key) or mma_refusal(workload, self.key, MAX_HEAD_DIM)
        return refused or backward.refusal(workload, self.key, 64)

    def default(self, workload: Attention, device: Device) -> Config:
        """Return the usual tile with the least work for the busiest SM, with the dq method of libraries."""

        def work(tile: tuple[int, int, int, str]) -> float:
            bn, consumers, stages, heads = tile
            busy = _steps_of_busiest(workload, device, bn, consumers, heads)
            return bn * busy * _wgmma.time_of_busiest(1, consumers, device) * (1 + 0.1 / stages)

        tiles = [(*tile, heads) for tile in USUAL for heads in ("all", "one")]
        usual = (
            Config(
                {
                    "bn": bn,
                    "consumers": consumers,
                    "stages": stages,
                    "dq": dq,
                    "heads": heads,
                    "ds": "shared" if dq == "atomic" else "registers",
                    "early": early,
                    "ahead": ahead,
                    "together": "length" if heads == "one" and workload.causal else "head",
                }
            )
            for dq in ("atomic", "second_pass")
            for bn, consumers, stages, heads in sorted(tiles, key=work)
            for early, ahead in ((1, 1), (0, 1), (1, 0), (0, 0))
        )
        return self.space.first_valid(usual, workload=workload, device=device)

    def tiles(self, workload: Attention, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of both sequences; head_dim is padded to 16 for scores, 64 for gradients."""
        return backward.tiles(workload, 64 * config["consumers"], config["bn"], padded(workload))

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count whole tiles; tiles that are masked completely are skipped.

        The kernels before and after the passes are not counted, nor are the additions to sums.
        """
        bn, consumers = (table[name].astype(np.float64) for name in ("bn", "consumers"))
        atomic = table["dq"] == "atomic"
        works = tuple(self._work(workload, table, side) for side in SIDES)
        return backward.as_costs(
            works,
            "mma_flop",
            ("mma_flop", "sfu", "fma", "smem_traffic_bytes", "fill_bytes", "instructions"),
            threads=threads(consumers),
            smem_bytes=_smem_bytes(workload, bn, table["stages"], consumers, atomic),
            registers=np.minimum(_wgmma.dim(workload) + 16, launched_registers(consumers, 1)),
            mma_dtype=workload.dtype,
            # A warpgroup adds 16 queries to its sums of dk by one product of 64 x dim: dim / 2 clocks of all
            # tensor cores of its SM. The next product adds to the same sums.
            chain_clocks=device.l2_latency + works[0].met.most * bn / 16 * _wgmma.dim(workload) / 2,
            serial_launches=3 + 2.0 * (table["heads"] == "one"),
            execution=self._execution(workload, table, device, works[0]),
        )

    def _execution(
        self, workload: Attention, table: Table, device: Device, work: backward.PassWork
    ) -> Execution:
        """Describe a block of keys; a second pass takes as long for its products.

        Args:
            workload: The workload.
            table: Configurations.
            device: The device, for its rates.
            work: Costs of the blocks of keys.
        """
        bn, consumers, stages, early, ahead = (
            table[name].astype(np.float64) for name in ("bn", "consumers", "stages", "early", "ahead")
        )
        dim, narrow, steps = _wgmma.dim(workload), padded(workload), work.met.most
        atomic, one_head = table["dq"] == "atomic", table["heads"] == "one"
        rate, tile = device.mma_flop_per_clock[workload.dtype], 64 * consumers
        # Products of a warpgroup in a step: by head_dim for scores and dp, by queries for dv, dk and dq.
        narrow_clocks, wide_clocks = 2 * 64 * bn * narrow / rate, 2 * 64 * bn * dim / rate
        power_clocks = _forward.softmax_clocks(bn / 2, 0, device)
        gradient_clocks = 2.0 * bn  # differences, products and conversions of bn / 2 scores
        adding_clocks = atomic * bn * dim / (128 * consumers)  # each warp of a partition adds for its lanes
        waiting = (
            narrow_clocks
            + np.maximum(narrow_clocks, power_clocks)
            + gradient_clocks
            + wide_clocks * (2 + atomic)
            + adding_clocks
        )
        hidden = early * np.minimum(wide_clocks, gradient_clocks)
        hidden = hidden + ahead * np.minimum(narrow_clocks + wide_clocks, adding_clocks + power_clocks)
        added = np.where(atomic, 4.0 * steps * bn * dim, 0.0)
        outputs = np.where(one_head, 8.0 * tile * dim, 4.0 * tile * workload.head_dim)
        # An instruction reads 64 rows of its first operand, unless they are in registers, and its columns.
        of_scores = 2 * narrow / 16 * (16 + bn / 4)
        of_sums = bn / 16 * (2 * dim / 4 + 16 * (table["ds"] == "shared"))
        of_dq = atomic * (bn / 64 * tile / 16 * (16 + dim / 4) + tile * bn * 2 / 128)
        copied = 2 * bn * dim * 2 / 128
        one_buffer = stages == 1
        return Execution(
            registers=launched_registers(consumers, 1),
            instructions=work.of_busiest("instructions")
            + steps * tile * bn / 32 * OF_SCORE
            + steps * 4 * consumers * 80,
            accesses=added / 16 + steps * tile * bn / 4 * (1 + atomic),
            passes=steps * (consumers * (of_scores + of_sums) + of_dq + copied + 8.0 * consumers),
            l2_bytes=work.of_busiest("fill_bytes") + outputs + added,
            # The rows of the block, the kernels before and after, and with one buffer each step.
            memory_waits=3 + np.where(one_buffer, steps, 0),
            prefetched_waits=np.where(one_buffer, 0, steps / np.maximum(1, stages - 1)),
            barriers=steps * (3 + 2 * atomic),
            warp_clocks=steps * (waiting - hidden),
        )

    def _work(self, workload: Attention, table: Table, side: backward.Side) -> backward.PassWork:
        """Count the products, exponentials and copies of a pass, which is not made for dq if it is atomic."""
        bn, consumers = (table[name].astype(np.float64) for name in ("bn", "consumers"))
        divides = (side == "keys") & (table["heads"] == "one")
        parts = np.where(divides, workload.group, 1)
        loops = backward.loop_counts(workload, side, 64 * table["consumers"], table["bn"])
        loops = _divided(loops, parts)
        dim, narrow, atomic = _wgmma.dim(workload), padded(workload), table["dq"] == "atomic"
        made = (side == "keys") | ~atomic
        adds, sums = ((side == "keys") & atomic), 2 if side == "keys" else 1
        size = itemsize(workload.dtype)
        scores, line_bytes = 64 * consumers * bn, size * workload.head_dim
        of_step = {
            "mma_flop": 2 * scores * (2 * narrow + (sums + adds) * dim),
            "sfu": scores,
            "fma": 3 * scores,
            # Written at least once; dS is also read by the products of dq.
            "smem_traffic_bytes": size * (2 * bn * dim + 2 * scores * adds),
            # Four warps issue each product of 64 rows, those for dq with at most `dim` columns. They add 16
            # bytes of each lane to dq, and store 4 bytes of each lane of dS.
            "instructions": 4 * consumers * (2 * narrow + sums * bn) / 16
            + 4 * scores / 32
            + adds * (bn / 64 * 4 * 64 * consumers / 16 + bn * dim / 128 + scores / 64),
        }
        all_rows = backward.heads_of(workload, side) * backward.rows_of(workload, side)
        of_block = {"fill_bytes": 2.0 * line_bytes * (loops.rows + loops.lines)}
        of_all = {"fill_bytes": 2.0 * line_bytes * (parts * all_rows + loops.all_lines)}
        figures = (
            {name: made * value for name, value in figures_of.items()}
            for figures_of in (of_step, of_block, of_all)
        )
        return backward.PassWork(loops, *figures)

    def source(self, workload: Attention, config: Config) -> str:
        """Return the kernels for a head_dim, type and configuration; other sizes are arguments."""
        choices: dict[str, str | bool | int] = {
            **backward.workload_constants(workload),
            **_wgmma.choices(workload, config, PRODUCER_REGISTERS),
            "EARLY": bool(config["early"]),
            "AHEAD": bool(config["ahead"]),
            "BY_HEAD": config["together"] == "head",
            "ADDS_DQ": config["dq"] == "atomic",
            "SHARED_DS": config["ds"] == "shared",
            "BY_QUERY_HEAD": config["heads"] == "one",
            "SUM_COLUMNS": _wgmma.dim(workload),
            "TileX": "PanelTile<In, BM, DIM, true, 1>",
            "TileXAcross": "PanelTile<In, DIM, BM, false, 1>",
            "TileU": "PanelTile<In, BN, DIM, true, 1>",
            "TileUAcross": "PanelTile<In, DIM, BN, false, 1>",
            "TileDs": "PanelTile<In, BN, BM, false, 1>",
            "TileDsLines": "PanelTile<In, BM, BN, true, 1>",
        }
        preamble = helpers(*_wgmma.HELPERS) + backward.headers(workload) + helpers("attention_backward_wgmma")
        return preamble + constants("Choice", **choices) + SOURCE

    def launches(self, workload: Attention, config: Config) -> tuple[Launch, ...]:
        """Return the kernel for the terms of queries, for the gradients, and for rounding sums or for dq."""
        if config["dq"] == "second_pass":
            passes = (self._pass(workload, config, side) for side in SIDES)
            return (backward.terms_launch(workload, "terms", TERMS_APART), *passes)
        sums = _sums(workload, config)
        cleared = sum(part.lines for part in sums)
        return (
            backward.terms_launch(workload, "sums", SUMS_APART, cleared),
            self._pass(workload, config, "keys"),
            *(_rounding(workload, part) for part in sums),
        )

    def _pass(self, workload: Attention, config: Config, side: backward.Side) -> Launch:
        consumers, bn, atomic = config["consumers"], config["bn"], config["dq"] == "atomic"
        row_names, column_names = (
            (("q", "do"), ("k", "v")) if side == "queries" else (("k", "v"), ("q", "do"))
        )
        names = [(name, 64 * consumers) for name in row_names] + [(name, bn) for name in column_names]
        maps = (_wgmma.tensor_map(workload, name, lines) for name, lines in names)
        pitch = self.scratch(workload, config)[0].shape[2]
        firsts = [part.first for part in _sums(workload, config)[1:]] or [0, 0]
        return backward.pass_launch(
            workload,
            side,
            tile=64 * consumers,
            threads=threads(consumers),
            smem_bytes=int(_smem_bytes(workload, bn, config["stages"], consumers, atomic)),
            inputs=(*maps, _terms_map(workload, bn, pitch)),
            more=(
                *(Scalar("int", pitch), "sums" if atomic else "terms"),
                *(Scalar("long long", first) for first in firsts),
                Scalar("int", _apart(workload.seq_k, SUMS_APART)),
            ),
            parts=workload.group if config["heads"] == "one" else 1,
        )

    def is_reproducible(self, workload: Attention, config: Config) -> bool:
        """Return whether no sums are atomic."""
        return bool(config["dq"] != "atomic")

    def scratch(self, workload: Attention, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the terms of queries, and for sums of gradients if they are atomic."""
        if config["dq"] == "second_pass":
            return (backward.terms_scratch(workload, TERMS_APART),)
        lines = sum(part.lines for part in _sums(workload, config))
        sums = Tensor(name="sums", shape=(lines, _wgmma.dim(workload)), dtype="f32")
        return (backward.terms_scratch(workload, SUMS_APART), sums)

    def emulation_workload(self, workload: Attention, config: Config) -> Attention:
        """Return a workload of few tiles with the same partial tiles at the edges."""
        return backward.shrink(
            workload, max(64 * config["consumers"], config["bn"]), 64 * config["consumers"]
        )


def _steps_of_busiest(workload: Attention, device: Device, bn: int, consumers: int, heads: str) -> float:
    """Return the iterations of the busiest SM, where blocks that add to dk and dv take four more."""
    loops = backward.loop_counts(workload, "keys", np.array([64 * consumers]), np.array([bn]))
    parts = workload.group if heads == "one" else 1
    blocks, longest = float(loops.blocks[0]) * parts, float(loops.most[0]) / parts
    further = 4.0 * (parts > 1)
    if workload.causal:  # blocks of different lengths fill the SMs
        return max(longest + further, (float(loops.steps[0]) + blocks * further) / device.sm_count)
    return float(ceil_div(blocks, device.sm_count)) * (longest + further)


def _divided(loops: backward.LoopCounts, parts: Any) -> backward.LoopCounts:
    """Return the counts if each block is divided into `parts` with the same tile."""
    return dataclasses.replace(
        loops,
        blocks=loops.blocks * parts,
        full=loops.full * parts,
        most=loops.most / parts,
        lines=loops.lines / parts,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """The sums of a gradient in scratch memory: its name, first element, heads, rows, factor."""

    target: str
    first: int
    heads: int
    rows: int
    factor: float

    @property
    def lines(self) -> int:
        """Return the lines, of which each head has a multiple of `SUMS_APART`."""
        return self.heads * _apart(self.rows, SUMS_APART)


def _sums(workload: Attention, config: Config) -> tuple[_Sums, ...]:
    """Return the gradients that blocks add to, in the order of their sums."""
    if config["dq"] == "second_pass":
        return ()
    shapes: list[tuple[str, backward.Side, float]] = [("dq", "queries", workload.scale)]
    if config["heads"] == "one":
        shapes += [("dk", "keys", workload.scale), ("dv", "keys", 1.0)]
    parts: list[_Sums] = []
    dim = _wgmma.dim(workload)
    for target, side, factor in shapes:
        heads, rows = backward.heads_of(workload, side), backward.rows_of(workload, side)
        first = sum(part.lines for part in parts) * dim
        parts.append(_Sums(target=target, first=first, heads=heads, rows=rows, factor=factor))
    return tuple(parts)


def _rounding(workload: Attention, part: _Sums) -> Launch:
    """Return the launch that rounds a gradient from its sums."""
    pairs = part.lines // 2 * workload.head_dim // 8
    return Launch(
        entry="attention_round_sums<Choice>",
        grid=(int(ceil_div(pairs, backward.TERMS_THREADS)), 1, 1),
        block=(backward.TERMS_THREADS, 1, 1),
        arguments=(
            *("sums", part.target, Scalar("long long", part.first), Scalar("long long", pairs)),
            *(Scalar("float", part.factor), Scalar("int", part.rows)),
            Scalar("int", _apart(part.rows, SUMS_APART)),
        ),
    )


def _apart(rows: int, multiple: int) -> int:
    """Return rows padded to a multiple."""
    return int(ceil_div(rows, multiple) * multiple)


def _terms_map(workload: Attention, queries: int, pitch: int) -> TensorMap:
    """Return the tensor map for the terms of `queries` queries; missing queries read as zeros."""
    return TensorMap(
        tensor="terms",
        dtype="f32",
        extents=(2 * workload.seq_q, workload.batch * workload.heads),
        strides_bytes=(8 * pitch,),
        box=(2 * queries, 1),
        swizzle_bytes=0,
    )


VARIANT = CudaWgmmaAttentionBackward()
