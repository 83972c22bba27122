"""Descriptions of kernels in TOML files, for `tunebench tune vadd.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebench.errors import InputError, UnknownName
from tunebench.own_kernel.argument import ROLES
from tunebench.own_kernel.description import KernelDescription

__all__ = ["read"]

_KINDS = {role: kind for kind, role in ROLES.items()}
_REQUIRED = ("source", "args", "space")


def read(path: str | Path) -> KernelDescription:
    """Read a description.

    The keys are the fields of `KernelDescription`. `source` is a path relative to the file, or CUDA C++ as
    text; `includes` are folders relative to it; functions are expressions; an array is a table such as
    ``{input = ["n"], dtype = "f32"}``.

    Args:
        path: TOML file.

    Raises:
        InputError: The file is missing, no TOML, or lacks a key.
        UnknownName: It has an unknown key.
    """
    file = Path(path)
    try:
        keys = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"description of a kernel {path}: {error}") from None
    fields = KernelDescription.__dataclass_fields__
    for key in keys:
        if key not in fields:
            raise UnknownName(f"key of {path}", key, fields)
    missing = [key for key in _REQUIRED if key not in keys]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}")
    source = keys["source"]
    if source.endswith((".cu", ".cuh", ".py", ".cubin", ".fatbin", ".ptx")):
        keys["source"] = file.parent / source
    keys["includes"] = [file.parent / folder for folder in keys.get("includes", ())]
    keys["args"] = {name: _argument(name, value) for name, value in keys["args"].items()}
    return KernelDescription(**keys)


def _argument(name: str, value: Any) -> Any:
    """Return an argument: a number, or an array from its table."""
    if not isinstance(value, Mapping):
        return value
    kinds = [key for key in value if key in _KINDS]
    if len(kinds) != 1:
        raise InputError(
            f"argument {name} needs one of {', '.join(_KINDS)} with its shape, such as "
            '{input = ["n"], dtype = "f32"}'
        )
    kind = _KINDS[kinds[0]]
    further = {key: item for key, item in value.items() if key != kinds[0]}
    try:
        return kind(value[kinds[0]], **further)
    except TypeError:
        raise UnknownName(f"key of argument {name}", ", ".join(further), kind.__dataclass_fields__) from None
