"""Emulation of CUDA kernels on the CPU: faulty kernels are reported, correct kernels pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulate.kernel_text import HELPERS, SIGNATURE, X
from tests.support import needs_compiler
from tests.toy_variants import CONFIG, Toy, ToyVariant
from tunebench.dtype import numpy_dtype
from tunebench.emulate import host_compiler, limited_child
from tunebench.emulate.emulator import (
    ORDERS,
    EmulationFailed,
    NotEmulated,
    Order,
    build,
    emulate,
    find_compiler,
)
from tunebench.errors import InputError


def run(
    body: str,
    x: Any,
    *,
    order: Order = "forward",
    sanitize: bool = False,
    seed: int = 0,
    helpers: bool = False,
    timeout_s: float = 20.0,
    **launch: Any,
) -> Any:
    """Emulate a kernel with this body (it ends with the closing brace) on x; the factor is 2."""
    variant = ToyVariant((HELPERS if helpers else "") + SIGNATURE + body + "\n}", **launch)
    values = np.asarray(x, np.float32)
    inputs = {"x": values, "factor": np.float32(2)}
    workload = Toy(n=len(values))
    options: dict[str, Any] = {"order": order, "sanitize": sanitize, "seed": seed, "timeout_s": timeout_s}
    return emulate(variant, workload, CONFIG, inputs, **options)["y"]


# -- kernels that are right ----------------------------------------------------------------------------------

RIGHT = {
    "plain": "y[t] = x[t] * factor;",
    "static shared": "__shared__ float s[64]; s[t] = x[t]; __syncthreads(); y[63 - t] = s[63 - t] * factor;",
    "aligned shared": "__shared__ alignas(16) float s[64]; s[t] = x[t]; __syncthreads(); y[t] = 2 * s[t];",
    "dynamic shared": """
        extern __shared__ __align__(16) unsigned char bytes[];
        float* s = reinterpret_cast<float*>(bytes);
        s[t] = x[t];
        __syncthreads();
        y[63 - t] = s[63 - t] * factor;""",
    "several declarators": """
        __shared__ volatile float s[2][32], scale;  // one struct
        if (t == 0) scale = factor;
        s[t / 32][t % 32] = x[t];
        __syncthreads();
        auto twice = [&](int i) { return s[i / 32][i % 32] * scale; };
        y[63 - t] = twice(63 - t);""",
    "two names of dynamic shared": """
        extern __shared__ float a[];
        extern __shared__ int b[];
        b[t] = __float_as_int(x[t]);
        __syncthreads();
        y[63 - t] = a[63 - t] * factor;""",
    "exited threads do not hold up a barrier": """
        y[t] = x[t] * factor;
        if (t >= 40) return;
        __shared__ float s[40];
        s[t] = y[t];
        __syncthreads();
        y[39 - t] = s[39 - t];""",
    "exited lanes do not hold up a shuffle": """
        y[t] = x[t] * factor;
        if (t % 32 >= 16) return;
        const float other = __shfl_xor_sync(0xffffffffu, y[t], 8);
        y[t] = __shfl_xor_sync(0xffffu, other, 8);""",
    "half warps shuffle apart": """
        float v = x[t];
        const unsigned mask = t % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
        for (int i = 0; i < (t % 32 < 16 ? 2 : 4); ++i) v = __shfl_xor_sync(mask, v, 5);
        y[t] = v * factor;""",
    "printing does not mix with results": 'printf("%d\\n", t); y[t] = x[t] * factor;',
    "lines of a comment": "/* __shared__ */ // extern __shared__ float s[];\n y[t] = x[t] * factor;",
}


@needs_compiler
@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_correct_kernels_pass_in_every_order(name: str, sanitize: bool) -> None:
    for order in ORDERS:
        y = run(RIGHT[name], X, order=order, sanitize=sanitize, smem_bytes=256)
        np.testing.assert_array_equal(y, 2 * X, err_msg=order)


# -- kernels whose values come out wrong in some order -------------------------------------------------------

RACES = {
    "no barrier before a later thread": "__shared__ float s[64]; s[t] = x[t]; y[t] = s[(t + 1) % 64];",
    "no barrier after an earlier thread": "__shared__ float s[64]; s[t] = x[t]; y[t] = s[(t + 63) % 64];",
    "no second barrier": """
        __shared__ float s[64];
        s[t] = x[t];
        __syncthreads();
        const float mine = s[t ^ 32];
        s[t] = 0.0f;
        y[t] = mine;""",
    "beyond what was written": "__shared__ float s[65]; s[t] = x[t]; __syncthreads(); y[t] = s[t + 1];",
    "in a maximum": "__shared__ float s[99]; s[t] = x[t]; __syncthreads(); y[t] = fmaxf(s[t], s[t + 1]);",
    "in a minimum": "__shared__ float s[99]; s[t] = -x[t]; __syncthreads(); y[t] = fminf(s[t], s[t + 1]);",
    "dynamic shared never written": "extern __shared__ float s[]; y[t] = s[t];",
    "local never written": "float a[4]; a[n >> 8] = 1.0f; y[t] = a[(n >> 7) + 1];",
    "output never written": "if (t != 7) y[t] = x[t];",
    "no wait for a copy": """
        __shared__ alignas(16) float s[64];
        cp_async_ca<4>(s + t, x + t);
        cp_async_commit();
        __syncthreads();
        y[t] = s[t];""",
    "one group too few waited for": """
        __shared__ alignas(16) float s[2][64];
        cp_async_ca<4>(s[0] + t, x + t);
        cp_async_commit();
        cp_async_ca<4>(s[1] + t, x + t);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        y[t] = s[1][t];""",
}


@needs_compiler
@pytest.mark.parametrize("name", RACES)
def test_race_or_unset_value_changes_result_in_some_order(name: str) -> None:
    seen = [run(RACES[name], X, order=order, seed=1, helpers=True, smem_bytes=256) for order in ORDERS]
    finite = [bool(np.isfinite(y).all() and (np.abs(y) <= 64).all()) for y in seen]
    assert not all(finite) or not all(np.array_equal(y, seen[0]) for y in seen)


@needs_compiler
def test_random_order_is_reproducible_by_seed() -> None:
    body = "__shared__ int next; if (t == 0) next = 0; __syncthreads(); y[t] = atomicAdd(&next, 1);"
    first, repeated, different = (run(body, X, order="random", seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, repeated)
    assert not np.array_equal(first, different)


# -- kernels that are reported -------------------------------------------------------------------------------

REPORTED = [
    ("diverged", "if (t < 32)\n __syncthreads();\n else\n __syncthreads();"),
    ("deadlock", "if (t < 16)\n __syncthreads();\n else\n __syncwarp();"),
    (
        "deadlock",
        "if (t < 16)\n y[t] = __shfl_xor_sync(~0u, x[t], 1);\n else\n y[t] = __shfl_xor_sync(~0u, x[t], 2);",
    ),
    ("leaves out the lane", "y[t] = __shfl_sync(1u, x[t], 0);"),
    (
        "all 32 lanes",
        "if (t == 5) return; u32 d[4]; __shared__ alignas(16) u8 s[512]; ldmatrix_x4(d, s + t % 32 * 16);",
    ),
    ("not within shared memory", "u32 d[4]; ldmatrix_x4(d, x + 4 * (t % 8));"),
    (
        "no multiple of 16 bytes",
        "u32 d[4]; __shared__ alignas(16) u8 s[600]; ldmatrix_x4(d, s + 8 + t % 32 * 16);",
    ),
    ("not within shared memory", "extern __shared__ float s[]; cp_async_ca<4>(s + 64 + t, x + t);"),
    ("no multiple of 16 bytes", "store_vec(y + 1 + t / 2, load_vec<4>(x));"),
    ("beyond the end of y", "y[n + 3 * (t == 0)] = 1.0f;"),
    ("before the start of y", "y[-1] = 1.0f;"),
    ("beyond the end of dynamic shared memory", "extern __shared__ float s[]; s[t + 1] = 1.0f;"),
    ("changed its input x", "const_cast<float*>(x)[t] = 0.0f;"),
    ("__trap", "__trap();"),
    ("t < 3", "assert(t < 3);"),
    ("SIGSEGV", "volatile float big[1 << 20]; big[n] = 1.0f; y[t] = big[n];"),
]


@needs_compiler
@pytest.mark.parametrize(("reason", "body"), REPORTED)
def test_undefined_behaviour_is_reported(reason: str, body: str) -> None:
    for order in ORDERS:
        with pytest.raises(EmulationFailed, match=reason) as caught:
            run(body, X, order=order, helpers=True, smem_bytes=256)
        assert not caught.value.timed_out


SANITIZED = [
    ("heap-buffer-overflow, READ of size 4", "y[t] = x[t] + 0.0f * x[t + 1];"),
    ("heap-buffer-overflow, READ of size 4", "y[t] = x[t] + 0.0f * x[t - 1];"),
    (
        "heap-buffer-overflow, READ",
        "extern __shared__ float s[]; y[t] = x[t]; if (t == 63) y[t] += 0.0f * s[64];",
    ),
    ("heap-buffer-overflow, WRITE", "__shared__ float s[64]; float* p = s; p[t + 1] = x[t]; y[t] = 0.0f;"),
    ("index 4 out of bounds", "float a[4] = {1, 2, 3, 4}; y[t] = a[n / 16];"),
    ("misaligned", "*(float4*)(y + 1) = *(const float4*)x;"),
    ("misaligned", "__shared__ float s[64]; *(float4*)s = *(const float4*)x; y[t] = 0.0f;"),
]


@needs_compiler
@pytest.mark.parametrize(("reason", "body"), SANITIZED)
def test_sanitizer_finds_every_access_out_of_bounds(reason: str, body: str) -> None:
    with pytest.raises(EmulationFailed, match=reason) as caught:
        run(body, X, sanitize=True, smem_bytes=256)
    assert f"line 3 `{body}`" in caught.value.reason


@needs_compiler
@pytest.mark.parametrize(
    "body",
    [
        "y[t + 1] = x[t + 1];",
        "y[t + 1] = y[t + 1] * 2;",
        "y[t + 1] = x[t + 1] + x[t];",
        "((char*)y)[4 * n + 1] = ((const char*)x)[4 * n + 1];",
    ],
)
def test_write_out_of_bounds_of_what_was_read_out_of_bounds_is_found(body: str) -> None:
    """Elements behind a tensor read as NaN, which a kernel without a check of bounds writes there."""
    with pytest.raises(EmulationFailed, match="a write beyond the end of y"):
        run(body, X)


@needs_compiler
def test_shared_memory_of_template_is_bounds_checked_and_poisoned() -> None:
    source = """
template <int N> __device__ float* buffer() { __shared__ float s[N]; return s; }
template <int N> __global__ void kernel(const float* x, float* y, float factor, int n) {
  float* s = buffer<N>();
  %s
}"""
    inputs = {"x": X, "factor": np.float32(2)}
    past = ToyVariant(source % "s[threadIdx.x + 1] = x[0]; y[threadIdx.x] = 0;", entry="kernel<64>")
    with pytest.raises(EmulationFailed, match="heap-buffer-overflow"):
        emulate(past, Toy(n=64), CONFIG, inputs, sanitize=True)
    unset = ToyVariant(source % "y[threadIdx.x] = s[threadIdx.x];", entry="kernel<64>")
    assert np.isnan(emulate(unset, Toy(n=64), CONFIG, inputs)["y"]).all()


@needs_compiler
def test_hang_ends_at_time_limit() -> None:
    with pytest.raises(EmulationFailed, match="did not finish") as caught:
        run("volatile int forever = 1; while (forever);", X, timeout_s=0.3)
    assert caught.value.timed_out


def test_time_limit_does_not_count_waits_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that could run but gets no processor continues; one whose threads all sleep is stopped."""
    computes = "import time, sys; ends = time.monotonic() + 1\nwhile time.monotonic() < ends: pass"
    python = [sys.executable, "-S", "-c"]
    with monkeypatch.context() as patch:
        patch.setattr(limited_child, "_processor_s", lambda pid: 0.0)
        echo = f"{computes}\nprint(sys.stdin.read())"
        assert limited_child.run_limited([*python, echo], b"job", timeout_s=0.2).stdout == b"job\n"
        with pytest.raises(subprocess.TimeoutExpired):
            limited_child.run_limited([*python, "import time; time.sleep(60)"], b"", timeout_s=0.5)
    with pytest.raises(subprocess.TimeoutExpired):
        limited_child.run_limited([*python, "while True: pass"], b"", timeout_s=0.2)


@needs_compiler
@pytest.mark.parametrize(
    ("block", "reason"), [(1025, "1025,1,1. threads cannot be"), (0, "0,1,1. threads cannot be")]
)
def test_invalid_launch_is_refused(block: int, reason: str) -> None:
    with pytest.raises(EmulationFailed, match=reason):
        run("y[t] = 0;", X, block=block)


@needs_compiler
@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (
            "const float* x, float* y, double factor, int n",
            "argument 2 of the kernel has 8 bytes, 4 are given",
        ),
        ("const float* x, float* y, float factor", "takes 3 arguments, 4 are given"),
    ],
)
def test_arguments_must_match_kernel_parameters(parameters: str, reason: str) -> None:
    variant = ToyVariant(f"__global__ void toy({parameters}) {{}}")
    with pytest.raises(EmulationFailed, match=reason):
        emulate(variant, Toy(n=64), CONFIG, {"x": X, "factor": np.float32(2)})


# -- results of built-in functions and helpers ---------------------------------------------------------------


@needs_compiler
def test_shuffles_follow_ptx_isa() -> None:
    lanes = np.arange(32)
    x = lanes.astype(np.float32)
    segment = lanes // 8 * 8
    expected = {
        "__shfl_sync(~0u, x[t], 5, 8)": segment + 5,
        "__shfl_sync(~0u, x[t], 37)": np.full(32, 5),
        "__shfl_up_sync(~0u, x[t], 3, 8)": np.where(lanes - 3 < segment, lanes, lanes - 3),
        "__shfl_down_sync(~0u, x[t], 3, 8)": np.where(lanes + 3 > segment + 7, lanes, lanes + 3),
        "__shfl_xor_sync(~0u, x[t], 9)": lanes ^ 9,
        "__shfl_xor_sync(~0u, x[t], 12, 8)": np.where((lanes ^ 12) > segment + 7, lanes, lanes ^ 12),
        "float(__ballot_sync(~0u, x[t] < 3))": np.full(32, 7),
        "float(__any_sync(~0u, t == 3) + 2 * __all_sync(~0u, t < 32))": np.full(32, 3),
        "float(__syncthreads_count(t < 5) + 100 * __syncthreads_or(0))": np.full(32, 5),
        "float(__popc(12u) + __clz(1) + __ffs(8))": np.full(32, 37),
    }
    for expression, values in expected.items():
        y = run(f"y[t] = {expression};", x, block=32, order="random", seed=5)
        np.testing.assert_array_equal(y, values, err_msg=expression)


@needs_compiler
def test_reductions_reach_every_thread() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-1000, 1000, 128).astype(np.float32)
    body = "__shared__ float s[4]; y[t] = block_reduce_%s<128>(x[t], s) + block_reduce_%s<128>(x[t], s);"
    for order in ORDERS:
        total = run(body % ("sum", "max"), x, block=128, helpers=True, order=order)
        np.testing.assert_array_equal(total, np.full(128, x.sum() + x.max()))
    groups = run("y[t] = warp_reduce_max<8>(x[t]);", x, block=128, helpers=True)
    np.testing.assert_array_equal(groups, np.repeat(x.reshape(-1, 8).max(axis=1), 8))


@needs_compiler
@pytest.mark.parametrize(("name", "dtype"), [("half_t", np.float16), ("bf16_t", ml_dtypes.bfloat16)])
def test_conversions_match_hardware(name: str, dtype: Any) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    loop = "for (int i = t; i < n; i += blockDim.x) "
    floats = run(f"{loop} y[i] = to_float({name}{{u16(x[i])}});", every.astype(np.float32), helpers=True)
    np.testing.assert_array_equal(floats, every.view(dtype).astype(np.float32))
    # Each value, its f32 neighbours, and the midpoints between values, where rounding matters.
    values = floats[np.isfinite(floats)]
    halfway = (values[:-1].astype(np.float64) + values[1:]) / 2
    near = np.concatenate(
        [
            values,
            np.nextafter(values, np.float32(np.inf)),
            halfway.astype(np.float32),
            [np.inf, np.nan, 65520.0, 1e30],
        ]
    ).astype(np.float32)
    rounded = run(f"{loop} y[i] = to_float(from_float<{name}>(x[i]));", near, helpers=True)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded, near.astype(dtype).astype(np.float32))


@needs_compiler
def test_e4m3_conversions_match_hardware() -> None:
    every = np.arange(256, dtype=np.uint8)
    loop = "for (int i = t; i < n; i += blockDim.x) "
    floats = run(f"{loop} y[i] = to_float(e4m3_t{{u8(x[i])}});", every.astype(np.float32), helpers=True)
    np.testing.assert_array_equal(floats, every.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    values = np.sort(floats[np.isfinite(floats)])
    halfway = (values[:-1] + values[1:]) / np.float32(2)
    beside = [np.nextafter(halfway, np.float32(side)) for side in (-np.inf, np.inf)]
    near = np.concatenate([values, halfway, *beside, [460.0, -1e30, np.inf, np.nan]]).astype(np.float32)
    rounded = run(f"{loop} y[i] = to_float(from_float<e4m3_t>(x[i]));", near, helpers=True)
    right = np.clip(near, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(rounded, right)  # above 448 the instruction saturates, unlike NumPy


MMA = """
  __shared__ alignas(16) half_t A[16][16], B[16][8], Bt[8][16];
  for (int i = t; i < 256; i += 32) A[i / 16][i % 16] = from_float<half_t>(x[i]);
  for (int i = t; i < 128; i += 32) {
    B[i / 8][i % 8] = from_float<half_t>(x[256 + i]);
    Bt[i % 8][i / 8] = B[i / 8][i % 8];
  }
  __syncthreads();
  u32 a[4], b[2];
  float d[4] = {};
  const int g = t / 4, p = t % 4;
  LOAD
  mma_m16n8k16<half_t>(d, a, b);
  for (int i = 0; i < 4; ++i) y[(g + 8 * (i / 2)) * 8 + 2 * p + i % 2] = d[i];
"""
BY_HAND = """
  auto pair = [](half_t low, half_t high) { return u32(low.bits) | u32(high.bits) << 16; };
  for (int i = 0; i < 4; ++i) {
    const int r = g + 8 * (i % 2), c = 2 * p + 8 * (i / 2);
    a[i] = pair(A[r][c], A[r][c + 1]);
  }
  for (int i = 0; i < 2; ++i) b[i] = pair(B[2 * p + 8 * i][g], B[2 * p + 8 * i + 1][g]);
"""
BY_LDMATRIX = "ldmatrix_x4(a, &A[t % 16][t / 16 * 8]); ldmatrix_x2(b, &Bt[t % 8][t / 8 % 2 * 8]);"
BY_TRANSPOSED = """
  __shared__ alignas(16) half_t At[16][16];
  for (int i = t; i < 256; i += 32) At[i % 16][i / 16] = A[i / 16][i % 16];
  __syncwarp();
  ldmatrix_x4_trans(a, &At[t % 8 + t / 16 * 8][t / 8 % 2 * 8]);
  ldmatrix_x2_trans(b, &B[t % 16][0]);
"""


@needs_compiler
@pytest.mark.parametrize("load", [BY_HAND, BY_LDMATRIX, BY_TRANSPOSED])
def test_matrix_instructions_multiply(load: str) -> None:
    rng = np.random.default_rng(0)
    A, B = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (16, 8))
    x = np.concatenate([A.ravel(), B.ravel()])
    for order in ORDERS:
        y = run(MMA.replace("LOAD", load), x, block=32, helpers=True, order=order, seed=2)
        np.testing.assert_array_equal(y[:128].reshape(16, 8), A @ B)


EIGHT_BITS = """
  const int g = t / 4, p = t % 4;
  u32 a[4] = {}, b[2] = {};
  for (int i = 0; i < 16; ++i) {  // element i of a lane, as the PTX ISA numbers them for m16n8k32
    const int row = i < 4 || (8 <= i && i < 12) ? g : g + 8, column = 4 * p + i % 4 + (i < 8 ? 0 : 16);
    a[i / 4] |= u32(BITS(x[row * 32 + column])) << (8 * (i % 4));
  }
  for (int i = 0; i < 8; ++i) {
    const int row = 4 * p + i % 4 + (i < 4 ? 0 : 16);
    b[i / 4] |= u32(BITS(x[512 + row * 8 + g])) << (8 * (i % 4));
  }
  SUM d[4] = {1, 2, 3, 4};
  PRODUCT(d, a, b);
  for (int i = 0; i < 4; ++i) y[(i < 2 ? g : g + 8) * 8 + 2 * p + i % 2] = float(d[i]);
"""


@needs_compiler
@pytest.mark.parametrize(
    ("product", "bits", "total", "largest"),
    [
        ("mma_m16n8k32<e4m3_t>", "from_float<e4m3_t>(VALUE).bits", "float", 8),
        ("mma_m16n8k32_by_f16", "from_float<e4m3_t>(VALUE).bits", "float", 8),
        ("mma_m16n8k32<i8>", "u8(i8(VALUE))", "i32", 128),
    ],
)
def test_8_bit_matrix_instructions_multiply(product: str, bits: str, total: str, largest: int) -> None:
    rng = np.random.default_rng(0)
    A, B = rng.integers(-largest, largest, (16, 32)), rng.integers(-largest, largest, (32, 8))
    body = EIGHT_BITS.replace("PRODUCT", product).replace("SUM", total)
    for argument in ("x[row * 32 + column]", "x[512 + row * 8 + g]"):
        body = body.replace(f"BITS({argument})", bits.replace("VALUE", argument))
    start = np.arange(128).reshape(16, 8) // 64 * 2 + np.arange(8) % 2 + 1
    for order in ORDERS:
        x = np.concatenate([A.ravel(), B.ravel()])
        y = run(body, x, block=32, helpers=True, order=order, seed=3)
        np.testing.assert_array_equal(y[:128].reshape(16, 8), A @ B + start)


@needs_compiler
def test_every_e4m3_is_converted_to_f16_exactly() -> None:
    body = """
  u32 pairs[2];
  e4m3_to_f16(u32(t) | u32(255 - t) << 8 | u32(t) << 16 | u32(t) << 24, pairs);
  const u16 halves[4] = {u16(pairs[0]), u16(pairs[1]), u16(pairs[0] >> 16), u16(pairs[1] >> 16)};
  for (int i = 0; i < 4; ++i) y[4 * t + i] = to_float(half_t{halves[i]});
"""
    y = run(body, np.zeros(1024), block=256, helpers=True)[:1024].reshape(256, 4)
    every = np.arange(256, dtype=np.uint8).view(numpy_dtype("e4m3")).astype(np.float32)
    for element, expected in enumerate((every, every[::-1], every, every)):
        np.testing.assert_array_equal(y[:, element], expected)
        np.testing.assert_array_equal(
            np.signbit(y[:, element][expected == 0]), np.signbit(expected[expected == 0])
        )


@needs_compiler
def test_tf32_rounds_to_eleven_bits_and_multiplies() -> None:
    rng = np.random.default_rng(0)
    A, B = rng.integers(-8, 9, (16, 8)), rng.integers(-8, 9, (8, 8))
    body = """
  const int g = t / 4, p = t % 4;
  const float* B = x + 128;
  const u32 a[4] = {to_tf32(x[g * 8 + p]), to_tf32(x[(g + 8) * 8 + p]), to_tf32(x[g * 8 + p + 4]),
                    to_tf32(x[(g + 8) * 8 + p + 4])};
  const u32 b[2] = {to_tf32(B[p * 8 + g]), to_tf32(B[(p + 4) * 8 + g])};
  float d[4] = {};
  mma_m16n8k8_tf32(d, a, b);
  for (int i = 0; i < 4; ++i) y[(g + 8 * (i / 2)) * 8 + 2 * p + i % 2] = d[i];
"""
    y = run(body, np.concatenate([A.ravel(), B.ravel()]), block=32, helpers=True)
    np.testing.assert_array_equal(y[:128].reshape(16, 8), A @ B)
    rounded = run(
        "y[t] = __uint_as_float(to_tf32(x[t]));",
        [1 + 2.0**-11, 1 + 2.0**-12, -1 - 2.0**-11],
        block=3,
        helpers=True,
    )
    np.testing.assert_array_equal(rounded, np.float32([1 + 2.0**-10, 1, -1 - 2.0**-10]))


@needs_compiler
def test_async_copies_fill_with_zeros_and_ignore_source_of_empty_copy() -> None:
    body = """
  __shared__ alignas(16) float s[64];
  const int left = n - 4 * t;
  cp_async_cg(s + 4 * t, left > 0 ? x + 4 * t : x, left <= 0 ? 0 : left < 4 ? 4 * left : 16);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int i = t; i < n; i += 16) y[i] = s[i] + s[n + i / 4];
"""
    for order in ORDERS:
        for sanitize in (False, True):
            y = run(body, X[:31], block=16, helpers=True, order=order, sanitize=sanitize)
            np.testing.assert_array_equal(y, X[:31])


@needs_compiler
def test_epilogues_match_reference() -> None:
    x = np.linspace(-6, 6, 64, dtype=np.float32)
    np.testing.assert_array_equal(run("y[t] = Relu()(x[t]);", x, helpers=True), np.maximum(x, 0))
    y = run("y[t] = Gelu()(x[t]);", x, helpers=True)
    import math

    expected = [0.5 * float(v) * (1 + math.erf(float(v) / math.sqrt(2))) for v in x]
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6)
    x[:5] = [-1e30, -100, 88, 1e30, np.nan]
    for name, factor in {"Silu": x.astype(float), "Sigmoid": np.ones(64)}.items():
        y = run(f"y[t] = {name}()(x[t]);", x, helpers=True)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(y, factor / (1 + np.exp(-x.astype(float))), rtol=1e-6, atol=1e-35)


# -- building ------------------------------------------------------------------------------------------------


@needs_compiler
def test_executable_is_cached_regardless_of_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    def sources(comment: str) -> ToyVariant:
        return ToyVariant(f"{SIGNATURE} y[t] = 3 * x[t]; {comment}\n}}")

    first = build(sources(""), Toy(n=64), CONFIG)
    monkeypatch.setattr(host_compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build(sources("// said better"), Toy(n=64), CONFIG) == first


@needs_compiler
def test_source_unsupported_by_emulator_is_not_a_kernel_failure() -> None:
    with pytest.raises(NotEmulated, match=r"kernel:3:.*cooperative_groups"):
        run("cooperative_groups::this_grid().sync();", X)


def test_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() is None
    with pytest.raises(NotEmulated, match=r"no g\+\+"):
        build(ToyVariant("anything"), Toy(n=1), CONFIG)


def test_compiler_path_that_does_not_exist_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="no-such-compiler"):
        find_compiler()


@needs_compiler
def test_unwritable_folder_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("TUNEBENCH_CACHE", str(blocker))
    with pytest.raises(InputError, match="TUNEBENCH_CACHE"):
        build(ToyVariant("__global__ void toy() {}"), Toy(n=1), CONFIG)


@needs_compiler
def test_input_of_wrong_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected 256 bytes.*got 12"):
        emulate(ToyVariant(SIGNATURE + "}"), Toy(n=64), CONFIG, {"x": X[:3], "factor": np.float32(2)})
