"""How long a configuration will probably take: a belief, never shown as measured and never used to prune.

`predict_us` is the whole interface; what stands behind it may be replaced by a model that has learned.
"""

from tunebench.forecast.utilisation import predict_us

__all__ = ["predict_us"]
