"""`pipelined_model`: a model in a pipeline of all ranks, divided, measured and balanced by one call."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tunebench.errors import InputError
from tunebench.training.memory.budget import size_bytes, size_text
from tunebench.training.pipeline.balance import balance
from tunebench.training.pipeline.comparison import SLOWDOWNS
from tunebench.training.pipeline.given import write_stages
from tunebench.training.pipeline.message_memory import most_bytes
from tunebench.training.pipeline.transfers import with_transfers
from tunebench.training.pipeline_runtime.layers import ModelLayers, layers_of
from tunebench.training.pipeline_runtime.measurement import (
    first_microbatches,
    measure_interconnect,
    measure_pipeline,
)
from tunebench.training.pipeline_runtime.parameters import is_on_meta, share_parameters
from tunebench.training.pipeline_runtime.partition import divide_layers, measure_layers, require_layers
from tunebench.training.pipeline_runtime.pipelined_stages import device_of, pipelined, require_process_group
from tunebench.training.pipeline_runtime.runtime import (
    PipelineRun,
    SharedParameter,
    require_equal_microbatches,
)
from tunebench.training.pipeline_runtime.stage import unchanged_buffers
from tunebench.training.pipeline_runtime.transfer import FailureReport, Transport, failing_together
from tunebench.training.schedules import (
    PipelineCosts,
    PipelineSchedule,
    PipelineSimulation,
    find_schedule,
    simulate_pipeline,
)

__all__ = ["PipelinedModel", "pipelined_model"]

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def pipelined_model(
    model: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    loss_fn: Callable[..., Tensor],
    microbatches: int,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    schedule: str = "1f1b",
    memory: int | str | None = None,
    costs_file: str | Path | None = None,
    group: Any = None,
    timeout_s: float = 300.0,
    repeats: int = 3,
) -> PipelinedModel:
    """Divide a model into stages of about equal time, and return it ready to run steps on all ranks.

    Call it on each rank with the same model and batch. Rank 0 times the layers of the model: the children of
    a `torch.nn.Sequential`, or groups of the operations that `torch.export` traces of any other module. Then
    the stages are measured where they run, and the memory of the ranks is balanced. Parameters, buffers and
    random numbers stay as they are; gradients are cleared.

    Each rank keeps its own stages. The others are freed when the caller drops the model. Ranks other than 0
    may make the model on the device ``meta``: they receive the parameters and buffers of their stages from
    rank 0, and never hold those of other stages.

    Args:
        model: The model, with equal parameters on all ranks.
        inputs: Inputs of a whole batch: a tensor, a sequence of arguments, or a mapping of keyword arguments.
        target: Targets of the batch.
        loss_fn: Returns the loss of an output and a target.
        microbatches: Number of micro-batches per step; it divides the batch.
        optimizer: Makes the optimizer of the parameters of a rank; `torch.optim.AdamW` by default.
        schedule: Name of the schedule, such as ``interleaved-1f1b``.
        memory: Memory of each rank for the model and its activations, such as ``"16GB"``, also if messages
            arrive late. Activations are evicted to other ranks if the schedule needs more. None for the least
            memory in the same time.
        costs_file: File for the measured costs, which `tunebench plan pipeline --costs` reads.
        group: Process group; the default one by default.
        timeout_s: Longest wait for another rank, in seconds.
        repeats: Runs of each layer and stage of which the median counts.

    Raises:
        InputError: if the model cannot be traced or has too few layers, the batch cannot be divided, or the
            memory does not suffice.
        RankFailed: if a rank fails.
    """
    limit = None if memory is None else size_bytes(memory, "memory")
    if not isinstance(repeats, int) or repeats < 1:
        raise InputError(f"repeats must be a whole number of at least 1, got {repeats!r}")
    group = require_process_group(group)
    batch = _Batch(inputs, target, microbatches)
    device = batch.first_inputs()[0].device if is_on_meta(model) else device_of(model)
    transport, report = Transport(group, timeout_s, device), FailureReport(group)
    named = find_schedule(schedule)
    plain = named.make(transport.ranks, microbatches)
    file = Path(costs_file).absolute() if costs_file is not None and transport.rank == 0 else None
    with failing_together(transport, report, "the file of costs"):
        if file is not None and not file.parent.is_dir():
            raise InputError(f"cannot write costs of stages to {costs_file}: there is no such folder")
    layers = layers_of(model, *batch.first_arguments())

    def loss_of(output: Any, target: Any) -> Tensor:
        return loss_fn(layers.output(output), target)

    def run_of(schedule: PipelineSchedule, costs: PipelineCosts | None = None) -> PipelineRun:
        return pipelined(stages, schedule, loss_fn=loss_of, costs=costs, group=group, timeout_s=timeout_s)

    with torch.random.fork_rng(), unchanged_buffers(model):
        with failing_together(transport, report, "the division of the model"):
            divisions = _divisions(model, layers, batch, loss_of, plain.stages, transport, repeats)
        modules = _modules(layers, _agreed(divisions))
        owners = _owners(modules, plain.placement)
    with failing_together(transport, report, "the distribution of parameters"):
        on_meta = [division.meta for division in divisions]
        replaced = share_parameters(modules, plain.placement, on_meta, transport)
    stages = {index: modules[index] for index, owner in enumerate(plain.placement) if owner == transport.rank}
    shared = _shared(owners, replaced)
    with torch.random.fork_rng(), unchanged_buffers(nn.ModuleList(stages.values())):
        rank_optimizer = optimizer(_parameters(stages) or [nn.Parameter(torch.empty(0))])
        run = run_of(plain)
        arguments, keywords = batch.of_rank(run)
        with failing_together(transport, report, "the measurement of stages"):
            costs = measure_pipeline(run, *arguments, **keywords, optimizer=rank_optimizer, repeats=repeats)
    with failing_together(transport, report, "the file of costs"):
        if file is not None:
            write_stages(costs, plain.ranks, file)
    balanced = _balanced(named.make(transport.ranks, microbatches, costs=costs), costs, limit)
    return PipelinedModel(run_of(balanced, costs), costs, rank_optimizer, shared)


class PipelinedModel:
    """The stages of this rank of a model, ready to run steps. `pipelined_model` makes it.

    Args:
        run: The runtime of this rank.
        costs: Measured costs of the stages.
        optimizer: Optimizer of this rank.
        shared: Parameters that other ranks have too.

    Attributes:
        run: The runtime of this rank, with the schedule.
        costs: Measured costs of the stages, and links.
        optimizer: Optimizer of the parameters of this rank.
        simulation: Simulated step: its time, and the peak memory of each rank without the batch.
        most_bytes: Most memory of each rank without the batch, if messages arrive as late as they can.
    """

    def __init__(
        self,
        run: PipelineRun,
        costs: PipelineCosts,
        optimizer: torch.optim.Optimizer,
        shared: Sequence[SharedParameter] = (),
    ) -> None:
        self.run, self.costs, self.optimizer = run, costs, optimizer
        self.simulation: PipelineSimulation = simulate_pipeline(run.schedule, costs)
        self.most_bytes: tuple[int, ...] = most_bytes(run.schedule, costs)
        self._shared = shared

    @property
    def stages(self) -> dict[int, nn.Module]:
        """Modules of this rank by the index of their stage; their parameters have the names of the model."""
        return self.run.modules

    def step(self, inputs: Any, target: Any = None) -> Tensor | None:
        """Add the gradients of a batch to those of the parameters of this rank. Call it on all ranks.

        Args:
            inputs: Inputs of the whole batch, in the form that `pipelined_model` received.
            target: Targets of the batch.

        Returns:
            The mean loss of the micro-batches on the rank of the last stage, else None.

        Raises:
            InputError: if the batch has another size.
            RankFailed: if a rank fails.
        """
        batch = _Batch(inputs, target, self.run.schedule.microbatches)
        arguments, keywords = batch.of_rank(self.run)
        losses: list[Tensor] = []
        self.run.step(*arguments, **keywords, losses=losses)
        if self._shared:
            self.run.sum_gradients(self._shared)
        return torch.stack(losses).mean() if losses else None


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch in the form of the user: a tensor, a sequence of arguments, or a mapping of keyword arguments.

    Attributes:
        inputs: Inputs of the model.
        target: Targets.
        microbatches: Number of micro-batches.
    """

    inputs: Any
    target: Any
    microbatches: int

    def __post_init__(self) -> None:
        leaves = tree_leaves((self.inputs, self.target))
        if not all(isinstance(leaf, Tensor) for leaf in leaves if leaf is not None):
            raise InputError(
                "inputs and target of a pipeline must be tensors, or sequences or mappings of them"
            )
        require_equal_microbatches(leaves, self.microbatches)

    def first_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of the model for the first micro-batch."""
        share = tree_map(self._first, self.inputs)
        if isinstance(share, Mapping):
            return (), dict(share)
        return (share,) if isinstance(share, Tensor) else tuple(share), {}

    def first_inputs(self) -> list[Tensor]:
        """Return the inputs of the first layer for the first micro-batch."""
        return tree_leaves(self.first_arguments())  # type: ignore[no-any-return]

    def first_target(self) -> Any:
        """Return the targets of the first micro-batch."""
        return tree_map(self._first, self.target)

    def of_rank(self, run: PipelineRun) -> tuple[list[Tensor], dict[str, Any]]:
        """Return the arguments of `PipelineRun.step` on a rank."""
        first, last = 0 in run.modules, run.schedule.stages - 1 in run.modules
        return tree_leaves(self.inputs) if first else [], {"target": self.target if last else None}

    def _first(self, value: Any) -> Any:
        return first_microbatches(value, 1, self.microbatches)


@dataclass(frozen=True, slots=True)
class _Division:
    """What a rank proposes, or what it refuses.

    Attributes:
        model: Checksum of the names and shapes of the parameters, and of the operations.
        first_layers: First layer of each stage; only the first rank measures it.
        starts: Positions of the layers in the trace.
        meta: Whether the model of the rank has no parameters yet.
        refusal: Why the model cannot be divided.
    """

    model: int
    first_layers: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    meta: bool = False
    refusal: str | None = None


def _divisions(
    model: nn.Module,
    layers: ModelLayers,
    batch: _Batch,
    loss_of: Callable[[Any, Any], Tensor],
    stages: int,
    transport: Transport,
    repeats: int,
) -> list[_Division]:
    """Return what each rank proposes; the first one measures the layers meanwhile."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.named_parameters()]
    division = _Division(zlib.crc32(repr((shapes, layers.operations)).encode()), meta=is_on_meta(model))
    interconnect = measure_interconnect(transport)
    if transport.rank == 0 and division.meta:
        division = replace(division, refusal=_META_FIRST)
    elif transport.rank == 0:
        inputs, target = batch.first_inputs(), batch.first_target()
        try:
            require_layers(layers.count, stages)
            layers.join(inputs)
            costs = measure_layers(layers, inputs, lambda output: loss_of(output, target), repeats=repeats)
            first_layers = divide_layers(costs, stages, interconnect.inside)
            division = replace(division, first_layers=first_layers, starts=layers.starts)
        except InputError as error:
            division = replace(division, refusal=str(error))
    divisions: list[Any] = [None] * transport.ranks
    dist.all_gather_object(divisions, division, group=transport.group)
    return divisions


def _agreed(divisions: Sequence[_Division]) -> _Division:
    """Return the division of the first rank.

    Raises:
        InputError: if it is not possible, or models of ranks differ.
    """
    first = divisions[0]
    if first.refusal is not None:
        raise InputError(first.refusal)
    for rank, division in enumerate(divisions):
        if division.model != first.model:
            raise InputError(
                f"rank {rank} has a model with other parameters or operations than rank 0: call "
                "pipelined_model on all ranks with the same model"
            )
    return first


_META_FIRST = (
    "rank 0 measures the layers of the model, which is on the device meta: make it with its parameters on "
    "rank 0, and on meta on the other ranks only"
)


def _modules(layers: ModelLayers, division: _Division) -> list[nn.Module]:
    """Return the modules of all stages."""
    layers.starts = division.starts
    ends = (*division.first_layers[1:], layers.count)
    return [layers.module(*span) for span in zip(division.first_layers, ends, strict=True)]


def _owners(modules: Sequence[nn.Module], placement: Sequence[int]) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return the ranks that have each parameter, in ascending order.

    Raises:
        InputError: if two stages of a rank share a parameter, whose gradients would be divided twice.
    """
    owners: dict[nn.Parameter, list[int]] = {}
    for module, owner in zip(modules, placement, strict=True):
        for name, parameter in module.named_parameters():
            if owner in owners.setdefault(parameter, []):
                raise InputError(
                    f"two stages of rank {owner} share the parameter {name}: choose a schedule with one "
                    "stage for each rank, such as 1f1b"
                )
            owners[parameter].append(owner)
    return {parameter: tuple(sorted(ranks)) for parameter, ranks in owners.items()}


def _shared(
    owners: Mapping[nn.Parameter, tuple[int, ...]], replaced: Mapping[Tensor, nn.Parameter]
) -> list[SharedParameter]:
    """Return the parameters of several ranks, or those that replace them on this rank."""
    return [
        SharedParameter(replaced.get(parameter, parameter), ranks)
        for parameter, ranks in owners.items()
        if len(ranks) > 1 and parameter.requires_grad
    ]


def _parameters(stages: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(tensor for stage in stages.values() for tensor in stage.parameters()))


def _balanced(plain: PipelineSchedule, costs: PipelineCosts, limit: int | None) -> PipelineSchedule:
    """Return the schedule with evictions if the memory needs them, or if they take about no time.

    Raises:
        InputError: if a rank needs more memory with evictions too.
    """
    schedule, peak = plain, _most_bytes(plain, costs)
    if limit is not None and peak <= limit:
        return plain
    if plain.ranks > 1 and not plain.acceptors:
        for slowdown in SLOWDOWNS if limit is not None else SLOWDOWNS[:1]:
            schedule = balance(plain, costs, slowdown=slowdown)
            peak = _most_bytes(schedule, costs)
            if limit is None or peak <= limit:
                break
    if limit is not None and peak > limit:
        raise InputError(
            f"{plain.name} needs {size_text(peak)} on a rank, also with balanced memory, and "
            f"{size_text(limit)} are available: use more micro-batches of fewer samples, or more ranks"
        )
    return schedule


def _most_bytes(schedule: PipelineSchedule, costs: PipelineCosts) -> int:
    """Return the most bytes that a rank can hold."""
    return max(most_bytes(with_transfers(schedule, costs), costs))
