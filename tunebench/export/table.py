"""The manifest as C++ constants, for the example and for programs derived from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError
from tunebench.variant import TENSOR_MAP_TYPES

__all__ = ["ENCODING", "tables"]

ENCODING = {
    "f32": (4, 8, 23),
    "tf32": (4, 8, 23),
    "f16": (2, 5, 10),
    "bf16": (2, 8, 7),
    "e4m3": (1, 4, 3),
    "i8": (1, 0, 7),
    "i32": (4, 0, 31),
    "i64": (8, 0, 63),
    "bool": (1, 0, 1),
}
"""Size in bytes, bits of the exponent (0 for integers) and bits of the significand, by type.

Source: IEEE 754-2019; NVIDIA A100 whitepaper (bf16); Micikevicius et al., "FP8 formats for deep learning".
"""

_KINDS = {
    "tensor": "Address",
    "value": "Value",
    "int": "Int32",
    "long long": "Int64",
    "float": "Float32",
    "tensor_map": "Map",
}


def tables(manifest: Mapping[str, Any]) -> str:
    """Return the header that `main.cpp` includes: constants of the types that it declares.

    Args:
        manifest: From `tunebench.export.manifest.manifest`.

    Raises:
        InputError: A tensor has a type that the example does not support.
    """
    names = [tensor["name"] for tensor in manifest["tensors"]]
    lines = [
        f"// {manifest['variant']} for {manifest['workload']}; see manifest.json.",
        f"static const char* const architecture = {_text(manifest['architecture'])};",
        f"static const double expected_us = {manifest['expected_us']!r};",
        f"static const char* const how = {_text(manifest['how'])};",
        "",
    ]
    for i, tensor in enumerate(manifest["tensors"]):
        lines += _example(i, tensor)
    lines += [
        "// name, role, elements, bytes of one, bits of its exponent and of its significand, an example",
        "static const Tensor tensors[] = {",
        *(f"    {_tensor(i, tensor)}," for i, tensor in enumerate(manifest["tensors"])),
        "};",
    ]
    for i, launch in enumerate(manifest["launches"]):
        lines += _arguments(i, launch["arguments"], names)
    lines += ["// symbol, grid, block, cluster, dynamic shared memory, arguments and how many"]
    lines += ["static const Launch launches[] = {"]
    lines += [f"    {_launch(i, launch)}," for i, launch in enumerate(manifest["launches"])]
    return "\n".join([*lines, "};"]) + "\n"


def _text(text: str) -> str:
    return json.dumps(text)  # JSON escapes that occur here are also valid C++ escapes


def _example(i: int, tensor: Mapping[str, Any]) -> list[str]:
    """Return the example values of a tensor with restricted values, each as its bits."""
    if "example" not in tensor:
        return []
    stored = np.asarray(tensor["example"], numpy_dtype(tensor["dtype"]))
    bits = stored.view(f"u{stored.itemsize}").tolist()
    rows = [", ".join(map(str, bits[at : at + 16])) for at in range(0, len(bits), 16)]
    return [
        f"static const unsigned long long example_{i}[] = {{  // {tensor['name']}",
        *(f"    {row}," for row in rows),
        "};",
    ]


def _tensor(i: int, tensor: Mapping[str, Any]) -> str:
    dtype = tensor["dtype"]
    if dtype not in ENCODING:
        raise InputError(f"{tensor['name']} is {dtype}; the C++ example supports {', '.join(ENCODING)}")
    size, exponent, significand = ENCODING[dtype]
    role = tensor["role"].capitalize() if tensor["shape"] else "ByValue"
    count = tensor["bytes"] // size
    numbers = f"{count}LL, {size}, {exponent}, {significand}"
    values = f"example_{i}" if "example" in tensor else "nullptr"
    return f"{{{_text(tensor['name'])}, Role::{role}, {numbers}, {values}}}"


def _arguments(i: int, arguments: list[Mapping[str, Any]], names: list[str]) -> list[str]:
    """Return the arguments of a launch, preceded by the tensor maps that they use."""
    maps = {at: argument for at, argument in enumerate(arguments) if argument["kind"] == "tensor_map"}
    columns = "tensor, type of its elements, rank, extents, strides in bytes, box, swizzle; of pixels or not"
    lines = [f"// {columns}, corners, steps"] if maps else []
    lines += [f"static const TensorMap map_{i}_{at} = {_map(maps[at], names)};" for at in maps]
    lines += [f"static const Argument arguments_{i}[] = {{"]
    for at, argument in enumerate(arguments):
        lines += [f"    {_argument(argument, names, f'&map_{i}_{at}' if at in maps else 'nullptr')},"]
    return [*lines, "};"]


def _map(argument: Mapping[str, Any], names: list[str]) -> str:
    swizzle = f"{argument['swizzle_bytes']}B" if argument["swizzle_bytes"] else "NONE"
    extents, strides, box = (_list(argument[fact]) for fact in ("extents", "strides_bytes", "box"))
    pixels, rank = argument["pixel_box"], len(argument["extents"])
    im2col = f"false, {{}}, {{}}, {_list([1] * rank)}"
    if pixels:
        im2col = (
            f"true, {_list(pixels['lower'])}, {_list(pixels['upper'])}, {_list([1, *pixels['strides'], 1])}"
        )
    return (
        f"{{{names.index(argument['tensor'])}, "
        f"CU_TENSOR_MAP_DATA_TYPE_{TENSOR_MAP_TYPES[argument['dtype']]}, {rank}, "
        f"{extents}, {strides}, {box}, CU_TENSOR_MAP_SWIZZLE_{swizzle}, {im2col}}}"
    )


def _list(numbers: Iterable[int]) -> str:
    return f"{{{', '.join(map(str, numbers))}}}"


def _argument(argument: Mapping[str, Any], names: list[str], mapped: str) -> str:
    """Return a kind, an integer (for a tensor: its position), a float and the address of a tensor map."""
    kind = argument["kind"]
    whole, real = 0, "0"
    if kind in ("tensor", "value"):
        whole = names.index(argument["name"])
    elif kind == "float":
        real = repr(float(argument["value"]))
    elif kind != "tensor_map":
        whole = argument["value"]
    return f"{{Kind::{_KINDS[kind]}, {whole}LL, {real}, {mapped}}}"


def _launch(i: int, launch: Mapping[str, Any]) -> str:
    shapes = (launch["grid"], launch["block"], launch["cluster"])
    sizes = ", ".join(f"{{{', '.join(map(str, shape))}}}" for shape in shapes)
    count = len(launch["arguments"])
    return f"{{{_text(launch['symbol'])}, {sizes}, {launch['smem_bytes']}, arguments_{i}, {count}}}"
