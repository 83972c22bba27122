// Runtime, watching: counts of what a block executes, as a GPU would count it. Needs state.h.
//
// Lanes of a warp run one after the other here. Their accesses belong to one warp instruction if the same
// instruction makes them, at the same repetition since the warp last synchronised. A lane that skips a
// repetition splits groups as a GPU would not, but never creates more of them: the counts stay lower bounds
// of what is executed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "state.h"

namespace emulated {
namespace {
namespace watch {

// A copy is one instruction; its source is counted separately if it bypasses L1.
enum class Kind { shared_load, shared_store, shared_atomic, copy, global_load, global_store, global_atomic, source };
constexpr const char* KIND_NAMES[] = {"ld.shared", "st.shared", "atom.shared", "cp.async",
                                      "ld.global", "st.global", "atom.global", nullptr};

// Work of a block; names as in `WorkCounts` of counts.py.
struct Work {
  uint64_t fma, sfu, smem_traffic_bytes, smem_passes, bank_conflicts, fill_bytes, accesses, longest_fma;
  std::map<std::string, uint64_t> instructions;  // of warps, by name
};
std::vector<Work> works;  // of each block of the running cluster

Work& work() { return works[size_t(current->block)]; }

// An access of a warp: the addresses of the participating lanes.
struct WarpAccess {
  int lanes;
  uintptr_t address[32];
  int bytes[32];
};

// An instruction that accesses memory, as one warp executes it.
struct Site {
  Kind kind;
  bool used;
  uint32_t repetitions[32];  // per lane, since the warp last synchronised
  std::vector<WarpAccess> accesses;
};

struct WarpCounts {
  std::unordered_map<uintptr_t, Site> sites;  // by address of the instruction
  std::vector<Site*> used;
  uint32_t f32[32], special[32];
  uint64_t all_f32[32];  // f32 instructions since the block began
};
std::vector<WarpCounts> warp_counts;  // of the running cluster

void add(WarpAccess& access, const void* address, int bytes) {
  access.address[access.lanes] = reinterpret_cast<uintptr_t>(address);
  access.bytes[access.lanes++] = bytes;
}

// Bytes that at least one of lanes `first` to `last` accesses.
uint64_t distinct_bytes(const WarpAccess& access, int first, int last) {
  int order[32];
  for (int i = first; i < last; ++i) order[i] = i;
  std::sort(order + first, order + last, [&](int a, int b) { return access.address[a] < access.address[b]; });
  uint64_t total = 0;
  uintptr_t end = 0;
  for (int i = first; i < last; ++i) {
    const uintptr_t begin = std::max(end, access.address[order[i]]);
    end = std::max(end, access.address[order[i]] + uintptr_t(access.bytes[order[i]]));
    total += end - std::min(begin, end);
  }
  return total;
}

// Passes over 32 banks of 4 bytes: per pass, each bank serves one word to all lanes that request it.
uint64_t passes(const WarpAccess& access, int first, int last) {
  std::vector<uintptr_t> words;
  for (int i = first; i < last; ++i)
    for (uintptr_t at = access.address[i] / 4; at <= (access.address[i] + uintptr_t(access.bytes[i]) - 1) / 4; ++at)
      words.push_back(at);
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  uint64_t of_bank[32] = {};
  for (const uintptr_t word : words) ++of_bank[word % 32];
  return *std::max_element(of_bank, of_bank + 32);
}

// Accesses of 8 bytes are served half a warp at a time; those of 16 bytes, and matrices of ldmatrix, a
// quarter. Banks conflict only within such a part.
void count_shared(Work& work, const WarpAccess& access) {
  work.smem_traffic_bytes += std::max<uint64_t>(128, distinct_bytes(access, 0, access.lanes));
  const int widest = *std::max_element(access.bytes, access.bytes + access.lanes);
  const int together = std::min(32, 128 / std::max(4, std::min(16, widest)));
  for (int first = 0; first < access.lanes; first += together) {
    const int last = std::min(access.lanes, first + together);
    const uint64_t needed = passes(access, first, last);
    work.smem_passes += needed;
    work.bank_conflicts += needed - 1;
  }
}

void count_access(Work& work, Kind kind, const WarpAccess& access) {
  if (kind <= Kind::copy) count_shared(work, access);
  if (kind != Kind::copy && kind != Kind::source) work.accesses += uint64_t(access.lanes);
  if (kind == Kind::source) work.fill_bytes += distinct_bytes(access, 0, access.lanes);
  if (const char* const name = KIND_NAMES[int(kind)]) ++work.instructions[name];
}

// The warp has synchronised: counts the accesses of its lanes since then, and restarts repetitions.
void come_together(size_t index) {
  WarpCounts& warp = warp_counts[index];
  Work& work = works[index * works.size() / warp_counts.size()];
  const auto most = [&](uint32_t(&of_lanes)[32], const char* name) {
    if (const uint32_t count = *std::max_element(of_lanes, of_lanes + 32)) work.instructions[name] += count;
    std::fill(of_lanes, of_lanes + 32, 0);
  };
  for (int lane = 0; lane < 32; ++lane)
    work.longest_fma = std::max(work.longest_fma, warp.all_f32[lane] += warp.f32[lane]);
  most(warp.f32, "f32");
  most(warp.special, "special");
  for (Site* const site : warp.used) {
    for (const WarpAccess& access : site->accesses) count_access(work, site->kind, access);
    site->accesses.clear();
    std::fill(site->repetitions, site->repetitions + 32, 0);
    site->used = false;
  }
  warp.used.clear();
}

// Records an access of the running lane.
void note_access(Kind kind, const void* pc, const void* address, int bytes) {
  WarpCounts& warp = warp_counts[size_t(current->linear / 32)];
  // One instruction may access shared and global memory in turn.
  Site& site = warp.sites[reinterpret_cast<uintptr_t>(pc) * 8 + size_t(kind)];
  if (!site.used) {
    site.used = true;
    site.kind = kind;
    warp.used.push_back(&site);
  }
  const size_t repetition = site.repetitions[current->linear % 32]++;
  if (site.accesses.size() <= repetition) site.accesses.resize(repetition + 1);
  add(site.accesses[repetition], address, bytes);
}

void note_f32() { ++work().fma, ++warp_counts[size_t(current->linear / 32)].f32[current->linear % 32]; }
void note_special() { ++work().sfu, ++warp_counts[size_t(current->linear / 32)].special[current->linear % 32]; }

}  // namespace watch
}  // namespace
}  // namespace emulated
