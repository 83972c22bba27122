"""Run the calls of a path again as in eager mode, after an iteration left the known paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tunebench.training.coexecution._call import Structure, Variable
from tunebench.training.coexecution._function import Kind
from tunebench.training.coexecution._modes import enter
from tunebench.training.coexecution._path import Node
from tunebench.training.coexecution._recorder import Recorder
from tunebench.training.coexecution._run import Run, rebuilt

__all__ = ["repeat"]


def repeat(
    nodes: Sequence[Node],
    run: Run,
    recorder: Recorder,
    random_states: Mapping[int, Tensor],
    fetched: Mapping[int, Any],
    written: Mapping[int, Sequence[tuple[int, torch.UntypedStorage]]],
) -> None:
    """Run calls as in eager mode, and turn the placeholders that they gave to Python into their results.

    Args:
        nodes: The calls.
        run: The state of the iteration.
        recorder: What records the calls.
        random_states: State of the random number generator before calls, by position.
        fetched: What calls that read values returned, by position.
        written: Variables whose memory other code wrote before calls, and its contents then, by position.
    """
    run.promised = {index for node in nodes for index, _ in node.made}
    state = torch.default_generator.get_state()
    with recorder.mode:
        for position, node in enumerate(nodes):
            if position in random_states:
                torch.default_generator.set_state(random_states[position])
            enter(node.call.state)
            _write(run, written.get(position, ()))
            recorder.replaying = node.call.stack
            _repeat(node, run, recorder, fetched.get(position))
    _write(run, written.get(len(nodes), ()))
    recorder.replaying = None
    torch.default_generator.set_state(state)


def _write(run: Run, written: Sequence[tuple[int, torch.UntypedStorage]]) -> None:
    with _disable_current_modes():
        for index, contents in written:
            run.objects[index].untyped_storage().copy_(contents)


def _repeat(node: Node, run: Run, recorder: Recorder, fetched: Any) -> None:
    call = node.call
    args, kwargs = rebuilt(call, run, run.objects.__getitem__)
    if call.kind is Kind.CREATE:
        result = run.result(call.outputs)
        recorder.adopt(call.function, args, kwargs, result, Kind.CREATE)
        return
    if call.kind is Kind.FETCH:
        recorder.adopt(call.function, args, kwargs, fetched, Kind.FETCH)
        return
    result = recorder.call(
        call.function, args, kwargs, Kind.OPTIMIZER if call.kind is Kind.OPTIMIZER else None
    )
    for leaf, variable in call.gradients:
        if variable in run.promised:
            tensor, promised = run.objects[leaf], run.objects[variable]
            result = tensor.grad
            index = recorder.tensors.index_of(result)
            with torch.no_grad():
                tensor.grad = None
                run.redeem(variable, result)
                tensor.grad = promised
            if index is not None:
                recorder.tensors.rename(promised, index)
    _adopt(call.outputs, result, run, recorder)


def _adopt(pattern: Any, result: Any, run: Run, recorder: Recorder) -> None:
    if isinstance(pattern, Variable):
        if pattern.index in run.promised:
            index = recorder.tensors.index_of(result)
            run.redeem(pattern.index, result)
            if index is not None:
                recorder.tensors.rename(run.objects[pattern.index], index)
    elif isinstance(pattern, Structure):
        for each, value in zip(pattern.parts, result, strict=True):
            _adopt(each, value, run, recorder)
    elif isinstance(pattern, (tuple, list)):
        for each, value in zip(pattern, result, strict=True):
            _adopt(each, value, run, recorder)
