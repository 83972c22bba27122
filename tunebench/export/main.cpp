// Runs the kernels in this folder, through the CUDA driver alone.
//
//   g++ -std=c++17 -O2 -I"$CUDA_HOME/include" -o run main.cpp -lcuda
//   ./run [kernel.cubin]
//
// If this folder contains kernel.cu, compile it first (for the architecture that manifest.json names):
//
//   nvcc -std=c++17 -arch=sm_90 -cubin -o kernel.cubin kernel.cu
//
// The program fills inputs with random numbers. Inputs that do not accept arbitrary values, such as offsets, get the
// example values in launch.h. It runs the kernels once, prints a checksum of each output, then the time of a run.
#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

enum class Role { Input, Output, Scratch, ByValue };
enum class Kind { Address, Value, Int32, Int64, Float32, Map };

struct Tensor {
  const char* name;
  Role role;
  long long count;
  int bytes, exponent_bits, significand_bits;  // no exponent: an integer in two's complement
  const unsigned long long* example;           // the bits of each element; null if random ones will do
};

// A tensor as the copy engine sees it: arguments of cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col. Dimensions are
// innermost first.
struct TensorMap {
  int tensor;
  CUtensorMapDataType type;
  unsigned rank;
  cuuint64_t extents[5], strides_bytes[4];  // no stride of the innermost
  cuuint32_t box[5];  // of pixels: channels, pixels
  CUtensorMapSwizzle swizzle;
  bool of_pixels;
  int lower[3], upper[3];  // corners of the box of pixels
  cuuint32_t steps[5];     // from one element to the next
};

struct Argument {
  Kind kind;
  long long whole;  // of Address and Value: which tensor
  double real;
  const TensorMap* map;
};

struct Launch {
  const char* symbol;
  unsigned grid[3], block[3], cluster[3], smem_bytes;
  const Argument* arguments;
  int argument_count;
};

#include "launch.h"

namespace {

void check(CUresult result, const char* doing) {
  if (result == CUDA_SUCCESS) return;
  const char* name = "an unknown error";
  cuGetErrorName(result, &name);
  std::fprintf(stderr, "%s: %s (the kernels are for %s)\n", doing, name, architecture);
  std::exit(1);
}

// An element of random sign and significand, of a magnitude from 1/2 to 1, or an integer of one byte. Larger integers
// are indices or offsets: 0, which is always valid.
uint64_t random_element(const Tensor& tensor, uint64_t& state) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;  // xorshift (Marsaglia, 2003)
  const int significand = tensor.significand_bits, exponent = tensor.exponent_bits;
  if (exponent == 0 && tensor.bytes > 1) return 0;
  if (exponent == 0) return significand == 1 ? state >> 8 & 1 : uint64_t(int64_t(int8_t(state >> 8)));
  const uint64_t half = ((uint64_t(1) << (exponent - 1)) - 2) << significand;
  const uint64_t sign = (state >> 63) << (exponent + significand);
  return sign | half | (state >> 8 & ((uint64_t(1) << significand) - 1));
}

double decoded(const Tensor& tensor, uint64_t bits) {
  const int significand = tensor.significand_bits, exponent = tensor.exponent_bits;
  if (exponent == 0) return double(int64_t(bits << (63 - significand)) >> (63 - significand));
  const double fraction = double(bits & ((uint64_t(1) << significand) - 1)) / double(uint64_t(1) << significand);
  const int biased = int(bits >> significand & ((uint64_t(1) << exponent) - 1));
  const int bias = (1 << (exponent - 1)) - 1;
  double value = biased == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, biased - bias);
  // Of 8 bits, only the largest pattern is no number.
  if (biased == (1 << exponent) - 1 && (tensor.bytes > 1 || fraction == 0.875)) value = fraction == 0 ? INFINITY : NAN;
  return bits >> (exponent + significand) & 1 ? -value : value;
}

std::vector<unsigned char> filled(const Tensor& tensor, uint64_t& state) {
  std::vector<unsigned char> made(size_t(tensor.count * tensor.bytes));
  for (long long i = 0; i < tensor.count; ++i) {
    const uint64_t element = tensor.example ? tensor.example[i] : random_element(tensor, state);
    // Little-endian, as the GPU is.
    std::memcpy(&made[size_t(i * tensor.bytes)], &element, size_t(tensor.bytes));
  }
  return made;
}

// Prints a checksum; returns whether every element is a number.
bool describe(const Tensor& tensor, const std::vector<unsigned char>& data) {
  double sum = 0, magnitude = 0;
  long long wrong = 0;
  for (long long i = 0; i < tensor.count; ++i) {
    uint64_t bits = 0;
    std::memcpy(&bits, &data[size_t(i * tensor.bytes)], size_t(tensor.bytes));
    const double value = decoded(tensor, bits);
    std::isfinite(value) ? (sum += value, magnitude += std::fabs(value)) : ++wrong;
  }
  std::printf("%s: %lld elements, sum %.9g, of magnitudes %.9g\n", tensor.name, tensor.count, sum, magnitude);
  if (wrong) std::printf("%s: %lld elements are no numbers\n", tensor.name, wrong);
  return wrong == 0;
}

// What a map has beyond the tensor reads as zeros.
void encode(CUtensorMap& made, const TensorMap& map, void* address) {
  const auto dense = CU_TENSOR_MAP_INTERLEAVE_NONE;
  const auto ahead = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const auto zeros = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  const CUresult result =
      map.of_pixels
          ? cuTensorMapEncodeIm2col(&made, map.type, map.rank, address, map.extents, map.strides_bytes, map.lower,
                                    map.upper, map.box[0], map.box[1], map.steps, dense, map.swizzle, ahead, zeros)
          : cuTensorMapEncodeTiled(&made, map.type, map.rank, address, map.extents, map.strides_bytes, map.box, map.steps,
                                   dense, map.swizzle, ahead, zeros);
  check(result, "encoding a tensor map");
}

// A parameter of a kernel, aligned as a tensor map must be.
union Parameter {
  uint64_t value;
  CUtensorMap map;
};

Parameter parameter(const Argument& argument, const std::vector<uint64_t>& held) {
  Parameter made = {uint64_t(argument.whole)};
  const float real = float(argument.real);
  switch (argument.kind) {
    case Kind::Address:
    case Kind::Value:
      made.value = held[size_t(argument.whole)];
      break;
    case Kind::Float32:
      std::memcpy(&made.value, &real, sizeof real);
      break;
    case Kind::Map:
      encode(made.map, *argument.map, reinterpret_cast<void*>(held[size_t(argument.map->tensor)]));
      break;
    case Kind::Int32:
    case Kind::Int64:
      break;
  }
  return made;
}

struct Prepared {
  CUlaunchConfig config;
  CUlaunchAttribute cluster;
  CUfunction function;
  std::vector<Parameter> values;
  std::vector<void*> parameters;
};

void prepare(Prepared& made, const Launch& launch, CUkernel kernel, CUdevice device, CUstream stream,
             const std::vector<uint64_t>& held) {
  int fixed = 0;
  check(cuKernelGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, device), "reading a kernel");
  if (fixed + int(launch.smem_bytes) > 48 * 1024)  // more than that must be asked for
    check(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, int(launch.smem_bytes), kernel, device),
          "asking for shared memory");
  for (int i = 0; i < launch.argument_count; ++i) made.values.push_back(parameter(launch.arguments[i], held));
  for (Parameter& value : made.values) made.parameters.push_back(&value);
  made.function = reinterpret_cast<CUfunction>(kernel);
  made.config = {};
  made.config.gridDimX = launch.grid[0], made.config.gridDimY = launch.grid[1], made.config.gridDimZ = launch.grid[2];
  made.config.blockDimX = launch.block[0], made.config.blockDimY = launch.block[1];
  made.config.blockDimZ = launch.block[2];
  made.config.sharedMemBytes = launch.smem_bytes;
  made.config.hStream = stream;
  if (launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > 1) {
    made.cluster = {};
    made.cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    made.cluster.value.clusterDim.x = launch.cluster[0];
    made.cluster.value.clusterDim.y = launch.cluster[1];
    made.cluster.value.clusterDim.z = launch.cluster[2];
    made.config.attrs = &made.cluster;
    made.config.numAttrs = 1;
  }
}

void run(std::vector<Prepared>& prepared) {
  for (Prepared& one : prepared)
    check(cuLaunchKernelEx(&one.config, one.function, one.parameters.data(), nullptr), "launching");
}

double median_us(std::vector<Prepared>& prepared, CUstream stream, int runs) {
  CUevent begin, end;
  check(cuEventCreate(&begin, CU_EVENT_DEFAULT), "creating an event");
  check(cuEventCreate(&end, CU_EVENT_DEFAULT), "creating an event");
  std::vector<double> samples;
  for (int i = 0; i < runs; ++i) {
    check(cuEventRecord(begin, stream), "timing");
    run(prepared);
    check(cuEventRecord(end, stream), "timing");
    check(cuEventSynchronize(end), "running");
    float milliseconds = 0;
    check(cuEventElapsedTime(&milliseconds, begin, end), "timing");
    samples.push_back(milliseconds * 1e3);
  }
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

}  // namespace

int main(int count, char** words) {
  const std::string path = count > 1 ? words[1] : "kernel.cubin";
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> cubin((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (cubin.empty()) return std::fprintf(stderr, "cannot read %s\n", path.c_str()), 2;

  CUdevice device;
  CUcontext context;
  CUstream stream;
  CUlibrary library;
  char name[256] = "";
  check(cuInit(0), "starting the driver");
  check(cuDeviceGet(&device, 0), "finding a GPU");
  check(cuDeviceGetName(name, sizeof name, device), "asking for its name");
  check(cuDevicePrimaryCtxRetain(&context, device), "opening it");
  check(cuCtxSetCurrent(context), "opening it");
  check(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), "creating a stream");
  check(cuLibraryLoadData(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "loading the kernels");

  // Of every tensor its address, or if it has none its value.
  std::vector<uint64_t> held;
  uint64_t state = 0x9e3779b97f4a7c15;
  for (const Tensor& tensor : tensors) {
    const size_t bytes = size_t(tensor.count * tensor.bytes);
    const bool given = tensor.role == Role::Input || tensor.role == Role::ByValue;
    const std::vector<unsigned char> data = given ? filled(tensor, state) : std::vector<unsigned char>();
    uint64_t value = 0;
    if (tensor.role == Role::ByValue) {
      std::memcpy(&value, data.data(), bytes);
    } else {
      CUdeviceptr address = 0;
      check(cuMemAlloc(&address, bytes), "allocating memory");
      if (given)
        check(cuMemcpyHtoDAsync(address, data.data(), bytes, stream), "copying inputs");
      else
        check(cuMemsetD8Async(address, 0xff, bytes, stream), "filling outputs");  // no number, until it is written
      check(cuStreamSynchronize(stream), "copying inputs");
      value = address;
    }
    held.push_back(value);
  }

  std::vector<Prepared> prepared(std::size(launches));
  for (size_t i = 0; i < std::size(launches); ++i) {
    CUkernel kernel;
    check(cuLibraryGetKernel(&kernel, library, launches[i].symbol), launches[i].symbol);
    prepare(prepared[i], launches[i], kernel, device, stream, held);
  }

  run(prepared);
  check(cuStreamSynchronize(stream), "running");
  std::printf("on %s\n", name);
  bool right = true;
  for (size_t i = 0; i < std::size(tensors); ++i) {
    if (tensors[i].role != Role::Output) continue;
    std::vector<unsigned char> data(size_t(tensors[i].count * tensors[i].bytes));
    check(cuMemcpyDtoHAsync(data.data(), CUdeviceptr(held[i]), data.size(), stream), "copying results");
    check(cuStreamSynchronize(stream), "copying results");
    right = describe(tensors[i], data) && right;
  }
  median_us(prepared, stream, 5);
  std::printf("time: %.3f us, the median of 21 runs with warm caches; ", median_us(prepared, stream, 21));
  std::printf("expected: %.3f us, %s\n", expected_us, how);
  return right ? 0 : 1;
}
