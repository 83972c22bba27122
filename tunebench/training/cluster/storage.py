"""Time to keep training data in host memory and NVMe: `StorageLayout`, `StorageTimes`.

A device moves its share of the data over its own link, all devices of a node at the same time. Equal shares
of what they have in common limit each: a link that several devices share, the host memory of the node, NVMe.

- Parameters in host memory or NVMe are fetched for each pass of each micro-batch, prefetched by one layer;
  with full sharding every data-parallel rank fetches its shard, and an all-gather follows (ZeRO-Infinity).
- Gradients leave the device behind each layer of the backward pass. Those of several micro-batches are added
  in host memory.
- Activations that full recomputation keeps (inputs of layers) may be in host memory.
- In a pipeline, each stage moves the data of its layers for each pass of each micro-batch.
- The update runs in host memory, layer by layer, while the next layer's states are read from NVMe and the
  last one's are written back. It reaches a part of the memory's bandwidth (`HOST_UPDATE_GB_S`), and starts
  when the backward pass has ended, as clipping by the norm of all gradients requires.

Passes are those of `stream_us`. A pass also takes at least as long as the host memory needs for all bytes
that it reads and writes, of DMA and of the processors.

Sources: Ren et al., "ZeRO-Offload: democratizing billion-scale model training", 2021; Rajbhandari et al.,
"ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tunebench._deprecation import renamed
from tunebench.optimizer import find_optimizer
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.cluster.space import ClusterPlan
from tunebench.training.steps.layer_stream import LayerWork, Transfer, stream_us

__all__ = ["StorageLayout", "StorageTimes", "StreamedLayer"]

__getattr__ = renamed(__name__, {"Placement": "StorageLayout"})

ADD_BYTES = 6
"""Bytes of host memory to add a gradient of two bytes to another."""

HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """Where the data of a plan is: the fields that passes through layers depend on.

    All of it may also be columns of many plans (`MemoryPricer`).

    Attributes:
        pipeline: Pipeline-parallel size.
        copies: Data-parallel size times context-parallel size.
        sharding: What data-parallel ranks shard.
        states: Where the states of the optimizer are.
        parameters: Where parameters are.
        activations: Where the inputs of layers are, if they are all that is kept.
    """

    pipeline: Any
    copies: Any
    sharding: Any
    states: Any
    parameters: Any
    activations: Any

    @classmethod
    def of(cls, plan: ClusterPlan) -> StorageLayout:
        """Return the storage layout of a plan."""
        return cls(*(getattr(plan, field.name) for field in fields(cls)))

    @property
    def streams(self) -> Any:
        """Whether data moves before or after each layer."""
        moved = (self.parameters != "device") | (self.activations != "device")
        return moved | self.gathers | self.scatters | self.streams_gradients

    @property
    def moves(self) -> Any:
        """Whether parameters, gradients or states move layer by layer."""
        return self.gathers | self.scatters | (self.states != "device")

    @property
    def scatters(self) -> Any:
        """Whether gradients are reduce-scattered behind each layer of each micro-batch.

        With a pipeline they are summed first, unless parameters are off the device.
        """
        alone = (self.pipeline == 1) | (self.parameters != "device")
        return (self.copies > 1) & alone & ((self.sharding == "gradients") | (self.sharding == "full"))

    @property
    def gathers(self) -> Any:
        """Whether parameters are gathered for each pass."""
        return (self.copies > 1) & (self.sharding == "full")

    @property
    def streams_gradients(self) -> Any:
        """Whether gradients leave the device behind each layer."""
        alone = (self.copies == 1) & ((self.pipeline == 1) | (self.parameters != "device"))
        return (self.states != "device") & (self.scatters | alone)

    @property
    def shards(self) -> int:
        """Shards of the states of the optimizer."""
        return 1 if self.sharding == "none" else self.copies


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """A layer in the passes of a micro-batch on a device.

    Attributes:
        parameters: Parameters, before sharding.
        activation_bytes: Bytes of the layer's input.
        forward_us: Kernels of the forward pass.
        backward_us: Kernels of the backward pass.
        gather_us: All-gather of the parameters.
        scatter_us: Reduce-scatter of the gradients.
    """

    parameters: int
    activation_bytes: int
    forward_us: float
    backward_us: float
    gather_us: float
    scatter_us: float


@dataclass(frozen=True, slots=True)
class StorageTimes:
    """Times of transfers of one device while all devices of its node do the same.

    Attributes:
        machine: The cluster.
        optimizer: Name of the optimizer (`tunebench.optimizer`).
    """

    machine: TrainingCluster
    optimizer: str = "adamw"

    @property
    def _state_bytes(self) -> float:
        """Bytes of states per parameter, with its f32 copy."""
        return find_optimizer(self.optimizer).mixed_state_bytes

    @property
    def _update_bytes(self) -> float:
        """Bytes of host memory that an update reads and writes per parameter, by which it is bound.

        They are those of the states each way, 2 of the gradient and 2 of the parameter. Source: Ren et al.,
        section 5.
        """
        return 2 * self._state_bytes + 2 * HALF_BYTES

    def waits_us(
        self, layers: Sequence[StreamedLayer], layout: StorageLayout, accumulates: bool
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the exposed network time of the forward and backward pass, and the exposed storage time.

        Args:
            layers: Layers in the order of the forward pass.
            layout: Where data is.
            accumulates: Whether gradients are added to those of other micro-batches.
        """
        forward = [self._forward(layer, layout) for layer in layers]
        backward = [self._backward(layer, layout, accumulates) for layer in reversed(layers)]
        waits, stored = [], []
        for works in (forward, backward):
            compute_us = sum(work.compute_us for work in works)
            # The network counts first; storage exposes only what it adds to that. So the two add up to the
            # whole wait.
            network_us = stream_us([work.only("network") for work in works])
            whole_us = max(stream_us(works), sum(self._host_us(work) for work in works))
            waits.append(max(0.0, network_us - compute_us))
            stored.append(max(0.0, whole_us - max(network_us, compute_us)))
        return (waits[0], waits[1]), (stored[0], stored[1])

    def update_us(self, shares: Sequence[int], layout: StorageLayout) -> float:
        """Return the time of the update in host memory.

        Args:
            shares: Parameters of each layer whose states the device keeps.
            layout: Where data is; states are not on the device.
        """
        works = [self._update(count, layout) for count in shares]
        memory_us = self._memory_us(self._update_bytes * sum(shares))
        return max(stream_us(works), memory_us + sum(map(self._host_us, works)))

    # -- layers --------------------------------------------------------------------------------------------

    def _forward(self, layer: StreamedLayer, layout: StorageLayout) -> LayerWork:
        activation_bytes = layer.activation_bytes if layout.activations == "host" else 0
        return LayerWork(layer.forward_us, self._fetched(layer, layout, 0), self._to_host(activation_bytes))

    def _backward(self, layer: StreamedLayer, layout: StorageLayout, accumulates: bool) -> LayerWork:
        activation_bytes = layer.activation_bytes if layout.activations == "host" else 0
        after: tuple[Transfer, ...] = (("network", layer.scatter_us),) if layout.scatters else ()
        if layout.streams_gradients:
            share = -(-layer.parameters // layout.shards)
            after += self._to_host(HALF_BYTES * share)
            if layout.parameters == "nvme":
                # The order of transfers in the chain: the gradient arrives, the sum is read, added to, and
                # written back.
                after += self._read(HALF_BYTES * share) if accumulates else ()
            if accumulates:
                after += (("processors", self._memory_us(ADD_BYTES * share)),)
            if layout.parameters == "nvme":
                after += self._written(HALF_BYTES * share)
        return LayerWork(layer.backward_us, self._fetched(layer, layout, activation_bytes), after)

    def _update(self, share: int, layout: StorageLayout) -> LayerWork:
        before: tuple[Transfer, ...] = () if layout.streams_gradients else self._to_host(HALF_BYTES * share)
        after: tuple[Transfer, ...] = ()
        off = layout.parameters == "nvme"
        if layout.states == "nvme":
            before += self._read((self._state_bytes + HALF_BYTES * off) * share)
            after += self._written((self._state_bytes + HALF_BYTES * off) * share)
        if layout.parameters == "device":
            after += self._to_device(HALF_BYTES * share)
        nbytes = self._update_bytes * share * self.machine.links.devices_per_node
        return LayerWork(nbytes / self.machine.update_gb_s / 1e3, before, after)

    def _fetched(
        self, layer: StreamedLayer, layout: StorageLayout, activation_bytes: int
    ) -> tuple[Transfer, ...]:
        share = -(-layer.parameters // (layout.copies if layout.gathers else 1)) * HALF_BYTES
        chain = self._read(share) if layout.parameters == "nvme" else ()
        chain += self._to_device((share if layout.parameters != "device" else 0) + activation_bytes)
        return (*chain, ("network", layer.gather_us)) if layout.gathers else chain

    # -- transfers -----------------------------------------------------------------------------------------

    def _to_host(self, nbytes: int) -> tuple[Transfer, ...]:
        return self._copied("to host", nbytes)

    def _to_device(self, nbytes: int) -> tuple[Transfer, ...]:
        return self._copied("to device", nbytes)

    def _copied(self, direction: str, nbytes: int) -> tuple[Transfer, ...]:
        if not nbytes:
            return ()
        link = self.machine.host_link
        assert link is not None
        # Devices behind one link copy at the same time, so each copy takes as long as all of them together.
        carried = nbytes * self.machine.devices_per_host_link
        us = link.to_host_us(carried) if direction == "to host" else link.to_device_us(carried)
        return ((direction if self.machine.host_duplex else "host link", max(us, self._memory_us(nbytes))),)

    def _read(self, nbytes: float) -> tuple[Transfer, ...]:
        return (("nvme read", self._shared_us(nbytes, self.machine.nvme_read_gb_s)),)

    def _written(self, nbytes: float) -> tuple[Transfer, ...]:
        return (("nvme write", self._shared_us(nbytes, self.machine.nvme_write_gb_s)),)

    def _shared_us(self, nbytes: float, gb_s: float) -> float:
        """Return the time of a transfer that every device of the node makes over one resource."""
        return max(nbytes * self.machine.links.devices_per_node / gb_s / 1e3, self._memory_us(nbytes))

    def _memory_us(self, nbytes: float) -> float:
        """Return the time of the node's host memory for bytes of every device."""
        return nbytes * self.machine.links.devices_per_node / self.machine.host_gb_s / 1e3

    def _host_us(self, work: LayerWork) -> float:
        """Return the time of the host memory for the transfers of a layer, at the rates that they need."""
        machine, total = self.machine, 0.0
        for resource, us in (*work.before, *work.after):
            if resource == "processors":
                total += us
            elif resource.startswith("nvme"):
                gb_s = machine.nvme_read_gb_s if resource == "nvme read" else machine.nvme_write_gb_s
                total += us * min(1.0, gb_s / machine.host_gb_s)
            elif resource != "network":
                total += us * self._link_share(resource)
        return total

    def _link_share(self, direction: str) -> float:
        """Return the share of the host memory's bandwidth that copies of all devices take."""
        link = self.machine.host_link
        assert link is not None
        fastest = link.to_device_gb_s if direction == "to device" else link.to_host_gb_s
        if direction == "host link":
            fastest = min(link.to_host_gb_s, link.to_device_gb_s)
        node_gb_s = fastest / self.machine.devices_per_host_link * self.machine.links.devices_per_node
        return min(1.0, node_gb_s / self.machine.host_gb_s)
