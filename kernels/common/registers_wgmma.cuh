#pragma once
// Products of gemm_wgmma.cuh whose left operand is changed on its way: each warp reads its part of A from shared memory
// into registers, changes it there, and wgmma takes it from there. Needs ptx.cuh and gemm_wgmma.cuh.

// Reads 16 rows of A per warp, 64 per warpgroup from row `x` on, by 32 bytes of K from `k` on, in the layout of a wgmma
// that takes A from registers. `tile` is a PanelTile, whose 16-byte parts of a line the copy has permuted by the line's
// number modulo 8.
template <class Tile>
__device__ __forceinline__ void load_rows(u32 (&registers)[4], const u8* tile, int x, int k) {
  const int lane = int(threadIdx.x) % 32, row = x + int(threadIdx.x) / 32 % 4 * 16;
  const auto place = [&](int of_x, int of_k) {
    const int along = Tile::ALONG_X ? of_x : of_k, line = Tile::ALONG_X ? of_k : of_x;
    return tile + along / Tile::LINE * Tile::PANEL_PITCH + line * Tile::LINE_BYTES +
           (along % Tile::LINE * Tile::SIZE ^ line % 8 * 16);
  };
  if constexpr (Tile::ALONG_X && Tile::SIZE == 4) {  // ldmatrix cannot transpose words
    // Row 8 r and line 4 r' of the four change one bit of the permuted offset each, since `x` is a multiple of 16 and `k`
    // of 8. Four calls of `place` take so many registers that ptxas 13.0 spills.
    const u8* const lines = tile + (row + lane / 4) / Tile::LINE * Tile::PANEL_PITCH + (k + lane % 4) * Tile::LINE_BYTES;
    const int along = (row + lane / 4) % Tile::LINE * Tile::SIZE ^ lane % 4 * 16;
#pragma unroll
    for (int r = 0; r < 4; ++r)
      registers[r] =
          *reinterpret_cast<const u32*>(lines + r / 2 * 4 * Tile::LINE_BYTES + (along ^ r % 2 * 32 ^ r / 2 * 64));
  } else if constexpr (Tile::ALONG_X) {
    // Lanes 8 i to 8 i + 7 pass the lines of matrix i: its rows are 8 (i % 2) after the first, its K 8 (i / 2).
    ldmatrix_x4_trans(registers, place(row + lane / 8 % 2 * 8, k + lane / 16 * 8 + lane % 8));
  } else {
    ldmatrix_x4(registers, place(row + lane % 16, k + lane / 16 * (16 / Tile::SIZE)));
  }
}

// As `multiply`, with A from registers. `load(operands, stage, step)` reads the operands of a step from a stage of the
// ring and changes them; `ready(place)` waits until B of a stage may be multiplied. While a step is multiplied, the warp
// prepares the operands of the next one. There is one group of products in flight at a time, because ptxas serialises
// products whose operands are written while an earlier group is waited for after them (C7513).
template <class C, int COUNT, class Load, class Ready, class Turns>
__device__ __forceinline__ void multiply_loaded(const u8* ring, u32 buffers, const Load& load, const Ready& ready,
                                                float (&sums)[COUNT][1][C::BN / 8][4], Ring<C::STAGES>& place,
                                                u32 steps, Turns& turn) {
  using In = typename C::In;
  constexpr int PARTS = C::BK / WGMMA_K<In>;
  u32 operands[2][PARTS][COUNT][4];
  const auto prepare = [&](auto& next, u32 step) {
    mbarrier_wait(place.full(), place.parity);
    load(next, ring + place.stage * STAGE_BYTES<C>, step);
    fence_proxy_async();  // a copy overwrites what the warp has read, when the stage has been released
    __syncwarp();
    ready(place);
  };
  const auto one = [&](auto& current, auto& next, u32 step) {
    const u32 b = buffers + place.stage * STAGE_BYTES<C> + C::TileA::BYTES;
    const u32 empty = place.empty();
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        wgmma_m64_registers<In, C::BN, C::TileB::ALONG_X>(sums[i][0], current[part][i], C::TileB::operand(b, 0, part),
                                                          step > 0 || part > 0);
    wgmma_commit();
    place.advance();
    if (step + 1 < steps)
      prepare(next, step + 1);
    else
      turn.pass();
    wgmma_wait<0>();
    release<ClusterTiles<C>::CLUSTER>(empty);
  };
  turn.take();
  prepare(operands[0], 0);
#pragma unroll 1
  for (u32 step = 0; step < steps; step += 2) {
    one(operands[0], operands[1], step);
    if (step + 1 < steps) one(operands[1], operands[0], step + 1);
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) settle(sums[i][0]);
}
