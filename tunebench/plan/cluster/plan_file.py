"""Plans as TOML files, with the arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tunebench.errors import InputError
from tunebench.plan.cluster.search import PricedPlan
from tunebench.plan.cluster.space import ClusterPlan, TrainingJob

__all__ = ["megatron_arguments", "write_plan"]


def megatron_arguments(plan: ClusterPlan, job: TrainingJob) -> list[str]:
    """Return the command-line arguments of Megatron-LM's training scripts for a plan.

    Source: NVIDIA/Megatron-LM, `megatron/training/arguments.py`.
    """
    found = [
        f"--tensor-model-parallel-size {plan.tensor}",
        f"--pipeline-model-parallel-size {plan.pipeline}",
        f"--micro-batch-size {plan.microbatch}",
        f"--global-batch-size {job.batch}",
        f"--seq-length {job.seq}",
        f"--{'fp16' if job.dtype == 'f16' else 'bf16'}",
    ]
    if plan.chunks > 1:
        layers = job.network.layers // (plan.pipeline * plan.chunks)
        found.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    if plan.recompute == "full":
        found.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if plan.recompute == "selective":
        found.append("--recompute-granularity selective")
    if plan.sequence_parallel:
        found.append("--sequence-parallel")
    if plan.flash:
        found.append("--use-flash-attn")
    if plan.sharding == "optimizer":
        found.append("--use-distributed-optimizer")
    if plan.states == "host":
        found.append("--optimizer-cpu-offload --use-precision-aware-optimizer")
    if plan.sharding == "full":
        found.append("--use-torch-fsdp2")
    if job.gradient_overlap and plan.sharding != "full" and plan.data > 1:
        found.append("--overlap-grad-reduce")
    return found


def write_plan(path: Path, found: PricedPlan, job: TrainingJob) -> None:
    """Write a plan, its predictions and its arguments for Megatron-LM.

    Raises:
        InputError: if the file cannot be written.
    """
    values = {"network": job.network.name, "batch": job.batch, "seq": job.seq, "dtype": job.dtype}
    lines = ["[job]", *_assigned(values), "", "[plan]", *_assigned(asdict(found.plan))]
    predicted = {"step_us": found.step.time_us, "mfu": found.mfu, "memory_bytes": found.memory.total}
    lines += ["", "[predicted]", *_assigned(predicted), "", "[megatron]", "arguments = ["]
    lines += [f'    "{each}",' for each in megatron_arguments(found.plan, job)]
    try:
        path.write_text("\n".join([*lines, "]", ""]), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the plan to {path}: {error.strerror or error}") from None


def _assigned(values: Mapping[str, object]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in values.items()]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
