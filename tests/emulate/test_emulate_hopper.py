"""Emulation of Hopper features in every thread order; violations of PTX rules are reported."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from tests.emulate.ptx_layouts import SWIZZLES, im2col_pixels, matrix_descriptor, shared_image
from tests.support import needs_compiler
from tests.toy_variants import CONFIG, Toy, ToyVariant
from tunebench.emulate.emulator import ORDERS, EmulationFailed, Order, emulate, watch
from tunebench.errors import InputError
from tunebench.kernels import include
from tunebench.space import Config
from tunebench.variant import Launch, PixelBox, TensorMap

HELPERS = "".join(include(f"{name}.cuh") for name in ("types", "ptx", "ptx_hopper"))
SIGNATURE = """
__global__ void __launch_bounds__(384, 1)
toy(const __grid_constant__ TensorMap map, float* y, const float* x, int n) {
  extern __shared__ __align__(1024) u8 bytes[];
  const u32 shared = shared_address(bytes), t = threadIdx.x, barrier = shared + 60000;
  const float* const floats = reinterpret_cast<const float*>(bytes);
  auto meet = [] { cluster_arrive(); cluster_wait(); };
"""


def lines(n: int, **changes: Any) -> TensorMap:
    """Return a tensor map of x as lines of 32 f32 (128 bytes); an incomplete last line is left out."""
    facts = {"extents": (32, n // 32), "strides_bytes": (128,), "box": (32, 4), "swizzle_bytes": 0}
    return TensorMap(**{"tensor": "x", "dtype": "f32", **facts, **changes})


class HopperToy(ToyVariant):
    """Runs `toy(map, y, x, n)` with clusters."""

    def __init__(self, text: str, tensor_map: TensorMap, *, block: int, cluster: int) -> None:
        super().__init__(text, block=block, smem_bytes=65536)
        self._map, self._cluster = tensor_map, cluster

    def launches(self, workload: Toy, config: Config) -> tuple[Launch, ...]:
        (launch,) = super().launches(workload, config)
        arguments = (self._map, "y", "x", launch.arguments[-1])
        changes: dict[str, Any] = {"grid": (self._cluster, 1, 1), "cluster": self._cluster}
        return (dataclasses.replace(launch, arguments=arguments, **changes),)


def run(
    body: str,
    x: Any,
    order: Order = "forward",
    *,
    block: int = 128,
    cluster: int = 1,
    seed: int = 1,
    **boxes: Any,
) -> Any:
    """Emulate a kernel with this body on x."""
    values = np.asarray(x, np.float32)
    tensor_map = lines(len(values), **boxes)
    variant = HopperToy(HELPERS + SIGNATURE + body + "\n}", tensor_map, block=block, cluster=cluster)
    inputs = {"x": values, "factor": np.float32(2)}
    return emulate(variant, Toy(n=len(values)), CONFIG, inputs, order=order, seed=seed)["y"]


X = np.arange(1, 257, dtype=np.float32)
SET_UP = """
  if (t == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
"""
LOAD = """
  if (t == 0) {
    mbarrier_arrive_expect_tx(barrier, 512);
    copy_box_2d(shared, map, COORDINATES, barrier);
  }
  mbarrier_wait(barrier, 0);
"""

# -- barriers ------------------------------------------------------------------------------------------------


HAND_OVER = """
  volatile float* const cell = reinterpret_cast<float*>(bytes);
  if (t == 0) {
    mbarrier_init(barrier, 32);      // of those who write
    mbarrier_init(barrier + 8, 96);  // of those who read
    fence_mbarrier_init();
  }
  __syncthreads();
  float sum = 0;
  for (u32 round = 0; round < 5; ++round) {
    if (t < 32) {
      mbarrier_wait(barrier + 8, round % 2 ^ 1);
      cell[t] = x[t] + round;
      mbarrier_arrive(barrier);
    } else {
      mbarrier_wait(barrier, round % 2);
      sum += cell[(t + round) % 32];
      mbarrier_arrive(barrier + 8);
    }
  }
  y[t] = sum, y[t + 128] = 0;
"""


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_barrier_phase_ends_after_all_arrivals(order: Order) -> None:
    y = run(HAND_OVER, X, order)
    t = np.arange(32, 128)
    expected = sum(X[(t + round_) % 32] + round_ for round_ in range(5))
    np.testing.assert_array_equal(y[32:128], expected)


@needs_compiler
def test_barrier_orders_accesses_and_missing_wait_is_a_race() -> None:
    def seen(body: str) -> Any:
        variant = HopperToy(HELPERS + SIGNATURE + body + "\n}", lines(256), block=128, cluster=1)
        return watch(variant, Toy(n=256), CONFIG, {"x": X, "factor": np.float32(2)})

    body = HAND_OVER.replace("volatile ", "")
    seen(body)
    with pytest.raises(EmulationFailed, match="race on shared memory"):
        seen(body.replace("mbarrier_wait(barrier, round % 2);", ""))
    copied = seen(SET_UP + LOAD.replace("COORDINATES", "5, -1") + "y[t] = floats[t], y[t + 128] = 0;")
    (block,) = copied.counts.blocks
    assert block.fill_bytes == 3 * 27 * 4
    assert block.warp_instructions["cp.async.bulk.tensor"] == 1


# -- copies --------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("column", "line"), [(0, 0), (0, 6), (5, -2), (-3, 1), (40, 0), (0, -9)])
def test_box_is_zero_filled_beyond_tensor(order: Order, column: int, line: int) -> None:
    body = SET_UP + LOAD.replace("COORDINATES", f"{column}, {line}") + "y[t] = floats[t], y[t + 128] = 0;"
    y = run(body, X, order)
    expected = np.zeros((4, 32), np.float32)
    for i in range(4):
        for j in range(32):
            if 0 <= line + i < 8 and 0 <= column + j < 32:
                expected[i, j] = X[(line + i) * 32 + column + j]
    np.testing.assert_array_equal(y[:128], expected.ravel())


@needs_compiler
@pytest.mark.parametrize("swizzle_bytes", [32, 64, 128])
def test_swizzle_permutes_chunks_by_line_number(swizzle_bytes: int) -> None:
    width = swizzle_bytes // 4
    body = (
        SET_UP
        + "if (t == 0) {mbarrier_arrive_expect_tx(barrier, 1024); copy_box_2d(shared, map, 0, 0, barrier);}\n"
        + "mbarrier_wait(barrier, 0); y[t] = floats[t], y[t + 128] = floats[t + 128];"
    )
    box = {"box": (width, 256 // width), "extents": (width, 256 // width), "strides_bytes": (swizzle_bytes,)}
    y = run(body, X, swizzle_bytes=swizzle_bytes, **box).reshape(8, 8, 4)
    chunks = X.reshape(8, 8, 4)
    table = SWIZZLES[swizzle_bytes]
    for line in range(8):
        for position, chunk in enumerate(table[line % len(table)]):
            np.testing.assert_array_equal(y[line, position], chunks[line, int(chunk)])


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_multicast_of_3d_box_reaches_both_blocks(order: Order) -> None:
    # x as 2 planes of 4 lines; block r copies line 2 r of plane 1, and the next, to both blocks.
    body = (
        SET_UP
        + """
  meet();
  const u32 rank = cluster_rank();
  if (t == 0) {
    mbarrier_arrive_expect_tx(barrier, 512);
    copy_box_3d_multicast(shared + rank * 256, map, 0, int(2 * rank), 1, barrier, 3);
  }
  mbarrier_wait(barrier, 0);
  y[t + 128 * rank] = floats[t] + 1000 * blockIdx.x;
  meet();
"""
    )
    shape = {"extents": (32, 4, 2), "strides_bytes": (128, 512), "box": (32, 2, 1)}
    y = run(body, X, order, cluster=2, **shape)
    np.testing.assert_array_equal(y, np.concatenate([X[128:], X[128:] + 1000]))


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_of_cluster_arrive_at_remote_barriers(order: Order) -> None:
    body = """
  if (t == 0) {
    mbarrier_init(barrier, 2);
    fence_mbarrier_init();
  }
  __syncthreads();
  meet();
  if (t < 2) mbarrier_arrive_remote(cluster_address(barrier, t));
  mbarrier_wait(barrier, 0);
  y[t + 128 * cluster_rank()] = cluster_rank();
  meet();
"""
    np.testing.assert_array_equal(run(body, X, order, cluster=2), np.repeat([0, 1], 128))


# -- copies to global memory ---------------------------------------------------------------------------------

TO_Y = {"tensor": "y", "extents": (32, 8, 1), "strides_bytes": (128, 1024), "box": (32, 4, 1)}
STORE = """
  float* const box = reinterpret_cast<float*>(bytes);
  box[t] = x[t];
  fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    store_box_3d(shared, map, COORDINATES, 0);
    commit_stores();
    WAIT
  }
  __syncthreads();
  box[t] = 0;
"""


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("column", "line"), [(0, 2), (5, -2), (-3, 6), (40, 0)])
def test_stored_box_leaves_out_what_is_beyond_tensor(order: Order, column: int, line: int) -> None:
    body = STORE.replace("COORDINATES", f"{column}, {line}").replace("WAIT", "wait_for_stores<0>();")
    y = run(body, X, order, **TO_Y).reshape(8, 32)
    expected = np.full((8, 32), np.nan, np.float32)
    for i, j in np.ndindex(4, 32):
        if 0 <= line + i < 8 and 0 <= column + j < 32:
            expected[line + i, column + j] = X[32 * i + j]
    np.testing.assert_array_equal(y, expected)


@needs_compiler
@pytest.mark.parametrize(
    ("reason", "wait", "changes"),
    [
        ("exits with bulk copies .* not waited for", "", {}),
        ("exits with bulk copies .* not waited for", "wait_for_stores<1>();", {}),
        ("multiple of 128 bytes", "store_box_3d(shared + 64, map, 0, 0, 0);", {}),
        ("3 coordinates in a tensor of 2", "", {"extents": (32, 8), "strides_bytes": (128,), "box": (32, 4)}),
    ],
)
def test_invalid_stores_are_reported(reason: str, wait: str, changes: dict[str, Any]) -> None:
    body = STORE.replace("COORDINATES", "0, 0").replace("WAIT", wait)
    with pytest.raises(EmulationFailed, match=reason):
        run(body, X, **{**TO_Y, **changes})


# -- copies of pixels ----------------------------------------------------------------------------------------


def pixels(lower: Any, upper: Any, strides: Any, count: int = 8, **changes: Any) -> dict[str, Any]:
    """Return a map of x as 2 images of 4 rows of 8 pixels of 4 channels."""
    box = PixelBox(lower=lower, upper=upper, strides=strides)
    shape = {"extents": (4, 8, 4, 2), "strides_bytes": (16, 128, 512), "box": (4, count)}
    return {**shape, "pixel_box": box, **changes}


LOAD_PIXELS = """
  if (t == 0) {
    mbarrier_arrive_expect_tx(barrier, PIXELS * 16);
    copy_pixels_4d(shared, map, 0, COORDINATES, barrier);
  }
  mbarrier_wait(barrier, 0);
"""


def gathered(lower: Any, upper: Any, strides: Any, count: int, at: Any, offsets: Any) -> Any:
    """Return the pixels that an im2col copy gathers, zeros outside of the images."""
    images = X.reshape(2, 4, 8, 4)
    pixels = itertools.islice(im2col_pixels((8, 4, 2), lower, upper, strides, at, offsets), count)
    return np.array([images[pixel[::-1]] if pixel else np.zeros(4) for pixel in pixels])


COLUMNS = [
    # corners (width, height), strides, pixels, coordinates (width, height, image), offsets
    ((-1, -1), (-1, -1), (1, 1), 32, (2, 1, 0), (2, 1)),  # 3 x 3 filter tap across rows and images
    ((-1, -1), (-1, -1), (2, 2), 8, (3, 1, 0), (1, 2)),  # every second pixel
    ((0, 0), (-2, -2), (1, 1), 24, (3, 1, 1), (2, 2)),  # no padding, beyond the last image
    ((-3, 1), (2, 1), (3, 1), 12, (3, 2, 0), (4, 0)),  # one of other corners both ways
    ((-20, -20), (20, 20), (8, 7), 30, (-20, -20, 0), (21, 30)),
]


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("column", COLUMNS, ids=str)
def test_im2col_copy_gathers_pixels_of_filter_tap(column: Any, order: Order) -> None:
    lower, upper, strides, count, at, offsets = column
    numbers = ", ".join(map(str, (*at, *offsets)))
    body = LOAD_PIXELS.replace("COORDINATES", numbers).replace("PIXELS", str(count))
    y = run(
        SET_UP + body + "y[t] = floats[t], y[t + 128] = 0;",
        X,
        order,
        **pixels(lower, upper, strides, count),
    )
    expected = gathered(*column).ravel()
    assert len(expected) == 4 * count
    np.testing.assert_array_equal(y[: 4 * count], expected)


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_im2col_copy_zero_fills_missing_channels_and_swizzles(order: Order) -> None:
    # The 8 channels are the first two chunks of 16 bytes; the line number determines their swizzled place.
    body = SET_UP + LOAD_PIXELS.replace("COORDINATES", "0, 0, 0, 0, 0").replace("PIXELS * 16", "8 * 128")
    shape = {"extents": (8, 4, 4, 2), "strides_bytes": (32, 128, 512), "box": (32, 8), "swizzle_bytes": 128}
    body += "y[t] = floats[t], y[t + 128] = floats[t + 128];"
    y = run(body, X, order, **pixels((0, 0), (0, 0), (1, 1), **shape)).reshape(8, 8, 4)
    for line in range(8):
        for chunk in range(8):
            expected = X[line * 8 + chunk * 4 :][:4] if chunk < 2 else np.zeros(4)
            np.testing.assert_array_equal(y[line, chunk ^ line], expected)


@needs_compiler
@pytest.mark.parametrize("order", ORDERS)
def test_im2col_multicast_reaches_both_blocks(order: Order) -> None:
    body = (
        SET_UP
        + """
  meet();
  const u32 rank = cluster_rank();
  if (t == 0) {
    mbarrier_arrive_expect_tx(barrier, 256);
    copy_pixels_4d_multicast(shared + rank * 128, map, 0, -1, int(rank), 1, 1, 0, barrier, 3);
  }
  mbarrier_wait(barrier, 0);
  if (t < 64) y[t + 64 * rank] = floats[t], y[t + 128 + 64 * rank] = 0;
  meet();
"""
    )
    y = run(body, X, order, cluster=2, **pixels((-1, -1), (-1, -1), (1, 1)))
    rows = X.reshape(2, 4, 8, 4)[1, :2].ravel()
    np.testing.assert_array_equal(y[:128], np.concatenate([rows, rows]))


@needs_compiler
def test_im2col_copy_does_not_read_padding() -> None:
    body = SET_UP + LOAD_PIXELS.replace("COORDINATES", "-1, 0, 0, 0, 0").replace("PIXELS", "8")
    body += "y[t] = floats[t % 32], y[t + 128] = 0;"
    tensor_map = lines(256, **pixels((-1, -1), (-1, -1), (1, 1)))
    variant = HopperToy(HELPERS + SIGNATURE + body + "\n}", tensor_map, block=128, cluster=1)
    (block,) = watch(variant, Toy(n=256), CONFIG, {"x": X, "factor": np.float32(2)}).counts.blocks
    assert block.fill_bytes == 7 * 16
    assert block.warp_instructions["cp.async.bulk.tensor"] == 1


REPORTED_OF_PIXELS = [
    ("coordinate 1 is -2, outside of the box of pixels from -1 to 6", "-2, 0, 0, 0, 0", {}),
    ("coordinate 1 is 7, outside", "7, 0, 0, 0, 0", {}),
    ("coordinate 2 is 3, outside", "0, 3, 0, 0, 0", {}),
    ("coordinate 1 is 0, between pixels that are 2 apart", "0, -1, 0, 0, 0", {"strides": (2, 2)}),
    ("offset 1 is 256; it must be from 0 to 255", "0, 0, 0, 0, 256", {}),
]


@needs_compiler
@pytest.mark.parametrize(("reason", "numbers", "change"), REPORTED_OF_PIXELS)
def test_invalid_im2col_copies_are_reported(reason: str, numbers: str, change: dict[str, Any]) -> None:
    body = SET_UP + LOAD_PIXELS.replace("COORDINATES", numbers).replace("PIXELS", "8")
    box = pixels(**{"lower": (-1, -1), "upper": (-1, -1), "strides": (1, 1), **change})
    with pytest.raises(EmulationFailed, match=reason):
        run(body, X, **box)


@needs_compiler
def test_im2col_map_is_refused_by_tiled_copy() -> None:
    row = PixelBox(lower=(0,), upper=(0,), strides=(1,))
    box = {"extents": (4, 8, 8), "strides_bytes": (16, 128), "box": (4, 8), "pixel_box": row}
    load = LOAD.replace("copy_box_2d", "copy_box_3d").replace("COORDINATES", "0, 0, 0")
    with pytest.raises(EmulationFailed, match="tile wants another kind of map"):
        run(SET_UP + load, X, **box)
    boxes = {"extents": (4, 8, 4, 2), "strides_bytes": (16, 128, 512), "box": (4, 8, 1, 1)}
    load = LOAD_PIXELS.replace("COORDINATES", "0, 0, 0, 0, 0").replace("PIXELS", "8")
    with pytest.raises(EmulationFailed, match="im2col wants another kind of map"):
        run(SET_UP + load, X, **boxes)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"lower": (-129, 0)}, "corners from -128 to 127"),
        ({"upper": (0, 128)}, "corners from -128 to 127"),
        ({"lower": (-1,)}, "1 to 3 dimensions of pixels"),
        ({"lower": (3, 0), "upper": (-5, 0)}, "at least one pixel"),
        ({"strides": (9, 1)}, "pixel strides from 1 to 8"),
        ({"strides": (1, 0)}, "pixel strides from 1 to 8"),
        ({"count": 1025}, "1 to 1024 pixels"),
        ({"box": (4, 8, 1)}, "1 to 256 channels"),
        ({"extents": (4, 8), "strides_bytes": (16,)}, "1 to 3 dimensions of pixels"),
        ({"strides_bytes": (16, 120, 512)}, "multiples of 16 bytes and below"),
    ],
)
def test_invalid_im2col_maps_are_refused(change: dict[str, Any], rule: str) -> None:
    facts = {"lower": (0, 0), "upper": (0, 0), "strides": (1, 1), **change}
    with pytest.raises(InputError, match=rule):
        lines(256, **pixels(**facts))


# -- products ------------------------------------------------------------------------------------------------


LAYOUTS = [
    # swizzle in bytes and in the descriptor, along x, leading, stride
    (128, 1, False, 0, 1024),
    (128, 1, True, 4096, 1024),
    (128, 1, True, 2048, 8192),
    (64, 2, False, 0, 512),
    (64, 2, True, 1024, 8192),
    (32, 3, False, 0, 256),
    (32, 3, True, 512, 8192),
    (0, 0, False, 8192, 128),
    (0, 0, True, 2048, 128),
]
PRODUCT = """
  for (int i = t; i < 32768; i += 128)
    reinterpret_cast<TYPE*>(bytes + i / 16384 * 32768)[i % 16384] = from_float<TYPE>(x[i]);
  __syncthreads();
  auto describe = [](u32 start) {
    return u64((start & 0x3ffff) >> 4) | u64(LEADING) >> 4 << 16 | u64(STRIDE) >> 4 << 32 | u64(MODE) << 62;
  };
  float sums[8][4];
  BEFORE
  wgmma_m64<TYPE, 64, ALONG, ALONG>(sums, describe(shared), describe(shared + 32768), false);
  wgmma_m64<TYPE, 64, ALONG, ALONG>(sums, describe(shared), describe(shared + 32768), true);
  AFTER
  for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 4; ++i)
      y[(t / 32 * 16 + t % 32 / 4 + i / 2 * 8) * 64 + 8 * j + t % 4 * 2 + i % 2] = sums[j][i];
"""
BEFORE, WAIT = "wgmma_fence();", "wgmma_commit(); wgmma_wait<0>();"
AFTER = WAIT + "settle(sums);"


def product(
    stored: Any,
    order: Order = "forward",
    *,
    described: Any = None,
    before: str = BEFORE,
    after: str = AFTER,
    ctype: str = "half_t",
) -> tuple[bool, Any]:
    """Multiply A by B, twice into the same sums, as a warpgroup.

    Args:
        stored: Layout of both matrices in shared memory.
        order: Order in which the threads run.
        described: Layout in the matrix descriptors; None for the layout in `stored`.
        before: CUDA statements before the products.
        after: CUDA statements after the products.
        ctype: Type of the elements, which are small integers.

    Returns:
        Whether the result is right, and the result.
    """
    swizzle, _, along_x, leading, stride = stored
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (2, 64, 32 if ctype == "e4m3_t" else 16))
    x = np.concatenate([shared_image(matrix, swizzle, along_x, leading, stride) for matrix in (a, b)])
    _, mode, along_x, leading, stride = described or stored
    facts = {"LEADING": leading, "STRIDE": stride, "MODE": mode, "ALONG": int(along_x)}
    body = PRODUCT.replace("BEFORE", before).replace("AFTER", after).replace("TYPE", ctype)
    for name, value in facts.items():
        body = body.replace(name, str(value))
    d = run(body, x, order)[:4096].reshape(64, 64)
    return np.array_equal(d, 2 * a @ b.T), d


@needs_compiler
def test_matrix_descriptor_encodes_fields_as_the_isa_states() -> None:
    fields = [(0, 0, 1024), (1024, 8192, 1024), (0x3FFE0, 0x3FFF0, 0x1230), (0x41400, 16, 0x2F000)]
    calls = "".join(f"matrix_descriptor_128({','.join(map(str, field))}), " for field in fields)
    body = f"const u64 made[] = {{{calls}}}; if (t < 16) y[t] = float(made[t / 4] >> t % 4 * 16 & 0xffff);"
    words = run(body, X)[:16].reshape(4, 4)
    for field, parts in zip(fields, words, strict=True):
        assert sum(int(part) << 16 * i for i, part in enumerate(parts)) == matrix_descriptor(*field, 128)


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_wgmma_reads_layout_of_descriptor(layout: Any) -> None:
    for order in ORDERS:
        right, d = product(layout, order)
        assert right, f"{order}: {d}"


@needs_compiler
@pytest.mark.parametrize("ctype", ["bf16_t", "e4m3_t"])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout[2]], ids=str)
def test_wgmma_reads_layout_of_descriptor_for_every_type(layout: Any, ctype: str) -> None:
    right, d = product(layout, "reverse", ctype=ctype)
    assert right, d


@needs_compiler
@pytest.mark.parametrize(
    ("stored", "described"),
    [
        ((128, 1, True, 4096, 1024), (128, 1, True, 1024, 4096)),  # offsets swapped
        ((128, 1, False, 0, 1024), (128, 1, False, 0, 512)),  # stride too small
        ((128, 1, False, 0, 1024), (0, 0, False, 16, 1024)),  # no swizzle
        ((64, 2, False, 0, 512), (32, 3, False, 0, 512)),  # another swizzle
        ((128, 1, True, 4096, 1024), (128, 1, False, 4096, 1024)),  # the other dimension contiguous
    ],
    ids=str,
)
def test_wrong_wgmma_descriptor_changes_product(stored: Any, described: Any) -> None:
    assert product(stored)[0]
    assert not product(stored, described=described)[0]


@needs_compiler
def test_wgmma_sums_read_before_the_wait_or_before_settle_are_wrong() -> None:
    early = f"const float seen = sums[0][0]; {AFTER} sums[0][0] = seen;"
    assert not any(product(LAYOUTS[0], order, after=early)[0] for order in ORDERS)
    unsettled = f"{WAIT} const float seen = sums[0][0]; settle(sums); sums[0][0] = seen;"
    assert not any(product(LAYOUTS[0], order, after=unsettled)[0] for order in ORDERS)


@needs_compiler
def test_wgmma_reads_operands_as_late_as_the_wait() -> None:
    over = "__syncthreads(); bytes[t] = 0; __syncthreads();" + AFTER
    assert product(LAYOUTS[0], "forward", after=over)[0]
    assert not product(LAYOUTS[0], "reverse", after=over)[0]


@needs_compiler
@pytest.mark.parametrize(
    ("reason", "before", "after"),
    [
        ("no wgmma.fence", "", AFTER),
        ("has not waited for", BEFORE, ""),
        ("has not waited for", BEFORE, "wgmma_commit();"),
        ("has not waited for", BEFORE, "wgmma_commit(); wgmma_wait<1>();"),
        ("has not waited for", BEFORE, "wgmma_wait<0>();"),
        ("has not settled", BEFORE, WAIT),
        (
            "settle: the product .* has not been waited for",
            BEFORE,
            "wgmma_commit(); settle(sums); wgmma_wait<0>();",
        ),
        ("4 registers .* of which some", BEFORE, WAIT + "settle(reinterpret_cast<float(&)[1][4]>(sums[1]));"),
        ("deadlock.*126 of 128 threads", "wgmma_fence(); if (t / 2 == 40) return;", AFTER),
    ],
)
def test_wgmma_protocol_violations_are_reported(reason: str, before: str, after: str) -> None:
    with pytest.raises(EmulationFailed, match=reason):
        product(LAYOUTS[0], "reverse", before=before, after=after)


# -- violations of PTX rules ---------------------------------------------------------------------------------

LOAD_FIRST = LOAD.replace("COORDINATES", "0, 0")
ONE_PRODUCT = """
  float d[8][4];
  wgmma_fence();
  wgmma_m64k16<half_t, 64, false, false>(d, matrix_descriptor_128(shared + START, 0, 1024),
                                         matrix_descriptor_128(shared, 0, 1024), false);
  wgmma_commit();
  wgmma_wait<0>();
"""
ONE_PRODUCT_OF_BYTES = """
  float d[8][4];
  wgmma_fence();
  const u64 a = matrix_descriptor_128(shared, 0, 1024);
  const auto zero = [](const void*) { return 0.0f; };
  emulated::warpgroup_multiply({a, a, zero, "e4m3", 1, 64, false, true, false}, d[0]);
  wgmma_commit();
  wgmma_wait<0>();
"""
REPORTED = [
    ("no initialised barrier", "mbarrier_wait(barrier, 0);"),
    ("no multiple of 8", "mbarrier_init(barrier + 4, 1);"),
    ("initialised already", SET_UP + "if (t == 0) mbarrier_init(barrier, 2);"),
    ("was overwritten", SET_UP + "if (t == 5) bytes[barrier - shared + 7] = 0;"),
    ("parity 0 of the barrier .* lacks 1 of 1 arrivals and 0 bytes", SET_UP + "mbarrier_wait(barrier, 0);"),
    ("all 1 threads", SET_UP + "if (t < 2) mbarrier_arrive_expect_tx(barrier, 128);"),
    ("lacks 0 of 1 arrivals and 16 bytes", SET_UP + LOAD_FIRST.replace("512", "528")),
    ("lacks 0 of 1 arrivals and -16 bytes", SET_UP + LOAD_FIRST.replace("512", "496")),
    ("expects -512 bytes at the end", SET_UP + LOAD_FIRST.replace("512", "0")),
    ("no fence.mbarrier_init", SET_UP.replace("fence_mbarrier_init();", "") + LOAD_FIRST),
    ("no multiple of 128", SET_UP + LOAD_FIRST.replace("(shared,", "(shared + 64,")),
    ("not within shared memory", SET_UP + LOAD_FIRST.replace("(shared,", "(shared + 65536 - 256,")),
    ("no initialised barrier", SET_UP + LOAD_FIRST.replace("(shared,", "(barrier - 96,")),
    ("2 coordinates in a tensor of 3", SET_UP + LOAD_FIRST),
    ("no tensor map", SET_UP + "alignas(64) TensorMap other = {};" + LOAD_FIRST.replace("map,", "other,")),
    ("bulk copy under way", SET_UP + LOAD_FIRST.replace("mbarrier_wait(barrier, 0);", "")),
    ("block 1 of a cluster of 1", "cluster_address(barrier, 1);"),
    ("at the barrier of the cluster, where 383", "if (t) meet(); else __syncthreads();"),
    ("multiple of 8 from 24", "give_registers<20>();"),
    # 168 for each of 384 threads, not all that the SM has
    (
        "for 240 registers .* has 1792 left of the 64512",
        "if (t < 128) give_registers<64>(); else take_registers<240>();",
    ),
    ("for 240 registers .* of the 64512", "if (t < 128) give_registers<32>(); else take_registers<240>();"),
    ("setmaxnreg.inc: 160 registers, where the thread has 168", "take_registers<160>();"),
    ("setmaxnreg.dec: 176 registers, where the thread has 168", "give_registers<176>();"),
    ("of a warpgroup have", "if (t < 32) give_registers<24>();"),
    ("only 16-bit operands", ONE_PRODUCT_OF_BYTES),
    ("swizzle begins at 1152", ONE_PRODUCT.replace("START", "128")),
    ("issue different instructions", ONE_PRODUCT.replace("START", "t / 64 * 1024")),
]


@needs_compiler
@pytest.mark.parametrize(("reason", "body"), REPORTED)
def test_violations_of_ptx_rules_are_reported(reason: str, body: str) -> None:
    planes = {"extents": (32, 4, 2), "strides_bytes": (128, 512), "box": (32, 2, 1)}
    # What comes before it is expected is a matter of order.
    order: Order = "forward" if "at the end" in reason else "reverse"
    with pytest.raises(EmulationFailed, match=reason) as caught:
        run(body, X, order, block=384, **(planes if "tensor of 3" in reason else {}))
    assert not caught.value.timed_out


@needs_compiler
def test_registers_move_within_those_of_the_launch() -> None:
    body = "if (t >= 256) give_registers<24>(); else take_registers<240>(); y[t % 256] = 1;"
    for order in ORDERS:  # those that take wait for those that give
        np.testing.assert_array_equal(run(body, X, order, block=384), np.ones(256))


@needs_compiler
def test_launch_exceeding_declared_bounds_is_reported() -> None:
    with pytest.raises(EmulationFailed, match=r"512 threads a block; __launch_bounds__ allows 384"):
        run("", X, block=512)


@needs_compiler
def test_setmaxnreg_without_register_limit_is_reported() -> None:
    # ptxas ignores setmaxnreg unless the bounds name blocks, too.
    for bounds in ("", "__launch_bounds__(384)"):
        text = HELPERS + SIGNATURE.replace("__launch_bounds__(384, 1)", bounds) + "give_registers<24>();\n}"
        variant = HopperToy(text, lines(256), block=384, cluster=1)
        with pytest.raises(EmulationFailed, match="no effect without a register limit"):
            emulate(variant, Toy(n=256), CONFIG, {"x": X, "factor": np.float32(2)})


@needs_compiler
def test_shared_memory_of_exited_block_is_inaccessible() -> None:
    body = """
  if (t == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  meet();
  if (cluster_rank() == 0) return;
  __syncthreads();
  if (t == 0) mbarrier_arrive_remote(cluster_address(barrier, 0));
"""
    with pytest.raises(EmulationFailed, match="block 0 of the cluster has exited"):
        run(body, X, cluster=2)


@needs_compiler
def test_tensor_map_larger_than_tensor_is_refused() -> None:
    with pytest.raises(EmulationFailed, match="the tensor map of x reaches to byte 1152 of 1024"):
        run("", X, extents=(32, 9))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"box": (32,)}, "a box of the same rank"),
        ({"strides_bytes": ()}, "one stride for each"),
        ({"extents": (0, 8)}, "extents from 1"),
        ({"box": (32, 257)}, "a box of 1 to 256"),
        ({"strides_bytes": (120,)}, "multiples of 16 bytes and below"),
        ({"box": (3, 4)}, "lines of the box that are multiples"),
        ({"swizzle_bytes": 64}, "no longer than the swizzle"),
    ],
)
def test_invalid_tensor_maps_are_refused(change: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        lines(256, **change)


@pytest.mark.parametrize(
    ("blocks_per_sm", "cluster", "sms", "expected"),
    [
        (0, 1, 132, 1000),
        (1, 1, 132, 132),
        (2, 1, 132, 264),
        (1, 2, 113, 112),
        (1, 4, 2, 4),
        (9, 2, 132, 1000),
    ],
)
def test_persistent_blocks_match_device_capacity(
    blocks_per_sm: int, cluster: int, sms: int, expected: int
) -> None:
    launch = Launch(
        grid=(1000, 2, 3), block=(1, 1, 1), arguments=(), cluster=cluster, blocks_per_sm=blocks_per_sm
    )
    assert launch.grid_on(sms) == (expected, 2, 3)
