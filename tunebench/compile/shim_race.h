// The emulator's runtime, where it watches: accesses to the same byte that nothing orders. Needs shim_state.h.
//
// __syncthreads orders all that the block did before it, __syncwarp what its lanes did, waiting for asynchronous copies
// what they wrote (for the thread that waits), waiting at an mbarrier what those did before that had arrived there.
// Nothing else does: shuffles and matrix instructions exchange registers.
// So one run in one order finds a missing barrier, whichever thread happens to come first.
//
// Source: the happens-before relation by vector clocks, Flanagan and Freund, "FastTrack", PLDI 2009. Of the readers of a
// byte since its last writer two are kept: enough where barriers of the block are all that orders them; among threads
// that mbarriers order, a race with a third may be missed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "shim_state.h"

extern "C" const char __executable_start;

namespace emulated {
namespace {
namespace watch {

// Whose access: of which thread, after how many barriers of blocks, and when by its own clock.
struct Stamp {
  uint32_t epoch;  // 0: there was none
  uint32_t clock;
  uint32_t pc;  // of the instruction, from the start of the executable
  uint16_t thread;
  bool atomic;   // or volatile: those do not race with one another
  bool pending;  // an asynchronous copy that has not been waited for
};

struct SharedByte {
  Stamp writer, readers[2];
};

struct GlobalByte {
  Stamp writer, reader;
  uint32_t writer_block, reader_block;  // 0: none; else counted over all launches
  uint32_t read_in, written_in;         // the last launch that did
  uint32_t brought_to;                  // the last block that has it by an ordinary load
};

uint32_t epoch = 1, first_epoch = 1;  // now; of the block that runs
uint32_t block = 0, launch = 0;       // that run, from 1 on
bool block_has_met_others = false;    // by an atomic or volatile access: what it reads then may be meant for it
Stamp unset_read = {};                // the first read of shared memory that was not written, since the last barrier
size_t unset_at = 0;
std::vector<std::vector<uint32_t>> clocks;         // of each thread: what it knows of the others
std::vector<std::vector<SharedByte>> shared_bytes;  // of each piece of shared memory

std::map<unsigned, std::vector<uint32_t>> known_at;  // an mbarrier, by its address: what those know that arrived there

void arrives_at(unsigned barrier, int thread) {
  auto& known = known_at[barrier];
  auto& own = clocks[size_t(thread)];
  known.resize(own.size(), 0);
  for (size_t i = 0; i < own.size(); ++i) known[i] = std::max(known[i], own[i]);
  ++own[size_t(thread)];
}

void has_waited_at(unsigned barrier, int thread) {
  auto& own = clocks[size_t(thread)];
  const auto& known = known_at[barrier];
  for (size_t i = 0; i < known.size(); ++i) own[i] = std::max(own[i], known[i]);
}

void start_clocks(size_t threads) {
  clocks.assign(threads, std::vector<uint32_t>(threads, 0));
  for (size_t i = 0; i < threads; ++i) clocks[i][i] = 1;
}

// What each of these threads has done is now known to all of them.
void order_threads(const std::vector<int>& threads) {
  std::vector<uint32_t> known(clocks.size(), 0);
  for (const int t : threads)
    for (size_t i = 0; i < known.size(); ++i) known[i] = std::max(known[i], clocks[size_t(t)][i]);
  for (const int t : threads) {
    clocks[size_t(t)] = known;
    ++clocks[size_t(t)][size_t(t)];
  }
}

Stamp now(int thread, const void* pc, bool atomic = false) {
  const uintptr_t from_start = reinterpret_cast<uintptr_t>(pc) - reinterpret_cast<uintptr_t>(&__executable_start);
  const uint32_t clock = clocks[size_t(thread)][size_t(thread)];
  return {epoch, clock, uint32_t(from_start), uint16_t(thread), atomic, false};
}

// Whether an earlier access of this block is ordered before what a thread does now.
bool precedes(const Stamp& earlier, const Stamp& self) {
  return earlier.epoch < epoch || earlier.thread == self.thread || clocks[self.thread][earlier.thread] >= earlier.clock;
}

std::string told(const Stamp& stamp, bool wrote, bool of_this_block = true) {
  const unsigned i = stamp.thread, x = blockDim.x, y = blockDim.y;
  char text[160];
  snprintf(text, sizeof text, "thread (%u,%u,%u)%s %s%s, pc 0x%x", i % x, i / x % y, i / x / y,
           of_this_block ? "" : " of another block", wrote ? "wrote" : "read",
           stamp.pending ? " by a copy not waited for" : "", stamp.pc);
  return text;
}

[[noreturn]] void fail_race(const std::string& memory, size_t at, const std::string& one, const std::string& other) {
  fail("race on %s, byte %zu: %s; %s", memory.c_str(), at, one.c_str(), other.c_str());
}

// Fails if shared memory was read before anyone wrote it. Told at the next barrier: until then, that is a race if the
// thread that writes it is merely late.
void check_unset_read() {
  if (unset_read.epoch)
    fail("read of shared memory that nobody has written, byte %zu: %s", unset_at, told(unset_read, false).c_str());
}

void see_shared(size_t piece, size_t at, int bytes, bool writes, const Stamp& self) {
  // A static declaration has its memory from the first thread on that reaches it.
  if (shared_bytes.size() <= piece) shared_bytes.resize(piece + 1);
  auto& all = shared_bytes[piece];
  int unset = 0;  // bytes up to here that nobody has written
  if (all.size() < shared_memory()[piece].bytes) all.resize(shared_memory()[piece].bytes);
  for (size_t i = at; i < at + size_t(bytes); ++i) {
    SharedByte& byte = all[i];
    const Stamp& writer = byte.writer;
    const bool written = writer.epoch >= first_epoch;
    unset = written || writes ? 0 : unset + 1;
    // A word of which a byte was written may be padding for the rest.
    if (unset == std::min(4, bytes) && !unset_read.epoch) unset_read = self, unset_at = i + 1 - size_t(unset);
    if (written && (writer.pending || !precedes(writer, self)) && !(writer.atomic && self.atomic))
      fail_race("shared memory", i, told(writer, true), told(self, writes));
    if (writes) {
      for (const Stamp& reader : byte.readers)
        if (reader.epoch >= first_epoch && !precedes(reader, self) && !(reader.atomic && self.atomic))
          fail_race("shared memory", i, told(reader, false), told(self, true));
      byte = {self, {}};
    } else if (byte.readers[0].epoch < epoch || byte.readers[0].thread == self.thread || precedes(byte.readers[0], self)) {
      byte.readers[0] = self;
    } else if (byte.readers[0].thread / 32 != self.thread / 32 || byte.readers[1].epoch < epoch) {
      byte.readers[1] = self;
    }
  }
}

// Bytes that a copy has written are there for the thread that waited for it.
void copy_has_landed(size_t piece, size_t at, int bytes) {
  for (size_t i = at; i < at + size_t(bytes); ++i) {
    SharedByte& byte = shared_bytes[piece][i];
    byte.writer.pending = false;
    byte.writer.epoch = epoch;
    byte.writer.clock = clocks[byte.writer.thread][byte.writer.thread];
  }
}

// Bytes that a bulk copy has written: whoever reads them has waited for its barrier, or reads what models refuse.
void box_has_landed(size_t piece, size_t at, size_t bytes, int thread, const void* pc) {
  if (shared_bytes.size() <= piece) shared_bytes.resize(piece + 1);
  auto& all = shared_bytes[piece];
  if (all.size() < shared_memory()[piece].bytes) all.resize(shared_memory()[piece].bytes);
  Stamp writer = now(thread, pc);
  writer.clock = 0;  // before all that anyone does
  for (size_t i = at; i < at + bytes; ++i) all[i] = {writer, {}};
}

// Blocks of a launch run in any order: of two that meet at a byte and write it, nothing says which is first. What a block
// does after an atomic or volatile access may have been handed over by it.
void see_global(GlobalByte* all, const std::string& name, size_t at, int bytes, bool writes, const Stamp& self) {
  for (size_t i = at; i < at + size_t(bytes); ++i) {
    GlobalByte& byte = all[i];
    const auto races = [&](const Stamp& other, uint32_t other_block, uint32_t other_launch) {
      if (other_launch != launch || (other.atomic && self.atomic)) return false;
      return other_block == block ? !precedes(other, self) : !block_has_met_others;
    };
    if (races(byte.writer, byte.writer_block, byte.written_in))
      fail_race(name, i, told(byte.writer, true, byte.writer_block == block), told(self, writes));
    if (writes && races(byte.reader, byte.reader_block, byte.read_in))
      fail_race(name, i, told(byte.reader, false, byte.reader_block == block), told(self, true));
    if (writes)
      byte.writer = self, byte.writer_block = block, byte.written_in = launch;
    else
      byte.reader = self, byte.reader_block = block, byte.read_in = launch;
  }
}

}  // namespace watch
}  // namespace
}  // namespace emulated
