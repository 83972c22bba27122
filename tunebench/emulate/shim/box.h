// Runtime: bulk copies of a tensor's boxes, and of columns of its pixels, to shared memory; of boxes also back to the
// tensor. Needs mbarrier.h.
//
// Source: PTX ISA, "cp.async.bulk.tensor", and "Tensors" (tiled and im2col modes: bounding boxes, traversal
// strides, out-of-boundary access; swizzling modes).
#pragma once
#include <algorithm>

#include "mbarrier.h"

namespace emulated {

namespace {

// Contents of the 128 bytes of a CUtensorMap, written by the job. Extents are in elements, strides in bytes,
// innermost first.
struct TensorMap {
  static constexpr uint64_t TAG = 0x70616d726f736e74;
  uint64_t tag;
  unsigned char* data;
  uint64_t strides[5];  // the first is unused
  unsigned extents[5], box[5];  // a box of pixels has two extents: channels, pixels
  unsigned element_bytes, swizzle_bytes, rank;
  short lower[3], upper[3];  // corners of pixels, along the dimensions between the first and the last
  unsigned char steps[3];    // strides between pixels
  bool of_pixels;

  unsigned image_rank() const { return rank - 2; }
  // The end of the box of pixels along one of an image's dimensions.
  int64_t end_of_pixels(unsigned d) const { return int64_t(extents[d + 1]) + upper[d]; }
};
static_assert(sizeof(TensorMap) <= 128, "a CUtensorMap has 128 bytes");

struct BoxCopy {
  TensorMap map;
  int corner[5];
  int offsets[3];  // of pixels: offset of this filter tap from the first
  Place target, barrier;
  unsigned blocks;  // bit mask of destination blocks
  uint3 block, thread;  // that issued the copy
};

std::vector<BoxCopy> put_off;  // deferred copies, in issue order

size_t box_bytes(const TensorMap& map) {
  size_t bytes = map.element_bytes;
  for (unsigned d = 0; d < (map.of_pixels ? 2 : map.rank); ++d) bytes *= map.box[d];
  return bytes;
}

// Swizzling: XORs address bits, from the 16-byte chunk on, with those of the 128-byte line.
unsigned swizzled(unsigned address, unsigned swizzle_bytes) {
  return swizzle_bytes ? address ^ (address >> 7 & (swizzle_bytes / 16 - 1)) << 4 : address;
}

// Fills one line (along the innermost dimension) of a box; elements outside the tensor are zero.
void copy_line(const BoxCopy& copy, const unsigned char* source, const Place& line, size_t line_bytes) {
  const TensorMap& map = copy.map;
  for (size_t at = 0; at < line_bytes; at += 16) {
    unsigned char chunk[16] = {};
    for (size_t i = 0; i < 16 && source; i += map.element_bytes) {
      const int64_t x = copy.corner[0] + int64_t((at + i) / map.element_bytes);
      if (x >= 0 && x < int64_t(map.extents[0])) memcpy(chunk + i, source + x * map.element_bytes, map.element_bytes);
    }
    const unsigned offset = swizzled(line.offset + unsigned(at), map.swizzle_bytes);
    memcpy(bytes_at({line.block, offset}, 16, "cp.async.bulk.tensor"), chunk, 16);
  }
}

size_t line_bytes_of(const TensorMap& map) { return size_t(map.box[0]) * map.element_bytes; }

// Advances a pixel and its image number to the next pixel of the box, row by row, image by image.
void step_pixel(const TensorMap& map, int64_t* at) {
  for (unsigned d = 0; d < map.image_rank(); ++d) {
    at[d] += map.steps[d];
    if (at[d] < map.end_of_pixels(d)) return;
    at[d] = map.lower[d];
  }
  ++at[map.image_rank()];
}

// Calls `visit` for each pixel in turn, as `for_each_line` does.
template <class Visit>
void for_each_pixel(const BoxCopy& copy, Visit visit) {
  const TensorMap& map = copy.map;
  int64_t at[4];  // of the filter's first tap
  std::copy(copy.corner + 1, copy.corner + map.rank, at);
  for (unsigned pixels = map.box[1]; pixels > 0; --pixels) {
    const unsigned char* source = map.data;
    for (unsigned d = 1; d < map.rank; ++d) {
      const int64_t x = at[d - 1] + (d + 1 < map.rank ? copy.offsets[d - 1] : 0);
      if (x < 0 || x >= int64_t(map.extents[d]))
        source = nullptr;
      else if (source)
        source += uint64_t(x) * map.strides[d];
    }
    visit(source);
    step_pixel(map, at);
  }
}

// Calls `visit` with the source of each line: the start of the tensor's innermost dimension, or null outside
// of it.
template <class Visit>
void for_each_line(const BoxCopy& copy, Visit visit) {
  const TensorMap& map = copy.map;
  if (map.of_pixels) return for_each_pixel(copy, visit);
  unsigned at[5] = {};  // line of the box; the first coordinate stays 0
  for (size_t lines = box_bytes(map) / line_bytes_of(map); lines > 0; --lines) {
    const unsigned char* source = map.data;
    for (unsigned d = 1; d < map.rank; ++d) {
      const int64_t x = int64_t(copy.corner[d]) + at[d];
      if (x < 0 || x >= int64_t(map.extents[d]))
        source = nullptr;
      else if (source)
        source += uint64_t(x) * map.strides[d];
    }
    visit(source);
    for (unsigned d = 1; d < map.rank && ++at[d] == map.box[d]; ++d) at[d] = 0;
  }
}

// Writes one line of a box to the tensor; elements outside the tensor are not written.
void store_line(const BoxCopy& copy, unsigned char* target, const Place& line, size_t line_bytes) {
  const TensorMap& map = copy.map;
  for (size_t at = 0; at < line_bytes; at += 16) {
    const unsigned offset = swizzled(line.offset + unsigned(at), map.swizzle_bytes);
    const unsigned char* const chunk = bytes_at({line.block, offset}, 16, "cp.async.bulk.tensor");
    for (size_t i = 0; i < 16; i += map.element_bytes) {
      const int64_t x = copy.corner[0] + int64_t((at + i) / map.element_bytes);
      if (x >= 0 && x < int64_t(map.extents[0])) memcpy(target + x * map.element_bytes, chunk + i, map.element_bytes);
    }
  }
}

void copy_to(const BoxCopy& copy, int block) {
  Place line = {block, copy.target.offset};
  for_each_line(copy, [&](const unsigned char* source) {
    copy_line(copy, source, line, line_bytes_of(copy.map));
    line.offset += unsigned(line_bytes_of(copy.map));
  });
}

// Calls `visit` with each part of a line of the tensor that is within the box, and its bytes.
template <class Visit>
void for_each_part(const BoxCopy& copy, Visit visit) {
  const TensorMap& map = copy.map;
  const int64_t first = std::max(0, copy.corner[0]);
  const int64_t last = std::min(int64_t(map.extents[0]), int64_t(copy.corner[0]) + int64_t(map.box[0]));
  for_each_line(copy, [&](const unsigned char* line) {
    if (line && first < last) visit(line + first * map.element_bytes, size_t(last - first) * map.element_bytes);
  });
}

// Reports the bytes that a copy reads and writes to the watch, when the copy is issued.
void tell(const BoxCopy& copy, const void* pc) {
  const TensorMap& map = copy.map;
  for_each_part(copy, [&](const unsigned char* source, size_t bytes) { watch::box_reads(source, bytes, pc); });
  watch::box_is_asked_for();
  for (int block = 0; block < int(blocks.size()); ++block)
    if (copy.blocks >> block & 1u)
      watch::box_comes(bytes_at({block, copy.target.offset}, box_bytes(map), "cp.async.bulk.tensor"), box_bytes(map),
                       bytes_at({block, copy.barrier.offset}, 8, "cp.async.bulk.tensor"), block, pc);
}

void perform(const BoxCopy& copy) {
  for (int block = 0; block < int(blocks.size()); ++block) {
    if (!(copy.blocks >> block & 1u)) continue;
    copy_to(copy, block);
    const Place notified = {block, copy.barrier.offset};
    Barrier barrier = load_barrier(notified, "cp.async.bulk.tensor");
    barrier.bytes -= int(box_bytes(copy.map));
    store_barrier(notified, barrier);
  }
}

// Performs one of the deferred copies. They are unordered: in reverse order the last one comes first.
bool copy_one_box() {
  if (put_off.empty()) return false;
  const size_t which = order == Order::random ? draw() % put_off.size() : put_off.size() - 1;
  const BoxCopy copy = put_off[which];
  put_off.erase(put_off.begin() + long(which));
  perform(copy);
  return true;
}

void check_no_box_is_left() {
  if (put_off.empty()) return;
  const uint3 block = put_off.front().block, thread = put_off.front().thread;
  fail("block (%u,%u,%u) has exited with a bulk copy under way, that of thread (%u,%u,%u)", block.x, block.y, block.z,
       thread.x, thread.y, thread.z);
}

// ---- copies to the tensor ("bulk groups") -------------------------------------------------------------------

// Bulk copies to global memory of a thread. Groups are counted from 1.
struct Stores {
  struct Store {
    BoxCopy copy;
    size_t group;
  };
  std::vector<Store> put_off;  // deferred, in issue order
  size_t groups = 0, read = 0;  // committed; whose sources have been read, as far as the thread knows
  size_t last = 0;              // group of the latest store
};

std::vector<Stores> stores;  // of each thread of the cluster

void perform_store(const BoxCopy& copy) {
  Place line = copy.target;
  for_each_line(copy, [&](const unsigned char* target) {
    if (target) store_line(copy, const_cast<unsigned char*>(target), line, line_bytes_of(copy.map));
    line.offset += unsigned(line_bytes_of(copy.map));
  });
}

void check_stores_were_waited_for() {
  const Stores& mine = stores[size_t(current->linear)];
  if (mine.last > mine.read)
    fail("the thread exits with bulk copies from shared memory that it has not waited for (cp.async.bulk.wait_group)");
}

// Fails if the copy begins outside of the box of pixels, which PTX forbids, or if its offsets are too large.
void check_pixels(const BoxCopy& copy) {
  const TensorMap& map = copy.map;
  static const int most_offsets[] = {0xffff, 0xff, 0x1f};
  for (unsigned d = 0; d < map.image_rank(); ++d) {
    const int64_t at = copy.corner[d + 1];
    if (at < map.lower[d] || at >= map.end_of_pixels(d))
      fail("cp.async.bulk.tensor.im2col: coordinate %u is %lld, outside of the box of pixels from %d to %lld", d + 1,
           static_cast<long long>(at), map.lower[d], static_cast<long long>(map.end_of_pixels(d)) - 1);
    if ((at - map.lower[d]) % map.steps[d])
      fail("cp.async.bulk.tensor.im2col: coordinate %u is %lld, between pixels that are %u apart from %d on: no model",
           d + 1, static_cast<long long>(at), unsigned(map.steps[d]), map.lower[d]);
    const int most = most_offsets[map.image_rank() - 1];
    if (copy.offsets[d] < 0 || copy.offsets[d] > most)
      fail("cp.async.bulk.tensor.im2col: offset %u is %d; it must be from 0 to %d", d, copy.offsets[d], most);
  }
}

// Reads a tensor map and checks its number of dimensions and its mode, tiled or im2col.
void read_map(BoxCopy& copy, const void* tensor_map, int rank, bool of_pixels) {
  check_aligned(tensor_map, 64, "cp.async.bulk.tensor: tensor map");
  memcpy(&copy.map, tensor_map, sizeof copy.map);
  if (copy.map.tag != TensorMap::TAG) fail("cp.async.bulk.tensor: there is no tensor map at %p", tensor_map);
  if (int(copy.map.rank) != rank)
    fail("cp.async.bulk.tensor: %d coordinates in a tensor of %u dimensions", rank, copy.map.rank);
  if (copy.map.of_pixels != of_pixels)
    fail("cp.async.bulk.tensor: %s wants another kind of map", of_pixels ? "im2col" : "tile");
  const unsigned line_bytes = copy.map.box[0] * copy.map.element_bytes;
  if (copy.map.swizzle_bytes && line_bytes != copy.map.swizzle_bytes)
    fail("cp.async.bulk.tensor: lines of %u bytes with a swizzle of %u have no model", line_bytes,
         copy.map.swizzle_bytes);
}

// Performs a copy at once, or defers it.
void ask_for(BoxCopy& copy, unsigned target, unsigned barrier, unsigned mask, const void* pc) {
  copy.target = place_of(target, current->block);
  copy.barrier = place_of(barrier, current->block);
  if (copy.target.offset % 128)
    fail("cp.async.bulk.tensor: the target %u is no multiple of 128 bytes", copy.target.offset);
  if (copy.target.block != copy.barrier.block) fail("cp.async.bulk.tensor: target and barrier are of different blocks");
  if (mask >> blocks.size()) fail("cp.async.bulk.tensor: mask %04x in a cluster of %zu blocks", mask, blocks.size());
  copy.blocks = mask ? mask : 1u << copy.target.block;
  for (const Fiber& fiber : fibers)
    for (const unsigned fresh : fiber.progress.unfenced)
      if (copy.blocks >> (fresh / WINDOW - 1) & 1u && fresh % WINDOW == copy.barrier.offset)
        fail("cp.async.bulk.tensor: its barrier at %u was initialised with no fence.mbarrier_init since",
             copy.barrier.offset);
  copy.block = blockIdx, copy.thread = threadIdx;
  tell(copy, pc);
  if (order == Order::forward || (order == Order::random && draw() % 2))
    perform(copy);
  else
    put_off.push_back(copy);
}

}  // namespace

void copy_box(unsigned target, const void* tensor_map, int rank, const int* corner, unsigned barrier, unsigned mask) {
  BoxCopy copy = {};
  read_map(copy, tensor_map, rank, false);
  memcpy(copy.corner, corner, sizeof(int) * size_t(rank));
  ask_for(copy, target, barrier, mask, __builtin_return_address(0));
}

void store_box(unsigned source, const void* tensor_map, int rank, const int* corner) {
  Stores& mine = stores[size_t(current->linear)];
  BoxCopy copy = {};
  read_map(copy, tensor_map, rank, false);
  memcpy(copy.corner, corner, sizeof(int) * size_t(rank));
  copy.target = place_of(source, current->block);
  if (copy.target.block != current->block || copy.target.offset % 128)
    fail("cp.async.bulk.tensor: the source %u of a store must be a multiple of 128 bytes in the block's own shared memory",
         copy.target.offset);
  mine.last = mine.groups + 1;
  const void* const pc = __builtin_return_address(0);
  watch::box_leaves(&mine, bytes_at(copy.target, box_bytes(copy.map), "cp.async.bulk.tensor"), box_bytes(copy.map),
                    mine.last, pc);
  for_each_part(copy, [&](const unsigned char* target, size_t bytes) { watch::box_writes(&mine, target, bytes, pc); });
  if (order == Order::forward || (order == Order::random && draw() % 2))
    perform_store(copy);
  else
    mine.put_off.push_back({copy, mine.last});
}

void commit_stores() { ++stores[size_t(current->linear)].groups; }

void wait_for_stores(int groups_left) {
  Stores& mine = stores[size_t(current->linear)];
  if (mine.groups < mine.read + size_t(groups_left)) return;
  mine.read = mine.groups - size_t(groups_left);
  while (!mine.put_off.empty() && mine.put_off.front().group <= mine.read) {
    perform_store(mine.put_off.front().copy);
    mine.put_off.erase(mine.put_off.begin());
  }
  watch::has_waited_for_stores(&mine, mine.read);
}

void copy_pixels(unsigned target, const void* tensor_map, int rank, const int* corner, const unsigned short* offsets,
                 unsigned barrier, unsigned mask) {
  BoxCopy copy = {};
  read_map(copy, tensor_map, rank, true);
  memcpy(copy.corner, corner, sizeof(int) * size_t(rank));
  std::copy(offsets, offsets + rank - 2, copy.offsets);
  check_pixels(copy);
  ask_for(copy, target, barrier, mask, __builtin_return_address(0));
}

}  // namespace emulated
