"""Links to host memory."""

from __future__ import annotations

import pytest

from tunebench import device
from tunebench.errors import InputError, UnknownName
from tunebench.training.interconnect.cluster import link_tables
from tunebench.training.memory import HostLink, host_link, host_link_of, host_links


@pytest.mark.parametrize(
    ("product", "name"),
    [("v100-sxm2", "pcie3"), ("a100-80-sxm", "pcie4"), ("h100-sxm", "pcie5"), ("gh200", "nvlink-c2c")],
)
def test_a_device_has_the_usual_link_of_its_product(product: str, name: str) -> None:
    assert host_link_of(device.find(product)) == host_links()[name]


def test_every_described_product_but_one_has_exactly_one_link_to_the_host() -> None:
    named = [product for entry in link_tables()["host"].values() for product in entry["products"]]
    assert sorted(named) == sorted(set(device.described()) - {"rtx-3060-laptop"})


def test_rates_are_the_measured_ones_of_the_sources() -> None:
    rates = {name: (link.to_host_gb_s, link.to_device_gb_s) for name, link in host_links().items()}
    measured = {"pcie3": (12.36, 12.36), "pcie4": (25, 24.8), "pcie5": (55.6, 55.6), "nvlink-c2c": (297, 375)}
    assert rates.keys() == measured.keys()
    for name, pair in measured.items():
        assert rates[name] == pytest.approx(pair, rel=0.02)


def test_a_link_is_found_by_name_or_by_figures() -> None:
    assert host_link("pcie4").to_device_us(24_570_000) == pytest.approx(7 + 1000)
    assert host_link("25:10") == HostLink(to_host_gb_s=25, to_device_gb_s=25, latency_us=10, name="25:10")
    assert host_link("12.5").latency_us == 0


def test_mistakes_name_the_known_links() -> None:
    with pytest.raises(
        UnknownName, match=r"'pcie'\. Did you mean 'pcie3' or .* Known: nvlink-c2c, pcie3.*25:10"
    ):
        host_link("pcie")
    for text in ("0", "-3", "nan", "25:-1", "25:inf"):
        with pytest.raises(InputError, match="positive rates"):
            host_link(text)
    with pytest.raises(InputError, match=r"rtx-3060-laptop.*one of pcie3, pcie4, pcie5, nvlink-c2c"):
        host_link_of(device.find("rtx-3060-laptop"))
