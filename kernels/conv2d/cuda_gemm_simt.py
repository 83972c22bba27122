"""conv2d of one tap in CUDA C++ as a matrix product on the FP32 units.

Kernel, space and costs are those of `gemm/cuda_simt`; `tunebench.kernels.conv2d._pointwise` maps the tensors.
"""

from __future__ import annotations

from tunebench.kernels.conv2d._pointwise import Pointwise, on_products
from tunebench.kernels.gemm.cuda_simt import VARIANT as GEMM


class CudaGemmSimt(Pointwise):
    """1 x 1 filters at stride 1, channels last, in all directions, for the types of gemm/cuda_simt."""

    name = "cuda_gemm_simt"
    product = GEMM
    space = on_products(GEMM.space)
    minimum_cc = GEMM.minimum_cc
    maximum_cc = GEMM.maximum_cc


VARIANT = CudaGemmSimt()
