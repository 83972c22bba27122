#pragma once
// Tiles of a grouped product: each group has rows of A and C, and a matrix B of its own. Needs types.cuh and gemm.cuh.

// All tiles in a row, group by group; how many a group has is only known here, from the sizes in device memory. A block
// asks for tiles of rising index and walks from group to group: all of its threads alike, so that nothing is shared.
template <int BM>
class GroupedTiles {
 public:
  // Group g has the rows from offsets[g] up to offsets[g + 1]; `tiles_n` tiles lie side by side.
  __device__ __forceinline__ GroupedTiles(const int* offsets, int groups, int tiles_n)
      : offsets_(offsets), groups_(groups), tiles_n_(tiles_n), end_(offsets[0]) {}

  // Goes to the group that has tile `index`; false if there is no such tile.
  __device__ __forceinline__ bool reach(u32 index) {
#pragma unroll 1
    while (index - first_ >= count_) {
      if (++group_ == groups_) return false;
      begin_ = end_;
      end_ = offsets_[group_ + 1];
      first_ += count_;
      // Of at most 2^31 tiles in all; a group without rows has none.
      count_ = end_ > begin_ ? u32(tiles_of(end_ - begin_, BM)) * u32(tiles_n_) : 0;
    }
    return true;
  }

  // The tile within its group, of the index that was reached.
  __device__ __forceinline__ TileIndex tile(u32 index, int group_m) const {
    return tile_at(index - first_, tiles_of(rows(), BM), tiles_n_, group_m);
  }
  __device__ __forceinline__ int group() const { return group_; }
  __device__ __forceinline__ int begin() const { return begin_; }  // its first row
  __device__ __forceinline__ int rows() const { return end_ - begin_; }

 private:
  const int* offsets_;
  int groups_, tiles_n_, group_ = -1, begin_ = 0, end_;
  u32 first_ = 0, count_ = 0;  // tiles before those of the group, and of the group
};
