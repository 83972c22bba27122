#pragma once
// Attention gradients on Hopper's tensor cores (sm_90a): one warpgroup copies rows into a ring, others multiply their
// own rows by these. Needs types.cuh, ptx.cuh, epilogue.cuh, gemm.cuh, gemm_mma.cuh, ptx_hopper.cuh, gemm_wgmma.cuh,
// reduce.cuh, attention_operand.cuh, attention_wgmma.cuh and attention_backward.cuh. C holds the constants of workload
// and configuration. A block owns rows X (k, or q) and Y (v, or do); the other side has U (q, or k) and W (do, or v).

// Part of the scores that a block computes.
struct Part {
  RowTile tile;
  Range range;
  int heads, first_head;  // of the other side
};

template <class C>
struct Places {
  u32 x, y, ring, own_full, ds_full;  // own tiles; barriers
  u32 stages;                         // U and W of each
  u32 ds;                             // two tiles of dS, if blocks add to dq

  __device__ __forceinline__ u32 u(u32 stage) const { return stages + stage * 2 * C::TileU::BYTES; }
  __device__ __forceinline__ u32 w(u32 stage) const { return u(stage) + C::TileU::BYTES; }
};

// Issues the copies of all that the block multiplies, in that order. Called by one thread.
template <class C, bool OF_QUERIES>
__device__ __forceinline__ void produce(const TensorMap& x_map, const TensorMap& y_map, const TensorMap& u_map,
                                        const TensorMap& w_map, const TensorMap& terms_map, const Places<C>& at,
                                        u32 terms, const Part& part) {
  mbarrier_arrive_expect_tx(at.own_full, 2 * C::TileX::BYTES);
  C::TileX::copy(at.x, x_map, part.tile.first, 0, part.tile.head, at.own_full, 0, 0);
  C::TileX::copy(at.y, y_map, part.tile.first, 0, part.tile.head, at.own_full, 0, 0);
  Ring<C::STAGES> place = {at.ring};
#pragma unroll 1
  for (int head = part.first_head; head < part.first_head + part.heads; ++head)
#pragma unroll 1
    for (int i = 0; i < part.range.count; ++i) {
      const int row = (part.range.first + i) * C::BN;
      mbarrier_wait(place.empty(), place.parity ^ 1);
      mbarrier_arrive_expect_tx(place.full(), 2 * C::TileU::BYTES + (OF_QUERIES ? 0 : 8 * C::BN));
      C::TileU::copy(at.u(place.stage), u_map, row, 0, head, place.full(), 0, 0);
      C::TileU::copy(at.w(place.stage), w_map, row, 0, head, place.full(), 0, 0);
      if constexpr (!OF_QUERIES) copy_box_2d(terms + place.stage * 8 * C::BN, terms_map, 2 * row, head, place.full());
      place.advance();
    }
}

// ---- sums in global memory ---------------------------------------------------------------------------------
// They are in the order of the threads that add to them: for each 64 rows of a head and each 8 columns, four sums of each
// of 128 threads, as wgmma leaves them.

// Adds a warpgroup's sums of 64 rows, from `column` on, to those that begin at `rows`.
template <int COLUMNS>
__device__ __forceinline__ void add_rows(float* rows, int column, const float (&sums)[COLUMNS / 8][4]) {
  float* const mine = rows + column * 64 + int(threadIdx.x) % 128 * 4;
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; ++n) add_to_global(mine + n * 512, sums[n]);
}

// The product of dS and K is divided among the warpgroups: by 64 queries first, then by columns.
template <class C>
struct DqPart {
  static constexpr int UNITS = C::BN / 64, SHARERS = C::CONSUMERS > UNITS ? C::CONSUMERS / UNITS : 1;
  static constexpr int MINE = ceil_div(UNITS * SHARERS, C::CONSUMERS), COLUMNS = C::DIM / SHARERS;
  static_assert(!C::ADDS_DQ || (MINE * C::CONSUMERS == UNITS * SHARERS && COLUMNS % 64 == 0), "equal parts");
  int unit, column;  // the first of each

  __device__ __forceinline__ DqPart(int consumer)
      : unit(consumer / SHARERS * MINE), column(consumer % SHARERS * COLUMNS) {}

  __device__ __forceinline__ void issue(float (&sums)[MINE][COLUMNS / 8][4], u32 ds, u32 keys) const {
#pragma unroll
    for (int step = 0; step < C::BM / 16; ++step)
#pragma unroll
      for (int i = 0; i < MINE; ++i)
        wgmma_m64k16<typename C::In, COLUMNS, true, true>(sums[i], C::TileDs::operand(ds, 64 * (unit + i), step),
                                                          C::TileXAcross::operand(keys, column, step), step > 0);
    wgmma_commit();
  }

  // Adds to the sums of the queries from `first` on, in those of their head.
  __device__ __forceinline__ void add(float* of_head, const float (&sums)[MINE][COLUMNS / 8][4], int first,
                                      int seq_q) const {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int query = first + 64 * (unit + i);
      if (query < seq_q) add_rows<COLUMNS>(of_head + i64(query) * C::DIM, column, sums[i]);
    }
  }
};

// Rounds a gradient from its sums, `pitch` rows for each head: 8 elements of two rows per thread.
template <class C>
__global__ void __launch_bounds__(TERMS_THREADS)
attention_round_sums(const float* __restrict__ sums, typename C::In* __restrict__ target, i64 first, i64 pairs,
                     float factor, int rows, int pitch) {
  constexpr int PER_ROW = C::HEAD_DIM / 8;
  const i64 index = i64(blockIdx.x) * TERMS_THREADS + threadIdx.x, pair = index / PER_ROW;
  if (index >= pairs) return;
  const int column = int(index - pair * PER_ROW), in_unit = int(pair % 32);
  const i64 row = pair / 32 * 64 + in_unit / 8 * 16 + in_unit % 8, head = row / pitch;
  const float* const mine = sums + first + pair / 32 * 64 * C::DIM + column * 512 + in_unit * 16;
  Vec<typename C::In, 8> rounded[2];
#pragma unroll
  for (int lane = 0; lane < 4; ++lane) {
    const Vec<float, 4> part = load_vec<4>(mine + 4 * lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i / 2].at[2 * lane + i % 2] = from_float<typename C::In>(factor * part.at[i]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_head = int(row - head * pitch) + 8 * half;
    if (of_head < rows) store_vec(target + (head * rows + of_head) * C::HEAD_DIM + 8 * column, rounded[half]);
  }
}

// Stores this warpgroup's dS, rounded, to its lines of a tile that is swizzled as a bulk copy would.
template <class C>
__device__ __forceinline__ void store_ds(u8* tile, int line, const u32 (&ds)[C::BN / 16][4]) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int step = 0; step < C::BN / 16; ++step)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int chunk = 2 * step + r / 2;  // of 8 queries
      u8* const lines = tile + chunk / 8 * C::TileDs::PANEL_BYTES + (line + r % 2 * 8) * C::TileDs::LINE_BYTES;
      *reinterpret_cast<u32*>(lines + (chunk % 8 ^ lane / 4) * 16 + lane % 4 * 4) = ds[step][r];
    }
}

// Scales and stores 64 rows, through shared memory.
template <class C>
__device__ __forceinline__ void store_gradient(typename C::In* target, int room, float (&sums)[1][C::DIM / 8][4],
                                               float* staging, float factor) {
  using In = typename C::In;
  if (room <= 0) return;
#pragma unroll
  for (int n = 0; n < C::DIM / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][n][i] *= factor;
  const Finish<In, Identity, false> finish = {nullptr, C::HEAD_DIM};
  store_strips<C::DIM, 8>(sums, staging, Target<In>{target, C::HEAD_DIM, room, C::HEAD_DIM}, finish);
}

// ---- one warpgroup -----------------------------------------------------------------------------------------

// What a warpgroup reads and writes.
template <class C>
struct Access {
  const float* terms;         // of all queries
  float* sums;                // of dq, from `of_dk` on of dk, from `of_dv` on of dv
  i64 of_dk, of_dv;
  int keys_pitch;             // rows of a head in sums of dk and dv
  const float* staged_terms;  // of each stage
  u8* ds_tiles;
  int consumer, terms_pitch;
};

// The gradients of a warpgroup's 64 rows. An iteration begins with its scores in flight, if AHEAD, and has always one
// product in flight while threads compute.
template <class C, bool OF_QUERIES>
struct Gradients {
  static constexpr int N = C::BN / 8;
  static constexpr bool EARLY = C::EARLY && !OF_QUERIES, ADDS_DQ = C::ADDS_DQ && !OF_QUERIES;
  static constexpr bool SHARED_DS = C::SHARED_DS && ADDS_DQ;
  using Dq = DqPart<C>;

  const Access<C>& of;
  const Places<C>& at;
  const Part& part;
  const Sight<C::CAUSAL>& sees;
  const int lane = int(threadIdx.x) % 32, line = 64 * of.consumer + int(threadIdx.x) % 128 / 32 * 16 + lane / 4;
  const int first = part.tile.first + 64 * of.consumer, row = part.tile.first + line;  // the warpgroup's, the thread's
  const float exponent;
  Ring<C::STAGES> place = {at.ring};
  int other = part.range.first * C::BN, head = part.first_head;  // of the iteration: first row, and its head
  u32 odd = 0;                                                   // whether the iteration's number is odd
  u32 held = C::STAGES;                                          // stage that a product in flight still reads
  Vec<float, 2> own_terms[2] = {};
  float p[N][4], sums_p[1][C::DIM / 8][4] = {}, sums_ds[1][C::DIM / 8][4] = {};
  u32 rounded_p[C::BN / 16][4], rounded_ds[C::BN / 16][4];
  const Dq of_dq = Dq(of.consumer);

  __device__ __forceinline__ Gradients(const Access<C>& access, const Places<C>& places, const Part& of_block,
                                       const Sight<C::CAUSAL>& sight, float scale)
      : of(access), at(places), part(of_block), sees(sight), exponent(scale * LOG2_E) {
    if constexpr (OF_QUERIES) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (row + 8 * half < sees.seq_q)
          own_terms[half] = load_vec<2>(of.terms + 2 * (i64(part.tile.head) * of.terms_pitch + row + 8 * half));
    }
  }

  __device__ __forceinline__ void sum() {
    const int steps = part.heads * part.range.count;
    mbarrier_wait(at.own_full, 0);  // also without iterations: no block may exit while a copy writes to it
    if (steps == 0) return;
    if constexpr (C::AHEAD) {
      issue_scores_here(p);
      wgmma_wait<0>();
      settle(p);
    }
#pragma unroll 1
    for (int left = steps - 1; left > 0; --left) step<false>();
    step<true>();
    settle(sums_p[0]);
    settle(sums_ds[0]);
  }

  // Issues the scores of the next iteration.
  __device__ __forceinline__ void issue_scores_here(float (&scores)[N][4]) {
    mbarrier_wait(place.full(), place.parity);
    wgmma_fence();
    issue_scores<C, typename C::TileX, typename C::TileU>(scores, at.x, 64 * of.consumer, at.u(place.stage));
  }

  // Calls body(n, i, -lse, D) for each of this thread's elements i of the columns from 8 n, with the terms of their
  // query.
  template <class Body>
  __device__ __forceinline__ void each_score(u32 stage, const Body& body) {
    const float* const columns = of.staged_terms + (stage * C::BN + lane % 4 * 2) * 2;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      Vec<float, 4> here = {};
      if constexpr (!OF_QUERIES) here = load_vec<4>(columns + 16 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = i % 2 * 2;
        if constexpr (OF_QUERIES)
          body(n, i, own_terms[i / 2].at[0], own_terms[i / 2].at[1]);
        else
          body(n, i, here.at[column], here.at[column + 1]);
      }
    }
  }

  // Turns scores into P; P of masked scores is zero.
  __device__ __forceinline__ void exponentiate_scores(u32 stage) {
    each_score(stage, [&](int n, int i, float less, float) {
      p[n][i] = fast_exp2(multiply_add(p[n][i], exponent, less));
    });
    if (OF_QUERIES ? sees.all(first, other, C::BN) : sees.all(other, first, 64)) return;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int mine = row + i / 2 * 8, column = other + 8 * n + lane % 4 * 2 + i % 2;
        if (!(OF_QUERIES ? sees(mine, column) : sees(column, mine))) p[n][i] = 0.0f;
      }
  }

  __device__ __forceinline__ void issue_dv(u32 stage) {
    round_scores<C>(rounded_p, p);
    wgmma_fence();
    issue_sums<C, typename C::TileUAcross>(sums_p[0], rounded_p, at.w(stage));
  }

  static __device__ __forceinline__ void move(float (&target)[N][4], const float (&source)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) target[n][i] = source[n][i];
  }

  __device__ __forceinline__ void issue_of_ds(u32 stage) {
    wgmma_fence();
    if constexpr (SHARED_DS) {
#pragma unroll
      for (int step = 0; step < C::BN / 16; ++step)
        wgmma_m64k16<typename C::In, C::DIM, false, true>(
            sums_ds[0], C::TileDsLines::operand(at.ds + odd * C::TileDs::BYTES, 64 * of.consumer, step),
            C::TileUAcross::operand(at.u(stage), 0, step), true);
      wgmma_commit();
    } else {
      issue_sums<C, typename C::TileUAcross>(sums_ds[0], rounded_ds, at.u(stage));
    }
  }

  // Rounds dS and shares it with the other warpgroups.
  __device__ __forceinline__ void round_ds(const float (&ds)[N][4]) {
    round_scores<C>(rounded_ds, ds);
    if constexpr (ADDS_DQ) store_ds<C>(of.ds_tiles + odd * C::TileDs::BYTES, line, rounded_ds);
    if constexpr (!OF_QUERIES) {
      fence_proxy_async();  // products read dS, and the next copy overwrites the terms
      __syncwarp();
    }
    if constexpr (ADDS_DQ) release<1>(at.ds_full);
  }

  // dS of all warpgroups times their keys. They have read the dS of the iteration before.
  __device__ __forceinline__ void issue_dq(float (&dq)[Dq::MINE][Dq::COLUMNS / 8][4]) {
    mbarrier_wait(at.ds_full, odd);
    wgmma_fence();
    of_dq.issue(dq, at.ds + odd * C::TileDs::BYTES, at.x);
  }

  __device__ __forceinline__ void add_dq(float (&dq)[Dq::MINE][Dq::COLUMNS / 8][4]) {
#pragma unroll
    for (int i = 0; i < Dq::MINE; ++i) settle(dq[i]);
    of_dq.add(of.sums + i64(head) * of.terms_pitch * C::DIM, dq, other, sees.seq_q);
  }

  template <bool LAST>
  __device__ __forceinline__ void step() {
    float scores[N][4], ds[N][4], dq[Dq::MINE][Dq::COLUMNS / 8][4];
    if constexpr (!C::AHEAD) issue_scores_here(scores);
    const u32 stage = place.stage;
    place.advance();
    wgmma_fence();
    issue_scores<C, typename C::TileX, typename C::TileU>(ds, at.y, 64 * of.consumer, at.w(stage));
    if constexpr (!C::AHEAD) {
      wgmma_wait<1>();
      settle(scores);
      move(p, scores);
    }
    exponentiate_scores(stage);
    if constexpr (C::AHEAD) {
      wgmma_wait<1>();  // the dS before has been multiplied
      if (held < C::STAGES) release<1>(at.ring + 8 * (C::STAGES + held));
      held = stage;
    }
    if constexpr (EARLY) issue_dv(stage);
    wgmma_wait<EARLY ? 1 : 0>();
    settle(ds);
    each_score(stage, [&](int n, int i, float, float delta) { ds[n][i] = f32_op(p[n][i] * f32_op(ds[n][i] - delta)); });
    if constexpr (!OF_QUERIES && !EARLY) issue_dv(stage);
    round_ds(ds);
    if constexpr (C::AHEAD) {
      if constexpr (ADDS_DQ) {
        issue_dq(dq);
        wgmma_wait<1>();  // P has been multiplied: frees its registers
      }
      if constexpr (!LAST) issue_scores_here(scores);
      issue_of_ds(stage);
      if constexpr (ADDS_DQ) {
        wgmma_wait<LAST ? 1 : 2>();
        add_dq(dq);
      }
      wgmma_wait<LAST ? 0 : 1>();
      if constexpr (!LAST) {
        settle(scores);
        move(p, scores);
      }
    } else {
      if constexpr (!SHARED_DS) issue_of_ds(stage);
      if constexpr (ADDS_DQ) {
        if constexpr (!SHARED_DS) wgmma_wait<1>();  // P has been multiplied: frees its registers
        issue_dq(dq);
      }
      if constexpr (SHARED_DS) issue_of_ds(stage);
      wgmma_wait<0>();
      release<1>(at.ring + 8 * (C::STAGES + stage));
      if constexpr (ADDS_DQ) add_dq(dq);
    }
    odd ^= 1;
    other += C::BN;
    // The next head starts at the same iteration.
    if (other >= (part.range.first + part.range.count) * C::BN) other = part.range.first * C::BN, ++head;
  }
};

// Sums the gradients of this warpgroup's 64 rows, and stores them, or adds them to those of other blocks.
template <class C, bool OF_QUERIES>
__device__ __forceinline__ void consume(typename C::In* __restrict__ of_p, typename C::In* __restrict__ of_ds,
                                        const Access<C>& of, const Places<C>& at, float* staging, const Part& part,
                                        const Sight<C::CAUSAL>& sees, float scale) {
  Gradients<C, OF_QUERIES> mine(of, at, part, sees, scale);
  mine.sum();
  const int rows = OF_QUERIES ? sees.seq_q : sees.seq_k;
  if constexpr (C::BY_QUERY_HEAD) {
    if (mine.first >= rows) return;
    const i64 place = (i64(part.tile.head) * of.keys_pitch + mine.first) * C::DIM;
    add_rows<C::DIM>(of.sums + of.of_dv + place, 0, mine.sums_p[0]);
    add_rows<C::DIM>(of.sums + of.of_dk + place, 0, mine.sums_ds[0]);
  } else {
    const i64 target = (i64(part.tile.head) * rows + mine.first) * C::HEAD_DIM;
    if constexpr (!OF_QUERIES) store_gradient<C>(of_p + target, rows - mine.first, mine.sums_p, staging, 1.0f);
    store_gradient<C>(of_ds + target, rows - mine.first, mine.sums_ds, staging, scale);
  }
}
