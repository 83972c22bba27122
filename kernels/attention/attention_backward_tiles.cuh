#pragma once
// Row tile of a block of attention gradients, and its range of tiles of the other side. Needs types.cuh.

// Row tile of a block: rows of one head, of queries or of keys.
struct RowTile {
  int head, first;  // head of the whole batch; first row
};

// The tile of this block. Tiles with the most work come first, so that the others fill idle SMs. With BY_HEAD, blocks
// that run at the same time have the same head and share what they read; otherwise they have the same length.
template <bool BY_HEAD, bool LAST_IS_LONGEST>
__device__ __forceinline__ RowTile row_tile_of_block(int rows, int tile_rows) {
  const u32 tiles = u32(rows - 1) / u32(tile_rows) + 1, heads = gridDim.x / tiles;
  const u32 tile = BY_HEAD ? blockIdx.x % tiles : blockIdx.x / heads;
  const u32 head = BY_HEAD ? blockIdx.x / tiles : blockIdx.x % heads;
  return {int(head), int(LAST_IS_LONGEST ? tiles - 1 - tile : tile) * tile_rows};
}

// Tiles of the other side that a row tile iterates over, starting at `first`.
struct Range {
  int first, count;
};

