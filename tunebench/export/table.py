"""The manifest as constants of C++, for the example and for programs that start from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tunebench.errors import InputError

__all__ = ["tables"]

_ENCODING = {
    "f32": (4, 8, 23),
    "tf32": (4, 8, 23),
    "f16": (2, 5, 10),
    "bf16": (2, 8, 7),
    "e4m3": (1, 4, 3),
    "i8": (1, 0, 7),
    "i32": (4, 0, 31),
}
"""Bytes, bits of the exponent (0 for integers) and of the significand, by type.

Source: IEEE 754-2019; NVIDIA A100 whitepaper (bf16); Micikevicius et al., "FP8 formats for deep learning".
"""

_MAPPED = {"f32": "FLOAT32", "f16": "FLOAT16", "bf16": "BFLOAT16", "e4m3": "UINT8", "i8": "UINT8"}
"""What the driver calls the types that a tensor map copies; it copies bytes as they are."""

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

    Raises:
        InputError: if a tensor has a type that the example cannot fill and read.
    """
    names = [tensor["name"] for tensor in manifest["tensors"]]
    passed = [argument for launch in manifest["launches"] for argument in launch["arguments"]]
    maps = [argument for argument in passed if argument["kind"] == "tensor_map"]
    lines = [
        f"// {manifest['variant']} for {manifest['workload']}; see manifest.json.",
        f"static const char* const architecture = {_text(manifest['architecture'])};",
        f"static const double expected_us = {manifest['expected_us']!r};",
        f"static const char* const how = {_text(manifest['how'])};",
        "",
        *(_example(tensor) for tensor in manifest["tensors"] if "example" in tensor),
        "// name, role, elements, bytes of one, bits of its exponent and of its significand, values",
        "static const Tensor tensors[] = {",
        *(f"    {_tensor(tensor)}," for tensor in manifest["tensors"]),
        "};",
    ]
    lines += [
        "// tensor, type, dimensions, extents, strides in bytes, box, swizzle; the last one is not used"
    ]
    lines += ["static const TensorMap tensor_maps[] = {"]
    lines += [f"    {_tensor_map(tensor_map, names)}," for tensor_map in maps]
    lines += ["    {},", "};"]
    for i, launch in enumerate(manifest["launches"]):
        lines += [f"static const Argument arguments_{i}[] = {{"]
        lines += [f"    {_argument(argument, names, maps)}," for argument in launch["arguments"]]
        lines += ["};"]
    lines += ["// symbol, grid, block, cluster, dynamic shared memory, arguments and how many"]
    lines += ["static const Launch launches[] = {"]
    lines += [f"    {_launch(i, launch)}," for i, launch in enumerate(manifest["launches"])]
    return "\n".join([*lines, "};"]) + "\n"


def _text(text: str) -> str:
    return json.dumps(text)  # the escapes of JSON are those of C++, as far as they occur


def _tensor(tensor: Mapping[str, Any]) -> str:
    dtype = tensor["dtype"]
    if dtype not in _ENCODING:
        raise InputError(f"{tensor['name']} is {dtype}; the example in C++ makes {', '.join(_ENCODING)}")
    size, exponent, significand = _ENCODING[dtype]
    role = tensor["role"].capitalize() if tensor["shape"] else "ByValue"
    count = tensor["bytes"] // size
    given = f"values_of_{tensor['name']}" if "example" in tensor else "nullptr"
    return f"{{{_text(tensor['name'])}, Role::{role}, {count}LL, {size}, {exponent}, {significand}, {given}}}"


def _example(tensor: Mapping[str, Any]) -> str:
    return f"static const int values_of_{tensor['name']}[] = {{{', '.join(map(str, tensor['example']))}}};"


def _tensor_map(tensor_map: Mapping[str, Any], names: list[str]) -> str:
    numbers = (tensor_map[name] for name in ("extents", "strides_bytes", "box"))
    extents, strides, box = (f"{{{', '.join(map(str, values))}}}" for values in numbers)
    swizzle = f"{tensor_map['swizzle_bytes']}B" if tensor_map["swizzle_bytes"] else "NONE"
    kind = f"CU_TENSOR_MAP_DATA_TYPE_{_MAPPED[tensor_map['dtype']]}"
    tensor, rank = names.index(tensor_map["tensor"]), len(tensor_map["extents"])
    return f"{{{tensor}, {kind}, {rank}, {extents}, {strides}, {box}, CU_TENSOR_MAP_SWIZZLE_{swizzle}}}"


def _argument(argument: Mapping[str, Any], names: list[str], maps: list[Mapping[str, Any]]) -> str:
    """Return a kind, a whole number (of a tensor and of a tensor map: its position) and a float."""
    kind = argument["kind"]
    if kind == "tensor_map":
        whole = maps.index(argument)
    elif kind in ("tensor", "value"):
        whole = names.index(argument["name"])
    else:
        whole = 0 if kind == "float" else argument["value"]
    real = repr(float(argument["value"])) if kind == "float" else "0"
    return f"{{Kind::{_KINDS[kind]}, {whole}LL, {real}}}"


def _launch(i: int, launch: Mapping[str, Any]) -> str:
    shapes = (launch["grid"], launch["block"], launch["cluster"])
    sizes = ", ".join(f"{{{', '.join(map(str, shape))}}}" for shape in shapes)
    count = len(launch["arguments"])
    return f"{{{_text(launch['symbol'])}, {sizes}, {launch['smem_bytes']}, arguments_{i}, {count}}}"
