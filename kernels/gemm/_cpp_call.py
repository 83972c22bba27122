"""Products in C++: cuBLASLt with one algorithm of its list, and BLAS with a loop for the epilogue."""

from __future__ import annotations

from importlib import resources

from tunebench.activation import name_of
from tunebench.dtype import storage
from tunebench.variant import CppCall
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["blas_call", "cublaslt_call", "matrix_layout"]

_CUDA_TYPES = {"f32": "CUDA_R_32F", "f16": "CUDA_R_16F", "bf16": "CUDA_R_16BF"}
_BYTES = {"f32": 4, "f16": 2, "bf16": 2}

_CONSTANTS = """\
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

// Addresses on the GPU of contiguous tensors, in row-major order.
struct Tensors {{
{tensors}
}};

struct Matrix {{
  uint64_t rows, columns;
  int64_t leading_dimension;
  cublasLtOrder_t order;
  int64_t batch_stride;
}};

// c^T = op(b)^T op(a)^T: the epilogue adds the bias to rows of a column-major result.
constexpr Matrix FIRST{first}, SECOND{second}, RESULT{result};
constexpr int32_t BATCH = {batch};
constexpr size_t RESULT_BYTES = size_t(BATCH) * {m} * {n} * {element_bytes};
constexpr cudaDataType_t TYPE = {cuda_type};
constexpr cublasComputeType_t COMPUTE = {compute};
constexpr cublasLtEpilogue_t EPILOGUE = CUBLASLT_EPILOGUE_{epilogue};
constexpr bool HAS_BIAS = {has_bias}, HAS_RESIDUAL = {has_residual};
constexpr int RANK = {rank}, RANKS = {ranks};
constexpr uint64_t WORKSPACE_BYTES = {workspace_bytes};

"""

_BUILD_CUBLASLT = (
    'g++ -std=c++17 -O2 -I"$CUDA_HOME/include" -L"$CUDA_HOME/lib64" -shared -fPIC -o liblibrary_call.so '
    "library_call.cpp -lcublasLt -lcudart"
)


def cublaslt_call(
    workload: Gemm, rank: int, *, epilogue: str | None, ranks: int, workspace_bytes: int
) -> CppCall:
    """Return a class that makes the calls which nvmath-python makes.

    Args:
        workload: The product.
        rank: Position of the algorithm in cuBLASLt's list.
        epilogue: Name of the epilogue; None for the default.
        ranks: Length of the list that is asked for.
        workspace_bytes: Limit on temporary memory.
    """
    first = (workload.n, workload.k), (1, workload.n) if workload.trans[1] == "n" else (workload.k, 1)
    second = (workload.k, workload.m), (1, workload.k) if workload.trans[0] == "n" else (workload.m, 1)
    matrices = (first, second, ((workload.n, workload.m), (1, workload.n)))
    texts = [_matrix(*matrix_layout(*matrix), workload.batch) for matrix in matrices]
    stored = storage(workload.dtype)
    constants = _CONSTANTS.format(
        tensors=_members(workload),
        first=texts[0],
        second=texts[1],
        result=texts[2],
        batch=workload.batch,
        m=workload.m,
        n=workload.n,
        element_bytes=_BYTES[stored],
        cuda_type=_CUDA_TYPES[stored],
        compute=f"CUBLAS_COMPUTE_32F{'_FAST_TF32' * (workload.dtype == 'tf32')}",
        epilogue=epilogue or "DEFAULT",
        has_bias=str(workload.has_bias).lower(),
        has_residual=str(workload.has_residual).lower(),
        rank=rank,
        ranks=ranks,
        workspace_bytes=workspace_bytes,
    )
    body = resources.files("tunebench.kernels.gemm").joinpath("cublaslt_call.hpp").read_text(encoding="utf-8")
    return CppCall(source=constants + body, build=_BUILD_CUBLASLT)


def _members(workload: Gemm) -> str:
    """Return the members of a structure of addresses, with those that the workload has not."""
    tensors = {tensor.name: tensor for tensor in (*workload.inputs(), *workload.outputs())}
    lines = []
    for name in ("a", "b", "bias", "residual", "c"):
        kind = "void*" if name == "c" else "const void*"
        value, about = ("", "") if name in tensors else (" = nullptr", "none")
        if name in tensors:
            about = f"{tensors[name].shape} {tensors[name].dtype}"
        lines.append(f"  {kind} {name}{value};  // {about}")
    return "\n".join(lines)


def matrix_layout(shape: tuple[int, int], strides: tuple[int, int]) -> tuple[int, int, int, str]:
    """Return rows, columns, leading dimension and order of a matrix as nvmath-python describes it.

    Args:
        shape: Rows and columns.
        strides: Elements from one row, and from one column, to the next.
    """
    rows, columns = shape
    if strides[0] == 1:
        return rows, columns, max(rows, strides[1]), "COL"
    return rows, columns, max(columns, strides[0]), "ROW"


def _matrix(rows: int, columns: int, leading_dimension: int, order: str, batch: int) -> str:
    batch_stride = rows * columns if batch > 1 else 0
    return f"{{{rows}, {columns}, {leading_dimension}, CUBLASLT_ORDER_{order}, {batch_stride}}}"


_ACTIVATIONS = {
    "none": "x",
    "relu": "x < 0.0f ? 0.0f : x",
    "sigmoid": "1.0f / (1.0f + std::exp(-x))",
    "silu": "x / (1.0f + std::exp(-x))",
}
"""Activations in C++, of x."""

_PRODUCT = """\
#include <cblas.h>

#include <cmath>
#include <cstdint>

// Addresses of contiguous arrays, in row-major order:
{comments}
extern "C" void library_call({parameters}) {{
  for (int64_t z = 0; z < {batch}; ++z) {{
    float* product = c + z * {m} * {n};
    cblas_sgemm(CblasRowMajor, {trans_a}, {trans_b}, {m}, {n}, {k}, 1.0f, a + z * {m} * {k}, {lda},
                b + z * {k} * {n}, {ldb}, 0.0f, product, {n});
{epilogue}  }}
}}
"""

_EPILOGUE = """\
    for (int64_t i = 0; i < {m}; ++i)
      for (int64_t j = 0; j < {n}; ++j) {{
        const float x = product[i * {n} + j]{bias};
        product[i * {n} + j] = ({activated}){residual};
      }}
"""


def blas_call(workload: Gemm) -> CppCall | None:
    """Return a function that calls BLAS once for each product, and the epilogue in one loop over the result.

    None if the epilogue has an expression, or the types are others than f32.

    Args:
        workload: The product.
    """
    activated = _ACTIVATIONS.get(name_of(workload.activation))
    tensors = (*workload.inputs(), *workload.outputs())
    if activated is None or workload.has_pre or any(tensor.dtype != "f32" for tensor in tensors):
        return None
    m, n, k = workload.m, workload.n, workload.k
    bias, residual = workload.has_bias, workload.has_residual
    loop = _EPILOGUE.format(
        m=m,
        n=n,
        bias=" + bias[j]" * bias,
        activated=activated,
        residual=f" + residual[(z * {m} + i) * {n} + j]" * residual,
    )
    source = _PRODUCT.format(
        comments="\n".join(f"//   {tensor.name} {tensor.shape}" for tensor in tensors),
        parameters=", ".join(f"{'const ' * (t.name != 'c')}float* {t.name}" for t in tensors),
        trans_a="CblasNoTrans" if workload.trans[0] == "n" else "CblasTrans",
        trans_b="CblasNoTrans" if workload.trans[1] == "n" else "CblasTrans",
        lda=k if workload.trans[0] == "n" else m,
        ldb=n if workload.trans[1] == "n" else k,
        m=m,
        n=n,
        k=k,
        batch=workload.batch,
        epilogue=loop if bias or residual or activated != "x" else "",
    )
    build = "g++ -std=c++17 -O3 -march=native -shared -fPIC -o liblibrary_call.so library_call.cpp -lopenblas"
    return CppCall(source=source, build=build)
