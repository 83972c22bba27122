#pragma once
// Rows that do not all start at a multiple of an access. Needs types.cuh, reduce.cuh and row_block.cuh; row_split.cuh,
// too, for rows that several blocks share.

// The vectors of a row of at least 2 V elements whose accesses are aligned in memory and lie within the row. The
// elements before the first and after the last one, the row's edges, are accessed one by one, so that no thread touches
// another row or memory beyond the tensor. STEP threads have the edges: `thread`, `thread + STEP`, ... of `edges`.
template <int STEP, int V>
struct Edges {
  static constexpr int EDGES = ceil_div(2 * (V - 1), STEP);  // of a thread, at most
  int first_edge, before, vectors, edges;

  // `row`: offset of the row in elements. Only threads for which `owned` holds have edges.
  __device__ __forceinline__ Edges(int thread, size_t row, int cols, bool owned) {
    first_edge = thread;
    before = (V - int(row % V)) % V;
    vectors = (cols - before) / V;
    edges = owned ? cols - vectors * V : 0;
  }

  // The offset of a vector of the row, `vector` after the first.
  __device__ __forceinline__ size_t start(size_t row, int vector = 0) const {
    const size_t offset = row + before + size_t(vector) * V;
#ifdef TUNEBENCH_EMULATE
    return offset;
#else
    // The same number, but the compiler does not see how it is computed: NVRTC 13 would store some vectors by elements.
    return offset >> 32 << 32 | __byte_perm(u32(offset), 0, 0x3210);
#endif
  }

  // Calls `f(element, n)` for the thread's elements of the edges, counted from the first vector.
  template <class F>
  __device__ __forceinline__ void each_edge(F f) const {
    each_vector<EDGES>(first_edge, STEP, edges,
                       [&](int edge, int n) { f(edge < before ? edge - before : edge - before + vectors * V, n); });
  }
};

// As Share, for rows with edges. The base has the start of the row; `count` and `offset` are those of vectors.
template <int ROW_THREADS, int ROWS, int V>
struct EdgedShare : Share<ROW_THREADS, ROWS, V>, Edges<ROW_THREADS, V> {
  using Base = Share<ROW_THREADS, ROWS, V>;
  int count;  // 0 if the row is beyond the end
  size_t offset;

  __device__ __forceinline__ EdgedShare(int rows, int cols)
      : Base(rows, cols), Edges<ROW_THREADS, V>(Base::thread, Base::offset, cols, Base::count > 0) {
    count = Base::count > 0 ? this->vectors : 0;
    offset = this->start(Base::offset);
  }
};

// As Part, for rows with edges, which the first block of a row has.
template <int THREADS, int V>
struct Part;
template <int THREADS, int V>
struct EdgedPart : Edges<THREADS, V>, Part<THREADS, V> {
  using Base = Part<THREADS, V>;
  size_t offset;

  __device__ __forceinline__ explicit EdgedPart(int cols)
      : Edges<THREADS, V>(threadIdx.x, size_t(blockIdx.x) * cols, cols, blockIdx.y == 0), Base(this->vectors * V) {
    // The base takes the row to consist of its vectors.
    const int begin = int(Base::offset / V - size_t(blockIdx.x) * this->vectors);
    offset = this->start(size_t(blockIdx.x) * cols, begin);
  }
};

// Elements that are loaded already, for functions that load vectors.
struct Loaded {
  template <int V>
  __device__ __forceinline__ void load(int, float (&)[V]) const {}
};

// An array of `count` elements, from element `at` on. Its base is aligned.
template <class T, int V>
struct Unaligned {
  const T* base;
  int at, count;

  __device__ __forceinline__ Unaligned operator+(int elements) const { return {base, at + elements, count}; }
};

template <class T>
__device__ __forceinline__ float element_of(const u32* words, int i) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(words[i]);
  else return to_float(T{u16(words[i / 2] >> i % 2 * 16)});
}

// Loads V elements that start anywhere: two aligned accesses, whose words are shifted. The array's last elements are
// loaded one by one, and those beyond the end are 0.
template <class T, int V>
__device__ __forceinline__ void load_floats(const Unaligned<T, V>& source, float (&values)[V]) {
  constexpr int WORDS = ceil_div(V * int(sizeof(T)), 4), PER_WORD = 4 / int(sizeof(T));
  const int shift = source.at % V, first = source.at - shift;
  if (V == 1 || first + 2 * V > source.count) {
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = source.at + i < source.count ? to_float(source.base[source.at + i]) : 0.0f;
    return;
  }
  u32 words[2 * WORDS];
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const auto loaded = load_vec<WORDS>(reinterpret_cast<const u32*>(source.base + first) + part * WORDS);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[part * WORDS + i] = loaded.at[i];
  }
#pragma unroll
  for (int step = WORDS / 2; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < 2 * WORDS - step; ++i)
      if (shift & step * PER_WORD) words[i] = words[i + step];
  if constexpr (PER_WORD == 2) {
#pragma unroll
    for (int i = 0; i < 2 * WORDS - 1; ++i)
      if (shift & 1) words[i] = words[i] >> 16 | words[i + 1] << 16;
  }
#pragma unroll
  for (int i = 0; i < V; ++i) values[i] = element_of<T>(words, i);
}
