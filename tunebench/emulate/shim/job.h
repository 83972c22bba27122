// Runtime: jobs (tensors and launches) read from standard input, checked and run. Needs hopper.h.
//
// A job is lines of text (see `read_job`), an empty line, and the bytes of all inputs. The bytes of all
// outputs go to standard output. Exit status: 0, or 3 with one line on standard error that says what is
// wrong.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "hopper.h"

namespace emulated {

namespace {

enum class Role { input, output, scratch };

struct Buffer {
  std::string name;
  size_t bytes;
  Role role;
  unsigned char* data;
  std::vector<unsigned char> original;  // of an input
};

struct Launch {
  int entry;
  dim3 grid, block;
  size_t smem_bytes;
  int cluster;  // blocks along x
  std::vector<std::vector<unsigned char>> arguments;
};

struct Job {
  std::vector<Buffer> buffers;
  std::vector<Launch> launches;
};

// Patterns of the guards of an allocation, by the address of its data. They are NaN of f32, bf16 and f16,
// signalling in the first two, which arithmetic changes. They differ between allocations, so that copies of the
// guards of another tensor are found; high bytes differ in their sign alone.
std::map<const unsigned char*, unsigned>& guards() {
  static std::map<const unsigned char*, unsigned> patterns;
  return patterns;
}

unsigned char guard_byte(unsigned pattern, long at) { return static_cast<unsigned char>(pattern >> 8 * (at & 3)); }

// A separate allocation, `shift` bytes after a multiple of `alignment`. Without AddressSanitizer it has
// guards on both sides.
unsigned char* allocate(size_t bytes, size_t alignment, size_t shift) {
#ifdef TUNEBENCH_ASAN
  const size_t before = shift, after = 0;
#else
  const size_t before = std::max(GUARD, alignment) + shift, after = GUARD;
#endif
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, before + bytes + after)) fail("no memory for %zu bytes", bytes);
  memset(memory, 0xff, before + bytes + after);
  unsigned char* data = static_cast<unsigned char*>(memory) + before;
#ifdef TUNEBENCH_ASAN
  __asan_poison_memory_region(memory, before);
#else
  static unsigned allocations = 0;
  const unsigned count = allocations++, signs = (count & 1) << 15 | (count & 2) << 30;
  const unsigned pattern = guards()[data] = (0xff80ff80u + 0x00010001u * (1 + count % 63)) ^ signs;
  for (long i = 0; i < long(GUARD); ++i) {
    data[long(bytes) + i] = guard_byte(pattern, long(bytes) + i);
    data[-1 - i] = guard_byte(pattern, -1 - i);
  }
#endif
  return data;
}

// Fails if a write exceeded an allocation.
void check_guards(const unsigned char* data, size_t bytes, const char* name) {
#ifndef TUNEBENCH_ASAN
  const unsigned pattern = guards().at(data);
  for (size_t i = 1; i <= GUARD; ++i) {
    const size_t past = bytes + i - 1;
    if (data[past] != guard_byte(pattern, long(past)))
      fail("a write beyond the end of %s, to byte %zu of %zu", name, past, bytes);
    if (*(data - i) != guard_byte(pattern, -long(i))) fail("a write before the start of %s, by %zu bytes", name, i);
  }
#else
  (void)data, (void)bytes, (void)name;
#endif
}

std::vector<unsigned char> from_hex(const char* text) {
  std::vector<unsigned char> bytes;
  for (unsigned byte; sscanf(text, "%2x", &byte) == 1; text += 2) bytes.push_back(static_cast<unsigned char>(byte));
  return bytes;
}

}  // namespace

// A declaration guarantees the alignment of its type only: 16-byte accesses to a plain array fail here, too.
unsigned char* allocate_static_shared(Bytes bytes, Bytes alignment) {
  if (blocks.size() > 1) fail("a __shared__ variable: in a cluster, only dynamic shared memory has a model");
  unsigned char* memory = allocate(bytes, std::max<size_t>(alignment, 16), alignment < 16 ? 8 : 0);
  memset(memory, poison_byte, bytes);
  shared_memory().push_back({memory, bytes});
  return memory;
}

namespace {

template <class T>
std::vector<unsigned char> bytes_of(T value) {
  const auto begin = reinterpret_cast<unsigned char*>(&value);
  return {begin, begin + sizeof value};
}

// Reads `map TENSOR ELEMENT SWIZZLE RANK PIXELS`, then RANK extents and RANK - 1 strides in bytes, innermost
// first, and the RANK extents of the box, into the contents of a CUtensorMap. With PIXELS = 1 the box has two
// extents, and the RANK - 2 lower corners, upper corners and strides of pixels follow.
std::vector<unsigned char> read_tensor_map(const char* line, const char* name, unsigned char* data, size_t bytes) {
  TensorMap map = {};
  char* at = const_cast<char*>(line) + strlen("map");
  const auto number = [&] { return strtoull(at, &at, 10); };
  number();
  map.tag = TensorMap::TAG;
  map.data = data;
  map.element_bytes = unsigned(number()), map.swizzle_bytes = unsigned(number()), map.rank = unsigned(number());
  if (map.rank < 1 || map.rank > 5) fail("job: cannot read: %s", line);
  map.of_pixels = number() != 0;
  for (unsigned d = 0; d < map.rank; ++d) map.extents[d] = unsigned(number());
  for (unsigned d = 1; d < map.rank; ++d) map.strides[d] = number();
  for (unsigned d = 0; d < (map.of_pixels ? 2 : map.rank); ++d) map.box[d] = unsigned(number());
  if (map.of_pixels) {
    const auto along_image = [&](auto set) {
      for (unsigned d = 0; d < map.image_rank(); ++d) set(d, strtol(at, &at, 10));
    };
    along_image([&](unsigned d, long corner) { map.lower[d] = short(corner); });
    along_image([&](unsigned d, long corner) { map.upper[d] = short(corner); });
    along_image([&](unsigned d, long step) { map.steps[d] = static_cast<unsigned char>(step); });
  }
  size_t end = size_t(map.extents[0]) * map.element_bytes;
  for (unsigned d = 1; d < map.rank; ++d) end += (map.extents[d] - size_t(1)) * map.strides[d];
  if (end > bytes) fail("launch: the tensor map of %s reaches to byte %zu of %zu", name, end, bytes);
  std::vector<unsigned char> stored = bytes_of(map);
  stored.resize(128, 0);
  return stored;
}

void read_inputs(Job& job) {
  for (Buffer& buffer : job.buffers) {
    if (buffer.role != Role::input) continue;
    if (fread(buffer.data, 1, buffer.bytes, stdin) != buffer.bytes)
      fail("job: the bytes of %s are missing", buffer.name.c_str());
    buffer.original.assign(buffer.data, buffer.data + buffer.bytes);
  }
}

// Lines: `order forward|reverse|random SEED`, `tensor NAME BYTES input|output|scratch`, `launch ENTRY GRID
// BLOCK SMEM CLUSTER` (grid and block as x y z) and, for each of its arguments in order, `pointer TENSOR`,
// `value HEX` or `map TENSOR …` (see `read_tensor_map`).
Job read_job() {
  Job job;
  char line[512], name[256], word[32];
  while (fgets(line, sizeof line, stdin) && line[0] != '\n') {
    Launch launch = {};
    size_t number;
    dim3 &g = launch.grid, &b = launch.block;
    if (sscanf(line, "order %31s %zu", word, &number) == 2) {
      order = !strcmp(word, "random") ? Order::random : !strcmp(word, "reverse") ? Order::reverse : Order::forward;
      random_state = number;
    } else if (sscanf(line, "tensor %255s %zu %31s", name, &number, word) == 3) {
      const Role role = !strcmp(word, "input") ? Role::input : !strcmp(word, "output") ? Role::output : Role::scratch;
      job.buffers.push_back({name, number, role, allocate(number, 256, 0), {}});
    } else if (sscanf(line, "launch %d %u %u %u %u %u %u %zu %d", &launch.entry, &g.x, &g.y, &g.z, &b.x, &b.y, &b.z,
                      &launch.smem_bytes, &launch.cluster) == 9) {
      job.launches.push_back(launch);
    } else if (sscanf(line, "pointer %zu", &number) == 1) {
      job.launches.back().arguments.push_back(bytes_of(job.buffers.at(number).data));
    } else if (sscanf(line, "map %zu", &number) == 1) {
      const Buffer& buffer = job.buffers.at(number);
      job.launches.back().arguments.push_back(read_tensor_map(line, buffer.name.c_str(), buffer.data, buffer.bytes));
    } else if (sscanf(line, "value %31s", word) == 1) {
      job.launches.back().arguments.push_back(from_hex(word));
    } else {
      fail("job: cannot read: %s", line);
    }
  }
  read_inputs(job);
  for (const Buffer& buffer : job.buffers) watch::add_tensor(buffer.name, buffer.data, buffer.bytes);
  return job;
}

// Launches that the driver would reject. Source: CUDA C++ Programming Guide, "Compute Capabilities".
void check_launch(const Launch& launch, const Entry& entry) {
  const dim3 &g = launch.grid, &b = launch.block;
  const size_t threads = size_t(b.x) * b.y * b.z;
  if (threads < 1 || threads > 1024 || b.z > 64)
    fail("launch: a block of (%u,%u,%u) threads cannot be", b.x, b.y, b.z);
  if (g.x < 1 || g.y < 1 || g.z < 1 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535)
    fail("launch: a grid of (%u,%u,%u) blocks cannot be", g.x, g.y, g.z);
  if (launch.cluster < 1 || launch.cluster > 8 || g.x % unsigned(launch.cluster) ||
      (launch.cluster > 1 && threads % 32))
    fail("launch: clusters of %d blocks of %zu threads cannot be in a grid of %u", launch.cluster, threads, g.x);
  if (launch.cluster > 1 && !cluster_memory && shared_memory().size() > 1)
    fail("launch: in a cluster, only dynamic shared memory has a model");
  if (int(launch.arguments.size()) != entry.arity)
    fail("launch: the kernel takes %d arguments, %d are given", entry.arity, int(launch.arguments.size()));
  for (int i = 0; i < entry.arity; ++i)
    if (int(launch.arguments[size_t(i)].size()) != entry.sizes[i])
      fail("launch: argument %d of the kernel has %d bytes, %d are given", i, entry.sizes[i],
           int(launch.arguments[size_t(i)].size()));
}

// Aligned as parameters may require; as large as all parameters together may be.
struct alignas(64) Parameter {
  unsigned char bytes[4096];
};

// Allocates dynamic shared memory for each block of a cluster; the pieces of declarations follow the first.
void lay_out_shared(size_t smem_bytes) {
  auto& all = shared_memory();
  if (cluster_memory) all.resize(1);
  cluster_memory = blocks.size() > 1;
  all.resize(std::max(all.size(), blocks.size()));
  for (size_t rank = 0; rank < blocks.size(); ++rank) all[rank] = {allocate(smem_bytes, 1024, 0), smem_bytes};
}

void number_blocks(unsigned cluster) {
  unsigned i = cluster * unsigned(blocks.size());
  for (Block& block : blocks) {
    block.index = {i % gridDim.x, i / gridDim.x % gridDim.y, i / gridDim.x / gridDim.y};
    ++i;
  }
  blockIdx = blocks.front().index;
}

void check_shared_guards() {
  for (size_t i = 0; i < shared_memory().size(); ++i)
    check_guards(shared_memory()[i].data, shared_memory()[i].bytes,
                 i < blocks.size() ? "dynamic shared memory" : "shared memory");
}

void run(Launch& launch) {
  const Entry& entry = entries[launch.entry];
  check_launch(launch, entry);
  std::vector<Parameter> parameters(launch.arguments.size());
  std::vector<void*> arguments;
  for (size_t i = 0; i < parameters.size(); ++i) {
    memcpy(parameters[i].bytes, launch.arguments[i].data(), launch.arguments[i].size());
    arguments.push_back(parameters[i].bytes);
  }
  kernel_entry = &entry;
  kernel_arguments = arguments.data();
  gridDim = launch.grid;
  blockDim = launch.block;
  const int threads = int(blockDim.x * blockDim.y * blockDim.z);
  blocks = std::vector<Block>(size_t(launch.cluster));
  lay_out_shared(launch.smem_bytes);
  make_fibers(threads * launch.cluster);
  watch::launch_begins();
  warps = std::vector<Warp>(size_t((threads * launch.cluster + 31) / 32));
  std::vector<int> clusters;
  arrange(clusters, int(gridDim.x * gridDim.y * gridDim.z) / launch.cluster);
  for (const int cluster : clusters) {
    number_blocks(unsigned(cluster));
    run_cluster();
    check_shared_guards();
  }
  watch::launch_ends();
  drop_fibers();
}

void check_buffers(const Job& job) {
  for (const Buffer& buffer : job.buffers) {
    check_guards(buffer.data, buffer.bytes, buffer.name.c_str());
    if (buffer.role == Role::input && memcmp(buffer.data, buffer.original.data(), buffer.bytes))
      fail("the kernel has changed its input %s", buffer.name.c_str());
  }
}

}  // namespace
}  // namespace emulated

int main() {
  using namespace emulated;
  // A kernel's own prints must not mix with the results.
  FILE* results = fdopen(dup(1), "wb");
  dup2(2, 1);
  Job job = read_job();
  for (Launch& launch : job.launches) run(launch);
  check_buffers(job);
  for (const Buffer& buffer : job.buffers)
    if (buffer.role == Role::output && fwrite(buffer.data, 1, buffer.bytes, results) != buffer.bytes)
      fail("the results could not be written");
  watch::write_report(results);
  return fclose(results) ? 3 : 0;
}
