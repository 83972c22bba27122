"""Several devices and the links among them: `Link`, `Cluster`, and the `ProcessGroup` that does a collective.

Facts of links are in `links.toml`. A link that is not there is given by hand, as ``300`` or ``300:0.6``
(GB/s in one direction for each device, microseconds of latency), or in a file (`cluster_from_file`).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tunebench._deprecation import renamed
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName

__all__ = ["Cluster", "Link", "ProcessGroup", "cluster_from_file", "find_link", "link_of", "links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a device is connected to others by.

    Attributes:
        name: Such as ``nvlink3``.
        gb_s: What the wires carry at most, in one direction, for one device; 1e9 bytes a second.
        latency_us: Of one step of a collective that sends little.
        efficiency: The share of `gb_s` that large messages reach.
        reduces: Whether its switches can add up.
    """

    name: str
    gb_s: float
    latency_us: float = 1.0
    efficiency: float = 0.8
    reduces: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.gb_s < float("inf") or not 0 <= self.latency_us < float("inf"):
            raise InputError(
                f"link {self.name}: bandwidth must be positive and latency not negative; got {self}"
            )
        if not 0 < self.efficiency <= 1:
            raise InputError(f"link {self.name}: efficiency is a share in (0, 1], got {self.efficiency}")

    @property
    def bytes_per_us(self) -> float:
        """What large messages get in one direction."""
        return self.gb_s * self.efficiency * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """Devices that take part in one collective: `local` in each of `nodes` nodes.

    Every device uses its own link between nodes, so that a node of several has as many.
    """

    local: int
    nodes: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        if self.local < 1 or self.nodes < 1:
            raise InputError(f"a group has one device or more, got {self.local} in {self.nodes} nodes")

    @property
    def size(self) -> int:
        """How many devices take part."""
        return self.local * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Alike nodes of alike devices.

    Attributes:
        inside: Link among the devices of a node.
        between: Link of each device to other nodes.
        devices_per_node: How many devices a node has.
        nodes: How many nodes there are.
    """

    inside: Link
    between: Link
    devices_per_node: int = 8
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.nodes < 1:
            raise InputError(
                f"a cluster has one node of one device or more, got {self.nodes} of {self.devices_per_node}"
            )

    @classmethod
    def of(
        cls,
        device: Device,
        *,
        devices: int,
        nodes: int = 1,
        link: str | None = None,
        network: str | None = None,
    ) -> Cluster:
        """Return a cluster of a product, with the links it usually has unless others are named.

        Args:
            device: The product.
            devices: How many in all; each node has the same share.
            nodes: In how many nodes.
            link: Within a node: a name of `links`, or as `find_link` reads it.
            network: Between nodes, likewise.

        Raises:
            InputError: if the devices cannot be shared out, or the product's links are not known.
            UnknownName: if there is no such link.
        """
        if nodes < 1 or devices < nodes or devices % nodes:
            raise InputError(f"{devices} devices cannot be shared out evenly among {nodes} nodes")
        inside = find_link(link) if link else link_of(device, network=False)
        between = find_link(network) if network else link_of(device, network=True) if nodes > 1 else inside
        return cls(inside=inside, between=between, devices_per_node=devices // nodes, nodes=nodes)

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return self.devices_per_node * self.nodes

    def group(self, size: int, *, stride: int = 1) -> ProcessGroup:
        """Return a group of devices that are `stride` apart, counted through node after node.

        Where a group begins within a node does not matter, unless it crosses nodes unevenly; then it is taken
        for one in which every device is in a node of its own, the slowest it can be.

        Raises:
            InputError: if there are not so many devices.
        """
        if size < 1 or stride < 1 or size * stride > self.devices:
            raise InputError(
                f"{size} devices, {stride} apart, are more than the {self.devices} of {self.nodes} node(s)"
            )
        per_node = self.devices_per_node
        within = size * stride <= per_node and per_node % (size * stride) == 0
        if within or self.nodes == 1:
            local = size
        elif per_node % stride == 0 and size % (per_node // stride) == 0:
            local = per_node // stride
        else:
            local = 1
        return ProcessGroup(local=local, nodes=size // local, inside=self.inside, between=self.between)

    def link_between(self, first: int, second: int, *, width: int = 1) -> Link:
        """Return the slowest link between devices ``first + i`` and ``second + i``, for i below `width`."""
        per_node = self.devices_per_node
        crosses = any((first + i) // per_node != (second + i) // per_node for i in range(width))
        return self.between if crosses else self.inside


@functools.cache
def _described() -> dict[str, Any]:
    text = resources.files("tunebench").joinpath("links.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["link"]
    return found


def _link(name: str, entry: Mapping[str, Any]) -> Link:
    about = ("products", "network", "source")
    return Link(name=name, **{key: value for key, value in entry.items() if key not in about})


def links() -> dict[str, Link]:
    """Return every link of `links.toml`, by name."""
    return {name: _link(name, entry) for name, entry in _described().items()}


def link_of(device: Device, *, network: bool) -> Link:
    """Return the link that a product usually has within a node, or between nodes.

    Raises:
        InputError: if that is not known.
    """
    for name, entry in _described().items():
        if device.name in entry["products"] and entry.get("network", False) == network:
            return _link(name, entry)
    which = "network between nodes" if network else "link within a node"
    raise InputError(
        f"the {which} of {device.name} is not known; name one of {', '.join(_described())}, or give GB/s in "
        "one direction for each device, such as 300 or 300:0.6 (with microseconds of latency)"
    )


def find_link(text: str) -> Link:
    """Return a link by name, or by its figures: ``"450"`` GB/s, ``"450:0.6"`` with microseconds of latency.

    Raises:
        UnknownName: if it is neither.
    """
    known = links()
    if text in known:
        return known[text]
    bandwidth, _, latency = text.partition(":")
    try:
        return Link(name=text, gb_s=float(bandwidth), latency_us=float(latency or 1))
    except ValueError:
        raise UnknownName("link", text, known) from None


def cluster_from_file(path: str) -> Cluster:
    """Read a cluster from a TOML file.

    `inside` and `between` are texts that `find_link` reads, or tables with the fields of `Link`; beside them
    stand `devices_per_node` and `nodes`. A single node needs no `between`.

    Raises:
        InputError: if the file cannot be read, or a field is missing or unknown.
    """
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
        for name in {"inside", "between"} & data.keys():
            data[name] = _read_link(data[name], name)
        if data.get("nodes", 1) == 1:
            data.setdefault("between", data["inside"])
        return Cluster(**data)
    except (OSError, tomllib.TOMLDecodeError, TypeError, KeyError) as error:
        raise InputError(f"cluster file {path}: {error}") from error


def _read_link(entry: str | Mapping[str, Any], name: str) -> Link:
    return find_link(entry) if isinstance(entry, str) else Link(**{"name": name, **entry})


__getattr__ = renamed(__name__, {"Group": "ProcessGroup"})
