#pragma once
// Matrix product of a block on Hopper's tensor cores: global memory -> shared memory by TMA into a ring of stages ->
// wgmma from there. Needs types.cuh, ptx.cuh, gemm.cuh, gemm_mma.cuh (which stores results) and ptx_hopper.cuh.
//
// A tile is X x K: X rows of op(A), or X columns of op(B), by K of the summed dimension. In shared memory it is in
// panels: lines of 128 bytes along the dimension that is contiguous in global memory, swizzled by the copy.

// Shared memory at a multiple of 1024 bytes, the period of the swizzle of 128-byte lines.
__device__ __forceinline__ u8* swizzled_shared() {
  extern __shared__ __align__(1024) u8 swizzled_bytes[];
  return swizzled_bytes;
}

// Extent of one wgmma along K: 8 elements of tf32, 16 of f16 or bf16, 32 of e4m3 or i8.
template <class T>
constexpr int WGMMA_K = 32 / int(sizeof(T));

// PARTS blocks of a cluster share the tile: each copies the same number of lines of every panel, to all of them.
// Tiles of several matrices follow one another, NEXT bytes apart. If they are JOINED of them, they are one tile with
// JOINED times as many X for wgmma: panels with lines along K alternate between the matrices.
template <class T, int X, int K, bool K_CONTIGUOUS, int PARTS, int JOINED = 1>
struct PanelTile {
  static constexpr bool ALONG_X = !K_CONTIGUOUS;
  static constexpr int SIZE = int(sizeof(T)), LINE_BYTES = 128, LINE = LINE_BYTES / SIZE, BYTES = X * K * SIZE;
  static constexpr int LINES = K_CONTIGUOUS ? X : K, PANELS = (K_CONTIGUOUS ? K : X) / LINE;
  static constexpr int PANEL_BYTES = LINES * LINE_BYTES, BOX_LINES = LINES / PARTS;
  static constexpr int PANEL_PITCH = K_CONTIGUOUS ? JOINED * PANEL_BYTES : PANEL_BYTES;
  static constexpr int NEXT = K_CONTIGUOUS && JOINED > 1 ? PANEL_BYTES : BYTES;
  static constexpr int GROUP_BYTES = 8 * LINE_BYTES;  // period of the swizzle
  static_assert(X % 64 == 0 && K % LINE == 0 && BOX_LINES % 8 == 0, "whole panels, and whole groups of lines in a box");

  // Copies this block's part of the tile at (x, k) of product z. Called by one thread.
  static __device__ __forceinline__ void copy(u32 tile, const TensorMap& map, int x, int k, int z, u32 barrier,
                                              u32 part, u16 sharers) {
    const int line = int(part) * BOX_LINES;
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      const u32 target = tile + panel * PANEL_PITCH + line * LINE_BYTES;
      const int along = (K_CONTIGUOUS ? k : x) + panel * LINE, across = (K_CONTIGUOUS ? x : k) + line;
      if constexpr (PARTS > 1)
        copy_box_3d_multicast(target, map, along, across, z, barrier, sharers);
      else
        copy_box_3d(target, map, along, across, z, barrier);
    }
  }

  // The operand of wgmma at x, a multiple of 64, and at step `step` of k.
  static __device__ __forceinline__ u64 operand(u32 tile, int x, int step) {
    const int k = WGMMA_K<T> * step;
    const u32 start = K_CONTIGUOUS ? k / LINE * PANEL_PITCH + x * LINE_BYTES + k % LINE * SIZE
                                   : x / LINE * PANEL_BYTES + k * LINE_BYTES;
    return matrix_descriptor_128(tile + start, K_CONTIGUOUS ? 0 : PANEL_BYTES, GROUP_BYTES);
  }
};

// ---- the ring of stages ------------------------------------------------------------------------------------

// A position in the ring; producer and consumers each keep their own. A stage is full when all its bytes have arrived,
// and empty when all consumers have multiplied it.
template <int STAGES>
struct Ring {
  u32 barriers;  // STAGES barriers of full stages, then STAGES of empty ones
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

// Turns of CONSUMERS warpgroups, each of which multiplies its own tile. A position in the ring distinguishes the phases
// of a stage by their parity only: a warpgroup may wait for a stage only after the warpgroup before it has received all
// of its stages.
template <int CONSUMERS>
struct Turn {
  u32 barriers;  // one per warpgroup; the warpgroup before it arrives there
  int consumer;
  u32 parity;

  __device__ __forceinline__ Turn(u32 first_barrier, int warpgroup)
      : barriers(first_barrier), consumer(warpgroup), parity(warpgroup == 0 ? 1 : 0) {}  // the first does not wait
  __device__ __forceinline__ void take() {
    if constexpr (CONSUMERS > 1) mbarrier_wait(barriers + 8 * consumer, parity);
    parity ^= 1;
  }
  // Called by each warp when it waits for no more stages.
  __device__ __forceinline__ void pass() const {
    if (CONSUMERS > 1 && threadIdx.x % 32 == 0) mbarrier_arrive(barriers + 8 * ((consumer + 1) % CONSUMERS));
  }
};

// Initialises the barriers of the ring, of the turns, and of stages that HELPERS warps have changed, in this order.
// Others may use them after the next barrier of the block, or of the cluster.
template <int STAGES, int CONSUMERS, int HELPERS = 0>
__device__ __forceinline__ void prepare_barriers(u32 barriers, u32 releases) {
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    mbarrier_init(barriers + 8 * i, 1);
    mbarrier_init(barriers + 8 * (STAGES + i), releases);
  }
#pragma unroll
  for (int i = 0; i < CONSUMERS; ++i) mbarrier_init(barriers + 8 * (2 * STAGES + i), 4);
  if constexpr (HELPERS > 0) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) mbarrier_init(barriers + 8 * (2 * STAGES + CONSUMERS + i), HELPERS);
  }
  fence_mbarrier_init();
}

// This warp has multiplied a stage: notifies the producers that fill it, one in each block of the cluster.
template <int CLUSTER>
__device__ __forceinline__ void release(u32 empty_barrier) {
  const u32 lane = threadIdx.x % 32;
  if constexpr (CLUSTER == 1) {
    if (lane == 0) mbarrier_arrive(empty_barrier);
  } else {
    if (lane < CLUSTER) mbarrier_arrive_remote(cluster_address(empty_barrier, lane));
  }
}

// ---- tile scheduling --------------------------------------------------------------------------------------

// The blocks of a cluster take neighbouring tiles, CLUSTER_M of them along m and CLUSTER_N along n, and advance
// together until all are done. Blocks are persistent, so that copies of the next tile overlap with the stores of this
// one. Clusters take tiles of clusters in ascending order, `step` apart.
template <class C>
struct ClusterTiles {
  static constexpr u32 CLUSTER = C::CLUSTER_M * C::CLUSTER_N;
  u32 rank, first, step;

  __device__ __forceinline__ ClusterTiles()
      : rank(CLUSTER > 1 ? cluster_rank() : 0), first(blockIdx.x / CLUSTER), step(gridDim.x / CLUSTER) {}
  // Row and column of this block's first result, in elements, in the tile `group` of its cluster.
  __device__ __forceinline__ TileIndex corner_in(const TileIndex& group) const {
    return {group.batch, (group.m * C::CLUSTER_M + int(rank % C::CLUSTER_M)) * C::BM,
            (group.n * C::CLUSTER_N + int(rank / C::CLUSTER_M)) * C::BN};
  }
  // Mask of the blocks with the same rows of A, or with the same columns of B.
  __device__ __forceinline__ u16 sharers_of_a() const {
    u32 mask = 0;
#pragma unroll
    for (u32 i = 0; i < C::CLUSTER_N; ++i) mask |= 1u << (rank % C::CLUSTER_M + i * C::CLUSTER_M);
    return u16(mask);
  }
  __device__ __forceinline__ u16 sharers_of_b() const {
    return u16(((1u << C::CLUSTER_M) - 1) << (rank / C::CLUSTER_M * C::CLUSTER_M));
  }
  // The matrices B of a tile, and the element of k from which it is summed.
  template <class Corner>
  static __device__ __forceinline__ int matrix_of_b(const Corner& corner) {
    return corner.batch;
  }
  template <class Corner>
  static __device__ __forceinline__ int first_k(const Corner&) {
    return 0;
  }
};

// All tiles of a batch of products of m x n results.
template <class C>
struct Tiles : ClusterTiles<C> {
  u32 end;
  int m, n;                         // results of a product
  int groups_m, groups_n, group_m;  // numbers of clusters' tiles along m and n; rows of them per group

  __device__ __forceinline__ Tiles(int rows, int columns, int batch, int of_group)
      : m(rows),
        n(columns),
        groups_m(tiles_of(m, C::BM * C::CLUSTER_M)),
        groups_n(tiles_of(n, C::BN * C::CLUSTER_N)),
        group_m(of_group) {
    end = u32(groups_m) * u32(groups_n) * u32(batch);
  }
  // Returns false if there is no tile `index`.
  __device__ __forceinline__ bool reach(u32 index) const { return index < end; }
  __device__ __forceinline__ TileIndex corner(u32 index) const {
    return this->corner_in(tile_at(index, groups_m, groups_n, group_m));
  }
  // The row after the last of the tile's product.
  __device__ __forceinline__ int row_end(const TileIndex&) const { return m; }
  // The matrix A of a tile.
  static __device__ __forceinline__ int matrix_of_a(const TileIndex& corner) { return corner.batch; }
};

// ---- products ----------------------------------------------------------------------------------------------

// Bytes of a stage: a tile of A, and one of each matrix B.
template <class C, int MATRICES = 1>
constexpr int STAGE_BYTES = C::TileA::BYTES + MATRICES * C::TileB::BYTES;

// Shared memory of a block: the ring of stages, then staged results, then barriers.
template <class C, int MATRICES = 1>
struct BlockMemory {
  u8* const ring = swizzled_shared();
  u8* const staging = ring + C::STAGES * STAGE_BYTES<C, MATRICES>;
  const u32 buffers = shared_address(ring), barriers = shared_address(staging + C::STAGING_BYTES);
};

// Sums one tile: 64 rows after the other, one matrix B after the other, or several joined ones at once: a product has
// WIDTH columns. A stage is released after the products of the next stage have been issued, so that there are always
// products in flight.
template <class C, int MATRICES = 1, int WIDTH = C::BN, int COUNT, class Turns>
__device__ __forceinline__ void multiply(u32 buffers, Wide<typename C::In> (&sums)[COUNT][1][WIDTH / 8][4], int first_row,
                                         Ring<C::STAGES>& place, u32 steps, Turns& turn) {
  constexpr int BLOCKS = COUNT * WIDTH / (MATRICES * C::BN);
  u32 previous = 0;
  turn.take();
#pragma unroll 1
  for (u32 step = 0; step < steps; ++step) {
    const u32 a = buffers + place.stage * STAGE_BYTES<C, MATRICES>, b = a + C::TileA::BYTES;
    mbarrier_wait(place.full(), place.parity);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < C::BK / WGMMA_K<typename C::In>; ++part)
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        wgmma_m64<typename C::In, WIDTH, C::TileA::ALONG_X, C::TileB::ALONG_X>(
            sums[i][0], C::TileA::operand(a, first_row + 64 * (i % BLOCKS), part),
            C::TileB::operand(b + i / BLOCKS * C::TileB::NEXT, 0, part), step > 0 || part > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release<ClusterTiles<C>::CLUSTER>(place.empty_of(previous));
    previous = place.stage;
    place.advance();
  }
  turn.pass();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) settle(sums[i][0]);
  release<ClusterTiles<C>::CLUSTER>(place.empty_of(previous));
}

// ---- results -----------------------------------------------------------------------------------------------

// Layout of a warp's results of m64nNk16 for store_fragments and store_staged: COLUMNS of them from FIRST on.
template <int FIRST, int COLUMNS>
struct WarpOfGroup {
  static constexpr int M = 16, N = COLUMNS;
  static __device__ __forceinline__ int row() { return int(threadIdx.x) / 32 % 4 * 16; }
  static __device__ __forceinline__ int column() { return FIRST; }
};

// Columns staged in shared memory together: a line of 128 bytes of f32.
constexpr int STRIP = 32;

template <int N, int VEC, class Sum, class Out, class Finishing, int FIRST = 0>
__device__ __forceinline__ void store_strips(const Sum (&sums)[1][N / 8][4], Sum* staging,
                                             const Target<Out>& target, const Finishing& finish) {
  if constexpr (FIRST < N) {
    Sum strip[1][STRIP / 8][4];
#pragma unroll
    for (int j = 0; j < STRIP / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) strip[0][j][i] = sums[0][FIRST / 8 + j][i];
    store_staged<WarpOfGroup<FIRST, STRIP>, VEC>(strip, staging, target, finish);
    store_strips<N, VEC, Sum, Out, Finishing, FIRST + STRIP>(sums, staging, target, finish);
  }
}

// Stores the sums of 64 rows, directly or through `staging`, of which each consumer warp has its part.
template <class C, int VEC = C::VEC_C, class Sum, class Out, class Finishing>
__device__ __forceinline__ void store_rows(const Sum (&sums)[1][C::BN / 8][4], u8* staging,
                                           const Target<Out>& target, const Finishing& finish) {
  if constexpr (C::STAGED) {
    constexpr int SUMS_A_WARP = STAGING_FLOATS<WarpOfGroup<0, STRIP>>;
    Sum* const gathered = reinterpret_cast<Sum*>(staging) + int(threadIdx.x) / 32 * SUMS_A_WARP;
    store_strips<C::BN, VEC>(sums, gathered, target, finish);
  } else {
    store_fragments<WarpOfGroup<0, C::BN>, VEC>(sums, target, finish);
  }
}

// ---- roles -------------------------------------------------------------------------------------------------

// Rows of a tile per consumer.
template <class C>
constexpr int ROWS_OF_CONSUMER = C::PINGPONG ? C::BM : C::BM / C::CONSUMERS;

// Producer: copies the tiles of A and of the matrices B, stage by stage, until all are done. Called by one thread.
template <class C, class AllTiles, class... Maps>
__device__ __forceinline__ void copy_tiles(u32 buffers, u32 barriers, AllTiles tiles, int k, const TensorMap& a_map,
                                           const Maps&... b_maps) {
  constexpr u32 BYTES = STAGE_BYTES<C, sizeof...(Maps)>;
  const u32 part_of_a = tiles.rank / C::CLUSTER_M, part_of_b = tiles.rank % C::CLUSTER_M;
  const u16 sharers_of_a = tiles.sharers_of_a(), sharers_of_b = tiles.sharers_of_b();
  Ring<C::STAGES> place = {barriers};
  prefetch_tensor_map(a_map);
  (prefetch_tensor_map(b_maps), ...);
  for (u32 index = tiles.first; tiles.reach(index); index += tiles.step) {
    const auto corner = tiles.corner(index);
    const int matrix_of_a = tiles.matrix_of_a(corner), matrix_of_b = tiles.matrix_of_b(corner);
    const int first = tiles.first_k(corner);
#pragma unroll 1
    for (int at = first; at < first + k; at += C::BK) {
      // Waits until it is empty in all blocks: shared tiles go to all blocks of the cluster.
      mbarrier_wait(place.empty(), place.parity ^ 1);
      mbarrier_arrive_expect_tx(place.full(), BYTES);
      u32 target = buffers + place.stage * BYTES;
      C::TileA::copy(target, a_map, corner.m, at, matrix_of_a, place.full(), part_of_a, sharers_of_a);
      target += C::TileA::BYTES;
      ((C::TileB::copy(target, b_maps, corner.n, at, matrix_of_b, place.full(), part_of_b, sharers_of_b),
        target += C::TileB::NEXT),
       ...);
      place.advance();
    }
  }
}

// Consumer: multiplies this warpgroup's share of the tiles. `sum` is `multiply` after its first argument. `store` is
// called for each 64 rows within the product, with all sums, the number of these rows among them, the place of their
// first result, and the number of rows left from there.
template <class C, int MATRICES = 1, int WIDTH = C::BN, class AllTiles, class Sum, class Store>
__device__ __forceinline__ void multiply_each(u32 barriers, AllTiles tiles, int consumer, int k, const Sum& sum,
                                              const Store& store) {
  constexpr int ROWS = ROWS_OF_CONSUMER<C>, TURNS = C::PINGPONG ? C::CONSUMERS : 1;
  const int first_row = C::PINGPONG ? 0 : consumer * ROWS, first_turn = C::PINGPONG ? consumer : 0;
  const u32 steps = u32(tiles_of(k, C::BK));
  Ring<C::STAGES> place = {barriers};
  Turn<TURNS> turn(barriers + 16 * C::STAGES, first_turn);
  place.skip(first_turn * steps);
  Wide<typename C::In> sums[MATRICES * C::BN / WIDTH * ROWS / 64][1][WIDTH / 8][4] = {};
#pragma unroll 1
  for (u32 index = tiles.first + first_turn * tiles.step; tiles.reach(index); index += TURNS * tiles.step) {
    sum(sums, first_row, place, steps, turn);
    place.skip((TURNS - 1) * steps);
    const auto corner = tiles.corner(index);
    const int end = tiles.row_end(corner);
#pragma unroll
    for (int i = 0; i < ROWS / 64; ++i) {
      const int row = corner.m + first_row + 64 * i;
      if (row >= end || corner.n >= tiles.n) continue;  // beyond the product: the tile only fills its cluster
      store(sums, i, TileIndex{corner.batch, row, corner.n}, end - row);
    }
  }
}

struct NoHelp {
  __device__ __forceinline__ void operator()() const {}
};

// The whole block by roles: one thread of the last warpgroup copies, the other warpgroups multiply, each with its
// index, and the last HELPERS warps, after the one that copies, help. The producer releases registers to the consumers.
template <class C, int HELPERS = 0, class Copy, class Multiply, class Help = NoHelp>
__device__ __forceinline__ void by_role(u32 barriers, const Copy& copy, const Multiply& multiply,
                                        const Help& help = {}) {
  constexpr int CLUSTER = C::CLUSTER_M * C::CLUSTER_N;
  if (threadIdx.x == 0) {
    // Every warp that multiplies a stage releases it, in all blocks that may have copied to it.
    prepare_barriers<C::STAGES, C::CONSUMERS, HELPERS>(barriers, CLUSTER * 4 * (C::PINGPONG ? 1 : C::CONSUMERS));
  }
  __syncthreads();
  if constexpr (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  }
  // Uniform over the warp, which the compiler cannot infer from threadIdx.
  const int warpgroup = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
  if (warpgroup == C::CONSUMERS) {
    if constexpr (C::CONSUMER_REGISTERS > 0) give_registers<C::PRODUCER_REGISTERS>();
    if (threadIdx.x == 128 * C::CONSUMERS) copy();
    if (HELPERS > 0 && threadIdx.x >= 128 * (C::CONSUMERS + 1) - 32 * HELPERS) help();
    __syncwarp();
  } else {
    if constexpr (C::CONSUMER_REGISTERS > 0) take_registers<C::CONSUMER_REGISTERS>();
    multiply(warpgroup);
  }
  if constexpr (CLUSTER > 1) {
    // No block may exit while another copies to it or releases one of its stages.
    cluster_arrive();
    cluster_wait();
  }
}

// The whole block: copies, multiplies and stores all its tiles. Arguments as of `multiply_each` and `copy_tiles`.
template <class C, int MATRICES = 1, int WIDTH = C::BN, class AllTiles, class Sum, class Store, class... Maps>
__device__ __forceinline__ void multiply_tiles(const BlockMemory<C, MATRICES>& memory, const AllTiles& tiles, int k,
                                               const Sum& sum, const Store& store, const TensorMap& a_map,
                                               const Maps&... b_maps) {
  by_role<C>(
      memory.barriers, [&] { copy_tiles<C>(memory.buffers, memory.barriers, tiles, k, a_map, b_maps...); },
      [&](int consumer) { multiply_each<C, MATRICES, WIDTH>(memory.barriers, tiles, consumer, k, sum, store); });
}
