"""Predicted time of the library kernels (cuBLAS, cuDNN, PyTorch) that a framework launches for a workload."""

from tunebench.forecast.library.workload import bounds_us, predict, predict_all, predict_fitting

__all__ = ["bounds_us", "predict", "predict_all", "predict_fitting"]
