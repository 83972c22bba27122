"""Softmax in CUDA C++: threads share a row, which is kept in registers, in shared memory, or read twice.

Exponentials are powers of two of arguments scaled by log2 e. An element takes one if the row is kept, or if
the result is the logarithm. It takes two if the row is read twice, since maximum and sum are then computed
together. See `tunebench.kernels.common.row_block` for the parameters.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype, flag, helpers
from tunebench.kernels.common.row_block import CudaRowBlock, RowWork, kernels_for_rows, row_costs, row_space
from tunebench.space import Config, Table
from tunebench.variant import Argument, Costs, Launch, Scalar
from tunebench.workloads.operators.softmax import Softmax

KERNELS = r"""
#define SOFTMAX_PARAMETERS \
  const T *__restrict__ x, float scale, const T *__restrict__ mask, T *__restrict__ y, int rows, int cols

template <class T, bool MASKED, bool LOG, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) softmax_registers(SOFTMAX_PARAMETERS) {
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const Arguments<T, MASKED, V> source = {x + my.offset, mask + my.offset, scale * LOG2_E};
  const Arguments<T, MASKED, 1> single = {source.x, source.mask, source.scale};  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  float z[N][V], top = lowest(), total = 0.0f;
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int vector, int n) { source.load(vector, z[n]); });
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int, int n) { top = max_of(top, z[n]); });
  my.each_edge([&](int, int n) { top = max_of(top, edge[n]); });  // edges
  top = reduce_row<ROW_THREADS>(top, Max());
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int, int n) { total += raise<!LOG>(top, z[n]); });
  my.each_edge([&](int, int n) { total += raise<!LOG>(top, edge[n]); });  // edges
  const Finish<LOG> finish({top, reduce_row<ROW_THREADS>(total, Sum())});
  my.each_edge([&](int element, int n) { finish.store(y + my.offset + element, edge[n]); });  // edges
  each_held_vector<N>(my.thread, my.STEP, my.count,
                      [&](int vector, int n) { finish.store(y + my.offset + vector * V, z[n]); });
}

template <class T, bool MASKED, bool LOG, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) softmax_shared(SOFTMAX_PARAMETERS) {
  extern __shared__ float all_kept[];
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const Arguments<T, MASKED, V> source = {x + my.offset, mask + my.offset, scale * LOG2_E};
  const Arguments<T, MASKED, 1> single = {source.x, source.mask, source.scale};  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  const KeptRow<V> kept = {all_kept + my.row_of_block * cols, my.count};
  float z[N][V], top = lowest(), total = 0.0f;
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { source.load(vector, z[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      top = max_of(top, z[n]);
      kept.put(vector, z[n]);
    });
  }
  my.each_edge([&](int, int n) { top = max_of(top, edge[n]); });  // edges
  top = reduce_row<ROW_THREADS>(top, Max());
  for (int first = my.thread; first < my.count; first += my.STEP * N)
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      kept.get(vector, z[n]);
      total += raise<!LOG>(top, z[n]);
      if constexpr (!LOG) kept.put(vector, z[n]);
    });
  my.each_edge([&](int, int n) { total += raise<!LOG>(top, edge[n]); });  // edges
  const Finish<LOG> finish({top, reduce_row<ROW_THREADS>(total, Sum())});
  my.each_edge([&](int element, int n) { finish.store(y + my.offset + element, edge[n]); });  // edges
  for (int first = my.thread; first < my.count; first += my.STEP * N)
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      kept.get(vector, z[n]);
      finish.store(y + my.offset + vector * V, z[n]);
    });
}

template <class T, bool MASKED, bool LOG, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) softmax_online(SOFTMAX_PARAMETERS) {
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const Arguments<T, MASKED, V> source = {x + my.offset, mask + my.offset, scale * LOG2_E};
  const Arguments<T, MASKED, 1> single = {source.x, source.mask, source.scale};  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  float z[N][V];
  Powers row = no_powers();
  for (int first = my.thread; first < my.count; first += my.STEP * N)
    row.read(source, first, my.STEP, my.count, z);
  row.read(Loaded(), my.thread, my.STEP, my.edges, edge);  // edges
  row.join<ROW_THREADS>();
  const Finish<LOG> finish(row);
  if constexpr (!LOG) my.each_edge([&](int, int n) { raise<true>(row.top, edge[n]); });  // edges
  my.each_edge([&](int element, int n) { finish.store(y + my.offset + element, edge[n]); });  // edges
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { source.load(vector, z[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      if constexpr (!LOG) raise<true>(row.top, z[n]);
      finish.store(y + my.offset + vector * V, z[n]);
    });
  }
}
"""


class CudaBlockSoftmax(CudaRowBlock[Softmax]):
    """Forward variant for every size and type, with fused prologue."""

    name = "cuda_block"
    operator = Softmax
    direction = "forward"
    edges = True
    space = row_space(edges=True)

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count scaling, difference, sum and product, at two operations per instruction."""
        work = RowWork(
            row_tensors=1 + workload.has_mask,
            fma=(2.0, 2.5),
            sfu=(1.0, 1.0 if workload.log else 2.0),
            sums=1,
        )
        return row_costs(workload, table, device, work)

    def source(self, workload: Softmax, config: Config) -> str:
        """Return all three kernels; the entry selects the one that is instantiated."""
        kernels = kernels_for_rows(KERNELS, workload, config)
        return helpers("types", "reduce", "row_block", "softmax") + kernels

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows; a missing mask is passed as x and not read."""
        scale: Argument = "scale" if workload.has_scale else Scalar("float", 1.0)
        mask = "mask" if workload.has_mask else "x"
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        types = f"{ctype(workload.dtype)}, {flag(workload.has_mask)}, {flag(workload.log)}"
        return self.launch(workload, config, "softmax", types, ("x", scale, mask, "y", *sizes))


VARIANT = CudaBlockSoftmax()
