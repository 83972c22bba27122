"""Parameters of stages that ranks receive from the first rank, because they made the model on `meta`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tunebench.training.pipeline_runtime.transfer import Transport

__all__ = ["is_on_meta", "share_parameters"]


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a parameter or buffer of a model is on the device `meta`."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def share_parameters(
    stages: Sequence[nn.Module], placement: Sequence[int], on_meta: Sequence[bool], transport: Transport
) -> dict[Tensor, nn.Parameter]:
    """Send the parameters and buffers of stages from the first rank to those that made them on `meta`.

    Call it on all ranks with the same stages. Tensors on `meta` are replaced in the modules of this rank; a
    tensor that several modules share is sent once for each rank.

    Args:
        stages: Modules of all stages.
        placement: Rank of each stage.
        on_meta: Whether each rank made the model on `meta`.
        transport: Messages of this rank.

    Returns:
        The parameter that replaces each one on `meta`.

    Raises:
        RankFailed: if a rank fails.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for rank in (rank for rank, meta in enumerate(on_meta) if meta and transport.rank in (0, rank)):
        own = nn.ModuleList(stage for stage, owner in zip(stages, placement, strict=True) if owner == rank)
        # The order is that of the modules, which is equal on both ranks.
        tensors = list(dict.fromkeys((*own.parameters(), *own.buffers())))
        if transport.rank == 0:
            _send(tensors, rank, transport)
        else:
            made = _replaced(own, _received(tensors, transport))
    return made


def _send(tensors: Sequence[Tensor], peer: int, transport: Transport) -> None:
    for tag, tensor in enumerate(tensors, 1):
        transport.send([tensor.detach().contiguous()], peer, tag).wait(transport.timeout)


def _received(tensors: Sequence[Tensor], transport: Transport) -> dict[Tensor, Tensor]:
    """Return the tensors that the first rank sends in place of others, by these."""
    received = {}
    for tag, tensor in enumerate(tensors, 1):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=transport.device)
        (received[tensor],) = transport.receive([empty], 0, tag).wait(transport.timeout)
    return received


def _replaced(model: nn.Module, values: dict[Tensor, Tensor]) -> dict[Tensor, nn.Parameter]:
    """Replace parameters and buffers of a module, and return the new parameters by the old ones."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = nn.Parameter(values[parameter], requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = values[buffer]
    return made
