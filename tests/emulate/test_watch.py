"""Instrumented emulation: instruction counts as on a GPU, and race detection in one run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulate.kernel_text import HELPERS, SIGNATURE, Faulty
from tests.support import needs_compiler
from tests.toy_variants import CONFIG, Toy, ToyVariant
from tunebench import kernels, workloads
from tunebench.device import representative
from tunebench.emulate import host_compiler
from tunebench.emulate.counts import WorkCounts, read_counts
from tunebench.emulate.emulator import (
    ORDERS,
    EmulationFailed,
    NotEmulated,
    Order,
    Watched,
    watch,
)
from tunebench.space import Config


def see(body: str, *, order: Order = "forward", n: int = 64, grid: int = 1, **launch: Any) -> Watched:
    """Watch a kernel with this body on 1, 2, …, n; the factor is 2."""
    variant = ToyVariant(HELPERS + SIGNATURE + body + "\n}", grid=grid, **launch)
    values = np.arange(1, n + 1, dtype=np.float32)
    return watch(variant, Toy(n=n), CONFIG, {"x": values, "factor": np.float32(2)}, order=order)


def count(body: str, **launch: Any) -> WorkCounts:
    return see(body, **launch).counts.total


# -- counts --------------------------------------------------------------------------------------------------


@needs_compiler
def test_arithmetic_is_counted_by_lane_and_by_warp() -> None:
    work = count("y[t] = multiply_add(x[t], factor, f32_op(x[t] + 1)); if (t < 5) y[t] = f32_op(y[t] + 1);")
    assert work.fma == 2 * 64 + 5
    assert work.warp_instructions["f32"] == 2 * 2 + 1
    work = count("y[t] = fast_exp2(x[t]) + fast_rsqrt(x[t]) + (t % 2 ? __expf(x[t]) : 0.0f);")
    assert work.sfu == 2 * 64 + 32
    assert work.warp_instructions["special"] == 2 * 3
    assert count("y[t] = Silu()(x[t]);").sfu == 2 * 64


# One read by a warp with its expected distinct bytes, passes and bank conflicts.
ACCESSES = {
    "y[t] = s[t];": (128, 1, 0),
    "y[t] = s[7];": (128, 1, 0),
    "y[t] = s[2 * t];": (128, 2, 1),
    "y[t] = s[32 * t];": (128, 32, 31),
    "y[t] = s[33 * t];": (128, 1, 0),
    "y[t] = s[t / 2 * 2];": (128, 1, 0),
    "if (t < 3) y[t] = s[32 * t];": (128, 3, 2),
    "y[t] = reinterpret_cast<const u16*>(s)[t];": (128, 1, 0),
    "y[t] = load_vec<2>(s + 2 * t).at[1];": (256, 2, 0),
    "y[t] = load_vec<4>(s + 4 * t).at[1];": (512, 4, 0),
    "y[t] = load_vec<4>(s + 4 * (t / 8)).at[1];": (128, 4, 0),
    "y[t] = load_vec<4>(s + 32 * t).at[1];": (512, 32, 28),
    "const float4 v = *reinterpret_cast<const float4*>(s + 4 * t); y[t] = v.x + v.w;": (512, 4, 0),
    "u32 d[4]; ldmatrix_x4(d, s + 4 * t); y[t] = d[t / 8];": (512, 4, 0),
    "u32 d[4]; ldmatrix_x4(d, s + 32 * t); y[t] = d[t / 8];": (512, 32, 28),
    "u32 d[2]; ldmatrix_x2(d, s + 4 * t); y[t] = d[t / 16];": (256, 2, 0),
}


@needs_compiler
@pytest.mark.parametrize("access", ACCESSES)
def test_bank_conflicts_of_shared_memory_are_counted(access: str) -> None:
    fill = "__shared__ alignas(128) float s[33 * 32]; for (int i = t; i < 33 * 32; i += 32) s[i] = i;\n"
    whole = count(fill + "__syncthreads();\n" + access, block=32)
    setup = count(fill, block=32)
    assert setup.smem_passes == setup.warp_instructions["st.shared"] == 33
    assert setup.accesses == 33 * 32
    seen = (
        whole.smem_traffic_bytes - setup.smem_traffic_bytes,
        whole.smem_passes - setup.smem_passes,
        whole.bank_conflicts - setup.bank_conflicts,
    )
    assert seen == ACCESSES[access]
    loads = whole.warp_instructions.get("ldmatrix", 0) + whole.warp_instructions.get("ld.shared", 0)
    assert loads == 1


@needs_compiler
def test_divergent_loop_counts_instructions_of_longest_lane() -> None:
    body = "__shared__ float s[64]; s[t] = x[t]; __syncthreads(); float v = 0;\n"
    work = count(body + "for (int i = 0; i <= t % 4; ++i)\n v += s[t / 4 * 4 + i];\n y[t] = v;")
    assert work.warp_instructions["ld.shared"] == 2 * 4
    assert work.warp_instructions["__syncthreads"] == 2


@needs_compiler
def test_async_copies_are_counted_with_bytes() -> None:
    copy = """
  __shared__ alignas(16) float s[64];
  if (t < 16) cp_async_CACHE(s + 4 * t, x + 4 * t, t == 15 ? 4 : 16);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  y[t] = s[t] + x[0] + x[t / 2];"""
    past, through = (count(copy.replace("CACHE", cache)) for cache in ("cg", "ca<16>"))
    assert past.warp_instructions["cp.async"] == through.warp_instructions["cp.async"] == 1
    assert past.smem_traffic_bytes == 256 + 2 * 128
    assert past.fill_bytes == 15 * 16 + 4 + 4 * 32  # copies that bypass L1 are fetched again by the load
    assert through.fill_bytes == 15 * 16 + 4
    (launch,) = see(copy.replace("CACHE", "cg")).counts.launches
    assert (launch.read_bytes, launch.written_bytes) == (15 * 16 + 4, 256)
    assert (launch.threads, launch.smem_bytes) == (64, 256)


@needs_compiler
def test_matrix_instructions_are_counted_by_type() -> None:
    body = "float d[4] = {}; const u32 a[4] = {}, b[2] = {}; %s(d, a, b); %s(d, a, b); y[t] = d[0];"
    work = count(body % ("mma_m16n8k16_f16", "mma_m16n8k16_f16"))
    assert work.mma_flop == {"f16": 2 * 2 * (2 * 16 * 8 * 16)}
    work = count(body % ("mma_m16n8k16_bf16", "mma_m16n8k8_tf32"), block=32)
    assert work.mma_flop == {"bf16": 2 * 16 * 8 * 16, "tf32": 2 * 16 * 8 * 8}
    assert work.fma == 0


@needs_compiler
def test_blocks_are_counted_separately() -> None:
    body = "const int i = blockIdx.x * 64 + t; y[i] = x[i] + x[0]; if (blockIdx.x) y[i] = f32_op(x[63 - t]);"
    counts = see(body, n=128, grid=2).counts
    assert [block.fma for block in counts.blocks] == [0, 64]
    assert [block.fill_bytes for block in counts.blocks] == [256, 512]
    assert counts.total.fma == 64
    text = counts.describe()
    assert text.startswith("2 blocks of 64 threads: fma 64, ")
    assert "written_bytes 512" in text


def test_report_is_parsed_line_by_line() -> None:
    figures = (
        "sfu=0 smem_traffic_bytes=128 smem_passes=1 bank_conflicts=0 fill_bytes=9 accesses=4 longest_fma=1"
    )
    launch = "launch threads=32 smem_bytes=4 read_bytes=5 written_bytes=6"
    counts = read_counts(f"block fma=1 {figures} f32=2\n{launch}\nblock fma=3 {figures}\n{launch}\n")
    assert [block.fma for block in counts.blocks] == [1, 3]
    assert [len(launch.blocks) for launch in counts.launches] == [1, 1]
    assert counts.total.instructions == 2
    assert (counts.total.accesses, counts.total.longest_fma) == (8, 1)  # accesses are summed, chains are not
    products = {"wgmma.m64n128k16.f16": 8, "mma.m16n8k32.s8": 3}  # four warps make one product of a warpgroup
    flop = {"f16": 2 * 2 * 64 * 128 * 16, "i8": 3 * 2 * 16 * 8 * 32}
    assert WorkCounts(warp_instructions=products).mma_flop == flop


# -- races ---------------------------------------------------------------------------------------------------

SHARED = "__shared__ alignas(16) float s[65];\n"
COPY = "cp_async_ca<4>(s + t, x + t);\n cp_async_commit();\n"

RACES = {
    "no barrier": "s[t] = x[t];\n y[t] = s[t ^ 32];",
    "no barrier before it is written again": """
        s[t] = x[t]; __syncthreads();
        const float a = s[t ^ 32];
        s[t] = a;""",
    "no barrier within a warp": "s[t] = x[t];\n y[t] = s[t ^ 1];",
    "a shuffle is no barrier": """
        s[t] = x[t]; const float a = __shfl_xor_sync(~0u, x[t], 1);
        y[t] = a + s[t ^ 1];""",
    "a barrier of the warp only": "s[t] = x[t]; __syncwarp();\n y[t] = s[t ^ 32];",
    "a barrier of half the warp": """
        s[t] = x[t];
        __syncwarp(t % 32 < 16 ? 0xffffu : 0xffff0000u);
        y[t] = s[t ^ 16];""",
    "two threads write": "s[t / 2] = x[t];",
    "atomic and plain": "s[t] = 0; __syncthreads(); atomicAdd(s, 1.0f);\n if (t == 9) y[0] = s[0];",
    "no wait for a copy": COPY + "__syncthreads();\n y[t] = s[t];",
    "no barrier after a copy": COPY + "cp_async_wait<0>();\n y[t] = s[t ^ 1];",
    "a group too few": COPY + "cp_async_wait<1>(); __syncthreads();\n y[t] = s[t];",
    "a copy over what is read": "s[t] = x[t]; __syncthreads(); y[t] = s[t ^ 1];\n" + COPY,
    "ldmatrix of rows that lanes wrote themselves": """
        __shared__ alignas(16) float r[256];
        store_vec(r + 4 * t, load_vec<4>(x));
        u32 d[4]; ldmatrix_x4(d, r + 4 * t); y[t] = d[0];""",
    "ldmatrix": "s[t] = x[t]; u32 d[2];\n ldmatrix_x2(d, s + t % 8 * 4); y[t] = d[0];",
}


@needs_compiler
@pytest.mark.parametrize("name", RACES)
def test_race_is_found_in_either_thread_order(name: str) -> None:
    orders: tuple[Order, ...] = ("forward", "reverse")
    for order in orders:
        with pytest.raises(EmulationFailed, match=r"race on shared memory, byte \d+: thread") as caught:
            see(SHARED + RACES[name], order=order)
        assert caught.value.reason.count(", line ") == 2


ORDERED = {
    "barrier": "s[t] = x[t]; __syncthreads(); y[t] = s[t ^ 32]; __syncthreads(); s[t] = 0;",
    "counting barrier": "s[t] = x[t]; const int c = __syncthreads_count(1); y[t] = s[t ^ 32] + c;",
    "warp barrier": "s[t] = x[t]; __syncwarp(); y[t] = s[t ^ 1]; __syncwarp(); s[t] = 0;",
    "two warp barriers reach on": """
        s[t] = x[t];
        __syncwarp(t % 2 ? 0xaaaaaaaau : 0x55555555u);
        __syncwarp(t % 32 < 16 ? 0xffffu : 0xffff0000u);
        y[t] = s[t % 32 < 16 ? t : t - 15 - t % 2 + (t - 1) % 2];""",
    "atomics": "if (t == 0) s[0] = 0; __syncthreads(); atomicAdd(s, 1.0f); __syncthreads(); y[t] = s[0];",
    "same thread": "s[t] = x[t]; s[t] += 1; y[t] = s[t];",
    "a copy of one's own": COPY + "cp_async_wait<0>(); y[t] = s[t];",
    "halves of a word": """
        u16* h = reinterpret_cast<u16*>(s);
        h[t] = u16(t); __syncthreads(); y[t] = s[t / 2];""",
}


@needs_compiler
@pytest.mark.parametrize("name", ORDERED)
def test_ordered_accesses_are_no_race(name: str) -> None:
    seen = [see(SHARED + ORDERED[name], order=order) for order in ORDERS]
    for result in seen[1:]:
        np.testing.assert_array_equal(result.outputs["y"], seen[0].outputs["y"])


@needs_compiler
def test_race_message_names_both_lines_and_threads() -> None:
    with pytest.raises(EmulationFailed) as caught:
        see("__shared__ float s[64];\ns[t] = x[t];\ny[t] = s[63 - t];")
    reason = caught.value.reason
    assert "thread (31,0,0) read, line" in reason
    assert "`y[t] = s[63 - t];`" in reason
    assert "thread (32,0,0) wrote, line" in reason
    assert "`s[t] = x[t];`" in reason


GLOBAL_RACES = [
    ("race on y, byte 0: .* of another block wrote", "y[t] = x[t];"),
    (
        "race on y, byte 252: .* of another block wrote",
        "if (blockIdx.x == 0) y[t] = x[t]; else x = y, y[64 + t] = x[63 - t];",
    ),
    ("race on y, byte 0: thread .0,0,0. wrote", "y[t / 2 + blockIdx.x * 64] = x[t];"),
]


@needs_compiler
@pytest.mark.parametrize(("reason", "body"), GLOBAL_RACES)
def test_race_in_global_memory_is_found(reason: str, body: str) -> None:
    with pytest.raises(EmulationFailed, match=reason):
        see(body, n=128, grid=2)


@needs_compiler
def test_atomics_are_no_race() -> None:
    body = """
  if (blockIdx.x == 0 && t == 0) { y[127] = 0.0f; }
  y[t + 64 * (blockIdx.x != 0) * (t < 63)] = 1.0f;"""
    with pytest.raises(EmulationFailed, match="race on y"):
        see(body, n=128, grid=2)
    last_block_sums = """
  float* const count = y + 127;
  if (blockIdx.x < 2) y[64 * blockIdx.x + t % 60] = 1.0f;"""
    with pytest.raises(EmulationFailed, match="race on y"):
        see(last_block_sums, n=128, grid=2)
    see("if (t == 0) atomicAdd(y, 1.0f); if (blockIdx.x == 1 && t == 0) y[1] = y[0];", n=128, grid=2)


@needs_compiler
@pytest.mark.parametrize(
    ("reason", "body"),
    [
        ("shared memory that nobody has written, byte 256", "s[t] = x[t]; __syncthreads(); y[t] = s[t + 1];"),
        (
            "shared memory that nobody has written, byte 0",
            "if (t) s[t] = x[t]; __syncthreads(); y[t] = s[t];",
        ),
        ("outside of x, at byte 256 of 256: thread .63,0,0. read", "y[t] = x[t + 1];"),
        ("outside of x, at byte -4 of 256: thread .0,0,0. read", "y[t] = x[t - 1];"),
        ("outside of shared memory, at byte 272 of 272: thread .63,0,0. wrote", "s[t + 5] = x[t];"),
        (
            "outside of shared memory, at byte 268 of 272: thread .0,0,0. read",
            "s[t] = 0; y[t] = *(double*)(s + 67);",
        ),
        (
            "outside of shared memory, at byte -4 of 272: thread .0,0,0. wrote",
            "float* p = s; p[t - 1] = x[t];",
        ),
        ("outside of y, at byte 256 of 256: thread .63,0,0. wrote", "y[t + 1] = 0;"),
    ],
)
def test_unset_values_and_accesses_out_of_bounds_are_reported(reason: str, body: str) -> None:
    with pytest.raises(EmulationFailed, match=f"{reason}.*line"):
        see(SHARED + body)


# -- faults planted in the kernels that are shipped ----------------------------------------------------------


def shipped(key: str, text: str, right: str = "", wrong: str = "", **values: Any) -> tuple[Watched, float]:
    """Emulate a variant with an injected fault; return the observations and the largest error."""
    variant, workload = kernels.variant(key), workloads.parse(text)
    config = Config({**variant.default(workload, representative("sm_90")), **values})
    faulty: Any = Faulty(variant, right, wrong) if right else variant  # type: ignore[arg-type]
    inputs = workload.draw(np.random.default_rng(0))
    seen = watch(faulty, workload, config, inputs)
    exact = workload.reference({name: np.asarray(value, np.float64) for name, value in inputs.items()})
    return seen, float(max(np.abs(seen.outputs[name] - exact[name].value).max() for name in exact))


MMA = ("gemm/cuda_mma", "gemm:m=40,n=72,k=104,dtype=f16")
SIMT = ("gemm/cuda_simt", "gemm:m=40,n=72,k=41,dtype=f32")

PLANTED = [
    ("race on shared memory", *SIMT, "__syncthreads();", ";"),
    ("race on shared memory", *MMA, "cp_async_wait<STAGES - 2>();", ""),
    ("race on shared memory", *MMA, "__syncthreads();  // this tile", "// this tile"),
    ("outside of [ab], at byte", *MMA, ") < x_room", ") <= x_room"),
    ("outside of [ab], at byte", *SIMT, ") < x_room", ") <= x_room"),
    ("shared memory that nobody has written", *SIMT, "if (!Walk::takes(i)) continue;", "if (!i) continue;"),
]


@needs_compiler
@pytest.mark.parametrize(("reason", "key", "text", "right", "wrong"), PLANTED)
def test_injected_fault_is_reported(reason: str, key: str, text: str, right: str, wrong: str) -> None:
    with pytest.raises(EmulationFailed, match=reason):
        shipped(key, text, right, wrong)


@needs_compiler
def test_wrong_lane_map_changes_results() -> None:
    _, error = shipped(*MMA)
    assert error < 0.05
    _, wrong = shipped(*MMA, "x_half = OF_B ? matrix / 2 : matrix % 2", "x_half = matrix % 2")
    assert wrong > 1


@needs_compiler
def test_layout_without_swizzle_increases_bank_conflicts() -> None:
    seen, _ = shipped(*MMA, staged=0)
    plain, error = shipped(
        *MMA, "at / CHUNK ^ line / LINES_PER_128_BYTES % (PERIOD / STEP) * STEP", "at / CHUNK", staged=0
    )
    assert error < 0.05
    assert seen.counts.total.bank_conflicts == 0
    assert plain.counts.total.bank_conflicts > plain.counts.total.smem_passes / 3


# -- building ------------------------------------------------------------------------------------------------


@needs_compiler
def test_compiler_without_instrumentation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_compiler, "_gcc_version", lambda compiler: 0)
    with pytest.raises(NotEmulated, match="counting needs g"):
        see("y[t] = 0;")
