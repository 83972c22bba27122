"""Clusters of nodes with different products: `MixedCluster`.

    MixedCluster.parse("8 x a100-80-sxm + 8 x h100-sxm, 8 a node, net-200")
    MixedCluster.read("cluster.toml")

A file has a table `[[group]]` for each product, with the keys of a cluster file. The other keys of the file
hold for all groups that do not have them; `between` is also the link between groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench._foreign_file import interpreting, read_table
from tunebench.errors import InputError
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.interconnect.cluster import (
    Link,
    described_link,
    find_link,
    is_network,
    link_of,
)

__all__ = ["MixedCluster", "is_mixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCluster:
    """Groups of equal nodes.

    Attributes:
        groups: Clusters of one product each.
        between: Link between devices of different groups.
    """

    groups: tuple[TrainingCluster, ...]
    between: Link

    def __post_init__(self) -> None:
        if len(self.groups) < 2:
            raise InputError(
                f"a cluster of different products needs two groups of nodes, got {len(self.groups)}"
            )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(group.devices for group in self.groups)

    @property
    def name(self) -> str:
        """Devices and links as text."""
        return f"{' + '.join(group.name for group in self.groups)}, {self.between.name} between them"

    @classmethod
    def of(cls, text: str) -> MixedCluster:
        """Return a cluster from the name of a TOML file, or from text.

        Raises:
            InputError: if the file or the text is invalid.
        """
        return cls.read(text) if text.endswith(".toml") else cls.parse(text)

    @classmethod
    def parse(cls, text: str) -> MixedCluster:
        """Return a cluster from the devices of each group, joined by +, and what holds for all of them.

        Raises:
            InputError: if an item is unknown, or nodes do not divide the devices of a group.
        """
        first, *items = (item.strip() for item in text.split(","))
        groups = [TrainingCluster.parse(", ".join([devices.strip(), *items])) for devices in first.split("+")]
        network = next((item for item in items if is_network(item)), None)
        return cls(groups=tuple(groups), between=find_link(network) if network else _slowest(groups))

    @classmethod
    def read(cls, path: str | Path) -> MixedCluster:
        """Return a cluster from a TOML file.

        Raises:
            InputError: if the file cannot be read, or a key is missing, unknown or invalid.
        """
        shared = _file(path)
        tables = shared.pop("group", None)
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise InputError(f"cluster file {path}: expected tables [[group]] with product and nodes")
        groups = [
            TrainingCluster.of_fields({**shared, **table}, f"cluster file {path}, group {index}")
            for index, table in enumerate(tables)
        ]
        between = shared.get("between")
        if between is None:
            return cls(groups=tuple(groups), between=_slowest(groups))
        with interpreting(f"cluster file {path}: between"):
            link = described_link(between) if isinstance(between, dict) else find_link(str(between))
        return cls(groups=tuple(groups), between=link)


def is_mixed(text: str) -> bool:
    """Return whether a text or a file describes groups of different products.

    Raises:
        InputError: if the file cannot be read.
    """
    return "group" in _file(text) if text.endswith(".toml") else "+" in text.split(",")[0]


def _file(path: str | Path) -> dict[str, Any]:
    return read_table(path, "cluster file ")


def _slowest(groups: list[TrainingCluster]) -> Link:
    """Return the slowest link between nodes of all groups; of one node, the usual link of its product."""
    group_links = [
        group.links.between if group.links.nodes > 1 else link_of(group.device, network=True)
        for group in groups
    ]
    return min(group_links, key=lambda link: link.bytes_per_us)
