"""softmax in CUDA C++ with one block per row: a variant of an existing operator."""

from __future__ import annotations

import dataclasses

from tunebench.device import Device
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Scalar
from tunebench.workloads.operators.softmax import Softmax

# Without headers it compiles in milliseconds. Sizes are arguments, so that workloads share binaries.
SOURCE = """
template <int THREADS>
__device__ float all_of(float mine, float* partial, bool largest) {
  partial[threadIdx.x] = mine;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      const float other = partial[threadIdx.x + half];
      partial[threadIdx.x] = largest ? fmaxf(partial[threadIdx.x], other) : partial[threadIdx.x] + other;
    }
  }
  __syncthreads();
  const float result = partial[0];
  __syncthreads();  // all have read it before it is written again
  return result;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) softmax_row(const float* x, float* y, int cols) {
  __shared__ float partial[THREADS];
  x += (long long)blockIdx.x * cols;
  y += (long long)blockIdx.x * cols;

  float top = -3.4e38f;
  for (int j = threadIdx.x; j < cols; j += THREADS) top = fmaxf(top, x[j]);
  top = all_of<THREADS>(top, partial, true);

  float total = 0;
  for (int j = threadIdx.x; j < cols; j += THREADS) total += expf(x[j] - top);
  const float inverse = 1 / all_of<THREADS>(total, partial, false);

  for (int j = threadIdx.x; j < cols; j += THREADS) y[j] = expf(x[j] - top) * inverse;
}
"""


class BlockSoftmax(CudaVariant[Softmax]):
    """f32 of any size, without scale or mask."""

    name = "my_block"
    operator = Softmax
    space = Space((Parameter("threads", (32, 64, 128, 256, 512, 1024), "threads per block"),))

    def limits(self, workload: Softmax, device: Device) -> str | None:
        """Return why a workload is not supported, or None. Such a variant is skipped, never wrong."""
        plain = workload.dtype == "f32" and workload.prologue == "none"
        return None if plain else f"{self.key} supports f32 without a prologue only"

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return the configuration that you would ship untuned."""
        return Config({"threads": 256})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Return lower bounds of the work per block: two exponentials per element."""
        return Costs(
            blocks=workload.rows,
            full_blocks=workload.rows,
            threads=table["threads"],
            smem_bytes=4.0 * table["threads"],
            sfu=2.0 * workload.cols,
        )

    def source(self, workload: Softmax, config: Config) -> str:
        """Return the translation unit."""
        return SOURCE

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Return one launch with a block per row; tensors are passed by name, numbers as `Scalar`."""
        return (
            Launch(
                entry=f"softmax_row<{config['threads']}>",
                grid=(workload.rows, 1, 1),
                block=(config["threads"], 1, 1),
                arguments=("x", "y", Scalar("int", workload.cols)),
            ),
        )

    def emulation_workload(self, workload: Softmax, config: Config) -> Softmax:
        """Return a small workload with the same edges, for verification without a GPU."""
        cols = min(workload.cols, 2 * config["threads"] + workload.cols % config["threads"])
        return dataclasses.replace(workload, rows=min(workload.rows, 3), cols=cols)


VARIANT = BlockSoftmax()
