"""Clusters from text and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebench.device import find
from tunebench.errors import InputError, UnknownName
from tunebench.training.cluster import TrainingCluster
from tunebench.training.interconnect.cluster import Cluster


def test_text_gives_devices_links_memory_and_price() -> None:
    machine = TrainingCluster.parse("64 x h100-sxm, 4 a node, nvlink4, net-200, 60GB, $2.5/h")
    assert (machine.device.name, machine.devices, machine.links.nodes) == ("h100-sxm", 64, 16)
    assert (machine.links.inside.name, machine.links.between.gb_s) == ("nvlink4", 25)
    assert (machine.memory_bytes, machine.price_per_hour) == (60 * 10**9, 2.5)


def test_usual_links_and_memory_of_the_product_are_the_default() -> None:
    machine = TrainingCluster.parse("16 x a100-80-sxm")
    assert (machine.links.inside.name, machine.links.devices_per_node) == ("nvlink3", 8)
    assert machine.memory_bytes == machine.device.usable_memory_bytes
    assert TrainingCluster.parse("2 x l4, 0.7/h").price_per_hour == 0.7
    assert TrainingCluster.parse("2 x l4, 12").links.inside.gb_s == 12
    assert TrainingCluster.parse("16 x h100-sxm, 300, 12.5:5").links.between.latency_us == 5


def test_file_has_the_same_fields_and_links_as_tables(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'product = "h100-sxm"\nnodes = 4\ndevices_per_node = 8\ninside = "nvlink4"\nmemory = "70GB"\n'
        "price_per_hour = 2\n[between]\ngb_s = 50\nlatency_us = 3\nefficiency = 0.9\n"
    )
    machine = TrainingCluster.of(str(path))
    assert (machine.devices, machine.memory_bytes, machine.price_per_hour) == (32, 70 * 10**9, 2)
    assert machine.links.between.efficiency == 0.9
    assert machine.with_faster_links(2).links.between.gb_s == 100


def test_power_limit_is_that_of_each_device(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('product = "h100-sxm"\ndevices_per_node = 8\npower_limit_w = 500\n')
    for machine in (TrainingCluster.of(str(path)), TrainingCluster.parse("8 x h100-sxm, 500 W")):
        assert machine.device.power_limit_w == 500
        assert machine.name.startswith("8 x h100-sxm at 500 W, 8 a node")
    assert TrainingCluster.parse("8 x h100-sxm").device.power_limit_w is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100-sxm", "a number of devices first"),
        ("12 x h100-sxm", "cannot be divided into nodes of 8"),
        ("0 x h100-sxm", "expected 1 device or more, got 0"),
        ("8 x h100-sxm, nvlink3, nvlink4, net-100", "two links between"),
        ("8 x h100-sxm, $0", "above 0"),
    ],
)
def test_mistakes_in_a_text_are_explained(text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        TrainingCluster.parse(text)


def test_unknown_names_list_valid_ones() -> None:
    with pytest.raises(UnknownName, match="nvlink4"):
        TrainingCluster.parse("8 x h100-sxm, nvlonk")
    with pytest.raises(UnknownName, match=r"\.5"):  # a shell has replaced the $2 of a price
        TrainingCluster.parse("8 x h100-sxm, .5")
    with pytest.raises(UnknownName, match="h100-sxm"):
        TrainingCluster.parse("8 x h101-sxm")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nodes = 1", "product is missing"),
        ('product = "l4"\nnode = 2', "unknown key node"),
        ('product = "l4"\nnodes = 0', "nodes must be"),
        ('product = "l4"\npower_limit_w = 0', "power_limit_w must be a power"),
        ('product = "l4"\ninside = {speed = 2}', "inside"),
        ("product =", "cluster file"),
    ],
)
def test_mistakes_in_a_file_are_explained(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=expected):
        TrainingCluster.of(str(path))


@pytest.mark.parametrize(
    ("text", "inside", "between"),
    [
        ("64 x h100-sxm, 8 a node, nvlink, ib-400", "nvlink4", "net-400"),
        ("16 x a100-80-sxm, hdr, nvlink", "nvlink3", "net-200"),
        ("16 x l4, 8 a node, pcie, roce-100", "pcie4-no-p2p", "net-100"),
        ("16 x l4, 8 a node, pcie, omni-path-100", "pcie4-no-p2p", "net-100"),
        ("16 x l4, 8 a node, pcie, ethernet-25", "pcie4-no-p2p", "net-25"),
    ],
)
def test_links_have_the_names_that_people_use(text: str, inside: str, between: str) -> None:
    links = TrainingCluster.parse(text).links
    assert (links.inside.name, links.between.name) == (inside, between)


def test_links_of_figures_are_named_after_their_bandwidth(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('product = "a100-80-sxm"\nnodes = 2\ndevices_per_node = 8\n[between]\ngb_s = 25\n')
    assert (
        TrainingCluster.of(str(path)).name == "16 x a100-80-sxm, 8 a node by nvlink3, 25 GB/s between 2 nodes"
    )
    alone = TrainingCluster.parse("2 x gh200")
    assert alone.name == "2 x gh200, 1 a node, net-400 between 2 nodes"


@pytest.mark.parametrize(
    ("devices", "per_node"), [(8, 8), (72, 72), (100, 20), (144, 72), (256, 64), (1152, 72), (146, 2)]
)
def test_devices_of_a_rack_are_in_equal_nvlink_domains_of_whole_trays(devices: int, per_node: int) -> None:
    for product in ("gb200", "gb300"):
        links = TrainingCluster.parse(f"{devices} x {product}").links
        assert (links.devices, links.devices_per_node, links.inside.name) == (devices, per_node, "nvlink5")
        assert Cluster.of(find(product), devices=devices).devices_per_node == per_node


def test_the_nvlink_domain_of_a_cluster_is_shown_and_overridden() -> None:
    rack = "(an NVLink domain has up to 72)"
    assert TrainingCluster.parse("256 x gb300").name == (
        f"256 x gb300, 64 a node {rack} by nvlink5, net-800 between 4 nodes"
    )
    trays = TrainingCluster.parse("256 x gb200, 4 a node, net-200")
    assert trays.name == f"256 x gb200, 4 a node {rack} by nvlink5, net-200 between 64 nodes"


def test_a_kind_of_link_that_a_product_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="the link of l4 within a node is pcie4-no-p2p, not nvlink"):
        TrainingCluster.parse("8 x l4, nvlink")


def test_a_file_names_links_as_a_text_does(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'product = "b200"\nnodes = 2\ndevices_per_node = 8\ninside = "nvlink"\nbetween = "infiniband-800"\n'
    )
    links = TrainingCluster.of(str(path)).links
    assert (links.inside.name, links.between.name) == ("nvlink5", "net-800")
