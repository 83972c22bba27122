"""One configuration to look into or to take away: the one asked for, the best known, or the default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunebench.answer import How, recorded
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.kernels import variant as find_variant
from tunebench.outcome import CacheState
from tunebench.space import Config
from tunebench.tuning import candidate
from tunebench.variant import Variant
from tunebench.workload import Workload

__all__ = ["Choice", "Why", "choose"]

Why = Literal["asked for", "best known", "default"]
"""Why it is this configuration and no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A configuration of a variant for a problem on a device, and what is known of its time.

    Attributes:
        workload: The problem.
        device: Where it is to run.
        variant: The implementation.
        config: A valid point of its space.
        why: Why this one.
        expected_us: Median that was measured, or the time that a model predicts.
        how: How that time is known.
        cache: Cache state it was timed in; None for a prediction.
    """

    workload: Workload
    device: Device
    variant: Variant[Any]
    config: Config
    why: Why
    expected_us: float
    how: How
    cache: CacheState | None = None


def choose(
    workload: Workload,
    device: Device,
    *,
    variant: str | None = None,
    config: str | None = None,
    db: str | Path | None = None,
    compilable: bool = True,
) -> Choice:
    """Choose a configuration.

    Args:
        workload: The problem.
        device: Where it is to run; a GPU need not be here.
        variant: Name or key of the only variant to consider.
        config: The configuration, as text; needs a variant, unless only one can do the problem.
        db: Where the best known one is looked for. Without one there, it is the default of the variant that
            is predicted fastest.
        compilable: Whether a variant that cannot be compiled here, for want of a compiler, is left out.

    Raises:
        InputError: if no variant can do it, or several can and a configuration is given.
        ConfigError: if the configuration is no valid point of the variant's space, today.
        DatabaseError: if the database cannot be read.
    """
    names = () if variant is None else (variant,)
    found, _ = candidate.find(workload, device, names, compilable=compilable)
    if config is not None:
        if len(found) > 1:
            known = ", ".join(one.variant.name for one in found)
            raise InputError(f"a configuration needs its variant named, one of: {known}")
        point = found[0].variant.space.parse(config)
        return _predicted(found[0], workload, point, "asked for")
    key = found[0].variant.key if variant is not None else None
    answer = recorded(workload, device=device, db=db, variant=key)
    if answer is None:
        defaults = [
            _predicted(one, workload, one.variant.default(workload, device), "default") for one in found
        ]
        return min(defaults, key=lambda choice: choice.expected_us)
    best = find_variant(answer.variant)
    return Choice(
        workload=workload,
        device=device,
        variant=best,
        config=best.space.check(answer.config, workload=workload, device=device),
        why="best known",
        expected_us=answer.expected_us,
        how=answer.how,
        cache=answer.cache,
    )


def _predicted(one: candidate.Candidate, workload: Workload, config: Config, why: Why) -> Choice:
    """Return a choice whose time is the model's belief."""
    valid = one.variant.space.check(config, workload=workload, device=one.device)
    row = one.table.row(valid)
    assert row is not None, valid
    return Choice(
        workload=workload,
        device=one.device,
        variant=one.variant,
        config=valid,
        why=why,
        expected_us=one.predicted_us(row),
        how="predicted",
    )
