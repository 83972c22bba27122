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

_KINDS = {"tensor": "Address", "value": "Value", "int": "Int32", "long long": "Int64", "float": "Float32"}


def tables(manifest: Mapping[str, Any]) -> str:
    """Return the header that `main.cpp` includes: constants of the types that it declares.

    Raises:
        InputError: if a tensor has a type that the example cannot fill and read.
    """
    names = [tensor["name"] for tensor in manifest["tensors"]]
    lines = [
        f"// {manifest['variant']} for {manifest['workload']}; see manifest.json.",
        f"static const char* const architecture = {_text(manifest['architecture'])};",
        f"static const double expected_us = {manifest['expected_us']!r};",
        f"static const char* const how = {_text(manifest['how'])};",
        "",
        "// name, role, elements, bytes of one, bits of its exponent and of its significand",
        "static const Tensor tensors[] = {",
        *(f"    {_tensor(tensor)}," for tensor in manifest["tensors"]),
        "};",
    ]
    for i, launch in enumerate(manifest["launches"]):
        lines += [f"static const Argument arguments_{i}[] = {{"]
        lines += [f"    {_argument(argument, names)}," for argument in launch["arguments"]]
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
    return f"{{{_text(tensor['name'])}, Role::{role}, {count}LL, {size}, {exponent}, {significand}}}"


def _argument(argument: Mapping[str, Any], names: list[str]) -> str:
    """Return a kind, a whole number (of a tensor: its position) and a float."""
    kind = argument["kind"]
    whole = (
        names.index(argument["name"]) if "name" in argument else 0 if kind == "float" else argument["value"]
    )
    real = repr(float(argument["value"])) if kind == "float" else "0"
    return f"{{Kind::{_KINDS[kind]}, {whole}LL, {real}}}"


def _launch(i: int, launch: Mapping[str, Any]) -> str:
    shapes = (launch["grid"], launch["block"], launch["cluster"])
    sizes = ", ".join(f"{{{', '.join(map(str, shape))}}}" for shape in shapes)
    count = len(launch["arguments"])
    return f"{{{_text(launch['symbol'])}, {sizes}, {launch['smem_bytes']}, arguments_{i}, {count}}}"
