"""Clusters of devices: `Link`, `Cluster`, and the `ProcessGroup` that runs a collective.

Figures of links are in `links.toml`. Other links are given as text, ``300`` or ``300:0.6`` (GB/s per
direction and device, latency in microseconds), or in a file (`cluster_from_file`).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from tunebench._deprecation import renamed
from tunebench._figure import significant
from tunebench._foreign_file import interpreting, read_table
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName

__all__ = [
    "PER_NODE",
    "Cluster",
    "Link",
    "ProcessGroup",
    "cluster_from_file",
    "described_link",
    "devices_of_node",
    "find_link",
    "is_network",
    "link_name",
    "link_of",
    "link_tables",
    "links",
    "usual_nodes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link that connects a device to others.

    Attributes:
        name: Name, such as ``nvlink3``.
        gb_s: Peak bandwidth in one direction per device, in 1e9 bytes per second.
        latency_us: Latency of one step of a collective with small messages.
        efficiency: Share of `gb_s` that large messages reach.
        reduces: Whether the switches can reduce (NVLink SHARP).
        ll128: Whether stores of 128 bytes arrive as a whole (NVLink), which NCCL's protocol LL128 needs.
        group_share: Share of the bandwidth that remains in groups of more than two devices; below 1 where
            their traffic crosses CPUs (PCI Express).
        peer_access: Whether devices write to the memory of each other. Without it every byte is staged in
            host memory (NCCL's transport SHM), at a rate that differs far between machines.
    """

    name: str
    gb_s: float
    latency_us: float = 1.0
    efficiency: float = 0.8
    reduces: bool = False
    ll128: bool = False
    group_share: float = 1.0
    peer_access: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.gb_s < float("inf") or not 0 <= self.latency_us < float("inf"):
            raise InputError(
                f"link {self.name}: expected a bandwidth above 0 GB/s and a latency of at least 0 us, got "
                f"{significant(self.gb_s)} GB/s and {significant(self.latency_us)} us"
            )
        if not 0 < self.efficiency <= 1:
            raise InputError(f"link {self.name}: efficiency must be in (0, 1], got {self.efficiency}")
        if not 0 < self.group_share <= 1:
            raise InputError(f"link {self.name}: group_share must be in (0, 1], got {self.group_share}")

    @property
    def bytes_per_us(self) -> float:
        """Bandwidth of large messages in one direction, in bytes per microsecond."""
        return self.gb_s * self.efficiency * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """Devices that take part in one collective: `local` devices in each of `nodes` nodes.

    Every device uses its own link between nodes, so a node with several devices has several of them.

    Attributes:
        local: Devices in each node.
        nodes: Number of nodes.
        inside: Link between the devices of a node.
        between: Link of each device to other nodes.
        crossing: Factor on the bytes that every device sends to every other one between nodes, where links
            above the first switches are oversubscribed. Rings and trees visit the nodes of a switch one after
            the other, and send at most one link's bytes to the next switch.
    """

    local: int
    nodes: int
    inside: Link
    between: Link
    crossing: float = 1.0

    def __post_init__(self) -> None:
        if self.local < 1 or self.nodes < 1:
            raise InputError(
                f"a process group needs at least one device, got {self.local} in {self.nodes} nodes"
            )

    @property
    def size(self) -> int:
        """Number of devices in the group."""
        return self.local * self.nodes


PER_NODE = 8
"""Most devices of a node, unless the caller or `links.toml` has another number for the product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes with the same number of devices of the same kind.

    Attributes:
        inside: Link between the devices of a node.
        between: Link of each device to other nodes.
        devices_per_node: Devices per node.
        nodes: Number of nodes.
        nodes_per_switch: Nodes whose adapters of equal number (rail) share a switch; 0 for all nodes.
        oversubscription: Bandwidth of the adapters at a switch over that of its links to other switches.
    """

    inside: Link
    between: Link
    devices_per_node: int = PER_NODE
    nodes: int = 1
    nodes_per_switch: int = 0
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.nodes < 1:
            raise InputError(
                f"a cluster needs at least one node of one device, got {self.nodes} of "
                f"{self.devices_per_node}"
            )
        if self.nodes_per_switch < 0 or not 1 <= self.oversubscription < float("inf"):
            raise InputError(
                "expected nodes_per_switch of at least 0 and oversubscription of at least 1, got "
                f"{self.nodes_per_switch} and {self.oversubscription}"
            )

    @classmethod
    def of(
        cls,
        device: Device,
        *,
        devices: int,
        nodes: int | None = None,
        link: str | None = None,
        network: str | None = None,
    ) -> Cluster:
        """Return a cluster of one product, with the product's usual links unless others are given.

        Args:
            device: The product.
            devices: Number of devices in total; every node gets the same share.
            nodes: Number of nodes; None for `usual_nodes`.
            link: Link within a node, by name or as text for `find_link`; None for the usual one.
            network: Link between nodes, by name or as text for `find_link`; None for the usual one.

        Raises:
            InputError: if the nodes do not divide the devices, or the product's links are unknown.
            UnknownName: if there is no link of that name.
        """
        if nodes is None:
            nodes = usual_nodes(device, devices) if devices > 0 else 1
        if nodes < 1 or devices < nodes or devices % nodes:
            raise InputError(f"{nodes} nodes must divide the number of devices, got {devices} devices")
        inside = find_link(link) if link else link_of(device, network=False)
        between = find_link(network) if network else link_of(device, network=True) if nodes > 1 else inside
        return cls(inside=inside, between=between, devices_per_node=devices // nodes, nodes=nodes)

    @property
    def devices(self) -> int:
        """Number of devices in total."""
        return self.devices_per_node * self.nodes

    def group(self, size: int, *, stride: int = 1) -> ProcessGroup:
        """Return a group of devices with ranks `stride` apart, where ranks count through node after node.

        A group that crosses nodes unevenly is treated as one with every device in a different node, the
        slowest case.

        Args:
            size: Number of devices in the group.
            stride: Distance between the ranks of neighbouring devices.

        Raises:
            InputError: if the cluster has too few devices.
        """
        if size < 1 or stride < 1 or size * stride > self.devices:
            raise InputError(
                f"{size} devices with stride {stride} exceed the {self.devices} devices of "
                f"{self.nodes} node(s)"
            )
        per_node = self.devices_per_node
        within = size * stride <= per_node and per_node % (size * stride) == 0
        if within or self.nodes == 1:
            local = size
        elif per_node % stride == 0 and size % (per_node // stride) == 0:
            local = per_node // stride
        else:
            local = 1
        return ProcessGroup(
            local=local,
            nodes=size // local,
            inside=self.inside,
            between=self.between,
            crossing=self._crossing(size * stride),
        )

    def _crossing(self, ranks: int) -> float:
        """Return the factor on bytes between all pairs of nodes of this many ranks."""
        nodes, near = -(-ranks // self.devices_per_node), self.nodes_per_switch
        if not near or nodes <= near:
            return 1.0
        return max(1.0, self.oversubscription * (nodes - near) / (nodes - 1))

    def link_between(self, first: int, second: int, *, width: int = 1) -> Link:
        """Return the slowest link between ranks ``first + i`` and ``second + i``, for i below `width`.

        All ranks send at the same time, so those of a switch share its links to other switches.
        """
        per_node = self.devices_per_node
        # Nodes change where either rank is the first one of a node.
        changes = {0, *range(-first % per_node, width, per_node), *range(-second % per_node, width, per_node)}
        nodes = {((first + i) // per_node, (second + i) // per_node) for i in changes}
        if all(left == right for left, right in nodes):
            return self.inside
        near = self.nodes_per_switch
        if near and any(left // near != right // near for left, right in nodes):
            return replace(self.between, gb_s=self.between.gb_s / self.oversubscription)
        return self.between


@functools.cache
def link_tables() -> dict[str, dict[str, Any]]:
    """Return the tables of `links.toml`: `link` between devices, `node`, and `host` to host memory."""
    text = resources.files("tunebench").joinpath("links.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _described() -> dict[str, Any]:
    return link_tables()["link"]


def _link(name: str, entry: Mapping[str, Any]) -> Link:
    about = ("products", "network", "source", "aliases")
    return Link(name=name, **{key: value for key, value in entry.items() if key not in about})


def links() -> dict[str, Link]:
    """Return every link of `links.toml`, by name."""
    return {name: _link(name, entry) for name, entry in _described().items()}


def link_name(text: str) -> str:
    """Return the name of the link that a text names, such as ``net-400`` for ``ib-400``; else the text."""
    aliases = {alias: name for name, entry in _described().items() for alias in entry.get("aliases", ())}
    return aliases.get(text, text)


def is_network(text: str) -> bool:
    """Return whether a text names a link between nodes."""
    return bool(_described().get(link_name(text), {}).get("network", False))


def link_of(device: Device, *, network: bool) -> Link:
    """Return the usual link of a product within a node or between nodes.

    Args:
        device: The product.
        network: Whether to return the link between nodes.

    Raises:
        InputError: if the link is unknown.
    """
    for name, entry in _described().items():
        if device.name in entry["products"] and entry.get("network", False) == network:
            return _link(name, entry)
    which = "network between nodes" if network else "link within a node"
    raise InputError(
        f"the {which} of {device.name} is not known; use one of {', '.join(_described())}, or "
        "GB/s per direction "
        "and device, such as 300 or 300:0.6 (with the latency in microseconds)"
    )


def devices_of_node(device: Device) -> int:
    """Return the number of devices in a usual node of a product: at most, in an NVLink domain of a rack."""
    devices, _ = _usual_node(device)
    return devices


def usual_nodes(device: Device, devices: int) -> int:
    """Return the fewest nodes that share devices equally, each with at most as many as a usual node.

    Nodes of several computers consist of whole ones where that is possible.

    Args:
        device: The product.
        devices: Number of devices in total.
    """
    most, tray = _usual_node(device)
    counts = [nodes for nodes in range(-(-devices // most), devices + 1) if devices % nodes == 0]
    return next((nodes for nodes in counts if nodes == 1 or devices // nodes % tray == 0), counts[0])


def _usual_node(device: Device) -> tuple[int, int]:
    """Return the most devices of a usual node of a product, and those of a computer of it."""
    for node in link_tables()["node"].values():
        if device.name in node["products"]:
            return node["devices"], node.get("tray", 1)
    return PER_NODE, 1


def find_link(text: str) -> Link:
    """Return a link by name, or by its figures: ``"450"`` GB/s, ``"450:0.6"`` with microseconds of latency.

    Raises:
        UnknownName: if the text is neither.
    """
    named_links = links()
    if (name := link_name(text)) in named_links:
        return named_links[name]
    bandwidth, _, latency = text.partition(":")
    try:
        return Link(name=text, gb_s=float(bandwidth), latency_us=float(latency or 1))
    except ValueError:
        raise UnknownName("link", text, named_links) from None


def cluster_from_file(path: str) -> Cluster:
    """Read a cluster from a TOML file.

    `inside` and `between` are texts for `find_link` or tables with the fields of `Link`. The other keys are
    `devices_per_node` and `nodes`. A single node needs no `between`.

    Raises:
        InputError: if the file cannot be read, or a field is missing or unknown.
    """
    data = read_table(path, "cluster file ")
    with interpreting(f"cluster file {path}"):
        for name in {"inside", "between"} & data.keys():
            entry = data[name]
            data[name] = find_link(entry) if isinstance(entry, str) else described_link(entry)
        if data.get("nodes", 1) == 1:
            data.setdefault("between", data["inside"])
        return Cluster(**data)


def described_link(entry: Mapping[str, Any]) -> Link:
    """Return the link of a table with the fields of `Link`, which is named after its bandwidth by default.

    Raises:
        InputError: if a field is invalid.
        TypeError: if a field is missing or unknown.
    """
    return Link(**{"name": f"{entry.get('gb_s')} GB/s", **entry})


__getattr__ = renamed(__name__, {"Group": "ProcessGroup"})
