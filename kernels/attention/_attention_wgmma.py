"""What attention's variants for Hopper share on the Python side: warpgroups, their registers, tensor maps.

A block has a tile of rows, 64 for each of `consumers` warpgroups that multiply, and meets others `bn` at a
time; one more warpgroup copies them. An SM has one block. Lines of 16-bit elements have zeros up to whole
panels (see `PanelTile`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.attention._attention import padded
from tunebench.kernels.common import wgmma_tile
from tunebench.kernels.common.wgmma_tile import LINE_BYTES, launched_registers, threads
from tunebench.space import Config
from tunebench.variant import CudaVariant, TensorMap, ceil_div
from tunebench.workloads.operators.attention import Attention

__all__ = [
    "HELPERS",
    "CudaWgmma",
    "choices",
    "dim",
    "registers_suffice",
    "smem_bytes",
    "tensor_map",
    "time_of_busiest",
]

OTHER_REGISTERS = 32
"""What a multiplying thread needs besides scores, what comes of them, and results."""

INSTRUCTION_REGISTERS = 30
"""What one wgmma needs besides its sums, of the registers a thread is launched with (see `_wgmma_tile`).

Four more than there where the first operand is in registers.
"""

HELPERS = (
    *("types", "ptx", "epilogue", "gemm", "gemm_mma", "ptx_hopper", "gemm_wgmma", "reduce"),
    *("attention_operand", "attention_wgmma"),
)
"""Helper files that the kernels need, besides those of their direction."""


def dim(workload: Attention) -> int:
    """Return head_dim with the zeros that make it whole panels."""
    return padded(workload, LINE_BYTES // itemsize(workload.dtype))


def smem_bytes(workload: Attention, lines: Any, barriers: Any, consumers: Any) -> Any:
    """Return the shared memory of a block: lines of tiles, room to gather results, barriers."""
    line_bytes = dim(workload) * itemsize(workload.dtype)
    return lines * line_bytes + wgmma_tile.staging_bytes(consumers) + 8 * barriers


def registers_suffice(workload: Attention, bn: Any, consumers: Any, kept: Any) -> Any:
    """What a thread keeps must stay in its registers, and sums of one wgmma in those it is launched with."""
    one = np.maximum(bn, dim(workload)) // 2 + INSTRUCTION_REGISTERS
    return (kept + OTHER_REGISTERS <= wgmma_tile.consumer_registers(consumers, 1)) & (
        one <= launched_registers(consumers, 1)
    )


def time_of_busiest(blocks: int, consumers: int, device: Device) -> float:
    """Return how long the busiest SM takes, in any unit: two or three warpgroups hide what each waits for."""
    return float(ceil_div(blocks, device.sm_count) * (consumers + (1.0 if consumers == 1 else 0.2)))


def _alone(config: Config) -> Config:
    """Return what `_wgmma_tile` asks a configuration for: a block has an SM to itself."""
    return Config({"consumers": config["consumers"], "min_blocks": 1})


def choices(workload: Attention, config: Config) -> dict[str, str | bool | int]:
    """Return the constants of a kernel that say how a block is made up."""
    consumers = config["consumers"]
    return {
        "DIM": dim(workload),
        "BM": 64 * consumers,
        "BN": config["bn"],
        "STAGES": config["stages"],
        "CONSUMERS": consumers,
        "THREADS": threads(consumers),
        "STAGING_BYTES": wgmma_tile.staging_bytes(consumers),
        **wgmma_tile.moved_registers(_alone(config)),
    }


def tensor_map(workload: Attention, name: str, lines: int) -> TensorMap:
    """Return how tiles of so many lines of an input are copied, all heads as one batch."""
    (tensor,) = (tensor for tensor in workload.inputs() if tensor.name == name)
    batch, heads, *matrix = tensor.shape
    of_heads = dataclasses.replace(tensor, shape=(batch * heads, *matrix))
    return wgmma_tile.panel_map(of_heads, along_k=True, extent=lines, bk=0, parts=1)


class CudaWgmma(CudaVariant[Attention]):
    """A variant of attention that multiplies by wgmma what TMA copies."""

    operator = Attention
    minimum_cc = (9, 0)
    maximum_cc = (9, 0)

    def target(self, device: Device) -> str:
        """Return Hopper's own architecture: wgmma and setmaxnreg are in no other."""
        return "sm_90a"

    def claims(self, workload: Attention, config: Config) -> tuple[str, ...]:
        """Products of warpgroups, bulk tensor copies, exponentials, and registers that move where scarce."""
        moves = ["USETMAXREG"] if wgmma_tile.registers_move(_alone(config)) else []
        return ("HGMMA", "UTMALDG", "MUFU", *moves)
