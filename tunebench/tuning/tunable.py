"""The variants that support a workload on a device, with their search spaces, costs and lower bounds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tunebench import device as devices
from tunebench._user_code import limited
from tunebench.bound import Bounds, bound
from tunebench.compile import unavailable
from tunebench.device import Device
from tunebench.errors import ConfigError, InputError, NoCompiler, UnknownName, VariantError
from tunebench.forecast.predicted_space import PredictedSpace, predicted_space
from tunebench.kernels import variants
from tunebench.measure.cuda import require_cuda_core
from tunebench.measure.processor import with_measured_rates
from tunebench.outcome import CacheState
from tunebench.search.sampler import Prospects
from tunebench.space import Config
from tunebench.variant import LibraryGpuVariant, LibraryVariant, Variant, exceeds_memory, unsuitable
from tunebench.workload import Workload

__all__ = [
    "RunnerName",
    "TunableVariant",
    "TuningTarget",
    "find_variants",
    "tuning_target",
]

RunnerName = Literal["cpu", "cuda", "offline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTarget:
    """The device to tune on, and the runner that measures there.

    Attributes:
        device: The device.
        runner: The runner.
        gpus: Positions of the GPUs of this machine to measure on, all of this kind; empty for the first one.
    """

    device: Device
    runner: RunnerName
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TunableVariant(PredictedSpace):
    """One variant that supports a workload on a device, as searches take it.

    Attributes:
        gap_bounds: Lower bounds that gaps are computed with (`Device.with_meaningful_rates`): `bounds`, or
            those at the measured rates of a processor; None if the rates of the device are assumed only.
    """

    gap_bounds: Bounds | None = None

    def prospects(self) -> Prospects:
        """Return the configurations with bounds and costs, as the samplers take them."""
        # Times on a processor are predicted by floors, which rank badly.
        # Those of libraries are floors, too.
        is_predicted = self.device.kind == "gpu" and self.variant.is_predictable
        predicted_us = self.times_us if is_predicted else None
        return Prospects(
            table=self.table,
            bounds_us=self.bounds.us,
            figures=self.costs.figures(len(self.table)),
            predicted_us=predicted_us,
        )


def tuning_target(device: Device | str | None, *, offline: bool = False) -> TuningTarget:
    """Return the device to tune on, with its runner.

    Args:
        device: A device, its name, or None for the first GPU of this machine, else its CPU. Several GPUs of
            one kind, such as ``"cuda:0,cuda:1"``, measure at the same time.
        offline: Whether to predict even if the device is present.

    Raises:
        UnknownName: if there is no such device.
        InputError: if it is a CPU other than this machine's.
        NoCompiler: if it is a GPU of this machine, and NVRTC is not installed.
        MissingDependency: if it is a GPU of this machine, and cuda.core is not installed.
    """
    gpus = _positions(device) if isinstance(device, str) else ()
    chosen = device if isinstance(device, Device) else devices.find(f"cuda:{gpus[0]}" if gpus else device)
    if chosen.kind == "cpu":
        if chosen.key != devices.local_cpu().key or offline:
            raise InputError(
                f"{chosen.name}: of CPUs, only that of this machine can be tuned; use --device cpu"
            )
        return TuningTarget(device=with_measured_rates(chosen), runner="cpu")
    if offline or chosen.key not in {gpu.key for gpu in devices.local_gpus()}:
        return TuningTarget(device=chosen, runner="offline")
    reason = unavailable("cuda")
    if reason is not None:
        raise NoCompiler(f"this machine has a GPU ({chosen.name}), but {reason}")
    require_cuda_core()
    return TuningTarget(device=chosen, runner="cuda", gpus=gpus)


def _positions(name: str) -> tuple[int, ...]:
    """Return the positions of GPUs of this machine that a name such as ``cuda:0,cuda:1`` lists; else none.

    Raises:
        InputError: They are not of one kind, or one is listed twice.
        DeviceError: This machine has no such GPU.
    """
    if not re.fullmatch(r"cuda:\d+(,cuda:\d+)*", name.lower()):
        return ()
    names = name.lower().split(",")
    kinds = {devices.find(gpu).key for gpu in names}
    if len(kinds) > 1:
        raise InputError(
            f"{name} are of several kinds: {', '.join(sorted(kinds))}; tune each kind by a command of its own"
        )
    if len(set(names)) < len(names):
        raise InputError(f"{name} lists a GPU twice")
    return tuple(int(gpu.removeprefix("cuda:")) for gpu in names)


def find_variants(
    workload: Workload,
    device: Device,
    names: Sequence[str] = (),
    *,
    cache: CacheState = "cold",
    compilable: bool = True,
    libraries: bool = True,
    present: bool = True,
) -> tuple[list[TunableVariant], dict[str, str]]:
    """Return the variants that support `workload` on `device`, and why the others do not.

    Args:
        workload: The workload.
        device: The device.
        names: Names or keys of the variants to consider; empty considers all of the operator.
        cache: Cache state of the bounds.
        compilable: Whether to skip variants whose compiler is not installed here.
        libraries: Whether to consider variants that call a library even if they are not named.
        present: Whether the device can be measured; libraries of GPUs are not considered elsewhere.

    Returns:
        The variants, those that call a library last, and the reason for each skipped one by its key.

    Raises:
        UnknownName: if a name is of no variant of the operator.
        InputError: if no variant supports the workload, with the reason for each.
        NoCompiler: if those that do cannot be compiled here.
    """
    with limited(f"{workload.operator}: its tensors"):
        reason = unsuitable(workload, device) or exceeds_memory(workload, device)
    if reason is not None:
        raise InputError(reason)
    by_key = {variant.key: variant for variant in variants(workload)}
    for name in names:
        if name not in by_key and f"{workload.operator}/{name}" not in by_key:
            raise UnknownName(f"variant of {workload.operator}", name, (v.name for v in by_key.values()))
    calls = [v for v in by_key.values() if isinstance(v, LibraryVariant)]
    kernels = [v for v in by_key.values() if v not in calls]
    chosen = [v for v in (*kernels, *calls) if v.name in names or v.key in names]
    if not names:
        chosen = [*kernels, *(calls if libraries else [])]
    tunables: list[TunableVariant] = []
    skipped: dict[str, str] = {}
    failure: type[InputError] = InputError
    for variant in chosen:
        try:
            reason = variant.refuses(workload, device)
            if not present and isinstance(variant, LibraryGpuVariant):
                reason = f"{variant.key} calls a library, which is timed on its GPU or not at all"
            if reason is None and compilable:
                reason = unavailable(variant.language)
                failure = failure if reason is None else NoCompiler
            if reason is None:
                tunable = _tunable(variant, workload, device, cache)
                if tunable is not None:
                    variant.revision(workload, _default(tunable, workload))  # fails now or never
                    tunables.append(tunable)
                    continue
                reason = f"{variant.key} has no valid configuration for this workload"
        except (VariantError, ConfigError) as error:  # other variants are still tried
            reason = str(error)
        skipped[variant.key] = reason
    if not tunables:
        reasons = "; ".join(dict.fromkeys(skipped.values())) or f"{workload.operator} has no variants"
        raise failure(f"no variant can do {workload} on {device.name}: {reasons}")
    return tunables, skipped


def _default(tunable: TunableVariant, workload: Workload) -> Config:
    """Return the default of a variant.

    Raises:
        VariantError: if it is not a valid configuration for the workload.
    """
    variant = tunable.variant
    config = variant.default(workload, tunable.device)
    if tunable.table.row(config) is None:
        raise VariantError(
            f"{variant.key}: default must return a valid configuration of its space, got {config}, which is "
            f"none for {workload} on {tunable.device.name}"
        )
    return config


def _tunable(
    variant: Variant[Any], workload: Workload, device: Device, cache: CacheState
) -> TunableVariant | None:
    space = predicted_space(variant, workload, device, cache)
    if space is None:
        return None
    on, gap_bounds = device.with_meaningful_rates(), None
    if on is device:
        gap_bounds = space.bounds
    elif on is not None:
        gap_bounds = bound(space.costs, space.traffic, on, cache=cache, rows=len(space.table))
    fields = {field.name: getattr(space, field.name) for field in dataclasses.fields(space)}
    return TunableVariant(**fields, gap_bounds=gap_bounds)
