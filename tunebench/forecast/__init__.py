"""How long something will probably take: a belief, never shown as measured and never used to prune.

`predict` is of a workload as the kernels of a vendor library run it; `predict_us` is of configurations of
kernels of this package. Neither needs the device.
"""

from tunebench.forecast.library import predict, predict_all
from tunebench.forecast.prediction import Basis, Binding, Prediction, Predictions
from tunebench.forecast.utilisation import interval_us, predict_us

__all__ = [
    "Basis",
    "Binding",
    "Prediction",
    "Predictions",
    "interval_us",
    "predict",
    "predict_all",
    "predict_us",
]
