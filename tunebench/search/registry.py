"""Samplers by name: those of this package, of the entry point `tunebench.samplers`, and registered ones."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from optuna.samplers import BaseSampler, NSGAIISampler, TPESampler

from tunebench.errors import InputError, UnknownName, describe_error
from tunebench.search.sampler import BoundSampler, Prospects, RandomTableSampler
from tunebench.search.surrogate_sampler import SurrogateSampler

__all__ = [
    "ENTRY_POINTS",
    "ONE_OBJECTIVE",
    "SAMPLERS",
    "broken_samplers",
    "make_sampler",
    "register_sampler",
    "samplers",
]

ENTRY_POINTS = "tunebench.samplers"
"""Entry-point group of packages that offer samplers."""

POPULATION = 20
"""Configurations of a generation of NSGA-II: with Optuna's 50, a usual budget has one or two generations."""

SAMPLERS: dict[str, Callable[[Prospects, int], BaseSampler]] = {
    "bound": lambda prospects, seed: BoundSampler(prospects, seed=seed),
    "nsga2": lambda prospects, seed: NSGAIISampler(seed=seed, population_size=POPULATION),
    "random": lambda prospects, seed: RandomTableSampler(prospects, seed=seed),
    "surrogate": lambda prospects, seed: SurrogateSampler(prospects, seed=seed),
    "tpe": lambda prospects, seed: TPESampler(seed=seed, multivariate=True, constant_liar=True),
}
"""Samplers of this package by name; each is made from prospects and a seed."""

ONE_OBJECTIVE = ("bound", "surrogate")
"""Samplers of this package for one objective only."""

_registered: dict[str, Callable[..., BaseSampler]] = {}
_broken: list[str] = []


def register_sampler(name: str, factory: Callable[..., BaseSampler]) -> None:
    """Make a sampler known in this process; a package offers one by the entry point `tunebench.samplers`.

    A sampler of that name that was registered before is replaced.

    Args:
        name: Name for `Plan(sampler=…)` and `--sampler`.
        factory: Class or function that is called as ``factory(prospects, seed=seed)``: a subclass of
            `tunebench.search.sampler.TableSampler`, or any sampler of Optuna in a function.

    Raises:
        InputError: A sampler of this package has the name.
    """
    if name in SAMPLERS:
        raise InputError(f"tunebench has a sampler named {name!r}; choose another name")
    _registered[name] = factory


def samplers() -> tuple[str, ...]:
    """Return the names of all samplers, those of this package first."""
    return tuple(dict.fromkeys((*SAMPLERS, *_plugins(), *_registered)))


def make_sampler(name: str, prospects: Prospects, seed: int) -> BaseSampler:
    """Return a new sampler.

    Args:
        name: One of `samplers`.
        prospects: The configurations.
        seed: Its seed.

    Raises:
        UnknownName: There is no sampler of that name.
        InputError: A sampler of another package cannot be made, or is none.
    """
    if name in SAMPLERS:
        return SAMPLERS[name](prospects, seed)
    factory = _registered.get(name) or _plugins().get(name)
    if factory is None:
        raise UnknownName("sampler", name, samplers())
    try:
        sampler = factory(prospects, seed=seed)
    except Exception as error:  # code of others may raise anything
        raise InputError(f"sampler {name}: {describe_error(error)}") from error
    if not isinstance(sampler, BaseSampler):
        raise InputError(f"sampler {name} is a {type(sampler).__name__}, expected a sampler of Optuna")
    return sampler


def broken_samplers() -> tuple[str, ...]:
    """Return why samplers of other packages could not be imported, one line each."""
    _plugins()
    return tuple(_broken)


@functools.cache
def _plugins() -> Mapping[str, Callable[..., BaseSampler]]:
    plugins: dict[str, Any] = {}
    for entry_point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            if entry_point.name in SAMPLERS:
                raise InputError("tunebench has a sampler of this name")
            plugins[entry_point.name] = entry_point.load()
        except (Exception, SystemExit) as error:  # a package of others may raise anything
            reason = f"sampler {entry_point.name} = {entry_point.value}: {describe_error(error)}"
            _broken.append(reason)
            warnings.warn(f"{reason}; it is skipped", stacklevel=2)
    return plugins
