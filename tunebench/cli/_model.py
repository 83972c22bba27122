"""A model on the command line: which, how it is run, and among how many devices it is divided."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from tunebench.cli._output import plain, table
from tunebench.errors import InputError, UnknownName

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.device import Device
    from tunebench.forecast.network import NetworkPrediction, OperationTime
    from tunebench.forecast.parallel.step import Parallelism, StepPrediction
    from tunebench.workloads.networks import Network

__all__ = ["ModelArguments", "describe", "duration", "render", "taking_a_model"]

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
class ModelArguments:
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


def taking_a_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a model in place of its argument `model`: a `ModelArguments`, or None.

    Typer reads the options of a command from its signature.
    """
    kinds = get_type_hints(ModelArguments, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if field.name == "name" else field.default,
            annotation=kinds[field.name],
        )
        for field in dataclasses.fields(ModelArguments)
    ]

    @functools.wraps(command)
    def given(**typed: Any) -> None:
        of_model = {option.name: typed.pop(option.name) for option in options}
        command(**typed, model=None if of_model["name"] is None else ModelArguments(**of_model))

    own = inspect.signature(command, eval_str=True)
    others = list(own.parameters.values())
    place = [each.name for each in others].index("model")
    others[place : place + 1] = options
    given.__signature__ = own.replace(parameters=others)  # type: ignore[attr-defined]
    return given


def describe(model: ModelArguments, found: NetworkPrediction | StepPrediction) -> dict[str, Any]:
    """Return a prediction as plain data."""
    from tunebench.forecast.network import NetworkPrediction

    run = found.run
    data: dict[str, Any] = {
        "model": found.network,
        "device": found.device.key,
        "devices": model.devices,
        "mode": run.mode,
        "batch": run.batch,
        "seq": run.seq,
        "dtype": run.dtype,
        "fused": run.fused,
        "optimizer": run.optimizer,
        "time_us": found.time_us,
        "low_us": found.low_us,
        "high_us": found.high_us,
        f"{model.unit}_per_s": model.items / found.time_us * 1e6,
        "min_memory_bytes": model.min_memory_bytes(found),
        "memory_bytes": found.device.memory_bytes or None,
    }
    if isinstance(found, NetworkPrediction):
        return {
            **data,
            "bound_us": found.bound_us,
            "host_us": found.host_us,
            "device_us": found.device_us,
            "launches": found.launches,
            "parts": [{**plain(line), "limited_by": _limit(found, line.part)} for line in found.parts()],
            "phases": [plain(line) for line in found.phases()],
            "basis": _bases(found),
            "operations": [_operation(each) for each in found.operations],
        }
    shares = ("compute", "communication", "bubble")
    return {
        **data,
        **{f"{name}_us": getattr(found, name).us for name in shares},
        "division": plain(found.parallelism),
        "links": {"inside": found.cluster.inside.name, "between": found.cluster.between.name},
        "stages": [
            {
                "layers": list(stage.layers),
                "parameters": stage.parameters,
                "forward_us": stage.forward.us,
                "backward_us": stage.backward.us,
                "optimizer_us": stage.optimizer.us,
                "gradients_us": stage.gradients.us,
                "sums_us": (stage.sums_forward + stage.sums_backward).us,
                "send_us": stage.send.us,
                "send_bytes": stage.send_bytes,
                "parts": [plain(line) for line in stage.kernels.parts()],
            }
            for stage in found.stages
        ],
    }


def _operation(each: OperationTime) -> dict[str, Any]:
    operation = each.operation
    return {
        "workload": str(operation.workload),
        "count": operation.count,
        "part": operation.part,
        "phase": operation.phase,
        "time_us": each.time_us,
        "bound_us": each.bound_us,
        "limited_by": each.alone.binding,
    }


def _limit(found: NetworkPrediction, part: str) -> str:
    """Return what limits most of the time of a part."""
    times: dict[str, float] = {}
    for each in found.operations:
        if each.operation.part == part:
            times[each.alone.binding] = times.get(each.alone.binding, 0.0) + each.time_us
    return max(times, key=times.__getitem__)


def _bases(found: NetworkPrediction) -> dict[str, float]:
    """Return what the time rests on, as shares of it."""
    times: dict[str, float] = {}
    for each in found.operations:
        times[each.alone.basis] = times.get(each.alone.basis, 0.0) + each.time_us
    return {basis: us / found.device_us for basis, us in times.items()}


def render(model: ModelArguments, found: NetworkPrediction | StepPrediction, to: Console) -> None:
    """Print a prediction for people."""
    from tunebench.forecast.network import NetworkPrediction

    run = found.run
    what = f"{run.batch} x {run.seq} tokens" if run.seq else f"a batch of {run.batch}"
    step = "a training step" if run.trains else "a forward pass"
    fused = ", fused" if run.fused else ""
    on = f"{model.devices} x {found.device.name}" if model.devices > 1 else found.device.name
    to.print(f"{found.network} on {on}: {step} of {what} in {run.dtype}{fused}", soft_wrap=True)
    low, high = duration(found.low_us), duration(found.high_us)
    to.print(f"  time      {duration(found.time_us)}; nine of ten within {low} to {high}")
    to.print(f"  speed     {model.items / found.time_us * 1e6:,.0f} {model.unit} a second")
    if isinstance(found, NetworkPrediction):
        _render_one(found, to)
    else:
        _render_several(found, to)


def _render_one(found: NetworkPrediction, to: Console) -> None:
    to.print(f"  at least  {duration(found.bound_us)}")
    waits = ": the GPU waits for it" if found.waits_for_host else ""
    to.print(f"  host      {duration(found.host_us)} to launch {found.launches} kernels{waits}")
    if len(found.phases()) > 1:
        to.print("  phases    " + ", ".join(f"{line.part} {line.share:.0%}" for line in found.phases()))
    to.print("  basis     " + ", ".join(f"{name} {share:.0%}" for name, share in _bases(found).items()))
    to.print(_parts(found))


def _parts(found: NetworkPrediction) -> Any:
    rows = (
        (
            *(line.part, line.launches, duration(line.time_us), f"{line.share:.1%}"),
            *(duration(line.bound_us), _limit(found, line.part)),
        )
        for line in found.parts()
    )
    return table("part", ">kernels", ">time", ">share", ">at least", "limited by", rows=rows)


def _render_several(found: StepPrediction, to: Console) -> None:
    division = found.parallelism
    to.print(
        f"  division  {division.data} x data, {division.tensor} x tensor, {division.pipeline} stages, "
        f"{division.microbatches} micro-batches; {found.cluster.nodes} node(s) of "
        f"{found.cluster.devices_per_node}, {found.cluster.inside.name} inside"
    )
    shares = (
        ("kernels", found.compute),
        ("communication that is waited for", found.communication),
        ("waiting for another stage", found.bubble),
    )
    rows = ((name, duration(span.us), f"{span.us / found.time_us:.1%}") for name, span in shares)
    to.print(table("where the time goes", ">time", ">share", rows=rows))
    to.print(table(*_STAGE, rows=_stages(found)))


_STAGE = (">stage", "layers", ">forward", ">backward", ">optimizer", ">sums", ">gradients", ">send")


def _stages(found: StepPrediction) -> Iterator[tuple[object, ...]]:
    for index, stage in enumerate(found.stages):
        sums = stage.sums_forward + stage.sums_backward
        spans = (stage.forward, stage.backward, stage.optimizer, sums, stage.gradients, stage.send)
        yield (index, f"{stage.layers[0]} to {stage.layers[1] - 1}", *(duration(span.us) for span in spans))


def duration(us: float) -> str:
    """Return a time for people."""
    return f"{us / 1e6:.4g} s" if us >= 1e7 else f"{us / 1e3:.4g} ms" if us >= 1e4 else f"{us:.4g} us"
