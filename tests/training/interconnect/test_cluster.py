from __future__ import annotations

from pathlib import Path

import pytest

from tunebench import device
from tunebench.errors import InputError, UnknownName
from tunebench.training.interconnect.cluster import (
    Cluster,
    Link,
    ProcessGroup,
    cluster_from_file,
    find_link,
    link_of,
    links,
)
from tunebench.training.interconnect.collective import Collective, collective_us

A100 = device.find("a100-80-sxm")
FAST, SLOW = Link(name="fast", gb_s=300), Link(name="slow", gb_s=25)
TWO_NODES = Cluster(inside=FAST, between=SLOW, devices_per_node=8, nodes=2)


def test_products_that_are_described_have_links() -> None:
    for product in device.described().values():
        if product.name == "rtx-3060-laptop":  # the product is not used in nodes
            continue
        assert link_of(product, network=False).gb_s >= 12
        assert link_of(product, network=True).name.startswith("net-")


def test_every_product_of_a_link_is_described() -> None:
    from tunebench.training.interconnect import cluster

    named = {product for entry in cluster.link_tables()["link"].values() for product in entry["products"]}
    assert named <= set(device.described())


@pytest.mark.parametrize(
    ("name", "gb_s"),
    [("v100-sxm2", 150), ("a100-40-sxm", 300), ("h200-sxm", 450), ("b200", 900), ("l4", 31.5)],
)
def test_links_of_products(name: str, gb_s: float) -> None:
    assert link_of(device.find(name), network=False).gb_s == gb_s


def test_a_product_without_a_known_link_names_the_remedy() -> None:
    with pytest.raises(InputError, match=r"300:0\.6"):
        link_of(device.find("rtx-3060-laptop"), network=False)


def test_a_link_by_hand() -> None:
    assert find_link("nvlink3") == links()["nvlink3"]
    assert find_link("450:0.7") == Link(name="450:0.7", gb_s=450, latency_us=0.7)
    assert find_link("12.5").gb_s == 12.5
    with pytest.raises(UnknownName, match="nvlink3"):
        find_link("nvlnk3")
    with pytest.raises(InputError, match="a bandwidth above 0 GB/s"):
        find_link("-3")


def test_a_cluster_shares_devices_out() -> None:
    cluster = Cluster.of(A100, devices=16, nodes=2)
    assert (cluster.devices_per_node, cluster.devices) == (8, 16)
    assert (cluster.inside.name, cluster.between.name) == ("nvlink3", "net-200")
    assert Cluster.of(A100, devices=4, link="pcie4").inside.name == "pcie4"
    for devices, nodes in ((8, 1), (12, 2), (64, 8), (9, 3), (11, 11)):
        usual = Cluster.of(A100, devices=devices)
        assert (usual.nodes, usual.devices) == (nodes, devices)
    assert Cluster.of(A100, devices=64).between.name == "net-200"
    with pytest.raises(InputError, match="must divide"):
        Cluster.of(A100, devices=9, nodes=2)


@pytest.mark.parametrize(
    ("size", "stride", "local", "nodes"),
    [
        (1, 1, 1, 1),
        (4, 1, 4, 1),
        (16, 1, 8, 2),
        (2, 8, 1, 2),  # the same device of each node
        (4, 4, 2, 2),
        (4, 2, 4, 1),
        (3, 1, 1, 3),  # such groups may cross nodes: every device counts as in a different node
        (12, 1, 1, 12),
    ],
)
def test_groups_of_devices(size: int, stride: int, local: int, nodes: int) -> None:
    assert TWO_NODES.group(size, stride=stride) == ProcessGroup(
        local=local, nodes=nodes, inside=FAST, between=SLOW
    )


def test_within_one_node_every_group_is_local() -> None:
    cluster = Cluster(inside=FAST, between=FAST, devices_per_node=8)
    assert cluster.group(3, stride=2).local == 3


def test_a_group_needs_devices() -> None:
    with pytest.raises(InputError, match="exceed the 16"):
        TWO_NODES.group(9, stride=2)


def test_the_slowest_link_between_neighbours() -> None:
    assert TWO_NODES.link_between(0, 4, width=4) is FAST
    assert TWO_NODES.link_between(4, 8, width=4) is SLOW
    assert TWO_NODES.link_between(0, 3, width=6) is SLOW  # 5 and 8


def test_a_cluster_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'inside = "nvlink4"\nbetween = { gb_s = 40, latency_us = 3 }\ndevices_per_node = 4\nnodes = 2\n'
    )
    cluster = cluster_from_file(str(path))
    assert cluster.inside.reduces
    assert (cluster.between.gb_s, cluster.between.name, cluster.devices) == (40, "40 GB/s", 8)
    path.write_text('inside = "nvlink4"\nnodes = 2\n')
    with pytest.raises(InputError, match="between"):
        cluster_from_file(str(path))
    path.write_text('inside = "nvlink4"\nnode = 2\n')
    with pytest.raises(InputError, match="node"):
        cluster_from_file(str(path))


def test_oversubscribed_switches_slow_pairs_and_sends_but_no_rings() -> None:
    flat = Cluster(inside=FAST, between=SLOW, devices_per_node=8, nodes=64)
    tree = Cluster(
        inside=FAST, between=SLOW, devices_per_node=8, nodes=64, nodes_per_switch=16, oversubscription=4.0
    )
    nbytes = 2**30

    def us(cluster: Cluster, collective: Collective, devices: int) -> float:
        return float(collective_us(collective, nbytes, cluster.group(devices)))

    assert us(tree, "all-reduce", 512) == us(flat, "all-reduce", 512)
    assert us(tree, "all-to-all", 128) == us(flat, "all-to-all", 128)  # below one switch
    assert us(tree, "all-to-all", 512) == pytest.approx(4 * 48 / 63 * us(flat, "all-to-all", 512), rel=0.05)
    assert tree.link_between(0, 8, width=8).gb_s == 25
    assert tree.link_between(15 * 8, 16 * 8, width=8).gb_s == 25 / 4
    with pytest.raises(InputError, match="oversubscription of at least 1"):
        Cluster(inside=FAST, between=SLOW, nodes=2, oversubscription=0.5)
