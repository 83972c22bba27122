"""Costs of the stages of a pipeline and of its links, measured in the processes that run them.

Passes are timed while no other rank computes: micro-batches go through all stages one after the other. Memory
is counted by the storages of tensors, so that workspaces within operations are not known.
"""

from __future__ import annotations

import socket
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tunebench.errors import InputError
from tunebench.training.fitting.operation_time import ThreadClock
from tunebench.training.fitting.optimizer_state import state_bytes
from tunebench.training.pipeline.transfers import with_transfers
from tunebench.training.pipeline_runtime.runtime import PipelineRun
from tunebench.training.pipeline_runtime.saved_activations import storages_of
from tunebench.training.pipeline_runtime.stage import Stage, is_sharded
from tunebench.training.pipeline_runtime.transfer import Transport
from tunebench.training.schedules import (
    ActionKind,
    Interconnect,
    LinearTransfer,
    PipelineAction,
    PipelineCosts,
    PipelineSchedule,
    StageCosts,
    simulate_pipeline,
)

__all__ = ["NewBytes", "first_microbatches", "measure_interconnect", "measure_pipeline"]

K = ActionKind
_FULL, _SPLIT = (K.BACKWARD,), (K.INPUT_GRADIENT, K.WEIGHT_GRADIENT)
SMALL_BYTES, LARGE_BYTES = 1 << 8, 1 << 22
EXCHANGES = 12
"""Messages there and back of which the median counts."""


def measure_pipeline(
    run: PipelineRun,
    *args: Any,
    target: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    repeats: int = 5,
    **kwargs: Any,
) -> PipelineCosts:
    """Return the costs of a pipeline's stages and links, for plans and simulations. Call it on all ranks.

    Gradients of the stages are cleared. The static bytes of a stage are parameters, buffers, gradients and
    optimizer states, and for one stage of each rank also the most that a pass needs besides activations.

    Args:
        run: What `pipeline` returned.
        args: Inputs of the batch, as of `PipelineRun.step`.
        target: Targets of the batch, as of `PipelineRun.step`.
        optimizer: Optimizer of this rank, whose states are counted.
        repeats: Micro-batches to time; the median counts.
        kwargs: Keyword arguments, as of `PipelineRun.step`.

    Raises:
        InputError: if there are no repeats, the batch does not fit the schedule, or stages are sharded.
        RankFailed: if a rank fails.
    """
    if repeats < 1:
        raise InputError(f"expected at least one repeat, got {repeats}")
    for stage in run._stages:
        if is_sharded(stage.submod):
            raise InputError(
                f"stage {stage.stage_index} is sharded by fully_shard, whose gathered parameters are not "
                "measured: measure the stages before they are sharded"
            )
    run._check_step(args, kwargs, target)
    share = (repeats + 1, run.schedule.microbatches)
    repeated = [
        tree_map(lambda tensor: first_microbatches(tensor, *share), batch) for batch in (args, kwargs, target)
    ]
    once = [
        tree_map(lambda tensor: first_microbatches(tensor, 1, share[1]), batch)
        for batch in (args, kwargs, target)
    ]
    times: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for kinds in (_FULL, _SPLIT) if run.schedule.trains else ((),):
        single_rank_run = _alone(run, repeats + 1, kinds)
        single_rank_run.observer = lambda action: _timed(action, times)
        _step(single_rank_run, repeated)
    single = _alone(run, 1, _FULL if run.schedule.trains else ())
    stages, peak_bytes = _memory_of(single, once)
    for stage in run._stages:
        stage.submod.zero_grad(set_to_none=True)
    if optimizer is not None:
        first = min(stages)
        static_bytes = stages[first].static_bytes + state_bytes(optimizer)
        stages[first] = replace(stages[first], static_bytes=static_bytes)
    measured = {index: _with_times(stages[index], index, times) for index in stages}
    gathered: list[Any] = [None] * run.schedule.ranks
    dist.all_gather_object(gathered, (measured, peak_bytes), group=run._transport.group)
    stage_costs = {index: costs for rank_costs, _ in gathered for index, costs in rank_costs.items()}
    costs = PipelineCosts(
        stages=tuple(stage_costs[index] for index in range(run.schedule.stages)),
        interconnect=measure_interconnect(run._transport),
    )
    return _with_work(costs, single.schedule, [peak for _, peak in gathered])


def measure_interconnect(transport: Transport) -> Interconnect:
    """Return latency and bandwidth of messages inside and between nodes. Call it on all ranks.

    Args:
        transport: Messages of a process group.
    """
    names: list[Any] = [None] * transport.ranks
    dist.all_gather_object(names, socket.gethostname(), group=transport.group)
    nodes = tuple(names.index(name) for name in names)
    pairs = [(first, second) for second in range(transport.ranks) for first in range(second)]
    measured: list[LinearTransfer | None] = []
    for crosses in (False, True):
        endpoints = next((pair for pair in pairs if (nodes[pair[0]] != nodes[pair[1]]) == crosses), None)
        measured.append(_measured_link(transport, *endpoints) if endpoints else None)
    links = [link for link in measured if link is not None] or [LinearTransfer(bytes_per_us=1e6)]
    inside, between = (link or links[0] for link in measured)
    return Interconnect(nodes=nodes, inside=inside, between=between)


def _measured_link(transport: Transport, first: int, second: int) -> LinearTransfer:
    """Return latency and bandwidth of messages between two ranks, on all ranks."""
    links: list[Any] = [None]
    if transport.rank in (first, second):
        peer = second if transport.rank == first else first
        small_us, large_us = (
            _one_way_us(transport, peer, nbytes, begins=transport.rank == first)
            for nbytes in (SMALL_BYTES, LARGE_BYTES)
        )
        rate = (LARGE_BYTES - SMALL_BYTES) / max(1e-3, large_us - small_us)
        links = [LinearTransfer(bytes_per_us=rate, latency_us=small_us)]
    dist.broadcast_object_list(links, group=transport.group, group_src=first)
    link: LinearTransfer = links[0]
    return link


def _one_way_us(transport: Transport, peer: int, nbytes: int, *, begins: bool) -> float:
    """Return half of the time of a message there and back."""
    message = torch.zeros(nbytes, dtype=torch.uint8, device=transport.device)
    times = []
    for _ in range(EXCHANGES):
        answer = transport.receive([torch.empty_like(message)], peer, _TAG)
        began = time.perf_counter()
        if not begins:
            answer.wait(transport.timeout)
        transport.send([message], peer, _TAG).wait(transport.timeout)
        if begins:
            answer.wait(transport.timeout)
        _synchronize(message.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / 2 * 1e6


_TAG = 1
"""Tag of these messages: no step runs meanwhile."""


def _alone(run: PipelineRun, microbatches: int, backward: Sequence[ActionKind]) -> PipelineRun:
    """Return the same stages in a schedule in which one rank computes at a time."""
    placement = run.schedule.placement
    actions: list[list[PipelineAction]] = [[] for _ in range(run.schedule.ranks)]
    for microbatch in range(microbatches):
        for stage, rank in enumerate(placement):
            actions[rank].append(PipelineAction(stage, K.FORWARD, microbatch))
        for stage, rank in reversed(list(enumerate(placement))):
            actions[rank] += [PipelineAction(stage, kind, microbatch) for kind in backward]
    schedule = PipelineSchedule(
        name="one rank at a time",
        microbatches=microbatches,
        placement=placement,
        actions=tuple(map(tuple, actions)),
    )
    stages = [
        Stage(
            run_stage.submod, run_stage.stage_index, run_stage.num_stages, run_stage.device, run_stage.group
        )
        for run_stage in run._stages
    ]
    return PipelineRun(
        stages,
        with_transfers(schedule, PipelineCosts.uniform(schedule.stages)),
        loss_fn=run._loss_fn,
        timeout_s=run.timeout_s,
        scale_grads=False,
    )


def _step(run: PipelineRun, batch: Sequence[Any]) -> None:
    args, kwargs, target = batch
    run.step(*args, target=target, return_outputs=False, **kwargs)


def first_microbatches(value: Any, count: int, microbatches: int) -> Any:
    """Return the first micro-batches of a tensor, again from its start if it has fewer.

    Args:
        value: The tensor of a whole batch; other values are returned as they are.
        count: Micro-batches to return.
        microbatches: Micro-batches of the whole batch.
    """
    if not isinstance(value, Tensor):
        return value
    chunks = value.chunk(microbatches)
    return torch.cat([chunks[index % len(chunks)] for index in range(count)])


# ------------------------------------------------------------------------------------------------- time


@contextmanager
def _timed(action: PipelineAction, times: dict[tuple[int, ActionKind], list[float]]) -> Iterator[None]:
    """Add the time of a pass in microseconds, unless it is the first of its kind."""
    on_gpu = torch.cuda.is_available()
    clock = ThreadClock()
    if on_gpu:
        torch.cuda.synchronize()
    began_s = clock.now_s()
    yield
    if on_gpu:
        torch.cuda.synchronize()
    if action.microbatch > 0:
        times[action.stage, action.kind].append((clock.now_s() - began_s) * 1e6)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _with_times(
    costs: StageCosts, stage: int, times: dict[tuple[int, ActionKind], list[float]]
) -> StageCosts:
    """Return the costs of a stage with the median times of its passes."""

    def median(kind: ActionKind) -> float:
        return statistics.median(times[stage, kind] or [0.0])

    return replace(
        costs,
        forward_us=median(K.FORWARD),
        backward_us=median(K.BACKWARD),
        input_gradient_us=median(K.INPUT_GRADIENT),
        weight_gradient_us=median(K.WEIGHT_GRADIENT),
    )


# ----------------------------------------------------------------------------------------------- memory


def _memory_of(run: PipelineRun, batch: Sequence[Any]) -> tuple[dict[int, StageCosts], int]:
    """Return the memory of the stages of this rank, and the most bytes that a micro-batch adds to it."""
    tracker, before, after = _tracked(run, batch)
    retained: dict[int, int] = {}
    if run.schedule.trains:
        _, before_split, after_split = _tracked(_alone(run, 1, _SPLIT), batch)
        for stage in run._own:
            ended = after_split[PipelineAction(stage, K.INPUT_GRADIENT, 0)]
            retained[stage] = max(0, ended - before_split[PipelineAction(stage, K.FORWARD, 0)])
    costs = {}
    for stage in run._stages:
        index, meta = stage.stage_index, stage._stage_meta
        evict_bytes = activation_bytes = sum(stage.evicted_bytes)
        if stage.is_last:  # with the loss
            received_bytes = 0 if stage.is_first else _nbytes(meta.inputs)
            forward = PipelineAction(index, K.FORWARD, 0)
            activation_bytes = max(evict_bytes, after[forward] - before[forward] + received_bytes)
        parameters = [parameter for parameter in stage.submod.parameters() if parameter.requires_grad]
        gradient_bytes = sum(parameter.nbytes for parameter in parameters) if run.schedule.trains else 0
        state = (*stage.submod.parameters(), *stage.submod.buffers())
        costs[index] = StageCosts(
            forward_us=0.0,
            input_gradient_us=0.0,
            weight_gradient_us=0.0,
            activation_bytes=activation_bytes,
            retained_bytes=retained.get(index),
            send_bytes=0 if stage.is_last else _nbytes(meta.outputs),
            evict_bytes=evict_bytes,
            static_bytes=sum(tensor.nbytes for tensor in state) + gradient_bytes,
        )
    return costs, tracker.peak_bytes


def _tracked(
    run: PipelineRun, batch: Sequence[Any]
) -> tuple[NewBytes, dict[PipelineAction, int], dict[PipelineAction, int]]:
    """Return the new bytes of a step, and those before and after each of its actions."""
    _step(run, batch)  # gradients exist from now on
    model_tensors = [
        tensor for stage in run._stages for tensor in (*stage.submod.parameters(), *stage.submod.buffers())
    ]
    gradients = [parameter.grad for parameter in model_tensors if parameter.grad is not None]
    tracker = NewBytes([*model_tensors, *gradients, *tree_leaves(batch)])
    before: dict[PipelineAction, int] = {}
    after: dict[PipelineAction, int] = {}

    @contextmanager
    def observed(action: PipelineAction) -> Iterator[None]:
        before[action] = tracker.nbytes
        yield
        after[action] = tracker.nbytes

    run.observer = observed
    with tracker:
        _step(run, batch)
    return tracker, before, after


def _with_work(costs: PipelineCosts, schedule: PipelineSchedule, peaks: Sequence[int]) -> PipelineCosts:
    """Return costs with the memory that passes need besides activations, on one stage of each rank.

    Args:
        costs: Costs of the stages.
        schedule: The schedule of one micro-batch.
        peaks: Most bytes of each rank besides static ones in this schedule.
    """
    simulated = simulate_pipeline(schedule, costs).peak_bytes
    static = costs.static_bytes(schedule.placement)
    stages = list(costs.stages)
    for rank, peak in enumerate(peaks):
        work_bytes = max(0, peak - (simulated[rank] - static[rank]))
        index = schedule.placement.index(rank)
        stages[index] = replace(stages[index], static_bytes=stages[index].static_bytes + work_bytes)
    return replace(costs, stages=tuple(stages))


class NewBytes(TorchDispatchMode):  # type: ignore[misc]
    """Counts the storages that operations make.

    Args:
        known: Tensors that exist already.

    Attributes:
        nbytes: Bytes of new storages that exist now.
        peak_bytes: Most of them at any time.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self.nbytes = self.peak_bytes = 0
        self._known = set(storages_of(tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                (identity,), storage = storages_of([leaf]), leaf.untyped_storage()
                if identity not in self._known:
                    self._known.add(identity)
                    self._change(storage.nbytes())
                    weakref.finalize(storage, self._forget, identity, storage.nbytes())
        return result

    def _forget(self, identity: int, nbytes: int) -> None:
        self._known.discard(identity)
        self._change(-nbytes)

    def _change(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)


def _nbytes(metas: Sequence[Any]) -> int:
    """Return the bytes of tensors that are described."""
    return sum(meta.shape.numel() * meta.dtype.itemsize for meta in metas)
