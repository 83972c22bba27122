// Runtime: barriers in shared memory that also count bytes. Needs window.h.
//
// The 64-bit object is kept in shared memory, so that overwriting it is detected. Source: PTX ISA,
// "mbarrier".
#pragma once
#include "window.h"

namespace emulated {

namespace {

void wait_for(Progress::Cause what) {
  current->state = State::waiting;
  current->progress.waits_for = what;
}

struct Barrier {
  unsigned expected, pending;  // arrivals
  int bytes;                   // tx-count
  bool phase;                  // parity of the current phase
};

constexpr int MOST_BYTES = (1 << 20) - 1;
std::vector<Place> barriers;  // of the running cluster

// No poison has these two top bits.
bool is_barrier(uint64_t stored) { return stored >> 62 == 2; }

Barrier unpacked(uint64_t stored) {
  return {unsigned(stored & 0xfffff), unsigned(stored >> 20 & 0xfffff), int(stored >> 40 & 0x1fffff) - (1 << 20),
          bool(stored >> 61 & 1)};
}

uint64_t packed(const Barrier& barrier) {
  return uint64_t(2) << 62 | uint64_t(barrier.phase) << 61 | uint64_t(barrier.bytes + (1 << 20)) << 40 |
         uint64_t(barrier.pending) << 20 | barrier.expected;
}

Barrier load_barrier(const Place& place, const char* what) {
  if (place.offset % 8) fail("%s: the address %u is no multiple of 8 bytes", what, place.offset);
  uint64_t stored;
  memcpy(&stored, bytes_at(place, 8, what), 8);
  if (!is_barrier(stored)) fail("%s: there is no initialised barrier at %u", what, place.offset);
  return unpacked(stored);
}

// Ends the phase if nothing is missing, wakes the waiting threads, and stores.
void store_barrier(const Place& place, Barrier barrier) {
  if (barrier.bytes > MOST_BYTES || barrier.bytes < -MOST_BYTES)
    fail("the barrier at %u expects %d bytes; at most 2^20 - 1 may be outstanding", place.offset, barrier.bytes);
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.expected;
    for (Fiber& fiber : fibers)
      if (fiber.state == State::waiting && fiber.progress.waits_for == Progress::barrier &&
          fiber.progress.address == address_of(place) && fiber.progress.parity == unsigned(barrier.phase))
        fiber.state = State::ready;
    barrier.phase = !barrier.phase;
    watch::phase_ends(bytes_at(place, 8, "mbarrier"));
  }
  const uint64_t stored = packed(barrier);
  memcpy(bytes_at(place, 8, "mbarrier"), &stored, 8);
}

// Checks at the end of a cluster that no barrier was overwritten and no byte arrived unexpected.
void check_barriers() {
  for (const Place& place : barriers) {
    uint64_t stored;
    memcpy(&stored, shared_memory()[size_t(place.block)].data + place.offset - FIRST, 8);
    if (!is_barrier(stored)) fail("the barrier at %u of block %d was overwritten", place.offset, place.block);
    if (const int bytes = unpacked(stored).bytes)
      fail("the barrier at %u of block %d expects %d bytes at the end: what arrives and what is expected differ",
           place.offset, place.block, bytes);
  }
}

}  // namespace

void mbarrier_init(unsigned address, unsigned count) {
  const Place place = place_of(address, current->block);
  if (place.block != current->block) fail("mbarrier.init: of a barrier of another block");
  if (place.offset % 8) fail("mbarrier.init: the address %u is no multiple of 8 bytes", place.offset);
  if (count < 1 || count >= 1u << 20) fail("mbarrier.init: a count of %u; it must be from 1 to 2^20 - 1", count);
  uint64_t stored;
  memcpy(&stored, bytes_at(place, 8, "mbarrier.init"), 8);
  if (is_barrier(stored)) fail("mbarrier.init: the barrier at %u is initialised already", place.offset);
  watch::barrier_made(bytes_at(place, 8, "mbarrier.init"), __builtin_return_address(0));
  stored = packed({count, count, 0, false});
  memcpy(bytes_at(place, 8, "mbarrier.init"), &stored, 8);
  current->progress.unfenced.push_back(address_of(place));
  if (place.offset - FIRST < shared_memory()[size_t(place.block)].bytes) barriers.push_back(place);
}

void fence_mbarrier_init() { current->progress.unfenced.clear(); }

void mbarrier_arrive(unsigned address, unsigned expected_bytes) {
  const Place place = place_of(address, current->block);
  Barrier barrier = load_barrier(place, "mbarrier.arrive");
  if (barrier.pending == 0)
    fail("mbarrier.arrive: all %u threads that the barrier at %u expects have arrived in this phase", barrier.expected,
         place.offset);
  watch::barrier_arrives(bytes_at(place, 8, "mbarrier.arrive"), __builtin_return_address(0));
  barrier.bytes += int(expected_bytes);
  --barrier.pending;
  store_barrier(place, barrier);
}

void mbarrier_wait(unsigned address, unsigned parity) {
  const Place place = place_of(address, current->block);
  if (place.block != current->block) fail("mbarrier.try_wait: for a barrier of another block");
  if (parity > 1) fail("mbarrier.try_wait.parity: the parity is %u", parity);
  if (unsigned(load_barrier(place, "mbarrier.try_wait").phase) == parity) {
    current->progress.address = address_of(place);
    current->progress.parity = parity;
    wait_for(Progress::barrier);
    leave(false);
  }
  watch::has_waited_at(bytes_at(place, 8, "mbarrier.try_wait"));
}

}  // namespace emulated
