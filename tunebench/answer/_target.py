"""What of a device decides which records serve it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tunebench import device as devices
from tunebench.device import Device

__all__ = ["LookupTarget", "lookup_target"]


@dataclass(frozen=True, slots=True)
class LookupTarget:
    """A device that is asked about; one that is known by its stored key alone has no description."""

    key: str
    architecture: str
    product: str
    sm_count: int


def lookup_target(device: Device | str | None) -> LookupTarget:
    """Return what is asked about.

    Args:
        device: A device, its name, its stored key, or None: the first GPU, or the CPU if there is none.

    Raises:
        UnknownName: if there is no such device.
    """
    return _of(device) if isinstance(device, Device) else _named(device)


def _of(device: Device) -> LookupTarget:
    return LookupTarget(device.key, device.architecture, device.name, device.sm_count)


@functools.lru_cache(maxsize=256)
def _named(name: str | None) -> LookupTarget:
    if name is not None and ",sm=" in name:  # a key, as results are stored under
        architecture, _, rest = name.partition(":")
        product, *facts = rest.split(",")
        counts = [fact.removeprefix("sm=") for fact in facts if fact.startswith("sm=")]
        if product and counts and counts[0].isdecimal():
            return LookupTarget(name, architecture, product, int(counts[0]))
    return _of(devices.find(name))
