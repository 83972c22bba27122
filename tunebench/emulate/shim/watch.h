// Runtime, watching (TUNEBENCH_WATCH): every access to memory is counted (count.h) and compared with others
// (race.h). Without watching all of this is empty. Needs state.h.
//
// The kernel is compiled with -fsanitize=thread, which inserts a call before every access to memory that
// another thread might see. Those functions are defined below, in place of the sanitizer's. Accesses that
// only implement an instruction (ldmatrix, mma) are not the kernel's: the model of the instruction reports
// them instead.
#pragma once
#include <string>

#include "state.h"

#ifdef TUNEBENCH_WATCH
#include "count.h"
#include "race.h"
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
WarpAccess of_model;                                   // accesses it has reported so far
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

// Returns the offset of an access in the memory it reaches; fails unless it is within.
size_t offset_within(const unsigned char* data, size_t size, const unsigned char* at, int bytes,
                     const std::string& name, const Stamp& self, bool writes) {
  if (at < data || at + bytes > data + size)
    fail("access outside of %s, at byte %td of %zu: %s", name.c_str(), at - data, size, describe(self, writes).c_str());
  return size_t(at - data);
}

void access_shared(size_t index, const unsigned char* at, int bytes, bool writes, const Stamp& self, int thread) {
  const Shared& shared = shared_memory()[index];
  const size_t first = offset_within(shared.data, shared.bytes, at, bytes, "shared memory", self, writes);
  see_shared(index, shared.bytes, first, bytes, writes, self, thread);
}

// `brings` says whether the bytes are fetched to the block if it does not have them.
void access_tensor(const Tensor& tensor, const unsigned char* at, int bytes, bool writes, const Stamp& self,
                   bool brings) {
  const size_t first = offset_within(tensor.data, tensor.bytes, at, bytes, tensor.name, self, writes);
  const uint32_t block = first_block + uint32_t(current->block);
  for (size_t i = first; i < first + size_t(bytes) && brings; ++i)
    if (tensor.seen[i].brought_to != block) ++work().fill_bytes, tensor.seen[i].brought_to = block;
  see_global(tensor.seen, tensor.name, first, bytes, writes, self, current->linear, current->block);
}

const Tensor* tensor_of(const unsigned char* at) {
  for (const Tensor& tensor : tensors)
    if (reaches(at, tensor.data, tensor.bytes)) return &tensor;
  return nullptr;
}

// Fails if a thread accesses its registers while a product may still write them.
void check_settled(const unsigned char* at, int bytes, const void* pc) {
  for (const Sums& sums : current->progress.unsettled) {
    const auto first = reinterpret_cast<const unsigned char*>(sums.registers);
    if (at + bytes > first && at < first + sums.values.size() * sizeof(float))
      fail("sums of a product (wgmma) are accessed before `settle`, pc 0x%x", from_start(pc));
  }
}

// An access of the kernel itself by the running thread.
void access(const void* address, int bytes, bool writes, bool atomic, const void* pc) {
  if (!current || in_model) return;
  const auto at = static_cast<const unsigned char*>(address);
  if (on_a_stack(at)) return check_settled(at, bytes, pc);
  const Stamp self = now(current->linear, pc, atomic);
  const int shared = piece_of(at);
  if (shared >= 0) {
    access_shared(size_t(shared), at, bytes, writes, self, current->linear);
    note_access(atomic ? Kind::shared_atomic : writes ? Kind::shared_store : Kind::shared_load, pc, at, bytes);
  } else if (const Tensor* const tensor = tensor_of(at)) {
    access_tensor(*tensor, at, bytes, writes, self, !writes);
    note_access(atomic ? Kind::global_atomic : writes ? Kind::global_store : Kind::global_load, pc, at, bytes);
    if (atomic) has_met_others[size_t(current->block)] = true;
  }
}

// ---- called by the rest of the runtime -------------------------------------------------------------------

void launch_begins() { ++launch; }

void cluster_begins() {
  first_epoch = ++epoch;
  start_clocks();
  has_met_others.assign(blocks.size(), false);
  works.assign(blocks.size(), {});
  warp_counts.assign(warps.size(), {});
  pending_copies.assign(fibers.size(), {});
}

void cluster_ends() {
  check_unset_read();
  for (size_t warp = 0; warp < warps.size(); ++warp) come_together(warp);
  for (const Work& work : works) {
    char text[300];
    snprintf(text, sizeof text,
             "block fma=%zu sfu=%zu smem_traffic_bytes=%zu smem_passes=%zu bank_conflicts=%zu fill_bytes=%zu "
             "accesses=%zu longest_fma=%zu",
             work.fma, work.sfu, work.smem_traffic_bytes, work.smem_passes, work.bank_conflicts, work.fill_bytes,
             work.accesses, work.longest_fma);
    report += text;
    for (const auto& [name, count] : work.instructions) report += " " + name + "=" + std::to_string(count);
    report += "\n";
  }
  first_block += uint32_t(blocks.size());
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

void barrier_opens(int block) {
  check_unset_read();
  const size_t per_block = warps.size() / blocks.size();
  for (size_t warp = 0; warp < per_block; ++warp) {
    come_together(size_t(block) * per_block + warp);
    ++works[size_t(block)].instructions["__syncthreads"];
  }
  if (blocks.size() == 1) ++epoch;  // sufficient for threads without a cluster
  if (blocks.size() == 1 && agents == 0 && !any_fence) return;
  std::vector<int> threads;
  for (const Fiber& fiber : fibers)
    if (fiber.block == block && fiber.state != State::exited) threads.push_back(fiber.linear);
  order_threads(threads);
}

void model_begins() {
  in_model = true;
  of_model = {};
}

// Lanes of a warp have made a call together.
void model_ends(const char* name, int warp, unsigned lanes, bool all) {
  in_model = false;
  Work& work = works[size_t(warp) * works.size() / warps.size()];
  ++work.instructions[name];
  if (of_model.lanes) count_shared(work, of_model);
  if (all) come_together(size_t(warp));
  if (strcmp(name, "__syncwarp")) return;
  std::vector<int> threads;
  for (int i = 0; i < 32; ++i)
    if (lanes >> i & 1u) threads.push_back(32 * warp + i);
  order_threads(threads);
}

void copy_begins(const void* target, const void* source, int bytes, int source_bytes, bool past_l1, const void* pc) {
  const auto to = static_cast<const unsigned char*>(target), from = static_cast<const unsigned char*>(source);
  const size_t index = size_t(piece_of(to));
  Stamp self = now(current->linear, pc);
  note_access(Kind::copy, pc, to, bytes);
  if (const Tensor* const tensor = source_bytes ? tensor_of(from) : nullptr) {
    access_tensor(*tensor, from, source_bytes, false, self, !past_l1);
    if (past_l1) note_access(Kind::source, pc, from, source_bytes);
  }
  self.pending = true;
  access_shared(index, to, bytes, true, self, current->linear);
  const size_t at = size_t(to - shared_memory()[index].data);
  pending_copies[size_t(current->linear)].push_back({index, at, bytes, current->groups});
}

// Groups before this one have completed.
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
void launch_begins() {}
void cluster_begins() {}
void cluster_ends() {}
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
// Every lane may receive some of the memory that one lane points at: two readers represent all, so that one
// differs from the writer.
void tell_shared_read(int lane, const void* address, Bytes bytes) {
  watch::add(watch::of_model, address, int(bytes));
  const auto at = static_cast<const unsigned char*>(address);
  const size_t piece = size_t(watch::piece_of(at));
  const int thread = current->linear / 32 * 32 + lane;
  for (const int reader : {thread, thread ^ 1})
    watch::access_shared(piece, at, int(bytes), false, watch::now(reader, current->site), reader);
}

#endif
}  // namespace emulated

#ifdef TUNEBENCH_WATCH
// Functions that g++ calls. Source: libsanitizer/tsan/tsan_interface.h, for names and arguments.
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
