"""Properties of this machine: its processor from the operating system, its GPUs from the driver."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

from tunebench import _environment
from tunebench._device import product_name, slug

__all__ = ["cores", "cpu", "gpus", "last_level_cache_bytes"]

ASSUMED_CLOCK_MHZ = 5500.0
"""Clock assumed of a CPU that does not report its highest clock (a virtual machine hides its turbo clock)."""
ASSUMED_DRAM_GB_S = 500.0
"""Memory bandwidth assumed of a CPU: 12 channels of DDR5-5200, more than one virtual machine receives."""

# Driver attribute numbers. Source: cuda.h, CUdevice_attribute.
_ATTRIBUTES = {
    "sm_count": 16,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "bus_bits": 37,
    "l2_bytes": 38,
    "threads_per_sm": 39,
    "cc_major": 75,
    "cc_minor": 76,
    "smem_per_sm_bytes": 81,
    "registers_per_sm": 82,
    "smem_per_block_bytes": 97,
    "blocks_per_sm": 106,
}

# Instruction-set levels of the x86-64 psABI, by a flag that only that level and later ones have.
_X86_LEVELS = (("avx512bw", "x86_64-v4"), ("avx2", "x86_64-v3"), ("sse4_2", "x86_64-v2"))
_FMA_PER_CLOCK = {"x86_64-v4": 32.0, "x86_64-v3": 16.0, "x86_64-v2": 8.0}


@cache
def cpu() -> dict[str, Any]:
    """Return the fields of a `Device` for this machine's processor.

    Cores are those that this process may run on. Rates assume two full-width multiply-add units per core.
    """
    facts = _cpuinfo()
    flags = set(facts.get("flags", "").split())
    machine = platform.machine().lower()
    level = next((name for flag, name in _X86_LEVELS if flag in flags), machine)
    clock = _read_number("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    return {
        "name": slug(facts.get("model name") or platform.processor() or machine),
        "kind": "cpu",
        "architecture": level,
        "sm_count": cores(),
        "max_clock_mhz": clock / 1e3 if clock else ASSUMED_CLOCK_MHZ,
        "dram_gb_s": ASSUMED_DRAM_GB_S,
        "l2_bytes": last_level_cache_bytes(),
        "fma_per_clock": _FMA_PER_CLOCK.get(level, 16.0),
        "assumed": True,
    }


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpuinfo() -> dict[str, str]:
    facts: dict[str, str] = {}
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return facts
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    return facts


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def last_level_cache_bytes() -> int:
    """Return the bytes of the largest cache of the processor, or those of `TUNEBENCH_CPU_CACHE_MB`."""
    megabytes = _environment.cpu_cache_mb()
    if megabytes is not None:
        return max(1, round(megabytes * (1 << 20)))
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text(encoding="ascii").strip())
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2]])
    return max(sizes) or 32 << 20


@cache
def gpus() -> tuple[dict[str, Any], ...]:
    """Return the fields of a `Device` that the driver reports, for each GPU; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


def _gpu(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(handle), index)
    driver.cuDeviceGetName(name, len(name), handle)
    facts: dict[str, int] = {}
    for attribute, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        facts[attribute] = value.value
    bandwidth = 2 * facts.pop("memory_clock_khz") * 1e3 * facts.pop("bus_bits") / 8 / 1e9
    return {
        "name": product_name(name.value.decode()),
        "architecture": f"sm_{facts.pop('cc_major')}{facts.pop('cc_minor')}",
        "max_clock_mhz": facts.pop("clock_khz") / 1e3,
        "dram_gb_s": bandwidth,
        **facts,
    }
