"""Predicted times, without running anything. A predicted time is never stored or shown as a measured one.

- `tunebench.forecast.library`: time of a workload on library kernels (cuBLAS, cuDNN, PyTorch): `predict`,
  `predict_all`. Built on it: `network` (whole networks), `table` (CSV files of workloads) and `comparison`
  (devices by speed and cost).
- `tunebench.forecast.execution`: time of configurations of this project's own kernels: `predict_us`,
  `interval_us`.
- `tunebench.forecast.model_training`: fits the model of library kernels to
  measurements.

The device does not have to be present.
"""

from tunebench.forecast.execution import interval_us, least_us, predict_us
from tunebench.forecast.library import predict, predict_all
from tunebench.forecast.prediction import Basis, Binding, Prediction, Predictions

__all__ = [
    "Basis",
    "Binding",
    "Prediction",
    "Predictions",
    "interval_us",
    "least_us",
    "predict",
    "predict_all",
    "predict_us",
]
