#pragma once
// The sum of a row's exponentials if several blocks share the row. Needs softmax.cuh and row_split.cuh. Lines that end
// with "edges" are for rows with edges only.

// The same row by single elements.
template <class T, bool MASKED, int V>  // edges
__device__ __forceinline__ Arguments<T, MASKED, 1> singly(const Arguments<T, MASKED, V>& source) {  // edges
  return {source.x, source.mask, source.scale};  // edges
}  // edges

// Returns the result of a block's part to each thread.
template <int N, int THREADS, int V, class Source>
__device__ __forceinline__ Powers powers_of_part(const Part<THREADS, V>& my, const Source& source) {
  const auto single = singly(source);  // edges
  float edge[Part<THREADS, V>::EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  float z[N][V];
  Powers part = no_powers();
  for (int first = my.thread; first < my.count; first += THREADS * N)
    part.read(source, first, THREADS, my.count, z);
  part.read(Loaded(), my.thread, THREADS, my.edges, edge);  // edges
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
