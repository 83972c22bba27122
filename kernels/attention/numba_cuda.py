"""Forward attention in Numba-CUDA: a thread has a query, with its row of q and of results in registers.

A block has `threads` neighbouring queries of one head, and copies `bn` keys and values at a time to shared
arrays, which all its threads read in the same order. A thread updates the maximum and the sum of
exponentials key by key, so that threads exchange nothing. Keys that the mask hides from all queries of a
block are skipped.

Limits: f32 and f16; head_dim up to 128, since a row of q and a row of results then fill the registers of a
thread.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Numba documentation, "CUDA
Python, Examples: matrix multiplication".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.attention._attention import kept, least_keys
from tunebench.kernels.common.gemm import MAX_BLOCKS
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Launch, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workloads.operators.attention import HIDDEN_ROW_LSE, LOWEST_BIAS, Attention

MAX_STATIC_SMEM_BYTES = 48 * 1024
"""Most static shared memory per block. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

LARGEST_HEAD = 128
"""Largest head_dim that the variant supports."""


def _smem_bytes(workload: Attention, bn: Any) -> Any:
    return 4 * 2 * bn * workload.head_dim


def _blocks(workload: Attention, threads: Any) -> Any:
    return workload.batch * workload.heads * ceil_div(workload.seq_q, threads)


SPACE = Space(
    (
        Parameter("threads", (32, 64, 128, 256), "queries of a block, one per thread"),
        Parameter("bn", (4, 8, 16, 32, 64), "keys and values in shared memory"),
    ),
    (
        lambda bn, workload: _smem_bytes(workload, bn) <= MAX_STATIC_SMEM_BYTES,
        lambda threads, workload: (threads == 32) | (threads < 2 * workload.seq_q),
        lambda bn, workload: (bn == 4) | (bn < 2 * workload.seq_k),
    ),
)


class NumbaCudaAttention(NumbaCudaVariant[Attention]):
    """Forward variant for f32 and f16, with any mask or bias."""

    name = "numba_cuda"
    operator = Attention
    direction = "forward"
    space = SPACE

    def limits(self, workload: Attention, device: Device) -> str | None:
        """Return why the type, the head or the grid does not fit, or None."""
        if workload.dtype == "bf16":
            return f"{self.key} reads f32 and f16, not bf16"
        if workload.head_dim > LARGEST_HEAD:
            return f"{self.key} takes head_dim up to {LARGEST_HEAD}, not {workload.head_dim}"
        if _blocks(workload, 32) > MAX_BLOCKS:
            return f"{self.key} would take more than {MAX_BLOCKS} blocks"
        return None

    def default(self, workload: Attention, device: Device) -> Config:
        """Return the most threads that leave a block for each SM, and 32 keys at a time if they fit."""
        usual = [Config({"threads": threads, "bn": bn}) for bn in (32, 16, 8, 4) for threads in (128, 64, 32)]
        full = [config for config in usual if _blocks(workload, config["threads"]) >= device.sm_count]
        return self.space.first_valid((*full, *reversed(usual)), workload=workload, device=device)

    def tiles(self, workload: Attention, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of queries and keys."""
        return (
            Tiling(dimension="seq_q", extent=workload.seq_q, tile=config["threads"]),
            Tiling(dimension="seq_k", extent=workload.seq_k, tile=config["bn"]),
        )

    def costs(self, workload: Attention, table: Table, device: Device) -> Costs:
        """Count pairs of a query and a key that the mask shows: a thread skips all others."""
        blocks = _blocks(workload, table["threads"]).astype(np.float64)
        pairs = workload.batch * workload.heads * workload.pairs / blocks
        return Costs(
            blocks=blocks,
            full_blocks=0,
            threads=table["threads"],
            smem_bytes=_smem_bytes(workload, table["bn"]),
            fma=2.0 * workload.head_dim * pairs,
            sfu=pairs,
            execution=self._execution(workload, table, pairs),
        )

    def _execution(self, workload: Attention, table: Table, pairs: Any) -> Execution:
        """Describe a block: for each key, all threads read the same elements of k and v one after the other.

        Args:
            workload: The workload.
            table: Configurations.
            pairs: Pairs of a query and a key of a block.
        """
        threads, bn, dim = table["threads"], table["bn"], workload.head_dim
        size, keys, warps = itemsize(workload.dtype), pairs / threads, threads / 32
        tiles, copied = keys / bn, 2.0 * keys * dim
        of_pair = 2 * dim + 20  # products, two powers, maximum, sum
        return Execution(
            registers=2 * dim + 40,
            instructions=warps * keys * of_pair + copied / 32 * 8,
            accesses=threads * keys * 2.0 * dim + 2 * copied,
            passes=warps * keys * 2.0 * dim + 2 * copied / 32,
            l2_bytes=copied * size + 2 * threads * dim * size,
            memory_waits=1 + tiles * np.ceil(bn * dim / threads / 2),
            # A score is one sum, whose terms wait for one another.
            shared_waits=keys * (2 + 4 * dim / 30),
            barriers=2 * tiles,
            code_bytes=16.0 * (4 * dim + 20),
        )

    def kernel(self, workload: Attention, config: Config) -> Callable[..., None]:  # noqa: C901 - may call nothing
        """Return the kernel `(q, k, v, bias, o, lse)`; q takes the place of a missing bias."""
        import math

        import numpy as np
        from numba import cuda, float32

        THREADS, BN, DIM = config["threads"], config["bn"], workload.head_dim
        SHAPE = (BN, DIM)
        causal, aligned_first, window = workload.causal, workload.align == "first", workload.window
        biased, (of_batch, of_head, of_query) = workload.has_bias, (axis in workload.bias for axis in "bhq")
        scale, lowest = np.float32(workload.scale), np.float32(LOWEST_BIAS)
        nothing, hidden = np.float32(HIDDEN_ROW_LSE), np.float32(-np.inf)
        zero, one = np.float32(0), np.float32(1)

        def attention(q: Any, k: Any, v: Any, bias: Any, o: Any, lse: Any) -> None:  # noqa: C901 - likewise
            tile_k = cuda.shared.array(SHAPE, float32)
            tile_v = cuda.shared.array(SHAPE, float32)
            row = cuda.local.array(DIM, float32)
            sums = cuda.local.array(DIM, float32)
            heads, seq_q, seq_k = q.shape[1], q.shape[2], k.shape[2]
            t, tiles = cuda.threadIdx.x, (seq_q + THREADS - 1) // THREADS
            b, h = cuda.blockIdx.x // tiles // heads, cuda.blockIdx.x // tiles % heads
            h_k = h // (heads // k.shape[1])
            query = cuda.blockIdx.x % tiles * THREADS + t
            b_bias, h_bias = b if of_batch else 0, h if of_head else 0
            q_bias = query if of_query else 0

            # Keys of this query, and of all queries of the block.
            before = 0 if aligned_first else seq_k - seq_q
            first, end, block_first, block_end = 0, seq_k, 0, seq_k
            if causal:
                end = min(seq_k, query + 1 + before)
                block_end = min(seq_k, min(seq_q, query - t + THREADS) + before)
            if window > 0:
                first = max(0, query + 1 + before - window)
                block_first = max(0, query - t + 1 + before - window)
            if query >= seq_q:
                end = 0
            for d in range(DIM):
                row[d] = np.float32(q[b, h, query, d]) * scale if query < seq_q else zero
                sums[d] = zero
            top, total = nothing, zero

            for key0 in range(block_first, block_end, BN):
                cuda.syncthreads()  # before the tiles are overwritten
                for index in range(t, BN * DIM, THREADS):
                    j, d = index // DIM, index % DIM
                    if key0 + j < seq_k:
                        tile_k[j, d] = np.float32(k[b, h_k, key0 + j, d])
                        tile_v[j, d] = np.float32(v[b, h_k, key0 + j, d])
                cuda.syncthreads()
                for j in range(max(0, first - key0), min(BN, end - key0)):
                    score = zero
                    for d in range(DIM):
                        score += row[d] * tile_k[j, d]
                    if biased:
                        summand = np.float32(bias[b_bias, h_bias, q_bias, key0 + j])
                        if summand < lowest and summand != hidden:
                            summand = lowest
                        score += summand
                    higher = max(top, score)
                    factor, p = math.exp(top - higher), math.exp(score - higher)
                    if score > top:
                        total *= factor
                        for d in range(DIM):
                            sums[d] *= factor
                    total += p
                    for d in range(DIM):
                        sums[d] += p * tile_v[j, d]
                    top = higher

            if query < seq_q:
                if total == zero:
                    total = one
                for d in range(DIM):
                    o[b, h, query, d] = np.float32(sums[d] / total)
                lse[b, h, query] = top + math.log(total)

        return attention

    def launches(self, workload: Attention, config: Config) -> tuple[Launch, ...]:
        """Return one launch, of one block per tile of queries of a head."""
        return (
            Launch(
                grid=(int(_blocks(workload, config["threads"])), 1, 1),
                block=(config["threads"], 1, 1),
                arguments=("q", "k", "v", "bias" if workload.has_bias else "q", "o", "lse"),
            ),
        )

    def emulation_workload(self, workload: Attention, config: Config) -> Attention:
        """Return a workload of a few tiles, not quite full: the simulator is slow."""
        seq_q = min(workload.seq_q, 35)
        seq_k = max(kept(workload.seq_k, config["bn"], 1), least_keys(workload, seq_q))
        group = min(workload.group, 2)
        return dataclasses.replace(
            workload,
            batch=min(workload.batch, 2),
            heads=group,
            heads_k=1,
            seq_q=seq_q,
            seq_k=seq_k,
            head_dim=min(workload.head_dim, 5),
        )


VARIANT = NumbaCudaAttention()
