"""Plans as TOML files, with the arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tunebench.errors import InputError
from tunebench.training.cluster.framework import megatron_arguments, runs_in_megatron
from tunebench.training.cluster.search import PricedPlan
from tunebench.training.cluster.space import TrainingJob

__all__ = ["write_plan"]


def write_plan(path: Path, found: PricedPlan, job: TrainingJob) -> None:
    """Write a plan, its predictions and its arguments for Megatron-LM, if that can run it.

    Raises:
        InputError: if the file cannot be written.
    """
    values = {"network": job.network.name, "batch": job.batch, "seq": job.seq, "dtype": job.dtype}
    if job.optimizer != "adamw":
        values["optimizer"] = job.optimizer
    lines = ["[job]", *_assigned(values), "", "[plan]", *_assigned(found.plan.values)]
    predicted = {"step_us": found.step.time_us, "mfu": found.mfu, "memory_bytes": found.memory.needed}
    lines += ["", "[predicted]", *_assigned(predicted)]
    if runs_in_megatron(found.plan, job.optimizer):
        arguments = [f'    "{argument}",' for argument in megatron_arguments(found.plan, job)]
        lines += ["", "[megatron]", "arguments = [", *arguments, "]"]
    try:
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
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
