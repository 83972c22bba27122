"""What Ray calls the GPUs that tunebench knows: which nodes are worth asking for a device.

A node has a resource ``accelerator_type:NAME`` for its first GPU, which Ray names by what the driver tells:
the first word of capitals with a digit in it, or the whole product with hyphens. For everything else a node
may be started with a resource of ours, ``tunebench:NAME``, for each name its devices go by.
Source: ray/_private/accelerators/nvidia_gpu.py and ray.util.accelerators of Ray 2.60.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tunebench import device as devices

__all__ = ["OURS", "labels", "may_have"]

OURS = "tunebench:"
"""Begins the names of custom resources that tell what a node has."""

THEIRS = "accelerator_type:"

# Products whose name at Ray is not their own first word in capitals.
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
    """Return the resources of which a node must have one to be asked for a device.

    Args:
        wanted: A product such as ``h100-sxm``, an architecture, or the key of a device.
    """
    architecture, _, rest = wanted.partition(":")
    named = {wanted, rest.partition(",")[0] or wanted}
    alike = [one for one in devices.described().values() if named & {one.name, one.architecture}]
    ours = named | {one.name for one in alike} | {one.architecture for one in alike}
    ours |= {architecture} if rest else set()
    theirs = {
        _NAMES.get(name, name.partition("-")[0].upper()) for name in {one.name for one in alike} | named
    }
    return frozenset({f"{THEIRS}{name}" for name in theirs} | {f"{OURS}{name}" for name in ours})


def may_have(resources: Mapping[str, float], wanted: Iterable[str]) -> bool:
    """Tell whether a node may have a device: one that tells nothing of its GPUs may have any."""
    told = {name for name in resources if name.startswith((OURS, THEIRS))}
    return not told or bool(told & set(wanted))
