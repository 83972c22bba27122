// Runtime: what sm_90 added. Needs block.h.
//
// The models follow the PTX ISA and know nothing of the kernels that use them. How mistakes show:
// - Copies and products happen at once (forward), as late as allowed (reverse), or either (random): a copy
//   when no thread can continue without it, a product, or a copy to global memory, when a thread waits for it.
// - A deadlock is reported with the barrier and what it lacks: arrivals, bytes.
// - Undefined behaviour of PTX is rejected where it can be detected: a barrier that was not initialised or
//   was overwritten, more arrivals than expected, bytes left over at the end, shared memory of a block that
//   has exited, a warpgroup whose threads disagree, a product without a fence before or a wait after it, an
//   invalid descriptor.
// - Registers of products hold NaN until they are settled. A warp that requests registers waits until others have
//   released theirs: the block has those of its launch.
// - Proxies: a barrier that is initialised and used by a copy without a fence between; watching, any access of a thread
//   that a copy or product follows without fence.proxy.async.
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

constexpr int REGISTERS_OF_SM = 65536;
int launched_registers;  // per thread; 0: the kernel has no limit

int registers_of(const Warp& warp) { return warp.registers ? warp.registers : launched_registers; }

// Registers of the block that no warp holds.
int free_registers(int block) {
  const size_t per_block = warps.size() / blocks.size();
  int left = launched_registers * int(32 * per_block);
  for (size_t w = 0; w < per_block; ++w) left -= 32 * registers_of(warps[size_t(block) * per_block + w]);
  return left;
}

// Fails if some warps of a warpgroup have other register counts than the rest.
void check_registers() {
  for (size_t w = 0; w + 1 < warps.size(); ++w)
    if (w % 4 != 3 && threads_of_a_block() % 128 == 0 && warps[w].registers != warps[w + 1].registers)
      fail("setmaxnreg: warps %zu and %zu of a warpgroup have %d and %d registers a thread", w, w + 1,
           registers_of(warps[w]), registers_of(warps[w + 1]));
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
  if (fiber.progress.waits_for == Progress::registers)
    return "for " + std::to_string(fiber.progress.target) + " registers (setmaxnreg) where the block has " +
           std::to_string(free_registers(fiber.block)) + " left of the " +
           std::to_string(launched_registers * int(threads_of_a_block())) + " it was launched with";
  const auto& records = warpgroup_of(fiber).records;
  const int issued = records.empty() ? 0 : records.front().arrived;
  return "for products that " + std::to_string(issued) + " of 128 threads of the warpgroup have issued";
}

// Reports the first three different things that threads wait for, each with the threads.
std::string asynchronous_waits() {
  std::vector<std::string> reasons;
  std::string all;
  for (const Fiber& fiber : fibers) {
    if (fiber.state != State::waiting || reasons.size() == 3) continue;
    const std::string what = what_it_waits_for(fiber);
    if (std::find(reasons.begin(), reasons.end(), what) != reasons.end()) continue;
    reasons.push_back(what);
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
  launched_registers = 0;
  warpgroups.clear();
  stores.assign(fibers.size(), {});
  for (size_t block = 0; block < blocks.size(); ++block)
    warpgroups.resize(warpgroups.size() + warpgroups_of_a_block(), Warpgroup{int(block), {}, 0, {}});
}

void leave_asynchronous() {
  check_products_were_waited_for();
  check_stores_were_waited_for();
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

// Source: CUDA C++ Programming Guide, "Launch Bounds": a block has as many registers as lets `blocks_per_sm` of them
// fit an SM. With setmaxnreg ptxas assigns a thread all of them, a multiple of 8.
void launch_bounds(int threads, int blocks_per_sm, int) {
  if (int(threads_of_a_block()) > threads)
    fail("launched with %zu threads a block; __launch_bounds__ allows %d", threads_of_a_block(), threads);
  if (blocks_per_sm > 0) launched_registers = std::min(256, REGISTERS_OF_SM / (threads * blocks_per_sm) / 8 * 8);
}

// Called by all lanes of a warp: the first one changes its count.
void set_registers(int count, Registers direction) {
  if (count < 24 || count > 256 || count % 8)
    fail("setmaxnreg: %d registers; it must be a multiple of 8 from 24 to 256", count);
  if (!launched_registers)
    fail("setmaxnreg: no effect without a register limit; declare threads and blocks in __launch_bounds__");
  Warp& warp = warps[size_t(current->linear / 32)];
  const bool taken = direction == Registers::taken;
  if (taken ? count < registers_of(warp) : count > registers_of(warp))
    fail("setmaxnreg.%s: %d registers, where the thread has %d", taken ? "inc" : "dec", count, registers_of(warp));
  while (free_registers(current->block) < 32 * (count - registers_of(warp))) {
    current->progress.target = size_t(count);
    wait_for(Progress::registers);
    leave(false);
  }
  warp.registers = count;
  for (Fiber& fiber : fibers)
    if (fiber.state == State::waiting && fiber.progress.waits_for == Progress::registers) fiber.state = State::ready;
}

void fence_proxy_async() { watch::proxies_are_fenced(); }

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
