"""Lower limit of the memory that a network needs: parameters, gradients and optimizer states."""

from __future__ import annotations

from typing import Any

from tunebench._deprecation import warn_renamed
from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.optimizer import OPTIMIZERS, find_optimizer
from tunebench.training.steps.step import Parallelism
from tunebench.workloads.networks import Network, NetworkRun

__all__ = ["min_memory_bytes"]

_ONE = Parallelism()


def min_memory_bytes(network: Network, run: NetworkRun, parallelism: Parallelism = _ONE) -> int | None:
    """Return the bytes of parameters, gradients and optimizer states on the fullest device.

    Activations, workspaces and fragmentation come on top. A network cannot run on a device with less memory
    than this, and may still fail on a device with more.

    Args:
        network: The network.
        run: How it runs; all numbers are stored in its dtype.
        parallelism: How it is divided among devices.

    Returns:
        Bytes; None if the network's number of parameters is unknown.
    """
    size = itemsize(run.dtype)
    state_bytes = find_optimizer(run.optimizer).state_bytes(size) if run.trains else 0
    try:
        if parallelism.devices == 1:
            parameters = network.parameters()
        else:
            divided_network, stages = parallelism.divided(network)
            parameters = max(sum(divided_network.held_parameters(parallelism, layers)) for layers in stages)
    except InputError:
        return None
    return round(parameters * (size * (2 if run.trains else 1) + state_bytes))


def __getattr__(name: str) -> Any:
    if name != "OPTIMIZER_STATES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"{__name__}.{name}", "tunebench.optimizer.OPTIMIZERS")
    return {optimizer.name: optimizer.moments for optimizer in OPTIMIZERS.values()}
