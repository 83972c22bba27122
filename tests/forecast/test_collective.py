from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench import device
from tunebench.errors import UnknownName
from tunebench.forecast.parallel.cluster import Cluster, Link, ProcessGroup
from tunebench.forecast.parallel.collective import (
    BASE_US,
    BULK_STEPS,
    COLLECTIVES,
    REACHES,
    Collective,
    CollectiveMethod,
    bus_gb_s,
    collective_methods,
    collective_us,
    send_us,
)

LINK = Link(name="wire", gb_s=100, latency_us=1, efficiency=0.5)  # 50,000 bytes a microsecond
NETWORK = Link(name="network", gb_s=10, latency_us=4, efficiency=1)
SIZES = np.array([0, 1, 1e3, 1e6, 1e9, 1e12])

links = st.builds(
    Link,
    name=st.just("any"),
    gb_s=st.floats(1, 2000),
    latency_us=st.floats(0, 100),
    efficiency=st.floats(0.1, 1),
    reduces=st.booleans(),
)
groups = st.builds(
    ProcessGroup, local=st.integers(1, 16), nodes=st.integers(1, 64), inside=links, between=links
)
collectives = st.sampled_from(COLLECTIVES)


def node(devices: int, link: Link = LINK) -> ProcessGroup:
    return ProcessGroup(local=devices, nodes=1, inside=link, between=link)


def way(
    collective: Collective, group: ProcessGroup, algorithm: str = "ring", protocol: str = "bulk"
) -> CollectiveMethod:
    return next(
        each
        for each in collective_methods(collective, group)
        if (each.algorithm, each.protocol) == (algorithm, protocol)
    )


# ----------------------------------------------------------------------------------- closed forms


def test_a_ring_in_one_node() -> None:
    got = way("all-reduce", node(8))
    assert got.latency_us == pytest.approx(BASE_US + BULK_STEPS * 14)
    assert got.us_per_byte == pytest.approx(2 * 7 / 8 / 50e3)


def test_ring_across_nodes_uses_every_link_of_a_node() -> None:
    group = ProcessGroup(local=8, nodes=4, inside=LINK, between=NETWORK)
    got = way("all-reduce", group)
    assert got.us_per_byte == pytest.approx(max(2 * 31 / 32 / 50e3, 2 * 31 / 32 / 8 / 10e3))
    assert got.latency_us == pytest.approx(BASE_US + BULK_STEPS * (56 * 1 + 6 * 4))


def test_tree_steps_grow_with_the_logarithm_of_nodes() -> None:
    group = ProcessGroup(local=1, nodes=64, inside=LINK, between=NETWORK)
    got = way("all-reduce", group, "tree", "low latency")
    assert got.latency_us == pytest.approx(BASE_US + 2 * 6 * 4)
    assert got.us_per_byte == pytest.approx(4 * 2 / 10e3)


def test_in_switch_reduction_sends_each_byte_about_once() -> None:
    adding = Link(name="nvlink", gb_s=100, latency_us=1, efficiency=0.5, reduces=True)
    got = way("all-reduce", node(8, adding), "in-network")
    assert got.us_per_byte == pytest.approx(9 / 8 / (50e3 * 0.85))
    assert {each.algorithm for each in collective_methods("all-reduce", node(8))} == {"ring", "tree"}


def test_all_to_all_does_not_send_a_device_its_own_part() -> None:
    assert way("all-to-all", node(4), "pairs").us_per_byte == pytest.approx(3 / 4 / 50e3)
    group = ProcessGroup(local=2, nodes=2, inside=LINK, between=NETWORK)
    assert way("all-to-all", group, "pairs").us_per_byte == pytest.approx(1 / 2 / 10e3)


def test_send_takes_one_step_and_the_bandwidth() -> None:
    assert send_us(50e6, LINK) == pytest.approx(BASE_US + BULK_STEPS + 1000)
    assert send_us(0, LINK) == 0


# ------------------------------------------------------------------------------------- identities


@given(groups)
def test_all_reduce_is_reduce_scatter_and_all_gather(group: ProcessGroup) -> None:
    both = [way(name, group) for name in ("reduce-scatter", "all-gather")]
    base = BASE_US if group.size > 1 else 0.0
    whole = way("all-reduce", group)
    assert whole.us_per_byte == pytest.approx(sum(each.us_per_byte for each in both))
    assert whole.latency_us == pytest.approx(sum(each.latency_us for each in both) - base)


@given(collectives, groups)
def test_times_rise_with_bytes_and_are_never_negative(collective: Collective, group: ProcessGroup) -> None:
    got = collective_us(collective, SIZES, group)
    assert got.shape == SIZES.shape
    assert got[0] == 0
    assert (np.diff(got) >= 0).all()


@given(collectives, st.integers(1, 31), links)
def test_more_devices_never_take_less(collective: Collective, devices: int, link: Link) -> None:
    fewer, more = (collective_us(collective, SIZES, node(count, link)) for count in (devices, devices + 1))
    if collective == "all-reduce" and link.reduces and devices > 1:
        adds = way(
            "all-reduce", node(devices, link), "in-network"
        )  # (n + 1) / n falls: a device sends a smaller share
        assert (more >= np.minimum(fewer, adds.us(SIZES) * 2 / 3) - 1e-9).all()
    else:
        assert (more >= fewer * (1 - 1e-12)).all()


@given(collectives, groups)
def test_a_faster_link_never_takes_longer(collective: Collective, group: ProcessGroup) -> None:
    twice = Link(name="twice", gb_s=2 * group.inside.gb_s, latency_us=group.inside.latency_us, efficiency=1)
    quick = ProcessGroup(local=group.local, nodes=group.nodes, inside=twice, between=group.between)
    plain = Link(
        name="plain",
        gb_s=group.inside.gb_s,
        latency_us=group.inside.latency_us,
        efficiency=group.inside.efficiency,
    )
    slow = ProcessGroup(local=group.local, nodes=group.nodes, inside=plain, between=group.between)
    assert (collective_us(collective, SIZES, quick) <= collective_us(collective, SIZES, slow)).all()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collective_of_one_device_takes_no_time(collective: Collective) -> None:
    assert (collective_us(collective, SIZES, node(1)) == 0).all()


def test_large_messages_reach_the_bandwidth_and_small_ones_the_latency() -> None:
    much = collective_us("all-reduce", 1e13, node(8))
    assert bus_gb_s("all-reduce", 1e13, much, 8) == pytest.approx(50, rel=1e-4)
    assert collective_us("all-reduce", 4, node(8)) == pytest.approx(BASE_US + 14, rel=1e-3)


def test_bus_bandwidth_follows_nccl_tests() -> None:
    assert bus_gb_s("all-reduce", 8e9, 64e3, 8) == pytest.approx(8e9 / 64e3 * 1.75 / 1e3)
    assert bus_gb_s("all-gather", 8e9, 64e3, 8) == pytest.approx(8e9 / 64e3 * 0.875 / 1e3)
    assert bus_gb_s("broadcast", 8e9, 64e3, 8) == pytest.approx(8e9 / 64e3 / 1e3)


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(UnknownName, match="all-reduce"):
        collective_methods("gossip", node(2))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- measured

CURVES: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parents[1] / "data/nccl_tests.toml").read_text(encoding="utf-8")
)["curve"]


def over_measured(curve: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    cluster = Cluster.of(device.find(curve["device"]), devices=8 * curve["nodes"], nodes=curve["nodes"])
    sizes = 2.0 ** np.array(curve["log2_bytes"])
    return collective_us("all-reduce", sizes, cluster.group(cluster.devices)) / np.array(curve["us"])


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: str(curve["name"]))
def test_known_error_of_measured_all_reduces(curve: dict[str, Any]) -> None:
    over = over_measured(curve)
    assert np.abs(over - 1).mean() < 0.27
    large = np.array(curve["log2_bytes"]) >= 28
    assert np.abs(over[large] - 1).max() < 0.18


def test_interval_contains_90_percent_of_measured_all_reduces() -> None:
    under = 1 / np.concatenate([over_measured(curve) for curve in CURVES])
    low, high = REACHES
    assert len(under) == 61
    assert 0.88 < ((under >= low) & (under <= high)).mean() < 0.95
