r"""Best known configurations of many workloads as one file, which `lookup_table.hpp` reads in C++.

The file is text: one line each for devices, operators and answers, with fields that are separated by tabs;
`\t`, `\n` and `\\` within a field are escaped. The last line contains a checksum. The comment of the header
says which answers it returns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tunebench import answer as answers
from tunebench.answer import Answer
from tunebench.db import open_store
from tunebench.device import Device
from tunebench.dimension import text_of
from tunebench.errors import InputError, LookupMiss
from tunebench.kernels import variant as find_variant
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["HEADER", "TableEntry", "look_up_all", "recorded_workloads", "table_text", "write_table"]

HEADER = "lookup_table.hpp"
"""Name of the C++ header."""

FORMAT = 1
_ANY: Any = None
"""In place of a workload: defaults depend on the followed value alone."""
_OFFSET, _PRIME, _MASK = 14695981039346656037, 1099511628211, 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """The answer for one workload on one device.

    Attributes:
        device: The device.
        workload: The workload.
        answer: The answer of a lookup.
    """

    device: Device
    workload: Workload
    answer: Answer


def look_up_all(
    workloads: Iterable[Workload | str], devices: Sequence[Device], db: str | Path | None = None
) -> tuple[list[TableEntry], dict[str, str]]:
    """Look up every workload on every device.

    Args:
        workloads: The workloads.
        devices: The devices.
        db: As in `tunebench.lookup`.

    Returns:
        The answers; and why there is none, by workload and device.

    Raises:
        DatabaseError: The database cannot be read.
    """
    entries, missing = [], {}
    for workload in dict.fromkeys(w if isinstance(w, Workload) else parse(w) for w in workloads):
        for device in devices:
            try:
                answer = answers.lookup_workload(workload, device=device, db=db, quiet=True)
            except (LookupMiss, InputError) as error:
                missing[f"{workload} on {device.key}"] = str(error)
                continue
            entries.append(TableEntry(device=device, workload=workload, answer=answer))
    return entries, missing


def recorded_workloads(devices: Sequence[Device], db: str | Path | None = None) -> list[str]:
    """Return the workloads with records on the architectures of some devices, in alphabetical order.

    Args:
        devices: The devices.
        db: As in `tunebench.lookup`.

    Raises:
        DatabaseError: The database cannot be read.
    """
    architectures = {device.architecture for device in devices}
    with open_store(db, read_only=True) as store:
        rows = store.answers()
    return sorted({row["workload"] for row in rows if row["architecture"] in architectures})


def write_table(entries: Sequence[TableEntry], path: Path) -> tuple[Path, Path]:
    """Write a table, and the header that reads it into the same folder.

    Args:
        entries: The answers, from `look_up_all`.
        path: File to write.

    Returns:
        The paths of the table and the header.

    Raises:
        InputError: There are no answers.
    """
    if not entries:
        raise InputError("a lookup table needs one answer or more: no workload has any on these devices")
    header = path.with_name(HEADER)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table_text(entries), encoding="utf-8", newline="\n")
    header.write_text(resources.files("tunebench.export").joinpath(HEADER).read_text(encoding="utf-8"))
    return path, header


def table_text(entries: Sequence[TableEntry]) -> str:
    """Return the contents of a table.

    Args:
        entries: The answers.
    """
    devices = {entry.device.key: entry.device for entry in entries}
    operators = {type(entry.workload).operator: type(entry.workload) for entry in entries}
    lines = [_line("tunebench-lookup-table", FORMAT)]
    lines += [
        _line("device", key, device.architecture, device.name, device.sm_count)
        for key, device in devices.items()
    ]
    lines += [_line("operator", *_operator_fields(cls)) for cls in operators.values()]
    for entry in entries:
        at = list(devices).index(entry.device.key), list(operators).index(entry.workload.operator)
        lines.append(_line("answer", *at, *_answer_fields(entry)))
    return "".join([*lines, _line("end", _checksum("".join(lines).encode()))])


def _line(*fields: Any) -> str:
    escaped = (str(field).replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n") for field in fields)
    return "\t".join(escaped) + "\n"


def _checksum(data: bytes) -> int:
    """Return the 64-bit FNV-1a hash."""
    value = _OFFSET
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def _operator_fields(cls: type[Workload]) -> Iterator[Any]:
    """Yield name, dimensions with kind and default, and aliases of an operator."""
    fields = dataclasses.fields(cls)
    names = [field.name for field in fields]
    yield cls.operator
    yield len(fields)
    for field in fields:
        yield from (field.name, _kind(cls, field.name))
        if "follows" in field.metadata:
            yield from _following_default(cls, field.name, field.metadata["follows"])
        elif field.default is dataclasses.MISSING:
            yield "none"
        else:
            yield from ("value", text_of(field.default))
    yield len(cls.aliases)
    for alias, name in cls.aliases.items():
        yield from (alias, names.index(name))


def _following_default(cls: type[Workload], name: str, followed: str) -> Iterator[Any]:
    """Yield the default of a dimension that follows another: its formula, or its value for each choice."""
    default_of = functools.partial(cls.default_of, _ANY, name)
    at = cls.dimensions().index(followed)
    choices = cls.choices(followed)
    if not choices and all(default_of(size) == 1 / math.sqrt(size) for size in range(1, 1025)):
        yield from ("rsqrt", at)
        return
    if not choices and any(default_of(size) != size for size in range(1, 1025)):
        raise InputError(f"{cls.operator}: a lookup table cannot state how {name} follows {followed}")
    yield from ("follows", at, len(choices))
    for value in choices:
        yield from (text_of(value), text_of(default_of(value)))


def _kind(cls: type[Workload], name: str) -> str:
    """Return the kind of a dimension: how its text is read, and whether a neighbour may differ."""
    kind = cls.dimension_kinds()[name]
    if kind.base in (int, float):
        return "i" if kind.base is int else "f"
    changes = cls.allowed_changes
    changeable = name in changes.fusions or name in changes.layouts
    if kind.base is bool:
        return "B" if changeable else "b"
    return "c" if changeable else "n"


def _answer_fields(entry: TableEntry) -> Iterator[Any]:
    """Yield workload, dimensions, kernel and time, and each parameter with its best and its default value."""
    answer, workload = entry.answer, entry.workload
    yield str(workload)
    yield from (text_of(getattr(workload, name)) for name in workload.dimensions())
    yield from (answer.variant, answer.how, answer.revision, repr(answer.expected_us))
    default = find_variant(answer.variant).default(workload, entry.device)
    yield len(answer.config)
    for name, value in answer.config.items():
        yield from (name, *_typed(value), *_typed(default[name]))


def _typed(value: Any) -> tuple[str, str]:
    if isinstance(value, bool):
        return "bool", str(int(value))
    if isinstance(value, int):
        return "integer", str(value)
    return ("number", repr(value)) if isinstance(value, float) else ("text", str(value))
