// Runtime: products of a warpgroup, whose operands are in shared memory. Needs box.h.
//
// Source: PTX ISA, "Asynchronous warpgroup level matrix instructions": register fragments, shared memory
// layouts, matrix descriptor, wgmma.fence, wgmma.commit_group, wgmma.wait_group.
#pragma once
#include <algorithm>
#include <deque>

#include "box.h"

namespace emulated {

namespace {

// Products and ends of groups that the threads of a warpgroup have issued, in order.
struct Record {
  bool ends_group;
  Product product;
  int arrived;        // threads
  float* sums[128];
  const unsigned* a_registers[128];
};

struct Warpgroup {
  int block;
  std::deque<Record> records;  // from number `performed` on
  size_t performed;
  std::vector<size_t> group_ends;  // number of the record after each group
};

std::vector<Warpgroup> warpgroups;

size_t warpgroups_of_a_block() { return (threads_of_a_block() + 127) / 128; }
int rank_in_block(const Fiber& fiber) { return fiber.linear - fiber.block * int(threads_of_a_block()); }
Warpgroup& warpgroup_of(const Fiber& fiber) {
  return warpgroups[size_t(fiber.block) * warpgroups_of_a_block() + size_t(rank_in_block(fiber) / 128)];
}

// A matrix in shared memory as a descriptor defines it: X along the rows of A or the columns of B.
struct Operand {
  unsigned start, leading, stride, swizzle_bytes;
  bool along_x;            // elements of one k are contiguous (M- or N-major), otherwise those of one x (K-major)
  unsigned element_bytes;  // 2 if along_x

  // Section "Shared Memory Matrix Layout", strides as "Strides" defines them, in a matrix normalised to 128
  // bits.
  unsigned address(unsigned x, unsigned k) const {
    const unsigned chunks = swizzle_bytes ? swizzle_bytes / 16 : 1;  // of 16 bytes, contiguous
    if (!along_x) {
      const unsigned next_chunk = swizzle_bytes ? 16 : leading, in_chunk = 16 / element_bytes;
      return start + x % 8 * 16 * chunks + x / 8 * stride + k / in_chunk * next_chunk + k % in_chunk * element_bytes;
    }
    const unsigned line = k % 8 * 16 * chunks + x / 8 % chunks * 16 + x % 8 * 2;
    const unsigned next_x = x / 8 / chunks, next_k = k / 8;
    return start + line + (swizzle_bytes ? next_x * leading + next_k * stride : next_x * stride + next_k * leading);
  }
};

Operand decoded(unsigned long long descriptor, bool along_x, unsigned element_bytes) {
  static const unsigned swizzles[] = {0, 128, 64, 32};
  const auto field = [&](int from) { return unsigned(descriptor >> from & 0x3fff) << 4; };
  Operand operand = {field(0), field(16), field(32), swizzles[descriptor >> 62], along_x, element_bytes};
  if (along_x && element_bytes != 2) fail("wgmma.mma_async: only 16-bit operands can be M- or N-major");
  if (descriptor & 0x3ff1c000c000c000u) fail("matrix descriptor %016llx: bits that must be zero are not", descriptor);
  const unsigned pattern = operand.swizzle_bytes * 8;
  if (descriptor >> 49 & 7 || (pattern && operand.start % pattern / 128))
    fail("matrix descriptor %016llx: its %u-byte swizzle begins at %u, which must be within 128 bytes of a multiple of "
         "%u (a base offset has no model)",
         descriptor, operand.swizzle_bytes, operand.start, pattern);
  return operand;
}

// Calls `visit` with the address of each 16-byte chunk, from (x, k) on, of X by K elements, where K is 32
// bytes.
template <class Visit>
void for_each_chunk(const Operand& operand, int extent, Visit visit) {
  const unsigned in_chunk = 16 / operand.element_bytes, of_k = operand.along_x ? 1 : in_chunk;
  const unsigned of_x = operand.along_x ? in_chunk : 1;
  for (unsigned x = 0; x < unsigned(extent); x += of_x)
    for (unsigned k = 0; k < 32 / operand.element_bytes; k += of_k)
      visit(x, k, swizzled(operand.address(x, k), operand.swizzle_bytes));
}

// Reads X by K elements; element (x, k) goes to values[x * x_step + k * k_step]. Elements of a chunk are
// contiguous, because no swizzle divides a chunk.
void read_operand(const Operand& operand, int block, float (*value)(const void*), int extent, float* values,
                  size_t x_step, size_t k_step) {
  const unsigned in_chunk = 16 / operand.element_bytes, of_x = operand.along_x ? in_chunk : 1;
  const unsigned of_k = operand.along_x ? 1 : in_chunk;
  for_each_chunk(operand, extent, [&](unsigned x, unsigned k, unsigned address) {
    const unsigned char* const chunk = bytes_at({block, address}, 16, "wgmma.mma_async");
    for (unsigned i = 0; i < in_chunk; ++i)
      values[(x + i % of_x) * x_step + (k + i % of_k) * k_step] = value(chunk + i * operand.element_bytes);
  });
}

// Reads A (64, K) from registers, K being 32 bytes. Of each half of K, thread t, lane l, has the elements in 4 bytes
// from l % 4 on, in rows 16 (t / 32) + l / 4 (even registers) and that plus 8 (odd ones). Section "Register Fragments",
// A of .m64nNk16 and of .m64nNk8.
void read_registers(const Record& record, float* values) {
  const int size = record.product.element_bytes, per_register = 4 / size, k = 32 / size;
  for (int t = 0; t < 128; ++t)
    for (int r = 0; r < 4; ++r)
      for (int i = 0; i < per_register; ++i) {
        const unsigned bits = record.a_registers[t][r] >> (8 * size * i);  // the lowest bytes are the element
        const int row = t / 32 * 16 + t % 32 / 4 + r % 2 * 8;
        values[row * k + t % 4 * per_register + r / 2 * (k / 2) + i] = record.product.value(&bits);
      }
}

// Reports the bytes that a product, record `number` of its warpgroup, reads to the watch, when all have
// issued it.
void tell(const Warpgroup& group, const Record& record, size_t number) {
  if (record.ends_group) return;
  const Product& product = record.product;
  const unsigned bytes = unsigned(product.element_bytes);
  const auto reads = [&](unsigned, unsigned, unsigned address) {
    watch::product_reads(&group, number, bytes_at({group.block, address}, 16, "wgmma.mma_async"));
  };
  if (!product.a_registers) for_each_chunk(decoded(product.a, product.a_along_m, bytes), 64, reads);
  for_each_chunk(decoded(product.b, product.b_along_n, bytes), product.n, reads);
  char name[60];
  snprintf(name, sizeof name, "wgmma.m64n%dk%u.%s", product.n, 32 / bytes, product.type);
  watch::product_is_issued(name);
}

// D (64, n) += A (64, steps) B (steps, n). Products of 8-bit integers are exact in f32.
template <class Sum>
__attribute__((optimize("O3"), no_sanitize("address", "alignment", "bounds"))) void multiply(Sum* __restrict d,
                                                                                            const float* __restrict a,
                                                                                            const float* __restrict b,
                                                                                            int n, int steps) {
  for (int m = 0; m < 64; ++m)
    for (int k = 0; k < steps; ++k)
      for (int j = 0; j < n; ++j) d[m * n + j] += Sum(a[m * steps + k] * b[k * n + j]);
}

// As `multiply`, for e4m3: 32 products and the sum so far are cut off, towards zero, 13 bits below the leading bit of the
// largest of them, and added; the result keeps 13 fraction bits. Every value that is added is then an integer below 2^14
// times a power of two. Sums that are zero or not finite are as in f32.
//
// Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.5.2 (tensor cores of Hopper); fraction bits of the
// result: Zhang et al., "SageAttention2", 2024.
__attribute__((optimize("O3"), no_sanitize("address", "alignment", "bounds"))) void multiply_truncated(
    float* __restrict d, const float* __restrict a, const float* __restrict b, int n, int steps) {
  const auto bits_of = [](float value) { unsigned bits; memcpy(&bits, &value, sizeof bits); return bits; };
  const auto float_of = [](unsigned bits) { float value; memcpy(&value, &bits, sizeof value); return value; };
  const unsigned FRACTION_BITS = 13, EXPONENT = 0x7f800000, BIAS = 127u << 23;
  float largest[256], sums[256], to_units[256];
  int units[256];
  for (int m = 0; m < 64; ++m, d += n, a += steps) {
    for (int j = 0; j < n; ++j) sums[j] = d[j], largest[j] = d[j] < 0 ? -d[j] : d[j];
    for (int k = 0; k < steps; ++k)
      for (int j = 0; j < n; ++j) {
        const float product = a[k] * b[k * n + j], magnitude = product < 0 ? -product : product;
        sums[j] += product, largest[j] = largest[j] < magnitude ? magnitude : largest[j];
      }
    for (int j = 0; j < n; ++j) {
      to_units[j] = float_of(2 * BIAS + (FRACTION_BITS << 23) - (bits_of(largest[j]) & EXPONENT));
      units[j] = int(d[j] * to_units[j]);
    }
    for (int k = 0; k < steps; ++k)
      for (int j = 0; j < n; ++j) units[j] += int(a[k] * b[k * n + j] * to_units[j]);
    for (int j = 0; j < n; ++j) {
      const bool in_range = largest[j] > 1e-30f && (bits_of(sums[j]) & EXPONENT) != EXPONENT;
      d[j] = in_range ? float_of(bits_of(float(units[j]) / to_units[j]) & ~0u << (23 - FRACTION_BITS)) : sums[j];
    }
  }
}

// Thread t of a warpgroup, lane l, has rows 16 (t / 32) + l / 4, and that plus 8, of columns 8 j + 2 (l % 4)
// and the next: sums[4 j … 4 j + 3]. Section "Register Fragments", D of .m64nNk16.
template <class Visit>
void for_each_sum(const Record& record, Visit visit) {
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < record.product.n / 2; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
      visit(record.sums[t][i], row * record.product.n + column);
    }
}

void perform(const Record& record, int block) {
  if (record.ends_group) return;
  const watch::Unseen unseen;  // `value` belongs to the kernel's source
  const Product& product = record.product;
  const int n = product.n, steps = 32 / product.element_bytes;
  const Operand of_b = decoded(product.b, product.b_along_n, unsigned(product.element_bytes));
  std::vector<float> a(64 * size_t(steps)), b(size_t(steps * n));
  if (product.a_registers) {
    read_registers(record, a.data());
  } else {
    const Operand of_a = decoded(product.a, product.a_along_m, unsigned(product.element_bytes));
    read_operand(of_a, block, product.value, 64, a.data(), size_t(steps), 1);
  }
  read_operand(of_b, block, product.value, n, b.data(), 1, size_t(n));
  const auto add = [&](auto zero) {
    using Sum = decltype(zero);  // the type that the registers hold
    std::vector<Sum> d(64 * size_t(n));
    if (product.accumulate) for_each_sum(record, [&](float& sum, int at) { memcpy(&d[size_t(at)], &sum, sizeof sum); });
    if (product.element_bytes == 1 && !product.integers)
      multiply_truncated(reinterpret_cast<float*>(d.data()), a.data(), b.data(), n, steps);
    else
      multiply(d.data(), a.data(), b.data(), n, steps);
    for_each_sum(record, [&](float& sum, int at) { memcpy(&sum, &d[size_t(at)], sizeof sum); });
  };
  if (product.integers) add(0u);
  else add(0.0f);
}

// Performs what all threads have issued: all of it at once, or only what someone waits for; wakes the waiting
// threads.
void catch_up(Warpgroup& group) {
  const size_t first = size_t(&group - warpgroups.data()) / warpgroups_of_a_block() * threads_of_a_block() +
                       size_t(&group - warpgroups.data()) % warpgroups_of_a_block() * 128;
  const size_t last = std::min(first + 128, size_t(group.block + 1) * threads_of_a_block());
  const auto waits = [&](const Fiber& fiber) {
    return fiber.state == State::waiting && fiber.progress.waits_for == Progress::products;
  };
  size_t wanted = 0;
  for (size_t i = first; i < last; ++i)
    if (waits(fibers[i])) wanted = std::max(wanted, fibers[i].progress.target);
  const bool eager = order == Order::forward || (order == Order::random && draw() % 2);
  while (!group.records.empty() && group.records.front().arrived == 128 && (eager || group.performed < wanted)) {
    perform(group.records.front(), group.block);
    group.records.pop_front();
    ++group.performed;
  }
  for (size_t i = first; i < last; ++i)
    if (waits(fibers[i]) && fibers[i].progress.target <= group.performed) fibers[i].state = State::ready;
}

bool same(const Record& one, const Record& other) {
  const Product &p = one.product, &q = other.product;
  return one.ends_group == other.ends_group && p.a == q.a && p.b == q.b && p.n == q.n && p.value == q.value &&
         p.a_along_m == q.a_along_m && p.b_along_n == q.b_along_n && p.accumulate == q.accumulate &&
         !p.a_registers == !q.a_registers;
}

// Fails if the registers are sums of a product in part.
void check_whole(const Sums& sums, const float* registers, size_t count) {
  const float* const end = sums.registers + sums.values.size();
  if (registers < end && sums.registers < registers + count && (registers != sums.registers || count != sums.values.size()))
    fail("wgmma: %zu registers at %p, of which some, not all, are the %zu sums of a product", count,
         static_cast<const void*>(registers), sums.values.size());
}

// The values of sums that a product writes. Their registers hold NaN until `settle`.
float* values_of(float* registers, size_t count, bool accumulate) {
  Progress& progress = current->progress;
  for (Sums& sums : progress.unsettled) {
    check_whole(sums, registers, count);
    if (sums.registers != registers) continue;
    sums.product = progress.issued + 1;
    return sums.values.data();
  }
  std::vector<float> values(count);
  if (accumulate) std::copy(registers, registers + count, values.data());
  memset(registers, 0xff, count * sizeof(float));
  progress.unsettled.push_back({registers, std::move(values), progress.issued + 1});
  return progress.unsettled.back().values.data();
}

// Adds what this thread issues to the records of its warpgroup.
void issue(const Record& mine, float* sums) {
  Warpgroup& group = warpgroup_of(*current);
  const size_t number = current->progress.issued++ - group.performed;
  if (number == group.records.size()) {
    group.records.push_back(mine);
    if (mine.ends_group) group.group_ends.push_back(current->progress.issued);
  }
  Record& record = group.records[number];
  if (!same(record, mine)) fail("wgmma: threads of the warpgroup issue different instructions, or with other operands");
  record.sums[rank_in_block(*current) % 128] = sums;
  record.a_registers[rank_in_block(*current) % 128] = mine.product.a_registers;
  if (++record.arrived < 128) return;
  tell(group, record, current->progress.issued);
  catch_up(group);
}

// Fails if a thread exits without waiting for what it has issued, or without settling it.
void check_products_were_waited_for() {
  if (current->progress.issued > warpgroup_of(*current).performed)
    fail("the thread exits with products (wgmma) that it has not waited for");
  if (!current->progress.unsettled.empty())
    fail("the thread exits with sums of products (wgmma) that it has not settled: without `settle` after the wait, the "
         "compiler may read them before it");
}

}  // namespace

void warpgroup_fence() { current->progress.fenced = true; }

// PTX requires a fence between other accesses to registers and a product. Emulation sees no registers, so it
// requires a fence after every wait, which is when registers may be accessed.
void warpgroup_multiply(const Product& product, float* sums) {
  if (!current->progress.fenced)
    fail("wgmma.mma_async: no wgmma.fence since the registers were last free for other use");
  if (product.n < 8 || product.n > 256 || product.n % 8) fail("wgmma.mma_async: n is %d", product.n);
  if (product.a_registers && product.element_bytes == 1) fail("wgmma.mma_async: no model of 8-bit A in registers");
  current->site = __builtin_return_address(0);
  issue({false, product, 0, {}, {}}, values_of(sums, size_t(product.n) / 2, product.accumulate));
}

// Sums that no product has written since are left as they are.
void settle(float* registers, int count) {
  auto& all = current->progress.unsettled;
  for (size_t i = 0; i < all.size(); ++i) {
    check_whole(all[i], registers, size_t(count));
    if (all[i].registers != registers) continue;
    if (all[i].product > current->progress.waited) fail("settle: the product (wgmma) has not been waited for");
    std::copy(all[i].values.begin(), all[i].values.end(), registers);
    all.erase(all.begin() + long(i));
    return;
  }
}

void warpgroup_multiply(Product product, int* sums) {
  product.integers = true;
  warpgroup_multiply(product, reinterpret_cast<float*>(sums));
}

void settle(int* registers, int count) { settle(reinterpret_cast<float*>(registers), count); }

void warpgroup_commit() {
  ++current->progress.groups;
  issue({true, {}, 0, {}, {}}, nullptr);
}

void warpgroup_wait(int groups_left) {
  Progress& progress = current->progress;
  progress.fenced = false;
  if (progress.groups <= size_t(groups_left)) return;
  Warpgroup& group = warpgroup_of(*current);
  progress.target = group.group_ends[progress.groups - size_t(groups_left) - 1];
  if (progress.target > group.performed) {
    wait_for(Progress::products);
    catch_up(group);
    if (current->state == State::waiting) leave(false);
  }
  progress.waited = std::max(progress.waited, progress.target);
  watch::has_waited_for_products(&group, progress.target);
}

}  // namespace emulated
