"""Manifest of an exported configuration: everything a program needs to launch it, as plain data."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from tunebench import __version__
from tunebench._lazy import np
from tunebench.compile.numba_cuda import array_parameters
from tunebench.errors import InputError
from tunebench.variant import Argument, GpuVariant, NumbaCudaVariant, Scalar, TensorMap
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from tunebench.compile import Binary
    from tunebench.tuning.choice import ChosenConfig
    from tunebench.variant import Launch

__all__ = ["manifest"]

_ADDRESS = -1
"""Placeholder for an array's address among the words of Numba's ABI, which are never negative."""

_SEED = 0
_MOST_VALUES = 2**20
"""Maximum values listed for one input; more would take longer to compile than the kernels."""


def manifest(choice: ChosenConfig, binary: Binary) -> dict[str, Any]:
    """Return the manifest of an exported configuration, without its code.

    Tensors are in the order: inputs, outputs, scratch. Tensors of shape ``()`` have no memory: their value is
    an argument. Launches run one after the other. Their arguments are the kernel's parameters, each of one
    kind:

    - ``tensor``: the 64-bit address of the named tensor, C-contiguous;
    - ``value``: the value of the named input, in its type;
    - ``int``, ``long long``, ``float``: the listed number;
    - ``tensor_map``: 128 bytes that cuTensorMapEncodeTiled (with a ``pixel_box``: cuTensorMapEncodeIm2col)
      returns for the listed fields (see `TensorMap`).

    Inputs with restricted values have an ``example`` of valid values.

    Args:
        choice: Exported configuration.
        binary: The compiled configuration.

    Raises:
        InputError: An input with restricted values is too large to list.
    """
    variant, workload, config = choice.variant, choice.workload, choice.config
    assert isinstance(variant, GpuVariant), variant
    roles = {
        "input": workload.inputs(),
        "output": workload.outputs(),
        "scratch": variant.scratch(workload, config),
    }
    tensors = {tensor.name: tensor for group in roles.values() for tensor in group}
    launches = binary.launches(variant.launches(workload, config))
    return {
        "tunebench": __version__,
        "workload": str(workload),
        "variant": variant.key,
        "config": dict(config),
        "revision": variant.revision(workload, config),
        "architecture": binary.target,
        "device": choice.device.key,
        "why": choice.why,
        "expected_us": choice.expected_us,
        "how": choice.how,
        "tensors": [
            {**_tensor(tensor, role), **_example(tensor, role, workload)}
            for role, group in roles.items()
            for tensor in group
        ],
        "launches": [
            _launch(variant, launch, symbol, tensors, choice.device.sm_count)
            for launch, symbol in zip(launches, binary.entries, strict=True)
        ],
    }


def _tensor(tensor: Tensor, role: str) -> dict[str, Any]:
    shape = list(tensor.shape)
    return {"name": tensor.name, "role": role, "dtype": tensor.dtype, "shape": shape, "bytes": tensor.nbytes}


def _example(tensor: Tensor, role: str, workload: Workload) -> dict[str, Any]:
    """Return valid values of an input with restricted values, in C order; empty for any other tensor."""
    ruled = workload.draw_by_rule(tensor, np.random.default_rng(_SEED)) if role == "input" else None
    if ruled is None:
        return {}
    if tensor.size > _MOST_VALUES:
        raise InputError(
            f"{tensor.name} of {workload} has restricted values; expected at most {_MOST_VALUES} to list, "
            f"got {tensor.size}; export a smaller workload"
        )
    return {"example": ruled.ravel().tolist()}


def _launch(
    variant: GpuVariant[Any], launch: Launch, symbol: str, tensors: dict[str, Tensor], sm_count: int
) -> dict[str, Any]:
    return {
        "kernel": launch.entry,
        "symbol": symbol,
        "grid": list(launch.grid_on(sm_count)),
        "block": list(launch.block),
        "cluster": [launch.cluster, 1, 1],
        "smem_bytes": launch.smem_bytes,
        "arguments": [
            slot
            for argument in launch.arguments
            for slot in _slots(argument, tensors, by_words=isinstance(variant, NumbaCudaVariant))
        ],
    }


def _slots(
    argument: Argument | TensorMap, tensors: dict[str, Tensor], *, by_words: bool
) -> list[dict[str, Any]]:
    """Return the kernel parameters of one argument: one, or several for an array of Numba."""
    if isinstance(argument, TensorMap):
        return [{"kind": "tensor_map", **json.loads(json.dumps(dataclasses.asdict(argument)))}]
    if isinstance(argument, Scalar):
        return [{"kind": argument.ctype, "value": argument.value}]
    tensor = tensors[argument]
    if not tensor.shape:
        return [{"kind": "value", "name": argument, "dtype": tensor.dtype}]
    address = {"kind": "tensor", "name": argument}
    if not by_words:
        return [address]
    words = array_parameters(tensor, _ADDRESS)
    return [address if word == _ADDRESS else {"kind": "long long", "value": word} for word in words]
