from __future__ import annotations

from typing import Any

import pytest

from tunebench import _device, _host, device
from tunebench.device import Device
from tunebench.errors import DeviceError, InputError, UnknownName

NAMES = (
    *("p100-pcie", "p4", "v100-sxm2", "v100-pcie", "t4", "rtx-2080-ti", "titan-rtx"),
    *("a100-40-sxm", "a100-40-pcie", "a100-80-sxm", "a100-80-pcie"),
    *("a10", "a4000", "a6000", "rtx-3060-laptop", "rtx-3090", "l4", "l40s", "rtx-4090"),
    *("h100-pcie", "h100-sxm", "h200-sxm", "b200", "rtx-pro-6000", "mi100", "mi210"),
    *("a30", "a40", "rtx-3080", "rtx-4080", "h100-nvl", "gh200", "rtx-5080", "rtx-5090", "mi250", "mi300x"),
    *("gb200", "b300", "gb300", "rtx-6000-ada", "a10g", "a5000", "a800-sxm", "l40", "h800-sxm", "h20"),
)

# Quoted TFLOP/s and the boost clock in MHz they are quoted at, from datasheets and whitepapers.
QUOTED: dict[str, dict[str, tuple[float, float]]] = {
    "p100-pcie": {"fma": (9.3, 1303)},
    "p4": {"fma": (5.5, 1063)},
    "v100-sxm2": {"fma": (15.7, 1530), "f16": (125, 1530)},
    "v100-pcie": {"fma": (14, 1370), "f16": (112, 1370)},
    "t4": {"fma": (8.1, 1590), "f16": (65, 1590), "i8": (130, 1590)},
    "rtx-2080-ti": {"fma": (13.4, 1545), "f16": (53.8, 1545), "i8": (215.2, 1545)},
    "titan-rtx": {"fma": (16.3, 1770), "f16": (130.5, 1770)},
    "a100-40-sxm": {"fma": (19.5, 1410), "tf32": (156, 1410), "bf16": (312, 1410), "i8": (624, 1410)},
    "a10": {"fma": (31.2, 1695), "tf32": (62.5, 1695), "f16": (125, 1695), "i8": (250, 1695)},
    "a4000": {"fma": (19.2, 1560), "f16": (76.7, 1560)},
    "a6000": {"fma": (38.7, 1800), "f16": (154.8, 1800)},
    "rtx-3090": {"fma": (35.6, 1695), "tf32": (35.6, 1695), "f16": (71, 1695), "i8": (284, 1695)},
    "l4": {"fma": (30.3, 2040), "tf32": (60, 2040), "f16": (121, 2040), "e4m3": (242, 2040)},
    "l40s": {"fma": (91.6, 2520), "tf32": (183, 2520), "f16": (362, 2490), "e4m3": (733, 2520)},
    "rtx-4090": {"fma": (82.6, 2520), "tf32": (82.6, 2520), "f16": (165, 2520), "e4m3": (330, 2520)},
    "h100-pcie": {"fma": (51.2, 1755), "tf32": (378, 1620), "f16": (756, 1620), "e4m3": (1513, 1620)},
    "h100-sxm": {"fma": (66.9, 1980), "tf32": (495, 1830), "f16": (989, 1830), "e4m3": (1979, 1830)},
    "h200-sxm": {"fma": (66.9, 1980), "tf32": (495, 1830), "f16": (989, 1830), "e4m3": (1979, 1830)},
    "b200": {"fma": (75, 1965), "tf32": (1100, 1830), "f16": (2250, 1850), "e4m3": (4500, 1850)},
    "gb200": {"fma": (80, 2112), "tf32": (1250, 2062), "f16": (2500, 2062), "e4m3": (5000, 2062)},
    "b300": {"fma": (75, 1980), "tf32": (1125, 1850), "f16": (2250, 1850), "e4m3": (4500, 1850)},
    "gb300": {"fma": (80, 2112), "tf32": (1250, 2062), "f16": (2500, 2062), "e4m3": (5000, 2062)},
    "rtx-6000-ada": {"fma": (91.1, 2505), "f16": (364.2, 2505), "e4m3": (728.5, 2505)},
    "rtx-pro-6000": {"fma": (125, 2617), "f16": (503.8, 2617), "e4m3": (1007.6, 2617)},
    "rtx-pro-6000-server": {"fma": (120, 2493)},
    "mi100": {"fma": (23.1, 1502), "f32": (46.1, 1502), "f16": (184.6, 1502), "bf16": (92.3, 1502)},
    "mi210": {"f32": (45.3, 1700), "f16": (181, 1700), "bf16": (181, 1700)},
    "a10g": {"fma": (35, 1710), "tf32": (35, 1710), "f16": (70, 1710), "i8": (140, 1710)},
    "a5000": {"fma": (27.8, 1695), "f16": (111.1, 1695)},
    "a800-sxm": {"fma": (19.5, 1410), "tf32": (156, 1410), "bf16": (312, 1410), "i8": (624, 1410)},
    "l40": {"fma": (90.5, 2490), "tf32": (90.5, 2490), "f16": (181, 2490), "e4m3": (362, 2490)},
    "h800-sxm": {"fma": (67, 1980), "tf32": (495, 1830), "f16": (989, 1830), "e4m3": (1979, 1830)},
    "h20": {"tf32": (74, 1850), "f16": (148, 1850), "e4m3": (296, 1850), "i8": (296, 1850)},
    "a30": {"fma": (10.3, 1440), "tf32": (82, 1440), "bf16": (165, 1440), "i8": (330, 1440)},
    "a40": {"fma": (37.4, 1740), "tf32": (74.8, 1740), "f16": (149.7, 1740), "i8": (299.3, 1740)},
    "rtx-3080": {"fma": (29.8, 1710), "tf32": (29.8, 1710), "f16": (59.5, 1710), "i8": (238, 1710)},
    "rtx-4080": {"fma": (48.7, 2505), "f16": (97.5, 2505), "e4m3": (194.9, 2505), "i8": (389.9, 2505)},
    "h100-nvl": {"fma": (60, 1785), "tf32": (417.5, 1545), "f16": (835.5, 1545), "e4m3": (1670.5, 1545)},
    "gh200": {"fma": (67, 1980), "tf32": (494, 1830), "f16": (990, 1830), "e4m3": (1979, 1830)},
    "rtx-5090": {"fma": (104.8, 2407), "f16": (209.5, 2407), "e4m3": (419, 2407), "i8": (838, 2407)},
    "rtx-5080": {"fma": (56.3, 2617), "f16": (112.6, 2617), "e4m3": (225.1, 2617), "i8": (450.2, 2617)},
    "mi250": {"f32": (45.3, 1700), "f16": (181, 1700), "bf16": (181, 1700)},
    "mi300x": {"fma": (163.4, 2100), "tf32": (653.7, 2100), "f16": (1307.4, 2100), "e4m3": (2614.9, 2100)},
}

# Quoted GB/s and MB of last-level cache; what the driver reports may be a little above.
MEMORY = {
    "v100-sxm2": (900, 6),
    "t4": (320, 4),
    "a100-40-sxm": (1555, 40),
    "a100-80-sxm": (2039, 40),
    "a100-80-pcie": (1935, 40),
    "a10": (600, 6),
    "rtx-3090": (936, 6),
    "l4": (300, 48),
    "l40s": (864, 96),
    "rtx-4090": (1008, 72),
    "h100-pcie": (2039, 50),
    "h100-sxm": (3350, 50),
    "h200-sxm": (4800, 60),
    "b200": (8000, 126),
    "gb200": (8000, 126),
    "b300": (8000, 126),
    "gb300": (8000, 126),
    "rtx-6000-ada": (960, 96),
    "a10g": (600, 6),
    "a5000": (768, 6),
    "a800-sxm": (2039, 40),
    "l40": (864, 96),
    "h800-sxm": (3350, 50),
    "h20": (4000, 60),
    "a30": (933, 24),
    "a40": (696, 6),
    "rtx-3080": (760, 5),
    "rtx-4080": (716, 64),
    "rtx-5090": (1792, 96),
    "rtx-5080": (960, 64),
    "gh200": (4000, 60),
    "h100-nvl": (3900, 60),
    "mi300x": (5300, 256),
}

# KB of shared memory, threads and blocks of an SM. Source: CUDA C++ Programming Guide, compute capabilities.
LIMITS = {
    "sm_60": (64, 2048, 32),
    "sm_61": (96, 2048, 32),
    "sm_70": (96, 2048, 32),
    "sm_75": (64, 1024, 16),
    "sm_80": (164, 2048, 32),
    "sm_86": (100, 1536, 16),
    "sm_89": (100, 1536, 24),
    "sm_90": (228, 2048, 32),
    "sm_100": (228, 2048, 32),
    "sm_103": (228, 2048, 32),
    "sm_120": (100, 1536, 24),
}

GPU = {
    "name": "rtx-3090",
    "architecture": "sm_86",
    "sm_count": 81,
    "max_clock_mhz": 1695.0,
    "dram_gb_s": 936.1,
    "l2_bytes": 6291456,
    "smem_per_sm_bytes": 102400,
    "smem_per_block_bytes": 101376,
    "threads_per_sm": 1536,
    "blocks_per_sm": 16,
    "registers_per_sm": 65536,
}


def test_every_known_product_has_description() -> None:
    assert set(NAMES) <= set(device.described())


@pytest.mark.parametrize("name", list(device.described()))
def test_description_is_complete_and_cites_source(name: str) -> None:
    gpu = device.find(name)
    assert gpu.kind == "gpu"
    assert gpu.name == name
    assert not gpu.assumed
    assert len(_device.described_facts()["device"][name]["source"]) > 10
    assert gpu.architecture in device.architectures()
    assert 0 < gpu.smem_per_block_bytes <= gpu.smem_per_sm_bytes
    assert gpu.threads_per_sm % 32 == 0
    assert gpu.blocks_per_sm > 0
    assert 4 << 30 <= gpu.memory_bytes <= 288 << 30


@pytest.mark.parametrize("name", list(QUOTED))
def test_rates_match_datasheet_throughput_at_quoted_clock(name: str) -> None:
    gpu = device.find(name)
    for kind, (tflop_s, mhz) in QUOTED[name].items():
        rate = 2 * gpu.fma_per_clock if kind == "fma" else gpu.mma_flop_per_clock[kind]
        assert rate * gpu.sm_count * mhz / 1e6 == pytest.approx(tflop_s, rel=0.015), kind
        assert gpu.max_clock_mhz >= mhz


@pytest.mark.parametrize("name", list(MEMORY))
def test_memory_matches_datasheet_or_driver(name: str) -> None:
    gpu, (gb_s, mb) = device.find(name), MEMORY[name]
    assert gb_s <= gpu.dram_gb_s <= 1.03 * gb_s
    assert gpu.l2_bytes == mb << 20


@pytest.mark.parametrize("architecture", list(LIMITS))
def test_architecture_limits(architecture: str) -> None:
    gpu, (smem_kb, threads, blocks) = device.representative(architecture), LIMITS[architecture]
    assert gpu.architecture == architecture
    assert gpu.smem_per_sm_bytes == smem_kb << 10
    assert (gpu.threads_per_sm, gpu.blocks_per_sm) == (threads, blocks)
    assert gpu.smem_reserved_bytes == (1024 if gpu.compute_capability >= (8, 0) else 0)
    assert gpu.compute_capability == (int(architecture[3:-1]), int(architecture[-1]))


# Highest SM clock in MHz that drivers allow, as `nvidia-smi --query-gpu=clocks.max.sm` prints it.
ALLOWED = {"rtx-2080-ti": 2100, "titan-rtx": 2100, "rtx-3060-laptop": 2100, "rtx-3090": 2100}
ALLOWED |= {"a4000": 2100, "a6000": 2100, "a100-40-pcie": 1410, "h100-sxm": 1980}


@pytest.mark.parametrize("name", list(ALLOWED))
def test_clock_is_highest_allowed_by_driver(name: str) -> None:
    assert device.find(name).max_clock_mhz == ALLOWED[name]


@pytest.mark.parametrize("name", [name for name in device.described() if not name.startswith("mi")])
def test_latency_grows_with_memory_level(name: str) -> None:
    gpu = device.find(name)
    assert 4 <= gpu.fma_latency < gpu.mma_latency < gpu.l2_latency
    assert gpu.fma_latency < gpu.smem_latency < gpu.l1_latency < gpu.l2_latency
    assert gpu.smem_latency >= 19  # the lowest published value of any GPU
    assert gpu.accesses_per_clock in (16, 32, 64)


def test_amd_devices_have_no_compute_capability() -> None:
    assert device.find("mi210").compute_capability == (0, 0)
    assert device.find("gfx90a").name == "mi210"


def test_unknown_name_error_lists_known_names() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean 'a100-80-sxm'.*h100-sxm"):
        device.find("a100-80-smx")
    with pytest.raises(UnknownName, match="sm_90"):
        device.representative("sm_91")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_rates_used_as_divisors_must_be_positive(value: float) -> None:
    with pytest.raises(InputError, match="max_clock_mhz must be positive"):
        Device(
            name="x",
            kind="gpu",
            architecture="sm_80",
            sm_count=1,
            max_clock_mhz=value,
            dram_gb_s=1,
            l2_bytes=0,
            fma_per_clock=64,
        )


def _attach(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> Device:
    monkeypatch.setattr(_host, "gpus", lambda: ({**GPU, **facts},))
    (gpu,) = device.local_gpus()
    return gpu


def test_driver_values_override_description_except_understated_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _attach(monkeypatch)
    assert gpu.sm_count == 81
    assert gpu.dram_gb_s == 936.1
    assert gpu.max_clock_mhz == 2100  # the driver's property is the boost clock
    assert gpu.mma_flop_per_clock["f16"] == 512
    assert gpu.smem_reserved_bytes == 1024
    assert not gpu.assumed


def test_unknown_product_uses_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _attach(monkeypatch, name="rtx-a5000")
    assert gpu.max_clock_mhz == 1695
    assert gpu.mma_flop_per_clock["f16"] == 1024
    assert not gpu.assumed


def test_unknown_architecture_uses_fastest_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = _attach(monkeypatch, name="next", architecture="sm_130")
    assert gpu.assumed
    for name in NAMES:
        described_gpu = device.find(name)
        if described_gpu.compute_capability != (0, 0):
            assert gpu.fma_per_clock >= described_gpu.fma_per_clock
            assert gpu.fill_bytes_per_clock >= described_gpu.fill_bytes_per_clock
            for kind, rate in described_gpu.mma_flop_per_clock.items():
                assert gpu.mma_flop_per_clock[kind] >= rate


def test_local_devices_are_found_by_name_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "gpus", lambda: (GPU,))
    assert device.find().name == "rtx-3090"
    assert device.find("cuda:0") == device.find("cuda") == device.find("rtx-3090")
    with pytest.raises(DeviceError, match="1 NVIDIA GPU"):
        device.find("cuda:1")
    monkeypatch.setattr(_host, "gpus", tuple)
    assert device.find().kind == "cpu"
    assert device.find("rtx-3090").sm_count == 82


def test_size_of_the_processors_cache_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEBENCH_CPU_CACHE", "1.5")
    assert _host.last_level_cache_bytes() == 3 << 19
    monkeypatch.delenv("TUNEBENCH_CPU_CACHE")
    assert _host.last_level_cache_bytes() > 0
    monkeypatch.setenv("TUNEBENCH_CPU_CACHE", "0")
    with pytest.raises(InputError, match="TUNEBENCH_CPU_CACHE must be a positive number of MB"):
        _host.last_level_cache_bytes()
