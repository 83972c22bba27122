"""The `Device` class, and the architectures and products that `devices.toml` describes."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from tunebench.errors import InputError

__all__ = [
    "Device",
    "architecture_facts",
    "architecture_name",
    "architectures",
    "described_facts",
    "driver_names",
    "highest_rates",
    "product_facts",
    "product_name",
    "products_named",
    "selects",
    "slug",
]

_POSITIVE = (
    *("sm_count", "max_clock_mhz", "dram_gb_s", "fma_per_clock", "sfu_per_clock", "issue_per_clock"),
    *("smem_bytes_per_clock", "fill_bytes_per_clock", "accesses_per_clock", "registers_per_sm", "partitions"),
)
"""Fields that a lower bound divides by; they must be positive."""
_POSITIVE_IF_KNOWN = (
    *("boost_clock_mhz", "tdp_w", "process_nm", "power_limit_w", "mma_pj_per_ghz2"),
    *("measured_gb_s", "measured_gflop_s"),
)

USABLE_SHARE = 0.98
"""Share of the memory that programs can use, of products without a report."""

_NAMING = {"names", "model", "words", "source"}
"""Keys of a product in devices.toml that are no fields of `Device`."""

_UNNAMED = frozenset(
    ("nvidia", "geforce", "tesla", "amd", "instinct", "gpu", "tensor", "core", "graphics", "card")
)
"""Words of names that do not distinguish products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or CPU: its architecture, product name, rates and limits.

    Rates are hardware maxima at `max_clock_mhz`, never observed values, because lower bounds divide by them.

    Attributes:
        name: Product in lower case with hyphens, such as ``a100-80-sxm``.
        kind: ``"gpu"`` or ``"cpu"``.
        architecture: ``"sm_80"``; for a CPU its instruction-set level, such as ``"x86_64-v4"``.
        sm_count: Streaming multiprocessors; for a CPU its cores.
        max_clock_mhz: Highest clock that the driver allows.
        dram_gb_s: Peak memory bandwidth, in 1e9 bytes per second.
        l2_bytes: Size of the last-level cache.
        memory_bytes: Size of the memory; 0 if unknown.
        usable_bytes: Memory that CUDA reports in total, without what the driver and error correction reserve;
            0 if unknown.
        fma_per_clock: f32 multiply-adds per SM and clock.
        mma_flop_per_clock: Dense tensor-core FLOPs per SM and clock by input type (f32 accumulation, i32 for
            i8); a missing type has no tensor-core instruction.
        sfu_per_clock: Special-function results per SM and clock.
        issue_per_clock: Warp instructions per SM and clock.
        smem_bytes_per_clock: Shared-memory bytes per SM and clock.
        fill_bytes_per_clock: Bytes per SM and clock that L2 can deliver to the SM.
        accesses_per_clock: Lanes per SM and clock whose loads and stores (shared memory, L1) can start.
        fma_latency: Minimum clocks between dependent f32 multiply-adds.
        mma_latency: Minimum clocks between products of 32 bytes of k by mma.sync into the same sums.
        smem_latency: Minimum clocks from a load of shared memory to its value.
        l1_latency: Minimum clocks of a load from global memory that hits L1.
        l2_latency: Minimum clocks of a load from global memory that goes to L2.
        smem_per_sm_bytes: Shared memory per SM.
        smem_per_block_bytes: Maximum shared memory per block.
        smem_reserved_bytes: Shared memory that the system reserves for each resident block.
        threads_per_sm: Maximum number of resident threads per SM.
        blocks_per_sm: Maximum number of resident blocks per SM.
        registers_per_sm: 32-bit registers per SM.
        partitions: Partitions of an SM: a warp uses the units of its own partition only.
        power_limit_w: Power limit in force, if known; times under different limits are not comparable.
            Predicted networks take `tdp_w` if it is unknown.
        boost_clock_mhz: Clock of the datasheet's peaks, if `max_clock_mhz` is higher; predicted times use it.
        tdp_w: Thermal design power, from the datasheet.
        process_nm: Name of the foundry's process, in nm.
        mma_pj_per_ghz2: Energy of a 16-bit tensor-core FLOP on random numbers, in pJ, over the square of the
            clock in GHz (voltage rises with the clock); None if unknown (see `forecast.library.power`).
        assumed: Whether rates are assumed (a virtual machine hides its clock), so that a gap to them says
            nothing.
        measured_gb_s: Memory bandwidth that a processor with assumed rates achieves, in 1e9 bytes per second;
            None if it is not measured.
        measured_gflop_s: f32 multiply-adds that its cores achieve together, in 1e9 FLOP/s; None likewise.
    """

    name: str
    kind: Literal["gpu", "cpu"]
    architecture: str
    sm_count: int
    max_clock_mhz: float
    dram_gb_s: float
    l2_bytes: int
    fma_per_clock: float
    memory_bytes: int = 0
    usable_bytes: int = 0
    mma_flop_per_clock: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sfu_per_clock: float = 16.0
    issue_per_clock: float = 4.0
    smem_bytes_per_clock: float = 128.0
    fill_bytes_per_clock: float = 64.0
    accesses_per_clock: float = 32.0
    fma_latency: float = 4.0
    mma_latency: float = 16.0
    smem_latency: float = 19.0
    l1_latency: float = 28.0
    l2_latency: float = 188.0
    smem_per_sm_bytes: int = 0
    smem_per_block_bytes: int = 0
    smem_reserved_bytes: int = 0
    threads_per_sm: int = 0
    blocks_per_sm: int = 0
    registers_per_sm: int = 65536
    partitions: int = 4
    power_limit_w: float | None = None
    boost_clock_mhz: float | None = None
    tdp_w: float | None = None
    process_nm: float | None = None
    mma_pj_per_ghz2: float | None = None
    assumed: bool = False
    measured_gb_s: float | None = None
    measured_gflop_s: float | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"device {self.name}: {name} must be positive, got {getattr(self, name)}")
        for name in _POSITIVE_IF_KNOWN:
            if getattr(self, name) is not None and not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"device {self.name}: {name} must be positive, got {getattr(self, name)}")

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Compute capability (major, minor) of a GPU; (0, 0) for other devices."""
        match = re.fullmatch(r"sm_(\d+)(\d)[af]?", self.architecture)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def key(self) -> str:
        """Key under which results are stored; times of devices with different keys are not comparable."""
        power = f",power={self.power_limit_w:g}" if self.power_limit_w is not None else ""
        return f"{self.architecture}:{self.name},sm={self.sm_count}{power}"

    @property
    def usable_memory_bytes(self) -> int:
        """Memory that programs can use, in bytes; 98 % of the size if no report of it is known.

        The share of products without error correction in their memory, and with HBM, is 98 to 99.2 %.
        """
        if not self.usable_bytes:
            return int(USABLE_SHARE * self.memory_bytes)
        return min(self.memory_bytes or self.usable_bytes, self.usable_bytes)

    def with_meaningful_rates(self) -> Device | None:
        """Return the device with the rates that optimality gaps are computed with; None if it has none.

        It is this device, unless its rates are assumed: then it has the measured rates instead. Kernels may
        beat those, so that they neither prune nor prove.
        """
        if not self.assumed:
            return self
        if self.measured_gb_s is None or self.measured_gflop_s is None:
            return None
        flop_per_clock = 2 * self.sm_count * self.fma_per_clock
        return dataclasses.replace(
            self,
            assumed=False,
            dram_gb_s=self.measured_gb_s,
            max_clock_mhz=1e3 * self.measured_gflop_s / flop_per_clock,
        )


@functools.cache
def described_facts() -> dict[str, Any]:
    """Return the contents of devices.toml."""
    text = resources.files("tunebench").joinpath("devices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def architecture_facts(architecture: str) -> dict[str, Any]:
    """Return the fields that all devices of an architecture share; empty if it is not described."""
    entry = described_facts()["architecture"].get(architecture, {})
    return {name: value for name, value in entry.items() if name != "representative"}


def product_facts(name: str) -> dict[str, Any]:
    """Return the fields that only a described product has; empty if it is not described."""
    entry = described_facts()["device"].get(name, {})
    return {key: value for key, value in entry.items() if key not in _NAMING}


def highest_rates() -> dict[str, Any]:
    """Return the highest rates of all described architectures, for devices of an unknown architecture."""
    entries = [
        architecture_facts(name) for name in described_facts()["architecture"] if name.startswith("sm_")
    ]
    rates = {name for entry in entries for name in entry if name.endswith("_per_clock")}
    highest: dict[str, Any] = {
        name: max(entry[name] for entry in entries if name in entry)
        for name in rates - {"mma_flop_per_clock"}
    }
    tables = [entry.get("mma_flop_per_clock", {}) for entry in entries]
    types = {dtype for table in tables for dtype in table}
    highest["mma_flop_per_clock"] = {dtype: max(table.get(dtype, 0) for table in tables) for dtype in types}
    return highest


def architectures() -> dict[str, str]:
    """Return the described architectures, each with its representative product."""
    table = described_facts()["architecture"]
    return {name: str(entry["representative"]) for name, entry in table.items()}


# -- names of products -----------------------------------------------------------------------------------


def slug(product: str) -> str:
    """Return a product name in lower case with hyphens: ``NVIDIA H200`` is ``h200``."""
    words = re.sub(r"\((?:r|tm)\)|nvidia|geforce|tesla|processor|cpu|@.*", " ", product.lower())
    return "-".join(re.findall(r"[a-z0-9.]+", words)) or "unknown"


def driver_names(name: str) -> tuple[str, ...]:
    """Return the names that drivers report for a described product; empty if it is not described."""
    return tuple(described_facts()["device"].get(name, {}).get("names", ()))


@functools.lru_cache(maxsize=256)
def products_named(text: str) -> tuple[str, ...]:
    """Return the described products that a name may mean: one, none, or several if it is ambiguous.

    The name of an entry of devices.toml means that product. Any other name means the products whose `model`
    it contains, if each further word is one of theirs: ``RTX 4090`` is one product, ``A100`` is four.

    Args:
        text: Name as a driver or a person writes it, such as ``NVIDIA A100-SXM4-80GB`` or ``h100_sxm``.
    """
    name = slug(text)
    if name in described_facts()["device"]:
        return (name,)
    words = _words(text)
    return tuple(name for name, (model, allowed) in _spellings().items() if model <= words <= allowed)


def product_name(text: str) -> str:
    """Return the product that a name means: ``NVIDIA A100-PCIE-40GB`` is ``a100-40-pcie``.

    A name that is not described, or that may mean several products, is returned in lower case with hyphens.

    Args:
        text: Name as a driver or a person writes it.
    """
    names = products_named(text)
    return names[0] if len(names) == 1 else slug(text)


def architecture_name(text: str) -> str:
    """Return an architecture as devices.toml writes it: ``SM90`` is ``sm_90``; other texts are unchanged."""
    match = re.fullmatch(r"sm[ _-]?(\d{2,3})", text.lower())
    return f"sm_{match[1]}" if match else text


def selects(name: str, key: str) -> bool:
    """Return whether a name selects the device of a stored key; an ambiguous one selects all its products.

    Args:
        name: A key, an architecture, or a product as in `products_named`.
        key: The stored key (see `Device.key`).
    """
    architecture, _, product_and_facts = key.partition(":")
    product = product_and_facts.partition(",")[0]
    return (
        name == key
        or architecture_name(name) == architecture
        or product in (name, slug(name))
        or product in products_named(name)
    )


@functools.cache
def _spellings() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Return the words that a name of each product must contain, and all that it may contain."""
    spellings = {}
    for name, entry in described_facts()["device"].items():
        model = _words(entry.get("model", name))
        texts = (name, *entry["names"], entry.get("words", ""), f"{round(entry['memory_bytes'] / 2**30)}GB")
        words = frozenset[str]().union(*map(_words, texts))
        short = {re.sub(r"(?<=^sxm)\d$|(?<=\d)gb$", "", word) for word in words}  # sxm for sxm4, 80 for 80gb
        spellings[name] = (model, words | short)
    return spellings


def _words(text: str) -> frozenset[str]:
    """Return the words of a product name that distinguish products, in lower case and one spelling."""
    text = re.sub(r"\((?:r|tm)\)|[\s_-]+", " ", text.lower())
    text = re.sub(r"(?<=rtx)(?=\d|a\d|pro)|(?<=pro)(?=\d)|(?<=\d{4})(?=ti\b|super\b)", " ", text)
    text = re.sub(r"(?<![\w.])(\d+) ?(?:gib|gb|g)\b", r"\1gb", text)
    return frozenset(re.findall(r"[a-z0-9.]+", text)) - _UNNAMED
