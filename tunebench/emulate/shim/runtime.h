// The emulator's runtime. It runs blocks one after the other, their threads as fibers, and reports what a GPU
// would hide. It is compiled once and linked with each kernel, whose source includes cuda.h.
//
// How mistakes show:
// - Shared memory is filled with a poison before every block, so that reading it before writing shows.
// - Blocks, warps and lanes run forward, in reverse, or in a seeded random order. One of two threads that
//   race runs first in one order and last in the other, so that a missing barrier changes the result of at
//   least one run.
// - Asynchronous copies happen at once (forward), as late as allowed (reverse), or either (random).
// - Blocks of a cluster run together, each with separate shared memory.
// - Threads that wait for each other in different places are reported as divergence or as a deadlock.
// - Each tensor is a separate allocation of its exact size, with guards that no write may touch; under
//   AddressSanitizer no read either. Inputs must not change.
//
// Each of these files needs those above it; README.md in the folder above lists them.
#include "interface.h"  // what kernels ask of it
#include "stack.h"      // switching stacks
#include "state.h"      // what there is while a block runs
#include "watch.h"      // counts and races, where that is asked for; watch_hopper.h for sm_90
#include "fiber.h"      // threads
#include "warp.h"       // shuffles, votes, whole-warp instructions
#include "block.h"      // barriers, order, deadlock
#include "copy.h"       // asynchronous copies
#include "hopper.h"     // clusters; barriers, bulk copies and products of sm_90
#include "job.h"        // what is to be run, and main()
