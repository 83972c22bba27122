"""Cross entropy in CUDA C++: threads share a row, which is read once.

`cache=registers` holds a row until its maximum is known; `online` updates maximum and sum together. A row has
only two results. See `tunebench.kernels.common.row_block` for the other parameters.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.row_block import CudaRowBlock, RowWork, kernels_for_rows, row_costs, row_space
from tunebench.space import Config, Table
from tunebench.variant import Costs, Launch, Scalar
from tunebench.workloads.operators.cross_entropy import CrossEntropy

KERNELS = r"""
#define CROSS_ENTROPY_PARAMETERS                                                                   \
  const T *__restrict__ x, const i32 *__restrict__ target, float *__restrict__ loss,               \
      float *__restrict__ lse, int rows, int cols

// The first thread of a row writes its results.
template <class T, int ROW_THREADS, int ROWS, int V>
__device__ __forceinline__ void end_row(const Share<ROW_THREADS, ROWS, V>& my, const Powers& row, const T* x,
                                        const i32* target, float* loss, float* lse) {
  const int index = blockIdx.x * ROWS + my.row_of_block;
  if (my.thread != 0 || my.count == 0) return;
  store_loss(row, x + my.offset, target[index], loss + index, lse + index);
}

template <class T, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) cross_entropy_registers(CROSS_ENTROPY_PARAMETERS) {
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const Arguments<T, false, V> source = {x + my.offset, nullptr, LOG2_E};
  const Arguments<T, false, 1> single = {source.x, nullptr, LOG2_E};  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  float z[N][V], top = lowest(), total = 0.0f;
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int vector, int n) { source.load(vector, z[n]); });
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int, int n) { top = max_of(top, z[n]); });
  my.each_edge([&](int, int n) { top = max_of(top, edge[n]); });  // edges
  top = reduce_row<ROW_THREADS>(top, Max());
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int, int n) { total += raise<false>(top, z[n]); });
  my.each_edge([&](int, int n) { total += raise<false>(top, edge[n]); });  // edges
  total = reduce_row<ROW_THREADS>(total, Sum());
  end_row(my, {top, total}, x, target, loss, lse);
}

template <class T, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) cross_entropy_online(CROSS_ENTROPY_PARAMETERS) {
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const Arguments<T, false, V> source = {x + my.offset, nullptr, LOG2_E};
  const Arguments<T, false, 1> single = {source.x, nullptr, LOG2_E};  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  float z[N][V];
  Powers row = no_powers();
  for (int first = my.thread; first < my.count; first += my.STEP * N)
    row.read(source, first, my.STEP, my.count, z);
  row.read(Loaded(), my.thread, my.STEP, my.edges, edge);  // edges
  row.join<ROW_THREADS>();
  end_row(my, row, x, target, loss, lse);
}
"""

CACHES = ("registers", "online")


class CudaBlockCrossEntropy(CudaRowBlock[CrossEntropy]):
    """Forward variant for every size and type."""

    name = "cuda_block"
    operator = CrossEntropy
    direction = "forward"
    caches = CACHES
    edges = True
    space = row_space(caches=CACHES, edges=True)

    def costs(self, workload: CrossEntropy, table: Table, device: Device) -> Costs:
        """Count scaling, difference and sum; scaling and difference may be one instruction."""
        work = RowWork(
            row_tensors=1,
            fma=(2.0, 2.0),
            sfu=(1.0, 1.0),
            sums=1,
            read_again=0,
            row_outputs=0,
        )
        return row_costs(workload, table, device, work)

    def claims(self, workload: CrossEntropy, config: Config) -> tuple[str, ...]:
        """Return the special-function unit, which computes exponentials."""
        return ("MUFU",)

    def source(self, workload: CrossEntropy, config: Config) -> str:
        """Return both kernels; the entry selects the one that is instantiated."""
        kernels = kernels_for_rows(KERNELS, workload, config)
        return helpers("types", "reduce", "row_block", "softmax", "cross_entropy") + kernels

    def launches(self, workload: CrossEntropy, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        arguments = ("x", "target", "loss", "lse", *sizes)
        return self.launch(workload, config, "cross_entropy", ctype(workload.dtype), arguments)


VARIANT = CudaBlockCrossEntropy()
