"""Predicted time of a training step on several GPUs: data, tensor and pipeline parallelism.

`step` has the prediction of a whole step, `parallelism` how a network is divided among devices, `gradient`
and `layer_stream` what runs beside the passes, and `footprint` the memory that a network needs.
"""
