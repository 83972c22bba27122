"""Keys of traced graphs in caches on disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tunebench import __version__
from tunebench._source_state import source_state
from tunebench.device import Device
from tunebench.kernels import loaded_files
from tunebench.torch._tensor import device_of

__all__ = ["graph_key", "input_device", "source_hash"]

_PACKAGE = Path(__file__).resolve().parents[2]


def graph_key(module: fx.GraphModule, inputs: Sequence[Any], device: Device, mode: str = "") -> str:
    """Return a hash of all but stored results that decides how a graph is compiled or planned.

    These are the graph, types and layouts of its inputs, modes of torch, the device, versions, and names,
    sizes and times of the source files.

    Args:
        module: The graph that Dynamo traced.
        inputs: Its inputs.
        device: Their device.
        mode: Options that decide how it is compiled.
    """
    modules = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    parts = (
        *(__version__, source_hash(), torch.__version__, device.key, mode, *loaded_files()),
        *(str(torch.is_grad_enabled()), str(torch.is_autocast_enabled(_type_of(inputs)))),
        str(torch.are_deterministic_algorithms_enabled()),
        str(torch.get_num_threads()) if device.kind == "cpu" else "",
        *(part.code for part in modules),
        *map(_described, inputs),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def input_device(inputs: Iterable[Any]) -> tuple[Device, int] | None:
    """Return the device of a graph's inputs and its ordinal; None without one device that has kernels."""
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
    device = device_of(devices.pop()) if len(devices) == 1 else ""
    return None if isinstance(device, str) else device


@functools.cache
def source_hash() -> str:
    """Return a hash of names, sizes and times of the source files that decide plans and compiled graphs."""
    folders = ("graph", "kernels", "torch", "training", "workloads")
    return source_state([_PACKAGE], [_PACKAGE / folder for folder in folders])


def _type_of(inputs: Iterable[Any]) -> str:
    return next((value.device.type for value in inputs if isinstance(value, torch.Tensor)), "cpu")


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device} {value.requires_grad}"
