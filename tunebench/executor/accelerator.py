"""Ray resource names of devices, which select the nodes that may have a device.

A node has a resource ``accelerator_type:NAME`` for its first GPU. Ray derives NAME from the driver's name of
the product: the first words of capitals up to one with a digit, or the whole product with hyphens. For other
devices, a node can be started with a custom resource ``tunebench:NAME`` for each name of its devices.
Source: ray/_private/accelerators/nvidia_gpu.py of Ray 2.60.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tunebench import device as devices
from tunebench._device import architecture_name, driver_names, products_named, slug

__all__ = ["CUSTOM", "labels", "may_have"]

CUSTOM = "tunebench:"
"""Prefix of the custom resources that name the devices of a node."""

ACCELERATOR = "accelerator_type:"

_MODEL = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")


def labels(device_name: str) -> frozenset[str]:
    """Return the Ray resources for a device; a node qualifies with at least one of them (see `may_have`).

    Args:
        device_name: A product in any spelling, such as ``h100-sxm``, an architecture, or the key of a device.
    """
    architecture, _, product_and_facts = device_name.partition(":")
    name = product_and_facts.partition(",")[0] or architecture_name(device_name)
    products = set(products_named(name))
    matching = [
        device
        for device in devices.described().values()
        if device.name in products or device.architecture == name
    ]
    custom = {
        device_name,
        name,
        *(device.name for device in matching),
        *(device.architecture for device in matching),
    }
    custom |= {architecture} if product_and_facts else set()
    accelerators = {_accelerator(driver) for device in matching for driver in driver_names(device.name)}
    if not matching:
        accelerators |= {slug(name), _up_to_digit(slug(name))}
    return frozenset(
        {f"{ACCELERATOR}{slug(name)}" for name in accelerators} | {f"{CUSTOM}{slug(name)}" for name in custom}
    )


def may_have(resources: Mapping[str, float], device_names: Iterable[str]) -> bool:
    """Return whether a node may have one of the wanted devices; without resource names it may have any.

    Args:
        resources: Resources of the node, by name. Case, and the maker in a name, do not matter.
        device_names: Resource names as `labels` returns them.
    """
    names = {
        f"{prefix}{slug(name.removeprefix(prefix))}"
        for name in resources
        for prefix in (CUSTOM, ACCELERATOR)
        if name.startswith(prefix)
    }
    return not names or bool(names & set(device_names))


def _accelerator(driver_name: str) -> str:
    """Return Ray's name of a product from the driver's name."""
    match = _MODEL.match(driver_name)
    name = match[1] if match is not None and len(match[1]) > 1 else driver_name.removeprefix("NVIDIA ")
    return name.replace(" ", "-")


def _up_to_digit(name: str) -> str:
    """Return the words of a slug up to the first with a digit: ``h200-nvl`` is ``h200``."""
    match = re.match(r"(?:[^\d-]+-)*[^-]*\d[^-]*", name)
    return match[0] if match is not None else name
