"""conv2d of one tap in CUDA C++ as a product of matrices by Hopper's wgmma (sm_90a).

Kernel, space and costs are those of `gemm/cuda_wgmma`; `tunebench.kernels.conv2d._pointwise` has the names.
"""

from __future__ import annotations

from tunebench.kernels.conv2d._pointwise import Pointwise, on_products
from tunebench.kernels.gemm.cuda_wgmma import VARIANT as GEMM


class CudaGemmWgmma(Pointwise):
    """Serves 1 x 1 filters at stride 1, channels last: every direction, and the types of gemm/cuda_wgmma."""

    name = "cuda_gemm_wgmma"
    product = GEMM
    space = on_products(GEMM.space)
    minimum_cc = GEMM.minimum_cc
    maximum_cc = GEMM.maximum_cc


VARIANT = CudaGemmWgmma()
