"""Plans as arguments and configuration files of training frameworks: `emit`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tunebench._figure import significant
from tunebench.errors import InputError, UnknownName
from tunebench.optimizer import OPTIMIZERS, find_optimizer
from tunebench.training.cluster.framework_memory import Framework
from tunebench.training.cluster.space import ClusterPlan, TrainingJob
from tunebench.training.pipeline.activation import architecture_of
from tunebench.training.schedules.registry import PLANNED_SCHEDULES, SCHEDULES, find_schedule
from tunebench.workloads.networks.architecture import Architecture

__all__ = ["RUNNABLE", "Emitted", "Framework", "emit", "megatron_arguments", "runs_in_megatron"]

_OF_MEGATRON = tuple(name for name in PLANNED_SCHEDULES if SCHEDULES[name].megatron)
_OF_TORCH = tuple(name for name in PLANNED_SCHEDULES if SCHEDULES[name].torch)
_OF_DEEPSPEED = tuple(name for name in PLANNED_SCHEDULES if SCHEDULES[name].deepspeed)
"""Schedules of plans that a framework can run."""

RUNNABLE: Mapping[Framework, Mapping[str, str]] = {
    "megatron": {"schedule": "|".join(_OF_MEGATRON)},
    "deepspeed": {"schedule": "|".join(_OF_DEEPSPEED)},
    "fsdp": {"schedule": "1f1b", "recompute_layers": "0"},
    "torchtitan": {"schedule": "|".join(_OF_TORCH), "recompute_layers": "0"},
}
"""Values of schedules and of recomputation by number of layers that a framework can run, as `fixed_values`
reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """A plan for a framework.

    Attributes:
        framework: The framework.
        text: Arguments or a configuration file.
        notes: What the text cannot say: settings of the training program, and differences from the plan.
    """

    framework: Framework
    text: str
    notes: tuple[str, ...]


def emit(framework: str, plan: ClusterPlan, job: TrainingJob) -> Emitted:
    """Return a plan as arguments or a configuration file of a framework.

    Option names are those of Megatron-LM 0.16, DeepSpeed 0.19, Accelerate 1.15 and torchtitan 0.3.

    Args:
        framework: Name of the framework.
        plan: The plan.
        job: The network and its batch.

    Raises:
        UnknownName: There is no such framework.
        InputError: The framework cannot run the plan; the message names the value that it cannot have.
    """
    if framework not in _WRITERS:
        raise UnknownName("framework", framework, _WRITERS)
    if plan.recompute == "operators" and framework != "torchtitan":
        raise _impossible(framework, "recomputation of every second product", "recompute", plan)
    if job.fp8 != "none" and framework != "megatron":
        raise InputError(
            f"{framework}: the plan is for FP8 by Transformer Engine, which megatron runs: leave out --fp8"
        )
    names = {"megatron": "megatron", "torchtitan": "torchtitan"}
    if framework in names and architecture_of(job.network).decoder_layers:
        raise InputError(
            f"{framework} has no arguments here for the encoder and decoder of {job.network.name}: leave out "
            "--emit, or use another framework"
        )
    if framework in names and architecture_of(job.network).patch:
        raise InputError(
            f"{framework} has no arguments for the images of {job.network.name}: leave out --emit, or use "
            "another framework"
        )
    optimizer = find_optimizer(job.optimizer)
    if framework in names and getattr(optimizer, names[framework]) is None:
        supported = [name for name, record in OPTIMIZERS.items() if getattr(record, names[framework])]
        raise InputError(
            f"{framework} has no optimizer {job.optimizer}: plan with --optimizer {' or '.join(supported)}"
        )
    emitted = _WRITERS[framework](plan, job)
    if job.optimizer == "adamw" or framework == "megatron":
        return emitted
    return replace(emitted, notes=(*emitted.notes, f"the plan is for the optimizer {job.optimizer}"))


def megatron_arguments(plan: ClusterPlan, job: TrainingJob) -> list[str]:
    """Return the command-line arguments of Megatron-LM's training scripts for a plan.

    Args:
        plan: The plan.
        job: The network and its batch.

    Source: NVIDIA/Megatron-LM, `megatron/training/arguments.py`.
    """
    arguments = [
        f"--tensor-model-parallel-size {plan.tensor}",
        f"--context-parallel-size {plan.context}",
        f"--pipeline-model-parallel-size {plan.pipeline}",
        f"--micro-batch-size {plan.microbatch}",
        f"--global-batch-size {job.batch}",
        f"--seq-length {job.seq}",
        f"--{'fp16' if job.dtype == 'f16' else 'bf16'}",
    ]
    if plan.context > 1:
        arguments.append(f"--cp-comm-type {'allgather' if plan.context_gather else 'p2p'}")
    arguments += _megatron_stages(plan, job)
    if plan.recompute == "full":
        method = f"block --recompute-num-layers {plan.recompute_layers}"
        if not plan.recompute_layers:
            method = "uniform --recompute-num-layers 1"
        arguments.append(f"--recompute-granularity full --recompute-method {method}")
    if plan.recompute == "selective":
        arguments.append("--recompute-granularity selective")
    if plan.recompute == "experts":
        arguments.append("--recompute-granularity selective --recompute-modules moe")
    if architecture_of(job.network).experts:
        arguments.append(f"--expert-model-parallel-size {plan.expert}")
        arguments.append(f"--expert-tensor-parallel-size {plan.expert_tensor}")
    if plan.sequence_parallel:
        arguments.append("--sequence-parallel")
    arguments.append(f"--attention-backend {'flash' if plan.flash else 'unfused'}")
    if plan.sharding == "optimizer":
        arguments.append("--use-distributed-optimizer")
    if plan.states == "host":
        arguments.append("--optimizer-cpu-offload --use-precision-aware-optimizer")
    if plan.sharding == "full":
        arguments.append("--use-torch-fsdp2")
    return arguments + _megatron_optimizer(job) + _megatron_overlap(plan, job)


def _megatron_stages(plan: ClusterPlan, job: TrainingJob) -> list[str]:
    """Return the arguments of the layers of stages; none for equal stages, one on each rank."""
    counts = [last - first for first, last in plan.stages(job.network.layers)]
    if len(set(counts)) > 1:
        layout = "|".join(f"t*{count}" if count else "" for count in counts)
        return [f'--pipeline-model-parallel-layout "E{layout}L"']
    return [f"--num-layers-per-virtual-pipeline-stage {counts[0]}"] if plan.chunks > 1 else []


def _megatron_optimizer(job: TrainingJob) -> list[str]:
    """Return the arguments that name the optimizer, unless it is AdamW, the default."""
    if job.optimizer == "adamw":
        return []
    momentum = ["--sgd-momentum 0"] if job.optimizer == "sgd" else []
    return [f"--optimizer {find_optimizer(job.optimizer).megatron}", *momentum]


def _megatron_overlap(plan: ClusterPlan, job: TrainingJob) -> list[str]:
    """Return the arguments of what runs beside kernels, of CUDA graphs, and of types of numbers."""
    arguments = []
    if job.gradient_overlap and plan.sharding != "full" and plan.copies > 1:
        arguments.append("--overlap-grad-reduce")
        if plan.sharding == "optimizer":
            arguments.append("--overlap-param-gather")
    if job.user_buffers and plan.sequence_parallel:
        arguments.append("--tp-comm-overlap")
    if job.cuda_graphs:
        arguments.append("--cuda-graph-impl local --te-rng-tracker")
    # By default, Megatron-LM sums gradients in f32 with --bf16, and in 16 bits with --fp16.
    if job.wide_gradients:
        arguments.append("--accumulate-allreduce-grads-in-fp32")
    elif job.dtype == "bf16":
        arguments.append("--grad-reduce-in-bf16")
    if job.fp8 != "none":
        recipe = "tensorwise" if job.fp8 == "current" else "delayed"
        arguments.append(f"--transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe {recipe}")
    return arguments


_MEGATRON = {
    "parameters": ("device",),
    "activations": ("device",),
    "states": ("device", "host"),
    "sharding": ("none", "optimizer", "full"),
    "schedule": _OF_MEGATRON,
}
"""Values that Megatron-LM can run, of parameters of a plan that have others."""


def runs_in_megatron(plan: ClusterPlan, optimizer: str = "adamw") -> bool:
    """Return whether Megatron-LM can run a plan with an optimizer."""
    return find_optimizer(optimizer).megatron is not None and all(
        getattr(plan, name) in possible for name, possible in _MEGATRON.items()
    )


def _megatron(plan: ClusterPlan, job: TrainingJob) -> Emitted:
    for name, possible in _MEGATRON.items():
        if getattr(plan, name) not in possible:
            raise _impossible("megatron", f"{name}={getattr(plan, name)}", name, plan)
    if plan.sharding == "full" and plan.pipeline > 1:
        raise _impossible("megatron", "full sharding in a pipeline", "sharding", plan)
    if undescribed := _undescribed(architecture_of(job.network)):
        raise InputError(
            f"Megatron-LM has no argument for {undescribed} of {job.network.name}: leave out --emit, or use "
            "another framework"
        )
    arguments = [*_megatron_model(job), *megatron_arguments(plan, job)]
    notes = ["add the data, the tokenizer, the optimizer's settings and the dropout"]
    if architecture_of(job.network).experts:
        notes.append("add --moe-aux-loss-coeff, the weight of the loss that balances the experts")
    text = _script(arguments, "pretrain_gpt.py", plan)
    return Emitted(framework="megatron", text=text, notes=tuple(notes))


def _megatron_model(job: TrainingJob) -> list[str]:
    """Return the arguments that describe the network."""
    architecture = architecture_of(job.network)
    arguments = [
        f"--num-layers {architecture.layers}",
        f"--hidden-size {architecture.hidden}",
        f"--ffn-hidden-size {architecture.dense_ffn or architecture.ffn}",
        f"--num-attention-heads {architecture.heads}",
        f"--kv-channels {architecture.head_dim}",
        f"--max-position-embeddings {max(architecture.positions, job.seq)}",
    ]
    if architecture.heads_k != architecture.heads:
        arguments.append(f"--group-query-attention --num-query-groups {architecture.heads_k}")
    if not architecture.tied:
        arguments.append("--untie-embeddings-and-output-weights")
    if architecture.gated:
        arguments += [
            "--normalization RMSNorm",
            "--position-embedding-type rope",
            "--swiglu",
            *(() if architecture.mlp_bias else ("--disable-bias-linear",)),
        ]
    if architecture.biased_qkv and not architecture.mlp_bias:
        arguments.append("--add-qkv-bias")
    if architecture.normalised_heads or architecture.key_latent:
        arguments.append("--qk-layernorm")
    return arguments + _megatron_attention(architecture) + _megatron_experts(job)


def _undescribed(architecture: Architecture) -> str:
    """Return the part of a layer that Megatron-LM has no argument for; empty if there is none."""
    if architecture.norms == 4:
        return "normalisations after attention and the feed-forward part"
    if architecture.score_cap or architecture.logit_cap:
        return "soft caps"
    return "a bias of the output product alone" if architecture.output_bias != architecture.mlp_bias else ""


def _megatron_attention(architecture: Architecture) -> list[str]:
    """Return the arguments of windows, sinks and multi-head latent attention."""
    arguments = []
    if any(architecture.windows):
        # Megatron-LM counts the keys before a query, without its own.
        arguments.append(f"--window-size {max(architecture.windows) - 1},0")
        if not architecture.uniform and 0 in architecture.windows:
            slides = ",".join(str(int(window > 0)) for window in architecture.windows)
            arguments.append(f"--window-attn-skip-freq '[{slides}]'")
    if architecture.sinks:
        arguments.append("--softmax-type learnable")
    if architecture.key_latent:
        latent = {
            "q-lora-rank": architecture.query_latent,
            "kv-lora-rank": architecture.key_latent,
            "qk-head-dim": architecture.head_dim - architecture.rotary_dim,
            "qk-pos-emb-head-dim": architecture.rotary_dim,
            "v-head-dim": architecture.value_dim,
        }
        arguments += ["--multi-latent-attention"]
        arguments += [f"--{name} {size}" for name, size in latent.items() if size]
    return arguments


def _megatron_experts(job: TrainingJob) -> list[str]:
    """Return the arguments that describe the experts, and how tokens reach them."""
    architecture = architecture_of(job.network)
    if not architecture.experts:
        return []
    arguments = [
        f"--num-experts {architecture.experts}",
        f"--moe-router-topk {architecture.experts_per_token}",
        f"--moe-ffn-hidden-size {architecture.ffn}",
        "--moe-router-load-balancing-type aux_loss",
        "--moe-token-dispatcher-type alltoall",
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
    ]
    if architecture.shared_ffn:
        arguments.append(f"--moe-shared-expert-intermediate-size {architecture.shared_ffn}")
    if architecture.shared_gate:
        arguments.append("--moe-shared-expert-gate")
    if architecture.dense_layers:
        sparse = architecture.layers - architecture.dense_layers
        arguments.append(f"--moe-layer-freq '[0]*{architecture.dense_layers}+[1]*{sparse}'")
    if architecture.expert_groups > 1:
        arguments.append(
            f"--moe-router-num-groups {architecture.expert_groups} "
            f"--moe-router-group-topk {architecture.groups_per_token}"
        )
    if architecture.family == "deepseek_v3":
        arguments.append("--moe-router-score-function sigmoid --moe-router-enable-expert-bias")
    if job.capacity_factor is not None:
        arguments.append(f"--moe-expert-capacity-factor {significant(job.capacity_factor)}")
    return arguments


def _torchtitan(plan: ClusterPlan, job: TrainingJob) -> Emitted:
    _refuse_f16("torchtitan", job)
    if plan.expert_tensor > 1:
        raise _impossible("torchtitan", "experts that devices share", "expert_tensor", plan)
    if plan.recompute == "experts":
        raise _impossible("torchtitan", "recomputation of experts alone", "recompute", plan)
    if plan.sharding == "none" and plan.copies > 1 and plan.devices > plan.data:
        feature = "copies that share nothing, beside other parallelism"
        raise _impossible("torchtitan", feature, "sharding", plan)
    _refuse_host("torchtitan", plan)
    _refuse_layers("torchtitan", plan)
    if plan.schedule not in _OF_TORCH:
        raise _impossible("torchtitan", f"the schedule {plan.schedule}", "schedule", plan)
    if plan.context > 1 and not plan.context_gather:
        raise _impossible("torchtitan", "a ring of context parallelism", "context_gather", plan)
    shard = 1 if plan.sharding == "none" else plan.data
    arguments = [
        f"--training.local-batch-size {job.batch // plan.data if plan.pipeline > 1 else plan.microbatch}",
        f"--training.global-batch-size {job.batch}",
        f"--training.seq-len {job.seq}",
        f"--parallelism.data-parallel-replicate-degree {plan.data // shard}",
        f"--parallelism.data-parallel-shard-degree {shard}",
        f"--parallelism.tensor-parallel-degree {plan.tensor}",
        f"--parallelism.context-parallel-degree {plan.context}",
        f"--parallelism.pipeline-parallel-degree {plan.pipeline}",
        *([f"--parallelism.expert-parallel-degree {plan.expert}"] if plan.expert > 1 else []),
    ]
    if shard > 1:
        reshard = "always" if plan.sharding == "full" else "never"
        arguments.append(f"--parallelism.fsdp-reshard-after-forward {reshard}")
    if plan.tensor > 1 and not plan.sequence_parallel:
        arguments.append("--parallelism.no-enable-sequence-parallel")
    if plan.pipeline > 1:
        arguments += [
            f"--parallelism.pipeline-parallel-schedule {find_schedule(plan.schedule_name).torch}",
            f"--parallelism.pipeline-parallel-microbatch-size {plan.microbatch}",
            f"--parallelism.pipeline-parallel-layers-per-stage {_layers_of_a_stage(plan, job)}",
            f"--parallelism.pipeline-parallel-first-stage-less-layers {plan.embedding_layers}",
            f"--parallelism.pipeline-parallel-last-stage-less-layers {plan.head_layers}",
        ]
    by_operators = plan.recompute == "operators"
    arguments.append(f"activation-checkpoint:{'selective' if by_operators else plan.recompute}")
    notes = ["add --module and --config of the model in front"]
    if plan.recompute == "selective":
        notes.append("its selective checkpointing keeps other tensors than the plan's, which are attention's")
    if plan.sharding == "optimizer" and plan.pipeline == 1:
        notes.append("FSDP also shards gradients, and gathers parameters in the forward pass")
    if plan.splits_backward:
        notes.append("leave out --compile.enable: torch.compile does not split backward passes")
    text = _script(arguments, "-m torchtitan.train", plan)
    return Emitted(framework="torchtitan", text=text, notes=tuple(notes))


def _deepspeed(plan: ClusterPlan, job: TrainingJob) -> Emitted:
    _refuse_pipeline("deepspeed", plan)
    _refuse_experts("deepspeed", plan)
    if plan.context > 1:
        raise _impossible("deepspeed", "a ring of context parallelism", "context", plan)
    if plan.sequence_parallel:
        raise _impossible("deepspeed", "Megatron's sequence parallelism", "sequence_parallel", plan)
    if plan.tensor > 1 and plan.sharding == "full":
        raise _impossible("deepspeed", "tensor parallelism with ZeRO-3", "tensor", plan)
    stage = _zero_stage(plan)
    zero: dict[str, object] = {"stage": stage, "overlap_comm": job.gradient_overlap}
    zero |= _deepspeed_storage(plan)
    config: dict[str, object] = {
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": plan.microbatch,
        "gradient_accumulation_steps": plan.microbatches(job.batch),
        "fp16" if job.dtype == "f16" else "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if plan.activations == "host":
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
    if plan.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tensor}
    text = json.dumps(config, indent=2) + "\n"
    start = f"start with deepspeed --num_nodes {plan.nodes} --num_gpus {plan.devices // plan.nodes}"
    return Emitted(framework="deepspeed", text=text, notes=(start, *_model_notes(plan)))


def _zero_stage(plan: ClusterPlan) -> int:
    if plan.parameters != "device":
        return 3
    stage = {"none": 0, "optimizer": 1, "gradients": 2, "full": 3}[plan.sharding]
    # The gradients of a single copy leave the device behind each layer (`StorageLayout.streams_gradients`):
    # that is stage 2.
    return 2 if plan.states != "device" and plan.data == 1 else stage


def _deepspeed_storage(plan: ClusterPlan) -> dict[str, object]:
    """Return where states and parameters are, in terms of `zero_optimization`."""
    if plan.states == "nvme" and plan.parameters == "device":
        raise _impossible("deepspeed", "states in NVMe without ZeRO-3", "states", plan)
    locations = {"offload_optimizer": plan.states, "offload_param": plan.parameters}
    return {
        name: {
            "device": "cpu" if location == "host" else "nvme",
            "pin_memory": True,
            **({"nvme_path": "/nvme"} if location == "nvme" else {}),
        }
        for name, location in locations.items()
        if location != "device"
    }


def _fsdp(plan: ClusterPlan, job: TrainingJob) -> Emitted:
    _refuse_pipeline("fsdp", plan)
    _refuse_experts("fsdp", plan)
    _refuse_host("fsdp", plan)
    _refuse_layers("fsdp", plan)
    if plan.sharding == "none" and plan.copies > 1:
        raise _impossible("fsdp", "copies that share nothing", "sharding", plan)
    sharded: dict[str, object] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.sharding == "full",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": plan.recompute == "full",
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "fp16" if job.dtype == "f16" else "bf16",
        "num_machines": plan.nodes,
        "num_processes": plan.devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
        "fsdp_config": sharded,
    }
    if plan.tensor * plan.context > 1:
        degrees: dict[str, object] = {
            "parallelism_config_dp_shard_size": plan.data,
            "parallelism_config_tp_size": plan.tensor,
            "parallelism_config_cp_size": plan.context,
        }
        if plan.context > 1:
            strategy = "allgather" if plan.context_gather else "alltoall"
            degrees["parallelism_config_cp_comm_strategy"] = strategy
        config["parallelism_config"] = degrees
    steps = plan.microbatches(job.batch)
    notes = [
        f"in the program: Accelerator(gradient_accumulation_steps={steps}) and batches of {plan.microbatch}",
        "on each machine: its machine_rank, and main_process_ip of the first",
    ]
    if plan.sharding == "optimizer":
        notes.append("FSDP also shards gradients, and gathers parameters in the forward pass")
    if plan.recompute == "selective":
        notes.append("checkpoint the core of attention in the model: FSDP checkpoints whole layers only")
    if not plan.flash:
        notes.append("the plan stores the scores of attention: use the model's eager attention")
    return Emitted(framework="fsdp", text=_yaml(config), notes=tuple(notes))


def _model_notes(plan: ClusterPlan) -> tuple[str, ...]:
    """Return what a program must do itself, because the configuration of DeepSpeed does not say it."""
    notes = []
    if plan.recompute != "none":
        layers = f"the first {plan.recompute_layers} layers" if plan.recompute_layers else "each layer"
        part = layers if plan.recompute == "full" else "the core of attention"
        notes.append(f"checkpoint {part} in the model: the configuration does not")
    if plan.flash:
        notes.append("the plan needs flash attention in the model")
    return tuple(notes)


def _layers_of_a_stage(plan: ClusterPlan, job: TrainingJob) -> int:
    counted = job.network.layers + plan.embedding_layers + plan.head_layers
    return -(-counted // plan.stage_count)


def _script(arguments: list[str], program: str, plan: ClusterPlan) -> str:
    """Return a command for bash, an argument on each line."""
    start = f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.devices // plan.nodes} {program}"
    return " \\\n    ".join([start, *arguments]) + "\n"


def _yaml(values: Mapping[str, object], indent: str = "") -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name}:\n{_yaml(value, indent + '  ')}")
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"{indent}{name}: {text}\n")
    return "".join(lines)


def _refuse_pipeline(framework: str, plan: ClusterPlan) -> None:
    if plan.pipeline > 1:
        raise _impossible(framework, "a pipeline", "pipeline", plan)


def _refuse_experts(framework: str, plan: ClusterPlan) -> None:
    if plan.expert > 1:
        raise _impossible(framework, "expert parallelism, a matter of the program", "expert", plan)
    if plan.recompute == "experts":
        raise _impossible(framework, "recomputation of experts alone", "recompute", plan)


def _refuse_host(framework: str, plan: ClusterPlan) -> None:
    for name in ("parameters", "activations", "states"):
        if getattr(plan, name) != "device":
            raise _impossible(framework, f"{name} in host memory or NVMe alone", name, plan)


def _refuse_layers(framework: str, plan: ClusterPlan) -> None:
    if plan.recompute_layers:
        feature = "recomputation of some layers of a stage"
        raise _impossible(framework, feature, "recompute_layers", plan)


def _refuse_f16(framework: str, job: TrainingJob) -> None:
    if job.dtype == "f16":
        raise InputError(f"{framework} trains in bf16 or f32: plan with --dtype bf16")


_OTHER = {
    "pipeline": "1",
    "tensor": "1",
    "context": "1",
    "expert": "1",
    "expert_tensor": "1",
    "recompute": "full",
    "sequence_parallel": "no",
    "sharding": "optimizer",
    "states": "device",
    "parameters": "device",
    "activations": "device",
    "schedule": "1f1b",
    "recompute_layers": "0",
    "context_gather": "yes",
}
"""A value of each parameter that all frameworks with a limit can run."""


def _impossible(framework: str, feature: str, name: str, plan: ClusterPlan) -> InputError:
    return InputError(
        f"the configuration of {framework} cannot express {feature}, and the best plan is {plan}: "
        f"add --fix {name}={_OTHER[name]}, or choose another framework"
    )


_WRITERS: dict[str, Callable[[ClusterPlan, TrainingJob], Emitted]] = {
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "fsdp": _fsdp,
    "torchtitan": _torchtitan,
}
