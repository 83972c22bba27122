// Runtime: collective calls of the lanes of a warp. Needs fiber.h.
#pragma once
#include <algorithm>

#include "fiber.h"

namespace emulated {

int lane() { return current->linear % 32; }
Slot* slots_in() { return warps[size_t(current->linear / 32)].in; }
Slot* slots_out() { return warps[size_t(current->linear / 32)].out; }

void join(const Call& call, const void* combine, Combiner combiner) {
  const int index = current->linear / 32;
  Warp& warp = warps[size_t(index)];
  const unsigned self = 1u << lane();
  if (!(call.mask & self))
    fail("%s of line %d: mask %08x leaves out the lane that calls", call.name, call.line, call.mask);
  auto same = [&](const Group& group) {
    return group.call.mask == call.mask && group.call.line == call.line && !strcmp(group.call.name, call.name);
  };
  auto found = std::find_if(warp.open.begin(), warp.open.end(), same);
  if (found == warp.open.end()) found = warp.open.insert(found, Group{call, combine, combiner, 0});
  found->arrived |= self;
  current->state = State::in_call;
  current->site = __builtin_return_address(0);
  complete(index);
  leave(false);
}

namespace {

// Combines and releases the calls that wait for no more lanes. A lane that has exited is excused, unless all
// 32 must take part. Source: CUDA C++ Programming Guide, "Warp Shuffle Functions" and "__syncwarp".
void complete(int index) {
  Warp& warp = warps[size_t(index)];
  for (size_t i = 0; i < warp.open.size();) {
    const Group group = warp.open[i];
    if (group.call.whole_warp && warp.alive != 0xffffffffu)
      fail("%s needs all 32 lanes of the warp; only lanes %08x are there", group.call.name, warp.alive);
    if (group.call.mask & warp.alive & ~group.arrived) {
      ++i;
      continue;
    }
    watch::model_begins();
    group.combiner(group.combine, warp.in, warp.out, group.arrived);
    watch::model_ends(group.call.name, index, group.arrived, !(warp.alive & ~group.arrived));
    for (int l = 0; l < 32; ++l)
      if (group.arrived >> l & 1u) fibers[size_t(32 * index + l)].state = State::ready;
    warp.open.erase(warp.open.begin() + long(i));
  }
}

}  // namespace
}  // namespace emulated
