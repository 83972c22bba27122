"""Measured times and plans of steps, remembered between processes in the cache folder.

A file is only a hint: the simulator runs its plan within the budget before it is used, and a file that is
damaged, or that is of another step, is ignored and written again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tunebench._environment import cache_folder
from tunebench._foreign_file import interpreting
from tunebench._private_file import create_folder, forget_unused, read_private, write_private
from tunebench.errors import InputError, TunebenchError
from tunebench.torch.compiler.graph_key import graph_key, input_device
from tunebench.training.fitting.plan_choice import PlanChoice
from tunebench.training.fitting.step_time import StepTimes
from tunebench.training.memory.step import HostLink

__all__ = ["RememberedStep", "TracedGraph", "remembered_path"]

_FOLDER = "memory_plans"


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedStep:
    """What a process measured and planned for a graph.

    Attributes:
        times_us: Time of each call of the joint graph that is an operation, in microseconds.
        eager_us: Time of the step by eager torch in microseconds.
        view_us: Time of its views in microseconds.
        call_us: Time of what torch does around a compiled step, in microseconds.
        measured: Times of the whole step; none if only its parts were measured.
        recurrent_us: Times of recurrent layers by eager torch in microseconds, by module.
        fused: Whether recurrent layers run as whole layers, where oneDNN has them.
        link: Rates of copies to the host and back; none if nothing is swapped.
        choice: Which saved tensors are compressed, and how many parameters have states on the host.
        plan: Content of the plan's file.
    """

    times_us: Sequence[float]
    eager_us: float
    view_us: float
    call_us: float
    recurrent_us: Mapping[str, float]
    fused: bool
    link: HostLink | None
    choice: PlanChoice
    plan: Mapping[str, Any]
    measured: StepTimes | None = None

    @classmethod
    def read(cls, path: Path) -> RememberedStep | None:
        """Return what a file holds; none if there is no such file, or if it is damaged or of another user."""
        try:
            with interpreting(f"{path} is damaged"):
                content = json.loads(read_private(path))
                step = cls(
                    times_us=[_time_us(value) for value in content["times_us"]],
                    eager_us=_time_us(content["eager_us"]),
                    view_us=_time_us(content["view_us"]),
                    call_us=_time_us(content["call_us"]),
                    recurrent_us={name: _time_us(us) for name, us in content["recurrent_us"].items()},
                    fused=bool(content["fused"]),
                    link=None if content["link"] is None else HostLink(**content["link"]),
                    choice=_choice(content["choice"]),
                    plan=dict(content["plan"]),
                    measured=None if content["measured"] is None else _step_times(content["measured"]),
                )
        except (OSError, InputError):
            return None
        with contextlib.suppress(OSError):  # a folder that cannot be written
            path.touch()
        return step

    def write(self, path: Path) -> None:
        """Write this to a file; a folder that cannot be written, or a full disk, is ignored."""
        with contextlib.suppress(OSError, TunebenchError):
            create_folder(path.parent.parent, path.parent.name)
            write_private(path, json.dumps(asdict(self)).encode())
            forget_unused(path.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """A graph that Dynamo traced, as far as it decides its plan.

    Attributes:
        path: File of its times and plan; none if they are not remembered.
        remembered: What an earlier process measured and planned.
        recurrent_times: Returns times of its recurrent layers by eager torch in microseconds, by module.
        fused: Whether recurrent layers run as whole layers, where oneDNN has them.
    """

    path: Path | None = None
    remembered: RememberedStep | None = None
    recurrent_times: Callable[[], Mapping[str, float]] = dict
    fused: bool = True


def remembered_path(module: fx.GraphModule, inputs: Sequence[Any], options: str) -> Path | None:
    """Return the file of the times and the plan of a graph; none if they cannot be remembered.

    Args:
        module: The graph that Dynamo traced.
        inputs: Its inputs.
        options: What else decides the plan, such as the budget.
    """
    device = input_device(inputs)
    if device is None:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    modes = (
        *(torch.get_num_threads(), cores, torch._C._get_mkldnn_enabled()),
        *(torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
    )
    try:
        key = graph_key(module, inputs, device[0], f"{modes} {options}")
        return cache_folder() / _FOLDER / f"{key}.json"
    except (OSError, TunebenchError):
        return None


def _choice(value: Any) -> PlanChoice:
    count, names = value["host_states"], value["compressed"]
    if not (isinstance(count, int) and count >= 0 and all(isinstance(name, str) for name in names)):
        raise ValueError(f"expected tensors and a number of parameters, found {value!r}")
    return PlanChoice(compressed=tuple(names), host_states=count)


def _step_times(value: Any) -> StepTimes:
    times = StepTimes(step_us=_time_us(value["step_us"]), eager_us=_time_us(value["eager_us"]))
    if not times.eager_us:
        raise ValueError("expected a time of eager torch, found 0")
    return times


def _time_us(value: Any) -> float:
    if not (isinstance(value, float) and 0 <= value < math.inf):
        raise ValueError(f"expected a time in microseconds, found {value!r}")
    return value
