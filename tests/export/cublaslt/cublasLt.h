// The part of cuBLASLt that exported calls use, on memory of the host: products of f32 and bf16 matrices of either
// order, with bias, relu and gelu. Names, types of arguments and numbers are those of cublasLt.h of CUDA 13.
// The list has five algorithms. An algorithm of a higher rank needs more temporary memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>

#include "cuda_runtime_api.h"

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum cublasLtOrder_t { CUBLASLT_ORDER_COL = 0, CUBLASLT_ORDER_ROW = 1 };
enum cublasLtEpilogue_t {
  CUBLASLT_EPILOGUE_DEFAULT = 1,
  CUBLASLT_EPILOGUE_RELU = 2,
  CUBLASLT_EPILOGUE_BIAS = 4,
  CUBLASLT_EPILOGUE_RELU_BIAS = 6,
  CUBLASLT_EPILOGUE_GELU = 32,
  CUBLASLT_EPILOGUE_GELU_BIAS = 36,
};
enum cublasLtMatrixLayoutAttribute_t {
  CUBLASLT_MATRIX_LAYOUT_ORDER = 1,
  CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
  CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,
};
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE = 10,
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
};

struct StandInLayout {
  cudaDataType_t type;
  uint64_t rows, cols;
  int64_t ld;
  int32_t order = 0, batch = 1;
  int64_t batch_stride = 0;
};
struct StandInProduct {
  cublasComputeType_t compute;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  int64_t bias_batch_stride = -1;
};
struct StandInPreference {
  uint64_t workspace_bytes = 0;
  std::map<int, uint32_t> alignments;
};
typedef struct StandInHandle* cublasLtHandle_t;
typedef StandInLayout* cublasLtMatrixLayout_t;
typedef StandInProduct* cublasLtMatmulDesc_t;
typedef StandInPreference* cublasLtMatmulPreference_t;
struct cublasLtMatmulAlgo_t {
  uint64_t data[8];
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
  float wavesCount;
  int reserved[4];
};

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(1);
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }

inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
  *desc = new StandInProduct{compute};
  return scale == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete desc;
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Value>
cublasStatus_t stand_in_set(Value& value, const void* buffer, size_t bytes) {
  if (bytes != sizeof value) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&value, buffer, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t name,
                                                     const void* buffer, size_t bytes) {
  if (name == CUBLASLT_MATMUL_DESC_EPILOGUE) return stand_in_set(desc->epilogue, buffer, bytes);
  if (name == CUBLASLT_MATMUL_DESC_BIAS_POINTER) return stand_in_set(desc->bias, buffer, bytes);
  return stand_in_set(desc->bias_batch_stride, buffer, bytes);
}

inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                                 uint64_t cols, int64_t ld) {
  *layout = new StandInLayout{type, rows, cols, ld};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                       cublasLtMatrixLayoutAttribute_t name, const void* buffer,
                                                       size_t bytes) {
  if (name == CUBLASLT_MATRIX_LAYOUT_ORDER) return stand_in_set(layout->order, buffer, bytes);
  if (name == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) return stand_in_set(layout->batch, buffer, bytes);
  return stand_in_set(layout->batch_stride, buffer, bytes);
}

inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new StandInPreference;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t name,
                                                           const void* buffer, size_t bytes) {
  if (name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
    return stand_in_set(preference->workspace_bytes, buffer, bytes);
  return stand_in_set(preference->alignments[name], buffer, bytes);
}

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatmulPreference_t preference,
                                                     int requested, cublasLtMatmulHeuristicResult_t list[],
                                                     int* returned) {
  if (preference->alignments.size() != 3) return CUBLAS_STATUS_INVALID_VALUE;
  *returned = requested < 5 ? requested : 5;
  for (int rank = 0; rank < *returned; ++rank) {
    list[rank] = {};
    list[rank].algo.data[0] = uint64_t(rank);
    list[rank].workspaceSize = size_t(rank) << 10;
    if (list[rank].workspaceSize > preference->workspace_bytes) return CUBLAS_STATUS_INVALID_VALUE;
  }
  return CUBLAS_STATUS_SUCCESS;
}

inline float stand_in_read(const void* base, cudaDataType_t type, int64_t index) {
  if (type == CUDA_R_32F) return static_cast<const float*>(base)[index];
  const uint32_t bits = uint32_t(static_cast<const uint16_t*>(base)[index]) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void stand_in_write(void* base, cudaDataType_t type, int64_t index, float value) {
  if (type == CUDA_R_32F) {
    static_cast<float*>(base)[index] = value;
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  static_cast<uint16_t*>(base)[index] = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline int64_t stand_in_index(const StandInLayout& layout, int64_t z, int64_t i, int64_t j) {
  return z * layout.batch_stride + (layout.order == CUBLASLT_ORDER_ROW ? i * layout.ld + j : i + j * layout.ld);
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                                     const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                                     cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm,
                                     void* workspace, size_t workspace_bytes, cudaStream_t) {
  const uint64_t rank = algorithm->data[0];
  if (workspace_bytes < rank << 10 || (rank > 0 && !workspace)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (a_layout->cols != b_layout->rows || a_layout->batch != d_layout->batch || c_layout->ld != d_layout->ld)
    return CUBLAS_STATUS_INVALID_VALUE;
  const bool has_bias = desc->epilogue & CUBLASLT_EPILOGUE_BIAS;
  if (has_bias && (!desc->bias || desc->bias_batch_stride != 0)) return CUBLAS_STATUS_INVALID_VALUE;
  for (int64_t z = 0; z < d_layout->batch; ++z)
    for (int64_t i = 0; i < int64_t(d_layout->rows); ++i)
      for (int64_t j = 0; j < int64_t(d_layout->cols); ++j) {
        float sum = 0;
        for (int64_t k = 0; k < int64_t(a_layout->cols); ++k)
          sum += stand_in_read(a, a_layout->type, stand_in_index(*a_layout, z, i, k)) *
                 stand_in_read(b, b_layout->type, stand_in_index(*b_layout, z, k, j));
        float x = *static_cast<const float*>(alpha) * sum;
        const float factor = *static_cast<const float*>(beta);
        if (factor != 0) x += factor * stand_in_read(c, c_layout->type, stand_in_index(*c_layout, z, i, j));
        if (has_bias) x += stand_in_read(desc->bias, d_layout->type, i);
        if (desc->epilogue & CUBLASLT_EPILOGUE_RELU) x = x < 0 ? 0 : x;
        if (desc->epilogue & CUBLASLT_EPILOGUE_GELU)
          x = 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
        stand_in_write(d, d_layout->type, stand_in_index(*d_layout, z, i, j), x);
      }
  std::printf("rank %d compute %d\n", int(rank), int(desc->compute));
  return CUBLAS_STATUS_SUCCESS;
}
