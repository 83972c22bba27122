// Runtime: runs a block, or a cluster of blocks, from its first thread to its last; barriers and order. Needs
// warp.h.
#pragma once
#include <algorithm>
#include <string>

#include "warp.h"

namespace emulated {

Vote block_barrier(int line, bool predicate) {
  current->state = State::at_barrier;
  current->line = line;
  current->predicate = predicate;
  leave(false);
  return vote;
}

namespace {

// Defined in hopper.h: begins and ends a cluster, performs a deferred operation if there is one, reports what
// fibers wait for.
void begin_asynchronous();
void end_asynchronous();
bool advance_asynchronous();
std::string asynchronous_waits();

// Opens the barrier of a block if all threads that have not exited wait at it. They run before another
// barrier opens.
bool open_barrier(int block) {
  const Fiber* first = nullptr;
  vote = {0, true, false};
  for (const Fiber& fiber : fibers) {
    if (fiber.block != block || fiber.state == State::exited) continue;
    if (fiber.state != State::at_barrier) return false;
    if (!first) first = &fiber;
    const uint3 index = blocks[size_t(block)].index, one = first->thread, other = fiber.thread;
    if (fiber.line != first->line)
      fail("block (%u,%u,%u): threads have diverged: (%u,%u,%u) waits at the barrier of line %d, (%u,%u,%u) at that "
           "of line %d",
           index.x, index.y, index.z, one.x, one.y, one.z, first->line, other.x, other.y, other.z, fiber.line);
    vote.count += fiber.predicate;
    vote.all &= fiber.predicate;
    vote.any |= fiber.predicate;
  }
  for (Fiber& fiber : fibers)
    if (fiber.block == block && fiber.state == State::at_barrier) fiber.state = State::ready;
  if (first) watch::barrier_opens(block);
  return first != nullptr;
}

bool open_some_barrier() {
  for (size_t block = 0; block < blocks.size(); ++block)
    if (open_barrier(int(block))) return true;
  return false;
}

// Reports who waits for whom when no thread can continue.
[[noreturn]] void fail_deadlock() {
  std::string text;
  char part[200];
  for (const Fiber& fiber : fibers) {
    if (fiber.state != State::at_barrier) continue;
    snprintf(part, sizeof part, "; thread (%u,%u,%u) waits at the barrier of line %d", fiber.thread.x, fiber.thread.y,
             fiber.thread.z, fiber.line);
    text += part;
    break;
  }
  int listed = 0;
  for (size_t w = 0; w < warps.size() && listed < 3; ++w)
    for (const Group& group : warps[w].open) {
      if (++listed > 3) break;
      const unsigned missing = group.call.mask & warps[w].alive & ~group.arrived;
      snprintf(part, sizeof part, "; lanes %08x of warp %d wait in %s of line %d for lanes %08x", group.arrived,
               int(w), group.call.name, group.call.line, missing);
      text += part;
    }
  text += asynchronous_waits();
  const uint3 index = blocks.front().index;
  fail("block (%u,%u,%u): deadlock%s", index.x, index.y, index.z, text.c_str());
}

// Runs each lane of a warp that can continue once; returns whether there was one.
bool pass_over(int warp, std::vector<int>& lanes) {
  bool ran = false;
  arrange(lanes, std::min(32, int(fibers.size()) - 32 * warp));
  for (const int i : lanes) {
    Fiber& fiber = fibers[size_t(32 * warp + i)];
    if (fiber.state != State::ready) continue;
    resume(fiber);
    ran = true;
  }
  return ran;
}

// Bytes that are NaN, or large and positive, or large and negative, as f32, f16 and bf16 alike: a maximum
// hides the first, a minimum the second.
int poison() {
  static const int bytes[] = {0xff, 0x7b, 0xfb};
  return order == Order::forward ? bytes[0] : order == Order::reverse ? bytes[1] : bytes[draw() % 3];
}

// Runs the blocks of a cluster together.
void run_cluster() {
  watch::cluster_begins();
  poison_byte = poison();
  for (const Shared& shared : shared_memory()) memset(shared.data, poison_byte, shared.bytes);
  for (Block& block : blocks) block.alive = int(fibers.size() / blocks.size());
  begin_asynchronous();
  for (size_t i = 0; i < fibers.size(); ++i) start_fiber(fibers[i], int(i));
  for (size_t w = 0; w < warps.size(); ++w) {
    const int lanes = std::min(32, int(fibers.size() - 32 * w));
    warps[w].alive = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    warps[w].open.clear();
    warps[w].registers = 0;
  }
  std::vector<int> warp_order, lane_order;
  auto exited = [](const Fiber& fiber) { return fiber.state == State::exited; };
  do {
    arrange(warp_order, int(warps.size()));
    for (bool ran = true; ran;) {
      ran = false;
      for (const int warp : warp_order)
        // Until it waits or, in random order, only until its next call, so that warps overlap.
        while (pass_over(warp, lane_order)) {
          ran = true;
          if (order == Order::random && draw() % 2) break;
        }
    }
    if (std::all_of(fibers.begin(), fibers.end(), exited)) return end_asynchronous();
  } while (open_some_barrier() || advance_asynchronous());
  fail_deadlock();
}

}  // namespace
}  // namespace emulated
