"""Files of measured steps, as TOML: `read_measured`.

A file has a table `[[step]]` for each measured step with its time and layout. Keys outside the tables hold
for all steps. Keys are the fields of `NetworkRun` and `Parallelism`, and those of `_OTHERS`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tunebench import device as devices
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName
from tunebench.training.interconnect.cluster import Cluster
from tunebench.training.steps.calibration import MeasuredStep
from tunebench.training.steps.parallelism import Parallelism
from tunebench.training.steps.step import predict_step
from tunebench.workloads.networks import NetworkRun, network

__all__ = ["read_measured"]

_OTHERS = {
    "time_s": "measured time of a step in seconds",
    "model": "name of the model, or its config.json",
    "device": "name of the device",
    "nodes": "number of nodes that share the devices evenly",
    "link": "link within a node",
    "network": "link between nodes",
}
"""Keys beside those of runs and parallelism."""

_PARALLELISM = frozenset(field.name for field in fields(Parallelism))
_DIVIDED = _PARALLELISM & {field.name for field in fields(NetworkRun)}
_RUN = frozenset(field.name for field in fields(NetworkRun)) - _DIVIDED - {"mode", "layers", "shards"}
_REQUIRED = ("time_s", "model", "device", "batch", "seq", "dtype")


def read_measured(
    path: Path, defaults: Mapping[str, Any] | None = None, *, device: Device | None = None
) -> tuple[MeasuredStep, ...]:
    """Return the measured steps of a file with their predictions.

    Args:
        path: TOML file.
        defaults: Values of keys that the file leaves out.
        device: Device of steps whose device the file leaves out.

    Raises:
        InputError: if the file cannot be read, has no step, lacks a key, or has an invalid value.
        UnknownName: if a key, a model or a device is unknown.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read measured steps from {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    tables = data.pop("step", None)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path} has no measured step: expected a table [[step]] with time_s for each")
    steps = []
    for number, table in enumerate(tables, start=1):
        try:
            steps.append(_measured({**(defaults or {}), **data, **table}, device))
        except InputError as error:
            raise InputError(f"{path}, step {number}: {error}") from None
    return tuple(steps)


def _measured(values: Mapping[str, Any], device: Device | None) -> MeasuredStep:
    """Return a measured step with its prediction."""
    for key in values:
        if key not in _OTHERS and key not in _RUN | _PARALLELISM:
            raise UnknownName("key", key, {*_OTHERS, *_RUN, *_PARALLELISM})
    missing = [key for key in _REQUIRED if key not in values and not (key == "device" and device is not None)]
    if missing:
        raise InputError(f"expected {', '.join(missing)}, which the file leaves out")
    time_s = values["time_s"]
    if isinstance(time_s, bool) or not isinstance(time_s, int | float):
        raise InputError(f"time_s must be a number of seconds, got {time_s!r}")
    found = devices.find(values["device"]) if "device" in values else device
    assert found is not None
    try:
        run = NetworkRun(mode="train", **{"optimizer": "adamw", **_chosen(values, _RUN)})
        parallelism = Parallelism(**_chosen(values, _PARALLELISM))
    except (TypeError, AttributeError) as error:
        raise InputError(f"a value has the wrong type: {error}") from None
    links = {key: values[key] for key in ("link", "network") if values.get(key) is not None}
    cluster = Cluster.of(found, devices=parallelism.devices, nodes=values.get("nodes"), **links)
    prediction = predict_step(network(values["model"]), found, run, cluster, parallelism)
    return MeasuredStep(seconds=float(time_s), prediction=prediction)


def _chosen(values: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the values of some keys, lists as tuples."""
    return {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in values.items()
        if key in names
    }
