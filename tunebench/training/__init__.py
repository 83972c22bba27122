"""Predict, plan and run training steps. This package uses the core of tunebench, which never imports it.

Predicted and planned without the devices:

- `interconnect`: devices and links of a cluster, and the time of collectives
- `steps`: time of a training step on several GPUs
- `schedules`: pipeline schedules and their simulation
- `memory`: plans of a step within a memory budget, by activation recomputation and by copies to the host
- `pipeline`: stages of a pipeline: costs, balance, and orders of their actions
- `cluster`: plans of training on a cluster: parallelism, schedule, recomputation, sharding, storage

Run with PyTorch:

- `fitting`: `fit`, which runs training steps within a memory budget
- `pipeline_runtime`: `pipelined_model` and `pipelined`, which run training steps in the order of a pipeline
  schedule
- `coexecution`: `coexecute`, which runs whole iterations beside a graph of their operations

>>> import torch
>>> from tunebench.training import fit
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
>>> fitted = fit(model, budget="1MiB")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebench._lazy import lazy_names

if TYPE_CHECKING:
    from tunebench.training.coexecution.analysis import StepAnalysis
    from tunebench.training.coexecution.coexecute import coexecute
    from tunebench.training.coexecution.coexecution_report import CoexecutionReport
    from tunebench.training.fitting.fit import fit
    from tunebench.training.fitting.fitter import FittedStep, fitted_steps
    from tunebench.training.fitting.profile import profile_step
    from tunebench.training.pipeline_runtime.measurement import measure_pipeline
    from tunebench.training.pipeline_runtime.pipelined_model import PipelinedModel, pipelined_model
    from tunebench.training.pipeline_runtime.pipelined_stages import pipelined

__all__ = [
    "CoexecutionReport",
    "FittedStep",
    "PipelinedModel",
    "StepAnalysis",
    "coexecute",
    "fit",
    "fitted_steps",
    "measure_pipeline",
    "pipelined",
    "pipelined_model",
    "profile_step",
]

_LAZY = {
    "CoexecutionReport": "coexecution.coexecution_report",
    "FittedStep": "fitting.fitter",
    "PipelinedModel": "pipeline_runtime.pipelined_model",
    "StepAnalysis": "coexecution.analysis",
    "coexecute": "coexecution.coexecute",
    "fit": "fitting.fit",
    "fitted_steps": "fitting.fitter",
    "measure_pipeline": "pipeline_runtime.measurement",
    "pipelined": "pipeline_runtime.pipelined_stages",
    "pipelined_model": "pipeline_runtime.pipelined_model",
    "profile_step": "fitting.profile",
}
"""Modules of the names that need torch; each is imported at its first use."""


__getattr__ = lazy_names(__name__, _LAZY)
