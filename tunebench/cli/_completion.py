"""Completion of option values in a shell: workloads, devices, variants, models, optimizers, schedules."""

from __future__ import annotations

__all__ = ["devices", "models", "optimizers", "plan_values", "schedules", "stacks", "variants", "workloads"]


def workloads(incomplete: str) -> list[str]:
    """Return operators, or the next dimensions of one, and suites, or the layers of one.

    Args:
        incomplete: What was typed.
    """
    from tunebench import workloads as known
    from tunebench.errors import TunebenchError

    head, colon, rest = incomplete.partition(":")
    try:
        if colon:
            return _dimensions(head, rest)
        suite, slash, _ = incomplete.partition("/")
        if slash:
            completions = [f"{suite}/{layer.name}" for layer in known.suite(suite)]
        else:
            completions = [
                *(f"{name}:" for name in known.all_operators()),
                *(f"{name}/" for name in known.suites()),
            ]
    except TunebenchError:
        return []
    return _starting(completions, incomplete)


def _dimensions(operator: str, text: str) -> list[str]:
    """Return the text of a workload with each dimension that may come next, or each value of the last one."""
    from tunebench import workloads as known

    cls = known.operator(operator)
    before, comma, last = text.rpartition(",")
    start = f"{operator}:{before}{comma}"
    name, equals, _ = last.partition("=")
    if equals:
        values = cls.choices(name) if name in cls.dimensions() else ()
        completions = [f"{start}{name}={value}" for value in values]
    else:
        used = {item.partition("=")[0] for item in before.split(",")}
        completions = [f"{start}{dimension}=" for dimension in cls.dimensions() if dimension not in used]
    return _starting(completions, f"{operator}:{text}")


def devices(incomplete: str) -> list[str]:
    """Return the names of described devices, and `cpu` and `offline`.

    Args:
        incomplete: What was typed.
    """
    from tunebench.device import described

    return _starting(["cpu", "offline", *sorted(described())], incomplete)


def variants(incomplete: str) -> list[str]:
    """Return the keys of variants.

    Args:
        incomplete: What was typed.
    """
    from tunebench import kernels

    return _starting([variant.key for variant in kernels.variants()], incomplete)


def models(incomplete: str) -> list[str]:
    """Return the names of built-in networks.

    Args:
        incomplete: What was typed.
    """
    from tunebench.workloads.networks import networks

    return _starting(list(networks()), incomplete)


def schedules(incomplete: str) -> list[str]:
    """Return the names of pipeline schedules, each after those that were typed.

    Args:
        incomplete: What was typed.
    """
    from tunebench.training.schedules.registry import SCHEDULES

    before, comma, _ = incomplete.rpartition(",")
    return _starting([f"{before}{comma}{name}" for name in SCHEDULES], incomplete)


def stacks(incomplete: str) -> list[str]:
    """Return the names of software stacks.

    Args:
        incomplete: What was typed.
    """
    from tunebench.stack import STACKS

    return _starting(list(STACKS), incomplete)


def optimizers(incomplete: str) -> list[str]:
    """Return the names of optimizers.

    Args:
        incomplete: What was typed.
    """
    from tunebench.optimizer import OPTIMIZERS

    return _starting(list(OPTIMIZERS), incomplete)


def plan_values(incomplete: str) -> list[str]:
    """Return the schedules of a cluster plan, after ``schedule=``.

    Args:
        incomplete: What was typed.
    """
    from tunebench.training.schedules.registry import PLANNED_SCHEDULES

    typed, _, last = incomplete.rpartition("schedule=")
    before, separator, _ = last.rpartition("|")
    start = f"{typed}schedule={before}{separator}"
    return _starting([f"{start}{name}" for name in PLANNED_SCHEDULES], incomplete)


def _starting(names: list[str], text: str) -> list[str]:
    return [name for name in names if name.startswith(text)]
