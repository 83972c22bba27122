#pragma once
// Products of gemm_wgmma.cuh whose k is divided among blocks. Needs gemm_wgmma.cuh and gemm_parts.cuh, which sums the
// parts.

// Tiles of which `parts` blocks each sum `length` elements of k, whole steps. The parts of a product follow one another
// as products of a batch do. What is beyond k is copied as zeros.
template <class C>
struct PartTiles : Tiles<C> {
  int parts, length;

  __device__ __forceinline__ PartTiles(int rows, int columns, int batch, int of_group, int parts_of_tile, int part_length)
      : Tiles<C>(rows, columns, batch * parts_of_tile, of_group), parts(parts_of_tile), length(part_length) {}
  __device__ __forceinline__ int matrix_of_a(const TileIndex& corner) const { return corner.batch / parts; }
  __device__ __forceinline__ int matrix_of_b(const TileIndex& corner) const { return corner.batch / parts; }
  __device__ __forceinline__ int first_k(const TileIndex& corner) const { return corner.batch % parts * length; }
  // Where the sums of `rows` rows of a part go: the slots of a tile follow one another, and those of tiles row by row.
  template <class Sum>
  __device__ __forceinline__ Target<Sum> target(Sum* partial, const TileIndex& first, int rows) const {
    const i64 row = i64(first.batch / parts) * tiles_of(this->m, C::BM) + first.m / C::BM;
    const i64 slot = (row * tiles_of(this->n, C::BN) + first.n / C::BN) * parts + first.batch % parts;
    Target<Sum> at = slot_target<C::BM, C::BN>(partial, slot, rows);
    at.corner += first.m % C::BM * C::BN;
    return at;
  }
};
