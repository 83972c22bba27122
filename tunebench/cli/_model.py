"""Command-line options of a model: its name, how it runs, and how it is divided among devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, get_args

import typer

from tunebench.cli._completion import optimizers, schedules, stacks
from tunebench.cli._option import ModelType, Training, renamed_flag
from tunebench.cli._output import console
from tunebench.errors import InputError, UnknownName
from tunebench.optimizer import OPTIMIZERS
from tunebench.stack import find_stack
from tunebench.training.schedules.registry import SCHEDULES

if TYPE_CHECKING:
    from tunebench.device import Device
    from tunebench.forecast.network import NetworkPrediction
    from tunebench.training.cluster.device_memory import DeviceMemory
    from tunebench.training.cluster.generation import Generation
    from tunebench.training.cluster.memory_verdict import MemoryVerdict
    from tunebench.training.interconnect.cluster import Cluster
    from tunebench.training.steps.calibration import Calibration
    from tunebench.training.steps.step import Parallelism, StepPrediction
    from tunebench.workloads.networks import Network, NetworkRun

    _Prediction = TypeVar("_Prediction", NetworkPrediction, StepPrediction)

__all__ = ["ModelRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """The options of a model."""

    name: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME|FILE",
            help=(
                "Model: a name (`tunebench workloads` lists them), a config.json, or a file with a "
                "list of workloads."
            ),
            show_default=False,
        ),
    ]
    batch: Annotated[
        int, typer.Option(min=1, help="Batch size: sequences or images of all devices together.")
    ] = 1
    seq: Annotated[int, typer.Option(min=0, help="Model: tokens per sequence; 0 for images.")] = 0
    generate: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Model: tokens that each sequence generates after a prompt of --seq tokens, on --tensor "
            "devices. --stack compiled --cuda-graphs runs as serving engines do.",
            show_default=False,
        ),
    ] = 0
    training: Training = False
    mode: Annotated[
        str | None,
        typer.Option("--mode", hidden=True, callback=renamed_flag("--training")),
    ] = None
    dtype: ModelType = None
    fused: Annotated[
        bool, typer.Option("--fused", hidden=True, callback=renamed_flag("--stack compiled"))
    ] = False
    stack: Annotated[
        str,
        typer.Option(
            help="Model: software that runs it, one of eager (PyTorch), compiled (operations fused, as "
            "by torch.compile), serving (compiled, with its own sums of short tensors), fsdp, torchtitan, "
            "megatron and megatron@2022 (Megatron-DeepSpeed).",
            autocompletion=stacks,
        ),
    ] = "eager"
    tuning: Annotated[
        str,
        typer.Option(
            metavar="TUNING",
            help="Training step in 16 bits: tuned (as NVIDIA publishes them) or typical (as others do). "
            "Default: tuned for megatron, else typical.",
            show_default=False,
        ),
    ] = ""
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Training step in 16 bits: measured steps of the same device and stack, which move the "
            "prediction.",
            show_default=False,
        ),
    ] = None
    recompute: Annotated[
        str,
        typer.Option(
            help="Training step: activation recomputation, one of none, "
            "selective (the core of attention, with --stack megatron), experts (router and experts, with "
            "--stack megatron), operators (all but attention and every second product, as torchtitan) and "
            "full (whole layers)."
        ),
    ] = "none"
    recompute_layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --recompute full: number of layers of each stage to recompute. Default: all.",
            show_default=False,
        ),
    ] = None
    flash_attention: Annotated[
        bool, typer.Option("--flash-attention", help="Model: attention is one kernel that stores no scores.")
    ] = False
    attention: Annotated[
        str,
        typer.Option(
            help="Model: implementation of attention in one kernel: flash-attention-2, flash-attention-3, "
            "flash-attention-4, cudnn, triton, or default, that of the stack."
        ),
    ] = "default"
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="Tensor parallelism with --stack megatron: divide the tokens of all other kernels too.",
        ),
    ] = False
    fp8: Annotated[
        str,
        typer.Option(
            help="Scaling of 8-bit floats in linear layers, with --stack megatron or compiled: none, delayed "
            "or current."
        ),
    ] = "none"
    optimizer: Annotated[
        str | None,
        typer.Option(
            help=f"Training step: optimizer, one of {', '.join(OPTIMIZERS)}. Default: adamw.",
            show_default=False,
            autocompletion=optimizers,
        ),
    ] = None
    data: Annotated[int, typer.Option("--data", min=1, help="Data-parallel size.")] = 1
    tensor: Annotated[
        int,
        typer.Option("--tensor", min=1, help="Tensor-parallel size."),
    ] = 1
    pipeline: Annotated[
        int,
        typer.Option("--pipeline", min=1, help="Pipeline-parallel size."),
    ] = 1
    expert: Annotated[
        int,
        typer.Option(
            min=1,
            help="Expert-parallel size, with --stack megatron: a divisor of the devices of a stage.",
        ),
    ] = 1
    expert_tensor: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tensor-parallel size of each expert, 1 or that of --tensor. Default: that of --tensor.",
            show_default=False,
        ),
    ] = None
    expert_load: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="Expert parallelism: tokens of the busiest device, relative to the mean. Default: 1.",
            show_default=False,
        ),
    ] = 1.0
    microbatches: Annotated[
        int,
        typer.Option(
            "--microbatches", min=1, help="Number of micro-batches per step, whose gradients are added up."
        ),
    ] = 1
    schedule: Annotated[
        str,
        typer.Option(
            help=f"Pipeline parallelism: schedule, one of {', '.join(SCHEDULES)}.",
            autocompletion=schedules,
        ),
    ] = "1f1b"
    chunks: Annotated[
        int,
        typer.Option(
            min=1, help="Pipeline parallelism, interleaved and looped schedules: stages of each device."
        ),
    ] = 1
    stage_layers: Annotated[
        str,
        typer.Option(
            metavar="N,N,…",
            help="Pipeline parallelism: layers of each stage. Default: as even as possible.",
            show_default=False,
        ),
    ] = ""
    embedding_layers: Annotated[
        int,
        typer.Option(
            min=0, help="Pipeline parallelism: layers as which the embedding counts in an even division."
        ),
    ] = 0
    head_layers: Annotated[
        int,
        typer.Option(
            min=0, help="Pipeline parallelism: layers as which the head counts in an even division."
        ),
    ] = 0
    context: Annotated[
        int,
        typer.Option(
            "--context",
            min=1,
            help="Context-parallel size, with --flash-attention or --stack compiled.",
        ),
    ] = 1
    context_gather: Annotated[
        bool,
        typer.Option(
            "--context-gather",
            help="Context parallelism: gather all keys and values before attention, instead of a ring.",
        ),
    ] = False
    sharding: Annotated[
        str,
        typer.Option(
            help="Data parallelism: what the ranks shard, one of none, optimizer (ZeRO-1, distributed "
            "optimizer), gradients (ZeRO-2) and full (ZeRO-3, FSDP)."
        ),
    ] = "none"
    gathering: Annotated[
        str,
        typer.Option(
            help="With --sharding full: how parameters are gathered, ahead (a layer in advance) or lists (by "
            "lists of tensors for each matrix, as DeepSpeed did until 2021)."
        ),
    ] = "ahead"
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap/--no-overlap",
            help="Data parallelism: sum gradients during the backward pass and gather updated parameters "
            "during the forward pass, or afterwards.",
        ),
    ] = True
    tensor_overlap: Annotated[
        bool,
        typer.Option(
            "--tensor-overlap/--no-tensor-overlap",
            help="Tensor parallelism with --stack megatron: run collectives of the backward pass beside "
            "products.",
        ),
    ] = True
    user_buffers: Annotated[
        bool,
        typer.Option(
            "--user-buffers",
            help="Run collectives in parts beside products (Transformer Engine), with --sequence-parallel.",
        ),
    ] = False
    f32_gradients: Annotated[
        bool, typer.Option("--f32-gradients", help="Sum gradients in f32, in training steps in 16 bits.")
    ] = False
    framework: Annotated[
        str,
        typer.Option(
            metavar="FRAMEWORK",
            help="Training step with --stack megatron: framework whose buffers count in memory: megatron, "
            "deepspeed, fsdp or torchtitan. Default: that of the stack.",
            show_default=False,
        ),
    ] = ""
    cuda_graphs: Annotated[
        bool,
        typer.Option("--cuda-graphs", help="Launch kernels as CUDA graphs, without host time for each."),
    ] = False
    launch_blocking: Annotated[
        bool,
        typer.Option(
            "--launch-blocking",
            help="Each launch waits until its kernel has ended, as with CUDA_LAUNCH_BLOCKING=1.",
        ),
    ] = False
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of equal nodes. Default: the fewest with at most 8 devices each (GH200: 1).",
            show_default=False,
        ),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(
            help=(
                "Link within a node: a name, or GB/s per direction and device. Default: the usual "
                "link of the device."
            ),
            show_default=False,
        ),
    ] = None
    network_link: Annotated[
        str | None,
        typer.Option("--network", help="Link between nodes, in the same form as --link.", show_default=False),
    ] = None

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def items(self) -> int:
        """Tokens of a run, or those that it generates; samples of a model without sequences."""
        return self.batch * (self.generate or self.seq or 1)

    @property
    def unit(self) -> str:
        """Unit of `items`: tokens, images, or samples for a list of workloads."""
        from tunebench.workloads.networks import network
        from tunebench.workloads.networks.listed import ListedNetwork

        if self.seq:
            return "tokens"
        return "samples" if isinstance(network(self.name), ListedNetwork) else "images"

    @property
    def memory_framework(self) -> str:
        """Framework whose buffers count in memory."""
        return self.framework or find_stack(self.stack).framework

    @property
    def parallelism(self) -> Parallelism:
        """Division of the model among devices.

        Raises:
            InputError: if the division is invalid.
        """
        from tunebench.training.steps.step import Parallelism
        from tunebench.workloads.networks.layer_division import shared_fields

        # The options have the names of the fields, but for the layers of stages, which are a text.
        stage_layers = _numbers(self.stage_layers) if self.stage_layers else None
        return Parallelism(**{**shared_fields(self, Parallelism), "stage_layers": stage_layers})

    def predict(self, device: Device) -> NetworkPrediction | StepPrediction:
        """Predict the model on a device, or on several of them.

        Args:
            device: One of the devices.

        Raises:
            InputError: if there is no such model, or it does not support this run or division.
        """
        from tunebench.forecast.network import predict_network
        from tunebench.training.steps.step import predict_step
        from tunebench.workloads.networks import network

        model = network(self.name)
        run = self._run(model)
        self._check()
        if self.devices == 1 and self.expert == 1:
            if self.nodes and self.nodes > 1:
                raise InputError("--nodes needs --data, --tensor, --context or --pipeline")
            if self.microbatches == 1:
                return self._calibrated(predict_network(model, device, run))
        return self._calibrated(predict_step(model, device, run, self._cluster(device), self.parallelism))

    def predict_generation(self, device: Device) -> Generation:
        """Predict the generation of `generate` tokens by each sequence.

        Args:
            device: One of the devices.

        Raises:
            InputError: if there is no such model, or it does not support this run or division.
        """
        from tunebench.training.cluster.generation import predict_generation
        from tunebench.workloads.networks import network
        from tunebench.workloads.networks.transformer import Transformer

        if self.devices != self.tensor or self.expert > 1 or self.microbatches > 1 or self.training:
            raise InputError(
                "--generate is for inference on --tensor devices: leave --training, --data, --context, "
                "--pipeline, --expert and --microbatches out"
            )
        model = network(self.name)
        if not isinstance(model, Transformer):
            raise InputError(f"--generate needs a decoder, such as gpt2, llama or mixtral; got {model.name}")
        self._check()
        return predict_generation(
            model,
            device,
            self._run(model),
            self.generate,
            tensor=self.tensor,
            cluster=self._cluster(device) if self.tensor > 1 else None,
        )

    def _cluster(self, device: Device) -> Cluster:
        from tunebench.training.interconnect.cluster import Cluster

        return Cluster.of(
            device, devices=self.devices, nodes=self.nodes, link=self.link, network=self.network_link
        )

    def _run(self, model: Network) -> NetworkRun:
        from tunebench.workloads.networks import NetworkRun
        from tunebench.workloads.networks import network_run as kinds

        dtype = self.dtype or _own_type(model)
        mode = self.mode or ("train" if self.training else "infer")
        optimizer = self.optimizer or ("adamw" if mode == "train" else "none")
        for name, choice, kind in (
            ("mode", mode, kinds.Mode),
            ("dtype", dtype, kinds.DType),
        ):
            if choice not in get_args(kind):
                raise UnknownName(name, choice, get_args(kind))
        return NetworkRun(
            batch=self.batch,
            seq=self.seq,
            mode=mode,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            stack="compiled" if self.fused else self.stack,
            tuning=self.tuning,
            recompute=self.recompute,  # type: ignore[arg-type]
            flash=self.flash_attention,
            attention=self.attention,
            sequence_parallel=self.sequence_parallel,
            fp8=self.fp8,  # type: ignore[arg-type]
            recompute_layers=self.recompute_layers,
            wide_gradients=self.f32_gradients,
            cuda_graphs=self.cuda_graphs,
            launch_blocking=self.launch_blocking,
            context_gather=self.context_gather,
            optimizer=optimizer,
            expert_load=self.expert_load,
        )

    def calibration(self, prediction: NetworkPrediction | StepPrediction) -> Calibration | None:
        """Return what the measured steps of `--calibrate` say; None without them.

        Args:
            prediction: The prediction, whose model, device, stack and dtype a file may leave out.

        Raises:
            InputError: if the file is invalid.
        """
        from tunebench.training.steps.calibration import calibrate
        from tunebench.training.steps.measured_file import read_measured

        if self.calibrate is None:
            return None
        run = prediction.run
        defaults = {
            "model": self.name,
            "stack": run.stack,
            "tuning": run.tuning,
            "dtype": run.dtype,
            "seq": run.seq,
        }
        return calibrate(read_measured(self.calibrate, defaults, device=prediction.device))

    def _calibrated(self, prediction: _Prediction) -> _Prediction:
        calibration = self.calibration(prediction)
        return prediction if calibration is None else calibration.calibrated(prediction)

    def _check(self) -> None:
        """Refuse options that have no effect without another one, and an unknown framework."""
        from tunebench.training.cluster.framework_memory import framework_memory

        framework_memory(self.memory_framework)
        alone, divisions = self.devices * self.expert == 1, "--data, --tensor, --context or --pipeline"
        for ineffective, option, needed in (
            (self.user_buffers and not self.sequence_parallel, "--user-buffers", "--sequence-parallel"),
            (self.context_gather and self.context == 1, "--context-gather", "--context"),
            (self.gathering != "ahead" and self.sharding != "full", "--gathering", "--sharding full"),
            (self.sharding != "none" and self.data * self.context == 1, "--sharding", "--data"),
            (self.chunks > 1 and self.pipeline == 1, "--chunks", "--pipeline"),
            (self.link and alone, "--link", divisions),
            (self.network_link and alone, "--network", divisions),
        ):
            if ineffective:
                raise InputError(f"{option} has no effect alone: it needs {needed}")

    def memory(self, prediction: NetworkPrediction | StepPrediction) -> tuple[DeviceMemory, ...]:
        """Return the memory of the devices of each rank of the pipeline; nothing if it is not modelled."""
        from tunebench.forecast.network import NetworkPrediction
        from tunebench.training.cluster.step_memory import step_memory
        from tunebench.workloads.networks import network

        run = prediction.run
        if not run.trains or run.kernels != "megatron" or run.dtype == "f32":
            return ()
        try:
            cluster = None if isinstance(prediction, NetworkPrediction) else prediction.cluster
            return step_memory(
                network(self.name),
                run,
                self.parallelism,
                cluster=cluster,
                framework=self.memory_framework,  # type: ignore[arg-type]
            )
        except InputError:  # layers of another kind, whose activations are not known
            return ()

    def verdict(
        self, memory: DeviceMemory, prediction: NetworkPrediction | StepPrediction
    ) -> MemoryVerdict | None:
        """Return whether the memory of a rank fits its device; None if the device's memory is unknown."""
        from tunebench.training.cluster.memory_verdict import memory_verdict

        usable = prediction.device.usable_memory_bytes
        return memory_verdict(memory.needed, usable, self.memory_framework) if usable else None  # type: ignore[arg-type]

    def min_memory_bytes(self, prediction: NetworkPrediction | StepPrediction) -> int | None:
        """Return the least memory in bytes that each device needs; None if unknown."""
        from tunebench.training.steps.footprint import min_memory_bytes
        from tunebench.workloads.networks import network

        return min_memory_bytes(network(self.name), prediction.run, self.parallelism)

    def warn_if_too_large(self, prediction: NetworkPrediction | StepPrediction) -> None:
        """Warn on stderr if the model exceeds the memory of the device."""
        device, needed = prediction.device, self.min_memory_bytes(prediction)
        if self.memory(prediction):  # the report has a verdict
            return
        if needed is not None and 0 < device.memory_bytes < needed:
            kinds = "parameters, gradients and optimizer states" if prediction.run.trains else "parameters"
            console(stderr=True).print(
                f"warning: {prediction.network} does not fit into {device.name}: it has "
                f"{device.memory_bytes / 2**30:.0f} GiB, {kinds} need {needed / 2**30:.0f} GiB",
                soft_wrap=True,
            )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"--stage-layers {text}: expected numbers of layers, such as 11,11,10") from None


def _own_type(network: Network) -> str:
    """Return the common dtype of a list of workloads; f32 if there is none."""
    from tunebench.workloads.networks.listed import ListedNetwork

    types = (
        {entry.workload.dtype for entry in network.entries} if isinstance(network, ListedNetwork) else set()
    )
    return types.pop() if len(types) == 1 else "f32"
