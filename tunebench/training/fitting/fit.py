"""`fit`: a model whose training steps stay within a memory budget."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tunebench.errors import InputError
from tunebench.torch.compiler.backend import Backend, register_compiled
from tunebench.training.fitting.fitter import Fitter, fitted_by
from tunebench.training.memory.budget import budget_bytes
from tunebench.training.memory.planner import MemoryPlan, PlanEffort
from tunebench.training.memory.step import HostLink

__all__ = ["fit", "state_bytes"]


def fit(
    model: nn.Module | Callable[..., Any],
    budget: int | str | None = None,
    *,
    plan: MemoryPlan | str | Path | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    other_bytes: int = 0,
    swap_folder: str | Path | None = None,
    host_link: HostLink | None = None,
    effort: PlanEffort | None = None,
    tuned_kernels: bool = False,
    check: bool = False,
) -> Any:
    """Return a model whose training steps stay within a memory budget.

    The first call with each kind of input traces forward and backward, times their operations on this
    device, and plans which tensors are kept, recomputed, or swapped to the host. Gradients are those of the
    same operations without a plan: random numbers are repeated, and running statistics are updated once. If
    a shape, the mode or the model changes, the next call makes a new plan. Calls without gradients have no
    plan.

    The budget includes parameters, buffers, inputs, results, gradients and `other_bytes`. It does not
    include what the caller computes from the results: return the loss from the model. Workspaces of
    libraries, and the optimizer's temporary tensors, are not known.

    Args:
        model: A module, or a function of tensors, which torch can trace as a whole.
        budget: Bytes, as a number or a text such as ``8GB`` or ``500MiB``, or a percentage such as ``70%`` of
            the peak without a plan.
        plan: A plan of exactly this step instead of a budget, or the file of one. The optimizer and other
            bytes must be those of the plan.
        optimizer: The optimizer, whose states are counted as `other_bytes`.
        other_bytes: Bytes on the device besides the step.
        swap_folder: On a processor, the folder for swapped tensors; without it, nothing is swapped. On a GPU,
            tensors are swapped to pinned memory of the host.
        host_link: Rates of copies to the host and back; measured by default.
        effort: How long to search for a plan.
        tuned_kernels: Whether tuned kernels run groups of operations, as in `tunebench.torch.compile`. A
            group is one operation of the plan; other operations run one by one, without inductor.
        check: Whether to compare each group with torch in float64 (see `tunebench.torch.compile`).

    Returns:
        What `torch.compile` returns: a module with the parameters of the model, or a function.

    Raises:
        InputError: The budget is no size, or both or none of budget and plan are given. A call raises it if
            no plan fits the budget, stating the least, if torch cannot trace the model as a whole, or if the
            swap folder has no room.
    """
    if (budget is None) == (plan is None):
        raise InputError("fit needs either a budget or a plan")
    if not callable(model):
        raise InputError(f"expected a torch.nn.Module or a function, got {type(model).__name__}")
    if budget is not None:
        budget_bytes(budget, 0)
    other_bytes += state_bytes(optimizer) if optimizer is not None else 0
    backend = None
    if tuned_kernels:
        backend = Backend(getattr(model, "__name__", type(model).__name__), check=check)
    rewrite = None if backend is None else backend.replace_groups
    fitted = fitted_by(Fitter(budget, plan, other_bytes, swap_folder, host_link, effort, rewrite), model)
    if backend is not None:
        register_compiled(fitted, backend)
    return fitted


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's states after its first step.

    States of the class are measured on a parameter of few elements, and scaled.

    Args:
        optimizer: The optimizer; it is not changed.
    """
    total = 0
    for group in optimizer.param_groups:
        small = nn.Parameter(torch.zeros(_FEW, _FEW))
        small.grad = torch.zeros_like(small)
        accepted = inspect.signature(type(optimizer)).parameters
        options = {name: value for name, value in group.items() if name in accepted and name != "params"}
        small_optimizer = type(optimizer)([small], **options)
        small_optimizer.step()
        states = [leaf for leaf in tree_leaves(small_optimizer.state[small]) if isinstance(leaf, Tensor)]
        per_element = sum(leaf.numel() for leaf in states if leaf.numel() >= small.numel()) / small.numel()
        total += sum(
            int(per_element * parameter.numel()) * parameter.itemsize for parameter in group["params"]
        )
    return total


_FEW = 8
"""Extent of the parameter on which states of an optimizer are measured."""
