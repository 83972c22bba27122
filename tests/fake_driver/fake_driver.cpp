// A CUDA driver without a GPU: memory is the host's, kernels are host functions, time is counted, not measured.
//
// Built as libcuda.so.1 and found before the system's driver, it lets unmodified callers of the driver run. It
// keeps the driver's rules as far as that code depends on them: calls of an unready kind fail, a fault stays
// until the process ends, captured launches run only when their graph does.
//
// A module's code is PTX or the word "fake", which load the kernels below; or "echo" and one line per kernel with its name
// and the sizes of its parameters, ended by a zero byte. Those kernels write zeros, and print the parameters of each
// launch on stderr, as JSON.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidHandle = 400, kNotFound = 500, kNotReady = 600, kIllegalAddress = 700 };

struct Parameter {
  size_t offset, size;
};

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  double microseconds;
  int static_smem;
  // Parameters; grid, block, shared memory, blocks of a cluster.
  std::function<void(void**, const unsigned*)> body;
  int most_dynamic_smem;
  bool unloaded = false;
};

struct Library {
  std::deque<Kernel> kernels;  // those that were asked for
};

struct Event {
  double at = -1;
};

struct Graph {
  std::vector<std::function<void()>> work;
};

struct Stream {
  Graph* capture = nullptr;
};

double clock_us = 0;  // of the device
size_t dirty_bytes = 0;  // overwritten by fills since memory was read
int fault = kSuccess;  // remains until the process ends
size_t allocated = 0;
struct Allocation {
  size_t nbytes;
  int serial;  // how many there were before it
};
std::map<void*, Allocation> allocations;
int allocated_ever = 0;
std::set<uintptr_t> unwritten;  // allocations without any copy to them
const size_t kMemory = size_t(1) << 30;

template <class T>
T as(void* parameter) {
  T value;
  std::memcpy(&value, parameter, sizeof value);
  return value;
}

// y = factor * x with an injected fault: nothing, a wrong last element, a write past the end, an illegal
// address, an element left out, a replay of the first result, nothing but the first call, less time if few
// elements differ from those of the last call.
enum Mood { kRight, kWrong, kPastTheEnd, kIllegal, kUnwritten, kOverwritesInput, kReplays, kOnce, kSaves };

template <Mood mood>
void scale(void** p, const unsigned*) {
  auto x = as<float*>(p[0]), y = as<float*>(p[1]);
  const float factor = as<float>(p[2]);
  const int n = as<int>(p[3]);
  if (mood == kIllegal) fault = kIllegalAddress;
  if (fault) return;
  static std::map<int, std::vector<float>> stored;
  if (mood == kOnce && stored.count(n)) return;
  if (mood == kReplays && stored.count(n)) {
    std::copy(stored[n].begin(), stored[n].end(), y);
    return;
  }
  if (mood == kSaves && stored.count(n)) {
    int changed = 0;
    for (int i = 0; i < n; i++) changed += stored[n][i] != x[i];
    if (changed < n / 4) clock_us -= 40;
  }
  if (mood == kSaves) stored[n].assign(x, x + n);
  for (int i = 0; i < n; i++) y[i] = x[i] * factor;
  if (mood == kReplays || mood == kOnce) stored[n].assign(y, y + n);
  if (mood == kWrong) y[n - 1] += 1;
  if (mood == kPastTheEnd) y[n] = 1;
  if (mood == kUnwritten) std::memset(&y[n / 2], 0xff, 4);
  if (mood == kOverwritesInput) x[0] += y[0] *= 2;
}

// The same with the array in Numba's form: meminfo, parent, items, item size, data, shape, strides.
void scale_numba(void** p, const unsigned*) {
  auto x = as<float*>(p[4]), y = as<float*>(p[11]);
  const int64_t n = as<int64_t>(p[2]);
  if (as<int64_t>(p[3]) != 4 || as<int64_t>(p[5]) != n || as<int64_t>(p[6]) != 4) return;
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * as<float>(p[14]);
}

// The same as Triton compiles it: a number of threads and shared memory that the binary states, two null pointers.
void scale_triton(void** p, const unsigned* launch) {
  if (as<void*>(p[4]) || as<void*>(p[5]) || launch[3] != 96 || launch[6] != 512 || launch[7] != 2) return;
  scale<kRight>(p, launch);
}

// Replacement of CUtensorMap, which is opaque and aligned to 64 bytes.
struct TensorMap {
  uint64_t tag, extents[5], strides[5];
  float* data;
  uint16_t box[5];  // of pixels: channels, pixels
  uint8_t type, rank, swizzle, promotion, fill;
  int8_t lower[3], upper[3];
  uint8_t steps[3];  // 0 if it is not of pixels
};
static_assert(sizeof(TensorMap) <= 128, "it stands for a CUtensorMap");
const uint64_t kTag = 0x74656e736f726d61;

// The same through a tensor map of two dimensions; a launch of another shape than asked for does nothing.
void scale_mapped(void** p, const unsigned* shape) {
  const auto map = as<TensorMap>(p[0]);
  const bool as_asked = map.tag == kTag && map.type == 7 && map.rank == 2 && map.swizzle == 1 && map.box[0] == 8 &&
                        map.box[1] == 5 && map.promotion == 2 && !map.fill && shape[0] == 264 && shape[7] == 2;
  if (!as_asked) return;
  auto y = as<float*>(p[1]);
  const float factor = as<float>(p[2]);
  const uint64_t n = uint64_t(as<int>(p[3]));
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t line = i / map.extents[0];
    if (line < map.extents[1]) y[i] = map.data[line * map.strides[1] / 4 + i % map.extents[0]] * factor;
  }
}

// The same of a map of pixels, those of one image whose order is that of memory.
void scale_pixels(void** p, const unsigned*) {
  const auto map = as<TensorMap>(p[0]);
  const int wanted[] = {-1, -2, 1, -3, 2, 3, 8, 300, 25, 5, 1};
  const int given[] = {map.lower[0],   map.lower[1],          map.upper[0],          map.upper[1],
                       map.steps[0],   map.steps[1],          map.box[0],            map.box[1],
                       int(map.extents[1]), int(map.extents[2]), int(map.extents[3])};
  const bool strides = map.strides[1] == 32 && map.strides[2] == 800 && map.strides[3] == 4000;
  if (map.tag != kTag || map.type != 7 || map.rank != 4 || map.swizzle != 1 || map.promotion != 2 || map.fill) return;
  if (!strides || !std::equal(std::begin(wanted), std::end(wanted), given)) return;
  auto y = as<float*>(p[1]);
  for (int i = 0; i < as<int>(p[3]); i++) y[i] = map.data[i] * as<float>(p[2]);
}

// Reads memory: evicts dirty lines from the cache, and takes as long as overwriting it.
void read_memory(void** p, const unsigned* shape) {
  if (shape[0] != 8 * 132 || as<uint64_t>(p[1]) != 2 * 62914560) return;  // eight blocks per SM, twice the cache
  dirty_bytes = 0;
  clock_us += double(as<uint64_t>(p[1])) / 1e6;
}

std::vector<Parameter> sizes(std::initializer_list<size_t> list) {
  std::vector<Parameter> found;
  size_t offset = 0;
  for (size_t size : list) {
    offset = (offset + size - 1) / size * size;
    found.push_back({offset, size});
    offset += size;
  }
  return found;
}

std::deque<Kernel>& kernels() {
  static const auto plain = sizes({8, 8, 4, 4});
  static const auto numba = sizes({8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4});
  static const auto triton = sizes({8, 8, 4, 4, 8, 8});
  static const auto mapped = sizes({128, 8, 4, 4});
  static const auto range = sizes({8, 8});
  static std::deque<Kernel> table = {
      {"right", plain, 50, 0, scale<kRight>, 0},
      {"short", plain, 4, 0, scale<kRight>, 0},
      {"large", plain, 50, 1024, scale<kRight>, 0},
      {"wrong", plain, 50, 0, scale<kWrong>, 0},
      {"past_the_end", plain, 50, 0, scale<kPastTheEnd>, 0},
      {"illegal", plain, 50, 0, scale<kIllegal>, 0},
      {"unwritten", plain, 50, 0, scale<kUnwritten>, 0},
      {"overwrites_input", plain, 50, 0, scale<kOverwritesInput>, 0},
      {"replays", plain, 50, 0, scale<kReplays>, 0},
      {"once", plain, 50, 0, scale<kOnce>, 0},
      {"saves", plain, 50, 0, scale<kSaves>, 0},
      {"numba", numba, 50, 0, scale_numba, 0},
      {"triton", triton, 50, 0, scale_triton, 0},
      {"mapped", mapped, 50, 0, scale_mapped, 0},
      {"mapped_short", mapped, 4, 0, scale_mapped, 0},
      {"pixels", mapped, 50, 0, scale_pixels, 0},
      {"read_memory", range, 0, 0, read_memory, 0},
  };
  return table;
}

template <class T>
std::string list(const T* values, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; i++) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::string hexadecimal(const void* data, size_t nbytes) {
  std::string text = "\"";
  char byte[3];
  for (size_t i = 0; i < nbytes; i++) {
    std::snprintf(byte, sizeof byte, "%02x", static_cast<const unsigned char*>(data)[i]);
    text += byte;
  }
  return text + "\"";
}

// Which allocation it is, how large, and what it holds if that is little.
std::string describe_memory(void* memory) {
  const auto [nbytes, serial] = allocations[memory];
  return "{\"memory\": " + std::to_string(serial) + ", \"bytes\": " + std::to_string(nbytes) +
         ", \"holds\": " + hexadecimal(memory, nbytes > 64 ? 0 : nbytes) + "}";
}

std::string describe_pixels(const TensorMap& map) {
  if (!map.steps[0]) return "";
  const size_t count = map.rank - 2u;
  return ", \"lower\": " + list(map.lower, count) + ", \"upper\": " + list(map.upper, count) +
         ", \"steps\": " + list(map.steps, count);
}

std::string describe_map(const TensorMap& map) {
  const unsigned facts[] = {map.type, map.swizzle, map.promotion, map.fill};
  return "{\"map\": " + describe_memory(map.data) + ", \"facts\": " + list(facts, 4) +
         ", \"extents\": " + list(map.extents, map.rank) +
         ", \"strides\": " + list(map.strides + 1, map.rank - 1u) +
         ", \"box\": " + list(map.box, map.steps[0] ? 2u : map.rank) + describe_pixels(map) + "}";
}

std::string describe_parameter(const void* parameter, size_t size) {
  uint64_t word = 0;
  std::memcpy(&word, parameter, size < 8 ? size : 8);
  if (size == 8 && allocations.count(reinterpret_cast<void*>(word))) return describe_memory(reinterpret_cast<void*>(word));
  if (size == 128 && word == kTag) return describe_map(as<TensorMap>(const_cast<void*>(parameter)));
  return "{\"bits\": " + hexadecimal(parameter, size) + "}";
}

// Print the launch of a kernel. Memory among its parameters that nothing was copied to becomes zeros.
void print_launch(const std::string& name, const std::vector<Parameter>& parameters, void** p, const unsigned* shape) {
  std::string texts;
  for (size_t i = 0; i < parameters.size(); i++) {
    texts += (i ? ", " : "") + describe_parameter(p[i], parameters[i].size);
    const auto address = parameters[i].size == 8 ? as<uintptr_t>(p[i]) : 0;
    if (unwritten.count(address)) {
      void* const memory = reinterpret_cast<void*>(address);
      std::memset(memory, 0, allocations[memory].nbytes);
    }
  }
  std::fprintf(stderr, "{\"kernel\": \"%s\", \"shape\": %s, \"parameters\": [%s]}\n", name.c_str(),
               list(shape, 8).c_str(), texts.c_str());
}

// Adds the kernels that the code lists.
void read_code(const char* code) {
  std::istringstream lines(code);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    if (!(words >> name) || name == "echo") continue;
    std::vector<Parameter> parameters;
    for (size_t size; words >> size;) parameters.push_back({0, size});
    const auto body = [=](void** p, const unsigned* shape) { print_launch(name, parameters, p, shape); };
    kernels().push_back({name, parameters, 50, 0, body, 0});
  }
}

Stream default_stream;
Stream& stream_of(void* handle) {
  return reinterpret_cast<uintptr_t>(handle) <= 2 ? default_stream : *static_cast<Stream*>(handle);
}

int enqueue(void* stream, std::function<void()> work) {
  if (fault) return fault;
  Stream& on = stream_of(stream);
  if (on.capture)
    on.capture->work.push_back(std::move(work));
  else
    work();
  return kSuccess;  // kernel faults appear later, as with the real driver
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t, int* status) {
  const std::string name = symbol;
  *function = nullptr;
  for (const char* suffix : {"", "_v2", "_v3"})
    if (!*function) *function = dlsym(RTLD_DEFAULT, (name + suffix).c_str());
  if (status) *status = *function ? 0 : 1;
  return *function ? kSuccess : kNotFound;
}

// -- device and context --------------------------------------------------------------------------------------

API cuInit(unsigned) { return kSuccess; }
API cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
API cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
API cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal == 0 ? kSuccess : 101; }
API cuDeviceGetName(char* name, int size, int) { return std::snprintf(name, size, "NVIDIA H200"), kSuccess; }
API cuDeviceGetPCIBusId(char* id, int size, int) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return std::snprintf(id, size, "0000:0%d:00.0", 1 + (visible ? std::atoi(visible) : 0)), kSuccess;
}
API cuDeviceGetAttribute(int* value, int attribute, int) {
  static const std::map<int, int> attributes = {
      {10, 32},      {13, 1980000}, {16, 132},     {36, 3201000}, {37, 6144},  {38, 1 << 20}, {39, 2048},
      {75, 9},       {76, 0},       {81, 233472},  {82, 65536},   {97, 232448}, {106, 32},    {115, 1},
  };
  const auto found = attributes.find(attribute);
  return *value = found == attributes.end() ? 0 : found->second, kSuccess;
}
API cuDevicePrimaryCtxRetain(void** context, int) { return *context = &default_stream, kSuccess; }
API cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
API cuCtxGetCurrent(void** context) { return *context = &default_stream, kSuccess; }
API cuCtxSetCurrent(void*) { return kSuccess; }
API cuCtxPushCurrent_v2(void*) { return kSuccess; }
API cuCtxPopCurrent_v2(void** context) { return *context = &default_stream, kSuccess; }
API cuCtxGetDevice(int* device) { return *device = 0, kSuccess; }
API cuCtxGetDevice_v2(int* device, void*) { return *device = 0, kSuccess; }
API cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, kSuccess; }
API cuCtxSynchronize() { return fault; }
API cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"}, {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"}, {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},         {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
  };
  const auto found = names.find(error);
  return *name = found == names.end() ? "CUDA_ERROR_UNKNOWN" : found->second, kSuccess;
}
API cuGetErrorString(int, const char** text) { return *text = "in the words of the driver", kSuccess; }

// NVRTC queries it and accepts a negative answer, but not a missing function.
API cuGetExportTable(const void** table, const void*) { return *table = nullptr, kNotFound; }

// -- memory --------------------------------------------------------------------------------------------------

API cuMemAlloc_v2(uintptr_t* address, size_t nbytes) {
  if (fault) return fault;
  if (nbytes == 0) return kInvalidValue;
  if (allocated + nbytes > kMemory) return kOutOfMemory;
  void* memory = std::aligned_alloc(256, (nbytes + 4096 + 255) / 256 * 256);
  allocated += nbytes;
  allocations[memory] = {nbytes, allocated_ever++};
  *address = reinterpret_cast<uintptr_t>(memory);
  return unwritten.insert(*address), kSuccess;
}
API cuMemFree_v2(uintptr_t address) {
  void* memory = reinterpret_cast<void*>(address);
  if (!allocations.count(memory)) return kInvalidValue;
  allocated -= allocations[memory].nbytes;
  allocations.erase(memory), unwritten.erase(address);
  return std::free(memory), kSuccess;
}
API cuMemsetD8Async(uintptr_t address, unsigned char byte, size_t count, void* stream) {
  return enqueue(stream, [=] {
    std::memset(reinterpret_cast<void*>(address), byte, count);
    clock_us += double(count) / 1e6;
    dirty_bytes += count;
  });
}
API cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t count, void* stream) {
  return enqueue(stream, [=] {
    std::memcpy(reinterpret_cast<void*>(to), from, count);
    unwritten.erase(to);
  });
}
API cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t count, void* stream) {
  return enqueue(stream, [=] { std::memcpy(to, reinterpret_cast<void*>(from), count); });
}

// -- streams and events --------------------------------------------------------------------------------------

API cuStreamCreateWithPriority(void** stream, unsigned, int) { return *stream = new Stream, kSuccess; }
API cuStreamDestroy_v2(void* stream) { return delete static_cast<Stream*>(stream), kSuccess; }
API cuStreamGetCtx(void*, void** context) { return *context = &default_stream, kSuccess; }
API cuStreamGetFlags(void*, unsigned* flags) { return *flags = 1, kSuccess; }
API cuStreamSynchronize(void*) { return fault; }
API cuStreamIsCapturing(void* stream, int* status) {
  return *status = stream_of(stream).capture ? 1 : 0, kSuccess;
}
API cuEventCreate(void** event, unsigned) { return *event = new Event, kSuccess; }
API cuEventDestroy_v2(void* event) { return delete static_cast<Event*>(event), kSuccess; }
API cuEventRecord(void* event, void* stream) {
  return enqueue(stream, [=] { static_cast<Event*>(event)->at = clock_us; });
}
API cuEventSynchronize(void*) { return fault; }
API cuEventQuery(void*) { return fault; }
API cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
  const double begin = static_cast<Event*>(from)->at, end = static_cast<Event*>(to)->at;
  if (begin < 0 || end < 0) return kNotReady;
  return *milliseconds = float((end - begin) / 1e3), fault;
}

// -- kernels -------------------------------------------------------------------------------------------------

API cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
  if (fault) return fault;
  const bool echoes = std::memcmp(code, "echo", 4) == 0, known = std::memcmp(code, "fake", 4) == 0;
  if (!echoes && !known && std::memcmp(code, ".version", 8) != 0) return 200;  // CUDA_ERROR_INVALID_IMAGE
  if (echoes) read_code(static_cast<const char*>(code));
  return *library = new Library, kSuccess;
}
API cuLibraryUnload(void* library) {  // what is left of it only tells that it is gone
  for (Kernel& kernel : static_cast<Library*>(library)->kernels) kernel.unloaded = true;
  return kSuccess;
}
API cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  auto& mine = static_cast<Library*>(library)->kernels;
  for (const Kernel& one : kernels())
    if (one.name == name) return mine.push_back(one), *kernel = &mine.back(), kSuccess;
  return kNotFound;
}
API cuKernelGetLibrary(void** library, void*) { return *library = &default_stream, kSuccess; }
API cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* size) {
  const auto& parameters = static_cast<Kernel*>(kernel)->parameters;
  if (index >= parameters.size()) return kInvalidValue;
  return *offset = parameters[index].offset, *size = parameters[index].size, kSuccess;
}
API cuKernelGetAttribute(int* value, int attribute, void* kernel, int) {
  return *value = attribute == 1 ? static_cast<Kernel*>(kernel)->static_smem : 0, kSuccess;
}
API cuKernelSetAttribute(int attribute, int value, void* kernel, int) {
  if (attribute != 8) return kInvalidValue;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  return static_cast<Kernel*>(kernel)->most_dynamic_smem = value, kSuccess;
}

// CUlaunchAttribute: which it is, and a union.
struct Attribute {
  int id, padding;
  unsigned value[16];
};

struct LaunchConfig {
  unsigned grid[3], block[3], smem_bytes;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};

API cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void**) {
  Kernel& kernel = *static_cast<Kernel*>(function);
  if (kernel.unloaded) return kInvalidHandle;
  const unsigned allowed = kernel.most_dynamic_smem ? kernel.most_dynamic_smem : 48 * 1024 - kernel.static_smem;
  if (config->smem_bytes > allowed) return kInvalidValue;
  if (kernel.static_smem && !config->smem_bytes) return kInvalidValue;  // needs both kinds of shared memory
  if (config->block[0] * config->block[1] * config->block[2] > 1024) return kInvalidValue;
  std::vector<unsigned> shape(config->grid, config->grid + 3);
  shape.insert(shape.end(), config->block, config->block + 3);
  shape.insert(shape.end(), {config->smem_bytes, 1});
  for (unsigned i = 0; i < config->attribute_count; i++)
    if (config->attributes[i].id == 4) shape[7] = config->attributes[i].value[0];  // CLUSTER_DIMENSION
  if (shape[0] % shape[7]) return kInvalidValue;
  // The driver copies the parameters at the call.
  auto copies = std::make_shared<std::vector<std::vector<char>>>();
  for (size_t i = 0; i < kernel.parameters.size(); i++) {
    const char* from = static_cast<char*>(parameters[i]);
    copies->emplace_back(from, from + kernel.parameters[i].size);
  }
  return enqueue(config->stream, [&kernel, copies, shape] {
    std::vector<void*> pointers;
    for (auto& copy : *copies) pointers.push_back(copy.data());
    // A launch after a large fill waits until the cache has written it back.
    if (dirty_bytes > 62914560) clock_us += double(dirty_bytes) / 8e6;
    kernel.body(pointers.data(), shape.data());
    clock_us += kernel.microseconds;
  });
}

// Enqueues work of a library, which the caller has done: it only takes time.
API fakeWork(void* stream, double microseconds) {
  return enqueue(stream, [=] { clock_us += microseconds; });
}

// What both kinds of maps have; `line` is the bytes that are next to each other.
bool fill_map(TensorMap& map, void* target, int type, unsigned rank, void* address, const uint64_t* extents,
              const uint64_t* strides, unsigned line, int interleave, int swizzle, int promotion, int fill) {
  if (reinterpret_cast<uintptr_t>(address) % 16 || reinterpret_cast<uintptr_t>(target) % 64 || interleave) return false;
  if (swizzle < 0 || swizzle > 3) return false;
  map.tag = kTag, map.type = uint8_t(type), map.rank = uint8_t(rank), map.swizzle = uint8_t(swizzle);
  map.promotion = uint8_t(promotion), map.fill = uint8_t(fill);
  map.data = static_cast<float*>(address);
  for (unsigned d = 0; d < rank; d++) {
    if (extents[d] == 0) return false;
    map.extents[d] = extents[d];
    if (d > 0) map.strides[d] = strides[d - 1];
    if (d > 0 && (strides[d - 1] % 16 || strides[d - 1] >> 40)) return false;
  }
  return line % 16 == 0 && (!swizzle || line <= 16u << swizzle);  // CU_TENSOR_MAP_SWIZZLE_32B is 1
}

int give_map(const TensorMap& map, void* target) {
  std::memset(target, 0, 128);
  return std::memcpy(target, &map, sizeof map), kSuccess;
}

const unsigned kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};  // by CUtensorMapDataType

API cuTensorMapEncodeTiled(void* target, int type, unsigned rank, void* address, const uint64_t* extents,
                           const uint64_t* strides, const unsigned* box, const unsigned* element_strides, int interleave,
                           int swizzle, int promotion, int fill) {
  if (rank < 1 || rank > 5 || type < 0 || type > 9) return kInvalidValue;
  TensorMap map = {};
  for (unsigned d = 0; d < rank; d++) {
    if (box[d] == 0 || box[d] > 256 || element_strides[d] != 1) return kInvalidValue;
    map.box[d] = uint16_t(box[d]);
  }
  const unsigned line = box[0] * kElementBytes[type];
  const bool good = fill_map(map, target, type, rank, address, extents, strides, line, interleave, swizzle, promotion, fill);
  return good ? give_map(map, target) : kInvalidValue;
}

API cuTensorMapEncodeIm2col(void* target, int type, unsigned rank, void* address, const uint64_t* extents,
                            const uint64_t* strides, const int* lower, const int* upper, unsigned channels,
                            unsigned pixels, const unsigned* element_strides, int interleave, int swizzle, int promotion,
                            int fill) {
  if (rank < 3 || rank > 5 || type < 0 || type > 9) return kInvalidValue;
  if (channels < 1 || channels > 256 || pixels < 1 || pixels > 1024 || element_strides[rank - 1] != 1)
    return kInvalidValue;
  TensorMap map = {};
  map.box[0] = uint16_t(channels), map.box[1] = uint16_t(pixels);
  for (unsigned d = 0; d < rank - 2; d++) {
    const int64_t extent = int64_t(extents[d + 1]) + upper[d] - lower[d], most = rank == 4 ? 128 : 16;
    const bool far = rank > 3 && (std::min(lower[d], upper[d]) < -most || std::max(lower[d], upper[d]) >= most);
    const unsigned step = element_strides[d + 1];
    if (extent <= 0 || far || step < 1 || step > 8) return kInvalidValue;
    map.lower[d] = int8_t(lower[d]), map.upper[d] = int8_t(upper[d]), map.steps[d] = uint8_t(step);
  }
  const unsigned line = channels * kElementBytes[type];
  const bool good = fill_map(map, target, type, rank, address, extents, strides, line, interleave, swizzle, promotion, fill);
  return good ? give_map(map, target) : kInvalidValue;
}

// -- graphs --------------------------------------------------------------------------------------------------

API cuStreamBeginCapture_v2(void* stream, int) {
  return stream_of(stream).capture = new Graph, kSuccess;
}
API cuStreamEndCapture(void* stream, void** graph) {
  *graph = stream_of(stream).capture;
  stream_of(stream).capture = nullptr;
  return kSuccess;
}
API cuStreamGetCaptureInfo_v3(void* stream, int* status, uint64_t*, void** graph, void*, void*, size_t*) {
  *status = stream_of(stream).capture ? 1 : 0;
  if (graph) *graph = stream_of(stream).capture;
  return kSuccess;
}
API cuGraphInstantiateWithParams(void** executable, void* graph, void* parameters) {
  *executable = new Graph(*static_cast<Graph*>(graph));
  // CUDA_GRAPH_INSTANTIATE_PARAMS: flags, upload stream, error node, result.
  std::memset(static_cast<char*>(parameters) + 24, 0, 4);
  return kSuccess;
}
API cuGraphUpload(void*, void*) { return kSuccess; }
API cuGraphLaunch(void* executable, void*) {
  if (fault) return fault;
  for (auto& work : static_cast<Graph*>(executable)->work) work();
  return kSuccess;
}
API cuGraphDestroy(void* graph) { return delete static_cast<Graph*>(graph), kSuccess; }
API cuGraphExecDestroy(void* graph) { return delete static_cast<Graph*>(graph), kSuccess; }
API cuUserObjectCreate(void** object, void*, void (*)(void*), unsigned, unsigned) {
  return *object = &default_stream, kSuccess;
}
API cuUserObjectRelease(void*, unsigned) { return kSuccess; }
API cuGraphRetainUserObject(void*, void*, unsigned, unsigned) { return kSuccess; }
API cuGraphReleaseUserObject(void*, void*, unsigned) { return kSuccess; }
