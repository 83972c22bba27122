// Runtime: shared memory by 32-bit addresses, as instructions of sm_90 use it. Needs fiber.h.
//
// A block's dynamic shared memory begins at FIRST, after the bytes reserved for the system; `__shared__`
// variables follow. Block `rank` of the cluster has its window at (rank + 1) * WINDOW; the running block is
// also at 0.
#pragma once
#include "fiber.h"
#include "watch_hopper.h"

namespace emulated {

namespace {

constexpr unsigned FIRST = 1024, WINDOW = 1u << 24;

struct Place {
  int block;
  unsigned offset;
};

Place place_of(unsigned address, int own_block) {
  const unsigned window = address / WINDOW;
  if (window > blocks.size())
    fail("shared::cluster address %08x is of block %u, which is not there", address, window - 1);
  return {window ? int(window) - 1 : own_block, address % WINDOW};
}

unsigned address_of(const Place& place) { return (unsigned(place.block) + 1) * WINDOW + place.offset; }

size_t threads_of_a_block() { return fibers.size() / blocks.size(); }

// The shared memory of a block, in the order of its window.
std::vector<const Shared*> pieces_of(int block) {
  if (blocks.size() > 1) return {&shared_memory()[size_t(block)]};
  std::vector<const Shared*> all;
  for (const Shared& shared : shared_memory()) all.push_back(&shared);
  return all;
}

unsigned window_bytes(const Shared& shared) { return unsigned(shared.bytes + FIRST - 1) / FIRST * FIRST; }

// The bytes at an address, which must all be within shared memory of a block that has not exited.
unsigned char* bytes_at(const Place& place, size_t bytes, const char* what) {
  if (blocks[size_t(place.block)].alive == 0) fail("%s: block %d of the cluster has exited", what, place.block);
  unsigned first = FIRST;
  for (const Shared* shared : pieces_of(place.block)) {
    if (place.offset >= first && place.offset + bytes <= first + shared->bytes)
      return shared->data + (place.offset - first);
    first += window_bytes(*shared);
  }
  fail("%s: %zu bytes at %u are not within shared memory", what, bytes, place.offset);
}

}  // namespace

unsigned shared_address(const void* pointer) {
  const auto at = static_cast<const unsigned char*>(pointer);
  unsigned first = FIRST;
  for (const Shared* shared : pieces_of(current->block)) {
    if (at >= shared->data && at <= shared->data + shared->bytes) return first + unsigned(at - shared->data);
    first += window_bytes(*shared);
  }
  fail("the shared address of %p, which is not in shared memory, is asked for", pointer);
}

unsigned cluster_rank() { return unsigned(current->block); }

unsigned cluster_address(unsigned address, unsigned rank) {
  if (rank >= blocks.size()) fail("mapa: block %u of a cluster of %zu", rank, blocks.size());
  return address_of({int(rank), address % WINDOW});
}

}  // namespace emulated
