"""batchnorm_stats by NumPy and by torch, which has these steps of batch normalisation as functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: BatchNormStats, inputs: Tensors) -> LibraryCall:
    """Return the program that computes the statistics, or the gradients, by NumPy."""
    tensors, run = single(inputs), _numpy_gradients if workload.is_backward else _numpy
    return lambda: run(workload, tensors)


def _numpy(workload: BatchNormStats, t: Tensors) -> tuple[Array, ...]:
    mean, variance = t["x"].mean(axis=0), t["x"].var(axis=0)
    return (mean, 1 / np.sqrt(variance + workload.eps), *_updated(workload, t, mean, variance))


def _numpy_gradients(workload: BatchNormStats, t: Tensors) -> tuple[Array, ...]:
    dz = np.where(t["y"] > 0, t["dy"], np.float32(0)) if workload.has_relu else t["dy"]
    gradients = (dz * (t["x"] - t["mean"])).sum(axis=0) * t["rstd"], dz.sum(axis=0)
    return (*gradients, dz) if workload.has_relu else gradients


def _updated(workload: BatchNormStats, t: Tensors, mean: Any, variance: Any) -> tuple[Any, Any]:
    """Return the running statistics, updated by those of the batch with its biased variance."""
    decay, share = 1 - workload.momentum, workload.momentum
    unbiased = share * workload.unbiased
    return decay * t["running_mean"] + share * mean, decay * t["running_var"] + unbiased * variance


def torch_calls(workload: BatchNormStats, t: Tensors) -> dict[str, LibraryCall]:
    """Return the functions of torch's batch normalisation and, on a GPU, of its synchronised one.

    On a CPU, variance and mean over rows replace the latter.
    """
    import torch

    if workload.is_backward:
        return {"torch": _torch_gradients(workload, t)}

    def update() -> tuple[Any, ...]:
        running = t["running_mean"].clone(), t["running_var"].clone()
        mean, variance = torch.batch_norm_update_stats(t["x"], *running, workload.momentum)
        return (mean, torch.rsqrt(variance + workload.eps), *running)

    def synchronised() -> tuple[Any, ...]:
        mean, rstd = torch.batch_norm_stats(t["x"], workload.eps)
        return (mean, rstd, *_updated(workload, t, mean, rstd.pow(-2) - workload.eps))

    def plain() -> tuple[Any, ...]:
        variance, mean = torch.var_mean(t["x"].float(), dim=0, correction=0)
        return (mean, torch.rsqrt(variance + workload.eps), *_updated(workload, t, mean, variance))

    return {"torch": update, **({"torch-sync": synchronised} if t["x"].is_cuda else {"torch-plain": plain})}


def _torch_gradients(workload: BatchNormStats, t: Tensors) -> LibraryCall:
    import torch

    # An f32 scale sets the type of the gradients; its values are unused.
    scale, aten = torch.ones_like(t["rstd"]), torch.ops.aten
    rest = (scale, None, None, t["mean"], t["rstd"], True, workload.eps, [False, True, True])

    def sums(dz: Any) -> tuple[Any, ...]:
        if dz.is_cuda:
            reduce: Any = torch.batch_norm_backward_reduce
            return tuple(reduce(dz, t["x"], t["mean"], t["rstd"], scale, False, True, True)[2:])
        return tuple(aten.native_batch_norm_backward(dz, t["x"], *rest)[1:])

    def after_relu() -> tuple[Any, ...]:
        dz = aten.threshold_backward(t["dy"], t["y"], 0)
        return (*sums(dz), dz)

    return after_relu if workload.has_relu else lambda: sums(t["dy"])
