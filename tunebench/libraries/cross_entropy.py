"""cross_entropy and its gradient by NumPy and by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.workloads.operators.cross_entropy import CrossEntropy

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: CrossEntropy, inputs: Tensors) -> LibraryCall:
    """Return the program that computes loss and log-sum-exp, or the gradient, by NumPy."""
    rows, target = np.arange(workload.rows), inputs["target"]
    tensors = single(inputs)
    if workload.is_backward:
        return lambda: _numpy_backward(tensors, rows, target)
    return lambda: _numpy(tensors["x"], rows, target)


def _numpy(x: Array, rows: Array, target: Array) -> tuple[Array, Array]:
    top = x.max(axis=1)
    lse = np.log(np.exp(x - top[:, None]).sum(axis=1)) + top
    return lse - x[rows, target], lse


def _numpy_backward(t: Tensors, rows: Array, target: Array) -> Array:
    dx: Array = np.exp(t["x"] - t["lse"][:, None])
    dx[rows, target] -= 1
    dx *= t["dloss"][:, None]
    return dx


def torch_calls(workload: CrossEntropy, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's loss, and its gradient from the sum that the loss is divided by.

    torch's own gradient uses log-probabilities that its loss keeps, which are not inputs here.
    """
    target = t["target"].long()
    if workload.is_backward:
        return {"torch": lambda: _torch_backward(t, target)}
    return {"torch": lambda: _torch(t["x"], target)}


def _torch(x: Any, target: Any) -> Any:
    """Return loss and sum in f32, as in training code: logits in a half type are converted to f32 first."""
    from torch.nn import functional

    loss = functional.cross_entropy(x.float(), target, reduction="none")
    return loss, loss + x.gather(1, target[:, None])[:, 0]


def _torch_backward(t: Tensors, target: Any) -> Any:
    dx = (t["x"].float() - t["lse"][:, None]).exp_()
    dx.scatter_add_(1, target[:, None], dx.new_full((len(target), 1), -1.0))
    return dx.mul_(t["dloss"][:, None]).to(t["x"].dtype)
