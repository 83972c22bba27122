"""Devices from datasheet files: accepted keys, completion of missing values, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.public_data import found
from tunebench import datasheet, device
from tunebench.device import Device
from tunebench.errors import InputError

NEXT = """
name = "Next 1"
sm_count = 160
boost_mhz = 2100
memory_gb_s = 12000
memory_gb = 288
l2_mb = 192
tdp_w = 1400
process_nm = 3
tflops = { fp32 = 86, fp16 = 5500, fp8 = 11000 }
"""

# Name, peaks in TFLOP/s as datasheets quote them, boost MHz.
SHEETS: dict[str, tuple[dict[str, float], float]] = {
    "h100-sxm": ({"fp32": 67, "tf32": 494, "fp16": 989, "fp8": 1979, "int8": 1979}, 1980),
    "h100-nvl": ({"fp32": 60, "tf32": 417.5, "fp16": 835.5, "fp8": 1670.5, "int8": 1670.5}, 1785),
    "b300": ({"fp32": 75, "tf32": 1100, "fp16": 2250, "fp8": 4500, "int8": 4500}, 1965),
    "v100-sxm2": ({"fp32": 15.7, "fp16": 125}, 1530),
    "t4": ({"fp32": 8.1, "fp16": 65, "int8": 130}, 1590),
    "rtx-4090": ({"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "fp8": 330.3, "int8": 660.6}, 2520),
    "l4": ({"fp32": 30.3, "tf32": 60, "fp16": 121, "fp8": 242.5, "int8": 242.5}, 2040),
    "mi300x": (
        {"fp32": 163.4, "fp32_matrix": 163.4, "tf32": 653.7, "fp16": 1307, "fp8": 2615, "int8": 2615},
        2100,
    ),
}


def read(folder: Path, text: str, name: str = "mine.toml") -> datasheet.Sheet:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return datasheet.read(path)


def sheet(**changes: Any) -> dict[str, Any]:
    """Return a datasheet as a JSON object with some keys changed; keys set to None are removed."""
    words = {"name": "mine", "sm_count": 132, "boost_mhz": 1980, "memory_gb_s": 3350, "l2_mb": 50}
    words |= {"tflops": {"fp32": 67, "fp16": 989}, **changes}
    return {word: value for word, value in words.items() if value is not None}


def test_unreleased_gpu_is_described_by_ten_values(tmp_path: Path) -> None:
    described = read(tmp_path, NEXT)
    assert described.device.name == "next-1"
    assert (described.device.sm_count, described.device.max_clock_mhz, described.device.dram_gb_s) == (
        160,
        2100,
        12000,
    )
    assert (described.device.l2_bytes, described.device.memory_bytes) == (192 << 20, 288 << 30)
    assert described.device.fma_per_clock == 128  # 86e6 / 160 / 2100 / 2
    assert described.device.mma_flop_per_clock == {
        "f16": 16384,
        "bf16": 16384,
        "e4m3": 32768,  # 5500e6 / 160 / 2100 = 16369
        "tf32": 8192,
        "i8": 32768,  # estimated from the ratios on sm_103
    }
    assert described.device.smem_per_sm_bytes == device.representative("sm_103").smem_per_sm_bytes
    assert described.device.assumed
    assert "no architecture is given" in described.notes[0]
    assert "sm_103" in described.notes[0]
    assert "tf32, i8 are not given" in described.notes[1]


def test_power_and_process_are_read_if_given(tmp_path: Path) -> None:
    described = read(tmp_path, NEXT).device
    assert getattr(described, "tdp_w", 1400) == 1400
    assert getattr(described, "process_nm", 3) == 3


@pytest.mark.parametrize("name", list(SHEETS))
def test_datasheet_of_known_product_equals_its_description(name: str, tmp_path: Path) -> None:
    product, (peaks, mhz) = device.find(name), SHEETS[name]
    words = {"name": f"sheet of {name}", "architecture": product.architecture, "sm_count": product.sm_count}
    words |= {"boost_mhz": mhz, "memory_gb_s": product.dram_gb_s, "l2_mb": product.l2_bytes / 2**20}
    described = read(tmp_path, json.dumps({**words, "tflops": peaks}), "mine.json")
    assert described.device.fma_per_clock == product.fma_per_clock
    assert described.device.mma_flop_per_clock == product.mma_flop_per_clock
    assert (described.device.l2_bytes, described.device.threads_per_sm) == (
        product.l2_bytes,
        product.threads_per_sm,
    )
    assert not described.device.assumed
    assert not described.notes


@pytest.mark.parametrize("name", ["h100-sxm", "b300", "mi300x"])
def test_nearest_architecture_is_that_of_the_product(name: str, tmp_path: Path) -> None:
    product, (peaks, mhz) = device.find(name), SHEETS[name]
    words = sheet(name=f"not {name}", sm_count=product.sm_count, boost_mhz=mhz, tflops=peaks)
    if product.architecture.startswith("gfx"):
        words["name"] = "AMD Instinct MI3X"
    described = read(tmp_path, json.dumps(words), "mine.json").device
    assert (described.architecture, described.assumed) == (product.architecture, True)


def test_unknown_architecture_keeps_its_name(tmp_path: Path) -> None:
    described = read(tmp_path, json.dumps(sheet(architecture="sm_104")), "mine.json")
    assert described.device.architecture == "sm_104"
    assert described.device.compute_capability == (10, 4)
    assert described.device.assumed
    assert "sm_104 is not described" in described.notes[0]
    bare = json.dumps(sheet(architecture="sm_104", tflops=None))
    assert "those of sm_103" in read(tmp_path, bare, "mine.json").notes[0]


def test_missing_values_come_from_architecture(tmp_path: Path) -> None:
    described = read(
        tmp_path,
        'name = "mine"\narchitecture = "sm_90"\nsm_count = 100\nmax_clock_mhz = 1500\ndram_gb_s = 3000\n'
        'l2_bytes = 1000\nsource = "me"\nsmem_latency = 25\nmemory_bytes = 0\n',
    )
    assert described.device.memory_bytes == 0
    assert (described.device.name, described.device.sm_count, described.device.fma_per_clock) == (
        "mine",
        100,
        128,
    )
    assert (described.device.l2_bytes, described.device.smem_latency) == (1000, 25)
    assert described.device.mma_flop_per_clock == device.find("h100-sxm").mma_flop_per_clock


def test_file_can_inherit_from_known_device(tmp_path: Path) -> None:
    described = read(tmp_path, 'name = "h100-twice"\nlike = "h100-sxm"\nmemory_gb_s = 6700\n')
    product = device.find("h100-sxm")
    assert (described.device.name, described.device.dram_gb_s) == ("h100-twice", 6700)
    assert (described.device.sm_count, described.device.memory_bytes) == (
        product.sm_count,
        product.memory_bytes,
    )
    assert not described.notes
    described = read(tmp_path, 'name = "h100-sxm"\nlike = "h100-sxm"\nl2_mb = 100\ntflops = { fp32 = 134 }\n')
    assert (described.device.l2_bytes, described.device.fma_per_clock) == (100 << 20, 256)
    assert not described.notes  # intended differences give no notes
    assert not described.device.assumed


def test_rate_other_than_power_of_two_is_kept(tmp_path: Path) -> None:
    described = read(tmp_path, json.dumps(sheet(tflops={"fp32": 50, "fp16": 800})), "mine.json").device
    assert described.fma_per_clock == pytest.approx(50e6 / 132 / 1980 / 2)
    assert described.mma_flop_per_clock["f16"] == pytest.approx(800e6 / 132 / 1980)


def test_peaks_refer_to_boost_clock_if_maximum_clock_is_given(tmp_path: Path) -> None:
    words = sheet(boost_mhz=2520, max_clock_mhz=3165, sm_count=128, tflops={"fp32": 82.6, "fp16": 165.2})
    described = read(tmp_path, json.dumps(words), "mine.json").device
    assert (described.max_clock_mhz, described.fma_per_clock, described.mma_flop_per_clock["f16"]) == (
        3165,
        128,
        512,
    )
    assert getattr(described, "boost_clock_mhz", 2520) == 2520


def test_contradiction_with_known_product_is_noted(tmp_path: Path) -> None:
    described = read(tmp_path, json.dumps(sheet(name="NVIDIA L4", sm_count=60)), "mine.json")
    assert "sm_count is 60 in this file, but 58 in the description of l4" in described.notes


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sm_cout": 3}, r"unknown key 'sm_cout'\. Did you mean 'sm_count'\?"),
    ({"name": None}, "missing name; a device file has name, sm_count"),
    (
        {"memory_gb_s": None, "l2_mb": None},
        r"missing memory_gb_s, l2_mb; a device file has .*boost_mhz \(MHz\)",
    ),
    ({"tflops": None}, "missing architecture or tflops"),
    ({"sm_count": None}, "tflops also needs sm_count and boost_mhz"),
    ({"boost_mhz": 1.98}, "boost_mhz must be MHz, from 100 to 10000; got 1.98"),
    ({"memory_gb_s": 3.35}, "memory_gb_s must be GB/s, from 10"),
    ({"l2_mb": 52428800}, "l2_mb must be MB"),
    ({"sm_count": 13.5}, "sm_count must be a whole number"),
    ({"sm_count": "132"}, "sm_count must be .*got '132'"),
    ({"sm_count": True}, "sm_count must be"),
    ({"tflops": {"fp32": 66908}, "boost_mhz": 1980, "tdp_w": -1}, "tdp_w must be W"),
    ({"tflops": {"fp16": 989000}}, r"tflops\.fp16 must be TFLOP/s, dense, from 0\.05 to 100000; got 989000"),
    ({"tflops": {"fp61": 9}}, "unknown type of tflops 'fp61'. Did you mean 'fp16'"),
    ({"tflops": 67}, "tflops must be a table"),
    ({"dram_gb_s": 1980}, "dram_gb_s must be set once"),
    ({"like": "h101"}, "like = 'h101' names no described device"),
    ({"mma_flop_per_clock": 7}, "must be a table of FLOPs"),
    ({"smem_latency": 0}, "smem_latency must be a number above 0"),
    ({"assumed": 1}, "assumed must be true or false"),
    ({"architecture": 90}, "architecture must be a non-empty text"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_unusable_values_are_refused_with_reason(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^device file .*mine\.json: .*{said}"):
        read(tmp_path, json.dumps(sheet(**changes)), "mine.json")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("mine.toml", "name = ", "is not valid TOML"),
        ("mine.json", "{", "is not valid JSON"),
        ("mine.json", "[1]", "must be an object of names and values, got list"),
        ("mine.json", '{"tflops": {"fp32": NaN}}', "has the number nan, which is not finite"),
    ],
)
def test_file_without_json_object_is_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        read(tmp_path, text, name)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml cannot be read: No such file"):
        device.find(str(tmp_path / "none.toml"))


def test_device_is_found_by_file_path(tmp_path: Path) -> None:
    (tmp_path / "next.TOML").write_text(NEXT)
    described = device.find(str(tmp_path / "next.TOML"))
    assert isinstance(described, Device)
    assert described.name == "next-1"
    assert device.from_file(tmp_path / "next.TOML") == described


# -- NeuSight's files -----------------------------------------------------------------------------------

H100 = {"Device": "NVIDIA H100 80GB HBM3", "Dev_Mem": 80, "Mem_Bw": 3430, "Num_Sm": 132, "Core_Per_SM": 128}
H100 |= {"Freq": 1980, "SingleFLOPs": 66908, "L2Cache": 50}


def neusight(folder: Path, **changes: Any) -> datasheet.Sheet:
    words = {word: value for word, value in {**H100, **changes}.items() if value is not None}
    return read(folder, json.dumps(words), "gpu.json")


def test_neusight_file_is_read_and_noted(tmp_path: Path) -> None:
    described = neusight(tmp_path)
    assert (described.device.name, described.device.architecture) == ("h100-sxm", "sm_90")
    assert (described.device.dram_gb_s, described.device.fma_per_clock) == (3430, 128)
    assert (
        described.device.mma_flop_per_clock["bf16"] == 4096
    )  # not in the file: taken from the known product
    assert described.notes[0].startswith("read as a NeuSight device: sm_count 132, boost_mhz 1980")
    assert "tflops fp32 66.908" in described.notes[0]
    assert described.notes[1:] == (
        "memory_gb_s is 3430 in this file, but 3352 in the description of h100-sxm",
    )


def test_contradiction_within_neusight_file_is_accepted_and_noted(tmp_path: Path) -> None:
    described = neusight(tmp_path, SingleFLOPs=1979000, Mem_Bw=6860, Dev_Mem=160, L2Cache=100)
    assert described.device.dram_gb_s == 6860
    notes = "\n".join(described.notes)
    assert "contradicts Num_Sm x Core_Per_SM x 2 x Freq: 66908" in notes
    assert "l2_mb is 100 in this file, but 50 in the description of h100-sxm" in notes
    assert "fp32 implies 4096 multiply-adds per SM and clock" in notes


def test_amd_datasheet_has_vector_and_matrix_rates(tmp_path: Path) -> None:
    described = neusight(
        tmp_path,
        Device="AMD Instinct MI210",
        Num_Sm=104,
        Freq=1700,
        SingleFLOPs=None,
        SingleFLOPsMM=45300,
        SingleFLOPsVEC=22600,
    ).device
    assert (described.architecture, described.fma_per_clock, described.mma_flop_per_clock["f32"]) == (
        "gfx90a",
        64,
        256,
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"Freqq": 3}, "unknown key of a NeuSight device 'Freqq'"),
        ({"Mem_Bw": None, "Device": "Next"}, "missing memory_gb_s"),
        ({"Num_Sm": None, "Device": "Next"}, "tflops also needs sm_count and boost_mhz"),
        ({"SingleFLOPs": "many"}, "SingleFLOPs must be a number above 0, got 'many'"),
        ({"Freq": "fast"}, "Freq must be a number above 0"),
        ({"Freq": 1.98, "Core_Per_SM": None}, "boost_mhz must be MHz"),
        ({"Device": None}, "name must be a non-empty text"),
    ],
)
def test_unusable_neusight_file_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        neusight(tmp_path, **changes)


def test_all_published_neusight_files_are_read() -> None:
    folder = found("predict/neusight_device_configs")
    sheets = {path.stem: datasheet.read(path) for path in sorted(folder.glob("*.json"))}
    assert len(sheets) == 13
    assert {sheet.device.name for sheet in sheets.values()} <= set(device.described())
    assert not any(sheet.device.assumed for sheet in sheets.values())
