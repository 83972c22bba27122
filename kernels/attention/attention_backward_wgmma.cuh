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
  u32 x, y, ring, own_full;  // own tiles; barriers
  u32 stages;                // U and W of each

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

// Calls body(n, i, -lse, D) for each of this thread's elements i of the columns from 8 n, with the terms of their
// query.
template <int N, bool OF_QUERIES, class Body>
__device__ __forceinline__ void each_score(const Vec<float, 2> (&own)[2], const float* columns, const Body& body) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    Vec<float, 4> here = {};
    if constexpr (!OF_QUERIES) here = load_vec<4>(columns + 16 * n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = i % 2 * 2;
      if constexpr (OF_QUERIES)
        body(n, i, own[i / 2].at[0], own[i / 2].at[1]);
      else
        body(n, i, here.at[column], here.at[column + 1]);
    }
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

// Sums the gradients of this warpgroup's 64 rows, and stores them.
template <class C, bool OF_QUERIES>
__device__ __forceinline__ void consume(const float* __restrict__ terms, typename C::In* __restrict__ of_p,
                                        typename C::In* __restrict__ of_ds, const Places<C>& at,
                                        const float* staged_terms, float* staging, const Part& part,
                                        const Sight<C::CAUSAL>& sees, int consumer, int terms_pitch, float scale) {
  constexpr int N = C::BN / 8;
  constexpr bool EARLY = C::EARLY && !OF_QUERIES;
  const int rows = OF_QUERIES ? sees.seq_q : sees.seq_k, lane = int(threadIdx.x) % 32, mine = 64 * consumer;
  const int first = part.tile.first + mine, in_group = int(threadIdx.x) % 128 / 32 * 16 + lane / 4;
  Vec<float, 2> own_terms[2] = {};
  if constexpr (OF_QUERIES) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + in_group + 8 * half;
      if (row < rows) own_terms[half] = load_vec<2>(terms + 2 * (i64(part.tile.head) * terms_pitch + row));
    }
  }
  const float exponent = scale * LOG2_E;
  float sums_p[1][C::DIM / 8][4] = {}, sums_ds[1][C::DIM / 8][4] = {};
  Ring<C::STAGES> place = {at.ring};
  mbarrier_wait(at.own_full, 0);
  int other = part.range.first * C::BN;  // first row of the iteration
#pragma unroll 1
  for (int left = part.heads * part.range.count; left > 0; --left) {
    const u32 u = at.u(place.stage), w = at.w(place.stage);
    const float* const columns = staged_terms + (place.stage * C::BN + lane % 4 * 2) * 2;
    float p[N][4], ds[N][4];
    u32 rounded_p[C::BN / 16][4], rounded_ds[C::BN / 16][4];
    mbarrier_wait(place.full(), place.parity);
    wgmma_fence();
    issue_scores<C, typename C::TileX, typename C::TileU>(p, at.x, mine, u);
    issue_scores<C, typename C::TileX, typename C::TileU>(ds, at.y, mine, w);
    wgmma_wait<1>();
    settle(p);
    each_score<N, OF_QUERIES>(own_terms, columns, [&](int n, int i, float less, float) {
      p[n][i] = fast_exp2(multiply_add(p[n][i], exponent, less));
    });
    if (!(OF_QUERIES ? sees.all(first, other, C::BN) : sees.all(other, first, 64))) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first + in_group + i / 2 * 8, column = other + 8 * n + lane % 4 * 2 + i % 2;
          if (!(OF_QUERIES ? sees(row, column) : sees(column, row))) p[n][i] = 0.0f;
        }
    }
    if constexpr (EARLY) {
      round_scores<C>(rounded_p, p);
      wgmma_fence();
      issue_sums<C, typename C::TileUAcross>(sums_p[0], rounded_p, w);
    }
    wgmma_wait<EARLY ? 1 : 0>();
    settle(ds);
    each_score<N, OF_QUERIES>(own_terms, columns, [&](int n, int i, float, float delta) {
      ds[n][i] = f32_op(p[n][i] * f32_op(ds[n][i] - delta));
    });
    if constexpr (!OF_QUERIES && !EARLY) round_scores<C>(rounded_p, p);
    round_scores<C>(rounded_ds, ds);
    wgmma_fence();
    if constexpr (!OF_QUERIES && !EARLY) issue_sums<C, typename C::TileUAcross>(sums_p[0], rounded_p, w);
    issue_sums<C, typename C::TileUAcross>(sums_ds[0], rounded_ds, u);
    wgmma_wait<0>();
    settle(sums_p[0]);
    settle(sums_ds[0]);
    if constexpr (!OF_QUERIES) __syncwarp();  // all lanes have read the terms
    release<1>(place.empty());
    place.advance();
    other += C::BN;
    // The next head starts at the same iteration.
    if (other >= (part.range.first + part.range.count) * C::BN) other = part.range.first * C::BN;
  }
  const i64 target = (i64(part.tile.head) * rows + first) * C::HEAD_DIM;
  if constexpr (!OF_QUERIES) store_gradient<C>(of_p + target, rows - first, sums_p, staging, 1.0f);
  store_gradient<C>(of_ds + target, rows - first, sums_ds, staging, scale);
}
