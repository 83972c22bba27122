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
    replaced: dict[Tensor, nn.Parameter] = {}
    for rank, is_meta in enumerate(on_meta):
        if not is_meta or transport.rank not in (0, rank):
            continue
        modules = nn.ModuleList(
            stage for stage, owner in zip(stages, placement, strict=True) if owner == rank
        )
        # The order is that of the modules, which is equal on both ranks.
        tensors = list(dict.fromkeys((*modules.parameters(), *modules.buffers())))
        if transport.rank == 0:
            _send(tensors, rank, transport)
        else:
            replaced = _replaced(modules, _received(tensors, transport))
    return replaced


def _send(tensors: Sequence[Tensor], peer: int, transport: Transport) -> None:
    for tag, tensor in enumerate(tensors, 1):
        transport.send([tensor.detach().contiguous()], peer, tag).wait(transport.timeout)


def _received(tensors: Sequence[Tensor], transport: Transport) -> dict[Tensor, Tensor]:
    """Return the tensors that rank 0 sends, by the tensors on `meta` that they replace."""
    received = {}
    for tag, tensor in enumerate(tensors, 1):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=transport.device)
        (received[tensor],) = transport.receive([empty], 0, tag).wait(transport.timeout)
    return received


def _replaced(model: nn.Module, values: dict[Tensor, Tensor]) -> dict[Tensor, nn.Parameter]:
    """Replace parameters and buffers of a module, and return the new parameters by the old ones."""
    replaced: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in replaced:
                    received = nn.Parameter(values[parameter], requires_grad=parameter.requires_grad)
                    replaced[parameter] = received
                module._parameters[name] = replaced[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = values[buffer]
    return replaced
