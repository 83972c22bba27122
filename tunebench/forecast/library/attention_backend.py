"""Implementations of fused attention: the tiles that they compute, and the time of these on a device.

A block computes `rows` queries of one head: it loads them, computes the tiles of keys that the mask lets one
of them see, and stores its result. A tile takes

    rows * columns * (products * 4 * head_dim / rate + softmax * (1 / exponentials + ALU / lanes)) clocks

on an SM with these rates per clock. The softmax needs one exponential for each score, which the
special-function units compute, and `ALU` other operations of the f32 lanes. How much of it the products hide
depends on the implementation: FlashAttention-3 and 4 alternate two groups of warps on the tensor cores, and
leave one block on an SM, whose first load and last store nothing hides; several blocks of FlashAttention-2
share an SM.

The constants follow from the longest kernels without a window of the public measurements: a line through
blocks and tiles fits them within 2 to 12 %. Kernels with a window took no part: they test the number of
tiles.

Sources: Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2; NVIDIA,
"Making softmax more efficient with NVIDIA Blackwell Ultra", 2026.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "BackendName",
    "Tiles",
    "attention_coordinates",
    "backend_of",
    "decode_us",
    "find_backend",
    "prompt_us",
    "tiles_of",
]

BackendName = Literal["flash-attention-2", "flash-attention-3", "flash-attention-4", "cudnn", "triton"]
"""Implementations of fused attention."""

ALU = 4.0
"""Operations of the f32 lanes for each score: scale and subtract, maximum, sum, and half of a rescaling and
of a conversion to 16 bits.
"""

HEAD_STEP = 32
"""Head dimensions are padded to a multiple of this number."""

PACKED_ROWS = 64
"""Least rows of a tile while decoding: the queries of the heads that share a head of keys."""

MMA_SYNC_SHARE = {9: 0.5, 10: 0.5}
"""Share of the peak of the tensor cores that FlashAttention-2 reaches by `mma.sync`, by compute capability.

It makes 370 TFLOP/s of heads of 128 on H100, as published for long prompts without a mask (FlashAttention-3,
figure 5). Data-centre Blackwell is assumed to be like Hopper. Elsewhere `mma.sync` reaches the peak.
"""

WORKSTATION_BLACKWELL = 9.2
"""Generation of sm_120 as to attention. Its FlashAttention-2 has the tiles of sm_86 and sm_89 (8.6 and 8.9).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """An implementation of fused attention.

    Attributes:
        fixed_clocks: Clocks of a block besides its tiles, for a head dimension of zero.
        dim_clocks: The same for each element of the head dimension.
        products: Time of the products, relative to the peak of the tensor cores.
        softmax: Part of the softmax that the products do not hide.
        uses_mma_sync: Whether warps multiply by `mma.sync`.
        needs: Major compute capability that it is made for; 0 for any.
        rows: Queries of a block.
        columns: Keys of a tile.
    """

    fixed_clocks: float
    dim_clocks: float
    products: float
    softmax: float
    uses_mma_sync: bool = False
    needs: int = 0
    rows: int = 128
    columns: int = 128


BACKENDS: dict[BackendName, AttentionBackend] = {
    "flash-attention-2": AttentionBackend(
        fixed_clocks=5000, dim_clocks=0, products=1.15, softmax=0.5, uses_mma_sync=True
    ),
    "flash-attention-3": AttentionBackend(
        fixed_clocks=4000, dim_clocks=58, products=1.09, softmax=0.5, needs=9
    ),
    "flash-attention-4": AttentionBackend(
        fixed_clocks=6500, dim_clocks=0, products=1.09, softmax=0.5, needs=10
    ),
    "cudnn": AttentionBackend(fixed_clocks=2000, dim_clocks=40, products=1.28, softmax=0.5),
    "triton": AttentionBackend(
        fixed_clocks=5000, dim_clocks=0, products=1.8, softmax=1.0, uses_mma_sync=True
    ),
}
"""Every implementation. FlashAttention-4 also describes NVIDIA's own kernels on data-centre Blackwell.

cuDNN is that of Hopper: 595 TFLOP/s of long prompts on H100, 539 under a causal mask (FlashAttention-3,
figure 5). Triton is FlashAttention in Triton 2, of 2022 and 2023, by `mma.sync`: FlashAttention-2 is 1.3 to
2.5 times as fast (FlashAttention-2, section 4.1), of which the middle is taken.
"""


def backend_of(device: Device) -> AttentionBackend:
    """Return the implementation that serving frameworks choose for a device: that of the training data."""
    major, _ = device.compute_capability
    names: dict[int, BackendName] = {9: "flash-attention-3", 10: "flash-attention-4"}
    return BACKENDS[names.get(major, "flash-attention-2")]


def find_backend(name: str, device: Device) -> AttentionBackend:
    """Return an implementation by its name.

    Raises:
        UnknownName: if there is none of this name.
        InputError: if it is made for another generation than that of the device.
    """
    if name not in BACKENDS:
        raise UnknownName("implementation of attention", name, BACKENDS)
    backend = BACKENDS[name]
    if backend.needs not in (0, device.compute_capability[0]):
        raise InputError(
            f"{name} needs a GPU of compute capability {backend.needs}.x, and {device.name} has "
            f"{device.compute_capability[0]}.{device.compute_capability[1]}; use flash-attention-2"
        )
    return backend


def attention_coordinates(device: Device, generation: float) -> tuple[float, float]:
    """Return the coordinates of a device that tell how alike its attention is to that of others.

    The Blackwell of workstations runs the kernels of Ada, in as little shared memory. Twice the exponentials
    per clock count as half a generation, and kernels on units that multiply by themselves as one, in a
    direction of their own.

    Args:
        device: The device.
        generation: Its generation, for other kernels.
    """
    backend = backend_of(device)
    generation = WORKSTATION_BLACKWELL if device.compute_capability[0] == 12 else generation
    return generation + 0.5 * math.log2(device.sfu_per_clock / 16), 0.0 if backend.uses_mma_sync else 1.0


@dataclass(frozen=True, slots=True)
class Tiles:
    """Blocks of each head, and their tiles in the mean (at least 1) and in the longest block."""

    blocks: Array
    mean: Array
    longest: Array


def tiles_of(backend: AttentionBackend, queries: Array, keys: Array, causal: Array, window: Array) -> Tiles:
    """Return the tiles that the mask leaves, including those that it hides in part.

    Args:
        backend: The implementation.
        queries: (R,) queries of a sequence.
        keys: (R,) keys of a sequence.
        causal: (R,) whether the last query sees all keys, and each one before a key less.
        window: (R,) keys that a query sees at most; 0 for all.
    """
    rows, columns = backend.rows, backend.columns
    blocks = np.ceil(queries / rows)
    across = columns * np.ceil(keys / columns)
    # Keys before those that the first query and the first block add; without a mask, all.
    before = np.where(causal > 0, np.maximum(0, keys - queries), across)
    # All queries of a block together see this many keys at most, in whole tiles.
    reach = columns * np.ceil((rows + window - 1) / columns)
    widest = np.where(window > 0, np.minimum(across, reach), across)
    # Block j sees before + (j + 1) * rows keys until this reaches the widest range.
    growing = np.clip(np.floor((widest - before) / rows), 0, blocks)
    seen = growing * before + rows * growing * (growing + 1) / 2 + (blocks - growing) * widest
    longest = np.ceil(np.minimum(widest, before + blocks * rows) / columns)
    return Tiles(blocks, np.maximum(1, seen / blocks / columns), np.maximum(1, longest))


def prompt_us(
    backend: AttentionBackend, columns: Mapping[str, Array], rate: float, device: Device, *, windows: bool
) -> Array:
    """Return the time of attention of many queries, in microseconds, if memory does not limit it.

    It is the time of all blocks on all SMs, or that of the longest block.

    Args:
        backend: The implementation.
        columns: (R,) figures of the kernels, by name.
        rate: FLOP per SM and clock of the tensor cores.
        device: The device.
        windows: Whether windows of the kernels count.
    """
    c = columns
    tiles = tiles_of(
        backend, c["seq_q"], c["seq_k"], c["causal"], c["window"] if windows else 0 * c["window"]
    )
    tile_clocks = backend.rows * backend.columns * _score_clocks(backend, c, rate, device)
    # Gradients load and store as much more as they multiply.
    fixed_clocks = c["products"] / 2 * (backend.fixed_clocks + backend.dim_clocks * c["head_dim"])
    mean, longest = (fixed_clocks + count * tile_clocks for count in (tiles.mean, tiles.longest))
    blocks = c["batch"] * c["heads"] * tiles.blocks
    us: Array = np.maximum(blocks / device.sm_count * mean, longest) / _clock_mhz(device)
    return us


def decode_us(
    backend: AttentionBackend, columns: Mapping[str, Array], rate: float, device: Device, keys: Array
) -> Array:
    """Return the time of the tiles of a few queries per sequence, in microseconds, divided evenly among SMs.

    Args:
        backend: The implementation.
        columns: (R,) figures of the kernels, by name.
        rate: FLOP per SM and clock of the tensor cores.
        device: The device.
        keys: (R,) keys that the queries of a sequence see.
    """
    c = columns
    packed = PACKED_ROWS * np.ceil(c["heads"] / c["heads_k"] * c["seq_q"] / PACKED_ROWS)
    tiles = c["batch"] * c["heads_k"] * np.ceil(keys / backend.columns)
    clocks = tiles * packed * backend.columns * _score_clocks(backend, c, rate, device)
    us: Array = clocks / device.sm_count / _clock_mhz(device)
    return us


def _score_clocks(
    backend: AttentionBackend, columns: Mapping[str, Array], rate: float, device: Device
) -> Array:
    """Return the clocks of an SM for one score and all that follows from it; gradients have five products."""
    share = MMA_SYNC_SHARE.get(device.compute_capability[0], 1.0) if backend.uses_mma_sync else 1.0
    padded = HEAD_STEP * np.ceil(columns["head_dim"] / HEAD_STEP)
    softmax = 1 / device.sfu_per_clock + ALU / device.fma_per_clock
    times = columns["products"] / 2
    clocks: Array = times * (backend.products * 4 * padded / (rate * share) + backend.softmax * softmax)
    return clocks


def _clock_mhz(device: Device) -> float:
    return device.boost_clock_mhz or device.max_clock_mhz
