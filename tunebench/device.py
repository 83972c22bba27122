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
    """Return the product that stands for an architecture, such as ``h100-sxm`` for ``sm_90``.

    Raises:
        UnknownName: if the architecture is not described.
    """
    known = architectures()
    if architecture not in known:
        raise UnknownName("architecture", architecture, known)
    return _build(known[architecture])


def local_cpu() -> Device:
    """Return this machine's processor."""
    return Device(**_host.cpu())


def local_gpus() -> tuple[Device, ...]:
    """Return this machine's NVIDIA GPUs in the driver's order; none without a driver."""
    return tuple(_local_gpu(facts) for facts in _host.gpus())


def _local_gpu(facts: Mapping[str, Any]) -> Device:
    """Return a GPU from what its driver tells, completed by what is described of its product.

    Counts and sizes are the driver's. Clock and bandwidth are the higher of driver and description, since
    the driver's property is a boost clock that consumer boards exceed. A GPU of an architecture that is
    not described gets the highest rates of any that is, and is marked `assumed`.
    """
    product = product_facts(facts["name"])
    common = architecture_facts(facts["architecture"]) or {**highest_rates(), "assumed": True}
    peaks = {name: max(facts[name], product.get(name, 0)) for name in ("max_clock_mhz", "dram_gb_s")}
    return Device(**{"kind": "gpu", **common, **product, **facts, **peaks})


def find(name: str | None = None) -> Device:
    """Return a device by name.

    Args:
        name: ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` (this machine's), a name of `described`, an
            architecture (its representative), a file that ends in ``.toml`` or ``.json`` (see `from_file`),
            or None: the first GPU, or the CPU if there is none.

    Raises:
        UnknownName: if there is no such name.
        InputError: if it is a file that cannot be read.
        DeviceError: if it names a GPU of this machine that is not there.
    """
    if name is None:
        return (*local_gpus(), local_cpu())[0]
    if name.lower().endswith((".toml", ".json")):
        return from_file(name)
    if name == "cpu":
        return local_cpu()
    if match := re.fullmatch(r"cuda(?::(\d+))?", name):
        gpus, index = local_gpus(), int(match[1] or 0)
        if index < len(gpus):
            return gpus[index]
        raise DeviceError(f"{name}: this machine has {len(gpus)} NVIDIA GPU(s); see `tunebench doctor`")
    local = {device.name: device for device in (local_cpu(), *local_gpus())}
    if name in local:
        return local[name]
    if name in described_facts()["device"]:
        return _build(name)
    if name in architectures():
        return representative(name)
    raise UnknownName("device", name, {"cpu", "cuda", *local, *described_facts()["device"], *architectures()})


def from_file(path: str | Path) -> Device:
    """Read a device from a TOML or JSON file (see `tunebench.datasheet`, which also tells what was assumed).

    Raises:
        InputError: naming what is missing, unknown, malformed or out of range.
    """
    return datasheet.read(path).device
