#pragma once
// Tiles of a grouped product: each group has rows of A and C, and its own matrix B. Needs types.cuh and gemm.cuh.

// Tiles are numbered group by group. The number of tiles per group follows from the sizes in device memory. A block
// asks for tiles in ascending order and walks from group to group. All its threads do the same, so that nothing is shared.
template <int BM>
class GroupedTiles {
 public:
  // Group g has the rows from offsets[g] up to offsets[g + 1], and `tiles_n` tiles along n.
  __device__ __forceinline__ GroupedTiles(const int* offsets, int groups, int tiles_n)
      : offsets_(offsets), groups_(groups), tiles_n_(tiles_n), end_(offsets[0]) {}

  // Walks to the group that has tile `index`; returns false if there is no such tile.
  __device__ __forceinline__ bool reach(u32 index) {
#pragma unroll 1
    while (index - first_ >= count_) {
      if (++group_ == groups_) return false;
      begin_ = end_;
      end_ = offsets_[group_ + 1];
      first_ += count_;
      // There are at most 2^31 tiles; a group without rows has none.
      count_ = end_ > begin_ ? u32(tiles_of(end_ - begin_, BM)) * u32(tiles_n_) : 0;
    }
    return true;
  }

  // Tile `index` within its group.
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
