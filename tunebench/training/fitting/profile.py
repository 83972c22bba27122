"""Profile of a model's training step for a device that need not be in this machine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.torch.compiler.capture import (
    first_reason,
    in_training_mode,
    recurrent_layers_traced,
    require_equal_types,
    results_without_data,
    without_data,
    without_log,
)
from tunebench.torch.compiler.decomposition import attention_as_on_gpu
from tunebench.torch.compiler.recurrent_layer import divide_recurrent_layers
from tunebench.training.fitting.joint_step import JointStep, joint_step, parameter_places, unread_bytes
from tunebench.training.fitting.operation_time import predicted_times
from tunebench.training.fitting.redundant_copy import remove_redundant_copies
from tunebench.training.memory.step import HostLink

__all__ = ["profile_step"]


def profile_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: Device,
    link: HostLink | None = None,
    other_bytes: int = 0,
) -> JointStep:
    """Return a model's training step with predicted times, without computing it.

    The step is the forward pass, and the gradients of everything that the model returns. Bytes are those
    that operations request; workspaces of libraries are not known.

    Args:
        model: The model; its parameters may be on the device `meta`. Its mode and buffers are restored.
        args: Positional inputs; only their sizes, types and layouts matter.
        kwargs: Keyword inputs.
        device: The device of the times.
        link: The device's link to host memory; without one, plans swap nothing.
        other_bytes: Bytes on the device besides the step, such as states of the optimizer.

    Raises:
        InputError: torch cannot trace the model as a whole, or the model returns nothing with a gradient.
    """
    parameters: frozenset[int] = frozenset()
    unread = 0

    def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        require_equal_types(module.graph)
        remove_redundant_copies(module.graph)
        times = predicted_times(module, device)
        step = joint_step(
            module.graph,
            num_fwd_outputs,
            times,
            link=link,
            other_bytes=other_bytes + unread,
            on_gpu=device.kind == "gpu",
            parameters=parameters,
        )
        raise _TracedError(step)  # torch need not compile the step

    def compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        return results_without_data(graph)

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal parameters, unread
        parameters = parameter_places(inputs)
        unread = unread_bytes(model, graph, inputs)
        divide_recurrent_layers(graph)
        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(graph, inputs)

    on_gpu = attention_as_on_gpu() if device.kind == "gpu" else contextlib.nullcontext()
    try:
        with (
            on_gpu,
            without_log(),
            without_data(model, args, kwargs or {}) as fake_arguments,
            in_training_mode(model, training=True),
            recurrent_layers_traced(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            torch._dynamo.reset()
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(
                *fake_arguments[0], **fake_arguments[1]
            )
    except Exception as error:  # the tracer may raise anything; its first line is the reason
        cause = getattr(error, "inner_exception", error)
        if isinstance(cause, _TracedError):
            return cause.step
        if isinstance(cause, InputError):
            raise cause from None
        reason = first_reason(error)
        raise InputError(f"{type(model).__name__} cannot be traced as a whole: {reason}") from error
    finally:
        torch._dynamo.reset()
    raise InputError(
        f"{type(model).__name__} returns nothing that requires a gradient: return the loss, with parameters "
        "that require gradients"
    )


class _TracedError(Exception):
    """Ends torch's compilation of a step that was traced.

    Args:
        step: The step.
    """

    def __init__(self, step: JointStep) -> None:
        super().__init__("the step was traced")
        self.step = step
