"""`pipelined`: the stages of this process in the schedule of a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tunebench.errors import InputError
from tunebench.training.pipeline.transfers import with_transfers
from tunebench.training.pipeline_runtime.runtime import PipelineRun
from tunebench.training.pipeline_runtime.stage import Stage, is_sharded
from tunebench.training.schedules import (
    PipelineCosts,
    PipelineSchedule,
    read_schedule,
    simulate_pipeline,
)

__all__ = ["device_of", "pipelined", "require_process_group"]


def pipelined(
    stages: nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module],
    schedule: PipelineSchedule | str | Path,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    costs: PipelineCosts | None = None,
    acceptors: Sequence[int] = (),
    group: Any = None,
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    scale_grads: bool = True,
) -> PipelineRun:
    """Return the stages of this process, ready to run steps in the order of a schedule.

    Call it in each process of a process group, with the same schedule. Each backward pass adds to the
    gradients of the parameters as that of one process would. Gradients are equal to the last bit if each
    stage has its backward passes in the order of the micro-batches.

    If a rank raises, is killed or does not answer in time, all ranks raise `RankFailed`, and the process
    group cannot be used any more.

    Args:
        stages: Modules of this rank in the order of their stages, or by the index of the stage. Each takes
            what the stage before returns: a tensor or a tuple of tensors.
        schedule: The schedule, or a file that `write_schedule` wrote. Transfers that it does not list are
            added by `with_transfers`.
        loss_fn: Returns the loss of an output and a target; needed on the rank of the last stage.
        costs: Costs of the stages, which decide where transfers are added; equal stages by default.
        acceptors: Acceptor of each rank, if the schedule is a file and evicts.
        group: Process group; the default one by default.
        device: Device of the stages; that of their parameters by default.
        timeout_s: Longest wait for another rank, in seconds.
        scale_grads: Whether gradients are divided by the number of micro-batches, as for a loss that is a
            mean.

    Raises:
        InputError: if the schedule has another number of ranks than the group, the modules are not those of
            this rank, or the loss function is missing.
    """
    group = require_process_group(group)
    if not isinstance(schedule, PipelineSchedule):
        schedule = read_schedule(schedule, acceptors=acceptors)
    if not (isfinite(timeout_s) and timeout_s > 0):
        raise InputError(f"timeout_s must be a finite number of seconds above 0, got {timeout_s}")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks != schedule.ranks:
        raise InputError(
            f"schedule {schedule.name} has {schedule.ranks} ranks, and the process group {ranks}"
        )
    modules = _by_index(stages, schedule, rank)
    last = schedule.stages - 1
    if last in modules and schedule.trains and loss_fn is None:
        raise InputError(f"rank {rank} has the last stage: a schedule with backward passes needs loss_fn")
    costs = costs or PipelineCosts.uniform(schedule.stages)
    explicit = with_transfers(schedule, costs)
    simulate_pipeline(explicit, costs)  # refuses what ranks cannot execute, or would wait for without end
    stage_device = torch.device(device) if device is not None else device_of(nn.ModuleList(modules.values()))
    run_stages = [
        Stage(modules[index], index, schedule.stages, stage_device, group) for index in sorted(modules)
    ]
    return PipelineRun(run_stages, explicit, loss_fn=loss_fn, timeout_s=timeout_s, scale_grads=scale_grads)


def require_process_group(group: Any = None) -> Any:
    """Return a process group, the default one for None.

    Raises:
        InputError: if there is none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "a pipeline needs a process group: call torch.distributed.init_process_group before, for example "
            "in a script that torchrun starts"
        )
    return dist.group.WORLD if group is None else group


def _by_index(
    stages: nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module], schedule: PipelineSchedule, rank: int
) -> dict[int, nn.Module]:
    """Return the modules of a rank by the index of their stage."""
    rank_stages = [index for index, owner in enumerate(schedule.placement) if owner == rank]
    stage_modules = (
        [stages] if isinstance(stages, nn.Module) and not isinstance(stages, nn.ModuleList) else stages
    )
    if isinstance(stage_modules, Mapping):
        modules = dict(stage_modules)
    else:
        module_list = list(stage_modules)
        modules = (
            dict(zip(rank_stages, module_list, strict=False)) if len(module_list) == len(rank_stages) else {}
        )
    if sorted(modules) != rank_stages:
        received = (
            f"stages {sorted(modules)}"
            if isinstance(stage_modules, Mapping)
            else f"{len(module_list)} modules"
        )
        raise InputError(
            f"rank {rank} of schedule {schedule.name} has the {len(rank_stages)} stages {rank_stages}, "
            f"got {received}"
        )
    for index, module in modules.items():
        if not isinstance(module, nn.Module):
            raise InputError(f"stage {index}: expected a torch.nn.Module, got {type(module).__name__}")
        _require_shardable(index, module, schedule)
    return modules


def _require_shardable(index: int, module: nn.Module, schedule: PipelineSchedule) -> None:
    """Raise InputError for a stage that `fully_shard` divides in a way that steps do not support."""
    if not is_sharded(module):
        return
    if not isinstance(module, FSDPModule):
        raise InputError(
            f"stage {index} has parts that are sharded by fully_shard: also call fully_shard on the module "
            "of the stage, so that gradients are reduced once per step"
        )
    if schedule.acceptors:
        raise InputError(
            f"stage {index} is sharded by fully_shard, and schedule {schedule.name} evicts activations, "
            "among which autograd keeps gathered parameters: use a schedule without evictions"
        )


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the parameters of a module; the processor if there are none."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
