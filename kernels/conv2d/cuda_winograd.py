"""conv2d in CUDA C++ by Winograd's minimal filtering: 3 x 3 filters at stride 1 in f32, fprop and dgrad.

There are three steps, which pass their results through memory. The first transforms the filters and the
inputs of tiles of m x m outputs. The second is a batch of matrix products over channels, one per element of
the (m + 2)^2, by `gemm/cuda_simt`, whose parameters the space has. The third transforms the sums back and
applies the epilogue. Compared with a direct convolution, there are 4 times (m = 4) or 2.25 times (m = 2)
fewer products, but memory traffic is about 2.25 or 4 times the images, twice. So the algorithm pays where
there are many channels.

With channels last, the products are of tiles by channels, else of channels by tiles, so that neighbouring
threads access neighbouring elements in every step. dgrad is the same with mirrored filters and another
padding. `tunebench.kernels.conv2d._winograd` has the algorithm and its errors: m = 4 needs 32 summed channels
or more, m = 2 needs 8, because with fewer the transforms lose more accuracy than the tolerance allows.

Source: Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016, section 4.3.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.conv2d import _conv, _conv_emulation, _winograd
from tunebench.kernels.gemm.cuda_simt import VARIANT as PRODUCT
from tunebench.space import Config, Constraint, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.conv2d import Conv2d
from tunebench.workloads.operators.gemm import Gemm

THREADS = 256
"""Threads per block of the transforms."""
MAX_SCRATCH_BYTES = 2**32
"""Most memory for transformed inputs and sums."""
AFFORDABLE_FMA = 20_000_000
"""Most multiply-adds of an emulation workload: emulation does them in a moment."""


# -- as a product -----------------------------------------------------------------------------------------


def _channels(workload: Conv2d) -> tuple[int, int]:
    """Return the channels that an output sums over, and the channels of the output."""
    return _winograd.summed(workload), _winograd.results(workload)


def _outputs(workload: Conv2d) -> tuple[int, int]:
    """Return height and width of the output."""
    return (workload.p, workload.q) if workload.direction == "fprop" else (workload.h, workload.w)


def _tiles(workload: Conv2d, m: int) -> tuple[int, int]:
    """Return the tiles of an image, along rows and columns."""
    height, width = _outputs(workload)
    return ceil_div(height, m), ceil_div(width, m)


@functools.lru_cache(maxsize=256)
def product_of(workload: Conv2d, m: int) -> Gemm:
    """Return the products between the transforms: a batch, one per element of a transformed tile."""
    down, across = _tiles(workload, m)
    (terms, results), tiles = _channels(workload), workload.n * down * across
    if workload.layout == "nhwc":
        return Gemm(m=tiles, n=results, k=terms, dtype="f32", batch=(m + 2) ** 2, trans="nt")
    return Gemm(m=results, n=tiles, k=terms, dtype="f32", batch=(m + 2) ** 2, trans="nn")


def _scratch_bytes(workload: Conv2d, m: int) -> int:
    product = product_of(workload, m)
    return sum(tensor.nbytes for tensor in (*product.inputs(), *product.outputs()))


# -- space ------------------------------------------------------------------------------------------------


def tile_is_useful(m: Any, workload: Conv2d) -> Any:
    """A tile must be accurate with this number of channels, and the scratch must fit in memory."""
    of_use = np.zeros(np.shape(m), dtype=bool)
    for size in (2, 4):
        accurate = _winograd.summed(workload) >= _winograd.fewest_channels(size, workload)
        of_use |= (m == size) & (accurate and _scratch_bytes(workload, size) <= MAX_SCRATCH_BYTES)
    return of_use


def _on_tiles(constraint: Constraint) -> Constraint:
    """Return a constraint of gemm for convolutions: its workload is the product for m."""
    names = [*inspect.signature(constraint).parameters]
    if "workload" not in names:
        return constraint

    @functools.wraps(constraint)
    def holds(**columns: Any) -> Any:
        m, workload = columns.pop("m"), columns.pop("workload")
        valid = np.zeros(len(m), dtype=bool)
        for size in np.unique(m):
            rows = m == size
            part = {name: v if name == "device" else v[rows] for name, v in columns.items()}
            valid[rows] = constraint(workload=product_of(workload, int(size)), **part)
        return valid

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind) for name in ("m", *names)]
    holds.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return holds


SPACE = Space(
    (Parameter("m", (2, 4), "outputs per tile in each direction"), *PRODUCT.space.parameters),
    (tile_is_useful, *map(_on_tiles, PRODUCT.space.constraints)),
)


# -- source -----------------------------------------------------------------------------------------------

SOURCE = """
// Work of a thread of the transforms: one channel of a tile. Neighbouring threads access neighbours.
template <bool NHWC>
struct Work {
  i64 tile, tiles;
  int channel, image, row, column;  // row and column of the tile in its image

  __device__ __forceinline__ Work(int images, int channels, int down, int across)
      : tiles(i64(images) * down * across) {
    const i64 index = i64(blockIdx.x) * 256 + threadIdx.x;
    tile = NHWC ? index / channels : index % tiles;
    channel = int(NHWC ? index % channels : index / tiles);
    i64 rest = tile;
    column = int(take(rest, i64(across)));
    row = int(take(rest, i64(down)));
    image = int(rest);
  }
  __device__ __forceinline__ bool exists(int channels) const { return tile < tiles && channel < channels; }
  // Offset of element `point` of the transformed tile.
  __device__ __forceinline__ i64 at(int point, int channels) const {
    return NHWC ? (point * tiles + tile) * channels + channel
                : (i64(point) * channels + channel) * tiles + tile;
  }
  // Offset of a pixel of the tile's image.
  __device__ __forceinline__ i64 pixel(int y, int x, int height, int width, int channels) const {
    return NHWC ? ((i64(image) * height + y) * width + x) * channels + channel
                : ((i64(image) * channels + channel) * height + y) * width + x;
  }
};

// G g G^T of each filter, which dgrad mirrors: to [point][results][terms].
template <bool NHWC, bool DGRAD>
__global__ void __launch_bounds__(256)
transform_filters(const float* __restrict__ w, float* __restrict__ out, int results, int terms) {
  const i64 index = i64(blockIdx.x) * 256 + threadIdx.x, pairs = i64(results) * terms;
  if (index >= pairs) return;
  const i64 result = index / terms, term = index % terms;
  const i64 k = DGRAD ? term : result, c = DGRAD ? result : term, channels = DGRAD ? results : terms;
  const i64 first = NHWC ? k * 9 * channels + c : (k * channels + c) * 9, step = NHWC ? channels : 1;
  float half[N][3];
#pragma unroll
  for (int s = 0; s < 3; ++s) {
    float g[3], t[N];
#pragma unroll
    for (int r = 0; r < 3; ++r) g[r] = w[first + (DGRAD ? 8 - 3 * r - s : 3 * r + s) * step];
    transform_filter(g, t);
#pragma unroll
    for (int i = 0; i < N; ++i) half[i][s] = t[i];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float t[N];
    transform_filter(half[i], t);
#pragma unroll
    for (int j = 0; j < N; ++j) out[(i * N + j) * pairs + index] = t[j];
  }
}

// B^T d B of each tile's inputs; padding and pixels beyond the image are 0.
template <bool NHWC>
__global__ void __launch_bounds__(256)
transform_inputs(const float* __restrict__ x, float* __restrict__ out, int images, int channels, int height,
                 int width, int down, int across, int pad) {
  const Work<NHWC> work(images, channels, down, across);
  if (!work.exists(channels)) return;
  const int top = work.row * M - pad, left = work.column * M - pad;
  float half[N][N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float d[N], t[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
      d[i] = within(top + i, height) && within(left + j, width)
                 ? x[work.pixel(top + i, left + j, height, width, channels)]
                 : 0.0f;
    transform_input(d, t);
#pragma unroll
    for (int i = 0; i < N; ++i) half[i][j] = t[i];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float t[N];
    transform_input(half[i], t);
#pragma unroll
    for (int j = 0; j < N; ++j) out[work.at(i * N + j, channels)] = t[j];
  }
}

// Epilogue of A^T s A for each tile's sums.
template <bool NHWC, class E>
__global__ void __launch_bounds__(256)
transform_outputs(const float* __restrict__ sums, const float* __restrict__ scale,
                  const float* __restrict__ bias, const float* __restrict__ residual, float* __restrict__ out,
                  int images, int channels, int height, int width, int down, int across) {
  const Work<NHWC> work(images, channels, down, across);
  if (!work.exists(channels)) return;
  float half[M][N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float s[N], t[M];
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = sums[work.at(i * N + j, channels)];
    transform_output(s, t);
#pragma unroll
    for (int i = 0; i < M; ++i) half[i][j] = t[i];
  }
  const float factor = E::SCALE ? scale[work.channel] : 1.0f, constant = E::BIAS ? bias[work.channel] : 0.0f;
#pragma unroll
  for (int i = 0; i < M; ++i) {
    float t[M];
    transform_output(half[i], t);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const int y = work.row * M + i, x = work.column * M + j;
      if (y >= height || x >= width) continue;
      const i64 at = work.pixel(y, x, height, width, channels);
      out[at] = E::apply(t[j], factor, constant, E::RESIDUAL ? residual[at] : 0.0f);
    }
  }
}
"""


def _function(name: str, matrix: _winograd.Matrix) -> str:
    """Return a C++ function that multiplies a vector by a matrix, whose entries are constants of the code."""
    lines = []
    for row, entries in enumerate(matrix):
        terms = [f"{entry!r}f * in[{i}]" for i, entry in enumerate(entries) if entry]
        lines.append(f"  out[{row}] = {' + '.join(terms)};")
    sizes = f"const float (&in)[{len(matrix[0])}], float (&out)[{len(matrix)}]"
    return "\n".join([f"__device__ __forceinline__ void {name}({sizes}) {{", *lines, "}"]) + "\n"


@functools.cache
def _transforms(m: int) -> str:
    """Return the source of the transforms."""
    matrices = _winograd.transform(m)
    functions = (
        _function(f"transform_{name}", getattr(matrices, name)) for name in ("input", "filter", "output")
    )
    return f"constexpr int M = {m}, N = {m + 2};\n" + "".join(functions) + SOURCE


# -- the variant ------------------------------------------------------------------------------------------


class CudaWinograd(CudaVariant[Conv2d]):
    """3 x 3 filters at stride 1 in f32, in both layouts, with every epilogue; fprop and dgrad."""

    name = "cuda_winograd"
    operator = Conv2d
    space = SPACE

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why filter, type, number of channels or memory do not fit, or None."""
        reason = _winograd.limits(workload)
        if reason is not None:
            return reason
        if workload.dtype != "f32":
            return f"{self.key} multiplies f32, not {workload.dtype}"
        if workload.n * workload.h * workload.w >= 2**31:
            return f"{self.key} supports fewer than 2**31 pixels"
        sizes = [m for m in (2, 4) if tile_is_useful(np.array([m]), workload)[0]]
        if not sizes:
            return f"{self.key} needs more than {MAX_SCRATCH_BYTES} bytes of scratch"
        return PRODUCT.limits(product_of(workload, sizes[-1]), device)

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return the largest accurate tile, and gemm's default for the products."""
        sizes = [m for m in (4, 2) if tile_is_useful(np.array([m]), workload)[0]]
        configs = ({"m": m, **PRODUCT.default(product_of(workload, m), device)} for m in sizes)
        return self.space.first_valid(configs, workload=workload, device=device)

    def tiles(self, workload: Conv2d, config: Config) -> tuple[Tiling, ...]:
        """Return the tiling of an image, and that of the products."""
        height, width = _outputs(workload)
        rows, columns = ("p", "q") if workload.direction == "fprop" else ("h", "w")
        terms, results = ("c", "k") if workload.direction == "fprop" else ("k", "c")
        pixels = f"n*{rows}*{columns}"
        names = {"m": pixels, "n": results} if workload.layout == "nhwc" else {"m": results, "n": pixels}
        names["k"] = terms
        blocks = PRODUCT.tiles(product_of(workload, config["m"]), config)
        return (
            Tiling(dimension=rows, extent=height, tile=config["m"]),
            Tiling(dimension=columns, extent=width, tile=config["m"]),
            *(dataclasses.replace(tiling, dimension=names[tiling.dimension]) for tiling in blocks),
        )

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count the products only; transforms and their traffic are not counted."""
        of_2, of_4 = (PRODUCT.costs(product_of(workload, m), table, device) for m in (2, 4))

        def columns(kind: type, of_2: Any, of_4: Any) -> dict[str, Any]:
            return {
                field.name: np.where(table["m"] == 2, getattr(of_2, field.name), getattr(of_4, field.name))
                for field in dataclasses.fields(kind)
                if field.name not in ("mma_dtype", "execution")
            }

        costs, execution = columns(Costs, of_2, of_4), columns(Execution, of_2.execution, of_4.execution)
        # The transforms read images and filters, write the operands of the product, and read its results.
        passed_bytes = np.where(
            table["m"] == 2, *(1.0 * product_of(workload, m).traffic().total_bytes for m in (2, 4))
        )
        moved_bytes = workload.traffic().total_bytes + passed_bytes
        lost = -np.expm1(-passed_bytes / max(1.0, float(device.l2_bytes)))
        execution["memory_bytes"] = workload.traffic().total_bytes + lost * (
            execution["memory_bytes"] + passed_bytes
        )
        execution["further_clocks"] = (
            execution["further_clocks"]
            + moved_bytes / (device.sm_count * device.fill_bytes_per_clock)
            + 3 * device.l2_latency
        )
        costs["serial_launches"] = costs["serial_launches"] + 3
        return Costs(**costs, execution=Execution(**execution))

    def claims(self, workload: Conv2d, config: Config) -> tuple[str, ...]:
        """Return the instructions that gemm claims."""
        return PRODUCT.claims(product_of(workload, config["m"]), config)

    def source(self, workload: Conv2d, config: Config) -> str:
        """Return gemm's kernels and the transforms."""
        product = PRODUCT.source(product_of(workload, config["m"]), config)
        return product + helpers("conv") + _conv.injected(workload) + _transforms(config["m"])

    def scratch(self, workload: Conv2d, config: Config) -> tuple[Tensor, ...]:
        """Return the transformed inputs and filters, the sums, and gemm's scratch."""
        product, nhwc = product_of(workload, config["m"]), workload.layout == "nhwc"
        names = {"a": "inputs" if nhwc else "filters", "b": "filters" if nhwc else "inputs", "c": "sums"}
        tensors = (*product.inputs(), *product.outputs())
        passed_on = tuple(dataclasses.replace(tensor, name=names[tensor.name]) for tensor in tensors)
        return (*passed_on, *PRODUCT.scratch(product, config))

    def launches(self, workload: Conv2d, config: Config) -> tuple[Launch, ...]:
        """Return the launches: transforms of filters and inputs, gemm, transform of sums."""
        w, m, nhwc = workload, config["m"], workload.layout == "nhwc"
        fprop, (terms, results), (height, width) = w.direction == "fprop", _channels(w), _outputs(w)
        (images, filters), out = (tensor.name for tensor in w.inputs()[:2]), w.outputs()[0].name
        layout, grid = str(nhwc).lower(), (w.n, *_tiles(w, m))
        source = (w.h, w.w) if fprop else (w.p, w.q)
        names = {"a": "inputs" if nhwc else "filters", "b": "filters" if nhwc else "inputs", "c": "sums"}
        return (
            _transform(
                f"transform_filters<{layout}, {str(not fprop).lower()}>",
                *(filters, "filters", results, terms),
                threads=results * terms,
            ),
            _transform(
                f"transform_inputs<{layout}>",
                *(images, "inputs", w.n, terms, *source, *grid[1:], w.pad if fprop else 2 - w.pad),
                threads=terms * grid[0] * grid[1] * grid[2],
            ),
            *(
                dataclasses.replace(
                    launch,
                    arguments=tuple(
                        names.get(argument, argument) if isinstance(argument, str) else argument
                        for argument in launch.arguments
                    ),
                )
                for launch in PRODUCT.launches(product_of(w, m), config)
            ),
            _transform(
                f"transform_outputs<{layout}, {_conv.epilogue(w, split=1)}>",
                *("sums", *_conv.epilogue_tensors(w), out, w.n, results, height, width, *grid[1:]),
                threads=results * grid[0] * grid[1] * grid[2],
            ),
        )

    def emulation_workload(self, workload: Conv2d, config: Config) -> Conv2d:
        """Return a workload of few tiles and channels with the same edges."""
        w, m = workload, config["m"]
        bm, bn = (config[name] for name in (("bm", "bn") if w.layout == "nhwc" else ("bn", "bm")))
        terms, results = _channels(w)
        height, width = _outputs(w)
        # As many channels as accuracy needs; each buffer, and each part, of gemm is used.
        steps = (config["stages"] + 1) * config["split_k"]
        steps = max(steps, 1 + ceil_div(_winograd.fewest_channels(m, w), config["bk"]))
        small = w
        for of_tiles, of_results in ((2, 2), (1, 2), (1, 1)):
            few = (
                _conv_emulation.least(terms, config["bk"], steps),
                _conv_emulation.least(results, bn, of_results),
            )
            c, k = few if w.direction == "fprop" else (few[1], few[0])
            tall = _conv_emulation.least(height, m, 2)
            wide = _conv_emulation.least(width, m, max(1, bm * of_tiles // 2))
            grow = 2 - 2 * w.pad if w.direction == "fprop" else 0
            least = 3 - 2 * w.pad
            h, width_of_image = (max(1, least, extent + grow) for extent in (tall, wide))
            small = dataclasses.replace(w, n=min(w.n, 2), c=c, k=k, h=h, w=width_of_image)
            if product_of(small, m).flops() <= 2 * AFFORDABLE_FMA:
                break
        return small


def _transform(entry: str, *arguments: str | int, threads: int) -> Launch:
    """Return the launch of a transform with `threads` threads."""
    return Launch(
        entry=entry,
        grid=(ceil_div(threads, THREADS), 1, 1),
        block=(THREADS, 1, 1),
        arguments=tuple(a if isinstance(a, str) else Scalar("int", a) for a in arguments),
    )


VARIANT = CudaWinograd()
