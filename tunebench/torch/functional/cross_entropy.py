"""Cross entropy of a classifier or a language model, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.torch._tensor import DTYPES, unsupported_reason
from tunebench.torch.functional._autocast import cast_to_float32
from tunebench.torch.functional.custom_op import (
    CustomOp,
    OpCall,
    OperandView,
    dispatch,
    not_twice,
    run_by_torch,
)
from tunebench.workloads.operators.cross_entropy import CrossEntropy

__all__ = ["cross_entropy"]


def cross_entropy(
    input: Tensor,  # noqa: A002 - torch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of rows of logits, as `torch.nn.functional.cross_entropy` does.

    Args:
        input: (n, classes), or (classes,).
        target: Classes, (n,) or (); torch runs calls with other targets.
        weight: If given, torch runs the call.
        size_average: If given, torch runs the call.
        ignore_index: Class of the rows to ignore.
        reduce: If given, torch runs the call.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: If not 0, torch runs the call.
    """
    (x,) = cast_to_float32(input, on_cpu=True)

    def fallback() -> Tensor:
        return functional.cross_entropy(
            x, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )

    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return run_by_torch("cross_entropy", "weights, label smoothing or a deprecated reduction", fallback)
    if reduction not in ("mean", "sum", "none"):
        return run_by_torch("cross_entropy", "unknown reduction", fallback)

    def reduced(results: tuple[Tensor, Tensor]) -> Tensor:
        return _reduced(results[0], x, target, ignore_index, reduction)

    return dispatch(CROSS_ENTROPY, "cross_entropy", (x, target), (ignore_index,), _call_of, fallback, reduced)


def _reduced(losses: Tensor, x: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses.to(x.dtype).reshape(target.shape)
    total = losses.sum()
    if reduction == "mean":
        total = total / (target != ignore_index).sum()
    return total.to(x.dtype)


def _call_of(x: Tensor, target: Tensor, ignore_index: int) -> OpCall | str:
    reason = unsupported_reason((x,))
    if reason is not None:
        return reason
    if x.ndim not in (1, 2) or target.shape != x.shape[:-1] or target.device != x.device:
        return "not rows of logits with one class each"
    if target.dtype not in (torch.int64, torch.uint8):
        return f"targets of {target.dtype}"
    copy_reason = None if x.is_contiguous() else "rows that are not contiguous"
    cols = x.shape[-1]
    rows = x.numel() // cols
    # Classes are copied, because kernels read them as int32.
    views = (OperandView((rows, cols)), OperandView((rows,), is_copied=True))
    return OpCall(views, (ignore_index,), None, copy_reason)


# -- the operators -------------------------------------------------------------------------------------------


def _workload(x: Tensor, target: Tensor, *attributes: Any) -> CrossEntropy:
    rows, cols = x.shape
    return CrossEntropy(rows=rows, cols=cols, dtype=DTYPES[x.dtype])  # type: ignore[arg-type]


def _workload_backward(x: Tensor, *others: Any) -> CrossEntropy:
    rows, cols = x.shape
    return CrossEntropy(rows=rows, cols=cols, dtype=DTYPES[x.dtype], direction="backward")  # type: ignore[arg-type]


def _fallback(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(x.float(), -1)
    logits = x.float()
    losses = functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    return losses, lse


def _fallback_backward(x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, ignore_index: int) -> Tensor:
    p = torch.exp(x.float() - lse[:, None])
    left_out = target == ignore_index
    onehot = torch.zeros_like(p).scatter_(1, torch.where(left_out, 0, target)[:, None].long(), 1.0)
    return ((p - onehot) * dloss[:, None]).to(x.dtype)


def _check(x: Tensor, target: Tensor, *attributes: Any) -> None:
    """Raise if a class is out of bounds, because the kernel would read out of bounds."""
    ignore_index = attributes[-1]
    valid = ((target >= 0) & (target < x.shape[1])) | (target == ignore_index)
    if x.is_cuda:  # checked without waiting for the device
        torch._assert_async(valid.all(), "a class out of bounds")
    elif not bool(valid.all()):
        raise IndexError(f"Target {int(target[~valid][0])} is out of bounds: there are {x.shape[1]} classes.")


def _prepare(tensor: Tensor, ignore_index: int) -> Tensor:
    """Return classes as int32; ignored rows get class 0, which is valid."""
    if tensor.is_floating_point():
        return tensor.contiguous()
    return torch.where(tensor == ignore_index, 0, tensor).to(torch.int32)


def _finish(results: Any, x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses, lse = results
    return losses.masked_fill_(target == ignore_index, 0.0), lse


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, target, ctx.ignore_index = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, target, output[1])


def _backward(ctx: Any, dlosses: Tensor, unused: Any) -> tuple[Any, ...]:
    x, target, lse = ctx.saved_tensors
    dlosses = torch.where(target == ctx.ignore_index, 0.0, dlosses.float())
    return CROSS_ENTROPY_BACKWARD(x, target, lse, dlosses, ctx.ignore_index), None, None


def _fake(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses, lse = (x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(2))
    return losses, lse


CROSS_ENTROPY = CustomOp(
    "cross_entropy(Tensor x, Tensor target, int ignore_index) -> (Tensor losses, Tensor lse)",
    2,
    _workload,
    _fallback,
    _fake,
    gradients=lambda workload: (workload.changed(direction="backward"),),
    prepare=_prepare,
    finish=_finish,
    check=_check,
    backward=_backward,
    save=_save,
)
CROSS_ENTROPY_BACKWARD = CustomOp(
    "cross_entropy_backward(Tensor x, Tensor target, Tensor lse, Tensor dlosses, int ignore_index) -> Tensor",
    4,
    _workload_backward,
    _fallback_backward,
    lambda x, *others: x.new_empty(x.shape),
    prepare=_prepare,
    check=_check,
    backward=not_twice("cross_entropy"),
)
