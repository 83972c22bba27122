"""Predicted time of a training step on several GPUs: data, tensor and pipeline parallelism.

`cluster` has the devices and links, `collective` the time of collectives, `pipeline` the schedule of stages,
and `step` the prediction of a whole step.
"""
