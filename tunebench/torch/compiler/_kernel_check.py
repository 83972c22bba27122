"""Verification of a kernel that a model runs, against the float64 reference of its workload."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tunebench import __version__
from tunebench.device import Device
from tunebench.dispatch import BoundKernel
from tunebench.dtype import DType, numpy_dtype
from tunebench.errors import TunebenchError
from tunebench.libraries import torch_tensor
from tunebench.measure.sampled import check_of
from tunebench.measure.verify import draw, poisoned
from tunebench.outcome import Result, WrongResult
from tunebench.torch._tensor import bits_of, launch, library_results

__all__ = ["store_wrong_result", "wrong_result"]

_log = logging.getLogger(__name__)
_SEED = 0


def wrong_result(kernel: BoundKernel, device: torch.device) -> str:
    """Return how the results of a kernel differ from its workload's reference; empty if they are correct.

    Args:
        kernel: The kernel.
        device: Where to run it.
    """
    inputs = draw(kernel.workload, _SEED)
    outputs = poisoned(kernel.workload)
    arrays: dict[str, Any] = {**inputs.inputs, **outputs}
    # Copies, so that a kernel that overwrites its inputs does not change the reference.
    tensors = [torch_tensor(np.copy(arrays[spec.name]), device) for spec in kernel.tensors]
    results: Sequence[Tensor] | None = library_results(kernel, tensors[: len(inputs.inputs)])
    if results is None:
        launch(kernel, tensors)
        results = tensors[len(inputs.inputs) :]
    computed = {
        spec.name: _array(tensor, spec.dtype).reshape(spec.shape)
        for spec, tensor in zip(kernel.outputs, results, strict=True)
    }
    check = check_of(inputs)
    worst = check.worst(computed)
    return check.describe(computed, worst) if worst > 1 else ""


def _array(tensor: Tensor, dtype: DType) -> Any:
    array = bits_of(tensor.cpu()).numpy()
    return array.view(numpy_dtype(dtype))


def store_wrong_result(kernel: BoundKernel, device: Device, reason: str) -> None:
    """Store in the user's database that a configuration computes a wrong result.

    `lookup` never returns such a configuration, and `tunebench show` lists it with the reason.

    Args:
        kernel: The kernel.
        device: Its device.
        reason: How its results are wrong.
    """
    from tunebench.db import MeasurementBatch, NewMeasurement, RunStart, TrialKey, new_owner, open_store

    workload, variant, config = kernel.workload, kernel.variant, kernel.config
    start = RunStart(
        device=device,
        workload=str(workload),
        sampler="check of a compiled model",
        seed=_SEED,
        host=new_owner(),
        versions={"tunebench": __version__, "python": platform.python_version()},
    )
    try:
        valid = variant.space.check(config, workload=workload, device=device)
        revision = variant.revision(workload, valid)
        key = TrialKey(
            device=device.key, workload=str(workload), variant=variant.key, revision=revision, config=config
        )
        measurement = NewMeasurement(
            key=key, result=Result(outcome=WrongResult(reason=reason)), purpose="audit"
        )
        with open_store() as store:
            store.add([MeasurementBatch(start=start, measurements=(measurement,))])
    except TunebenchError as error:  # the model runs without the kernel in any case
        _log.warning("the wrong result of %s for %s is not stored: %s", variant.key, workload, error)
