// A product by cuBLASLt, with the algorithm that has one rank in its list for this GPU.
// An object is for one device, and for one stream at a time.
class LibraryCall {
 public:
  // Plans the product on the current device for these addresses and for others that are aligned as they are.
  // Throws std::runtime_error if cuBLASLt refuses the product, or lists fewer algorithms.
  explicit LibraryCall(const Tensors& tensors) {
    check(cublasLtCreate(&handle_), "cublasLtCreate");
    check(cublasLtMatmulDescCreate(&product_, COMPUTE, CUDA_R_32F), "cublasLtMatmulDescCreate");
    if (HAS_BIAS) {
      const int64_t broadcast = 0;
      describe(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, broadcast);
      describe(CUBLASLT_MATMUL_DESC_BIAS_POINTER, tensors.bias);
    }
    describe(CUBLASLT_MATMUL_DESC_EPILOGUE, EPILOGUE);
    first_ = layout(FIRST);
    second_ = layout(SECOND);
    result_ = layout(RESULT);
    choose(tensors);
    if (workspace_bytes_ > 0 && cudaMalloc(&workspace_, workspace_bytes_) != cudaSuccess)
      throw std::runtime_error("cudaMalloc of the workspace failed");
  }

  LibraryCall(const LibraryCall&) = delete;
  LibraryCall& operator=(const LibraryCall&) = delete;

  ~LibraryCall() {
    cudaFree(workspace_);
    for (cublasLtMatrixLayout_t layout : {first_, second_, result_}) cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(product_);
    cublasLtDestroy(handle_);
  }

  // Enqueues the product on a stream.
  void operator()(const Tensors& tensors, cudaStream_t stream) {
    if (HAS_BIAS) describe(CUBLASLT_MATMUL_DESC_BIAS_POINTER, tensors.bias);
    if (HAS_RESIDUAL &&
        cudaMemcpyAsync(tensors.c, tensors.residual, RESULT_BYTES, cudaMemcpyDeviceToDevice, stream) != cudaSuccess)
      throw std::runtime_error("the copy of the residual failed");
    const float alpha = 1.0f, beta = HAS_RESIDUAL ? 1.0f : 0.0f;
    check(cublasLtMatmul(handle_, product_, &alpha, tensors.b, first_, tensors.a, second_, &beta, tensors.c, result_,
                         tensors.c, result_, &algorithm_, workspace_, workspace_bytes_, stream),
          "cublasLtMatmul");
  }

 private:
  static void check(cublasStatus_t status, const char* function) {
    if (status != CUBLAS_STATUS_SUCCESS)
      throw std::runtime_error(std::string(function) + " returned status " + std::to_string(int(status)));
  }

  template <typename Value>
  void describe(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    check(cublasLtMatmulDescSetAttribute(product_, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }

  static cublasLtMatrixLayout_t layout(const Matrix& matrix) {
    cublasLtMatrixLayout_t layout = nullptr;
    check(cublasLtMatrixLayoutCreate(&layout, TYPE, matrix.rows, matrix.columns, matrix.leading_dimension),
          "cublasLtMatrixLayoutCreate");
    const auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, const auto& value) {
      check(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof value),
            "cublasLtMatrixLayoutSetAttribute");
    };
    set(CUBLASLT_MATRIX_LAYOUT_ORDER, int32_t(matrix.order));
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, BATCH);
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, matrix.batch_stride);
    return layout;
  }

  static uint32_t alignment(const void* address) {
    const auto bits = reinterpret_cast<uintptr_t>(address);
    return uint32_t(std::min<uintptr_t>(256, bits & ~(bits - 1)));
  }

  // Chooses the algorithm from the list that was searched: its length and limits determine the ranks.
  void choose(const Tensors& tensors) {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
            "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(tensors.b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(tensors.a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(tensors.c));
    cublasLtMatmulHeuristicResult_t list[RANKS];
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, product_, first_, second_, result_, result_,
                                                                 preference, RANKS, list, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    check(status, "cublasLtMatmulAlgoGetHeuristic");
    if (RANK >= count)
      throw std::runtime_error("cuBLASLt lists " + std::to_string(count) + " algorithms, none of rank " +
                               std::to_string(RANK));
    algorithm_ = list[RANK].algo;
    workspace_bytes_ = list[RANK].workspaceSize;
  }

  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t first_ = nullptr, second_ = nullptr, result_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_{};
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
};
