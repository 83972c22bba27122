"""Attention gradients in CUDA C++ on Hopper's tensor cores by wgmma (sm_90a): f16 and bf16, summed in f32.

A first kernel sums do * o over the row of each query. Then a block owns a tile of keys, 64 for each of its
`consumers`, and iterates over the queries that attend to them, of all heads that share the keys, `bn` at a
time. One warpgroup issues bulk tensor copies (TMA) of queries and their terms into a ring of `stages`
buffers. The others recompute scores and probabilities, transposed, from there, and sum dk and dv by products
whose left operand is the result of earlier products, in registers. Probabilities are computed while dp is
multiplied, and with `early` their gradients while dv is multiplied. A last kernel, with the sides exchanged,
has tiles of queries and computes dq: 7 products instead of 5, and reproducible results.

Limits: TMA reads lines that start at multiples of 16 bytes, so that head_dim must be a multiple of 8. Sums of
dk and dv with head_dim above 128 do not fit in registers. head_dim is padded with zeros to a multiple of 64.

Source: Shah, Bikshandi, Zhang, Thakkar, Ramani and Dao, "FlashAttention-3", 2024, section 3.4 and appendix B;
PTX ISA, "wgmma", "cp.async.bulk.tensor", "mbarrier", "setmaxnreg".
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.attention import _attention_backward as backward
from tunebench.kernels.attention import _attention_wgmma as _wgmma
from tunebench.kernels.attention._attention import mma_refusal, padded, unmodified_refusal
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.gemm import constants
from tunebench.kernels.common.wgmma_tile import launched_registers, threads
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Launch, Scalar, TensorMap, Tiling
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

MAX_HEAD_DIM = 128
TERMS_APART = 2
"""The queries of a head's terms are padded to this multiple: 16 bytes, as TMA requires."""


def _smem_bytes(workload: Attention, bn: Any, stages: Any, consumers: Any) -> Any:
    """Return the shared memory of a block: rows, the ring, terms, and the common parts of Hopper kernels."""
    lines, barriers = 2 * 64 * consumers + stages * 2 * bn, 2 * stages + consumers + 1
    return _wgmma.smem_bytes(workload, lines, barriers, consumers) + 8 * stages * bn


def registers_suffice(bn: Any, consumers: Any, early: Any, workload: Attention) -> Any:
    """Sums of dk and dv, scores and dp must stay in registers, sums of a wgmma in those of the launch."""
    return _wgmma.registers_suffice(workload, bn, consumers, _wgmma.dim(workload) + bn + early * bn // 4)


def shared_memory_fits(bn: Any, stages: Any, consumers: Any, workload: Attention, device: Device) -> Any:
    """The rows, the ring and the staged results must fit in the shared memory of a block."""
    return _smem_bytes(workload, bn, stages, consumers) <= device.smem_per_block_bytes


def tiles_are_useful(bn: Any, consumers: Any, workload: Attention) -> Any:
    """Tiles must not be twice as long as both sequences if smaller tiles exist."""
    return backward.is_useful(workload, 64 * consumers, 64) & backward.is_useful(workload, bn, 64)


SPACE = Space(
    (
        Parameter("bn", (64, 128), "rows of the other side in a stage"),
        Parameter("consumers", (1, 2, 3), "warpgroups that multiply, 64 rows each"),
        Parameter("stages", (1, 2, 3, 4), "steps in the ring"),
        Parameter("early", (0, 1), "1: dv is multiplied while the gradients of scores are computed"),
        backward.TOGETHER,
    ),
    (
        tiles_are_useful,
        registers_suffice,
        shared_memory_fits,
        backward.lengths_differ,
    ),
)

USUAL = ((64, 2, 3), (64, 2, 2), (64, 1, 3), (64, 1, 2), (64, 1, 1))
"""bn, consumers and stages, largest first."""

SOURCE = """
// One side's gradients from a tile of its rows: dk and dv of keys, or dq of queries. Its rows are X (k, or q)
// and Y (v, or do), and it reads rows U (q, or k) and W (do, or v) of the other side BN at a time: S = X U^T,
// P = exp(scale S - lse), dP = Y W^T, dS = P * (dP - D). It sums P W (dv) and dS U (dk, or dq).
template <class C, bool OF_QUERIES>
__global__ void __launch_bounds__(C::THREADS, 1)
attention_gradients(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap y_map,
                    const __grid_constant__ TensorMap u_map, const __grid_constant__ TensorMap w_map,
                    const __grid_constant__ TensorMap terms_map, const float* __restrict__ terms,
                    typename C::In* __restrict__ of_p, typename C::In* __restrict__ of_ds, int group,
                    int seq_q, int seq_k, float scale, int terms_pitch) {
  u8* const own = swizzled_shared();
  u8* const stages = own + 2 * C::TileX::BYTES;
  u8* const staged_terms = stages + 2 * C::STAGES * C::TileU::BYTES;
  u8* const staging = staged_terms + 8 * C::STAGES * C::BN;
  const u32 barriers = shared_address(staging + C::STAGING_BYTES), x_at = shared_address(own);
  const Places<C> at = {x_at, x_at + C::TileX::BYTES, barriers, barriers + 8 * (2 * C::STAGES + C::CONSUMERS),
                        shared_address(stages)};
  if (threadIdx.x == 0) {
    mbarrier_init(at.own_full, 1);
    prepare_barriers<C::STAGES, C::CONSUMERS>(barriers, 4 * C::CONSUMERS);  // every warp releases
  }
  __syncthreads();
  const Sight<C::CAUSAL> sees = {seq_q, seq_k};
  const int rows = OF_QUERIES ? seq_q : seq_k;
  const RowTile tile = row_tile_of_block<C::BY_HEAD, OF_QUERIES && C::CAUSAL>(rows, C::BM);
  const Range range =
      OF_QUERIES ? sees.keys_of(tile.first, C::BM, C::BN) : sees.queries_of(tile.first, C::BN);
  const Part part = {tile, range, OF_QUERIES ? 1 : group, OF_QUERIES ? tile.head / group : tile.head * group};
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
    consume<C, OF_QUERIES>(terms, of_p, of_ds, at, columns, of_warp, part, sees, warpgroup, terms_pitch,
                           scale);
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
        """Return the usual tile with the least work for the busiest SM."""

        def work(tile: tuple[int, int, int]) -> float:
            _, consumers, stages = tile
            busy = _wgmma.time_of_busiest(
                backward.blocks(workload, "keys", 64 * consumers), consumers, device
            )
            return busy * (1 + 0.1 / stages)  # more stages hide waits of all warpgroups

        usual = (
            Config({"bn": bn, "consumers": consumers, "stages": stages, "early": early, "together": "head"})
            for bn, consumers, stages in sorted(USUAL, key=work)
            for early in (1, 0)
        )
        return self.space.first_valid(usual, workload=workload, device=device)

    def tiles(self, workload: Attention, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of both sequences; head_dim is padded to 16 for scores, 64 for gradients."""
        return backward.tiles(workload, 64 * config["consumers"], config["bn"], padded(workload))

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count whole tiles; tiles that are masked completely are skipped.

        The kernel before the passes is not counted.
        """
        bn, consumers = (table[name].astype(np.float64) for name in ("bn", "consumers"))
        works = tuple(self._work(workload, table, side) for side in ("keys", "queries"))
        return backward.as_costs(
            works,
            "mma_flop",
            ("mma_flop", "sfu", "fma", "smem_traffic_bytes", "fill_bytes", "instructions"),
            threads=threads(consumers),
            smem_bytes=_smem_bytes(workload, bn, table["stages"], consumers),
            registers=np.minimum(_wgmma.dim(workload) + 16, launched_registers(consumers, 1)),
            mma_dtype=workload.dtype,
            # A warpgroup adds 16 queries to its sums of dk by one product of 64 x dim: dim / 2 clocks of all
            # tensor cores of its SM. The next product adds to the same sums.
            chain_clocks=device.l2_latency + works[0].met.most * bn / 16 * _wgmma.dim(workload) / 2,
            serial_launches=3,
        )

    def _work(self, workload: Attention, table: Table, side: backward.Side) -> backward.PassWork:
        """Count the products, exponentials and copies."""
        bn, consumers = (table[name].astype(np.float64) for name in ("bn", "consumers"))
        met = backward.loop_counts(workload, side, 64 * table["consumers"], table["bn"])
        dim, narrow, gradients = _wgmma.dim(workload), padded(workload), 2 if side == "keys" else 1
        scores, line_bytes = 64 * consumers * bn, itemsize(workload.dtype) * workload.head_dim
        of_step = {
            "mma_flop": 2 * scores * (2 * narrow + gradients * dim),
            "sfu": scores,
            "fma": 3 * scores,
            # Written at least once.
            "smem_traffic_bytes": 2 * bn * dim * itemsize(workload.dtype),
            # Four warps issue each product of 64 rows.
            "instructions": 4 * consumers * (2 * narrow + gradients * bn) / 16 + 4 * scores / 32,
        }
        all_rows = backward.heads_of(workload, side) * backward.rows_of(workload, side)
        of_block = {"fill_bytes": 2.0 * line_bytes * (met.rows + met.lines)}
        return backward.PassWork(
            met, of_step, of_block, {"fill_bytes": 2.0 * line_bytes * (all_rows + met.all_lines)}
        )

    def source(self, workload: Attention, config: Config) -> str:
        """Return the kernels for a head_dim, type and configuration; other sizes are arguments."""
        choices: dict[str, str | bool | int] = {
            **backward.workload_constants(workload),
            **_wgmma.choices(workload, config),
            "EARLY": bool(config["early"]),
            "BY_HEAD": config["together"] == "head",
            "ADDS_DQ": False,
            "TileX": "PanelTile<In, BM, DIM, true, 1>",
            "TileU": "PanelTile<In, BN, DIM, true, 1>",
            "TileUAcross": "PanelTile<In, DIM, BN, false, 1>",
        }
        preamble = helpers(*_wgmma.HELPERS) + backward.headers(workload) + helpers("attention_backward_wgmma")
        return preamble + constants("Choice", **choices) + SOURCE

    def launches(self, workload: Attention, config: Config) -> tuple[Launch, ...]:
        """Return the kernel for the terms of queries, then for dk and dv, then for dq."""
        return (
            backward.terms_launch(workload, "terms", TERMS_APART),
            self._pass(workload, config, "keys"),
            self._pass(workload, config, "queries"),
        )

    def _pass(self, workload: Attention, config: Config, side: backward.Side) -> Launch:
        consumers, bn = config["consumers"], config["bn"]
        own, others = (("q", "do"), ("k", "v")) if side == "queries" else (("k", "v"), ("q", "do"))
        names = [(name, 64 * consumers) for name in own] + [(name, bn) for name in others]
        maps = (_wgmma.tensor_map(workload, name, lines) for name, lines in names)
        return backward.pass_launch(
            workload,
            side,
            tile=64 * consumers,
            threads=threads(consumers),
            smem_bytes=int(_smem_bytes(workload, bn, config["stages"], consumers)),
            inputs=(*maps, _terms_map(workload, bn)),
            more=(Scalar("int", self.scratch(workload, config)[0].shape[2]),),
        )

    def scratch(self, workload: Attention, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the terms of queries."""
        return (backward.terms_scratch(workload, TERMS_APART),)

    def emulation_workload(self, workload: Attention, config: Config) -> Attention:
        """Return a workload of few tiles with the same partial tiles at the edges."""
        return backward.shrink(
            workload, max(64 * config["consumers"], config["bn"]), 64 * config["consumers"]
        )


def _terms_map(workload: Attention, queries: int) -> TensorMap:
    """Return the tensor map for the terms of `queries` queries; missing queries read as zeros."""
    batch, heads, pitch, _ = backward.terms_scratch(workload, TERMS_APART).shape
    return TensorMap(
        tensor="terms",
        dtype="f32",
        extents=(2 * workload.seq_q, batch * heads),
        strides_bytes=(8 * pitch,),
        box=(2 * queries, 1),
        swizzle_bytes=0,
    )


VARIANT = CudaWgmmaAttentionBackward()
