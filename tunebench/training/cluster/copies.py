"""Data parallelism of residual networks, in eager or compiled PyTorch: `plan_copies`.

Each device has a replica of the network (DistributedDataParallel), and a plan is a size of micro-batches.
There are few plans, so that all are predicted by `predict_step`, and the best one is optimal for the model of
time and memory.

Memory under autocast: four bytes per parameter, per gradient, per element of a gradient bucket, and per state
of the optimizer; two bytes per parameter for the copy that autocast makes; and the activations that autograd
saves (`ResNet.saved_elements`). In f32 there is no copy. Compiled networks save less than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunebench._dataframe import Tabular, columns_of
from tunebench._figure import duration, significant
from tunebench._notebook import html_grid
from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.optimizer import find_optimizer
from tunebench.stack import Kernels
from tunebench.training.cluster.device_memory import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    SEPARATE,
    WORKSPACE_BYTES,
    communicator_bytes,
)
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.memory.budget import size_text
from tunebench.training.steps.parallelism import Sharding
from tunebench.training.steps.step import Parallelism, predict_step
from tunebench.workloads.networks import Network, NetworkRun
from tunebench.workloads.networks.network_run import DType, Optimizer
from tunebench.workloads.networks.resnet import ResNet

__all__ = ["CopiesAnswer", "CopiesJob", "PricedCopies", "plan_copies"]

POSITION_BYTES = 8
"""Bytes of the position of a largest element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesJob:
    """A residual network to train by data parallelism.

    Attributes:
        network: The network.
        batch: Images in a step, of all devices together.
        dtype: Dtype of activations: f16 or bf16 under autocast, or f32.
        stack: Kernels: eager or compiled PyTorch.
        optimizer: Optimizer.
    """

    network: Network
    batch: int
    dtype: DType = "bf16"
    stack: Kernels = "eager"
    optimizer: Optimizer = "adamw"

    def __post_init__(self) -> None:
        if not isinstance(self.network, ResNet):
            raise InputError(
                f"activations of {self.network.name} are not known: expected a transformer with the layers "
                "of gpt2 or llama, or a residual network such as resnet50"
            )
        find_optimizer(self.optimizer)
        if self.batch < 1:
            raise InputError(f"batch must be at least 1, got {self.batch}")
        if self.stack not in ("eager", "compiled"):
            raise InputError(
                f"{self.network.name} runs in eager or compiled PyTorch, got the stack {self.stack}"
            )

    def memory_bytes(self, microbatch: int, machine: TrainingCluster) -> dict[str, int]:
        """Return the memory of each device by kind, in bytes.

        Args:
            microbatch: Images in a micro-batch.
            machine: The cluster.
        """
        assert isinstance(self.network, ResNet)
        parameters, size = self.network.parameters(), itemsize(self.dtype)
        elements, positions = self.network.saved_elements()
        activations = microbatch * (elements * size + positions * POSITION_BYTES)
        return {
            # Autocast keeps f32 parameters, and a 16-bit copy of each during the step.
            "parameters": parameters * (4 + (size if size < 4 else 0)),
            # Twice: DistributedDataParallel copies gradients to buckets of their own.
            "gradients": 2 * 4 * parameters,
            "optimizer": round(find_optimizer(self.optimizer).state_bytes(4) * parameters),
            "activations": activations,
            "context": CONTEXT_BYTES,
            "workspace": WORKSPACE_BYTES,
            "nccl": communicator_bytes(machine.devices, machine.channels),
            "fragmentation": round(FRAGMENTATION["none", True][SEPARATE] * activations),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCopies:
    """A plan with its predicted step and memory.

    Attributes:
        microbatch: Samples in a micro-batch of a device.
        microbatches: Micro-batches of each device in a step.
        sharding: What data-parallel ranks shard.
        step_us: Time of the step.
        low_us: Lower end of its 90 % prediction interval; None if there is no interval.
        high_us: Upper end of it.
        samples_per_s: Throughput of all devices.
        communication_us: Exposed communication.
        memory: Memory of each device by kind, in bytes.
        cost: Price of the step; None if the price of a device hour is not known.
    """

    microbatch: int
    microbatches: int
    sharding: Sharding = "none"
    step_us: float
    low_us: float | None = None
    high_us: float | None = None
    samples_per_s: float
    communication_us: float
    memory: dict[str, int]
    cost: float | None

    @property
    def memory_bytes(self) -> int:
        """All kinds of memory together."""
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesAnswer(Tabular):
    """The plans of a job, fastest first.

    Attributes:
        name: Name of the network or module.
        batch: Samples in a step, of all devices together.
        stack: Kernels: eager or compiled PyTorch.
        dtype: Dtype of activations.
        machine: The cluster.
        plans: All plans that fit.
        too_large: Number of plans that do not fit.
        missing_bytes: Memory that each device lacks for the smallest micro-batch; 0 if it fits.
    """

    name: str
    batch: int
    stack: str
    dtype: str
    machine: TrainingCluster
    plans: tuple[PricedCopies, ...]
    too_large: int
    missing_bytes: int

    def _columns(self) -> Mapping[str, Sequence[object]]:
        return columns_of(
            {
                "microbatch": priced.microbatch,
                "sharding": priced.sharding,
                "time_us": priced.step_us,
                "low_us": priced.low_us,
                "high_us": priced.high_us,
                "samples_per_s": priced.samples_per_s,
                "memory_bytes": priced.memory_bytes,
                "cost": priced.cost,
            }
            for priced in self.plans
        )

    def _repr_html_(self) -> str:
        """Return the plans for notebooks."""
        rows = (
            (
                priced.microbatch,
                priced.sharding,
                duration(priced.step_us),
                significant(priced.samples_per_s),
                size_text(priced.memory_bytes),
            )
            for priced in self.plans
        )
        title = f"{self.name} on {self.machine.name}"
        return html_grid(
            ">micro-batch", "sharding", ">step", ">samples/s", ">memory", rows=rows, caption=title
        )


def plan_copies(job: CopiesJob, machine: TrainingCluster) -> CopiesAnswer:
    """Return the plans to train a residual network by data parallelism on all devices, fastest first.

    Args:
        job: The network and its batch.
        machine: The cluster.

    Raises:
        InputError: if the devices do not divide the batch.
    """
    per_device, rest = divmod(job.batch, machine.devices)
    if rest or not per_device:
        raise InputError(
            f"a batch of {job.batch} cannot be divided among {machine.devices} devices: expected a multiple"
        )
    sizes = [size for size in range(1, per_device + 1) if per_device % size == 0]
    fitting = [size for size in sizes if sum(job.memory_bytes(size, machine).values()) <= machine.limit_bytes]
    plans = sorted((_priced(job, machine, size) for size in fitting), key=lambda plan: plan.step_us)
    least = sum(job.memory_bytes(1, machine).values())
    return CopiesAnswer(
        name=job.network.name,
        batch=job.batch,
        stack=job.stack,
        dtype=job.dtype,
        machine=machine,
        plans=tuple(plans),
        too_large=len(sizes) - len(fitting),
        missing_bytes=max(0, least - machine.limit_bytes),
    )


def _priced(job: CopiesJob, machine: TrainingCluster, microbatch: int) -> PricedCopies:
    """Return the plan with a micro-batch."""
    run = NetworkRun(batch=job.batch, mode="train", dtype=job.dtype, stack=job.stack, optimizer=job.optimizer)
    count = job.batch // machine.devices // microbatch
    division = Parallelism(data=machine.devices, microbatches=count)
    step = predict_step(job.network, machine.device, run, machine.links, division)
    price = machine.price_per_hour
    return PricedCopies(
        microbatch=microbatch,
        microbatches=count,
        step_us=step.time_us,
        low_us=step.low_us,
        high_us=step.high_us,
        samples_per_s=step.samples_per_s,
        communication_us=step.communication.us,
        memory=job.memory_bytes(microbatch, machine),
        # 3.6e9 microseconds are an hour.
        cost=None if price is None else price * machine.devices * step.time_us / 3.6e9,
    )
