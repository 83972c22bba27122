"""Occupancy compared with NVIDIA's calculator (`cuda_occupancy.h`)."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import needs_nvrtc
from tests.toy_variants import CONFIG, Toy, ToyVariant, folder_of_header
from tunebench.binary.occupancy import kernel_uses, occupancy
from tunebench.bound import resident_blocks
from tunebench.device import Device, local_cpu, representative
from tunebench.errors import InputError
from tunebench.variant import Costs

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
THREADS = (32, 33, 96, 128, 160, 256, 288, 384, 512, 768, 1024)
REGISTERS = (16, 24, 32, 40, 64, 65, 96, 128, 168, 200, 255)
SMEM_BYTES = (0, 1, 1000, 1024, 5000, 16384, 33000, 49152, 65536, 99000, 160000, 220000)

CALCULATOR = """
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
  int major, minor, threads_per_sm, smem_block, smem_sm, reserved, threads, registers, smem;
  while (std::scanf("%d %d %d %d %d %d %d %d %d", &major, &minor, &threads_per_sm, &smem_block, &smem_sm,
                    &reserved, &threads, &registers, &smem) == 9) {
    cudaOccDeviceProp device;
    device.computeMajor = major;
    device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = threads_per_sm;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 49152;
    device.sharedMemPerMultiprocessor = smem_sm;
    device.numSms = 1;
    device.sharedMemPerBlockOptin = smem_block;
    device.reservedSharedMemPerBlock = reserved;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = 0;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = smem_block;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    state.cacheConfig = CACHE_PREFER_SHARED;
    cudaOccResult result;
    const int error =
        cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, smem);
    std::printf("%d\\n", error ? -error : result.activeBlocksPerMultiprocessor);
  }
}
"""


def calculator(folder: Path) -> Path:
    """Build NVIDIA's occupancy calculator from the header in the CUDA runtime package."""
    include = folder_of_header("cuda_occupancy.h")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    source = folder / "calculator.cpp"
    source.write_text(CALCULATOR)
    built = folder / "calculator"
    subprocess.run([compiler, "-w", f"-I{include}", "-o", str(built), str(source)], check=True)
    return built


def test_blocks_per_sm_match_nvidias_calculator(tmp_path: Path) -> None:
    cases = list(itertools.product(ARCHITECTURES, THREADS, REGISTERS, SMEM_BYTES))
    asked = []
    for architecture, *sizes in cases:
        device = representative(architecture)
        limits = (device.threads_per_sm, device.smem_per_block_bytes, device.smem_per_sm_bytes)
        fields = (*device.compute_capability, *limits, device.smem_reserved_bytes, *sizes)
        asked.append(" ".join(map(str, fields)))
    ran = subprocess.run(
        [str(calculator(tmp_path))], input="\n".join(asked), capture_output=True, text=True, check=True
    )
    counts = list(map(int, ran.stdout.split()))
    ours = [held(representative(a), threads, registers, smem) for a, threads, registers, smem in cases]
    wrong = [(case, o, t) for case, o, t in zip(cases, ours, counts, strict=True) if o != t]
    assert not wrong, wrong[:5]
    assert len(set(ours)) > 10


def held(device: Device, threads: int, registers: int, smem_bytes: int) -> int:
    """Return the resident blocks per SM; 0 if one block exceeds the limits."""
    if smem_bytes > device.smem_per_block_bytes:
        return 0
    return occupancy(device, threads=threads, registers=registers, smem_bytes=smem_bytes).blocks


def test_occupancy_names_its_limit() -> None:
    device = representative("sm_80")
    limited = occupancy(device, threads=128, registers=226, smem_bytes=65536)
    assert (limited.blocks, limited.warps, limited.most_warps) == (2, 8, 64)
    assert limited.limited_by == ("registers", "shared memory")
    assert occupancy(device, threads=32, registers=16, smem_bytes=0).limited_by == ("blocks",)
    assert occupancy(device, threads=1024, registers=32, smem_bytes=0).limited_by == ("threads", "registers")
    assert occupancy(device, threads=1024, registers=128, smem_bytes=0).blocks == 0


def test_occupancy_never_exceeds_that_of_the_bound() -> None:
    device = representative("sm_90")
    for threads, registers, smem_bytes in itertools.product(THREADS, REGISTERS, SMEM_BYTES):
        costs = Costs(blocks=1, full_blocks=1, threads=threads, registers=registers, smem_bytes=smem_bytes)
        assert held(device, threads, registers, smem_bytes) <= resident_blocks(costs, device)


def test_cpu_has_no_occupancy() -> None:
    with pytest.raises(InputError, match="occupancy needs threads_per_sm"):
        occupancy(local_cpu(), threads=32, registers=16, smem_bytes=0)


@needs_nvrtc
def test_static_and_dynamic_shared_memory_are_added() -> None:
    from tunebench.compile.nvrtc import compile_cuda

    text = """
    __global__ void toy(const float* x, float* y, float factor, int n) {
      extern __shared__ float more[];
      __shared__ float s[8192];
      s[threadIdx.x] = more[threadIdx.x] = x[threadIdx.x];
      __syncthreads();
      y[threadIdx.x] = s[63 - threadIdx.x] * factor + more[63 - threadIdx.x];
    }
    """
    workload, config, device = Toy(n=64), CONFIG, representative("sm_90")
    variant = ToyVariant(text, smem_bytes=16384)
    binary = compile_cuda(variant, workload, config, device)
    (use,) = kernel_uses(binary, variant.launches(workload, config), device)
    assert (use.used.static_smem_bytes, use.launch.smem_bytes, use.entry) == (32768, 16384, "toy")
    assert use.occupancy.blocks == 233472 // (32768 + 16384 + 1024)
    assert use.occupancy.limited_by == ("shared memory",)
