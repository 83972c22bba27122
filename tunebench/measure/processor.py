"""Rates that this machine's processor achieves in memory and arithmetic, measured once per machine.

A measured rate is an achieved rate, and no ceiling: a kernel may be faster. Pruning, audits and optimality
proofs therefore use the assumed rates of the device, which no processor exceeds. The measured rates give the
optimality gap of reports its meaning (docs/decisions/0076-gap-of-processors-from-measured-rates.md).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench import _environment
from tunebench._lazy import np
from tunebench._private_file import create_folder, read_private
from tunebench.device import Device, local_cpu
from tunebench.measure.machine import BUSY, busy_elsewhere

__all__ = ["ProcessorRates", "measure_rates", "store_rates", "with_measured_rates", "with_stored_rates"]

FORMAT = 1
"""Version of the file; rates of another version are measured again."""

SECONDS = 0.7
"""Time in which each of the two rates is measured, in seconds."""

SMALLEST_BYTES = 128 << 20
"""Smallest array that is read from memory, in bytes: more than caches that the system does not report."""
LARGEST_BYTES = 1 << 30
CACHES = 4
"""Size of the array as a multiple of the last-level cache."""

PRODUCT_SIZE = 768
"""Rows and columns of the matrices whose product has the rate of multiply-adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorRates:
    """Rates that all cores of a processor achieve together.

    Attributes:
        gb_s: Bytes read from memory, in 1e9 bytes per second.
        gflop_s: f32 multiply-adds, in 1e9 FLOP/s (two per multiply-add).
        busy: Whether other programs used the processor.
    """

    gb_s: float
    gflop_s: float
    busy: bool


def with_measured_rates(device: Device) -> Device:
    """Return this machine's processor with its measured rates, which are measured if they are not stored.

    Rates that were measured while other programs used the processor are measured again once it is idle; the
    higher ones count.

    Args:
        device: This machine's processor.
    """
    rates = _stored(device)
    if rates is None or (rates.busy and busy_elsewhere() <= BUSY):
        rates = _higher(measure_rates(device), rates)
        store_rates(device, rates)
    return dataclasses.replace(device, measured_gb_s=rates.gb_s, measured_gflop_s=rates.gflop_s)


def with_stored_rates(device: Device) -> Device:
    """Return a device with its rates if it is this machine's processor and they were measured, else as it is.

    Args:
        device: Any device.
    """
    rates = _stored(device) if device.kind == "cpu" and device.key == local_cpu().key else None
    if rates is None:
        return device
    return dataclasses.replace(device, measured_gb_s=rates.gb_s, measured_gflop_s=rates.gflop_s)


def measure_rates(device: Device) -> ProcessorRates:
    """Measure the rates of this machine's processor, in about two seconds.

    Each thread counts its own processor time, so that threads that wait for a busy processor lower no rate.

    Args:
        device: This machine's processor, for its cores and its last-level cache.
    """
    from threadpoolctl import threadpool_limits

    busy = busy_elsewhere() > BUSY
    nbytes = min(LARGEST_BYTES, max(SMALLEST_BYTES, CACHES * device.l2_bytes))
    chunks = np.array_split(np.ones(nbytes // 4, dtype=np.float32), device.sm_count)
    gb_s = _total_rate([(chunk.nbytes, functools.partial(np.max, chunk)) for chunk in chunks])
    a = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32)
    product = functools.partial(np.matmul, a, a)
    with threadpool_limits(limits=1, user_api="blas"):
        gflop_s = _total_rate([(2 * PRODUCT_SIZE**3, product)] * device.sm_count)
    return ProcessorRates(gb_s=round(gb_s, 2), gflop_s=round(gflop_s, 1), busy=busy)


def _total_rate(work: list[tuple[int, Callable[[], object]]]) -> float:
    """Return the sum of the rates of all threads, in 1e9 units of work per second.

    Args:
        work: Units of work of one call, and the call, of each thread.
    """
    end = time.monotonic() + SECONDS
    with ThreadPoolExecutor(len(work)) as threads:
        rates = [threads.submit(_highest_rate, units, call, end) for units, call in work]
        return sum(rate.result() for rate in rates)


def _highest_rate(units: int, call: Callable[[], object], end: float) -> float:
    """Return the highest rate of this thread at several calls, in 1e9 units per second of processor time."""
    call()
    shortest_ns = 0
    while not shortest_ns or time.monotonic() < end:
        start_ns = time.thread_time_ns()
        call()
        spent_ns = max(1, time.thread_time_ns() - start_ns)
        shortest_ns = min(shortest_ns or spent_ns, spent_ns)
    return units / shortest_ns


# -- the file --------------------------------------------------------------------------------------------


def _path() -> Path:
    return _environment.cache_folder() / "processor_rates.json"


def _identity(device: Device) -> str:
    """Return the processor and the machine: machines may share the folder, and a processor its name."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    return f"{device.key} of {machine or platform.node()}"


def _read() -> dict[str, Any]:
    """Return the stored rates by identity; none if the file is missing, damaged or of another version."""
    try:
        content = json.loads(read_private(_path()))
    except (OSError, ValueError):
        return {}
    current = isinstance(content, dict) and content.get("format") == FORMAT
    rates = content.get("rates") if current else None
    return rates if isinstance(rates, dict) else {}


def _stored(device: Device) -> ProcessorRates | None:
    try:
        rates = ProcessorRates(**_read()[_identity(device)])
        usable = all(0 < rate < float("inf") for rate in (rates.gb_s, rates.gflop_s))
    except (KeyError, TypeError):
        return None
    return rates if usable else None


def _higher(measured: ProcessorRates, stored: ProcessorRates | None) -> ProcessorRates:
    if stored is None:
        return measured
    return dataclasses.replace(
        measured, gb_s=max(measured.gb_s, stored.gb_s), gflop_s=max(measured.gflop_s, stored.gflop_s)
    )


def store_rates(device: Device, rates: ProcessorRates) -> None:
    """Write the rates; in a folder that cannot be written, the next process measures again.

    Args:
        device: This machine's processor.
        rates: Its rates.
    """
    path = _path()
    content = {"format": FORMAT, "rates": {**_read(), _identity(device): dataclasses.asdict(rates)}}
    try:
        create_folder(path.parent)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with open(handle, "w", encoding="ascii") as file:
            json.dump(content, file)
        Path(name).replace(path)
    except OSError:
        return
