// Runtime: asynchronous copies from global to shared memory, performed at once or deferred. Needs fiber.h.
#pragma once
#include "fiber.h"

namespace emulated {

namespace {

void perform(const Copy& copy) {
  memcpy(copy.target, copy.source, size_t(copy.source_bytes));
  memset(static_cast<char*>(copy.target) + copy.source_bytes, 0, size_t(copy.bytes - copy.source_bytes));
}

}  // namespace

void copy_async(void* target, const void* source, int bytes, int source_bytes, bool past_l1) {
  check_shared(target, Bytes(bytes), "cp.async target");
  check_aligned(source, Bytes(bytes), "cp.async source");
  if (source_bytes < 0 || source_bytes > bytes) fail("cp.async: %d of %d bytes", source_bytes, bytes);
  watch::copy_begins(target, source, bytes, source_bytes, past_l1, __builtin_return_address(0));
  const Copy copy = {target, source, bytes, source_bytes, current->groups};
  if (order == Order::forward || (order == Order::random && draw() % 2))
    perform(copy);
  else
    current->copies.push_back(copy);
}

void commit_copies() { ++current->groups; }

void wait_for_copies(int groups_left) {
  watch::copies_land(current->groups - groups_left);
  auto& copies = current->copies;
  size_t kept = 0;
  for (const Copy& copy : copies)
    if (copy.group < current->groups - groups_left)
      perform(copy);
    else
      copies[kept++] = copy;
  copies.resize(kept);
}

}  // namespace emulated
