// Runtime, watching: what orders threads and their copies and products on sm_90. Needs watch.h. Addresses are
// the host's.
//
// A bulk copy writes, and a product reads, at some time after a thread has issued it. Each is an access of an
// agent, whose clock is what threads wait for: the phases of the copy's barrier, the products of the
// warpgroup.
#pragma once
#include "watch.h"

namespace emulated {
namespace {
namespace watch {

#ifdef TUNEBENCH_WATCH

MeetingPoint& meeting_point(const void* where) {
  const auto [found, made] = meeting_points.try_emplace(where);
  if (made) found->second.agent = new_agent();
  return found->second;
}

void access_barrier(const void* object, bool writes, bool atomic, const void* pc) {
  const auto at = static_cast<const unsigned char*>(object);
  access_shared(size_t(piece_of(at)), at, 8, writes, now(current->linear, pc, atomic), current->linear);
}

// Other threads may meet there only if something has ordered them after this.
void barrier_made(const void* object, const void* pc) { access_barrier(object, true, false, pc); }

void arrives_at(const void* where) { leave_at(meeting_point(where).gathered, current->linear); }

void phase_ends(const void* where) {
  MeetingPoint& point = meeting_point(where);
  learn(point.released, point.gathered);
  learn(point.released.known, point.agent, ++point.phases);
}

void has_waited_at(const void* where) { learn(clocks[size_t(current->linear)], meeting_point(where).released); }

void barrier_arrives(const void* object, const void* pc) {
  access_barrier(object, true, true, pc);
  arrives_at(object);
}

// The running thread has issued a copy that brings these bytes to a block and notifies a barrier of it.
void box_comes(const void* target, size_t bytes, const void* barrier, int rank, const void* pc) {
  const MeetingPoint& point = meeting_point(barrier);
  const auto at = static_cast<const unsigned char*>(target);
  access_shared(size_t(piece_of(at)), at, int(bytes), true, later(point.agent, point.phases + 1, pc), current->linear);
  works[size_t(rank)].smem_traffic_bytes += bytes;
  works[size_t(rank)].smem_passes += (bytes + 127) / 128;
}

void box_reads(const unsigned char* source, size_t bytes, const void* pc) {
  work().fill_bytes += bytes;
  const Tensor* const tensor = tensor_of(source);
  if (!tensor) return;
  for (const unsigned char* at = source; at < source + bytes; ++at)
    if (tensor->seen[at - tensor->data].written_in == launch)
      fail("a copy reads what threads of the same launch wrote to %s, byte %td: fence.proxy.async.global has no model",
           tensor->name.c_str(), at - tensor->data);
  access_tensor(*tensor, source, int(bytes), false, now(current->linear, pc), false);
}

// The running thread has issued a copy of these bytes to global memory, in the bulk group of this number.
void box_leaves(const void* stores, const unsigned char* source, size_t bytes, size_t group, const void* pc) {
  const Stamp self = later(meeting_point(stores).agent, uint32_t(group), pc);
  access_shared(size_t(piece_of(source)), source, int(bytes), false, self, current->linear);
  ++work().instructions["cp.async.bulk.tensor"];
  work().smem_traffic_bytes += bytes;
  work().smem_passes += (bytes + 127) / 128;
}

// It writes these bytes of a tensor. No wait of the kernel covers that.
void box_writes(const void* stores, const unsigned char* target, size_t bytes, const void* pc) {
  const Stamp self = later(meeting_point(stores).agent, UINT32_MAX, pc);
  if (const Tensor* const tensor = tensor_of(target)) access_tensor(*tensor, target, int(bytes), true, self, false);
}

void has_waited_for_stores(const void* stores, size_t group) {
  learn(clocks[size_t(current->linear)].known, meeting_point(stores).agent, uint32_t(group));
}

void box_is_asked_for() { ++work().instructions["cp.async.bulk.tensor"]; }

// A product of the warpgroup, record `number`, reads 16 bytes.
void product_reads(const void* warpgroup, size_t number, const unsigned char* chunk) {
  const Stamp self = later(meeting_point(warpgroup).agent, uint32_t(number), current->site);
  access_shared(size_t(piece_of(chunk)), chunk, 16, false, self, current->linear);
  work().smem_traffic_bytes += 16;
}

// Each of the four warps issues it.
void product_is_issued(const std::string& name) { work().instructions[name] += 4; }

// During its lifetime, accesses only implement an instruction.
struct Unseen {
  Unseen() { in_model = true; }
  ~Unseen() { in_model = false; }
};

// What the running thread knows of is now visible to copies and products that know of the fence.
void proxies_are_fenced() { fence_at(current->linear); }

void has_waited_for_products(const void* warpgroup, size_t number) {
  learn(clocks[size_t(current->linear)].known, meeting_point(warpgroup).agent, uint32_t(number));
}

#else

void barrier_made(const void*, const void*) {}
void arrives_at(const void*) {}
void phase_ends(const void*) {}
void has_waited_at(const void*) {}
void barrier_arrives(const void*, const void*) {}
void box_comes(const void*, size_t, const void*, int, const void*) {}
void box_reads(const unsigned char*, size_t, const void*) {}
void box_leaves(const void*, const unsigned char*, size_t, size_t, const void*) {}
void box_writes(const void*, const unsigned char*, size_t, const void*) {}
void has_waited_for_stores(const void*, size_t) {}
void box_is_asked_for() {}
void product_reads(const void*, size_t, const unsigned char*) {}
void product_is_issued(const std::string&) {}
struct Unseen {
  Unseen() {}
};
void proxies_are_fenced() {}
void has_waited_for_products(const void*, size_t) {}

#endif

}  // namespace watch
}  // namespace
}  // namespace emulated
