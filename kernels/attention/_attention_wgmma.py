"""Warpgroups, registers and tensor maps that the Hopper variants of attention share.

A block has a tile of 64 rows for each of `consumers` warpgroups that multiply, and processes `bn` rows of the
other operand at a time; a further warpgroup copies them. An SM has one block. Lines of 16-bit elements are
padded with zeros to whole panels (see `PanelTile`).
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

INSTRUCTION_REGISTERS = 30
"""Registers of a wgmma in addition to its sums, of those that a thread is launched with (see `wgmma_tile`).

Four more than in `wgmma_tile` if the first operand is in registers.
"""

HELPERS = (
    *("types", "ptx", "epilogue", "gemm", "gemm_mma", "ptx_hopper", "gemm_wgmma", "reduce"),
    *("attention_operand", "attention_wgmma"),
)
"""Headers of the kernels in addition to those of their direction."""


def dim(workload: Attention) -> int:
    """Return head_dim padded with zeros to whole panels."""
    return padded(workload, LINE_BYTES // itemsize(workload.dtype))


def smem_bytes(workload: Attention, lines: Any, barriers: Any, consumers: Any) -> Any:
    """Return the shared memory of a block: lines of tiles, staging for results, barriers."""
    line_bytes = dim(workload) * itemsize(workload.dtype)
    return lines * line_bytes + wgmma_tile.staging_bytes(consumers) + 8 * barriers


def registers_suffice(
    workload: Attention,
    bn: Any,
    consumers: Any,
    needed: Any,
    producer_registers: int = wgmma_tile.PRODUCER_REGISTERS,
) -> Any:
    """The `needed` values of a thread must fit in registers, and sums of a wgmma in those of the launch."""
    product_registers = np.maximum(bn, dim(workload)) // 2 + INSTRUCTION_REGISTERS
    room = wgmma_tile.consumer_registers(consumers, 1, producer_registers)
    return (needed <= room) & (product_registers <= launched_registers(consumers, 1))


def time_of_busiest(blocks: int, consumers: int, device: Device) -> float:
    """Return the time of the busiest SM, in any unit; two or three warpgroups hide each other's waits.

    Args:
        blocks: Number of blocks.
        consumers: Warpgroups of a block that multiply.
        device: The device, for its number of SMs.
    """
    return float(ceil_div(blocks, device.sm_count) * (consumers + (1.0 if consumers == 1 else 0.2)))


def _alone(config: Config) -> Config:
    """Return the configuration in the form of `wgmma_tile`: one block per SM."""
    return Config({"consumers": config["consumers"], "min_blocks": 1})


def choices(
    workload: Attention, config: Config, producer_registers: int = wgmma_tile.PRODUCER_REGISTERS
) -> dict[str, str | bool | int]:
    """Return the constants that describe the warpgroups and registers of a block."""
    consumers = config["consumers"]
    return {
        "DIM": dim(workload),
        "BM": 64 * consumers,
        "BN": config["bn"],
        "STAGES": config["stages"],
        "CONSUMERS": consumers,
        "THREADS": threads(consumers),
        "STAGING_BYTES": wgmma_tile.staging_bytes(consumers),
        **wgmma_tile.moved_registers(_alone(config), producer_registers),
    }


def tensor_map(workload: Attention, name: str, lines: int) -> TensorMap:
    """Return the tensor map for tiles of `lines` lines of an input; all heads are one batch.

    Args:
        workload: The workload.
        name: Name of the input.
        lines: Lines of a tile.
    """
    (tensor,) = (tensor for tensor in workload.inputs() if tensor.name == name)
    batch, heads, *matrix = tensor.shape
    of_heads = dataclasses.replace(tensor, shape=(batch * heads, *matrix))
    return wgmma_tile.panel_map(of_heads, along_k=True, extent=lines, bk=0, parts=1)


class CudaWgmma(CudaVariant[Attention]):
    """A variant of attention that copies by TMA and multiplies by wgmma."""

    operator = Attention
    minimum_cc = (9, 0)
    maximum_cc = (9, 0)

    def target(self, device: Device) -> str:
        """Return the target sm_90a, which alone has wgmma and setmaxnreg."""
        return "sm_90a"

    def claims(self, workload: Attention, config: Config) -> tuple[str, ...]:
        """Return wgmma, bulk tensor copies, exponentials, and setmaxnreg where registers are scarce."""
        moves = ["USETMAXREG"] if wgmma_tile.registers_move(_alone(config)) else []
        return ("HGMMA", "UTMALDG", "MUFU", *moves)
