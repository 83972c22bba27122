"""softmax in CUDA C++, a block for each row: a variant of an operator that exists."""

from __future__ import annotations

import dataclasses

from tunebench.device import Device
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Scalar
from tunebench.workloads.operators.softmax import Softmax

# Header-free, so that it compiles in milliseconds; sizes are arguments, so that problems share binaries.
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
  __syncthreads();  // everyone has read it before it is written again
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
    """Serves every size of f32 without scale or mask."""

    name = "my_block"
    operator = Softmax
    space = Space((Parameter("threads", (32, 64, 128, 256, 512, 1024), "threads of a block"),))

    def limits(self, workload: Softmax, device: Device) -> str | None:
        """Say what it cannot do; it is then left out, never wrong."""
        plain = workload.dtype == "f32" and workload.prologue == "none"
        return None if plain else f"{self.key} does f32 without a prologue only"

    def default(self, workload: Softmax, device: Device) -> Config:
        """What you would ship without tuning."""
        return Config({"threads": 256})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """At least this much work for each block: two exponentials an element."""
        return Costs(
            blocks=workload.rows,
            full_blocks=workload.rows,
            threads=table["threads"],
            smem_bytes=4.0 * table["threads"],
            sfu=2.0 * workload.cols,
        )

    def source(self, workload: Softmax, config: Config) -> str:
        """The translation unit."""
        return SOURCE

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """A block a row. Tensors go by name, numbers as `Scalar`."""
        return (
            Launch(
                entry=f"softmax_row<{config['threads']}>",
                grid=(workload.rows, 1, 1),
                block=(config["threads"], 1, 1),
                arguments=("x", "y", Scalar("int", workload.cols)),
            ),
        )

    def emulation_workload(self, workload: Softmax, config: Config) -> Softmax:
        """A small problem with the same edges, on which it is checked where there is no GPU."""
        cols = min(workload.cols, 2 * config["threads"] + workload.cols % config["threads"])
        return dataclasses.replace(workload, rows=min(workload.rows, 3), cols=cols)


VARIANT = BlockSoftmax()
