"""Links from a device to host memory, by name, by figures and by device.

    link = host_link("pcie5")
    link = host_link("25:10")  # 25 GB/s in each direction, 10 us per copy
    link = host_link_of(device.find("gh200"))

Figures and their sources are in `links.toml`.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.errors import InputError, UnknownName
from tunebench.training.interconnect.cluster import link_tables
from tunebench.training.memory.step import HostLink

__all__ = ["host_link", "host_link_of", "host_links"]

BY_FIGURES = "Or give GB/s in each direction, such as 25 or 25:10 (with microseconds per copy)."


def host_links() -> dict[str, HostLink]:
    """Return every link to host memory of `links.toml`, by name."""
    return {
        name: HostLink(
            name=name,
            to_host_gb_s=entry["gb_s"] * entry["to_host"],
            to_device_gb_s=entry["gb_s"] * entry["to_device"],
            latency_us=entry["latency_us"],
        )
        for name, entry in link_tables()["host"].items()
    }


def host_link(text: str) -> HostLink:
    """Return a link to host memory.

    Args:
        text: A name such as ``pcie5``, or GB/s in each direction: ``25``, or ``25:10`` with microseconds per
            copy.

    Raises:
        UnknownName: The text is neither.
        InputError: A figure is out of range.
    """
    named_links = host_links()
    if text in named_links:
        return named_links[text]
    rate, _, latency = text.partition(":")
    try:
        gb_s, latency_us = float(rate), float(latency or 0)
    except ValueError:
        raise UnknownName("host link", text, named_links, BY_FIGURES) from None
    return HostLink(name=text, to_host_gb_s=gb_s, to_device_gb_s=gb_s, latency_us=latency_us)


def host_link_of(device: Device) -> HostLink:
    """Return the usual link of a device to host memory.

    Args:
        device: The device.

    Raises:
        InputError: The link of this device is not known.
    """
    for name, entry in link_tables()["host"].items():
        if device.name in entry["products"]:
            return host_links()[name]
    raise InputError(
        f"the link of {device.name} to host memory is not known: name one of {', '.join(host_links())}. "
        f"{BY_FIGURES}"
    )
