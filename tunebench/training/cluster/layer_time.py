"""Predicted times of layers, from which the passes of any stage add up: `LayerTimes`.

A stage is a sum of three kinds of layers: the first layer (with the embedding), a layer between, and the last
one (with the head). Where layers differ (windows, dense layers before those with experts), a layer between is
the mean of all layers between. Each kind is predicted once for each way to run it, all in one batch.
Activation recomputation repeats forward kernels, so that one prediction is enough for all kinds.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tunebench.device import Device
from tunebench.forecast.network import (
    MEGATRON_HOST_US,
    OperationTime,
    host_launches,
    predict_operations,
)
from tunebench.training.cluster.space import ClusterPlan, TrainingJob
from tunebench.training.pipeline.activation import ActivationMemory, architecture_of
from tunebench.training.steps.waits import is_weight_gradient
from tunebench.workloads.networks import Network, NetworkRun, Operation
from tunebench.workloads.networks.layer_division import LayerDivision, LayerExecution, shared_fields
from tunebench.workloads.networks.megatron import add_converted_weights
from tunebench.workloads.networks.network_run import DType, Fp8, Optimizer
from tunebench.workloads.networks.tape import Tape
from tunebench.workloads.networks.transformer import Transformer
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["HOST_US", "LayerDivision", "LayerRun", "LayerTimes", "PassTime", "UpdateTime"]

HOST_US = MEGATRON_HOST_US
"""Host time per kernel launch, in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun(LayerDivision, LayerExecution):
    """How a layer runs on each device; equal ones have equal times. A plan has all of these fields.

    Attributes:
        microbatch: Sequences in a micro-batch.
        recompute_layers: Number of first layers of a stage with full recomputation; 0 for all.
        expert_tensor: Tensor-parallel size of each expert: `tensor` or 1.
    """

    microbatch: int
    recompute_layers: int = 0
    expert_tensor: int = 1

    @classmethod
    def of(cls, plan: ClusterPlan) -> LayerRun:
        """Return how the layers of a plan run."""
        return cls(**shared_fields(plan, cls))

    @property
    def whole(self) -> LayerRun:
        """The same for each layer that recomputation is for."""
        return replace(self, recompute_layers=0) if self.recompute_layers else self

    @property
    def kept(self) -> LayerRun:
        """The same for a layer without recomputation."""
        return self if self.recompute == "none" else replace(self, recompute="none", recompute_layers=0)

    @property
    def plain(self) -> LayerRun:
        """The same without recomputation and gathered keys, each device with all experts."""
        return replace(
            self, recompute="none", recompute_layers=0, expert=1, expert_tensor=1, context_gather=False
        )

    def network_run(self, job: TrainingJob, layers: tuple[int, int]) -> NetworkRun:
        """Return the run of a micro-batch through some layers, without accumulation and updates."""
        return job.network_run(
            self,
            **shared_fields(self, LayerDivision),
            batch=self.microbatch,
            seq=job.seq // self.context,
            layers=layers,
            recompute_layers=self.recompute_layers or None,
        )

    def activations(self, job: TrainingJob) -> ActivationMemory:
        """Return the activations that these layers keep for each micro-batch."""
        return ActivationMemory(
            architecture=architecture_of(job.network),
            batch=self.microbatch,
            seq=job.seq // self.context,
            dtype=job.dtype,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            flash_attention=self.flash,
            fp8=job.fp8 != "none",
            expert_tensor=self.expert_tensor,
            expert_load=job.expert_load,
        )

    def gathered_bytes(self, job: TrainingJob) -> int:
        """Return the bytes of all keys and values of a layer, and of their gradients, while it needs them."""
        if not self.context_gather:
            return 0
        gathered = self.network_run(job, (0, 1))
        return 2 * sum(
            exchange.nbytes
            for exchange in job.network.exchanges(gathered)
            if exchange.phase == "forward" and exchange.collective == "all-gather"
        )


@dataclass(frozen=True, slots=True)
class PassTime:
    """Kernels of some layers in the passes of a micro-batch.

    Attributes:
        forward_us: Time of kernels in the forward pass.
        backward_us: Time of kernels in the backward pass.
        launches: Kernel launches of both passes (see `host_launches`).
        weights_us: Time of the kernels of the backward pass that compute gradients of weights.
    """

    forward_us: float = 0.0
    backward_us: float = 0.0
    launches: float = 0.0
    weights_us: float = 0.0

    def plus(self, other: PassTime, times: float = 1) -> PassTime:
        """Return the sum with a multiple of another time."""
        return PassTime(
            self.forward_us + times * other.forward_us,
            self.backward_us + times * other.backward_us,
            self.launches + times * other.launches,
            self.weights_us + times * other.weights_us,
        )

    def without(self, other: PassTime) -> PassTime:
        """Return the difference to another time."""
        return self.plus(other, -1)

    def scaled(self, factor: float) -> PassTime:
        """Return the same with kernels that take this multiple of the time."""
        return PassTime(
            self.forward_us * factor, self.backward_us * factor, self.launches, self.weights_us * factor
        )


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """Kernels of a stage that depend on its parameters only.

    Attributes:
        accumulate_us: Addition of the gradients of a micro-batch to those before.
        accumulate_launches: Its kernel launches.
        optimizer_us: Update of the parameters, of the host if that takes longer.
    """

    accumulate_us: float
    accumulate_launches: float
    optimizer_us: float


_Update: TypeAlias = tuple[LayerDivision, tuple[int, int], tuple[int, int]]
"""Division of parameters, layers of a stage, and devices that divide states, also those of experts."""


@dataclass(frozen=True, slots=True)
class _Kinds:
    first: PassTime
    middle: PassTime
    last: PassTime


@dataclass(frozen=True, slots=True)
class _LayerTime:
    """Times of a layer by kind of recomputation, and of its products and its attention."""

    passes: dict[str, PassTime]
    products: dict[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class _Ends:
    """Additional times of the first and the last layer, and the products of both.

    It does not depend on recomputation or experts. Of an end without an equal layer, it is the whole time.
    """

    first: PassTime
    last: PassTime
    products: dict[tuple[str, str], float]


@dataclass(kw_only=True)
class LayerTimes:
    """Times of the layers of a network on a device. Predictions are kept, so that plans share them.

    Attributes:
        network: The transformer.
        device: The device.
        seq: Tokens per sequence.
        dtype: Dtype of parameters and activations.
        fp8: Scaling of 8-bit floats in linear layers.
        wide_gradients: Whether gradients are summed in f32.
        optimizer: Optimizer of the step.
        predictor: Returns the times of operations on the device.
        host_us: Host time per kernel launch, in microseconds.
        expert_load: Tokens of the busiest device of expert parallelism, relative to the mean.
    """

    network: Network
    device: Device
    seq: int
    dtype: DType
    fp8: Fp8 = "none"
    wide_gradients: bool = False
    optimizer: Optimizer = "adamw"
    predictor: Callable[[Sequence[Operation], Device], Sequence[OperationTime]] = predict_operations
    host_us: float = HOST_US
    expert_load: float = 1.0
    _kinds: dict[LayerRun, _Kinds] = field(default_factory=dict, repr=False)
    _between: dict[tuple[LayerRun, tuple[int, int]], _LayerTime] = field(default_factory=dict, repr=False)
    _products: dict[LayerRun, dict[tuple[str, str], float]] = field(default_factory=dict, repr=False)
    _ends: dict[LayerRun, _Ends] = field(default_factory=dict, repr=False)
    _updates: dict[_Update, UpdateTime] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, job: TrainingJob, device: Device) -> LayerTimes:
        """Return the times of the layers of a job on a device."""
        return cls(
            network=job.network,
            device=device,
            seq=job.seq,
            dtype=job.dtype,
            fp8=job.fp8,
            wide_gradients=job.wide_gradients,
            optimizer=job.optimizer,
            host_us=0.0 if job.cuda_graphs else HOST_US,
            expert_load=job.expert_load,
        )

    @functools.cached_property
    def ends_apart(self) -> LayerTimes:
        """Times of the same network with its embedding and its head as layers of their own."""
        return LayerTimes(
            network=self.network.with_ends_apart(),
            device=self.device,
            seq=self.seq,
            dtype=self.dtype,
            fp8=self.fp8,
            wide_gradients=self.wide_gradients,
            optimizer=self.optimizer,
            predictor=self.predictor,
            host_us=self.host_us,
            expert_load=self.expert_load,
        )

    def predict(self, runs: Iterable[LayerRun]) -> None:
        """Predict ways to run a layer that are not known yet, in one batch."""
        listed = dict.fromkeys(runs)
        # A stage that recomputes some of its layers is a sum of layers with and without recomputation:
        # predict these two.
        wholes = [
            uniform
            for run in listed
            for uniform in ((run.whole, run.kept) if run.recompute == "full" else (run,))
        ]
        new = [run for run in dict.fromkeys(wholes) if run not in self._kinds]
        if not new:
            return
        # Recomputation repeats forward kernels, so one prediction without it gives the times of every kind.
        bases = dict.fromkeys(self._base(run) for run in new)
        # What the embedding and the head add is the same for every kind of recomputation, division of experts
        # and exchange of keys: it is predicted once, as a difference to an equal layer between the ends.
        plain = [run for run in dict.fromkeys(run.plain for run in bases) if run not in self._ends]
        first, _, last = self.kinds_of_layer()
        between = dict.fromkeys((*self._kinds_between, *filter(None, (self._twin(0), self._twin(-1)))))
        pairs = dict.fromkeys(self._pair(run, kind) for run in (*bases, *plain) for kind in between)
        missing = {pair: None for pair in pairs if pair not in self._between}
        missing |= dict.fromkeys((run, kind) for run in plain for kind in (first, last))
        predicted = self._predicted(missing)
        self._between |= {pair: time for pair, time in predicted.items() if pair[1] in between}
        for run in plain:
            ends = [predicted[run, kind] for kind in (first, last)]
            added = [
                end.passes["none"].without(self._between[self._pair(run, twin)].passes["none"])
                if (twin := self._twin(position))
                else end.passes["none"]
                for position, end in zip((0, -1), ends, strict=True)
            ]
            self._ends[run] = _Ends(added[0], added[1], {**ends[0].products, **ends[1].products})
        (most_common, _), *_ = self._kinds_between.most_common(1)
        for run in new:
            base, additions = self._base(run), self._ends[run.plain]
            products = self._between[self._pair(base, most_common)].products
            self._products[run] = {**additions.products, **products}
            recompute = "none" if base == run else run.recompute
            self._kinds[run] = _Kinds(
                self._twin_time(base, 0, recompute).plus(additions.first),
                self._mean_between(base, recompute),
                self._twin_time(base, -1, recompute).plus(additions.last),
            )

    @functools.cached_property
    def _kinds_between(self) -> Counter[tuple[int, int]]:
        """Number of layers between the ends by kind: the first layer of the kind."""
        return Counter(self.alike((index, index + 1)) for index in range(*self.kinds_of_layer()[1]))

    def _pair(self, run: LayerRun, kind: tuple[int, int]) -> tuple[LayerRun, tuple[int, int]]:
        """Return the key of a layer in `_between`: how experts are divided does not change a dense layer."""
        dense_layers = architecture_of(self.network).dense_layers
        if run.expert * run.expert_tensor > 1 and kind[0] - self.network.ends_apart < dense_layers:
            return replace(run, expert=1, expert_tensor=1), kind
        return run, kind

    def _mean_between(self, base: LayerRun, recompute: str) -> PassTime:
        """Return the mean time of the layers between the ends."""
        count, total = sum(self._kinds_between.values()), PassTime()
        for kind, layers in self._kinds_between.items():
            total = total.plus(self._between[self._pair(base, kind)].passes[recompute], layers / count)
        return total

    def _twin(self, end: int) -> tuple[int, int] | None:
        """Return a layer between the ends that equals the first (0) or last (-1) one, or None."""
        network = self.network
        if network.ends_apart:
            return None
        first, middle, last = self.kinds_of_layer()
        if architecture_of(network).uniform:
            return self.alike(middle)
        assert isinstance(network, Transformer)
        kind = network.kind_of_layer(last[0] if end else first[0])
        for index in range(1, network.layers - 1):
            if network.kind_of_layer(index) == kind:
                return self.alike((index, index + 1))
        return None

    def _twin_time(self, base: LayerRun, end: int, recompute: str) -> PassTime:
        """Return the time of the equal of an end; without one, what recomputation adds to a mean layer."""
        if twin := self._twin(end):
            return self._between[self._pair(base, twin)].passes[recompute]
        if self.network.ends_apart:
            return PassTime()  # an embedding or a head alone has no layer
        return self._mean_between(base, recompute).without(self._mean_between(base, "none"))

    def _base(self, run: LayerRun) -> LayerRun:
        """Return the run whose kernels those of a run follow from: without recomputation.

        Of a layer with the embedding or the head, the forward kernels that recomputation repeats are unknown.
        """
        return run.kept if self.network.layers > 2 else run

    def _predicted(
        self, pairs: Iterable[tuple[LayerRun, tuple[int, int]]]
    ) -> dict[tuple[LayerRun, tuple[int, int]], _LayerTime]:
        """Return the times of single layers."""
        job = TrainingJob(
            network=self.network,
            batch=1,
            seq=self.seq,
            dtype=self.dtype,
            fp8=self.fp8,
            load_factor=self.expert_load,
        )
        listed: list[Operation] = []
        parts: list[tuple[LayerRun, tuple[int, int], int, int]] = []
        for run, layers in pairs:
            operations = self.network.operations(run.network_run(job, layers))
            parts.append((run, layers, len(listed), len(listed) + len(operations)))
            listed += operations
        times = self.predictor(listed, self.device)
        return {
            (run, layers): _LayerTime(
                _pass_times(times[start:end], architecture_of(self.network).key_share),
                {**_product_us(times[start:end]), **_attention_us(times[start:end])},
            )
            for run, layers, start, end in parts
        }

    def kinds_of_layer(self) -> tuple[tuple[int, int], ...]:
        """Return the first, a middle and the last layer as ranges; with few layers, some are equal.

        If layers differ, the range of the middle is all layers between the ends. Where the embedding and the
        head are layers of their own, it leaves out the layers next to them, so that the mean is the same.
        """
        count = self.network.layers
        middle = (count // 2, count // 2 + 1)
        if not architecture_of(self.network).uniform and count > 2:
            apart = self.network.ends_apart and count > 4
            middle = (1 + apart, count - 1 - apart)
        return (0, 1), middle, (count - 1, count)

    def passes(self, run: LayerRun, layers: tuple[int, int]) -> PassTime:
        """Return the kernels of a stage, without the accumulation of gradients.

        Args:
            run: How the layers run; known by `predict`.
            layers: Layers of the stage as a half-open range.
        """
        if run.recompute_layers:
            recomputed = min(run.recompute_layers, layers[1] - layers[0] - self.ends_alone(layers))
            # The embedding and the head are never recomputed: only middle layers differ.
            whole, checkpointed = self._kinds[run.whole].middle, self._kinds[run.kept].middle
            return self.passes(run.kept, layers).plus(whole.without(checkpointed), recomputed)
        kinds, (first, last) = self._kinds[run], layers
        has_first, has_last = first == 0, last == self.network.layers
        if last - first == 1:
            # The only layer of a network begins and ends it; all kinds are then equal.
            return kinds.first if has_first else kinds.last if has_last else kinds.middle
        total = PassTime()
        if has_first:
            total = total.plus(kinds.first)
        if has_last:
            total = total.plus(kinds.last)
        return total.plus(kinds.middle, last - first - has_first - has_last)

    def ends_alone(self, layers: tuple[int, int]) -> int:
        """Return how many of some layers are the embedding or the head alone."""
        if not self.network.ends_apart:
            return 0
        return (layers[0] == 0) + (layers[1] == self.network.layers)

    def product_us(self, run: LayerRun, part: str, gradient: str) -> float:
        """Return the time of one product, or of a kernel of attention.

        Args:
            run: How the layers run; known by `predict`.
            part: Part of the network.
            gradient: Gradient that the product computes, or the pass of a product or of the attention.
        """
        return self._products[run.whole].get((part, gradient), 0.0)

    def update(self, division: LayerDivision, layers: tuple[int, int], shards: tuple[int, int]) -> UpdateTime:
        """Return the kernels that depend on the parameters of a stage.

        Args:
            division: How parameters are divided.
            layers: Layers of the stage as a half-open range.
            shards: Devices that divide the states of the optimizer, and those of the experts' states.
        """
        key = (division, self.alike(layers), shards)
        self.predict_updates([key])
        return self._updates[key]

    def predict_updates(self, keys: Iterable[_Update]) -> None:
        """Predict updates that are not known yet, in one batch.

        Args:
            keys: Division of parameters, layers of a stage as of `alike`, and shards (see `update`).
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._updates]
        if not missing:
            return
        parts = [self._update_operations(*key) for key in missing]
        times = iter(
            self.predictor([operation for part in parts for both in part for operation in both], self.device)
        )
        for key, (added, updated) in zip(missing, parts, strict=True):
            accumulate, optimizer = ([next(times) for _ in operations] for operations in (added, updated))
            optimizer_us = sum(timed.time_us for timed in optimizer)
            self._updates[key] = UpdateTime(
                sum(timed.time_us for timed in accumulate),
                host_launches(accumulate),
                # Updates of many small tensors take as long as their launches.
                max(optimizer_us, self.host_us * host_launches(optimizer)),
            )

    def alike(self, layers: tuple[int, int]) -> tuple[int, int]:
        """Return the first range of layers with the same kernels and parameters."""
        first, last = layers
        if first == 0 or last == self.network.layers:
            return layers
        kinds = self._layer_kinds
        count, stage_kinds = last - first, kinds[first:last]
        start = next(start for start in range(1, first + 1) if kinds[start : start + count] == stage_kinds)
        return start, start + count

    @functools.cached_property
    def _layer_kinds(self) -> tuple[int, ...]:
        """Kind of each layer; the embedding and the head have any if they are layers of their own."""
        network = self.network
        assert isinstance(network, Transformer)
        apart = int(network.ends_apart)
        kinds = (network.kind_of_layer(index) for index in range(network.layers - 2 * apart))
        return (*[-1] * apart, *kinds, *[-1] * apart)

    def _update_operations(
        self, division: LayerDivision, layers: tuple[int, int], shards: tuple[int, int]
    ) -> tuple[list[Operation], list[Operation]]:
        """Return the kernels that add gradients of a stage to earlier ones, and those of the optimizer."""
        parameter_counts = self.network.held_parameters(division, layers)
        added, updated = Tape(self._updating), Tape(self._updating)
        added.accumulated(sum(parameter_counts), self._tensors(layers))
        parameters = sum(
            -(-count // shard_count) for count, shard_count in zip(parameter_counts, shards, strict=True)
        )
        updated.updated(parameters, architecture_of(self.network).hidden)
        matrices = self.network.matrix_parameters(division.tensor, layers) + parameter_counts[1]
        add_converted_weights(updated, matrices)
        return added.operations, updated.operations

    @functools.cached_property
    def _updating(self) -> NetworkRun:
        """A run that adds gradients to earlier ones and updates parameters."""
        return NetworkRun(
            batch=1,
            seq=self.seq,
            mode="train",
            dtype=self.dtype,
            stack="megatron",
            accumulate=True,
            optimizer=self.optimizer,
            fp8=self.fp8,
            wide_gradients=self.wide_gradients,
        )

    def _tensors(self, layers: tuple[int, int]) -> int:
        """Return the number of tensors that hold the parameters of a stage."""
        if self.network.ends_apart or not architecture_of(self.network).uniform:
            return self._gradient_tensors(layers)
        first, last = layers
        has_first, has_last = first == 0, last == self.network.layers
        first_count, middle_count, last_count = self._kind_tensors
        if last - first == 1:
            return first_count if has_first else last_count if has_last else middle_count
        return (
            first_count * has_first
            + last_count * has_last
            + middle_count * (last - first - has_first - has_last)
        )

    @functools.cached_property
    def _kind_tensors(self) -> tuple[int, int, int]:
        """Number of tensors of a first layer, one between, and a last one."""
        first, middle, last = (self._gradient_tensors(layers) for layers in self.kinds_of_layer())
        return first, middle, last

    def _gradient_tensors(self, layers: tuple[int, int]) -> int:
        operations = self.network.operations(replace(self._updating, layers=layers))
        return sum(operation.count for operation in operations if operation.part == "gradients")


_RECOMPUTED: dict[str, tuple[str, ...]] = {
    "selective": (
        "attention",
        "attention merge",
        "attention scores",
        "attention softmax",
        "attention values",
        "attention copies",
    ),
    "experts": ("router", "experts", "expert exchange", "mlp up", "mlp activation", "mlp down"),
}
"""Parts of a layer whose forward kernels the backward pass runs again."""


def _repeated_share(operation: Operation, recompute: str, key_share: float) -> float:
    """Return the share of a forward kernel that the backward pass runs again.

    Args:
        operation: The kernel.
        recompute: Kind of recomputation.
        key_share: Share of keys in the product of queries, keys and values.
    """
    if recompute == "operators":
        if isinstance(operation.workload, Attention):
            return 0.0
        # The products of keys, after attention, and of one of the factors of the feed-forward part.
        shares = {"attention qkv": key_share, "mlp up": 0.5, "mlp down": 0.0}
        return shares.get(operation.part, 1.0) if isinstance(operation.workload, Gemm) else 1.0
    return float(operation.part in _RECOMPUTED[recompute])


def _pass_times(times: Iterable[OperationTime], key_share: float) -> dict[str, PassTime]:
    """Return the time of a layer by kind of recomputation, from its kernels without recomputation.

    Args:
        times: Kernels of the layer.
        key_share: Share of keys in the product of queries, keys and values.
    """
    operation_times = list(times)
    forward = [timed for timed in operation_times if timed.operation.phase == "forward"]
    backward = [timed for timed in operation_times if timed.operation.phase == "backward"]
    none = PassTime(
        sum(timed.time_us for timed in forward),
        sum(timed.time_us for timed in backward),
        host_launches(operation_times),
        sum(timed.time_us for timed in backward if is_weight_gradient(timed)),
    )
    passes = {"none": none}
    for recompute in ("selective", "experts", "operators", "full"):
        if recompute == "full":
            repeated, repeated_us = forward, none.forward_us
        else:
            shares = [_repeated_share(timed.operation, recompute, key_share) for timed in forward]
            repeated = [timed for timed, share in zip(forward, shares, strict=True) if share]
            repeated_us = sum(share * timed.time_us for timed, share in zip(forward, shares, strict=True))
        passes[recompute] = none.plus(PassTime(0.0, repeated_us, host_launches(repeated)))
    return passes


def _attention_us(times: Iterable[OperationTime]) -> dict[tuple[str, str], float]:
    """Return the mean time of the kernels of attention in each pass."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for timed in times:
        if isinstance(timed.operation.workload, Attention) and timed.operation.part == "attention":
            total = totals["attention", timed.operation.phase]
            total[0] += timed.time_us
            total[1] += timed.operation.count
    return {key: us / count for key, (us, count) in totals.items()}


def _product_us(times: Iterable[OperationTime]) -> dict[tuple[str, str], float]:
    """Return the mean time of the products of each part, in the forward pass and by gradient."""
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for timed in times:
        work = timed.operation.workload
        phase = timed.operation.phase
        if isinstance(work, Gemm) and timed.operation.part != "recomputation":
            gradient = "weights" if work.trans == "tn" else "input"
            total = totals[timed.operation.part, "forward" if phase == "forward" else gradient]
            total[0] += timed.time_us
            total[1] += timed.operation.count
    return {key: us / count for key, (us, count) in totals.items()}
