// Runtime: what sm_90 added. Needs block.h.
//
// The models follow the PTX ISA and know nothing of the kernels that use them. How mistakes show:
// - Copies and products happen at once (forward), as late as allowed (reverse), or either (random): a copy
//   when no thread can continue without it, a product when a thread waits for it.
// - A deadlock is reported with the barrier and what it lacks: arrivals, bytes.
// - Undefined behaviour of PTX is rejected where it can be detected: a barrier that was not initialised or
//   was overwritten, more arrivals than expected, bytes left over at the end, shared memory of a block that
//   has exited, a warpgroup whose threads disagree, a product without a fence before or a wait after it, an
//   invalid descriptor.
// Not modelled: proxies, except a barrier that is initialised and used by a copy without a fence between.
#pragma once
#include <string>

#include "block.h"
#include "box.h"        // copies of boxes, and barriers that wait for them
#include "warpgroup.h"  // products

namespace emulated {

namespace {

// ---- clusters ("barrier.cluster") --------------------------------------------------------------------------

struct ClusterBarrier {
  size_t arrived, phase;
};
ClusterBarrier cluster_barrier;

void open_cluster_barrier() {
  if (cluster_barrier.arrived == 0) return;
  size_t alive = 0;
  for (const Block& block : blocks) alive += size_t(block.alive);
  if (cluster_barrier.arrived < alive) return;
  cluster_barrier.arrived = 0;
  ++cluster_barrier.phase;
  watch::phase_ends(&cluster_barrier);
  for (Fiber& fiber : fibers)
    if (fiber.state == State::waiting && fiber.progress.waits_for == Progress::cluster) fiber.state = State::ready;
}

// ---- registers ("setmaxnreg") ------------------------------------------------------------------------------

// Fails if some warps of a warpgroup have other register counts than the rest.
void check_registers() {
  for (size_t w = 0; w + 1 < warps.size(); ++w)
    if (w % 4 != 3 && threads_of_a_block() % 128 == 0 && warps[w].registers != warps[w + 1].registers)
      fail("setmaxnreg: warps %zu and %zu of a warpgroup have %d and %d registers a thread", w, w + 1,
           warps[w].registers, warps[w + 1].registers);
}

// ---- what threads wait for ---------------------------------------------------------------------------------

std::string barrier_wait(const Fiber& fiber) {
  char text[300];
  const Place place = place_of(fiber.progress.address, fiber.block);
  const Barrier barrier = load_barrier(place, "mbarrier");
  snprintf(text, sizeof text,
           "for the phase of parity %u of the barrier at %u of block %d, which is in one of parity %d and lacks %u of "
           "%u arrivals and %d bytes",
           fiber.progress.parity, place.offset, place.block, barrier.phase, barrier.pending, barrier.expected,
           barrier.bytes);
  return text;
}

std::string what_it_waits_for(const Fiber& fiber) {
  if (fiber.progress.waits_for == Progress::barrier) return barrier_wait(fiber);
  if (fiber.progress.waits_for == Progress::cluster)
    return "at the barrier of the cluster, where " + std::to_string(cluster_barrier.arrived) + " threads have arrived";
  const auto& records = warpgroup_of(fiber).records;
  const int issued = records.empty() ? 0 : records.front().arrived;
  return "for products that " + std::to_string(issued) + " of 128 threads of the warpgroup have issued";
}

// Reports the first three different things that threads wait for, each with the threads.
std::string asynchronous_waits() {
  std::vector<std::string> told;
  std::string all;
  for (const Fiber& fiber : fibers) {
    if (fiber.state != State::waiting || told.size() == 3) continue;
    const std::string what = what_it_waits_for(fiber);
    if (std::find(told.begin(), told.end(), what) != told.end()) continue;
    told.push_back(what);
    char who[100];
    snprintf(who, sizeof who, "; thread (%u,%u,%u) of block %d waits ", fiber.thread.x, fiber.thread.y, fiber.thread.z,
             fiber.block);
    all += who + what;
  }
  return all;
}

// ---- called by the scheduler
// -------------------------------------------------------------------------------

void begin_asynchronous() {
  barriers.clear();
  cluster_barrier = {};
  warpgroups.clear();
  for (size_t block = 0; block < blocks.size(); ++block)
    warpgroups.resize(warpgroups.size() + warpgroups_of_a_block(), Warpgroup{int(block), {}, 0, {}});
}

void leave_asynchronous() {
  check_products_were_waited_for();
  --blocks[size_t(current->block)].alive;
  open_cluster_barrier();
}

bool advance_asynchronous() { return copy_one_box(); }

void end_asynchronous() {
  check_no_box_is_left();
  check_barriers();
  check_registers();
  watch::cluster_ends();
}

}  // namespace

void set_registers(int count) {
  if (count < 24 || count > 256 || count % 8)
    fail("setmaxnreg: %d registers; it must be a multiple of 8 from 24 to 256", count);
  warps[size_t(current->linear / 32)].registers = count;
  int held = 0;
  const size_t per_block = (threads_of_a_block() + 31) / 32;
  for (size_t w = 0; w < per_block; ++w) held += 32 * warps[size_t(current->block) * per_block + w].registers;
  if (held > 65536)
    fail("setmaxnreg: the block asks for %d registers, of 65536 that an SM has: it would wait for ever", held);
}

void cluster_arrive() {
  watch::arrives_at(&cluster_barrier);
  ++cluster_barrier.arrived;
  current->progress.target = cluster_barrier.phase;
  open_cluster_barrier();
}

void cluster_wait() {
  if (cluster_barrier.phase == current->progress.target) {
    wait_for(Progress::cluster);
    leave(false);
  }
  watch::has_waited_at(&cluster_barrier);
}

}  // namespace emulated
