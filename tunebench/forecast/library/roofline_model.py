"""Roofline model of library kernels: time at full utilisation, and the features of utilisation.

The roofline time of a kernel is ``launch + max(compute, memory)``: its operations at the sustained rate of
the device, its compulsory bytes at the memory bandwidth, and the launch overhead. Real kernels take this time
divided by a utilisation, which is learned from measurements (`tunebench.forecast.library.model`). All
features are relative to the device, so that an expert of one device can be evaluated for another.

Source: Lee, Phanishayee and Mahajan, "Forecasting GPU performance for deep learning training and inference"
(NeuSight), ASPLOS 2025, for tiles, waves and rooflines as limits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import UnknownName
from tunebench.forecast.library.attention_backend import (
    AttentionBackend,
    attention_coordinates,
    backend_of,
    decode_us,
    prompt_us,
    tiles_of,
)
from tunebench.forecast.library.kernel import COLUMNS, Arithmetic, Family, LibraryKernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "LAUNCH_US",
    "RooflineModel",
    "coordinates",
    "flop_per_us",
    "peak_flop_per_us",
    "relative_attention_time",
    "roofline_times",
]

LAUNCH_US = 3.0
"""Launch overhead in microseconds. The fastest kernels of public measurements take 2.5 to 3.5 us."""

ENERGY_PJ = ((16.0, 16.0), (12.0, 16.0), (7.0, 7.0), (4.0, 5.0))
"""Pairs of process size in nm and energy of one f32 operation, including all overhead, in pJ.

16 and 12 nm: board power divided by the rate of the largest f32 products on P4 (75 W, 15 to 16 pJ) and T4 (70
W, 16 to 17 pJ), which run at their power limit. 7 and 4 nm: scaled by the savings that the foundry states (60
% from 16 to 7 nm, 30 % from 7 to 5 nm); A100 and H100 stay below their power limit, as expected. Source:
sitar-lab/NeuSight; TSMC.
"""

TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64), (32, 32))
"""Common tiles of matrix products: rows and columns of the result."""

ISSUED = (1.12, 1.12, 1.13, 1.21, 1.21, 1.34, 1.65)
"""Warp instructions that an f32 product on multiply-add units issues for each multiply-add, by tile.

The others load operands, advance addresses and count steps. An SM with units for 64 lanes issues them between
multiply-adds; one that issues a multiply-add in every slot (128 lanes, without dual issue: Ampere's sm_86 and
all later ones) does not multiply meanwhile. Source: innermost loops, disassembled, of the kernels
`xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize*_ffma` for sm_90 in cuBLAS 12.1, which PyTorch 2.1 uses;
`ampere_sgemm_*_tn` for sm_80 differs by at most 0.03 at 128 x 128 and 128 x 64.
"""

EVEN = 16
"""Sizes of models are multiples of this number; almost no random size is."""

SKEW = 1.2
"""Exponent of the power law of group sizes of products with skewed groups, as in the public measurements."""

L2_BYTES_PER_CLOCK = 64.0
"""Bytes that an SM reads from the last-level cache per clock, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineModel:
    """Roofline times of kernels in microseconds, one per row, and the features of their utilisation.

    Attributes:
        compute_us: Time of the operations at the sustained rate.
        memory_us: Time of the compulsory bytes at the memory bandwidth.
        block_us: Time of the blocks, of kernels whose blocks do more than these operations; otherwise 0.
        on: Returns the model of the same kernels on another device; None if that is not known.
        features: One row per kernel; columns depend on the family.
        even: (R,) whether the kernel is a product of sizes that models have: multiples of `EVEN`.
    """

    compute_us: Array
    memory_us: Array
    features: Array
    even: NDArray[np.bool_]
    block_us: Array | float = 0.0
    on: Callable[[Device], RooflineModel] | None = None

    @property
    def us(self) -> Array:
        """Roofline time including the launch overhead."""
        longest: Array = np.maximum.reduce(
            [self.compute_us, self.memory_us, self.block_us + 0 * self.memory_us]
        )
        return longest + LAUNCH_US


def peak_flop_per_us(device: Device, arithmetic: Arithmetic) -> float:
    """Return the peak rate of a device in FLOP per microsecond, at the clock that its datasheet uses.

    Raises:
        UnknownName: if the device has no tensor cores for the type.
    """
    clock = device.boost_clock_mhz or device.max_clock_mhz
    rates = device.mma_flop_per_clock
    if arithmetic in rates:  # CDNA has matrix cores for f32, too
        return device.sm_count * clock * rates[arithmetic]
    if arithmetic != "f32":
        raise UnknownName(f"tensor-core type of {device.name}", arithmetic, rates)
    return 2.0 * device.sm_count * clock * device.fma_per_clock


def flop_per_us(device: Device, arithmetic: Arithmetic) -> float:
    """Return the rate in FLOP per microsecond that a device sustains: its peak, or less if power limits it.

    The power limit is applied to f32 on multiply-add units only: for tensor cores there are too few
    measurements.

    Raises:
        UnknownName: if the device has no tensor cores for the type.
    """
    peak = peak_flop_per_us(device, arithmetic)
    if arithmetic in device.mma_flop_per_clock or device.tdp_w is None or device.process_nm is None:
        return peak
    sizes, energies = zip(*reversed(ENERGY_PJ), strict=True)
    return min(peak, 1e6 * device.tdp_w / float(np.interp(device.process_nm, sizes, energies)))


def _issue_limited(flop: Array, blocks: Sequence[Array], device: Device) -> Array:
    """Return the shortest time of f32 products on multiply-add units, in microseconds, by issue slots.

    Args:
        flop: (R,) operations.
        blocks: (R,) blocks of the result for each of `TILES`.
        device: The device.
    """
    slots = device.fma_per_clock / 32 / device.issue_per_clock
    longer = [max(1.0, slots * issued) for issued in ISSUED]
    # The fastest tile, by the area that each SM computes. Features of waves tell the cost of uneven ones.
    areas = [
        np.maximum(1.0, count / device.sm_count) * rows * cols * factor
        for (rows, cols), count, factor in zip(TILES, blocks, longer, strict=True)
    ]
    fastest = np.argmin(areas, axis=0)
    limited: Array = flop * np.array(longer)[fastest] / peak_flop_per_us(device, "f32")
    return limited


def coordinates(device: Device, arithmetic: Arithmetic, *, attention: bool = False) -> tuple[float, ...]:
    """Return the position of a device in the space where distance measures how similarly kernels behave.

    The coordinates are the generation in steps of one, FLOP per SM and clock and bytes of memory per SM and
    clock in octaves, and the vendor, far apart. Attention is placed by its implementation as well.
    """
    rate = _flop_per_clock(device, arithmetic)
    clock = device.boost_clock_mhz or device.max_clock_mhz
    fed = device.dram_gb_s * 1e3 / clock / device.sm_count
    octaves = float(np.log2(rate)), float(np.log2(fed))
    generation, vendor = _generation(device), 0.0 if device.compute_capability[0] else 5.0
    if attention and not vendor:
        generation, vendor = attention_coordinates(device, generation)
    return (generation, *octaves, vendor)


def _generation(device: Device) -> float:
    major, minor = device.compute_capability
    if not major:
        return _CDNA.get(device.architecture, 8.0)
    return _BLACKWELL.get((major, minor), 10.5 if major == 12 else major + minor / 10)


_CDNA = {"gfx908": 7.5, "gfx90a": 8.0, "gfx942": 9.0}
"""Generations of AMD devices, placed among NVIDIA's by release year."""

_BLACKWELL = {(10, 3): 10.1}
"""Generation of B300, whose SM is that of B200 with other tensor rates."""


def roofline_times(family: Family, arithmetic: Arithmetic, figures: Array, device: Device) -> RooflineModel:
    """Return roofline times and features of kernels of one family.

    Args:
        family: Family of the kernels.
        arithmetic: Arithmetic of the kernels.
        figures: One row per kernel, with the columns of the family (`COLUMNS`).
        device: The device.
    """
    columns = dict(zip(COLUMNS[family], figures.T, strict=True))
    model = _ROOFLINES[family](columns, arithmetic, device)
    return dataclasses.replace(model, on=functools.partial(roofline_times, family, arithmetic, figures))


def _product(c: dict[str, Array], arithmetic: Arithmetic, device: Device) -> RooflineModel:
    b, m, n, k = c["batch"], c["m"], c["n"], c["k"]
    flop, blocks = 2 * b * m * n * k, [b * np.ceil(m / rows) * np.ceil(n / cols) for rows, cols in TILES]
    operands = c["in_bytes"] * (m * k + k * n)
    nbytes = b * (operands + c["out_bytes"] * m * n) + c["extra_bytes"]
    compute_us, memory_us = flop / flop_per_us(device, arithmetic), nbytes / (device.dram_gb_s * 1e3)
    if arithmetic not in device.mma_flop_per_clock:
        compute_us = np.maximum(compute_us, _issue_limited(flop, blocks, device))
    features = [
        np.log(compute_us),
        np.log(memory_us),
        np.log(compute_us / memory_us),
        *(np.log(size) for size in (m, n, k, b)),
    ]
    for (rows, cols), count in zip(TILES, blocks, strict=True):
        waves = count / device.sm_count
        busy = b * m * n / (rows * cols * device.sm_count) / np.ceil(waves)
        features += [np.log(waves), np.log(busy)]
    # 16-byte loads need sizes that are a multiple of this number of elements.
    features += [(size % np.floor(16 / c["in_bytes"]) == 0) * 1.0 for size in (m, n, k)]
    features += [np.log(nbytes / device.l2_bytes), np.log(nbytes / b / device.l2_bytes), (b == 1) * 1.0]
    return RooflineModel(
        compute_us=compute_us,
        memory_us=memory_us,
        features=np.stack(features, axis=1),
        even=(m % EVEN == 0) & (n % EVEN == 0) & (k % EVEN == 0),
    )


def _grouped_product(c: dict[str, Array], arithmetic: Arithmetic, device: Device) -> RooflineModel:
    """Return the model of products of groups, with features that do not distinguish n from k.

    A layer of experts has a product from the hidden size to twice the inner size and one back. It was
    measured as a whole, so that its time does not determine how the two differ.
    """
    groups, m, n, k = c["groups"], c["m"], c["n"], c["k"]
    filled = _filled_groups(groups, m, c["skewed"])
    nbytes = c["in_bytes"] * (filled * n * k + m * k) + c["out_bytes"] * m * n
    compute_us = 2 * m * n * k / flop_per_us(device, arithmetic)
    memory_us = nbytes / (device.dram_gb_s * 1e3)
    waves = filled * np.ceil(m / filled / 128) * np.ceil(np.sqrt(n * k) / 128) / device.sm_count
    features = [
        np.log(compute_us),
        np.log(memory_us),
        np.log(compute_us / memory_us),
        np.log(m / filled),
        np.log(filled / device.sm_count),
        np.log(groups / device.sm_count),
        np.log(n * k),
        np.log(waves),
        np.log(waves / np.ceil(waves)),
        np.log(nbytes / device.l2_bytes),
        c["skewed"],
        np.log(m),
    ]
    return RooflineModel(
        compute_us=compute_us,
        memory_us=memory_us,
        features=np.stack(features, axis=1),
        even=np.zeros(len(memory_us), dtype=bool),
    )


def _filled_groups(groups: Array, rows: Array, skewed: Array) -> Array:
    """Return the expected number of groups that have rows: as many as possible, or by a power law."""
    filled = np.minimum(groups, rows)
    for count in np.unique(groups[skewed > 0]):
        some = (groups == count) & (skewed > 0)
        # Ranks are taken together in at most 256 steps, which makes the cost independent of their number.
        first = np.unique(np.round(np.geomspace(1.0, count + 1, 257)))
        steps, ranks = np.diff(first), np.sqrt(first[:-1] * (first[1:] - 1))
        shares = np.minimum(1 - 1e-9, ranks**-SKEW / np.sum(steps * ranks**-SKEW))
        filled[some] = sum(
            step * -np.expm1(np.maximum(-700.0, rows[some] * np.log1p(-share)))
            for step, share in zip(steps, shares, strict=True)
        )
    return np.maximum(1.0, filled)


def _rows(c: dict[str, Array], arithmetic: Arithmetic, device: Device) -> RooflineModel:
    nbytes = c["read_bytes"] + c["write_bytes"]
    memory_us = nbytes / (device.dram_gb_s * 1e3)
    features = [
        np.log(memory_us),
        np.log(nbytes / device.l2_bytes),
        c["read_bytes"] / np.maximum(1.0, c["write_bytes"]),
        np.log(c["cols"]),
        np.log(c["rows"] / device.sm_count),
        (c["cols"] % 2 == 0) * 1.0 + (c["cols"] % 4 == 0),
    ]
    return RooflineModel(
        compute_us=np.zeros_like(memory_us),
        memory_us=memory_us,
        features=np.stack(features, axis=1),
        even=np.zeros(len(memory_us), dtype=bool),
    )


def _attention(c: dict[str, Array], arithmetic: Arithmetic, device: Device) -> RooflineModel:
    """Return the model of attention of many queries: prompts, encoders and gradients.

    The features are those without a window, so that a window takes off what its tiles take, and nothing else.
    """
    backend, heads = backend_of(device), c["batch"] * c["heads"]
    rate = _flop_per_clock(device, arithmetic)
    tiles = tiles_of(backend, c["seq_q"], c["seq_k"], c["causal"], 0 * c["window"])
    nbytes, keys_read = _attention_bytes(c, c["seq_k"]), _keys_read(c)
    whole_us = prompt_us(backend, c, rate, device, windows=False)
    memory_us = _cached_us(nbytes, device)
    waves = heads * tiles.blocks / device.sm_count
    features = [
        np.log(whole_us),
        np.log(memory_us),
        np.log(whole_us / memory_us),
        np.log(tiles.mean),
        np.log(tiles.longest / tiles.mean),
        c["head_dim"],
        np.log(waves),
        np.log(waves / np.ceil(waves)),
        np.log(heads / device.sm_count),
        np.log(c["heads"] / c["heads_k"]),
        np.log(nbytes / device.l2_bytes),
        np.log(np.minimum(c["seq_q"], backend.rows)),
    ]
    return RooflineModel(
        compute_us=_attention_flop(c, keys_read) / flop_per_us(device, arithmetic),
        memory_us=_cached_us(_attention_bytes(c, keys_read), device),
        features=np.stack(features, axis=1),
        even=np.zeros(len(memory_us), dtype=bool),
        block_us=prompt_us(backend, c, rate, device, windows=True),
    )


def relative_attention_time(kernel: LibraryKernel, device: Device, backend: AttentionBackend) -> float:
    """Return the time of an implementation of attention over that of the one which the model is trained with.

    Args:
        kernel: A kernel of attention of many queries.
        device: The device.
        backend: The implementation.
    """
    columns = {
        name: np.array([figure], dtype=np.float64)
        for name, figure in zip(COLUMNS[kernel.family], kernel.figures, strict=True)
    }
    rate = _flop_per_clock(device, kernel.arithmetic)
    memory_us = _cached_us(_attention_bytes(columns, _keys_read(columns)), device)
    other_us, usual_us = (
        LAUNCH_US + np.maximum(memory_us, prompt_us(implementation, columns, rate, device, windows=True))
        for implementation in (backend, backend_of(device))
    )
    return float(other_us[0] / usual_us[0])


def _decode_attention(c: dict[str, Array], arithmetic: Arithmetic, device: Device) -> RooflineModel:
    """Return the model of attention of one query per sequence, which reads no key outside of its window."""
    backend, parts = backend_of(device), c["batch"] * c["heads_k"]
    keys = _keys_read(c)
    nbytes, tiles = _attention_bytes(c, keys), parts * np.ceil(keys / backend.columns)
    block_us = decode_us(backend, c, _flop_per_clock(device, arithmetic), device, keys)
    memory_us = _cached_us(nbytes, device)
    features = [
        np.log(block_us),
        np.log(memory_us),
        np.log(block_us / memory_us),
        np.log(keys),
        c["head_dim"],
        np.log(parts / device.sm_count),
        np.log(tiles / device.sm_count),
        np.log(c["batch"] * c["heads"] / device.sm_count),
        np.log(c["heads"] / c["heads_k"]),
        np.log(nbytes / device.l2_bytes),
    ]
    return RooflineModel(
        compute_us=_attention_flop(c, keys) / flop_per_us(device, arithmetic),
        memory_us=memory_us,
        features=np.stack(features, axis=1),
        even=np.zeros(len(memory_us), dtype=bool),
        block_us=block_us,
    )


def _flop_per_clock(device: Device, arithmetic: Arithmetic) -> float:
    """Return the operations of an SM per clock: of its tensor cores, or of its multiply-add units."""
    return float(device.mma_flop_per_clock.get(arithmetic, 2.0 * device.fma_per_clock))


def _keys_read(c: dict[str, Array]) -> Array:
    """Return the keys that some query of a sequence sees."""
    read: Array = np.where(c["window"] > 0, np.minimum(c["window"] + c["seq_q"] - 1, c["seq_k"]), c["seq_k"])
    return read


def _attention_flop(c: dict[str, Array], keys: Array) -> Array:
    """Return the operations of the pairs of a query and a key that the mask leaves."""
    queries, before = c["seq_q"], np.maximum(0, c["seq_k"] - c["seq_q"])
    most = np.where(c["window"] > 0, np.minimum(c["window"], c["seq_k"]), c["seq_k"])
    # Each query sees one key more than the one before it, until the mask allows no more.
    growing = np.clip(most - before, 0, queries)
    seen = growing * before + growing * (growing + 1) / 2 + (queries - growing) * most
    pairs = np.where(c["causal"] > 0, seen, queries * np.minimum(keys, most))
    flop: Array = c["products"] * 2 * c["batch"] * c["heads"] * pairs * c["head_dim"]
    return flop


def _attention_bytes(c: dict[str, Array], keys: Array) -> Array:
    """Return the bytes of queries, result, keys and values, each once; 2.5 times of these for gradients."""
    lines = 2 * c["batch"] * (c["heads"] * c["seq_q"] + c["heads_k"] * keys)
    nbytes: Array = c["bytes"] * c["products"] / 2 * lines * c["head_dim"]
    return nbytes


def _cached_us(nbytes: Array, device: Device) -> Array:
    """Return the time of bytes from memory, or from the last-level cache if all fit into it.

    Kernels are measured repeatedly on the same tensors. On RTX PRO 6000, decoding over keys of up to 128 MB
    takes 0.65 to 0.9 of the time that memory needs, over more keys 1.15 of it.
    """
    clock = device.boost_clock_mhz or device.max_clock_mhz
    cached = np.maximum(device.dram_gb_s * 1e3, L2_BYTES_PER_CLOCK * device.sm_count * clock)
    us: Array = nbytes / np.where(nbytes <= device.l2_bytes, cached, device.dram_gb_s * 1e3)
    return us


_ROOFLINES: dict[Family, Callable[[dict[str, Array], Arithmetic, Device], RooflineModel]] = {
    "product": _product,
    "grouped product": _grouped_product,
    "elementwise": _rows,
    "softmax": _rows,
    "norm": _rows,
    "attention": _attention,
    "decode attention": _decode_attention,
    "encoder attention": _attention,
}
