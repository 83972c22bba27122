"""Data parallelism of any PyTorch module, sharded or not: `plan_module`.

The module returns its loss. Its step is traced at two micro-batches, without computing it. Times are
predicted for each operation of eager PyTorch, and memory follows from the lifetimes of tensors in the caching
allocator. Other micro-batches are on the line through both, and the step of the best plan is traced itself.

Each device has a replica of the module (DistributedDataParallel). Replicas may shard the states of the
optimizer (ZeRO-1), or also parameters and gradients (FSDP2), which are gathered and reduced block by block. A
block is an element of a list of modules, or a child of the module. There are few plans, so all are predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from tunebench.errors import InputError
from tunebench.forecast.network import HOST_US, attention_of, predict_operations
from tunebench.optimizer import find_optimizer
from tunebench.training.cluster.copies import CopiesAnswer, PricedCopies
from tunebench.training.cluster.device_memory import CONTEXT_BYTES, WORKSPACE_BYTES, communicator_bytes
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.interconnect.cluster import ProcessGroup
from tunebench.training.interconnect.collective import Collective, collective_us
from tunebench.training.memory import TrainingStep, device_use, step_at, unplanned
from tunebench.training.steps.gradient import BucketExchange
from tunebench.training.steps.layer_stream import DEPTH, LayerWork, stream_us
from tunebench.training.steps.overlap import occupied_sms
from tunebench.training.steps.parallelism import Sharding
from tunebench.workloads.networks import NetworkRun
from tunebench.workloads.networks.network_run import DType, Optimizer
from tunebench.workloads.networks.tape import Tape

if TYPE_CHECKING:
    from tunebench.training.fitting.model_plan import ModelProfiler

__all__ = ["ModuleJob", "block_name", "plan_module"]

SLICES = 64
"""Equal parts of the backward pass by which gradients become available."""

SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleJob:
    """A module to train.

    Attributes:
        profiler: Traces its step at any micro-batch; without states of an optimizer.
        batch: Samples in a step, of all devices together.
        optimizer: Optimizer.
    """

    profiler: ModelProfiler
    batch: int
    optimizer: Optimizer = "adamw"

    def __post_init__(self) -> None:
        find_optimizer(self.optimizer)
        if self.batch < 1:
            raise InputError(f"batch must be at least 1, got {self.batch}")
        if self.profiler.batch is None:
            raise InputError("all inputs need the same first extent: the batch of a device")


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of the module: its parameters in bytes, and the time of its operations."""

    parameter_bytes: int
    forward_us: float
    backward_us: float


def plan_module(
    job: ModuleJob, machine: TrainingCluster, *, watcher: Callable[[str], None] = lambda message: None
) -> CopiesAnswer:
    """Return the plans to train a module by data parallelism on all devices, fastest first.

    Args:
        job: The module and its batch.
        machine: The cluster.
        watcher: Receives the phase.

    Raises:
        InputError: if the devices do not divide the batch, or the module cannot be traced.
    """
    return _ModuleSearch(job, machine, watcher).run()


class _ModuleSearch:
    def __init__(self, job: ModuleJob, machine: TrainingCluster, watcher: Callable[[str], None]) -> None:
        self.job, self.machine, self.watcher = job, machine, watcher
        assert job.profiler.batch is not None
        per_device, rest = divmod(job.batch, machine.devices)
        if rest or not per_device:
            raise InputError(
                f"a batch of {job.batch} cannot be divided among {machine.devices} devices: expected a "
                "multiple"
            )
        self.per_device, self.start = per_device, job.profiler.batch
        self.group = machine.links.group(machine.devices)
        self.parameter_bytes = sum(nbytes for _, nbytes in job.profiler.parameters)
        self.first, self.second = self._traced(self.start), self._traced(2 * self.start)
        self._update_us = {shards: self._optimizer_us(shards) for shards in {1, machine.devices}}

    def run(self) -> CopiesAnswer:
        sizes = [size for size in range(1, self.per_device + 1) if self.per_device % size == 0]
        shardings = SHARDINGS if self.machine.devices > 1 else SHARDINGS[:1]
        plans: list[PricedCopies] = []
        least = too_large = 0
        for size in sizes:
            step = self._estimated(size)
            priced = [self._priced(step, size, sharding) for sharding in shardings]
            least = least or min(plan.memory_bytes for plan in priced)
            plans += [plan for plan in priced if plan.memory_bytes <= self.machine.limit_bytes]
            too_large += sum(plan.memory_bytes > self.machine.limit_bytes for plan in priced)
        plans, dropped = self._exact(sorted(plans, key=lambda plan: plan.step_us))
        return CopiesAnswer(
            name=self.job.profiler.name,
            batch=self.job.batch,
            stack="eager",
            dtype=self.job.profiler.dtype,
            machine=self.machine,
            plans=tuple(plans),
            too_large=too_large + dropped,
            missing_bytes=0 if plans else max(0, least - self.machine.limit_bytes),
        )

    def _exact(self, plans: list[PricedCopies]) -> tuple[list[PricedCopies], int]:
        """Return the plans with the first one traced, and how many do not fit then."""
        # Interpolated times may be wrong where kernels change. Trace the winner, sort again, and stop when
        # the winner is a traced one: every round traces another size, so the loop ends.
        traced, dropped = {self.start, 2 * self.start}, 0
        while plans and plans[0].microbatch not in traced:
            size = plans[0].microbatch
            traced.add(size)
            step = self._traced(size)
            repriced = [
                self._priced(step, size, plan.sharding) if plan.microbatch == size else plan for plan in plans
            ]
            fitting = [plan for plan in repriced if plan.memory_bytes <= self.machine.limit_bytes]
            dropped += len(repriced) - len(fitting)
            plans = sorted(fitting, key=lambda plan: plan.step_us)
        return plans, dropped

    def _traced(self, size: int) -> TrainingStep:
        self.watcher(f"tracing a micro-batch of {size}")
        return self.job.profiler.profile(size).step

    def _estimated(self, size: int) -> TrainingStep:
        step = step_at(self.first, self.second, size / self.start - 1)
        return step if step is not None else self._traced(size)

    # -- memory --------------------------------------------------------------------------------------------

    def _memory(self, step: TrainingStep, sharding: Sharding, accumulates: bool) -> dict[str, int]:
        """Return the memory of each device by kind, in bytes."""
        devices, parameter_bytes = self.machine.devices, self.parameter_bytes
        divides = accumulates or sharding == "full"
        # Gradients that are added to others, or divided, leave the step as soon as they are there.
        peak = self._peak_bytes(replace(step, results=()) if divides else step)
        share = devices if sharding == "full" else 1
        buckets = parameter_bytes if sharding != "full" and devices > 1 else 0
        # Gathered parameters of the block that runs, and of the next one.
        gathered = DEPTH * max(block.parameter_bytes for block in self._blocks(step))
        shards = 1 if sharding == "none" else devices
        return {
            "parameters": -(-parameter_bytes // share) + (gathered if sharding == "full" else 0),
            "gradients": (-(-parameter_bytes // share) if divides else 0) + buckets,
            "optimizer": round(self._state_bytes_per_byte * -(-parameter_bytes // shards)),
            "activations": max(0, peak - parameter_bytes),
            "context": CONTEXT_BYTES,
            "workspace": WORKSPACE_BYTES,
            "nccl": communicator_bytes(devices, self.machine.channels),
        }

    @property
    def _state_bytes_per_byte(self) -> float:
        """Bytes of the optimizer's states for each byte of parameters."""
        number_bytes = self.parameter_bytes / max(1, int(self.job.profiler.elements))
        return float(find_optimizer(self.job.optimizer).state_bytes(number_bytes) / number_bytes)

    def _peak_bytes(self, step: TrainingStep) -> int:
        use = device_use(step, unplanned(step), self.machine.device, 2**62)
        return use.allocator.reserved_bytes if use.allocator else use.simulation.peak_bytes

    # -- time ----------------------------------------------------------------------------------------------

    def _priced(self, step: TrainingStep, size: int, sharding: Sharding) -> PricedCopies:
        count = self.per_device // size
        memory = self._memory(step, sharding, count > 1)
        blocks = self._blocks(step)
        forward_us = sum(block.forward_us for block in blocks)
        backward_us = sum(block.backward_us for block in blocks)
        if count > 1:
            backward_us += self._accumulation_us
        waits_us = self._waits_us(step, blocks, (forward_us, backward_us), sharding, count)
        update_us = self._update_us[1 if sharding == "none" else self.machine.devices]
        step_us = count * (forward_us + backward_us) + waits_us + update_us
        price = self.machine.price_per_hour
        return PricedCopies(
            microbatch=size,
            microbatches=count,
            sharding=sharding,
            step_us=step_us,
            samples_per_s=self.job.batch / step_us * 1e6,
            communication_us=waits_us,
            memory=memory,
            cost=None if price is None else price * self.machine.devices * step_us / 3.6e9,
        )

    def _waits_us(
        self,
        step: TrainingStep,
        blocks: Sequence[_Block],
        passes_us: tuple[float, float],
        sharding: Sharding,
        count: int,
    ) -> float:
        """Return the exposed communication of a step."""
        if self.machine.devices == 1:
            return 0.0
        if sharding == "full":
            return count * self._streamed_us(blocks)
        sizes = self._gradient_bytes(step)
        exchange = BucketExchange(groups=(self.group,), occupied=self._occupied(self.group))
        if sharding == "none":
            return exchange.exposed_us("all-reduce", (sizes,), passes_us[1])
        scattered_us = exchange.exposed_us("reduce-scatter", (sizes,), passes_us[1])
        return scattered_us + exchange.total_us("all-gather", (sizes,))

    def _streamed_us(self, blocks: Sequence[_Block]) -> float:
        """Return what gathers of parameters and reductions of gradients expose in both passes."""

        def us(collective: Collective, block: _Block) -> float:
            return float(collective_us(collective, block.parameter_bytes, self.group))

        gathers = [(("network", us("all-gather", block)),) for block in blocks]
        scatters = [(("network", us("reduce-scatter", block)),) for block in blocks]
        forward = [LayerWork(block.forward_us, gather) for block, gather in zip(blocks, gathers, strict=True)]
        backward = [
            LayerWork(block.backward_us, gather, scatter)
            for block, gather, scatter in zip(blocks, gathers, scatters, strict=True)
        ][::-1]
        computed_us = sum(block.forward_us + block.backward_us for block in blocks)
        exposed_us = stream_us(forward) + stream_us(backward) - computed_us
        moved_us = sum(us for chain in (*gathers, *gathers, *scatters) for _, us in chain)
        # Hidden communication is not free: it takes SMs from the kernels beside it.
        return exposed_us + self._occupied(self.group) * max(0.0, moved_us - exposed_us)

    def _occupied(self, group: ProcessGroup) -> float:
        return occupied_sms(group) / self.machine.device.sm_count

    def _gradient_bytes(self, step: TrainingStep) -> list[int]:
        """Return the bytes of gradients that become available in each part of the backward pass."""
        boundary, results = self._boundary, set(step.results)
        backward = step.operations[boundary:]
        total_us = sum(operation.time_us for operation in backward) or 1.0
        sizes, now_us = [0] * SLICES, 0.0
        for operation in backward:
            now_us += operation.time_us
            slice_index = min(SLICES - 1, int(SLICES * now_us / total_us))
            sizes[slice_index] += sum(
                step.tensors[index].size_bytes for index in set(operation.outputs) & results
            )
        return sizes

    def _blocks(self, step: TrainingStep) -> list[_Block]:
        """Return the blocks in the order of the forward pass; times are at least those of their launches."""
        profile = self.job.profiler.profile(self.start)
        names = [block_name(layer) for layer in profile.layers]
        # If launches take longer than kernels, the device waits between all of them: scale every operation
        # alike.
        stretch = max(1.0, HOST_US * len(step.operations) / (step.compute_us or 1.0))
        times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for index, (name, operation) in enumerate(zip(names, step.operations, strict=True)):
            times[name][index >= self._boundary] += stretch * operation.time_us
        parameter_bytes: dict[str, int] = defaultdict(int)
        for parameter, nbytes in self.job.profiler.parameters:
            parameter_bytes[block_name(parameter.rpartition(".")[0])] += nbytes
        return [
            _Block(parameter_bytes[name], *times[name]) for name in dict.fromkeys((*names, *parameter_bytes))
        ]

    @property
    def _boundary(self) -> int:
        return self.job.profiler.profile(self.start).forward

    # -- parameters ----------------------------------------------------------------------------------------

    @property
    def _accumulation_us(self) -> float:
        tape = self._tape()
        tape.accumulated(self.job.profiler.elements, len(self.job.profiler.parameters))
        return self._predicted_us(tape)

    def _optimizer_us(self, shards: int) -> float:
        tape = self._tape()
        tape.updated(-(-self.job.profiler.elements // shards))
        return self._predicted_us(tape)

    def _tape(self) -> Tape:
        dtype = cast("DType", self.job.profiler.dtype)
        run = NetworkRun(mode="train", dtype=dtype, optimizer=self.job.optimizer, accumulate=True)
        return Tape(run)

    def _predicted_us(self, tape: Tape) -> float:
        device = self.machine.device
        times = predict_operations(tape.operations, device, attention=attention_of(tape.run, device))
        return sum(max(timed.time_us, HOST_US * timed.operation.count) for timed in times)


def block_name(module: str) -> str:
    """Return the block of a module's path: up to the first number in it, or its first part."""
    parts = module.split(".")
    return ".".join(_until_number(parts)) if any(map(str.isdigit, parts)) else parts[0]


def _until_number(parts: Sequence[str]) -> Iterable[str]:
    for part in parts:
        yield part
        if part.isdigit():
            return
