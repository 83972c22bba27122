"""What of a device decides which records serve it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tunebench import device as devices
from tunebench.device import Device

__all__ = ["Target", "target"]


@dataclass(frozen=True, slots=True)
class Target:
    """A device that is asked about; one that is known by its stored key alone has no description."""

    key: str
    architecture: str
    product: str
    sm_count: int


def target(device: Device | str | None) -> Target:
    """Return what is asked about.

    Args:
        device: A device, its name, its stored key, or None: the first GPU, or the CPU if there is none.

    Raises:
        UnknownName: if there is no such device.
    """
    return _of(device) if isinstance(device, Device) else _named(device)


def _of(device: Device) -> Target:
    return Target(device.key, device.architecture, device.name, device.sm_count)


@functools.lru_cache(maxsize=256)
def _named(name: str | None) -> Target:
    if name is not None and ",sm=" in name:  # a key, as results are stored under
        architecture, _, rest = name.partition(":")
        product, *facts = rest.split(",")
        counts = [fact.removeprefix("sm=") for fact in facts if fact.startswith("sm=")]
        if product and counts and counts[0].isdecimal():
            return Target(name, architecture, product, int(counts[0]))
    return _of(devices.find(name))
