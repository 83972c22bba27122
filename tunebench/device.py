"""Devices: the ones on this machine, and the ones described in `devices.toml`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunebench import _host, datasheet
from tunebench._device import (
    Device,
    architecture_facts,
    architecture_name,
    architectures,
    described_facts,
    highest_rates,
    product_facts,
    products_named,
    selects,
    slug,
)
from tunebench.errors import DeviceError, InputError, UnknownName, close_names

__all__ = [
    "Device",
    "architecture_facts",
    "architectures",
    "described",
    "find",
    "find_product",
    "from_file",
    "local_cpu",
    "local_gpus",
    "product_facts",
    "products_named",
    "representative",
    "selects",
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
    representatives, name = architectures(), architecture_name(architecture)
    if name not in representatives:
        raise UnknownName("architecture", architecture, representatives)
    return _build(representatives[name])


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
        name: ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` (this machine's), a product as `described`, the driver
            or a person writes it (``h100-sxm``, ``NVIDIA H100 80GB HBM3``, ``RTX 4090``), an architecture
            (its representative), or a file that ends in ``.toml`` or ``.json`` (see `from_file`). None
            selects the first GPU, or the CPU if there is none.

    Returns:
        The device with its rates and limits.

    Raises:
        UnknownName: No device has this name.
        InputError: The file cannot be read, or the name may mean several products and none or several of
            them are in this machine.
        DeviceError: This machine has no such GPU.
    """
    if name is None:
        return (*local_gpus(), local_cpu())[0]
    if datasheet.is_file(name):
        return from_file(name)
    if name.lower() == "cpu":
        return local_cpu()
    if match := re.fullmatch(r"cuda(?::(\d+))?", name.lower()):
        gpus, index = local_gpus(), int(match[1] or 0)
        if index < len(gpus):
            return gpus[index]
        raise DeviceError(
            f"{name}: this machine has {len(gpus)} NVIDIA GPU(s); run `tunebench doctor` for details"
        )
    local = {device.name: device for device in (local_cpu(), *local_gpus())}
    if name in local or slug(name) in local:
        return local.get(name) or local[slug(name)]
    if architecture_name(name) in architectures():
        return representative(name)
    present = [local[product] for product in products_named(name) if product in local]
    return present[0] if len(present) == 1 else find_product(name, {"cpu", "cuda", *local, *architectures()})


def find_product(name: str, others: Iterable[str] = ()) -> Device:
    """Return the described product that a name means.

    Args:
        name: Name as a driver or a person writes it, such as ``NVIDIA A100-SXM4-80GB``.
        others: Names of other kinds that are valid, for the message.

    Raises:
        UnknownName: No product has this name.
        InputError: The name may mean several products.
    """
    products = products_named(name)
    if len(products) > 1:
        *names, last = products
        raise InputError(f"device {name!r} may be {', '.join(names)} or {last}: name one of them")
    if not products:
        valid = {*others, *described_facts()["device"]}
        close = [] if close_names(name, valid) else close_names(slug(name), valid)
        hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise UnknownName("device", name, valid, hint)
    return _build(products[0])


def from_file(path: str | Path) -> Device:
    """Read a device from a TOML or JSON file (`tunebench.datasheet.read` also returns the assumptions).

    Args:
        path: File that ends in ``.toml`` or ``.json``.

    Raises:
        InputError: A key is missing, unknown, malformed or out of range; the message names it.
    """
    return datasheet.read(path).device
