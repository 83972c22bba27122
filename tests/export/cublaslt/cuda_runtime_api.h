// The functions of the CUDA runtime that exported calls of libraries use, on memory of the host.
#pragma once

#include <cstdlib>
#include <cstring>

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
typedef struct CUstream_st* cudaStream_t;

inline cudaError_t cudaMalloc(void** address, size_t bytes) {
  *address = std::malloc(bytes);
  return *address ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaFree(void* address) {
  std::free(address);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
