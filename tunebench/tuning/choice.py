"""One configuration to explain or export: the requested one, the best known one, or that predicted best."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunebench.answer import How, recorded
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.forecast.predicted_space import PredictedSpace, best_space
from tunebench.kernels import variant as find_variant
from tunebench.measure.processor import with_stored_rates
from tunebench.outcome import CacheState
from tunebench.space import Config
from tunebench.tuning.tunable import find_variants
from tunebench.variant import Variant
from tunebench.workload import Workload

__all__ = ["ChosenConfig", "Why", "choose_config", "compiled_alternative"]

Why = Literal["asked for", "best known", "predicted best", "default"]
"""Why this configuration was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenConfig:
    """A configuration of a variant for a workload on a device, with its expected time.

    Attributes:
        workload: The workload.
        device: The device.
        variant: The variant.
        config: A valid point of its space.
        why: Why this configuration was chosen.
        expected_us: Measured median or predicted time, in microseconds.
        how: How that time is known.
        cache: Cache state of the measurement; None for a prediction.
        because: The record of the best known configuration, and faster variants whose files are not loaded.
    """

    workload: Workload
    device: Device
    variant: Variant[Any]
    config: Config
    why: Why
    expected_us: float
    how: How
    cache: CacheState | None = None
    because: str = ""


def choose_config(
    workload: Workload,
    device: Device,
    *,
    variant: str | None = None,
    config: str | None = None,
    db: str | Path | None = None,
    compilable: bool = True,
) -> ChosenConfig:
    """Return the requested configuration, else the best known one, else the one that is predicted best.

    Args:
        workload: The workload.
        device: The device; a GPU need not be present.
        variant: Name or key of the only variant to consider.
        config: Text of the configuration; needs `variant`, unless only one variant supports the workload.
        db: Database of the best known configuration. Without a record there, it is the one that
            `PredictedSpace.unmeasured` names.
        compilable: Whether to skip variants whose compiler is not installed here.

    Raises:
        InputError: if no variant supports the workload, or several do and `config` needs one.
        ConfigError: if the configuration is not in the space of the variant.
        DatabaseError: if the database cannot be read.
        LookupMiss: if only variants were measured whose files are not loaded.
    """
    device, names = with_stored_rates(device), () if variant is None else (variant,)
    tunables, _ = find_variants(workload, device, names, compilable=compilable)
    if config is not None:
        if len(tunables) > 1:
            names_found = ", ".join(tunable.variant.name for tunable in tunables)
            raise InputError(f"name the variant of the configuration, one of: {names_found}")
        point = tunables[0].variant.space.parse(config)
        return _predicted(tunables[0], point, "asked for")
    key = tunables[0].variant.key if variant is not None else None
    answer = recorded(workload, device=device, db=db, variant=key)
    if answer is None:
        space = best_space(tunables)
        row = space.unmeasured()
        why: Why = "default" if row == space.default_row else "predicted best"
        return _predicted(space, space.table.config(row), why)
    best = find_variant(answer.variant)
    return ChosenConfig(
        workload=workload,
        device=device,
        variant=best,
        config=best.space.check(answer.config, workload=workload, device=device),
        why="best known",
        expected_us=answer.expected_us,
        how=answer.how,
        cache=answer.cache,
        because=answer.because,
    )


def compiled_alternative(choice: ChosenConfig, *, db: str | Path | None = None) -> ChosenConfig | None:
    """Return the best configuration that is compiled, in place of one that calls a library; None without one.

    Args:
        choice: The configuration that calls a library.
        db: Database of the best known configurations; measured ones are preferred to predicted ones.
    """
    try:
        tunables, _ = find_variants(choice.workload, choice.device, libraries=False)
    except InputError:
        return None
    kernels = [
        choose_config(choice.workload, choice.device, variant=tunable.variant.key, db=db)
        for tunable in tunables
    ]
    return min(kernels, key=lambda kernel: (kernel.how == "predicted", kernel.expected_us))


def _predicted(space: PredictedSpace, config: Config, why: Why) -> ChosenConfig:
    """Return a configuration with its predicted time."""
    valid = space.variant.space.check(config, workload=space.workload, device=space.device)
    row = space.table.row(valid)
    assert row is not None, valid
    return ChosenConfig(
        workload=space.workload,
        device=space.device,
        variant=space.variant,
        config=valid,
        why=why,
        expected_us=space.predicted_us(row),
        how="predicted",
    )
