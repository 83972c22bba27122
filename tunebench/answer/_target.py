"""Properties of a device by which records are selected."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tunebench import device as devices
from tunebench.device import Device

__all__ = ["LookupTarget", "lookup_target"]


@dataclass(frozen=True, slots=True)
class LookupTarget:
    """Device of a lookup; a device that is given by its stored key has no description."""

    key: str
    architecture: str
    product: str
    sm_count: int


def lookup_target(device: Device | str | None) -> LookupTarget:
    """Return the device of a lookup.

    Args:
        device: A device, its name, its stored key, or None: the first GPU, or the CPU if there is none.

    Raises:
        UnknownName: if the device does not exist.
    """
    return _of(device) if isinstance(device, Device) else _named(device)


def _of(device: Device) -> LookupTarget:
    return LookupTarget(device.key, device.architecture, device.name, device.sm_count)


@functools.lru_cache(maxsize=256)
def _named(name: str | None) -> LookupTarget:
    if name is not None and ",sm=" in name:  # a stored key
        architecture, _, rest = name.partition(":")
        product, *facts = rest.split(",")
        counts = [fact.removeprefix("sm=") for fact in facts if fact.startswith("sm=")]
        if product and counts and counts[0].isdecimal():
            return LookupTarget(name, architecture, product, int(counts[0]))
    return _of(devices.find(name))
