"""`fit`: a model whose training steps stay within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tunebench.errors import InputError
from tunebench.torch.compiler.backend import Backend, register_compiled
from tunebench.training.fitting.compressed_activation import FORMATS
from tunebench.training.fitting.fitter import Fitter, fitted_by, is_fitted
from tunebench.training.fitting.optimizer_state import HostStates, state_bytes
from tunebench.training.memory.budget import budget_bytes
from tunebench.training.memory.planner import MemoryPlan, PlanEffort
from tunebench.training.memory.step import HostLink

__all__ = ["fit"]


def fit(
    model: nn.Module | Callable[..., Any],
    budget: int | str | None = None,
    *,
    plan: MemoryPlan | str | Path | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    host_states: bool = False,
    compress: str | None = None,
    other_bytes: int = 0,
    swap_folder: str | Path | None = None,
    host_link: HostLink | None = None,
    effort: PlanEffort | None = None,
    tuned_kernels: bool = False,
    check: bool = False,
) -> Any:
    """Return a model whose training steps stay within a memory budget.

    The first call with each kind of input traces forward and backward, times their operations on this
    device, and plans which tensors are kept, recomputed, or swapped to the host. On a processor, it then runs
    a planned step with recurrent layers a few times, on aliases, for its measured overhead. Gradients are
    those of the same operations without a plan: random numbers are repeated, and running statistics are
    updated once. If a shape, the mode or the model changes, the next call makes a new plan. Calls without
    gradients have no plan.

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
        host_states: Whether states of the optimizer may be in host memory between updates, if this is
            predicted to take less time than recomputing activations. The update runs on the device, with
            copies of states in and out, as many at once as the budget allows; weights are bit for bit the
            same. `FittedStep` states the bytes that stay on the device. Hooks of `step` that change gradients
            must be registered before.
        compress: ``"fp8"`` (e4m3, a scale for 256 elements) or ``"bf16"`` to keep activations with fewer bits
            for the backward pass where that is predicted to be faster than recomputing or swapping. Results
            of the model stay exact; gradients have an error, see the guide on memory.
        other_bytes: Bytes on the device besides the step.
        swap_folder: On a processor, the folder for swapped tensors and states; without it, nothing is
            swapped. On a GPU, they are in pinned memory of the host.
        host_link: Rates of copies to the host and back; measured by default.
        effort: How long to search for a plan.
        tuned_kernels: Whether tuned kernels run groups of operations, as in `tunebench.torch.compile`. A
            group is one operation of the plan; other operations run one by one, without inductor.
        check: Whether to compare each group with torch in float64 (see `tunebench.torch.compile`).

    Returns:
        What `torch.compile` returns: a module with the parameters of the model, or a function.

    Raises:
        InputError: The budget is no size, both or none of budget and plan are given, an argument has another
            type, the model is compiled, distributed or sharded already, or the states of the optimizer cannot
            be in host memory. A call raises it if no plan fits
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
    if compress is not None and compress not in FORMATS:
        raise InputError(f"compress must be one of {', '.join(FORMATS)}, got {compress!r}")
    if plan is not None and (compress is not None or host_states):
        raise InputError("compress and host_states need a budget: a plan is of a step without them")
    if host_states and optimizer is None:
        raise InputError("host_states needs optimizer: the optimizer whose states may be in host memory")
    backend = None
    if tuned_kernels:
        backend = Backend(getattr(model, "__name__", type(model).__name__), check=check)
    rewrite = None if backend is None else backend.replace_groups
    states = HostStates(optimizer) if host_states and optimizer is not None else None
    size_bytes = 0 if optimizer is None else state_bytes(optimizer)
    options = (budget, plan, other_bytes, swap_folder, host_link, effort, rewrite, compress)
    fitted = fitted_by(Fitter(*options, size_bytes, states), model)
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
