#pragma once
// The sum of a row's exponentials if several blocks share the row. Needs softmax.cuh and row_split.cuh.

// Returns the result of a block's part to each thread.
template <int N, int THREADS, int V, class Source>
__device__ __forceinline__ Powers powers_of_part(const Part<THREADS, V>& my, const Source& source) {
  float z[N][V];
  Powers part = no_powers();
  for (int first = my.thread; first < my.count; first += THREADS * N)
    part.read(source, first, THREADS, my.count, z);
  part.join<THREADS>();
  return part;
}

// Stored by one thread.
__device__ __forceinline__ void store_powers(const Powers& part, float* target) {
  if (threadIdx.x == 0) store_vec(target, Vec<float, 2>{{part.top, part.total}});
}

// Returns the joined result of a row's parts to each thread of a block.
template <int THREADS>
__device__ __forceinline__ Powers powers_of_parts(const float* partial, int parts) {
  Powers row = no_powers();
  for (int part = threadIdx.x; part < parts; part += THREADS) {
    const Vec<float, 2> kept = load_vec<2>(partial + 2 * part);
    row.add(kept.at[0], kept.at[1]);
  }
  row.join<THREADS>();
  return row;
}
