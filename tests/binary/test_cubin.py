"""Reading resources from cubins, and refusing launches that a device does not support, without a GPU."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import needs_nvrtc
from tests.toy_variants import CONFIG, SPILLING, Toy, ToyVariant
from tunebench.binary.compiled import Binary
from tunebench.binary.cubin import launch_refusal, read_cubin, resources, spills
from tunebench.device import representative
from tunebench.variant import Launch

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")

SOURCE = """
template <int N> __global__ void __launch_bounds__(N) toy(const float* x, float* y, float factor, int n) {
  __shared__ float s[N];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[N - 1 - threadIdx.x] * factor;
}
"""
# Output of NVRTC 13.4 for sm_80, shortened.
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kILi64EEvPf' for 'sm_80'
ptxas info    : Function properties for _Z1kILi64EEvPf
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 256 bytes smem, 360 bytes cmem[0]
ptxas info    : Compiling entry function '_Z2spPfi' for 'sm_80'
ptxas info    : Function properties for _Z2spPfi
ptxas         .     1392 bytes stack frame, 1464 bytes spill stores, 1464 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1392 bytes cumulative stack size, 364 bytes cmem[0]
"""


def compiled(source: str, architecture: str, entry: str = "toy", block: int = 64) -> tuple[Binary, Launch]:
    from tunebench.compile.nvrtc import compile_cuda

    variant = ToyVariant(source, entry=entry, block=block)
    workload = Toy(n=64)
    binary = compile_cuda(variant, workload, CONFIG, representative(architecture))
    return binary, variant.launches(workload, CONFIG)[0]


def test_spill_bytes_count_stores_and_loads() -> None:
    assert spills(LOG) == {"_Z1kILi64EEvPf": 0, "_Z2spPfi": 2928}
    assert spills("") == {}


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_resources_are_read_on_every_architecture(architecture: str) -> None:
    binary, _ = compiled(SOURCE, architecture, "toy<96>")
    (entry,) = read_cubin(binary.payload).values()
    assert entry.static_smem_bytes == 96 * 4  # without memory reserved by the system
    assert entry.max_threads == 96
    assert 8 <= entry.registers <= 32
    assert entry.stack_bytes == 0
    assert entry.code_bytes % 16 == 0
    used = binary.resources
    assert (used.registers, used.static_smem_bytes, used.spill_bytes) == (entry.registers, 384, 0)


@needs_nvrtc
def test_spilled_registers_are_reported() -> None:
    binary, _ = compiled(SPILLING, "sm_80")
    (entry,) = read_cubin(binary.payload).values()
    assert entry.registers == 32
    assert entry.stack_bytes > 0
    assert binary.resources.spill_bytes is not None
    assert binary.resources.spill_bytes > 100


@needs_nvrtc
def test_resources_are_the_largest_over_the_entries() -> None:
    from tunebench.compile.nvrtc import compile_source

    compiled = compile_source(SOURCE, ("toy<32>", "toy<128>"), "sm_80")
    cubin, symbols = compiled.cubin, compiled.symbols
    assert resources(cubin, symbols, spills(compiled.log)).static_smem_bytes == 512
    assert resources(cubin, symbols[:1], None).static_smem_bytes == 128
    assert resources(cubin, symbols[:1], None).spill_bytes is None


@needs_nvrtc
def test_launches_beyond_the_binary_or_the_device_are_refused() -> None:
    device = representative("sm_90")
    binary, launch = compiled(SOURCE, "sm_90", "toy<64>")

    def refusal(**changes: object) -> str:
        return str(launch_refusal(binary, (dataclasses.replace(launch, **changes),), device))  # type: ignore[arg-type]

    assert refusal() == "None"
    assert refusal(block=(8, 8, 1)) == "None"
    assert "65 threads" in refusal(block=(65, 1, 1))
    assert refusal(smem_bytes=device.smem_per_block_bytes - 256) == "None"
    assert "shared memory" in refusal(smem_bytes=device.smem_per_block_bytes)
    hungry, launch = compiled(SPILLING.replace("(1024, 2)", "(1)"), "sm_90", block=1)
    wide = dataclasses.replace(launch, block=(1, 1, 1))
    assert launch_refusal(hungry, (wide,), device) is None
    few = dataclasses.replace(device, registers_per_sm=1024)
    assert "registers" in str(launch_refusal(hungry, (wide,), few))


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda data: b"\x7fELF\x02\x01" + data))
def test_invalid_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="are not a cubin"):
        read_cubin(data)


@needs_nvrtc
def test_truncated_cubin_is_refused_or_read_identically() -> None:
    binary, _ = compiled(SOURCE, "sm_80", "toy<64>")
    whole = read_cubin(binary.payload)
    refused = 0
    for size in range(0, len(binary.payload), 97):
        try:
            assert read_cubin(binary.payload[:size]) == whole  # the truncated part is not needed
        except ValueError:
            refused += 1
    assert refused > 30
