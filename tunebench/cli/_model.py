"""A model on the command line: which, how it is run, and among how many devices it is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from tunebench.errors import InputError, UnknownName

if TYPE_CHECKING:
    from tunebench.device import Device
    from tunebench.forecast.network import NetworkPrediction
    from tunebench.forecast.parallel.step import Parallelism, StepPrediction
    from tunebench.workloads.networks import Network

__all__ = ["ModelRequest"]

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help="A model by name (`tunebench workloads` lists them), its config.json, or a list of workloads.",
        show_default=False,
    ),
]
"""Name of a network, or its file."""
Batch = Annotated[int, typer.Option(min=1, help="Of a model: sequences or images at once, on all devices.")]
"""Samples of a run."""
Seq = Annotated[int, typer.Option(min=0, help="Of a model: tokens of a sequence; images have none.")]
"""Tokens of a sequence."""
Mode = Annotated[str, typer.Option(help="Of a model: infer (a forward pass) or train (a step).")]
"""``infer`` or ``train``."""
ModelType = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Of a model: f32, f16 or bf16. Default: f32, or what its list of workloads has.",
        show_default=False,
    ),
]
"""Type of weights and activations; None where it is not given."""
Fused = Annotated[
    bool, typer.Option("--fused", help="Of a model: as a compiler fuses it, such as torch.compile.")
]
"""Whether elementwise operations are fused."""
Optimizer = Annotated[
    str | None,
    typer.Option(help="Of a training step: adamw, sgd or none. Default: adamw.", show_default=False),
]
"""What updates parameters; None for the default."""
Data = Annotated[int, typer.Option("--data", min=1, help="Devices that share the batch.")]
"""Copies of the network."""
Tensor = Annotated[int, typer.Option("--tensor", min=1, help="Devices that share every layer.")]
"""Devices that share every layer."""
Pipeline = Annotated[int, typer.Option("--pipeline", min=1, help="Stages that share the layers.")]
"""Stages."""
Micro = Annotated[int, typer.Option("--microbatches", min=1, help="Parts of the batch in a pipeline.")]
"""Micro-batches."""
Schedule = Annotated[str, typer.Option(help="Of a pipeline: 1f1b or gpipe.")]
"""Which passes a stage makes first."""
Nodes = Annotated[int, typer.Option(min=1, help="Nodes that the devices are in.")]
"""Nodes of a cluster."""
Link = Annotated[
    str | None,
    typer.Option(
        help="Within a node: a link by name, or GB/s. Default: what the device usually has.",
        show_default=False,
    ),
]
"""Link within a node; None for the product's own."""
NetworkLink = Annotated[
    str | None, typer.Option("--network", help="Between nodes, likewise.", show_default=False)
]
"""Link between nodes; None for the product's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What was typed of a model; its fields are the options of a command that takes one."""

    name: ModelName
    batch: Batch = 1
    seq: Seq = 0
    mode: Mode = "infer"
    dtype: ModelType = None
    fused: Fused = False
    optimizer: Optimizer = None
    data: Data = 1
    tensor: Tensor = 1
    pipeline: Pipeline = 1
    microbatches: Micro = 1
    schedule: Schedule = "1f1b"
    nodes: Nodes = 1
    link: Link = None
    network_link: NetworkLink = None

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.data * self.tensor * self.pipeline

    @property
    def items(self) -> int:
        """Tokens of a run, or samples of a model that has no sequences."""
        return self.batch * (self.seq or 1)

    @property
    def unit(self) -> str:
        """What `items` are: a model without sequences has images, a list of workloads does not tell."""
        from tunebench.workloads.networks import network
        from tunebench.workloads.networks._listed import ListedNetwork

        if self.seq:
            return "tokens"
        return "samples" if isinstance(network(self.name), ListedNetwork) else "images"

    @property
    def parallelism(self) -> Parallelism:
        """How it is divided among devices.

        Raises:
            InputError: if it cannot be divided so.
        """
        from tunebench.forecast.parallel.step import Parallelism

        return Parallelism(
            data=self.data,
            tensor=self.tensor,
            pipeline=self.pipeline,
            microbatches=self.microbatches,
            schedule=self.schedule,  # type: ignore[arg-type]
        )

    def predict(self, device: Device) -> NetworkPrediction | StepPrediction:
        """Predict it on a device, or on several of them.

        Raises:
            InputError: if there is no such model, or it cannot be run or divided so.
        """
        from tunebench.forecast.network import predict_network
        from tunebench.forecast.parallel.cluster import Cluster
        from tunebench.forecast.parallel.step import predict_step
        from tunebench.workloads.networks import NetworkRun, network
        from tunebench.workloads.networks import _network as kinds

        found = network(self.name)
        dtype = self.dtype or _own_type(found)
        self._check("mode", self.mode, get_args(kinds.Mode))
        self._check("dtype", dtype, get_args(kinds.DType))
        optimizer = self.optimizer or ("adamw" if self.mode == "train" else "none")
        self._check("optimizer", optimizer, get_args(kinds.Optimizer))
        run = NetworkRun(
            batch=self.batch,
            seq=self.seq,
            mode=self.mode,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            fused=self.fused,
            optimizer=optimizer,  # type: ignore[arg-type]
        )
        if self.devices == 1:
            if self.nodes > 1 or self.microbatches > 1:
                raise InputError("--nodes and --microbatches go with --data, --tensor or --pipeline")
            return predict_network(found, device, run)
        cluster = Cluster.of(
            device, devices=self.devices, nodes=self.nodes, link=self.link, network=self.network_link
        )
        return predict_step(found, device, run, cluster, self.parallelism)

    def min_memory_bytes(self, found: NetworkPrediction | StepPrediction) -> int | None:
        """Return what each device must hold at the very least, where the model tells."""
        from tunebench.forecast.footprint import min_memory_bytes
        from tunebench.workloads.networks import network

        return min_memory_bytes(network(self.name), found.run, self.parallelism)

    def excess(self, found: NetworkPrediction | StepPrediction) -> str | None:
        """Return in words that it does not fit into memory; None where it may."""
        device, needed = found.device, self.min_memory_bytes(found)
        if needed is None or not device.memory_bytes or needed <= device.memory_bytes:
            return None
        return (
            f"{found.network} does not fit into {device.name}: it has {device.memory_bytes / 2**30:.0f} GiB, "
            f"and parameters with what training keeps of them take {needed / 2**30:.0f} GiB"
        )

    @staticmethod
    def _check(what: str, name: str, known: tuple[str, ...]) -> None:
        if name not in known:
            raise UnknownName(what, name, known)


def _own_type(network: Network) -> str:
    """Return the type that all workloads of a list have; f32 where there is no one such type."""
    from tunebench.workloads.networks._listed import ListedNetwork

    types = (
        {entry.workload.dtype for entry in network.entries} if isinstance(network, ListedNetwork) else set()
    )
    return types.pop() if len(types) == 1 else "f32"
