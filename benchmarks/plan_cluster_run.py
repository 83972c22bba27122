"""A GPT that is trained as a `ClusterPlan` says, by processes of this machine that connect by Gloo.

`run_plan` starts a process for each device of a plan and returns what each of them measured: losses, the peak
of MemTracker, and times of steps.

| part of the plan | by |
|---|---|
| tensor | `parallelize_module` of torch (DTensor); the loss of divided logits by `loss_parallel` |
| pipeline, chunks | `tunebench.training.pipelined` |
| data | an all-reduce of the gradients, which lie in one buffer |
| sharding=optimizer | a reduce-scatter of this buffer, AdamW of a share, an all-gather of the parameters |
| sharding=full | `fully_shard` of torch (FSDP2) |
| recompute | `torch.utils.checkpoint` of layers (full) or of attention's core (selective) |
| states=host | AdamW of copies in memory that is not counted as the device's |
| states=nvme | AdamW of copies in a mapped file of a temporary folder |

All tensors are f32, and there is no dropout, so that steps can be compared. Nothing runs on a GPU. Processes
end with the one that started them; the files of states have no name once they are mapped.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    loss_parallel,
    parallelize_module,
)

from benchmarks.plan_cluster_gpt import (
    DIVISION,
    LEARNING_RATE,
    WEIGHT_DECAY,
    batch_of,
    loss_of,
    stages_of,
)
from benchmarks.plan_pipeline_measured import Tracker
from benchmarks.rank_processes import TIMEOUT_S, run_ranks
from tunebench.training import pipelined
from tunebench.training.cluster import ClusterPlan, TrainingJob
from tunebench.training.schedules import interleaved_1f1b, one_f_one_b

__all__ = ["Measuring", "RankResult", "losses_of", "run_plan"]


# -------------------------------------------------------------------------------------------- optimizer


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Update:
    """AdamW of some tensors, with its states beside them or elsewhere.

    Outside the device are also a copy of the parameters, which is the one that is updated, and the gradients.

    Args:
        owned: Parameters of this process.
        place: Where the states are.
        folder: Folder of files.
    """

    def __init__(self, owned: list[Tensor], place: str, folder: Path) -> None:
        self.owned, self.place, self.folder = owned, place, folder
        self.offloaded = place != "device"
        self.bytes = {"host": 0, "nvme": 0}
        self.copies = [
            nn.Parameter(self._stored(parameter).copy_(parameter) if self.offloaded else parameter.detach())
            for parameter in owned
        ]
        self.adam = torch.optim.AdamW(self.copies, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
        self.states: list[Tensor] = []
        for copy in self.copies:
            first, second = self._stored(copy).zero_(), self._stored(copy).zero_()
            self.adam.state[copy] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
            self.states += [first, second]
        self.gradients = [torch.empty_like(parameter) for parameter in owned] if self.offloaded else []
        self.bytes["host"] += sum(gradient.nbytes for gradient in self.gradients)

    def _stored(self, like: Tensor) -> Tensor:
        """Return memory where the states are; a file loses its name once it is mapped."""
        if self.offloaded:
            self.bytes[self.place] += like.nbytes
        if self.place != "nvme":
            return torch.empty_like(like, requires_grad=False)
        descriptor, name = tempfile.mkstemp(dir=self.folder)
        os.truncate(descriptor, like.nbytes)
        os.close(descriptor)
        mapped = torch.from_file(name, shared=True, size=like.numel(), dtype=like.dtype)
        Path(name).unlink()
        return mapped.view(like.shape)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update the parameters by their gradients."""
        for stored, gradient in zip(self.gradients, gradients, strict=False):
            stored.copy_(gradient)
        for copy, gradient in zip(self.copies, self.gradients or gradients, strict=True):
            copy.grad = gradient
        self.adam.step()
        for copy in self.copies:
            copy.grad = None
        if self.offloaded:
            for parameter, copy in zip(self.owned, self.copies, strict=True):
                parameter.copy_(copy.detach())


class Flat:
    """Parameters and gradients of some modules in one buffer each, padded to equal shares."""

    def __init__(self, modules: Sequence[nn.Module], shares: int) -> None:
        parameters = [parameter for module in modules for parameter in module.parameters()]
        total = sum(_local(parameter.detach()).numel() for parameter in parameters)
        size = -(-total // shares) * shares
        self.values, self.gradients = torch.zeros(size), torch.zeros(size)
        start = 0
        for parameter in parameters:
            local = _local(parameter.detach())
            value = self.values[start : start + local.numel()].view(local.shape)
            gradient = self.gradients[start : start + local.numel()].view(local.shape)
            value.copy_(local)
            if isinstance(parameter, DTensor):
                parameter._local_tensor = value
                parameter.grad = DTensor.from_local(
                    gradient, parameter.device_mesh, parameter.placements, run_check=False
                )
            else:
                parameter.data = value
                parameter.grad = gradient
            start += local.numel()


# ------------------------------------------------------------------------------------------------ a rank


class Rank:
    """The share of a plan that this process runs.

    Args:
        job: The network and its batch.
        plan: The plan.
        folder: Folder of files of states.
    """

    def __init__(self, job: TrainingJob, plan: ClusterPlan, folder: Path) -> None:
        self.job, self.plan = job, plan
        shape = (plan.pipeline, plan.data, plan.tensor)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data", "tensor"))
        self.stage, self.copy, _ = self.mesh.get_coordinate()
        self.data = self.mesh["data"].get_group()
        self.count = plan.microbatches(job.batch)
        self.schedule = (
            interleaved_1f1b(plan.pipeline, self.count, plan.chunks)
            if plan.chunks > 1
            else one_f_one_b(plan.pipeline, self.count)
        )
        parts = stages_of(job, plan, self.schedule.stages)
        own_stages = [index for index, rank in enumerate(self.schedule.placement) if rank == self.stage]
        self.modules = {index: self._divided(parts[index]) for index in own_stages}
        self.first, self.last = 0 in own_stages, self.schedule.stages - 1 in own_stages
        self.flat = None
        if plan.sharding == "full":
            owned = [_local(parameter.detach()) for parameter in self.modules[0].parameters()]
        else:
            shares = plan.data if plan.sharding == "optimizer" else 1
            self.flat = Flat(list(self.modules.values()), shares)
            owned = [self._share(self.flat.values)]
        self.update = Update(owned, plan.states, folder)
        self.run = None
        if plan.pipeline > 1:
            group = self.mesh["pipeline"].get_group()
            self.run = pipelined(
                self.modules, self.schedule, loss_fn=self._loss, group=group, timeout_s=TIMEOUT_S
            )

    def _divided(self, module: nn.Sequential) -> nn.Sequential:
        if self.plan.tensor > 1:
            for part in module:
                names = dict(part.named_modules())
                chosen = {name: make() for name, make in DIVISION.items() if name in names}
                parallelize_module(part, self.mesh["tensor"], chosen)
        if self.plan.sharding == "full":
            for part in module:
                fully_shard(part, mesh=self.mesh["data"])
            fully_shard(module, mesh=self.mesh["data"])
        return module

    def _share(self, buffer: Tensor) -> Tensor:
        """Return the part of a buffer that this process updates."""
        if self.plan.sharding == "none":
            return buffer
        return buffer.chunk(self.plan.data)[self.copy]

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.plan.tensor > 1:
            logits = DTensor.from_local(logits, self.mesh["tensor"], [Shard(-1)], run_check=False)
            return _local(loss_of(logits, target))
        return loss_of(logits, target)

    def step(self, words: Tensor, target: Tensor) -> float:
        """Run a step with the sequences of this copy; return their loss, 0 on ranks without it."""
        losses, gradients = self._summed(words, target)
        self._updated(gradients)
        return sum(loss.item() for loss in losses) / self.count if losses else 0.0

    def _summed(self, words: Tensor, target: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return losses of the micro-batches, and the gradients of what this process updates."""
        with loss_parallel() if self.plan.tensor > 1 else contextlib.nullcontext():
            losses = self._passes(words, target)
        if self.flat is None:
            return losses, [_local(parameter.grad) for parameter in self.modules[0].parameters()]
        gradients = self.flat.gradients
        shard = self._share(gradients)
        if self.plan.sharding == "optimizer":
            shard = torch.empty_like(shard)
            dist.reduce_scatter(shard, list(gradients.chunk(self.plan.data)), group=self.data)
        elif self.plan.data > 1:
            dist.all_reduce(gradients, group=self.data)
        shard.div_(self.plan.data)
        return losses, [shard]

    def _passes(self, words: Tensor, target: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        if self.run is not None:
            self.run.step(
                *[words] * self.first,
                target=target if self.last else None,
                losses=losses if self.last else None,
                return_outputs=False,
            )
            return losses
        for x, y in zip(words.chunk(self.count), target.chunk(self.count), strict=True):
            loss = self._loss(self.modules[0](x), y)
            (loss / self.count).backward()
            losses.append(loss.detach())
        return losses

    def _updated(self, gradients: list[Tensor]) -> None:
        """Update the parameters of all copies, and clear the gradients."""
        self.update.step(gradients)
        if self.flat is None:
            self.modules[0].zero_grad()
            return
        if self.plan.sharding == "optimizer":
            values = self.flat.values
            dist.all_gather(list(values.chunk(self.plan.data)), self._share(values).clone(), group=self.data)
        self.flat.gradients.zero_()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the sequences of this copy, and the word that follows each."""
        words, target = (part.chunk(self.plan.data)[self.copy] for part in batch_of(self.job, step))
        return words, target

    def tracked_peak(self, step: int) -> int:
        """Return the most bytes of tensors in a step by MemTracker, without those outside the device."""
        tracker = Tracker()
        offloaded = self.update.offloaded
        tracker.track_external(*self.modules.values())
        if self.flat is not None:
            tracker.track_external(self.flat.values, self.flat.gradients)
        if not offloaded:
            tracker.track_external(*self.update.states)
        batch = self.batch(step)
        with tracker:
            _, gradients = self._summed(*batch)
            if not offloaded:
                self._updated(gradients)
        if offloaded:  # the host updates; MemTracker cannot tell its memory from that of a device
            self._updated(gradients)
        return int(sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What a process measured.

    Attributes:
        stage: Its rank in the pipeline.
        losses: Loss of each step on its sequences; zeros on ranks without the last stage.
        peak_bytes: Peak of a step by MemTracker; 0 if it was not measured.
        host_bytes: Bytes in host memory.
        nvme_bytes: Bytes in files.
        spans: Start and end of each timed step, in seconds of the monotonic clock.
        processor_s: Processor seconds of each timed step, of all threads of the process.
    """

    stage: int
    losses: list[float]
    peak_bytes: int
    host_bytes: int
    nvme_bytes: int
    spans: list[tuple[float, float]]
    processor_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """What the processes of a plan measure.

    Attributes:
        steps: Steps whose losses are kept.
        memory: Whether one further step runs under MemTracker.
        timed: Further steps that are timed.
    """

    steps: int = 3
    memory: bool = False
    timed: int = 0


def _measured(job: TrainingJob, plan: ClusterPlan, measuring: Measuring, folder: Path) -> RankResult:
    rank = Rank(job, plan, folder)
    losses = [rank.step(*rank.batch(step)) for step in range(measuring.steps)]
    peak = rank.tracked_peak(measuring.steps) if measuring.memory else 0
    spans, processor_s = [], []
    for step in range(measuring.timed):
        batch = rank.batch(step)
        dist.barrier()
        began, worked = time.monotonic(), time.process_time()
        rank.step(*batch)
        spans.append((began, time.monotonic()))
        processor_s.append(time.process_time() - worked)
    return RankResult(
        stage=rank.stage,
        losses=losses,
        peak_bytes=peak,
        host_bytes=rank.update.bytes["host"],
        nvme_bytes=rank.update.bytes["nvme"],
        spans=spans,
        processor_s=processor_s,
    )


def run_plan(job: TrainingJob, plan: ClusterPlan, measuring: Measuring) -> list[RankResult]:
    """Run steps of a plan in a process for each of its devices.

    Args:
        job: A GPT-2 without dropout, in f32.
        plan: A plan without sequence parallelism.
        measuring: What to measure.

    Raises:
        InputError: if the network or the plan cannot be run.
        RunFailed: if a process ends without a result.
    """
    stages_of(job, plan, 1)  # refuses what cannot be run before processes start
    results = run_ranks(plan.devices, lambda folder: asdict(_measured(job, plan, measuring, folder)))
    return [RankResult(**result) for result in results]


def losses_of(results: Sequence[RankResult], plan: ClusterPlan) -> list[float]:
    """Return the loss of each step: the mean over the copies."""
    last = [result.losses for result in results if result.stage == plan.pipeline - 1]
    return [sum(losses) / len(losses) for losses in zip(*last, strict=True)]
