"""Clusters that train a model: devices, links, memory and price, from text or from a file.

    TrainingCluster.parse("64 x h100-sxm, 8 a node, nvlink4, net-400")
    TrainingCluster.parse("8 x l4, 24GB, 0.7/h")
    TrainingCluster.parse("64 x h100-sxm, 500 W")
    TrainingCluster.parse("16 x h100-sxm, host 2TB 400, nvme 30TB 25/12")
    TrainingCluster.read("cluster.toml")

A file has the keys `product`, `nodes`, `devices_per_node`, and optionally `inside` and `between` (links by
name, by figures, or tables with the fields of `Link`), `nodes_per_switch` and `oversubscription`, `memory`,
`memory_margin` (share of it that plans leave free; 0.07), `power_limit_w` (watts of each device; by default
those of the product), `host_memory` with `host_gb_s`, `host_update_gb_s` and
`host_link`, `devices_per_host_link` and `host_duplex`, `nvme` with `nvme_read_gb_s` and `nvme_write_gb_s`,
and `price_per_hour`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebench import device as devices
from tunebench._figure import significant
from tunebench._foreign_file import interpreting, read_table
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName
from tunebench.training.interconnect.cluster import (
    PER_NODE,
    Cluster,
    Link,
    described_link,
    devices_of_node,
    find_link,
    is_network,
    link_name,
    link_of,
    links,
    usual_nodes,
)
from tunebench.training.memory.budget import budget_bytes
from tunebench.training.memory.host_link import host_link, host_link_of
from tunebench.training.memory.step import HostLink
from tunebench.training.steps.overlap import node_channels

__all__ = ["TrainingCluster"]

EXAMPLE = '"64 x h100-sxm, 8 a node, nvlink4, net-400"'

_KINDS = ("nvlink", "pcie")
"""Kinds of links within a node: each is the generation that a product has."""

MEMORY_MARGIN = 0.07
"""Share of the usable memory that plans leave free by default: predicted memory is off by 6.5 %."""

MOST_NODES = 1 << 20
"""Most nodes of a cluster, and devices of a node."""

HOST_UPDATE_GB_S = 40.0
"""Bandwidth of host memory that DeepSpeed's CPU-Adam reaches on a node, in 1e9 bytes per second.

Its 28 bytes per parameter, over two published times: 8.2 s for 11.6e9 parameters, and 1.125 s more per step
with states in host memory for 1.54e9 on two EPYC 7742, which have ten times the bandwidth (copies included).
Updates that were left out took 1.2 to 4.1 times as long as predicted. Source: deepspeedai/DeepSpeed, pull
request 735 and `blogs/zenflow-corebinding`; `python -m benchmarks.plan_storage`.
"""

_COUNT = re.compile(r"(?P<count>\d+)\s*(x|\*)\s*(?P<product>[\w. -]*[\w.-])")
_PER_NODE = re.compile(r"(?P<count>\d+)\s*(a|per)\s*node")
_SIZE = re.compile(r"\d+(\.\d+)?\s*[kmgt]i?b", re.IGNORECASE)
_PRICE = re.compile(r"(\$\s*(?P<price>\d+(\.\d+)?)(\s*/\s*h)?|(?P<hourly>\d+(\.\d+)?)\s*/\s*h)")

_POWER = re.compile(r"(?P<watts>\d+(\.\d+)?)\s*w", re.IGNORECASE)

_HOST = re.compile(r"host\s+(?P<size>\S+)\s+(?P<gb_s>\d+(\.\d+)?)")
_NVME = re.compile(r"nvme\s+(?P<size>\S+)\s+(?P<read>\d+(\.\d+)?)/(?P<write>\d+(\.\d+)?)")

_KEYS = (
    "product",
    "nodes",
    "devices_per_node",
    "inside",
    "between",
    "nodes_per_switch",
    "oversubscription",
    "memory",
    "memory_margin",
    "power_limit_w",
    "host_memory",
    "host_gb_s",
    "host_update_gb_s",
    "host_link",
    "devices_per_host_link",
    "host_duplex",
    "nvme",
    "nvme_read_gb_s",
    "nvme_write_gb_s",
    "price_per_hour",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCluster:
    """Equal nodes of one product, with what training needs of them.

    Attributes:
        device: One of the devices.
        links: Nodes and links.
        memory_bytes: Memory of each device that programs can use.
        memory_margin: Share of it that plans leave free.
        host_bytes: Host memory of each node for states of the optimizer; 0 if none may be used.
        host_gb_s: Bandwidth of the host memory of a node, reads and writes together, in 1e9 bytes per second.
        host_update_gb_s: Bandwidth that updates of parameters in the host memory of a node reach, at most
            `host_gb_s`; 0 for `HOST_UPDATE_GB_S`.
        host_link: Link of each device to host memory; None if no host memory is used.
        devices_per_host_link: Devices that share one such link, as behind a switch.
        host_duplex: Whether copies in both directions run at the same time at full bandwidth.
        nvme_bytes: NVMe of each node; 0 if none may be used.
        nvme_read_gb_s: Bandwidth of reads from the NVMe of a node, in 1e9 bytes per second.
        nvme_write_gb_s: Bandwidth of writes.
        price_per_hour: Price of a device and hour; None if it is not known.
    """

    device: Device
    links: Cluster
    memory_bytes: int
    memory_margin: float = MEMORY_MARGIN
    host_bytes: int = 0
    host_gb_s: float = 0.0
    host_update_gb_s: float = 0.0
    host_link: HostLink | None = None
    devices_per_host_link: int = 1
    host_duplex: bool = True
    nvme_bytes: int = 0
    nvme_read_gb_s: float = 0.0
    nvme_write_gb_s: float = 0.0
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise InputError(
                f"the memory of {self.device.name} is not known: give it, such as memory = '80GB' in a file "
                "or 80GB in a text"
            )
        margin = self.memory_margin
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1:
            raise InputError(f"memory_margin must be a share from 0 to below 1, such as 0.07, got {margin!r}")
        if self.host_bytes and (self.host_gb_s <= 0 or self.host_link is None):
            raise InputError(
                "host_memory also needs host_gb_s, the bandwidth of the host memory of a node in "
                "GB/s, such as 400"
            )
        if self.host_update_gb_s < 0:
            raise InputError(
                f"host_update_gb_s must be a bandwidth in GB/s, such as 40, got {self.host_update_gb_s}"
            )
        share, per_node = self.devices_per_host_link, self.links.devices_per_node
        if not isinstance(share, int) or share < 1 or per_node % share:
            raise InputError(
                f"devices_per_host_link must divide the {per_node} devices of a node, got {share}"
            )
        if not isinstance(self.host_duplex, bool):
            raise InputError(f"host_duplex must be true or false, got {self.host_duplex!r}")
        if self.nvme_bytes and (min(self.nvme_read_gb_s, self.nvme_write_gb_s) <= 0 or not self.host_bytes):
            raise InputError(
                "nvme also needs nvme_read_gb_s and nvme_write_gb_s, the bandwidth of a node in GB/s, and "
                "host_memory, through which its data moves"
            )
        if self.price_per_hour is not None and self.price_per_hour <= 0:
            raise InputError(f"price_per_hour must be above 0, got {self.price_per_hour}")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.links.devices

    @property
    def update_gb_s(self) -> float:
        """Bandwidth of host memory that updates of a node reach, reads and writes together."""
        return min(self.host_update_gb_s or HOST_UPDATE_GB_S, self.host_gb_s)

    @property
    def limit_bytes(self) -> int:
        """Memory of each device that a plan may need by prediction: the usable one without the margin."""
        return int((1 - self.memory_margin) * self.memory_bytes)

    @property
    def channels(self) -> int:
        """Channels of an NCCL communicator in a node."""
        return node_channels(self.links.inside)

    @property
    def name(self) -> str:
        """Devices and links as text."""
        cluster = self.links
        between = f", {cluster.between.name} between {cluster.nodes} nodes" if cluster.nodes > 1 else ""
        limit_w = self.device.power_limit_w
        limited = f" at {significant(limit_w)} W" if limit_w else ""
        inside = f" by {cluster.inside.name}" if cluster.devices_per_node > 1 else ""
        domain = ""
        if devices_of_node(self.device) > PER_NODE:
            domain = f" (an NVLink domain has up to {devices_of_node(self.device)})"
        return (
            f"{cluster.devices} x {self.device.name}{limited}, {cluster.devices_per_node} a node"
            f"{domain}{inside}{between}"
        )

    def with_nodes(self, nodes: int) -> Cluster:
        """Return the links of some of the nodes."""
        return replace(self.links, nodes=nodes)

    def with_faster_links(self, times: float) -> TrainingCluster:
        """Return the cluster with this multiple of the bandwidth of all links."""
        cluster = self.links
        return replace(
            self,
            links=replace(
                cluster,
                inside=replace(cluster.inside, gb_s=cluster.inside.gb_s * times),
                between=replace(cluster.between, gb_s=cluster.between.gb_s * times),
            ),
        )

    def with_faster_storage(self, times: float) -> TrainingCluster:
        """Return the cluster with this multiple of the bandwidth of host memory, its links and NVMe."""
        link = self.host_link
        if link is not None:
            link = replace(
                link, to_host_gb_s=link.to_host_gb_s * times, to_device_gb_s=link.to_device_gb_s * times
            )
        return replace(
            self,
            host_link=link,
            host_gb_s=self.host_gb_s * times,
            nvme_read_gb_s=self.nvme_read_gb_s * times,
            nvme_write_gb_s=self.nvme_write_gb_s * times,
        )

    @classmethod
    def of(cls, text: str) -> TrainingCluster:
        """Return a cluster from the name of a TOML file, or from text.

        Raises:
            InputError: if the file or the text is invalid.
        """
        return cls.read(text) if text.endswith(".toml") else cls.parse(text)

    @classmethod
    def parse(cls, text: str) -> TrainingCluster:
        """Return a cluster from text: devices, then devices per node, links, memory and price in any order.

        Raises:
            InputError: if an item is unknown, or nodes do not divide the devices.
        """
        first, *items = (item.strip() for item in text.split(","))
        devices_match = _COUNT.fullmatch(first)
        if devices_match is None:
            raise InputError(f"cluster {text!r}: expected a number of devices first, such as {EXAMPLE}")
        count = int(devices_match["count"])
        values: dict[str, Any] = {"product": devices_match["product"]}
        per_node = _devices_per_node(devices.find(devices_match["product"]), count)
        for item in items:
            if match := _PER_NODE.fullmatch(item):
                per_node = int(match["count"])
            elif match := _PRICE.fullmatch(item):
                values["price_per_hour"] = float(match["price"] or match["hourly"])
            elif item.startswith(("host", "nvme")):
                values.update(_stored(item))
            elif _SIZE.fullmatch(item):
                values["memory"] = item
            elif match := _POWER.fullmatch(item):
                values["power_limit_w"] = float(match["watts"])
            else:
                values[_role(item, values)] = item
        if count < 1:
            raise InputError(f"cluster {text!r}: expected 1 device or more, got {count}")
        if per_node < 1 or count % per_node:
            raise InputError(
                f"cluster {text!r}: {count} devices cannot be divided into nodes of {per_node}: add the "
                "number per node, such as '4 a node'"
            )
        return cls.of_fields(
            {**values, "nodes": count // per_node, "devices_per_node": per_node}, f"cluster {text!r}"
        )

    @classmethod
    def read(cls, path: str | Path) -> TrainingCluster:
        """Return a cluster from a TOML file.

        Raises:
            InputError: if the file cannot be read, or a key is missing, unknown or invalid.
        """
        return cls.of_fields(read_table(path, "cluster file "), f"cluster file {path}")

    @classmethod
    def of_fields(cls, given: Mapping[str, Any], what: str) -> TrainingCluster:
        """Return a cluster from the keys of a file.

        Args:
            given: Value of each key.
            what: Name of the source, for errors.

        Raises:
            InputError: if a key is missing, unknown or invalid.
        """
        unknown = sorted(set(given) - set(_KEYS))
        if unknown or "product" not in given:
            problem = f"got the unknown key {unknown[0]}" if unknown else "product is missing"
            raise InputError(
                f"{what}: expected the keys {', '.join(_KEYS)}, with product required; {problem}"
            )
        with interpreting(what):
            return cls._of_known(given, what)

    @classmethod
    def _of_known(cls, given: Mapping[str, Any], what: str) -> TrainingCluster:
        """Return a cluster from the keys of a file, which are known."""
        product = _limited(devices.find(given["product"]), given.get("power_limit_w"), what)
        counts = {name: given.get(name, 1) for name in ("nodes", "devices_per_node")}
        for name, value in counts.items():
            if not isinstance(value, int) or not 1 <= value <= MOST_NODES:
                raise InputError(f"{what}: {name} must be a number from 1 to {MOST_NODES}, got {value!r}")
        inside = _link(given.get("inside"), "inside", what, product) or link_of(product, network=False)
        between = inside
        if counts["nodes"] > 1:
            between = _link(given.get("between"), "between", what, product) or link_of(product, network=True)
        host_bytes = _size(given.get("host_memory"))
        return cls(
            device=product,
            links=Cluster(
                inside=inside,
                between=between,
                nodes_per_switch=given.get("nodes_per_switch", 0),
                oversubscription=given.get("oversubscription", 1.0),
                **counts,
            ),
            memory_bytes=_size(given.get("memory")) or product.usable_memory_bytes,
            memory_margin=given.get("memory_margin", MEMORY_MARGIN),
            host_bytes=host_bytes,
            host_gb_s=float(given.get("host_gb_s", 0.0)),
            host_update_gb_s=float(given.get("host_update_gb_s", 0.0)),
            host_link=_host_link(given.get("host_link"), product) if host_bytes else None,
            devices_per_host_link=given.get("devices_per_host_link", 1),
            host_duplex=given.get("host_duplex", True),
            nvme_bytes=_size(given.get("nvme")),
            nvme_read_gb_s=float(given.get("nvme_read_gb_s", 0.0)),
            nvme_write_gb_s=float(given.get("nvme_write_gb_s", 0.0)),
            price_per_hour=given.get("price_per_hour"),
        )


def _devices_per_node(product: Device, count: int) -> int:
    """Return the devices of each node: usual nodes are full, and NVLink domains of racks equal."""
    usual = devices_of_node(product)
    return count // usual_nodes(product, count) if usual > PER_NODE and count else min(usual, count)


def _limited(product: Device, power_limit_w: Any, source: str) -> Device:
    """Return a product with a power limit, if one is given."""
    if power_limit_w is None:
        return product
    if isinstance(power_limit_w, bool) or not isinstance(power_limit_w, int | float) or power_limit_w <= 0:
        raise InputError(f"{source}: power_limit_w must be a power in watts above 0, got {power_limit_w!r}")
    return replace(product, power_limit_w=float(power_limit_w))


def _stored(item: str) -> dict[str, Any]:
    """Return the fields of host memory or NVMe of a text."""
    if match := _HOST.fullmatch(item):
        return {"host_memory": match["size"], "host_gb_s": float(match["gb_s"])}
    if match := _NVME.fullmatch(item):
        read, write = float(match["read"]), float(match["write"])
        return {"nvme": match["size"], "nvme_read_gb_s": read, "nvme_write_gb_s": write}
    raise InputError(
        f"cluster: {item!r}: expected 'host SIZE GB/s' such as 'host 2TB 400', or 'nvme SIZE READ/WRITE' "
        "such as 'nvme 30TB 25/12', of each node"
    )


def _role(item: str, values: Mapping[str, Any]) -> str:
    """Return which link an item of a text is: a network by its name, else the first one is within a node."""
    link_names = links()
    named = link_name(item) in link_names or item in _KINDS
    if not named and not re.fullmatch(r"\d[\d.]*(:[\d.]+)?", item):
        raise UnknownName(
            "link",
            item,
            link_names,
            f"Or give '8 a node', GB/s, a memory such as 80GB, a power limit such as 500W or a price such as "
            f"2.5/h: {EXAMPLE}",
        )
    network = is_network(item) or "inside" in values
    role = "between" if network else "inside"
    if role in values:
        raise InputError(
            f"cluster: two links {role} nodes are given, {values[role]} and {item}: expected one"
        )
    return role


def _link(entry: Any, name: str, source: str, product: Device) -> Link | None:
    if entry is None or isinstance(entry, Link):
        return entry
    if entry in _KINDS:
        usual = link_of(product, network=False)
        if not usual.name.startswith(entry):
            raise InputError(
                f"{source}: the link of {product.name} within a node is {usual.name}, not {entry}"
            )
        return usual
    if isinstance(entry, Mapping):
        try:
            return described_link(entry)
        except TypeError as error:
            raise InputError(f"{source}: {name}: {error}") from error
    return find_link(str(entry))


def _host_link(entry: str | None, product: Device) -> HostLink:
    return host_link_of(product) if entry is None else host_link(entry)


def _size(entry: Any) -> int:
    """Return a size in bytes; 0 for none."""
    return 0 if entry is None else budget_bytes(entry, 1)
