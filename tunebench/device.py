"""Devices: the ones on this machine, and the ones described in `devices.toml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebench import _host, datasheet
from tunebench._device import (
    Device,
    architecture_facts,
    architectures,
    described_facts,
    highest_rates,
    product_facts,
)
from tunebench.errors import DeviceError, UnknownName

__all__ = [
    "Device",
    "architecture_facts",
    "architectures",
    "described",
    "find",
    "from_file",
    "local_cpu",
    "local_gpus",
    "product_facts",
    "representative",
]


def _build(name: str) -> Device:
    product = product_facts(name)
    return Device(name=name, kind="gpu", **{**architecture_facts(product["architecture"]), **product})


def described() -> dict[str, Device]:
    """Return every device of `devices.toml`, by name."""
    return {name: _build(name) for name in described_facts()["device"]}


def representative(architecture: str) -> Device:
    """Return the representative product of an architecture, such as ``h100-sxm`` for ``sm_90``.

    Args:
        architecture: Architecture that `devices.toml` describes, such as ``sm_90`` or ``gfx942``.

    Raises:
        UnknownName: The architecture is not described.
    """
    known = architectures()
    if architecture not in known:
        raise UnknownName("architecture", architecture, known)
    return _build(known[architecture])


def local_cpu() -> Device:
    """Return this machine's processor."""
    return Device(**_host.cpu())


def local_gpus() -> tuple[Device, ...]:
    """Return this machine's NVIDIA GPUs in the driver's order; empty without a driver."""
    return tuple(_local_gpu(facts) for facts in _host.gpus())


def _local_gpu(facts: Mapping[str, Any]) -> Device:
    """Return a GPU from the values that the driver reports, completed by the description of its product.

    Counts and sizes are those of the driver. Clock and bandwidth are the higher of driver and description,
    because the driver reports a boost clock that consumer boards exceed. A GPU of an unknown architecture
    gets the highest rates of all described architectures, and is marked `assumed`.
    """
    product = product_facts(facts["name"])
    common = architecture_facts(facts["architecture"]) or {**highest_rates(), "assumed": True}
    peaks = {name: max(facts[name], product.get(name, 0)) for name in ("max_clock_mhz", "dram_gb_s")}
    return Device(**{"kind": "gpu", **common, **product, **facts, **peaks})


def find(name: str | None = None) -> Device:
    """Return a device by name.

    Args:
        name: ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` (this machine's), a name in `described`, an
            architecture (its representative), or a file that ends in ``.toml`` or ``.json`` (see
            `from_file`). None selects the first GPU, or the CPU if there is none.

    Returns:
        The device with its rates and limits.

    Raises:
        UnknownName: No device has this name.
        InputError: The file cannot be read.
        DeviceError: This machine has no such GPU.
    """
    if name is None:
        return (*local_gpus(), local_cpu())[0]
    if datasheet.is_file(name):
        return from_file(name)
    if name == "cpu":
        return local_cpu()
    if match := re.fullmatch(r"cuda(?::(\d+))?", name):
        gpus, index = local_gpus(), int(match[1] or 0)
        if index < len(gpus):
            return gpus[index]
        raise DeviceError(
            f"{name}: this machine has {len(gpus)} NVIDIA GPU(s); run `tunebench doctor` for details"
        )
    local = {device.name: device for device in (local_cpu(), *local_gpus())}
    if name in local:
        return local[name]
    if name in described_facts()["device"]:
        return _build(name)
    if name in architectures():
        return representative(name)
    raise UnknownName("device", name, {"cpu", "cuda", *local, *described_facts()["device"], *architectures()})


def from_file(path: str | Path) -> Device:
    """Read a device from a TOML or JSON file (`tunebench.datasheet.read` also returns the assumptions).

    Args:
        path: File that ends in ``.toml`` or ``.json``.

    Raises:
        InputError: A key is missing, unknown, malformed or out of range; the message names it.
    """
    return datasheet.read(path).device
