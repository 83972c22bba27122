"""conv2d of one tap in CUDA C++ as a matrix product by Hopper's wgmma (sm_90a).

Kernel, space and costs are those of `gemm/cuda_wgmma`; `tunebench.kernels.conv2d._pointwise` maps the
tensors.
"""

from __future__ import annotations

from tunebench.kernels.conv2d._pointwise import Pointwise, on_products
from tunebench.kernels.gemm.cuda_wgmma import VARIANT as GEMM


class CudaGemmWgmma(Pointwise):
    """1 x 1 filters at stride 1, channels last, in all directions, for the types of gemm/cuda_wgmma."""

    name = "cuda_gemm_wgmma"
    product = GEMM
    space = on_products(GEMM.space)
    minimum_cc = GEMM.minimum_cc
    maximum_cc = GEMM.maximum_cc


VARIANT = CudaGemmWgmma()
