#pragma once
// Matrix product of a block on Hopper's tensor cores: global memory -> shared memory by bulk copies into a ring of
// stages -> wgmma straight from there. Needs _types.cuh, _ptx.cuh, _gemm.cuh, _gemm_mma.cuh (which stores results) and
// _ptx_hopper.cuh.
//
// A tile is X x K: X rows of op(A), or X columns of op(B), by K of the summed dimension. In shared
// memory it is in panels: lines of 128 bytes of the dimension that is contiguous in global memory, swizzled as they
// were copied.

// Shared memory at a multiple of 1024, where a swizzle of 128-byte lines begins anew.
__device__ __forceinline__ u8* swizzled_shared() {
  extern __shared__ __align__(1024) u8 swizzled_bytes[];
  return swizzled_bytes;
}

// What one wgmma takes of K: 16 elements of f16 or bf16, 32 of e4m3.
template <class T>
constexpr int WGMMA_K = 32 / int(sizeof(T));

// PARTS blocks of a cluster share the tile: each copies as many lines of every panel, to all of them.
template <class T, int X, int K, bool K_CONTIGUOUS, int PARTS>
struct PanelTile {
  static constexpr bool ALONG_X = !K_CONTIGUOUS;
  static constexpr int SIZE = int(sizeof(T)), LINE_BYTES = 128, LINE = LINE_BYTES / SIZE, BYTES = X * K * SIZE;
  static constexpr int LINES = K_CONTIGUOUS ? X : K, PANELS = (K_CONTIGUOUS ? K : X) / LINE;
  static constexpr int PANEL_BYTES = LINES * LINE_BYTES, BOX_LINES = LINES / PARTS;
  static constexpr int GROUP_BYTES = 8 * LINE_BYTES;  // lines after which the swizzle begins anew
  static_assert(X % 64 == 0 && K % LINE == 0 && BOX_LINES % 8 == 0, "whole panels, and whole groups of lines in a box");

  // Asks for this block's part of the tile at (x, k) of product z. One thread does.
  static __device__ __forceinline__ void copy(u32 tile, const TensorMap& map, int x, int k, int z, u32 barrier,
                                              u32 part, u16 sharers) {
    const int line = int(part) * BOX_LINES;
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      const u32 target = tile + panel * PANEL_BYTES + line * LINE_BYTES;
      const int along = (K_CONTIGUOUS ? k : x) + panel * LINE, across = (K_CONTIGUOUS ? x : k) + line;
      if constexpr (PARTS > 1)
        copy_box_3d_multicast(target, map, along, across, z, barrier, sharers);
      else
        copy_box_3d(target, map, along, across, z, barrier);
    }
  }

  // The operand of wgmma that begins at x, a multiple of 64, and at step `step` of k.
  static __device__ __forceinline__ u64 operand(u32 tile, int x, int step) {
    const int k = WGMMA_K<T> * step;
    const u32 start = K_CONTIGUOUS ? k / LINE * PANEL_BYTES + x * LINE_BYTES + k % LINE * SIZE
                                   : x / LINE * PANEL_BYTES + k * LINE_BYTES;
    return matrix_descriptor_128(tile + start, K_CONTIGUOUS ? 0 : PANEL_BYTES, GROUP_BYTES);
  }
};

// ---- the ring of stages ------------------------------------------------------------------------------------

// A place in the ring, as producer and consumers each keep it. A stage is full when all its bytes have come, and empty
// when all who multiply it have done so.
template <int STAGES>
struct Ring {
  u32 barriers;  // STAGES of full stages, then STAGES of empty ones
  u32 stage = 0, parity = 0;

  __device__ __forceinline__ u32 full() const { return barriers + 8 * stage; }
  __device__ __forceinline__ u32 empty() const { return empty_of(stage); }
  __device__ __forceinline__ u32 empty_of(u32 some_stage) const { return barriers + 8 * (STAGES + some_stage); }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void skip(u32 stages) {
    const u32 reached = stage + stages;
    stage = reached % STAGES, parity ^= reached / STAGES & 1;
  }
};

// Turns of CONSUMERS warpgroups, each of which multiplies a tile of its own. A place in the ring tells phases of a
// stage apart by their parity alone: a warpgroup may wait for a stage only when the one before it has got all of its
// own.
template <int CONSUMERS>
struct Turn {
  u32 barriers;  // one a warpgroup, at which those that come before it arrive
  int consumer;
  u32 parity;

  __device__ __forceinline__ Turn(u32 first_barrier, int warpgroup)
      : barriers(first_barrier), consumer(warpgroup), parity(warpgroup == 0 ? 1 : 0) {}  // the first need not wait
  __device__ __forceinline__ void take() {
    if constexpr (CONSUMERS > 1) mbarrier_wait(barriers + 8 * consumer, parity);
    parity ^= 1;
  }
  // Each warp does, when it waits for no stage any more.
  __device__ __forceinline__ void pass() const {
    if (CONSUMERS > 1 && threadIdx.x % 32 == 0) mbarrier_arrive(barriers + 8 * ((consumer + 1) % CONSUMERS));
  }
};

// Initialises the barriers of the ring and of the turns, which follow them; the others may use them when the block, or
// the cluster, has met after this.
template <int STAGES, int CONSUMERS>
__device__ __forceinline__ void prepare_barriers(u32 barriers, u32 releases) {
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    mbarrier_init(barriers + 8 * i, 1);
    mbarrier_init(barriers + 8 * (STAGES + i), releases);
  }
#pragma unroll
  for (int i = 0; i < CONSUMERS; ++i) mbarrier_init(barriers + 8 * (2 * STAGES + i), 4);
  fence_mbarrier_init();
}

// This warp has multiplied a stage: tells the producers that fill it, one in each block of the cluster.
template <int CLUSTER>
__device__ __forceinline__ void release(u32 empty_barrier) {
  const u32 lane = threadIdx.x % 32;
  if constexpr (CLUSTER == 1) {
    if (lane == 0) mbarrier_arrive(empty_barrier);
  } else {
    if (lane < CLUSTER) mbarrier_arrive_remote(cluster_address(empty_barrier, lane));
  }
}

// ---- which tiles -------------------------------------------------------------------------------------------

// The blocks of a cluster take neighbouring tiles, CLUSTER_M of them along m and CLUSTER_N along n, and go on together
// until all are done: blocks stay, so that copies of the next tile are under way while this one's results are stored.
template <class C>
struct Tiles {
  static constexpr u32 CLUSTER = C::CLUSTER_M * C::CLUSTER_N;
  u32 rank, first, step, end;
  int groups_m, groups_n, group_m;  // groups of a cluster's tiles, and how many rows of them are taken at a time

  __device__ __forceinline__ Tiles(int m, int n, int batch, int rows)
      : rank(CLUSTER > 1 ? cluster_rank() : 0),
        first(blockIdx.x / CLUSTER),
        step(gridDim.x / CLUSTER),
        groups_m(tiles_of(m, C::BM * C::CLUSTER_M)),
        groups_n(tiles_of(n, C::BN * C::CLUSTER_N)),
        group_m(rows) {
    end = u32(groups_m) * u32(groups_n) * u32(batch);
  }
  // In elements: row and column of the first result.
  __device__ __forceinline__ TileIndex corner(u32 index) const {
    const TileIndex group = tile_at(index, groups_m, groups_n, group_m);
    return {group.batch, (group.m * C::CLUSTER_M + int(rank % C::CLUSTER_M)) * C::BM,
            (group.n * C::CLUSTER_N + int(rank / C::CLUSTER_M)) * C::BN};
  }
  // Blocks that have the same rows of A, or the same columns of B, as a mask.
  __device__ __forceinline__ u16 sharers_of_a() const {
    u32 mask = 0;
#pragma unroll
    for (u32 i = 0; i < C::CLUSTER_N; ++i) mask |= 1u << (rank % C::CLUSTER_M + i * C::CLUSTER_M);
    return u16(mask);
  }
  __device__ __forceinline__ u16 sharers_of_b() const {
    return u16(((1u << C::CLUSTER_M) - 1) << (rank / C::CLUSTER_M * C::CLUSTER_M));
  }
};

// ---- products ----------------------------------------------------------------------------------------------

// Sums one tile. A stage is released when the products of the next one have been issued, so that there are
// always some under way.
template <class C, int BLOCKS, class Turns>
__device__ __forceinline__ void multiply(float (&sums)[BLOCKS][1][C::BN / 8][4], u32 buffers, int first_row,
                                         Ring<C::STAGES>& place, u32 steps, Turns& turn) {
  u32 previous = 0;
  turn.take();
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step) {
    const u32 a = buffers + place.stage * (C::TileA::BYTES + C::TileB::BYTES), b = a + C::TileA::BYTES;
    mbarrier_wait(place.full(), place.parity);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < C::BK / WGMMA_K<typename C::In>; ++part)
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i)
        wgmma_m64<typename C::In, C::BN, C::TileA::ALONG_X, C::TileB::ALONG_X>(
            sums[i][0], C::TileA::operand(a, first_row + 64 * i, part), C::TileB::operand(b, 0, part),
            step > 0 || part > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release<Tiles<C>::CLUSTER>(place.empty_of(previous));
    previous = place.stage;
    place.advance();
  }
  turn.pass();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < BLOCKS; ++i) settle(sums[i][0]);
  release<Tiles<C>::CLUSTER>(place.empty_of(previous));
}

// ---- results -----------------------------------------------------------------------------------------------

// Where a warp's results of m64nNk16 are, as store_fragments and store_staged ask: COLUMNS of them from FIRST on.
template <int FIRST, int COLUMNS>
struct WarpOfGroup {
  static constexpr int M = 16, N = COLUMNS;
  static __device__ __forceinline__ int row() { return int(threadIdx.x) / 32 % 4 * 16; }
  static __device__ __forceinline__ int column() { return FIRST; }
};

// Columns that are gathered in shared memory at a time: a line of 128 bytes of f32.
constexpr int STRIP = 32;

template <int N, int VEC, class Out, class Finishing, int FIRST = 0>
__device__ __forceinline__ void store_strips(const float (&sums)[1][N / 8][4], float* staging,
                                             const Target<Out>& target, const Finishing& finish) {
  if constexpr (FIRST < N) {
    float strip[1][STRIP / 8][4];
#pragma unroll
    for (int j = 0; j < STRIP / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) strip[0][j][i] = sums[0][FIRST / 8 + j][i];
    store_staged<WarpOfGroup<FIRST, STRIP>, VEC>(strip, staging, target, finish);
    store_strips<N, VEC, Out, Finishing, FIRST + STRIP>(sums, staging, target, finish);
  }
}
