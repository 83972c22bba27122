// The emulator's runtime, where it watches (TUNEBENCH_WATCH): every access to memory comes by here, to be counted
// (shim_count.h) and held against others (shim_race.h). Elsewhere all of this is nothing. Needs shim_state.h.
//
// The kernel is compiled with -fsanitize=thread, which puts a call before every access to memory that another thread
// might see; the functions called are those below, in place of the sanitizer's own. Accesses that are the emulator's way
// of doing an instruction (ldmatrix, mma) are not the kernel's: those are told to it by the instruction's model.
#pragma once
#include <string>

#include "shim_state.h"

#ifdef TUNEBENCH_WATCH
#include "shim_count.h"
#include "shim_race.h"
#endif

namespace emulated {
namespace {
namespace watch {

#ifdef TUNEBENCH_WATCH

struct Tensor {
  std::string name;
  const unsigned char* data;
  size_t bytes;
  GlobalByte* seen;
};

struct PendingCopy {
  size_t piece, at;
  int bytes, group;
};

std::vector<Tensor> tensors;
std::vector<std::vector<PendingCopy>> pending_copies;  // of each thread
bool in_model = false;                                 // an instruction is being emulated
WarpAccess of_model;                                   // what it has told so far
std::string report;

void add_tensor(const std::string& name, const unsigned char* data, size_t bytes) {
  tensors.push_back({name, data, bytes, static_cast<GlobalByte*>(calloc(bytes + 1, sizeof(GlobalByte)))});
}

bool on_a_stack(const unsigned char* at) {
  const auto lowest = reinterpret_cast<const unsigned char*>(fibers.front().stack) - PAGE;
  return at >= lowest && at < lowest + (STACK_BYTES + PAGE) * fibers.size();
}

bool reaches(const unsigned char* at, const unsigned char* data, size_t bytes) {
  return at + GUARD >= data && at < data + bytes + GUARD;
}

// Returns the piece of shared memory that an address is in or next to, or -1.
int piece_of(const unsigned char* at) {
  const auto& all = shared_memory();
  for (size_t i = 0; i < all.size(); ++i)
    if (reaches(at, all[i].data, all[i].bytes)) return int(i);
  return -1;
}

// Returns where an access begins in what it reaches; fails unless it is within.
size_t offset_within(const unsigned char* data, size_t size, const unsigned char* at, int bytes, const std::string& name,
                     const Stamp& self, bool writes) {
  if (at < data || at + bytes > data + size)
    fail("access outside of %s, at byte %td of %zu: %s", name.c_str(), at - data, size, told(self, writes).c_str());
  return size_t(at - data);
}

void access_tensor(const Tensor& tensor, const unsigned char* at, int bytes, bool writes, const Stamp& self, Kind kind,
                   const void* pc) {
  const size_t first = offset_within(tensor.data, tensor.bytes, at, bytes, tensor.name, self, writes);
  if (kind != Kind::source)
    for (size_t i = first; i < first + size_t(bytes) && !writes; ++i)
      if (tensor.seen[i].brought_to != block) ++work.fill_bytes, tensor.seen[i].brought_to = block;
  see_global(tensor.seen, tensor.name, first, bytes, writes, self);
  if (pc) note_access(kind, pc, at, bytes);
}

// An access of the kernel's own by the thread that runs.
void access(const void* address, int bytes, bool writes, bool atomic, const void* pc) {
  if (!current || in_model) return;
  const auto at = static_cast<const unsigned char*>(address);
  if (on_a_stack(at)) return;
  const int piece = piece_of(at);
  const Stamp self = now(current->linear, pc, atomic);
  if (piece >= 0) {
    const Shared& shared = shared_memory()[size_t(piece)];
    const size_t first = offset_within(shared.data, shared.bytes, at, bytes, "shared memory", self, writes);
    note_access(atomic ? Kind::shared_atomic : writes ? Kind::shared_store : Kind::shared_load, pc, at, bytes);
    see_shared(size_t(piece), first, bytes, writes, self);
    return;
  }
  for (const Tensor& tensor : tensors)
    if (reaches(at, tensor.data, tensor.bytes)) {
      const Kind kind = atomic ? Kind::global_atomic : writes ? Kind::global_store : Kind::global_load;
      access_tensor(tensor, at, bytes, writes, self, kind, pc);
      block_has_met_others |= atomic;
      return;
    }
}

// ---- what the rest of the runtime tells -------------------------------------------------------------------

void launch_begins(size_t threads) {
  ++launch;
  start_clocks(threads);
  pending_copies.assign(threads, {});
  warp_counts.assign((threads + 31) / 32, {});
}

void cluster_begins() {
  ++block;
  first_epoch = ++epoch;
  block_has_met_others = false;
  work = {}, working = 0;
  of_blocks.assign(blocks.size(), {});
  known_at.clear();
  for (auto& copies : pending_copies) copies.clear();
}

// What the warps of a block have done is counted; returns how many they are.
size_t bring_together(int rank) {
  work_for(rank);
  const size_t count = warp_counts.size() / blocks.size();
  for (size_t w = 0; w < count; ++w) come_together(warp_counts[size_t(rank) * count + w]);
  return count;
}

void block_ends(int rank) {
  bring_together(rank);
  char text[300];
  snprintf(text, sizeof text, "block fma=%zu sfu=%zu smem_traffic_bytes=%zu smem_passes=%zu bank_conflicts=%zu "
           "fill_bytes=%zu", work.fma, work.sfu, work.smem_traffic_bytes, work.smem_passes, work.bank_conflicts,
           work.fill_bytes);
  report += text;
  for (const auto& [name, count] : work.instructions) report += " " + name + "=" + std::to_string(count);
  report += "\n";
}

void cluster_ends() {
  check_unset_read();
  for (size_t rank = 0; rank < blocks.size(); ++rank) block_ends(int(rank));
}

void launch_ends() {
  size_t shared = 0, read = 0, written = 0;
  for (const Shared& piece : shared_memory()) shared += piece.bytes;
  for (const Tensor& tensor : tensors)
    for (size_t i = 0; i < tensor.bytes; ++i) {
      read += tensor.seen[i].read_in == launch;
      written += tensor.seen[i].written_in == launch;
    }
  report += "launch threads=" + std::to_string(fibers.size() / blocks.size()) +
            " smem_bytes=" + std::to_string(shared / blocks.size()) + " read_bytes=" + std::to_string(read) +
            " written_bytes=" + std::to_string(written) + "\n";
}

void write_report(FILE* target) { fputs(report.c_str(), target); }

void barrier_opens(int rank) {
  check_unset_read();
  ++epoch;
  const size_t warps_of_it = bring_together(rank);
  work.instructions["__syncthreads"] += warps_of_it;
}

// ---- of shim_hopper.h ----

// A thread asks for a box.
void box_is_asked_for() { ++work.instructions["cp.async.bulk.tensor"]; }

// The copy engine reads a piece of a line for a block, at the request of one of its threads.
void box_reads(int rank, int thread, const void* pc, const unsigned char* from, size_t bytes) {
  work_for(rank);
  work.fill_bytes += bytes;
  for (const Tensor& tensor : tensors)
    if (reaches(from, tensor.data, tensor.bytes))
      see_global(tensor.seen, tensor.name, size_t(from - tensor.data), int(bytes), false, now(thread, pc));
}

void box_lands(int rank, int thread, const void* pc, const unsigned char* to, size_t bytes) {
  work_for(rank);
  work.smem_traffic_bytes += bytes;
  const size_t piece = size_t(piece_of(to));
  box_has_landed(piece, size_t(to - shared_memory()[piece].data), bytes, thread, pc);
}

// A warpgroup multiplies: each of its four warps issues the instruction.
void product_begins(int rank, const char* name, size_t operand_bytes) {
  work_for(rank);
  work.instructions[name] += 4;
  work.smem_traffic_bytes += operand_bytes;
  in_model = true;
}

void product_ends() { in_model = false; }

void model_begins() {
  in_model = true;
  of_model = {};
}

// Lanes of a warp have done a call together.
void model_ends(const char* name, int warp, unsigned lanes, bool all) {
  in_model = false;
  ++work.instructions[name];
  if (of_model.lanes) count_shared(of_model);
  if (all) come_together(warp_counts[size_t(warp)]);
  if (strcmp(name, "__syncwarp")) return;
  std::vector<int> threads;
  for (int i = 0; i < 32; ++i)
    if (lanes >> i & 1u) threads.push_back(32 * warp + i);
  order_threads(threads);
}

void copy_begins(const void* target, const void* source, int bytes, int source_bytes, bool past_l1, const void* pc) {
  const auto to = static_cast<const unsigned char*>(target), from = static_cast<const unsigned char*>(source);
  const size_t piece = size_t(piece_of(to)), at = size_t(to - shared_memory()[piece].data);
  note_access(Kind::copy, pc, to, bytes);
  for (const Tensor& tensor : tensors)
    if (source_bytes && reaches(from, tensor.data, tensor.bytes))
      access_tensor(tensor, from, source_bytes, false, now(current->linear, pc),
                    past_l1 ? Kind::source : Kind::global_load, past_l1 ? pc : nullptr);
  Stamp self = now(current->linear, pc);
  self.pending = true;
  see_shared(piece, at, bytes, true, self);
  pending_copies[size_t(current->linear)].push_back({piece, at, bytes, current->groups});
}

// Groups before this one have landed.
void copies_land(int group) {
  auto& copies = pending_copies[size_t(current->linear)];
  size_t kept = 0;
  for (const PendingCopy& copy : copies)
    if (copy.group < group)
      copy_has_landed(copy.piece, copy.at, copy.bytes);
    else
      copies[kept++] = copy;
  copies.resize(kept);
}

#else

void add_tensor(const std::string&, const unsigned char*, size_t) {}
void launch_begins(size_t) {}
void cluster_begins() {}
void cluster_ends() {}
void work_for(int) {}
void arrives_at(unsigned, int) {}
void has_waited_at(unsigned, int) {}
void box_is_asked_for() {}
void box_reads(int, int, const void*, const unsigned char*, size_t) {}
void box_lands(int, int, const void*, const unsigned char*, size_t) {}
void product_begins(int, const char*, size_t) {}
void product_ends() {}
void launch_ends() {}
void write_report(FILE*) {}
void barrier_opens(int) {}
void model_begins() {}
void model_ends(const char*, int, unsigned, bool) {}
void copy_begins(const void*, const void*, int, int, bool, const void*) {}
void copies_land(int) {}

#endif

}  // namespace watch
}  // namespace

#ifdef TUNEBENCH_WATCH

void count_f32() {
  if (!watch::in_model) watch::note_f32();
}
void count_special() {
  if (!watch::in_model) watch::note_special();
}
void see_atomic(const void* address, Bytes bytes, const void* pc) {
  watch::access(address, int(bytes), true, true, pc);
}
// Every lane may get some of what one lane points at: two of them stand for all, so that one is not the writer.
void tell_shared_read(int lane, const void* address, Bytes bytes) {
  watch::add(watch::of_model, address, int(bytes));
  const auto at = static_cast<const unsigned char*>(address);
  const size_t piece = size_t(watch::piece_of(at)), first = size_t(at - shared_memory()[piece].data);
  const int thread = current->linear / 32 * 32 + lane;
  for (const int reader : {thread, thread ^ 1})
    watch::see_shared(piece, first, int(bytes), false, watch::now(reader, current->site));
}

#endif
}  // namespace emulated

#ifdef TUNEBENCH_WATCH
// What g++ calls. Source: libsanitizer/tsan/tsan_interface.h, of which these are the names and arguments.
#define TUNEBENCH_SEE(name, bytes, writes, atomic)                                                      \
  extern "C" void __tsan_##name(void* address) {                                                        \
    emulated::watch::access(address, bytes, writes, atomic, __builtin_return_address(0));               \
  }
#define TUNEBENCH_SEE_SIZE(bytes)                            \
  TUNEBENCH_SEE(read##bytes, bytes, false, false)            \
  TUNEBENCH_SEE(write##bytes, bytes, true, false)            \
  TUNEBENCH_SEE(unaligned_read##bytes, bytes, false, false)  \
  TUNEBENCH_SEE(unaligned_write##bytes, bytes, true, false)  \
  TUNEBENCH_SEE(volatile_read##bytes, bytes, false, true)    \
  TUNEBENCH_SEE(volatile_write##bytes, bytes, true, true)    \
  TUNEBENCH_SEE(unaligned_volatile_read##bytes, bytes, false, true) \
  TUNEBENCH_SEE(unaligned_volatile_write##bytes, bytes, true, true)
TUNEBENCH_SEE_SIZE(1)
TUNEBENCH_SEE_SIZE(2)
TUNEBENCH_SEE_SIZE(4)
TUNEBENCH_SEE_SIZE(8)
TUNEBENCH_SEE_SIZE(16)
#undef TUNEBENCH_SEE_SIZE
#undef TUNEBENCH_SEE
extern "C" void __tsan_read_range(void* address, unsigned long bytes) {
  emulated::watch::access(address, int(bytes), false, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, unsigned long bytes) {
  emulated::watch::access(address, int(bytes), true, false, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
#endif
