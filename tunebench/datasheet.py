"""Device files: a device from the numbers of a datasheet, from fields of `Device`, or from NeuSight's JSON.

A GPU that is not released yet takes ten lines of TOML (or the same keys as JSON)::

    name = "next-1"
    sm_count = 160
    boost_mhz = 2100
    memory_gb_s = 12000
    memory_gb = 288
    l2_mb = 192
    tdp_w = 1400
    process_nm = 3
    tflops = { fp32 = 86, fp16 = 5500, fp8 = 11000 }

Rates per SM and clock follow from the peaks. Values that no datasheet lists (shared memory, resident threads,
latencies) come from the `architecture`, or from the described architecture with the most similar rates.
`Sheet.notes` names the source.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench._device import (
    Device,
    architecture_facts,
    architectures,
    product_facts,
    product_name,
    products_named,
)
from tunebench._figure import significant
from tunebench._foreign_file import interpreting, read_table
from tunebench.errors import InputError, UnknownName

__all__ = ["Sheet", "is_file", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A device that was read from a file.

    Attributes:
        device: The device.
        notes: Assumptions, and values of the file that contradict the described product: one line each.
    """

    device: Device
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Word:
    """A key of a datasheet: the `Device` field it sets, its scale, its unit and its range."""

    field: str
    scale: float
    unit: str
    low: float
    high: float


_WORDS = {
    "sm_count": _Word("sm_count", 1, "streaming multiprocessors or compute units", 1, 10_000),
    "boost_mhz": _Word("max_clock_mhz", 1, "MHz", 100, 10_000),
    "memory_gb_s": _Word("dram_gb_s", 1, "GB/s", 10, 1_000_000),
    "l2_mb": _Word("l2_bytes", 2**20, "MB", 0.25, 16_384),
    "memory_gb": _Word("memory_bytes", 2**30, "GB", 0.5, 65_536),
    "tdp_w": _Word("tdp_w", 1, "W", 1, 20_000),
    "process_nm": _Word("process_nm", 1, "nm", 0.5, 200),
}
_NEEDED = ("sm_count", "boost_mhz", "memory_gb_s", "l2_mb")

_TYPES = {"tf32": "tf32", "fp16": "f16", "bf16": "bf16", "fp8": "e4m3", "int8": "i8", "fp32_matrix": "f32"}
"""Tensor-core peaks: key in `tflops` and element type. The key ``fp32`` is the peak without tensor cores."""
_PEAK = _Word("", 1, "TFLOP/s, dense", 0.05, 100_000)

_NEUSIGHT = {
    "Num_Sm": "sm_count",
    "Freq": "boost_mhz",
    "Mem_Bw": "memory_gb_s",
    "L2Cache": "l2_mb",
    "Dev_Mem": "memory_gb",
}
_NEUSIGHT_PEAKS = {"SingleFLOPs": "fp32", "SingleFLOPsVEC": "fp32", "SingleFLOPsMM": "fp32_matrix"}
_NEUSIGHT_KEYS = {"Device", "Core_Per_SM", *_NEUSIGHT, *_NEUSIGHT_PEAKS}

_FIELDS = {field.name: field for field in dataclasses.fields(Device)}
_MAY_BE_NONE = {
    "l2_bytes",
    "memory_bytes",
    "usable_bytes",
    "threads_per_sm",
    "blocks_per_sm",
    "smem_reserved_bytes",
}
"""Fields that may be 0: the device has none, or the value is unknown."""
_TEXTS = {"name", "kind", "architecture", "source", "like"}
_AMD = re.compile(r"\b(amd|instinct|radeon|mi\d+\w*)\b")


def is_file(name: str) -> bool:
    """Return whether a device name is a file name: it ends in ``.toml`` or ``.json``."""
    return name.lower().endswith((".toml", ".json"))


def read(path: str | Path) -> Sheet:
    """Read a device from a TOML or JSON file.

    Args:
        path: File that ends in ``.toml`` or ``.json``.

    Returns:
        The device, and notes on assumptions and contradictions.

    Raises:
        InputError: The file cannot be read, or a key is missing, unknown, malformed or out of range.
    """
    data = read_table(path, "device file ")
    notes: list[str] = []
    try:
        with interpreting("its content"):
            if _NEUSIGHT_KEYS & set(data):
                data = _from_neusight(data, notes)
            device = _device(data, notes)
    except InputError as error:
        raise InputError(f"device file {path}: {error}") from error
    return Sheet(device=device, notes=tuple(notes))


# -- the vocabulary ----------------------------------------------------------------------------------


def _device(data: Mapping[str, Any], notes: list[str]) -> Device:
    """Build a device from the contents of a file, completed by the described product and architecture."""
    keys = {*_WORDS, *_FIELDS, "tflops", "source", "like"}
    for key in data:
        if key not in keys:
            raise UnknownName("key", key, keys)
    for key in _TEXTS & set(data):
        if not isinstance(data[key], str) or not data[key]:
            raise InputError(f"{key} must be a non-empty text, got {data[key]!r}")
    if "name" not in data:
        raise InputError("missing name; " + _usage())
    name = product_name(data["name"])
    product = _product(data.get("like"), name)
    facts = _facts(data)
    if "memory_bytes" in facts:
        product.pop("usable_bytes", None)  # it belongs to the product's memory, not to the file's
    if "max_clock_mhz" in facts:
        product.pop("boost_clock_mhz", None)  # it belongs to the product's clock, not to the file's
    rates = _rates(data, {**product, **facts, **_boost(data)})
    rates.update({key: facts.pop(key) for key in ("fma_per_clock",) if key in facts})
    tensor = {**rates.pop("mma_flop_per_clock", {}), **facts.pop("mma_flop_per_clock", {})}
    named = data.get("architecture") or product.get("architecture")
    architecture = named if named in architectures() else _nearest(name, named, rates, tensor)
    if architecture != named:
        named = named or architecture
        facts["assumed"] = facts.get("assumed", True)
        notes.append(f"{_reason(data)}limits and rates that the file leaves out are those of {architecture}")
    base = {**architecture_facts(architecture), **product}
    _contradictions(data, name, {**facts, **rates}, base, notes)
    merged = {**base, **facts, **rates, "name": name, "architecture": named}
    merged["mma_flop_per_clock"] = _tensor_rates(base.get("mma_flop_per_clock", {}), tensor, notes)
    _require(merged)
    return Device(**{"kind": "gpu", **merged})


def _reason(data: Mapping[str, Any]) -> str:
    architecture = data.get("architecture")
    return f"architecture {architecture} is not described: " if architecture else "no architecture is given: "


def _product(like: str | None, name: str) -> dict[str, Any]:
    """Return the fields of the product that completes the file: named in `like`, or by the same name."""
    if like is None:
        return product_facts(name)
    products = products_named(like)
    if not products:
        raise InputError(f"like = {like!r} names no described device; `tunebench devices` lists them")
    if len(products) > 1:
        raise InputError(f"like = {like!r} may be {', '.join(products)}: name one of them")
    return product_facts(products[0])


def _facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Device` that a file sets, by datasheet key or by field name."""
    facts: dict[str, Any] = {}
    for key, value in data.items():
        word = _WORDS.get(key)
        if word is not None:
            field, value = word.field, _in_range(key, value, word) * word.scale
        elif key in _FIELDS and key not in _TEXTS:
            field, value = key, _plain(key, value)
        else:
            continue
        if key == "boost_mhz" and "max_clock_mhz" in data:
            field = "boost_clock_mhz"  # max_clock_mhz is the highest clock allowed
        if field in facts:
            raise InputError(f"{field} must be set once; {key} sets it again")
        if field in _FIELDS:
            facts[field] = round(value) if _FIELDS[field].type == "int" else value
    if "kind" in data:
        facts["kind"] = data["kind"]
    return facts


def _boost(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the clock of the quoted peaks, if a file sets it in addition to the maximum clock."""
    both = {"boost_mhz", "max_clock_mhz"} <= set(data)
    return {"boost_clock_mhz": float(data["boost_mhz"])} if both else {}


def _in_range(key: str, value: Any, word: _Word) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not word.low <= value <= word.high:
        interval = f"from {significant(word.low, 6)} to {significant(word.high, 6)}"
        raise InputError(f"{key} must be {word.unit}, {interval}; got {value!r}")
    if key == "sm_count" and value != int(value):
        raise InputError(f"{key} must be a whole number, got {value!r}")
    return float(value)


def _plain(key: str, value: Any) -> Any:
    """Return the value of a `Device` field after a check of its type and range."""
    if key == "mma_flop_per_clock":
        if not isinstance(value, Mapping):
            raise InputError(f"{key} must be a table of FLOPs per SM and clock by type, got {value!r}")
        return {dtype: _positive(f"{key}.{dtype}", rate) for dtype, rate in value.items()}
    if key == "assumed":
        if not isinstance(value, bool):
            raise InputError(f"{key} must be true or false, got {value!r}")
        return value
    if key in _MAY_BE_NONE and value == 0 and not isinstance(value, bool):
        return value
    return _positive(key, value)


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{key} must be a number above 0, got {value!r}")
    return value


def _require(merged: Mapping[str, Any]) -> None:
    missing = [word for word in _NEEDED if _WORDS[word].field not in merged]
    if missing:
        raise InputError(f"missing {', '.join(missing)}; " + _usage())


def _usage() -> str:
    words = ", ".join(f"{word} ({_WORDS[word].unit})" for word in _NEEDED)
    return (
        f"a device file has name, {words}, and architecture or tflops "
        f"(TFLOP/s by type: fp32, {', '.join(_TYPES)}); it may have memory_gb, tdp_w, process_nm, "
        "like (a described device that completes it), source, and any field of tunebench.device.Device"
    )


# -- rates ---------------------------------------------------------------------------------------------


def _rates(data: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return rates per SM and clock from the peaks of a datasheet; empty if it lists no peaks."""
    peaks = data.get("tflops", {})
    if not isinstance(peaks, Mapping):
        raise InputError(f"tflops must be a table such as {{ fp32 = 67, fp16 = 989 }}, got {peaks!r}")
    if peaks and not {"sm_count", "max_clock_mhz"} <= set(facts):
        raise InputError(
            "tflops also needs sm_count and boost_mhz, to compute rates per SM and clock; " + _usage()
        )
    clock_mhz = facts.get("boost_clock_mhz") or facts.get("max_clock_mhz")
    tensor: dict[str, float] = {}
    rates: dict[str, Any] = {}
    for word, value in peaks.items():
        if word not in {"fp32", *_TYPES}:
            raise UnknownName("type of tflops", word, {"fp32", *_TYPES})
        peak = _in_range(f"tflops.{word}", value, _PEAK)
        rate = peak * 1e6 / (facts["sm_count"] * clock_mhz)
        if word == "fp32":
            rates["fma_per_clock"] = _round_rate(rate / 2)
        else:
            tensor[_TYPES[word]] = _round_rate(rate)
    if tensor:
        rates["mma_flop_per_clock"] = tensor
    return rates


def _round_rate(rate: float) -> float:
    """Return the nearest power of two if a rate differs from it by rounding or the quoted peak's clock.

    Hardware units come in powers of two. Peaks of tensor cores are quoted at clocks down to 0.865 of the
    highest (H100 NVL), and rounded up by up to 0.7 % (V100). Other rates are returned unchanged.
    """
    near: float = 2.0 ** round(math.log2(rate))
    return near if 0.85 <= rate / near <= 1.02 else rate


def _nearest(name: str, named: str | None, rates: Mapping[str, float], tensor: Mapping[str, float]) -> str:
    """Return the described architecture with the most similar rates; the later one on a tie."""
    if named is None and not rates and not tensor:
        raise InputError("missing architecture or tflops; " + _usage())
    amd = named.startswith("gfx") if named else bool(_AMD.search(name.replace("-", " ")))
    number = int(re.sub(r"\D", "", named) or 0) if named and not amd else None
    alike = [entry for entry in architectures() if entry.startswith("gfx" if amd else "sm_")]

    def distance(entry: str) -> tuple[float, float]:
        facts = architecture_facts(entry)
        described = facts.get("mma_flop_per_clock", {})
        pairs = [(rate, described.get(dtype)) for dtype, rate in tensor.items()]
        pairs += [(rate, facts[key]) for key, rate in rates.items()]
        away = sum(
            abs(math.log2(rate / described_rate)) if described_rate else 4.0 for rate, described_rate in pairs
        )
        return away, abs(number - int(entry[3:])) if number is not None else -alike.index(entry)

    return min(alike, key=distance)


def _tensor_rates(
    base: Mapping[str, float], rates: Mapping[str, float], notes: list[str]
) -> dict[str, float]:
    """Return tensor rates by type: given ones unchanged, missing ones in proportion to the rates of the base.

    Datasheets list one rate for fp16 and bf16 together, where a device has both.
    """
    for dtype, twin in (("f16", "bf16"), ("bf16", "f16")):
        if dtype in rates and twin in base and twin not in rates:
            rates = {**rates, twin: rates[dtype]}
    if "f16" not in rates or "f16" not in base or rates["f16"] == base["f16"]:
        return {**base, **rates}
    ratio = rates["f16"] / base["f16"]
    scaled = {dtype: rate * ratio for dtype, rate in base.items() if dtype not in rates}
    if scaled:
        notes.append(
            f"tensor rates of {', '.join(scaled)} are not given: assumed in proportion to the rate of fp16"
        )
    return {**scaled, **rates}


def _contradictions(
    data: Mapping[str, Any],
    name: str,
    facts: Mapping[str, Any],
    base: Mapping[str, Any],
    notes: list[str],
) -> None:
    """Add a note for each value that contradicts the described product or architecture by that name."""
    if "like" in data:
        return  # a file with `like` differs from that product on purpose
    if product_facts(name):
        for key, word in _WORDS.items():
            stated, described = facts.get(word.field), base.get(word.field)
            if stated and described and abs(stated / described - 1) > 0.02:
                statement = f"{key} is {significant(stated / word.scale, 6)} in this file"
                notes.append(
                    f"{statement}, but {significant(described / word.scale, 6)} in the description of {name}"
                )
    fma, usual = facts.get("fma_per_clock"), base.get("fma_per_clock")
    if fma and usual and not 0.9 < fma / usual < 1.1:
        notes.append(
            f"fp32 implies {significant(fma, 6)} multiply-adds per SM and clock, but {name} is described "
            f"with {significant(usual, 6)}"
        )


# -- NeuSight's files ------------------------------------------------------------------------------------


def _from_neusight(data: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return a NeuSight device configuration with datasheet keys; its numbers are not verified.

    Source: `scripts/asplos/data/device_configs` of sitar-lab/NeuSight.
    """
    for key in data:
        if key not in _NEUSIGHT_KEYS:
            raise UnknownName("key of a NeuSight device", key, _NEUSIGHT_KEYS)
    sheet: dict[str, Any] = {"name": data.get("Device", "")}
    sheet |= {word: data[key] for key, word in _NEUSIGHT.items() if key in data}
    for key in sorted({*data} - {"Device"}):
        _positive(key, data[key])
    peaks = {word: data[key] for key, word in _NEUSIGHT_PEAKS.items() if key in data}
    sheet["tflops"] = {word: peak / 1e3 for word, peak in peaks.items()}
    read_as = ", ".join(
        f"{word} {significant(value, 6)}" for word, value in sheet.items() if isinstance(value, int | float)
    )
    peaks_as = ", ".join(f"{word} {significant(peak, 6)}" for word, peak in sheet["tflops"].items())
    notes.append(f"read as a NeuSight device: {read_as}, tflops {peaks_as}")
    lanes = data.get("Core_Per_SM", 0)
    if "SingleFLOPs" in data and lanes:
        expected = data.get("Num_Sm", 0) * lanes * 2 * data.get("Freq", 0) / 1e3
        if expected and not 0.95 < data["SingleFLOPs"] / expected < 1.05:
            statement = f"SingleFLOPs {significant(data['SingleFLOPs'], 6)} contradicts"
            notes.append(f"{statement} Num_Sm x Core_Per_SM x 2 x Freq: {significant(expected, 6)}")
    return sheet
