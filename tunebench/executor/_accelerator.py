"""Ray resource names of devices, which select the nodes that may have a device.

A node has a resource ``accelerator_type:NAME`` for its first GPU. Ray derives NAME from the product name: the
first word of capitals with a digit in it, or the whole product with hyphens. For other devices, a node can be
started with a custom resource ``tunebench:NAME`` for each name of its devices.
Source: ray/_private/accelerators/nvidia_gpu.py and ray.util.accelerators of Ray 2.60.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tunebench import device as devices

__all__ = ["CUSTOM", "labels", "may_have"]

CUSTOM = "tunebench:"
"""Prefix of the custom resources that name the devices of a node."""

ACCELERATOR = "accelerator_type:"

# Products whose name in Ray is not their first word in capitals.
_NAMES = {
    "a4000": "RTX-A4000",
    "a6000": "RTX-A6000",
    "gh200": "GH200",
    "rtx-2080-ti": "GeForce-RTX-2080-Ti",
    "rtx-3060-laptop": "GeForce-RTX-3060-Laptop-GPU",
    "rtx-3080": "GeForce-RTX-3080",
    "rtx-3090": "GeForce-RTX-3090",
    "rtx-4080": "GeForce-RTX-4080",
    "rtx-4090": "GeForce-RTX-4090",
    "rtx-5080": "GeForce-RTX-5080",
    "rtx-5090": "GeForce-RTX-5090",
    "rtx-pro-6000": "RTX-PRO-6000",
    "rtx-pro-6000-server": "RTX-PRO-6000",
    "titan-rtx": "TITAN-RTX",
}


def labels(wanted: str) -> frozenset[str]:
    """Return the Ray resources for a device; a node is used if it has at least one of them.

    Args:
        wanted: A product such as ``h100-sxm``, an architecture, or the key of a device.
    """
    architecture, _, rest = wanted.partition(":")
    names = {wanted, rest.partition(",")[0] or wanted}
    alike = [one for one in devices.described().values() if names & {one.name, one.architecture}]
    custom = names | {one.name for one in alike} | {one.architecture for one in alike}
    custom |= {architecture} if rest else set()
    accelerators = {
        _NAMES.get(name, name.partition("-")[0].upper()) for name in {one.name for one in alike} | names
    }
    return frozenset(
        {f"{ACCELERATOR}{name}" for name in accelerators} | {f"{CUSTOM}{name}" for name in custom}
    )


def may_have(resources: Mapping[str, float], wanted: Iterable[str]) -> bool:
    """Return whether a node may have one of the wanted devices; without resource names it may have any."""
    names = {name for name in resources if name.startswith((CUSTOM, ACCELERATOR))}
    return not names or bool(names & set(wanted))
