"""Options of pipelines: predicted stages, stages with known costs, and links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tunebench._figure import significant
from tunebench.cli._completion import optimizers
from tunebench.errors import InputError, UnknownName
from tunebench.optimizer import OPTIMIZERS, find_optimizer

if TYPE_CHECKING:
    from tunebench.device import Device
    from tunebench.training.interconnect.cluster import Cluster
    from tunebench.training.pipeline import GivenStages, PredictedStages

__all__ = ["KnownStages", "LinkChoice", "ModelStages", "option_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStages:
    """The options of a model whose stages are predicted."""

    name: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|FILE",
            help="Model: a transformer by name (`tunebench workloads` lists them) or a config.json.",
            show_default=False,
            rich_help_panel="Predicted stages",
        ),
    ] = None
    seq: Annotated[
        int,
        typer.Option(
            min=0,
            help="Model: tokens per sequence. Default: the most that it has positions for.",
            show_default=False,
            rich_help_panel="Predicted stages",
        ),
    ] = 0
    microbatch_size: Annotated[
        int,
        typer.Option(min=1, help="Sequences per micro-batch.", rich_help_panel="Predicted stages"),
    ] = 1
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="Dtype of parameters and activations: f16, bf16 or f32.",
            rich_help_panel="Predicted stages",
        ),
    ] = "bf16"
    stack: Annotated[
        str,
        typer.Option(
            help="Model: software that runs it, one of eager (PyTorch), compiled (as by torch.compile) and "
            "megatron (kernels of Megatron-LM).",
            rich_help_panel="Predicted stages",
        ),
    ] = "megatron"
    flash_attention: Annotated[
        bool,
        typer.Option(
            "--flash-attention",
            help="Model, with --stack megatron: attention is one kernel that keeps no scores.",
            rich_help_panel="Predicted stages",
        ),
    ] = False
    recompute: Annotated[
        str,
        typer.Option(
            help="Training step with --stack megatron: activation recomputation, one of none, "
            "selective (the core of attention) and full (whole layers).",
            rich_help_panel="Predicted stages",
        ),
    ] = "none"
    tensor: Annotated[
        int,
        typer.Option(
            "--tensor",
            min=1,
            help="Tensor-parallel size.",
            rich_help_panel="Predicted stages",
        ),
    ] = 1
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="Tensor parallelism with --stack megatron: divide the tokens of all other kernels too.",
            rich_help_panel="Predicted stages",
        ),
    ] = False
    optimizer: Annotated[
        str,
        typer.Option(
            help=f"Training step: optimizer, whose states take memory, one of {', '.join(OPTIMIZERS)}.",
            autocompletion=optimizers,
            rich_help_panel="Predicted stages",
        ),
    ] = "adamw"
    state_bytes: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Bytes per parameter of parameters, gradients and optimizer states. Default: 16 with adamw.",
            show_default=False,
            rich_help_panel="Predicted stages",
        ),
    ] = None

    def stages(self, device: Device, ranks: int, links: LinkChoice) -> PredictedStages:
        """Return the stages of the model on a device.

        Raises:
            InputError: if the model does not support this division, or its activations are not known.
        """
        from tunebench.stack import Kernels
        from tunebench.training.pipeline import PredictedStages
        from tunebench.training.pipeline.activation import architecture_of
        from tunebench.workloads.networks import network
        from tunebench.workloads.networks import network_run as kinds

        assert self.name is not None
        find_optimizer(self.optimizer)
        for name, choice, kind in (
            ("dtype", self.dtype, kinds.DType),
            ("recomputation", self.recompute, kinds.Recompute),
            ("stack", self.stack, Kernels),
        ):
            if choice not in get_args(kind):
                raise UnknownName(name, choice, get_args(kind))
        model = network(self.name)
        architecture = architecture_of(model)
        seq = self.seq or architecture.positions or architecture.tokens
        if not seq:
            raise InputError(f"{self.name} has sequences of any length: add --seq TOKENS")
        return PredictedStages(
            network=model,
            device=device,
            cluster=links.cluster(device, ranks * self.tensor),
            ranks=ranks,
            tensor=self.tensor,
            microbatch=self.microbatch_size,
            seq=seq,
            dtype=self.dtype,  # type: ignore[arg-type]
            stack=self.stack,  # type: ignore[arg-type]
            flash_attention=self.flash_attention,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,  # type: ignore[arg-type]
            optimizer=self.optimizer,
            state_bytes=self.state_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStages:
    """The options of stages whose costs are known."""

    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML or JSON file with the costs of the model's parts, such as measured ones.",
            show_default=False,
            rich_help_panel="Known stages",
        ),
    ] = None
    forward_us: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Forward pass of a micro-batch on each rank, in microseconds.",
            show_default=False,
            rich_help_panel="Known stages",
        ),
    ] = None
    backward_us: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Backward pass, in microseconds. Default: twice the forward pass.",
            show_default=False,
            rich_help_panel="Known stages",
        ),
    ] = None
    weight_us: Annotated[
        float | None,
        typer.Option(
            "--weight-gradient-us",
            min=0.0,
            help="Share of the backward pass that computes gradients of weights, in microseconds. Default: "
            "half of it.",
            show_default=False,
            rich_help_panel="Known stages",
        ),
    ] = None
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Activations of a micro-batch on each rank, such as 2GB.",
            show_default=False,
            rich_help_panel="Known stages",
        ),
    ] = None
    sent: Annotated[
        str | None,
        typer.Option(
            "--send",
            metavar="SIZE",
            help="Output that a stage sends to the next, such as 40MB.",
            show_default=False,
            rich_help_panel="Known stages",
        ),
    ] = None
    static: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Parameters, gradients and optimizer states of each rank, such as 30GB.",
            show_default=False,
            rich_help_panel="Known stages",
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Whether a time is given."""
        return self.forward_us is not None

    def stages(self, ranks: int | None, links: LinkChoice) -> GivenStages:
        """Return the stages with these costs.

        Raises:
            InputError: if the file is invalid, or numbers are missing or contradict each other.
        """
        from tunebench.training.pipeline import GivenStages, read_stages
        from tunebench.training.schedules import StageCosts

        if self.costs is not None:
            return links.applied(read_stages(self.costs, ranks))
        if ranks is None:
            raise InputError("--forward-us needs --stages N, the number of ranks of the pipeline")
        assert self.forward_us is not None
        backward_us = 2 * self.forward_us if self.backward_us is None else self.backward_us
        weight_us = backward_us / 2 if self.weight_us is None else self.weight_us
        if weight_us > backward_us:
            raise InputError(
                f"--weight-gradient-us {significant(weight_us)} is a share of the backward pass: expected at "
                f"most {significant(backward_us)}"
            )
        stage = StageCosts(
            forward_us=self.forward_us,
            input_gradient_us=backward_us - weight_us,
            weight_gradient_us=weight_us,
            activation_bytes=option_bytes("--activations", self.activations),
            send_bytes=option_bytes("--send", self.sent),
            static_bytes=option_bytes("--static", self.static),
        )
        return links.applied(GivenStages.uniform(stage, ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChoice:
    """The options of links between ranks."""

    link: Annotated[
        str | None,
        typer.Option(
            help="Link within a node: a name, or GB/s per direction and device. Default: the usual link of "
            "the device.",
            show_default=False,
            rich_help_panel="Links",
        ),
    ] = None
    between: Annotated[
        str | None,
        typer.Option(
            "--network",
            help="Link between nodes, in the same form as --link.",
            show_default=False,
            rich_help_panel="Links",
        ),
    ] = None
    devices_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, help="Devices in each node. Default: 8.", show_default=False, rich_help_panel="Links"
        ),
    ] = None

    def cluster(self, device: Device, devices: int) -> Cluster:
        """Return a cluster of a device with room for so many devices."""
        from tunebench.training.interconnect.cluster import Cluster, find_link, link_of

        per_node = self.devices_per_node or 8
        nodes = -(-devices // per_node)
        inside = find_link(self.link) if self.link else link_of(device, network=False)
        between = inside
        if self.between or nodes > 1:
            between = find_link(self.between) if self.between else link_of(device, network=True)
        return Cluster(inside=inside, between=between, devices_per_node=per_node, nodes=nodes)

    def applied(self, stages: GivenStages) -> GivenStages:
        """Return given stages with these links in place of their own."""
        from tunebench.training.interconnect.cluster import find_link
        from tunebench.training.schedules import link_transfer

        changed: dict[str, Any] = {}
        if self.link is not None:
            changed["inside"] = link_transfer(find_link(self.link))
        if self.between is not None:
            changed["between"] = link_transfer(find_link(self.between))
        if self.devices_per_node is not None:
            changed["per_node"] = self.devices_per_node
        return replace(stages, **changed)


def option_bytes(option: str, text: str | None) -> int:
    """Return the size that an option has in bytes; 0 for none."""
    from tunebench.training.memory.budget import size_bytes

    return 0 if text is None or text.strip() == "0" else size_bytes(text, option)
