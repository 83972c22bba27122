"""Gradients of softmax in CUDA C++: threads share a row, which is kept or read twice.

Softmax sums y dy over a row, and keeps both tensors until the sum is known. Log-softmax sums dy and keeps
only dy; y is read once, for the result. See `tunebench.kernels.common.row_block` for the parameters.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype, flag, helpers
from tunebench.kernels.common.row_block import CudaRowBlock, RowWork, kernels_for_rows, row_costs, row_space
from tunebench.space import Config, Table
from tunebench.variant import Argument, Costs, Launch, Scalar
from tunebench.workloads.operators.softmax import Softmax

KERNELS = r"""
#define BACKWARD_PARAMETERS \
  const T *__restrict__ y, const T *__restrict__ dy, float scale, T *__restrict__ dx, int rows, int cols

template <class T, bool LOG, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) softmax_backward_registers(BACKWARD_PARAMETERS) {
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const Gradient<T, LOG, V> row = {y + my.offset, dy + my.offset, scale};
  const Gradient<T, LOG, 1> single = {row.y, row.dy, scale};  // edges
  float edge_p[my.EDGES][1], edge_g[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge_p[n], edge_g[n]); });  // edges
  float p[N][V], g[N][V], total = 0.0f;
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int vector, int n) { row.load(vector, p[n], g[n]); });
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int, int n) { total += row.sum_of(p[n], g[n]); });
  my.each_edge([&](int, int n) { total += single.sum_of(edge_p[n], edge_g[n]); });  // edges
  total = reduce_row<ROW_THREADS>(total, Sum());
  my.each_edge([&](int i, int n) { single.store(dx + my.offset, i, total, edge_p[n], edge_g[n]); });  // edges
  each_held_vector<N>(my.thread, my.STEP, my.count,
                      [&](int vector, int n) { row.store(dx + my.offset, vector, total, p[n], g[n]); });
}

template <class T, bool LOG, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) softmax_backward_shared(BACKWARD_PARAMETERS) {
  extern __shared__ float all_kept[];
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const Gradient<T, LOG, V> row = {y + my.offset, dy + my.offset, scale};
  const Gradient<T, LOG, 1> single = {row.y, row.dy, scale};  // edges
  float edge_p[my.EDGES][1], edge_g[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge_p[n], edge_g[n]); });  // edges
  const KeptRow<V> kept_g = {all_kept + my.row_of_block * cols, my.count};
  const KeptRow<V> kept_p = {all_kept + (ROWS + my.row_of_block) * cols, my.count};  // unused if LOG
  float p[N][V], g[N][V], total = 0.0f;
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { row.load(vector, p[n], g[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      total += row.sum_of(p[n], g[n]);
      kept_g.put(vector, g[n]);
      if constexpr (!LOG) kept_p.put(vector, p[n]);
    });
  }
  my.each_edge([&](int, int n) { total += single.sum_of(edge_p[n], edge_g[n]); });  // edges
  total = reduce_row<ROW_THREADS>(total, Sum());
  my.each_edge([&](int i, int n) { single.store(dx + my.offset, i, total, edge_p[n], edge_g[n]); });  // edges
  for (int first = my.thread; first < my.count; first += my.STEP * N)
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      kept_g.get(vector, g[n]);
      if constexpr (!LOG) kept_p.get(vector, p[n]);
      row.store(dx + my.offset, vector, total, p[n], g[n]);
    });
}

template <class T, bool LOG, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) softmax_backward_online(BACKWARD_PARAMETERS) {
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const Gradient<T, LOG, V> row = {y + my.offset, dy + my.offset, scale};
  const Gradient<T, LOG, 1> single = {row.y, row.dy, scale};  // edges
  float edge_p[my.EDGES][1], edge_g[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge_p[n], edge_g[n]); });  // edges
  float p[N][V], g[N][V], total = 0.0f;
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { row.load(vector, p[n], g[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int, int n) { total += row.sum_of(p[n], g[n]); });
  }
  my.each_edge([&](int, int n) { total += single.sum_of(edge_p[n], edge_g[n]); });  // edges
  total = reduce_row<ROW_THREADS>(total, Sum());
  my.each_edge([&](int i, int n) { single.store(dx + my.offset, i, total, edge_p[n], edge_g[n]); });  // edges
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { row.load(vector, p[n], g[n]); });
    each_vector<N>(first, my.STEP, my.count,
                   [&](int vector, int n) { row.store(dx + my.offset, vector, total, p[n], g[n]); });
  }
}
"""


def _kept(workload: Softmax) -> int:
    """Return the tensors whose rows are kept until the sum is known: y and dy, or dy only."""
    return 1 if workload.log else 2


class CudaBlockSoftmaxBackward(CudaRowBlock[Softmax]):
    """Backward variant for every size and type, with fused scale."""

    name = "cuda_block_backward"
    operator = Softmax
    direction = "backward"
    edges = True
    space = row_space(_kept, edges=True)

    def kept(self, workload: Softmax) -> int:
        """Return the tensors whose rows are kept."""
        return _kept(workload)

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count the product's sum, a difference and two products; log-softmax has as many.

        The first addition of log-softmax is not counted, since the compiler may drop it.
        """
        log = workload.log
        work = RowWork(
            row_tensors=2,
            fma=(3.0, 3.0) if log else (4.0, 4.0),
            sfu=(1.0, 1.0) if log else (0.0, 0.0),
            sums=1,
            reductions=1,
            kept=_kept,
            read_again=1 if log else 2,
        )
        return row_costs(workload, table, device, work)

    def claims(self, workload: Softmax, config: Config) -> tuple[str, ...]:
        """Return the special-function unit if there are exponentials."""
        return ("MUFU",) if workload.log else ()

    def source(self, workload: Softmax, config: Config) -> str:
        """Return all three kernels; the entry selects the one that is instantiated."""
        kernels = kernels_for_rows(KERNELS, workload, config)
        return helpers("types", "reduce", "row_block", "softmax_backward") + kernels

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        scale: Argument = "scale" if workload.has_scale else Scalar("float", 1.0)
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        types = f"{ctype(workload.dtype)}, {flag(workload.log)}"
        return self.launch(workload, config, "softmax_backward", types, ("y", "dy", scale, "dx", *sizes))


VARIANT = CudaBlockSoftmaxBackward()
