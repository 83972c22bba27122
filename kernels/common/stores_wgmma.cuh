#pragma once
// Results of gemm_wgmma.cuh that bulk copies store: each warp gathers 16 rows of 128 bytes in shared memory, as a box of
// the tensor map of c, and continues while the box is copied. Copies do not write what is beyond the edges of c. Needs
// gemm_wgmma.cuh.

// Two boxes per warp: one is filled while the other is copied.
constexpr int STORED_BOX_BYTES = 16 * 128;

// Stores the sums of 64 rows, of which `rows` are within c, and of C::BN columns from `first` on.
template <class C, class Sum, class Finishing>
__device__ __forceinline__ void store_boxes(const Sum (&sums)[1][C::BN / 8][4], u8* staging, const TensorMap& c_map,
                                            const TileIndex& first, int rows, const Finishing& finish) {
  using Out = typename C::Out;
  constexpr int SIZE = int(sizeof(Out)), LINE = 128 / SIZE, BOXES = C::BN / LINE;
  const int lane = int(threadIdx.x) % 32, group = lane / 4, place = lane % 4 * 2;
  const int first_row = WarpOfGroup<0, C::BN>::row();
  u8* const boxes = staging + int(threadIdx.x) / 32 * (2 * STORED_BOX_BYTES);
#pragma unroll
  for (int i = 0; i < BOXES; ++i) {
    u8* const box = boxes + i % 2 * STORED_BOX_BYTES;
    if (lane == 0) {
      if (BOXES % 2 == 1 && i == 0)
        wait_for_stores<0>();  // the last box of the rows before is this one
      else
        wait_for_stores<1>();
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < LINE / 8; ++j) {
      const int column = i * LINE + 8 * j + place;
      const Vec<float, 2> bias = finish.template bias_of<2>(column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int line = group + 8 * half, row = first_row + line;
        Vec<Out, 2> residual = {};
        if (row < rows && column < finish.columns) residual = finish.template residual_of<2>(row, column);
        const auto& four = sums[0][i * (LINE / 8) + j];
        store_vec(reinterpret_cast<Out*>(box + line * 128 + ((8 * j + place) * SIZE ^ group * 16)),
                  Vec<Out, 2>{finish(four[2 * half], bias.at[0], residual.at[0]),
                              finish(four[2 * half + 1], bias.at[1], residual.at[1])});
      }
    }
    fence_proxy_async();  // a copy reads what the lanes have written
    __syncwarp();
    if (lane == 0) {
      store_box_3d(shared_address(box), c_map, first.n + i * LINE, first.m + first_row, first.batch);
      commit_stores();
    }
  }
}

// Waits until all boxes have been read. Called by all threads before they exit.
__device__ __forceinline__ void finish_stores() {
  if (threadIdx.x % 32 == 0) wait_for_stores<0>();
}
