// Runtime, watching: accesses to the same byte that nothing orders. Needs state.h.
//
// __syncthreads orders all accesses of the block before it, __syncwarp those of its lanes. Waiting for
// asynchronous copies, for a barrier in shared memory, for products of a warpgroup or for the cluster orders
// the operations waited for. Nothing else does: shuffles and matrix instructions exchange registers. So one
// run in one order finds a missing barrier, whichever thread happens to run first.
//
// Source: the happens-before relation by vector clocks, Flanagan and Freund, "FastTrack", PLDI 2009. Of the
// readers of a byte since its last write three are kept. That suffices if only barriers of the block order
// them; among readers ordered by barriers in shared memory, a race with a fourth may be missed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <unordered_map>
#include <vector>

#include "state.h"

extern "C" const char __executable_start;

namespace emulated {
namespace {
namespace watch {

// Knowledge of the other threads: the clock of each up to which its accesses are ordered. An agent performs
// what threads have issued: the bulk copies that a barrier waits for, the products of a warpgroup. Agents
// follow the threads.
using Times = std::vector<uint32_t>;

// Agents access memory by the async proxy: they see the accesses of threads that a fence.proxy.async has followed, in
// any thread that knew of them. What they do is known to threads that wait for it without such a fence. Source: PTX ISA,
// "Async Proxy", "Causality Order" (operations linked by a proxy fence).
struct Clock {
  Times known, fenced;
  uint32_t fenced_epoch = 0;  // of a block without a cluster: epochs up to this one are fenced
};

// An access: its thread or agent, the number of barriers of the block before it, and its time by its own
// clock.
struct Stamp {
  uint32_t epoch;  // 0: none
  uint32_t clock;
  uint32_t pc;  // of the instruction, from the start of the executable
  uint16_t who;
  bool atomic;   // or volatile: such accesses do not race with one another
  bool pending;  // an asynchronous copy that has not been waited for
};

struct SharedByte {
  Stamp writer, readers[3];
};

struct GlobalByte {
  Stamp writer, reader;
  uint32_t writer_block, reader_block;  // 0: none; otherwise counted over all launches
  uint32_t read_in, written_in;         // the last launch that did
  uint32_t brought_to;                  // the last block that fetched it by an ordinary load
};

uint32_t epoch = 1, first_epoch = 1;  // current; first of the running cluster
uint32_t first_block = 1, launch = 0;  // number of the cluster's first block, and of the launch, from 1
std::vector<bool> has_met_others;      // per block, by an atomic or volatile access: it may read what others hand over
std::vector<Clock> clocks;             // per thread: knowledge of the others,
std::vector<uint32_t> ticks;           // and its own clock
int agents = 0;
bool any_fence = false;                // of proxies, in the running cluster

// A place at which threads leave their clocks for threads that arrive later.
struct MeetingPoint {
  int agent;        // performs what is reported to this place when complete
  uint32_t phases;  // completed phases: the agent's clock
  Clock gathered, released;
};
std::unordered_map<const void*, MeetingPoint> meeting_points;  // of the running cluster

std::vector<std::vector<SharedByte>> shared_bytes;  // of each piece of shared memory
Stamp unset_read = {};  // the first read of unset shared memory since the last barrier
size_t unset_at = 0;

// ---- clocks ----------------------------------------------------------------------------------------------

void start_clocks() {
  agents = 0;
  any_fence = false;
  meeting_points.clear();
  clocks.assign(fibers.size(), {});
  ticks.assign(fibers.size(), 1);
}

int new_agent() { return int(clocks.size()) + agents++; }

void learn(Times& known, const Times& more) {
  if (known.size() < more.size()) known.resize(more.size(), 0);
  for (size_t i = 0; i < more.size(); ++i) known[i] = std::max(known[i], more[i]);
}

void learn(Times& known, int who, uint32_t clock) {
  if (known.size() <= size_t(who)) known.resize(size_t(who) + 1, 0);
  known[size_t(who)] = std::max(known[size_t(who)], clock);
}

void learn(Clock& clock, const Clock& more) {
  learn(clock.known, more.known);
  learn(clock.fenced, more.fenced);
  clock.fenced_epoch = std::max(clock.fenced_epoch, more.fenced_epoch);
}

// Leaves a thread's accesses and knowledge for those that meet it there.
void leave_at(Clock& place, int thread) {
  learn(place, clocks[size_t(thread)]);
  learn(place.known, thread, ticks[size_t(thread)]++);
}

// Makes a thread's accesses, and those it knows of, visible to the async proxy.
void fence_at(int thread) {
  Clock& clock = clocks[size_t(thread)];
  any_fence = true;
  learn(clock.fenced, clock.known);
  learn(clock.fenced, thread, ticks[size_t(thread)]++);
  clock.fenced_epoch = epoch - 1;
}

// The accesses of each of these threads are now known to all of them.
void order_threads(const std::vector<int>& threads) {
  Clock known;
  for (const int thread : threads) leave_at(known, thread);
  for (const int thread : threads) learn(clocks[size_t(thread)], known);
}

uint32_t from_start(const void* pc) {
  return uint32_t(reinterpret_cast<uintptr_t>(pc) - reinterpret_cast<uintptr_t>(&__executable_start));
}

Stamp now(int thread, const void* pc, bool atomic = false) {
  return {epoch, ticks[size_t(thread)], from_start(pc), uint16_t(thread), atomic, false};
}

// An access that an agent makes later, before its clock reaches `clock`.
Stamp later(int agent, uint32_t clock, const void* pc) {
  return {epoch, clock, from_start(pc), uint16_t(agent), false, false};
}

// Whether an earlier access is ordered before the thread's next one. Barriers of a block without a cluster
// are epochs.
bool precedes(const Stamp& earlier, int thread) {
  if (earlier.who == thread) return true;
  if (earlier.epoch < epoch && blocks.size() == 1 && earlier.who < clocks.size()) return true;
  const Times& known = clocks[size_t(thread)].known;
  return earlier.who < known.size() && known[earlier.who] >= earlier.clock;
}

// Whether a proxy fence is between a thread's earlier access and a later one that `thread` issues to an agent.
bool fenced(const Stamp& earlier, int thread) {
  const Clock& clock = clocks[size_t(thread)];
  if (earlier.epoch <= clock.fenced_epoch && blocks.size() == 1) return true;
  return earlier.who < clock.fenced.size() && clock.fenced[earlier.who] >= earlier.clock;
}

// ---- accesses ---------------------------------------------------------------------------------------------

std::string describe(const Stamp& stamp, bool wrote, bool of_this_block = true) {
  char who[60] = "a copy or product of a warpgroup", text[160];
  const unsigned threads = unsigned(fibers.size() / blocks.size());
  const unsigned i = stamp.who % threads, x = blockDim.x, y = blockDim.y;
  if (stamp.who < clocks.size()) snprintf(who, sizeof who, "thread (%u,%u,%u)", i % x, i / x % y, i / x / y);
  snprintf(text, sizeof text, "%s%s %s%s, pc 0x%x", who, of_this_block ? "" : " of another block",
           wrote ? "wrote" : "read", stamp.pending ? " by a copy not waited for" : "", stamp.pc);
  return text;
}

[[noreturn]] void fail_race(const std::string& memory, size_t at, const std::string& one, const std::string& other) {
  fail("race on %s, byte %zu: %s; %s", memory.c_str(), at, one.c_str(), other.c_str());
}

// Fails if an agent accesses what a thread accessed by the generic proxy, and no fence is between.
void check_proxy(const Stamp& earlier, bool wrote, const Stamp& self, bool writes, size_t at, int thread) {
  if (earlier.who < clocks.size() && self.who >= clocks.size() && !fenced(earlier, thread))
    fail("no fence.proxy.async between accesses of shared memory, byte %zu: %s; %s", at, describe(earlier, wrote).c_str(),
         describe(self, writes).c_str());
}

// Fails if shared memory was read before it was written. Reported at the next barrier: until then it is a
// race if the writing thread is merely late.
void check_unset_read() {
  if (unset_read.epoch)
    fail("read of shared memory that nobody has written, byte %zu: %s", unset_at, describe(unset_read, false).c_str());
}

// Keeps a reader in place of one that it makes redundant, if there is room; prefers readers of different
// warps.
void keep_reader(SharedByte& byte, const Stamp& self, int thread) {
  for (Stamp& reader : byte.readers) {
    if (reader.epoch < first_epoch || reader.who == self.who || precedes(reader, thread)) {
      reader = self;
      return;
    }
    if (reader.who / 32 == self.who / 32 && self.who < clocks.size()) return;
  }
}

// `self` is the access of this thread, or of an agent that it instructs.
void see_shared(size_t piece, size_t size, size_t at, int bytes, bool writes, const Stamp& self, int thread) {
  // A static declaration has its memory as soon as the first thread reaches it.
  if (shared_bytes.size() <= piece) shared_bytes.resize(piece + 1);
  auto& all = shared_bytes[piece];
  if (all.size() < size) all.resize(size);
  int unset = 0;  // unset bytes up to here
  for (size_t i = at; i < at + size_t(bytes); ++i) {
    SharedByte& byte = all[i];
    const Stamp& writer = byte.writer;
    const bool written = writer.epoch >= first_epoch;
    unset = written || writes ? 0 : unset + 1;
    // The unset bytes of a word that was written in part may be padding.
    if (unset == std::min(4, bytes) && !unset_read.epoch) unset_read = self, unset_at = i + 1 - size_t(unset);
    if (written && (writer.pending || !precedes(writer, thread)) && !(writer.atomic && self.atomic))
      fail_race("shared memory", i, describe(writer, true), describe(self, writes));
    if (written) check_proxy(writer, true, self, writes, i, thread);
    if (!writes) {
      keep_reader(byte, self, thread);
      continue;
    }
    for (const Stamp& reader : byte.readers) {
      if (reader.epoch < first_epoch) continue;
      if (!precedes(reader, thread) && !(reader.atomic && self.atomic))
        fail_race("shared memory", i, describe(reader, false), describe(self, true));
      check_proxy(reader, false, self, true, i, thread);
    }
    byte = {self, {}};
  }
}

// Bytes written by a copy are available to the thread that waited for it.
void copy_has_landed(size_t piece, size_t at, int bytes) {
  for (size_t i = at; i < at + size_t(bytes); ++i) {
    SharedByte& byte = shared_bytes[piece][i];
    byte.writer.pending = false;
    byte.writer.epoch = epoch;
    byte.writer.clock = ticks[byte.writer.who];
  }
}

// Blocks of a launch run in any order: if two access the same byte and one writes it, their order is
// undefined. What a block does after an atomic or volatile access may have been handed over by it.
void see_global(GlobalByte* all, const std::string& name, size_t at, int bytes, bool writes, const Stamp& self,
                int thread, int rank) {
  const uint32_t block = first_block + uint32_t(rank);
  for (size_t i = at; i < at + size_t(bytes); ++i) {
    GlobalByte& byte = all[i];
    const auto races = [&](const Stamp& other, uint32_t other_block, uint32_t other_launch) {
      if (other_launch != launch || (other.atomic && self.atomic)) return false;
      return other_block == block ? !precedes(other, thread) : !has_met_others[size_t(rank)];
    };
    if (races(byte.writer, byte.writer_block, byte.written_in))
      fail_race(name, i, describe(byte.writer, true, byte.writer_block == block), describe(self, writes));
    if (writes && races(byte.reader, byte.reader_block, byte.read_in))
      fail_race(name, i, describe(byte.reader, false, byte.reader_block == block), describe(self, true));
    if (writes)
      byte.writer = self, byte.writer_block = block, byte.written_in = launch;
    else
      byte.reader = self, byte.reader_block = block, byte.read_in = launch;
  }
}

}  // namespace watch
}  // namespace
}  // namespace emulated
