"""Memory of each rank of a plan in eager PyTorch and f32: `EagerMemory`.

Every tensor is counted, and nothing is assumed for a GPU's context or for fragmentation, so that a plan which
is tried small, on processors, can be compared with what MemTracker measures. In f32, parameters and gradients
take four bytes, and the moments of AdamW eight (`tunebench.optimizer`). States in host memory or on NVMe come
with an f32 copy of the parameters, and with gradients in host memory. Gradients stay whole on the device
until the step ends.
"""

from __future__ import annotations

from typing import ClassVar

from tunebench.training.cluster.device_memory import DeviceMemory, MemoryPricer
from tunebench.training.cluster.layer_time import LayerRun
from tunebench.training.cluster.space import ClusterPlan
from tunebench.training.pipeline.activation import LOGIT_BYTES, ActivationMemory
from tunebench.workloads.networks.network_run import DType

__all__ = ["EagerMemory"]

SIZE = 4
"""Bytes of a number."""

GATHERED = 2
"""Layers whose parameters full sharding has gathered: the one that runs, and the one that follows."""


class EagerMemory(MemoryPricer):
    """Memory of the plans of a job in f32, run by eager PyTorch."""

    dtypes: ClassVar[tuple[DType, ...]] = ("f32",)

    def of_rank(self, plan: ClusterPlan, rank: int) -> DeviceMemory:
        """Return the memory of the devices of a rank of the pipeline."""
        memory = LayerRun.of(plan).activations(self.job)
        rank_parameters = sum(self.held_parameters(plan, rank))
        states = rank_parameters if plan.sharding == "none" else -(-rank_parameters // plan.copies)
        parameters, gradients = rank_parameters, rank_parameters
        if plan.sharding == "full":
            parameters = states + GATHERED * self._largest_unit(plan.tensor)
            gradients = states if plan.pipeline == 1 else rank_parameters
            if plan.pipeline == 1 and plan.microbatches(self.job.batch) == 1:
                # gradients appear while activations are freed
                freed = (self.job.network.layers - 1) * memory.layer_bytes
                gradients -= min(gradients, freed // SIZE)
        offloaded, on_nvme = plan.states != "device", plan.states == "nvme"
        state_bytes = round(self.optimizer.state_bytes(SIZE) * states)
        stored = SIZE * states + state_bytes
        return DeviceMemory(
            rank=rank,
            parameters=SIZE * parameters,
            gradients=SIZE * gradients,
            optimizer=0 if offloaded else state_bytes,
            activations=self.activation_bytes(plan, rank),
            working=self._working(plan, rank, memory),
            context=0,
            workspace=0,
            nccl=0,
            fragmentation=0,
            host=offloaded * (SIZE * states + (0 if on_nvme else stored)),
            nvme=on_nvme * stored,
        )

    def _working(self, plan: ClusterPlan, rank: int, memory: ActivationMemory) -> int:
        """Return the most that a backward pass adds to the activations, and buffers of sends.

        On entry to a layer these are the gradients of its output, of its inner width and of the matrix
        between. Under full sharding, there may be more on entry to the next one, when the activations of a
        layer are free and its gradients are being summed, or just before, when they are there twice. In the
        loss, logarithms and two gradients have the size of the logits. The scores of attention are assumed to
        be smaller than what the feed-forward layer has freed before.
        """
        architecture, tokens = memory.architecture, plan.microbatch * self.job.seq // plan.context
        inner, matrix = architecture.ffn // plan.tensor, architecture.hidden * architecture.ffn // plan.tensor
        entry = memory.input_bytes + SIZE * (tokens * inner + matrix)
        if plan.recompute == "full":
            entry += memory.computed_bytes - memory.input_bytes
        if plan.sharding == "full":
            reduced = SIZE * self._largest_unit(plan.tensor)
            entry = max(entry, entry + reduced - memory.layer_bytes, 2 * reduced - memory.layer_bytes)
        sends = 2 * memory.input_bytes if plan.pipeline > 1 else 0
        if rank < plan.pipeline - 1:
            return entry + sends
        logits = LOGIT_BYTES * tokens * architecture.vocabulary // plan.tensor
        return max(entry - memory.head_bytes, memory.head_gradient_bytes + logits) + sends

    def _largest_unit(self, tensor: int) -> int:
        """Return the parameters of a layer, or of the embedding or the head if those have more."""
        network, count = self.job.network, self.job.network.layers
        first, last = (network.parameters(tensor, layers) for layers in ((0, 1), (count - 1, count)))
        if count < 3:
            return max(first, last)
        layer = network.parameters(tensor, (1, 2))
        return max(layer, first - layer, last - layer)
