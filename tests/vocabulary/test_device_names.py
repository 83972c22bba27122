"""Names of devices as drivers report them and as people write them."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from tests.public_data import found
from tunebench import _host, device
from tunebench._device import driver_names, product_name, products_named, selects
from tunebench.errors import InputError, UnknownName

# Names of drivers (`nvidia-smi -L`), of files (`device_name`), and of people.
SPELLINGS = {
    "p100-pcie": ("Tesla P100-PCIE-16GB",),
    "p4": ("Tesla P4",),
    "v100-sxm2": ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB", "V100 SXM2", "v100_sxm2_32gb"),
    "v100-pcie": ("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB", "V100 PCIe"),
    "t4": ("Tesla T4", "NVIDIA T4", "NVIDIA Tesla T4", "T4", "NVIDIA_T4"),
    "rtx-2080-ti": ("NVIDIA GeForce RTX 2080 Ti", "GeForce RTX 2080 Ti", "RTX 2080Ti", "2080ti"),
    "titan-rtx": ("NVIDIA TITAN RTX", "TITAN RTX"),
    "a100-40-sxm": ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "A100 SXM 40GB", "a100-sxm-40"),
    "a100-40-pcie": ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB", "A100 40GB PCIe"),
    "a100-80-sxm": (
        *("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB", "NVIDIA_A100-SXM4-80GB", "A100 80 GB SXM"),
        "NVIDIA A100 80GB SXM4 Tensor Core GPU",
    ),
    "a100-80-pcie": ("NVIDIA A100 80GB PCIe", "NVIDIA_A100_80GB_PCIe", "a100-pcie-80gb"),
    "a10": ("NVIDIA A10", "A10", "a10 24GB"),
    "a10g": ("NVIDIA A10G", "A10G", "a10g 24GB"),
    "a5000": ("NVIDIA RTX A5000", "RTX A5000", "A5000"),
    "a800-sxm": ("NVIDIA A800-SXM4-80GB", "A800 SXM", "a800"),
    "l40": ("NVIDIA L40", "L40", "L40 48GB"),
    "h800-sxm": ("NVIDIA H800", "H800", "H800 80GB HBM3", "HGX H800"),
    "h20": ("NVIDIA H20", "H20", "H20 96GB HBM3"),
    "a4000": ("NVIDIA RTX A4000", "RTX A4000", "A4000"),
    "a6000": ("NVIDIA RTX A6000", "RTX A6000", "rtxa6000"),
    "rtx-3060-laptop": ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX 3060 Laptop"),
    "rtx-3090": ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090", "rtx3090", "RTX_3090", "3090"),
    "a30": ("NVIDIA A30", "A30 24GB"),
    "a40": ("NVIDIA A40", "A40 PCIe"),
    "rtx-3080": ("NVIDIA GeForce RTX 3080", "RTX 3080 10GB"),
    "l4": ("NVIDIA L4", "L4", "NVIDIA_L4"),
    "l40s": ("NVIDIA L40S", "L40S"),
    "rtx-4090": (
        "NVIDIA GeForce RTX 4090",
        "NVIDIA_GeForce_RTX_4090",
        "RTX 4090",
        "rtx-4090 24GB",
        "RTX4090",
    ),
    "rtx-4080": ("NVIDIA GeForce RTX 4080", "RTX 4080"),
    "h100-pcie": ("NVIDIA H100 PCIe", "NVIDIA_H100_PCIe", "H100 80GB PCIe", "h100-pcie-80gb"),
    "h100-sxm": (
        *("NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB_HBM3", "H100 80GB HBM3", "h100-80gb-hbm3"),
        *("H100 SXM", "H100-SXM5-80GB", "H100 SXM5", "DGX H100"),
    ),
    "h200-sxm": ("NVIDIA H200", "NVIDIA_H200", "H200", "h200", "H200 SXM5 141GB", "HGX H200", "H200_sxm"),
    "h100-nvl": ("NVIDIA H100 NVL", "NVIDIA_H100_NVL", "H100 NVL 94GB", "H100 94GB"),
    "gh200": ("NVIDIA GH200 480GB", "NVIDIA_GH200_480GB", "GH200", "GH200 Grace Hopper Superchip"),
    "b200": ("NVIDIA B200", "NVIDIA_B200", "B200", "B200 SXM6 180GB", "B200 192GB"),
    "gb300": ("NVIDIA GB300", "NVIDIA_GB300", "GB300 NVL72"),
    "rtx-6000-ada": ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "rtx6000-ada"),
    "gb200": ("NVIDIA GB200", "NVIDIA_GB200", "GB200 NVL72"),
    "b300": ("NVIDIA B300 SXM6 AC", "NVIDIA_B300_SXM6_AC", "NVIDIA B300", "B300"),
    "rtx-pro-6000": (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        *("RTX PRO 6000", "RTX Pro 6000 Blackwell", "RTXPRO6000"),
    ),
    "rtx-pro-6000-server": (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        *("NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition", "RTX PRO 6000 Server"),
    ),
    "rtx-5090": ("NVIDIA GeForce RTX 5090", "NVIDIA_GeForce_RTX_5090", "RTX 5090"),
    "rtx-5080": ("NVIDIA GeForce RTX 5080", "rtx_5080"),
    "mi100": ("AMD Instinct MI100", "MI100"),
    "mi210": ("AMD Instinct MI210", "AMD_Instinct_MI210"),
    "mi250": ("AMD Instinct MI250",),
    "mi300x": ("AMD Instinct MI300X", "AMD_Instinct_MI300X", "AMD Instinct MI300X OAM", "mi300x"),
}

OTHER_PRODUCTS = (
    *(
        "NVIDIA GeForce RTX 3060",
        "NVIDIA RTX A4000 Laptop GPU",
        "NVIDIA RTX 5000 Ada Generation",
        "Quadro RTX 6000",
    ),
    *("AMD Radeon PRO W6600", "AMD Radeon PRO W7800", "AMD Instinct MI250X", "AMD Instinct MI300A", ""),
    *("NVIDIA A10M", "NVIDIA L20", "NVIDIA H800 PCIe", "NVIDIA A800 40GB Active", "NVIDIA H200 NVL"),
    *("NVIDIA GH200 144G HBM3e", "NVIDIA H100 64GB HBM2", "NVIDIA A100-SXM-64GB", "Tesla V100-SXM3-32GB"),
    *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4080 SUPER"),
    *(
        "NVIDIA GeForce RTX 2080",
        "NVIDIA GeForce RTX 3080 Ti",
        "RTX 3080 12GB",
        "NVIDIA TITAN V",
        "NVIDIA T4G",
    ),
    *(
        "GRID T4-16Q",
        "NVIDIA A10-24Q",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "GeForce RTX 5070 Ti",
        "80GB",
        "RTX",
    ),
)

AMBIGUOUS = {
    "V100": ("v100-sxm2", "v100-pcie"),
    "Tesla V100 32GB": ("v100-sxm2", "v100-pcie"),
    "A100": ("a100-40-sxm", "a100-40-pcie", "a100-80-sxm", "a100-80-pcie"),
    "NVIDIA A100 80GB": ("a100-80-sxm", "a100-80-pcie"),
    "a100_sxm": ("a100-40-sxm", "a100-80-sxm"),
    "H100": ("h100-pcie", "h100-sxm", "h100-nvl"),
    "H100 80GB": ("h100-pcie", "h100-sxm"),
}

_NAMED = [(name, spelling) for name in SPELLINGS for spelling in SPELLINGS[name]]


def test_every_product_has_driver_names_and_spellings() -> None:
    assert set(SPELLINGS) == set(device.described())
    assert len(_NAMED) > 100
    for name in device.described():
        assert driver_names(name)
        assert set(driver_names(name)) <= {*SPELLINGS[name]}


@pytest.mark.parametrize(("name", "spelling"), _NAMED)
def test_spelling_means_one_product(name: str, spelling: str) -> None:
    for written in (
        spelling,
        spelling.lower(),
        spelling.upper(),
        re.sub("[ _-]", "_", spelling),
        f" {spelling} ",
    ):
        assert products_named(written) == (name,)
        assert product_name(written) == name
    assert device.find(spelling) == device.find(name)
    assert selects(spelling, device.find(name).key)


@pytest.mark.parametrize("spelling", OTHER_PRODUCTS)
def test_similar_products_are_distinguished(spelling: str) -> None:
    assert products_named(spelling) == ()
    assert product_name(spelling) not in device.described()
    with pytest.raises(UnknownName, match="Known: "):
        device.find(spelling)


@pytest.mark.parametrize("spelling", list(AMBIGUOUS))
def test_ambiguous_name_is_refused_with_its_products(spelling: str) -> None:
    assert products_named(spelling) == AMBIGUOUS[spelling]
    *first, last = AMBIGUOUS[spelling]
    with pytest.raises(InputError, match=f"may be {', '.join(first)} or {last}: name one of them"):
        device.find(spelling)


def test_ambiguous_name_is_the_product_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [device.find(name) for name in ("a100-40-sxm", "h100-sxm", "h100-nvl")]
    monkeypatch.setattr(device, "local_gpus", lambda: tuple(gpus))
    assert device.find("A100").name == "a100-40-sxm"
    with pytest.raises(InputError, match="h100-pcie, h100-sxm or h100-nvl"):
        device.find("H100")


def test_ambiguous_name_selects_all_its_records() -> None:
    keys = {name: device.find(name).key for name in device.described()}
    assert {name for name, key in keys.items() if selects("A100", key)} == set(AMBIGUOUS["A100"])
    assert {name for name, key in keys.items() if selects("SM90", key)} >= set(AMBIGUOUS["H100"])
    assert selects("rtx_5070", "sm_120:rtx-5070,sm=48")
    assert not selects("A100", "sm_80:a100x,sm=108")


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("A10M", "Did you mean 'a10'"),
        ("RTX 4070", "Did you mean 'rtx-4090' or 'rtx-4080'"),
        ("NVIDIA L20", "Did you mean 'l40'"),
        ("H200 NVL", "Did you mean 'h100-nvl'"),
    ],
)
def test_unknown_name_lists_close_products(spelling: str, expected: str) -> None:
    with pytest.raises(UnknownName, match=expected):
        device.find(spelling)


@pytest.mark.parametrize("spelling", ["sm90", "SM90", "sm-90", "SM_90"])
def test_architecture_is_found_in_any_spelling(spelling: str) -> None:
    assert device.find(spelling) == device.representative(spelling) == device.representative("sm_90")
    assert device.find("CPU") == device.find("cpu")


def test_driver_reports_known_products(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _host.product_name is product_name  # the names of `_host.gpus`
    facts = {
        "sm_count": 132,
        "max_clock_mhz": 1980.0,
        "dram_gb_s": 3352.3,
        "l2_bytes": 52428800,
        "architecture": "sm_90",
        "name": _host.product_name("NVIDIA H100 80GB HBM3"),
    }
    monkeypatch.setattr(_host, "gpus", lambda: (facts,))
    assert device.find("cuda:0").tdp_w == 700
    assert device.find("H100") == device.find("h100-sxm") == device.find("CUDA")


def test_devices_of_public_files_are_known_or_other_products() -> None:
    configs = found("predict/neusight_device_configs").glob("*.json")
    names = {json.loads(file.read_text())["Device"] for file in configs}
    for file in found("recorded").glob("*/*.json.gz"):
        with gzip.open(file, "rt") as text:
            names |= set(re.findall(r'"device_name": *"([^"]+)"', text.read(2000)))
    assert len(names) > 12
    assert {name for name in names if not products_named(name)} <= {"AMD Radeon PRO W6600"}
