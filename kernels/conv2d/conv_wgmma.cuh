#pragma once
// Convolutions of images with channels last on Hopper's tensor cores: the product of conv.cuh, multiplied as in
// gemm_wgmma.cuh. TMA gathers the pixels: each copy names the position of the filter's first tap and the distance of
// the tap from there ("im2col mode"). Needs types.cuh, ptx.cuh, gemm.cuh, gemm_mma.cuh, ptx_hopper.cuh, gemm_wgmma.cuh
// and conv.cuh.
//
//            M                N                     K                      copied as pixels    as a box
//   fprop    pixels of y      filters               taps and channels      A, of x             B, filters
//   dgrad    pixels of dx     channels              taps and filters       A, of dy            B, filters
//   wgrad    filters          taps and channels     pixels of y            B, of x             A, of dy
//
// In fprop and dgrad a step has one tap and BK channels. In wgrad a tile has columns of several taps: each panel of 64
// columns has one tap, and the channels of a tap are rounded up to whole panels.

constexpr int PANEL_CHANNELS = 64;

// ---- pixels and taps -----------------------------------------------------------------------------------------------

struct Pixel {
  int image, y, x;  // position of the filter's first tap
};

// The box of pixels that a tensor map covers. In dgrad each residue class counts as many as the largest one.
struct PixelGrid {
  int height, width;  // pixels
  int top, left;      // the first pixel
  int stride;

  __device__ __forceinline__ Pixel at(int index) const {
    const int rest = divide(index, width), image = divide(rest, height);
    return {image, top + (rest - image * height) * stride, left + (index - rest * width) * stride};
  }
};

struct Tap {
  u16 right, down;  // distance from the first tap
  int index;        // index in the filter
};

// The taps that reach the pixels of a residue class (in other directions, all taps).
struct Taps {
  Axis<i32> rows, columns;
  int top, left, filter_width;

  __device__ __forceinline__ int count() const { return rows.taps * columns.taps; }
  __device__ __forceinline__ Tap at(int row, int column) const {
    return {u16(columns.first + column * columns.step - left), u16(rows.first + row * rows.step - top),
            (rows.tap_first + row * rows.tap_step) * filter_width + columns.tap_first + column * columns.tap_step};
  }
};

// ---- the product ---------------------------------------------------------------------------------------------------

// A tile of C, of one group and residue class, over one part of K.
struct ConvTile {
  int row, column, group, part, residue_class;
};

template <class C>
struct ConvProduct {
  static constexpr bool WEIGHTS = C::DIRECTION == WGRAD, DATA = C::DIRECTION == DGRAD;

  Sizes<i32> sizes;
  PixelGrid grid;
  int first_row_class, first_column_class;  // the classes with most taps: tiles that take long begin first
  int parts;

  __device__ __forceinline__ int pixels() const { return sizes.n * grid.height * grid.width; }
  __device__ __forceinline__ int depth() const { return DATA ? sizes.k : sizes.c; }  // summed channels
  __device__ __forceinline__ int panels_of_tap() const { return tiles_of(sizes.c, PANEL_CHANNELS); }
  __device__ __forceinline__ int m() const { return WEIGHTS ? sizes.k : pixels(); }
  __device__ __forceinline__ int n() const {
    return WEIGHTS ? sizes.r * sizes.s * panels_of_tap() * PANEL_CHANNELS : DATA ? sizes.c : sizes.k;
  }
  // Number of passes over the tiles of C: one per residue class, part and group.
  __device__ __forceinline__ int times() const {
    return sizes.row_classes * sizes.column_classes * parts * sizes.groups;
  }

  __device__ __forceinline__ ConvTile tile(const TileIndex& corner) const {
    int rest = corner.batch;
    const int group = take(rest, sizes.groups), part = take(rest, parts);
    if constexpr (!C::STRIDED) return {corner.m, corner.n, group, part, 0};
    int across = take(rest, sizes.column_classes) + first_column_class, down = rest + first_row_class;
    if (across >= sizes.column_classes) across -= sizes.column_classes;
    if (down >= sizes.row_classes) down -= sizes.row_classes;
    return {corner.m, corner.n, group, part, down * sizes.column_classes + across};
  }
  __device__ __forceinline__ Taps taps(int residue_class) const {
    const Sizes<i32>& z = sizes;
    if constexpr (DATA) {
      const int down = divide(residue_class, z.column_classes), across = residue_class - down * z.column_classes;
      return {backward_axis(z.h, z.p, z.r, z.pad, down, z), backward_axis(z.w, z.q, z.s, z.pad_w, across, z), grid.top,
              grid.left, z.s};
    } else {
      return {forward_axis(z.h, z.p, z.r, z.pad, z), forward_axis(z.w, z.q, z.s, z.pad_w, z), grid.top, grid.left, z.s};
    }
  }
  __device__ __forceinline__ Steps<i32> steps(const ConvTile& tile) const {
    const int all = WEIGHTS ? tiles_of(pixels(), C::BK) : taps(tile.residue_class).count() * tiles_of(depth(), C::BK);
    return steps_of_part(all, tile.part, parts);
  }
};

// ---- copies --------------------------------------------------------------------------------------------------------

// Copies one panel of a tile of pixels, or this block's part of it: 64 channels of as many pixels as the map's box has.
// Called by one thread.
template <class Tile, int PARTS>
__device__ __forceinline__ void copy_panel_of_pixels(u32 tile, int panel, const TensorMap& map, int channel,
                                                     const Pixel& pixel, const Tap& tap, u32 barrier, u32 part,
                                                     u16 sharers) {
  const u32 target = tile + panel * Tile::PANEL_BYTES + part * (Tile::BOX_LINES * Tile::LINE_BYTES);
  if constexpr (PARTS > 1)
    copy_pixels_4d_multicast(target, map, channel, pixel.x, pixel.y, pixel.image, tap.right, tap.down, barrier, sharers);
  else
    copy_pixels_4d(target, map, channel, pixel.x, pixel.y, pixel.image, tap.right, tap.down, barrier);
}

// The producer's view of the cluster: this block's parts of shared tiles, and the blocks that share them.
template <class C>
struct Sharing {
  u32 part_of_a, part_of_b;
  u16 sharers_of_a, sharers_of_b;

  __device__ __forceinline__ explicit Sharing(const Tiles<C>& tiles)
      : part_of_a(tiles.rank / C::CLUSTER_M),
        part_of_b(tiles.rank % C::CLUSTER_M),
        sharers_of_a(tiles.sharers_of_a()),
        sharers_of_b(tiles.sharers_of_b()) {}
};

// Waits until a stage is empty in all blocks, and makes its next phase expect a whole stage; returns its address.
template <class C>
__device__ __forceinline__ u32 claim(const Ring<C::STAGES>& place, u32 buffers) {
  mbarrier_wait(place.empty(), place.parity ^ 1);
  mbarrier_arrive_expect_tx(place.full(), STAGE_BYTES<C>);
  return buffers + place.stage * STAGE_BYTES<C>;
}

// Steps of one tile in fprop and dgrad.
template <class C>
__device__ __forceinline__ void copy_taps(const TensorMap& a_map, const TensorMap& b_map, u32 buffers,
                                          Ring<C::STAGES>& place, const Sharing<C>& shared,
                                          const ConvProduct<C>& product, const ConvTile& tile) {
  using TileA = typename C::TileA;
  using TileB = typename C::TileB;
  const Steps<i32> steps = product.steps(tile);
  if (steps.count == 0) return;  // for example where no tap reaches the pixels
  const Taps taps = product.taps(tile.residue_class);
  const Pixel pixel = product.grid.at(tile.row + int(shared.part_of_a) * TileA::BOX_LINES);
  const int depth = product.depth(), of_group = tile.group * depth, filters = tile.group * product.sizes.k;
  const int before = divide(steps.begin, tiles_of(depth, C::BK));  // taps before the first step
  int channel = (steps.begin - before * tiles_of(depth, C::BK)) * C::BK;
  int row = divide(before, taps.columns.taps), column = before - row * taps.columns.taps;
#pragma unroll 1
  for (int left = steps.count; left > 0; --left) {
    const u32 a = claim<C>(place, buffers), b = a + TileA::BYTES;
    const Tap tap = taps.at(row, column);
#pragma unroll
    for (int panel = 0; panel < TileA::PANELS; ++panel)
      copy_panel_of_pixels<TileA, C::CLUSTER_N>(a, panel, a_map, of_group + channel + panel * PANEL_CHANNELS, pixel, tap,
                                                place.full(), shared.part_of_a, shared.sharers_of_a);
    // Filters are the lines of the map; in fprop, the first filter of a tile is its first column.
    const int x = tile.column + (C::DIRECTION == FPROP ? filters : 0);
    const int k = channel + (C::DIRECTION == DGRAD ? filters : 0);
    TileB::copy(b, b_map, x, k, tap.index, place.full(), shared.part_of_b, shared.sharers_of_b);
    place.advance();
    channel += C::BK;
    if (channel >= depth) {
      channel = 0;
      if (++column == taps.columns.taps) column = 0, ++row;
    }
  }
}

// The same for wgrad. Beyond the last panel of columns there are no channels: the copy returns zeros.
template <class C>
__device__ __forceinline__ void copy_pixels_of_taps(const TensorMap& a_map, const TensorMap& b_map, u32 buffers,
                                                    Ring<C::STAGES>& place, const Sharing<C>& shared,
                                                    const ConvProduct<C>& product, const ConvTile& tile) {
  using TileA = typename C::TileA;
  using TileB = typename C::TileB;
  const Sizes<i32>& z = product.sizes;
  const Taps taps = product.taps(0);
  const int of_tap = product.panels_of_tap(), first_panel = tile.column / PANEL_CHANNELS;
  int channels[TileB::PANELS];
  Tap tap_of[TileB::PANELS];
#pragma unroll
  for (int panel = 0; panel < TileB::PANELS; ++panel) {
    const int tap = divide(first_panel + panel, of_tap), row = divide(tap, z.s);
    const int within = (first_panel + panel - tap * of_tap) * PANEL_CHANNELS;
    channels[panel] = tap < taps.count() ? tile.group * z.c + within : z.groups * z.c;
    tap_of[panel] = tap < taps.count() ? taps.at(row, tap - row * z.s) : Tap{0, 0, 0};
  }
  const Steps<i32> steps = product.steps(tile);
  int pixel = steps.begin * C::BK;
#pragma unroll 1
  for (int left = steps.count; left > 0; --left) {
    const Pixel first = product.grid.at(pixel + int(shared.part_of_b) * TileB::BOX_LINES);
    const u32 a = claim<C>(place, buffers), b = a + TileA::BYTES;
    TileA::copy(a, a_map, tile.group * z.k + tile.row, pixel, 0, place.full(), shared.part_of_a, shared.sharers_of_a);
#pragma unroll
    for (int panel = 0; panel < TileB::PANELS; ++panel)
      copy_panel_of_pixels<TileB, C::CLUSTER_M>(b, panel, b_map, channels[panel], first, tap_of[panel], place.full(),
                                                shared.part_of_b, shared.sharers_of_b);
    place.advance();
    pixel += C::BK;
  }
}

// ---- results -------------------------------------------------------------------------------------------------------

// Positions of a tile's rows and columns in the output, as `Destination` needs them. Offsets have 64 bits.
template <class C>
struct ConvResults {
  static constexpr bool C_ALONG_N = true;

  i64 m, n, pitch;         // rows, end of columns, elements from one row to the next
  Axis<i32> rows, columns;  // dgrad with a stride: the pixels of the tile's residue class
  int width, height;        // grid of the map: pixels per row, and rows; not used in other directions
  int image_width, image_height;

  __device__ __forceinline__ ConvResults(const ConvProduct<C>& product, const ConvTile& tile)
      : m(product.m()), n(product.n()), width(product.grid.width), height(product.grid.height) {
    const Sizes<i32>& z = product.sizes;
    pitch = C::DIRECTION == WGRAD ? i64(z.r) * z.s * z.c : n * z.groups;
    if constexpr (C::STRIDED) {
      const Taps taps = product.taps(tile.residue_class);
      rows = taps.rows, columns = taps.columns, image_width = z.w, image_height = z.h;
    }
  }

  // Whether there is a pixel: a class may have fewer pixels than the grid.
  __device__ __forceinline__ bool exists(i64 row) const {
    if constexpr (!C::STRIDED) return true;
    const int rest = divide(int(row), width), image = divide(rest, height);
    return rest - image * height < rows.extent && int(row) - rest * width < columns.extent;
  }
  __device__ __forceinline__ i64 c_row(i64 row) const {
    if constexpr (!C::STRIDED) return row * pitch;
    const int rest = divide(int(row), width), image = divide(rest, height);
    const int down = (rest - image * height) * rows.out_stride + rows.out_first;
    const int across = (int(row) - rest * width) * columns.out_stride + columns.out_first;
    return ((i64(image) * image_height + down) * image_width + across) * pitch;
  }
  __device__ __forceinline__ i64 c_channel(i64 group, i64 column) const { return group * n + column; }
  __device__ __forceinline__ i64 c_column(i64 of_channel) const { return of_channel; }
};

// wgrad: a strip of columns has one tap, whose channels may end before its panel does.
template <class C, class D>
__device__ __forceinline__ void aim_at_tap(ConvResults<C>& results, D& to, const Sizes<i32>& z, int column) {
  const int panel = column / PANEL_CHANNELS, of_tap = tiles_of(z.c, PANEL_CHANNELS), tap = divide(panel, of_tap);
  to.column = i64(tap) * z.c + (panel - tap * of_tap) * PANEL_CHANNELS + column % PANEL_CHANNELS;
  results.n = tap < z.r * z.s ? (tap + 1) * z.c : 0;
}

// Stores 64 rows of a tile, from the first row of `to` on, through shared memory: a strip of 32 columns at a time.
// `staging` belongs to the warp.
template <class C, int FIRST = 0, class D>
__device__ __forceinline__ void store_conv_strips(const float (&sums)[1][C::BN / 8][4], float* staging,
                                                  ConvResults<C>& results, D to, const ConvProduct<C>& product,
                                                  const ConvTile& tile) {
  if constexpr (FIRST < C::BN) {
    using Grid = WarpOfGroup<0, STRIP>;
    constexpr int PITCH = STAGING_PITCH<Grid>, PER_ROW = STRIP / C::VEC_C, WIDTH = C::VEC_C < 4 ? C::VEC_C : 4;
    const int lane = int(threadIdx.x) % 32;
    to.column = tile.column + FIRST;
    if constexpr (C::DIRECTION == WGRAD) aim_at_tap(results, to, product.sizes, tile.column + FIRST);
#pragma unroll
    for (int j = 0; j < STRIP / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_vec(staging + (lane / 4 + 8 * half) * PITCH + 8 * j + lane % 4 * 2,
                  Vec<float, 2>{sums[0][FIRST / 8 + j][2 * half], sums[0][FIRST / 8 + j][2 * half + 1]});
    __syncwarp();
    // Not unrolled: the code of an access is long, and its data is in shared memory rather than in registers.
#pragma unroll 1
    for (int index = lane; index < 16 * PER_ROW; index += 32) {
      const int row = index / PER_ROW, at = index % PER_ROW * C::VEC_C;
      float run[C::VEC_C];
#pragma unroll
      for (int e = 0; e < C::VEC_C; e += WIDTH) {
        const Vec<float, WIDTH> part = load_vec<WIDTH>(staging + row * PITCH + at + e);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) run[e + i] = part.at[i];
      }
      if (results.exists(to.row + Grid::row() + row))
        to.template store<typename C::Apply, C::VEC_C>(results, Grid::row() + row, at, run);
    }
    __syncwarp();
    store_conv_strips<C, FIRST + STRIP>(sums, staging, results, to, product, tile);
  }
}

// ---- roles ---------------------------------------------------------------------------------------------------------

// Producer: copies tiles of A and B, stage by stage, until all are done. Called by one thread.
template <class C>
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map, u32 buffers,
                                        u32 barriers, const Tiles<C>& tiles,
                                        const ConvProduct<C>& product) {
  const Sharing<C> shared(tiles);
  Ring<C::STAGES> place = {barriers};
  prefetch_tensor_map(a_map);
  prefetch_tensor_map(b_map);
#pragma unroll 1
  for (u32 index = tiles.first; index < tiles.end; index += tiles.step) {
    const ConvTile tile = product.tile(tiles.corner(index));
    if constexpr (C::DIRECTION == WGRAD)
      copy_pixels_of_taps<C>(a_map, b_map, buffers, place, shared, product, tile);
    else
      copy_taps<C>(a_map, b_map, buffers, place, shared, product, tile);
  }
}

// Consumer: multiplies this warpgroup's share of the tiles and stores the results.
template <class C>
__device__ __forceinline__ void consume(const Destination<typename C::In, typename C::Out, i64>& output,
                                        i64 part_size, const BlockMemory<C>& memory, const Tiles<C>& tiles,
                                        int consumer, const ConvProduct<C>& product) {
  constexpr int ROWS = ROWS_OF_CONSUMER<C>, TURNS = C::PINGPONG ? C::CONSUMERS : 1;
  const int first_row = C::PINGPONG ? 0 : consumer * ROWS, first_turn = C::PINGPONG ? consumer : 0;
  constexpr int FLOATS_A_WARP = STAGING_FLOATS<WarpOfGroup<0, STRIP>>;
  float* const gathered = reinterpret_cast<float*>(memory.staging) + int(threadIdx.x) / 32 * FLOATS_A_WARP;
  Ring<C::STAGES> place = {memory.barriers};
  Turn<TURNS> turn(memory.barriers + 16 * C::STAGES, first_turn);
  // Skips the stages of tiles that other warpgroups multiply.
  const auto skip_tiles = [&](u32 index, int count) {
    for (int i = 0; i < count; ++i, index += tiles.step)
      if (index < tiles.end) place.skip(product.steps(product.tile(tiles.corner(index))).count);
  };
  skip_tiles(tiles.first, first_turn);
#pragma unroll 1
  for (u32 index = tiles.first + first_turn * tiles.step; index < tiles.end; index += TURNS * tiles.step) {
    const ConvTile tile = product.tile(tiles.corner(index));
    const u32 steps = product.steps(tile).count;
    // Nothing is kept from tile to tile: the code in between needs the registers.
    float sums[ROWS / 64][1][C::BN / 8][4] = {};
    if (steps > 0) {
      multiply<C>(memory.buffers, sums, first_row, place, steps, turn);
    } else {  // no tap reaches these pixels
      turn.take();
      turn.pass();
    }
    if constexpr (TURNS > 1) skip_tiles(index + tiles.step, TURNS - 1);
    Destination<typename C::In, typename C::Out, i64> to = output;
    to.tensor += tile.part * part_size;
    // dw of each group is a separate matrix; other outputs have groups as columns of one matrix.
    if constexpr (C::DIRECTION == WGRAD)
      to.tensor += i64(tile.group) * product.sizes.k * product.sizes.r * product.sizes.s * product.sizes.c;
    else
      to.group = tile.group;
    ConvResults<C> results(product, tile);
#pragma unroll
    for (int i = 0; i < ROWS / 64; ++i) {
      to.row = tile.row + first_row + 64 * i;
      if (to.row < results.m) store_conv_strips<C>(sums[i], gathered, results, to, product, tile);
    }
  }
}
