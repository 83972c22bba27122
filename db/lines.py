"""JSON Lines: everything that is stored of every measurement, out of one database and into another.

A line is an object; ``what`` says which. A ``device`` comes before the measurements on it, with the fields of
`tunebench.device.Device`; a ``measurement`` has the fields of its trial's key, its outcome, and what else is
stored of it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from tunebench import __version__, kernels, workloads
from tunebench.db.bulk import AddWatcher
from tunebench.db.reader import Reader
from tunebench.db.record import (
    PURPOSES,
    Addition,
    Batch,
    Entry,
    Imported,
    RunStart,
    SpaceKey,
    TrialKey,
    Verdict,
    VersusDefault,
)
from tunebench.db.store import Store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.outcome import (
    CacheState,
    Effort,
    Outcome,
    Resources,
    Result,
    Verification,
    from_json,
    to_json,
)
from tunebench.recording import MAX_BYTES, Fault, opened, value_of
from tunebench.space import Config

__all__ = ["holds_lines", "import_lines", "lines"]

MAX_LINE_BYTES = 1 << 24
"""Most that one line may hold."""
MAX_TEXT = 10_000
"""Most characters of a text, such as what a compiler said."""


# -- out -------------------------------------------------------------------------------------------


def lines(store: Reader, spaces: Iterable[SpaceKey]) -> Iterator[dict[str, Any]]:
    """Yield what each device is, then every measurement, space by space and oldest first."""
    chosen = list(spaces)
    keys = {space.device for space in chosen}
    for key, fields in store.descriptors().items():
        if key in keys:
            yield {"what": "device", "tunebench": __version__, "key": key, **fields}
    for space in chosen:
        for entry in store.history(space.workload, space.device, space.variant):
            yield _line(entry)


def _line(entry: Entry) -> dict[str, Any]:
    result = entry.result
    return {
        "what": "measurement",
        **{field.name: getattr(entry.key, field.name) for field in dataclasses.fields(entry.key)},
        "config": dict(entry.key.config),
        "purpose": entry.purpose,
        "outcome": to_json(result.outcome),
        "resources": {name: v for name, v in dataclasses.asdict(result.resources).items() if v is not None},
        "effort": dataclasses.asdict(result.effort),
        "conditions": result.conditions,
        "bound_us": entry.bound_us,
        "seed": entry.seed,
        "recorded_at": entry.recorded_at.isoformat(),
        "versus_default": entry.verdict.versus_default,
        "comparison": entry.verdict.comparison,
    }


# -- in --------------------------------------------------------------------------------------------


def holds_lines(path: Path) -> bool:
    """Tell whether a file holds such lines, by its first one."""
    try:
        with opened(path) as file:
            line = file.readline(MAX_LINE_BYTES)
        first = json.loads(line) if b'"what"' in line else None  # a whole recording may stand on one line
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "what" in first


def import_lines(store: Store, path: Path, watcher: AddWatcher | None = None) -> Imported:
    """Store what another database exported: all its good lines, or nothing if it is interrupted.

    A measurement that is there already is left out, and so is one that is older than what its trial has here.
    Trials whose source is not that of the installed variant are marked stale.

    Raises:
        InputError: if the file cannot be read.
        DatabaseError: if the database cannot be written.
    """
    found, size = _Lines(), 0
    try:
        with opened(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                size += len(line)
                if size > MAX_BYTES:
                    raise InputError(f"{path} holds more than {MAX_BYTES >> 20} MiB; import it in parts")
                found.take(number, line)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    added = store.add(found.batches(path), watcher)
    spaces = tuple(dict.fromkeys(a.key.space for a in found.additions))
    for space in spaces if added else ():
        _recheck(store, space)
    return Imported(
        file=path, spaces=spaces, added=added, known=len(found.additions) - added, faults=tuple(found.faults)
    )


def _recheck(store: Store, space: SpaceKey) -> None:
    """Mark what is not of today's sources; a variant that is not installed cannot be asked."""
    try:
        variant, workload = kernels.variant(space.variant), workloads.parse(space.workload)
    except InputError:
        return

    def revision(config: Config) -> str:
        variant.space.ordinals(config)  # refuses what another version of the space allowed
        return variant.revision(workload, config)

    store.recheck(space.device, space.workload, space.variant, revision)


class _Lines:
    """Devices and measurements as they are found, and the lines that cannot be used."""

    def __init__(self) -> None:
        self.devices: dict[str, Device] = {}
        self.additions: list[Addition] = []
        self.faults: list[Fault] = []

    def take(self, number: int, line: bytes) -> None:
        """Read one line."""
        if not line.strip():
            return
        try:
            if len(line) > MAX_LINE_BYTES:
                raise InputError(f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
            data = json.loads(line, parse_constant=_refuse)
            kind = data.get("what") if isinstance(data, dict) else None
            if kind == "device":
                device = _device(data)
                self.devices[device.key] = device
            elif kind == "measurement":
                self.additions.append(_addition(data, self.devices))
            else:
                raise InputError("it must be an object that says what it is: device or measurement")
        except (ValueError, RecursionError) as error:
            self.faults.append(Fault(f"line {number}", f"it cannot be read as JSON: {error}"))
        except InputError as error:
            self.faults.append(Fault(f"line {number}", str(error)))

    def batches(self, path: Path) -> list[Batch]:
        """Return the measurements by device and workload."""
        places: dict[tuple[str, str], list[Addition]] = {}
        for addition in self.additions:
            places.setdefault((addition.key.device, addition.key.workload), []).append(addition)
        return [
            Batch(
                start=RunStart(
                    device=self.devices[device],
                    workload=workload,
                    sampler="import",
                    seed=0,
                    versions={"tunebench": __version__, "file": ascii(path.name)[1:-1]},
                ),
                additions=tuple(additions),
            )
            for (device, workload), additions in places.items()
        ]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DEVICE_TEXTS = ("name", "kind", "architecture")


def _device(data: Mapping[str, Any]) -> Device:
    fields = {name: value for name, value in data.items() if name not in ("what", "tunebench", "key")}
    for name in _DEVICE_TEXTS:
        _text(data, name)
    rates = fields.get("mma_flop_per_clock", {})
    numbers = [value for name, value in fields.items() if name not in (*_DEVICE_TEXTS, "mma_flop_per_clock")]
    numbers += list(rates.values()) if isinstance(rates, dict) else ["no object"]
    if not all(
        value is None or (isinstance(value, int | float) and math.isfinite(value)) for value in numbers
    ):
        raise InputError("figures of a device must be numbers")
    try:
        device = Device(**fields)
    except TypeError as error:
        raise InputError(f"it is no device of this version: {error}") from None
    if device.key != data.get("key") or device.kind not in ("gpu", "cpu"):
        raise InputError(f"its key must be {device.key}, and its kind gpu or cpu")
    return device


def _addition(data: Mapping[str, Any], devices: Mapping[str, Device]) -> Addition:
    key = TrialKey(
        **{name: _text(data, name) for name in ("device", "workload", "variant", "revision")},
        config=_config(data.get("config")),
    )
    if key.device not in devices:
        raise InputError(f"no line before it says what the device {key.device!r} is")
    if data.get("purpose") not in PURPOSES:
        raise InputError(f"purpose must be one of: {', '.join(PURPOSES)}")
    return Addition(
        key=key,
        result=Result(
            outcome=_outcome(data.get("outcome")),
            resources=_resources(data.get("resources")),
            effort=_effort(data.get("effort")),
            conditions=_object(data.get("conditions"), "conditions"),
        ),
        purpose=data["purpose"],
        bound_us=_number(data, "bound_us"),
        seed=_seed(data.get("seed")),
        recorded_at=_moment(data.get("recorded_at")),
        verdict=_verdict(data),
    )


def _verdict(data: Mapping[str, Any]) -> Verdict:
    """Return how it compared with others, which lines of earlier versions do not tell."""
    versus, known = data.get("versus_default"), get_args(VersusDefault)
    if versus is not None and versus not in known:
        raise InputError(f"versus_default must be one of: {', '.join(known)}")
    return Verdict(versus_default=versus, comparison=_object(data.get("comparison", {}), "comparison"))


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise InputError(f"{name} must be a text of printable characters")
    return value


def _number(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e300:
        raise InputError(f"{name} must be a number that is not negative")
    return float(value)


def _seed(value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or not 0 <= value < 1 << 63):
        raise InputError("seed must be an integer")
    return value


def _moment(value: Any) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        moment = datetime.min
    if moment.tzinfo is None:
        raise InputError("recorded_at must be a moment with its time zone, such as 2026-01-31T12:00:00+00:00")
    return moment


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{name} must be an object")
    return value


def _config(value: Any) -> Config:
    values = _object(value, "config")
    if not values or not all(name.isidentifier() and len(name) <= MAX_TEXT for name in values):
        raise InputError("config must have parameters, with names that are identifiers")
    return Config({name: value_of(values, name) for name in values})


def _resources(value: Any) -> Resources:
    values = _object(value, "resources")
    names = {field.name for field in dataclasses.fields(Resources)}
    if set(values) - names or not all(isinstance(v, int) and 0 <= v < 1 << 63 for v in values.values()):
        raise InputError(f"resources must be integers, among: {', '.join(sorted(names))}")
    return Resources(**values)


def _effort(value: Any) -> Effort:
    values = _object(value, "effort")
    return Effort(**{field.name: _number(values, field.name) or 0.0 for field in dataclasses.fields(Effort)})


def _outcome(value: Any) -> Outcome:
    fields = dict(_object(value, "outcome"))
    for name in fields:
        check = _CHECKS.get(name)
        if check is not None:
            fields[name] = check(fields, name)
    try:
        return from_json(fields)
    except KeyError:
        raise InputError(
            f"an outcome must be of a known kind, got {str(fields.get('kind'))[:100]!r}"
        ) from None
    except TypeError as error:
        raise InputError(f"outcome: {error}") from None


def _time(data: Mapping[str, Any], name: str) -> float:
    found = _number(data, name)
    if not found:
        raise InputError(f"{name} must be positive")
    return found


def _times(data: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = data[name]
    if not isinstance(values, list) or not values:
        raise InputError(f"{name} must list times")
    return tuple(_time({name: value}, name) for value in values)


def _interval(data: Mapping[str, Any], name: str) -> tuple[float, ...]:
    found = _times(data, name)
    if len(found) != 2:
        raise InputError(f"{name} must be two times")
    return found


def _reason(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise InputError(f"{name} must be a text")
    return value[:MAX_TEXT].encode("utf-8", "replace").decode().replace("\0", " ")


def _flag(data: Mapping[str, Any], name: str) -> bool:
    if not isinstance(data[name], bool):
        raise InputError(f"{name} must be true or false")
    return bool(data[name])


def _cache(data: Mapping[str, Any], name: str) -> str:
    if data[name] not in get_args(CacheState):
        raise InputError(f"{name} must be one of: {', '.join(get_args(CacheState))}")
    return str(data[name])


def _verification(data: Mapping[str, Any], name: str) -> Verification:
    values = _object(data[name], name)
    known = get_args(typing.get_type_hints(Verification)["how"])
    if values.get("how") not in known:
        raise InputError(f"how a result was verified must be one of: {', '.join(known)}")
    return Verification(how=values["how"], detail=_reason(values, "detail"), worst=_number(values, "worst"))


def _conditions(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _object(data[name], name)


_CHECKS: Mapping[str, Callable[[Mapping[str, Any], str], Any]] = {
    **dict.fromkeys(("median_us", "predicted_us", "above_us", "incumbent_us"), _time),
    **dict.fromkeys(("bound_us", "low_us", "high_us"), _number),
    "samples_us": _times,
    "ci_us": _interval,
    "cache": _cache,
    "verification": _verification,
    "reason": _reason,
    "refused": _flag,
    "conditions": _conditions,
}
"""What each field of an outcome must be; a field that no outcome has is refused when it is made."""
