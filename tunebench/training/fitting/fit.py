"""`fit`: a model whose training steps stay within a memory budget."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from tunebench.errors import InputError
from tunebench.torch.compiler.backend import Backend, register_compiled
from tunebench.training.fitting.fitter import Fitter, fitted_by, is_fitted
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
        InputError: The budget is no size, both or none of budget and plan are given, an argument has another
            type, or the model is compiled, distributed or sharded already. A call raises it if no plan fits
            the budget, stating the least, if torch cannot trace the model as a whole, if a training step
            returns nothing with a gradient, or if the swap folder has no room.
    """
    if (budget is None) == (plan is None):
        raise InputError(f"fit needs either a budget or a plan, got {'neither' if plan is None else 'both'}")
    _require_model(model)
    if budget is not None:
        budget_bytes(budget, 0)
    _require_type("plan", plan, (MemoryPlan, str, Path), "a MemoryPlan or the path of a file")
    _require_type("host_link", host_link, HostLink, "a HostLink, such as memory.host_link('pcie5')")
    _require_type("effort", effort, PlanEffort, "a PlanEffort")
    if not isinstance(other_bytes, int) or other_bytes < 0:
        raise InputError(f"other_bytes must be a whole number of bytes of at least 0, got {other_bytes!r}")
    if optimizer is not None:
        _require_optimizer(optimizer, model)
        other_bytes += state_bytes(optimizer)
    backend = None
    if tuned_kernels:
        backend = Backend(getattr(model, "__name__", type(model).__name__), check=check)
    rewrite = None if backend is None else backend.replace_groups
    fitted = fitted_by(Fitter(budget, plan, other_bytes, swap_folder, host_link, effort, rewrite), model)
    if backend is not None:
        register_compiled(fitted, backend)
    return fitted


def _require_model(model: Any) -> None:
    """Raise InputError unless `fit` takes a model."""
    if isinstance(model, type):
        raise InputError(
            f"expected a torch.nn.Module or a function, got the class {model.__name__}: make one"
        )
    if not callable(model):
        raise InputError(f"expected a torch.nn.Module or a function, got {type(model).__name__}")
    if is_fitted(model):
        raise InputError("the model is fitted already: fit the model itself, with one budget")
    if isinstance(model, OptimizedModule) or hasattr(model, "_torchdynamo_orig_callable"):
        raise InputError(
            "the model is compiled already, and torch would ignore that: fit the model itself, or compile "
            "what fit returns. tuned_kernels=True fuses operations within the plan"
        )
    modules = tuple(model.modules()) if isinstance(model, nn.Module) else ()
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise InputError("fit a model before it is distributed: DistributedDataParallel(fit(model, budget))")
    if any(isinstance(module, FSDPModule) for module in modules):
        raise InputError(
            "fit modules before they are sharded: fully_shard(fit(module, budget)) for each. A plan of "
            "sharded parameters would not know when they are gathered"
        )


def _require_type(name: str, value: Any, types: Any, expected: str) -> None:
    if value is not None and not isinstance(value, types):
        raise InputError(f"{name} must be {expected}, got {value!r}")


def _require_optimizer(optimizer: Any, model: Any) -> None:
    """Raise InputError unless an optimizer is one of the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else repr(optimizer)
        raise InputError(
            f"optimizer must be an optimizer such as torch.optim.AdamW(model.parameters()), got {got}"
        )
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if isinstance(model, nn.Module) and updated.isdisjoint(model.parameters()):
        raise InputError("the optimizer has none of the model's parameters: make it with model.parameters()")


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
