#pragma once
// Products of gemm_wgmma.cuh of f32 elements rounded to tf32. wgmma ignores the lower 13 bits of an element, so that both
// operands are rounded before: A in the registers of the consumers, B in shared memory, where it has been copied, by
// warps that would be idle. These also turn a tile of B whose lines are along N, which wgmma takes for 16-bit types
// only. Needs registers_wgmma.cuh.

// A tile of f32 in lines along X that is turned in shared memory into one in lines along K.
template <class T, int X, int K, int PARTS>
struct TurnedTile : PanelTile<T, X, K, false, PARTS> {
  static_assert(sizeof(T) == 4 && K == 32, "a panel is a square");
  static constexpr bool ALONG_X = false;
  static __device__ __forceinline__ u64 operand(u32 tile, int x, int step) {
    return PanelTile<T, X, K, true, PARTS>::operand(tile, x, step);
  }
};

constexpr int ROUNDING_WARPS = 3, SQUARE_BYTES = 32 * 128;

// Rounds 32 lines, in any order. Called by a warp.
__device__ __forceinline__ void round_lines(u8* lines) {
  Vec<float, 4>* const mine = reinterpret_cast<Vec<float, 4>*>(lines) + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < SQUARE_BYTES / 512; ++i) {
    Vec<float, 4> part = load_vec<4>(mine[32 * i].at);
#pragma unroll
    for (int e = 0; e < 4; ++e) part.at[e] = __uint_as_float(to_tf32(part.at[e]));
    store_vec(mine[32 * i].at, part);
  }
}

// Rounds 32 lines from `square` on and transposes them. Called by a warp. Two blocks of 16 x 16 at a time exchange their
// places, or keep them: all 32 x 32 elements would take too many registers. The copy has permuted the 16-byte parts of a
// line by its number modulo 8. Half of the lanes read a line and the others the fourth after it, from other banks.
__device__ __forceinline__ void round_and_turn(u8* tile, int square) {
  const int n = int(threadIdx.x) % 16, half = int(threadIdx.x) % 32 / 16;
  const int source = square + half * (4 * 128 + 64) + n * 4, target = square + n * 128 + (half ^ n % 8) * 16;
#pragma unroll 1
  for (int apart = 0; apart < 2; ++apart) {
    Vec<float, 4> blocks[2][2];
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int of_k = i / 4, of_n = of_k ^ apart, lines = i / 2 % 2 * 8, line = e + i % 2;
        const int at = (source ^ (of_n * 64 + line * 16)) + (of_k * 16 + lines + line) * 128;
        blocks[of_k][lines / 8].at[line] = __uint_as_float(to_tf32(*reinterpret_cast<const float*>(tile + at)));
      }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of_k = i / 2, of_n = of_k ^ apart;
      store_vec(reinterpret_cast<float*>(tile + (target ^ i * 32) + of_n * 16 * 128), blocks[of_k][i % 2]);
    }
  }
}

// The barrier of a stage whose tile of B has been rounded.
template <class C>
__device__ __forceinline__ u32 rounded(const Ring<C::STAGES>& place) {
  return place.barriers + 8 * (2 * C::STAGES + C::CONSUMERS + place.stage);
}

// Rounds the tiles of B, stage by stage, until all are done. Called by ROUNDING_WARPS warps.
template <class C, class AllTiles>
__device__ __forceinline__ void round_tiles(u8* ring, u32 barriers, AllTiles tiles, int k) {
  const int warp = int(threadIdx.x) / 32 % 4 - (4 - ROUNDING_WARPS);
  Ring<C::STAGES> place = {barriers};
  u32 left = 0;  // stages
  for (u32 index = tiles.first; tiles.reach(index); index += tiles.step) left += tiles_of(k, C::BK);
#pragma unroll 1
  for (; left > 0; --left) {
    u8* const tile = ring + place.stage * STAGE_BYTES<C> + C::TileA::BYTES;
    mbarrier_wait(place.full(), place.parity);
#pragma unroll 1
    for (int square = warp * SQUARE_BYTES; square < C::TileB::BYTES; square += ROUNDING_WARPS * SQUARE_BYTES) {
      if constexpr (C::B_K_CONTIGUOUS)
        round_lines(tile + square);
      else
        round_and_turn(tile, square);
    }
    fence_proxy_async();  // products read what the warp has written
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(rounded<C>(place));
    place.advance();
  }
}

// As `multiply`, of rounded elements.
template <class C, int COUNT, class Turns>
__device__ __forceinline__ void multiply_rounded(const u8* ring, u32 buffers, float (&sums)[COUNT][1][C::BN / 8][4],
                                                 int first_row, Ring<C::STAGES>& place, u32 steps, Turns& turn) {
  const auto load = [&](auto& operands, const u8* stage, u32) {
#pragma unroll
    for (int part = 0; part < C::BK / WGMMA_K<float>; ++part)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        u32(&four)[4] = operands[part][i];
        load_rows<typename C::TileA>(four, stage, first_row + 64 * i, WGMMA_K<float> * part);
#pragma unroll
        for (int r = 0; r < 4; ++r) four[r] = to_tf32(__uint_as_float(four[r]));
      }
  };
  const auto ready = [](const Ring<C::STAGES>& place_of_b) { mbarrier_wait(rounded<C>(place_of_b), place_of_b.parity); };
  multiply_loaded<C>(ring, buffers, load, ready, sums, place, steps, turn);
}

// As `multiply_tiles`, with warps that round B.
template <class C, class AllTiles, class Sum, class Store>
__device__ __forceinline__ void multiply_rounded_tiles(const BlockMemory<C>& memory, const AllTiles& tiles, int k,
                                                       const Sum& sum, const Store& store, const TensorMap& a_map,
                                                       const TensorMap& b_map) {
  by_role<C, ROUNDING_WARPS>(
      memory.barriers, [&] { copy_tiles<C>(memory.buffers, memory.barriers, tiles, k, a_map, b_map); },
      [&](int consumer) { multiply_each<C>(memory.barriers, tiles, consumer, k, sum, store); },
      [&] { round_tiles<C>(memory.ring, memory.barriers, tiles, k); });
}
