"""What a model needs of memory at the very least: its parameters, and what training keeps of each."""

from __future__ import annotations

from tunebench.dtype import itemsize
from tunebench.errors import InputError
from tunebench.forecast.parallel.step import Parallelism
from tunebench.workloads.networks import Network, NetworkRun

__all__ = ["OPTIMIZER_STATES", "min_memory_bytes"]

OPTIMIZER_STATES = {"none": 0, "sgd": 0, "adamw": 2}
"""Numbers that an optimizer keeps of each parameter: AdamW the means of gradients and of their squares."""

_ONE = Parallelism()


def min_memory_bytes(network: Network, run: NetworkRun, parallelism: Parallelism = _ONE) -> int | None:
    """Return what the device that holds most needs for parameters, gradients and the optimizer's states.

    Activations, workspaces and fragments come on top, so what exceeds a device's memory cannot run there, and
    what does not may still not.

    Args:
        network: The model.
        run: How it is run; all numbers are of its type.
        division: How it is divided among devices.

    Returns:
        Bytes; None if the network does not tell its parameters.
    """
    copies = 1 + (1 + OPTIMIZER_STATES[run.optimizer] if run.trains else 0)
    try:
        if parallelism.pipeline == 1:
            held = network.parameters(parallelism.tensor)
        else:
            stages = parallelism.stages(network.layers)
            held = max(network.parameters(parallelism.tensor, layers) for layers in stages)
    except InputError:
        return None
    return held * itemsize(run.dtype) * copies
