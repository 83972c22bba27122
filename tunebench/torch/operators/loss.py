"""The cross entropy of a classifier or a language model, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.torch.operators._autocast import raised
from tunebench.torch.operators._family import Family, Form, View, declined, serve
from tunebench.torch.operators._layout import refusal
from tunebench.torch.operators._memory import DTYPES
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
    """Return the cross entropy of rows of logits with classes, as `torch.nn.functional.cross_entropy` does.

    Args:
        input: (n, classes), or (classes,).
        target: (n,), or (): classes; torch has the other kinds.
        weight: Has torch do it.
        size_average: Likewise.
        ignore_index: Rows of this class are left out.
        reduce: Has torch do it.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: Other than 0 has torch do it.
    """
    (x,) = raised(input, on_cpu=True)

    def library() -> Tensor:
        return functional.cross_entropy(
            x, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )

    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return declined("cross_entropy", "weights, smoothing or the old reductions", library)
    if reduction not in ("mean", "sum", "none"):
        return declined("cross_entropy", "no such reduction", library)

    def reduced(results: tuple[Tensor, Tensor]) -> Tensor:
        return _reduced(results[0], x, target, ignore_index, reduction)

    return serve(CROSS_ENTROPY, "cross_entropy", (x, target), (ignore_index,), _form, library, reduced)


def _reduced(losses: Tensor, x: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses.to(x.dtype).reshape(target.shape)
    total = losses.sum()
    if reduction == "mean":
        total = total / (target != ignore_index).sum()
    return total.to(x.dtype)


def _form(x: Tensor, target: Tensor, ignore_index: int) -> Form | str:
    reason = refusal((x,))
    if reason is not None:
        return reason
    if x.ndim not in (1, 2) or target.shape != x.shape[:-1] or target.device != x.device:
        return "no rows of logits with a class each"
    if target.dtype not in (torch.int64, torch.uint8):
        return f"targets of {target.dtype}"
    gathered = None if x.is_contiguous() else "rows that do not lie side by side"
    cols = x.shape[-1]
    rows = x.numel() // cols
    # Classes are copied: a kernel reads them as int32.
    views = (View((rows, cols)), View((rows,), is_copied=True))
    return Form(views, (ignore_index,), None, gathered)


# -- the operators -------------------------------------------------------------------------------------------


def _workload(x: Tensor, target: Tensor, *told: Any) -> CrossEntropy:
    rows, cols = x.shape
    return CrossEntropy(rows=rows, cols=cols, dtype=DTYPES[x.dtype])  # type: ignore[arg-type]


def _workload_backward(x: Tensor, *others: Any) -> CrossEntropy:
    rows, cols = x.shape
    return CrossEntropy(rows=rows, cols=cols, dtype=DTYPES[x.dtype], direction="backward")  # type: ignore[arg-type]


def _library(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(x.float(), -1)
    logits = x.float()
    losses = functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    return losses, lse


def _library_backward(x: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, ignore_index: int) -> Tensor:
    p = torch.exp(x.float() - lse[:, None])
    left_out = target == ignore_index
    onehot = torch.zeros_like(p).scatter_(1, torch.where(left_out, 0, target)[:, None].long(), 1.0)
    return ((p - onehot) * dloss[:, None]).to(x.dtype)


def _check(x: Tensor, target: Tensor, *told: Any) -> None:
    """Refuse classes that there are not, of which a kernel would read elsewhere."""
    ignore_index = told[-1]
    valid = ((target >= 0) & (target < x.shape[1])) | (target == ignore_index)
    if x.is_cuda:  # nobody may wait for the device
        torch._assert_async(valid.all(), "a class out of bounds")
    elif not bool(valid.all()):
        raise IndexError(f"Target {int(target[~valid][0])} is out of bounds: there are {x.shape[1]} classes.")


def _prepare(tensor: Tensor, ignore_index: int) -> Tensor:
    """Return classes as a kernel reads them: any one that there is stands for one left out."""
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


def _save_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "gradients of tunebench's cross_entropy cannot be differentiated again; "
        "run it under tunebench.torch.prefer('torch')"
    )


def _fake(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses, lse = (x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(2))
    return losses, lse


CROSS_ENTROPY = Family(
    "cross_entropy(Tensor x, Tensor target, int ignore_index) -> (Tensor losses, Tensor lse)",
    2,
    _workload,
    _library,
    _fake,
    gradients=lambda workload: (workload.changed(direction="backward"),),
    prepare=_prepare,
    finish=_finish,
    check=_check,
)
CROSS_ENTROPY_BACKWARD = Family(
    "cross_entropy_backward(Tensor x, Tensor target, Tensor lse, Tensor dlosses, int ignore_index) -> Tensor",
    4,
    _workload_backward,
    _library_backward,
    lambda x, *others: x.new_empty(x.shape),
    prepare=_prepare,
    check=_check,
)
CROSS_ENTROPY.differentiate(_backward, _save)
CROSS_ENTROPY_BACKWARD.differentiate(_refuse, _save_nothing)
