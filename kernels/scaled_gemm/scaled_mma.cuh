#pragma once
// Quantised matrices for gemm_mma.cuh: weights that are converted on their way to shared memory, and sums that are
// scaled. Needs types.cuh, ptx.cuh, gemm.cuh, gemm_simt.cuh, gemm_mma.cuh, scales.cuh and scaled_simt.cuh.

// A tile of lines along K that goes through registers: elements are scaled in f32 and rounded to In. The registers
// hold the tile after the one that was stored last, so that loads overlap with multiplications.
template <class In, class Quantized, int VEC>
struct ConvertedTile : Quantized {
  using Walk = typename Quantized::Walk;
  static constexpr bool ALONG_K = true, BY_LDMATRIX = true;
  static constexpr int LENGTH = Quantized::LENGTH, STEPS = LENGTH / MMA_K<In>;
  static constexpr int ELEMENTS = Quantized::EXTENT * LENGTH;  // without padding
  static constexpr int COUNT = VEC * Quantized::PER, WIDTH = COUNT < 8 ? COUNT : 8;  // of an access; of a store
  using Layout = typename LayoutOf<In, LENGTH, true>::type;

  __device__ __forceinline__ ConvertedTile(const Quantized& tile, int k) : Quantized(tile) {
    this->load_part(min(k, LENGTH));
  }

  // Stores the next tile and loads the one after it; `k_left` counts from the tile that is stored.
  __device__ __forceinline__ void copy(In* shared, int k_left) {
#pragma unroll
    for (int i = 0; i < Walk::COUNT; ++i) {
      if (!Walk::takes(i)) continue;
      const int line = Walk::line() + Walk::line_step(i), at = (Walk::place() + Walk::place_step(i)) * COUNT;
      float values[COUNT];
      this->scaled_access(i, values);
#pragma unroll
      for (int first = 0; first < COUNT; first += WIDTH) {
        Vec<In, WIDTH> rounded;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) rounded.at[e] = from_float<In>(values[first + e]);
        store_vec(shared + Layout::offset(line, at + first), rounded);
      }
    }
    if (k_left > LENGTH) this->load_part(min(k_left - LENGTH, LENGTH));
  }
};

// Sums of a warp times the scales of their rows and columns; MapA and MapB have one scale, or one for each row.
template <class Grid, class MapA, class MapB, class Sum>
__device__ __forceinline__ void scale_sums(float (&results)[Grid::M / 16][Grid::N / 8][4],
                                           const Sum (&sums)[Grid::M / 16][Grid::N / 8][4], const MapA& of_a,
                                           const MapB& of_b, int row, int column, int m, int n) {
  const int lane = threadIdx.x % 32;
  const int first_row = row + Grid::row() + lane / 4, first_column = column + Grid::column() + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < Grid::N / 8; ++j)
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int at_n = first_column + 8 * j + side;
      const float by_column = at_n < n ? to_float(of_b.scale[of_b.place(at_n, 0)]) : 0.0f;
#pragma unroll
      for (int i = 0; i < Grid::M / 16; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at_m = first_row + 16 * i + 8 * half;
          const float by_row = at_m < m ? of_a.scale[of_a.place(at_m, 0)] : 0.0f;
          results[i][j][2 * half + side] = float(sums[i][j][2 * half + side]) * by_row * by_column;
        }
    }
}
