"""Execution of the actions of a rank, with sends, receives and evictions in the order that a schedule lists.

`PipelineRun` takes the place of a schedule of `torch.distributed.pipelining`, with EVICT, ACCEPT, RETURN,
LOAD and RELEASE besides the actions of torch. Torch's runtime also executes the others, from the file that
`write_schedule` writes, but keeps all receive buffers and each sent tensor during the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from tunebench.errors import InputError, RankFailed
from tunebench.training.pipeline.message_memory import ended_sends
from tunebench.training.pipeline_runtime.saved_activations import storages_of
from tunebench.training.pipeline_runtime.stage import Stage
from tunebench.training.pipeline_runtime.transfer import (
    FailureReport,
    PendingTransfer,
    Transport,
    failing_together,
)
from tunebench.training.schedules import ActionKind, PipelineAction, PipelineSchedule

__all__ = ["PipelineRun", "SharedParameter", "require_equal_microbatches"]

K = ActionKind
_FORWARD_ONLY = frozenset((K.FORWARD, K.SEND_FORWARD, K.RECEIVE_FORWARD))
_MOVES = (K.SEND_FORWARD, K.SEND_BACKWARD, K.EVICT, K.RETURN)
"""Kinds of messages, each with tags of its own."""


def require_equal_microbatches(values: Any, microbatches: int) -> None:
    """Raise InputError if a tensor among some values cannot be split into equal micro-batches.

    Args:
        values: Inputs and targets of a batch.
        microbatches: Number of micro-batches.
    """
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor) and (not tensor.dim() or tensor.shape[0] % microbatches):
            raise InputError(
                f"a step has {microbatches} micro-batches of equal size: the first extent of each input and "
                f"target must be a multiple of {microbatches}, got the shape {tuple(tensor.shape)}"
            )


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that stages of several ranks have, such as that of an embedding and of the head.

    Attributes:
        parameter: The parameter.
        ranks: Ranks that have it, in ascending order.
    """

    parameter: torch.nn.Parameter
    ranks: tuple[int, ...]


class PipelineRun(PipelineScheduleMulti):  # type: ignore[misc]
    """The schedule of one rank, ready to run steps. `pipeline` makes it.

    Args:
        stages: Stages of this rank.
        schedule: The schedule, with explicit transfers.
        loss_fn: Returns the loss of an output and its target.
        timeout_s: Longest wait for another rank, in seconds.
        scale_grads: Whether gradients are divided by the number of micro-batches.

    Attributes:
        schedule: The schedule.
        timeout_s: Longest wait for another rank, in seconds.
        observer: Called with each action of a step when what it needs has arrived; the action runs within the
            context that it returns.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: PipelineSchedule,
        *,
        loss_fn: Callable[..., Tensor] | None,
        timeout_s: float,
        scale_grads: bool,
    ) -> None:
        super().__init__(
            list(stages), n_microbatches=schedule.microbatches, loss_fn=loss_fn, scale_grads=scale_grads
        )
        self.schedule = schedule
        self.observer: Callable[[PipelineAction], AbstractContextManager[Any]] | None = None
        self._has_backward = schedule.trains
        self.timeout_s = timeout_s
        self._own: dict[int, Stage] = {stage.stage_index: stage for stage in stages}
        self._transport = Transport(stages[0].group, timeout_s, stages[0].device)
        self._report = FailureReport(stages[0].group)
        self._ended: str | None = None
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._tags = 1
        self._pending: dict[PipelineAction, PendingTransfer] = {}
        self._sends: list[PendingTransfer] = []
        """Sends of the step, in their order; those that have ended keep no messages."""
        self._released = 0
        """Number of sends, from the first one, that have ended."""
        self._accepted: dict[tuple[int, int], list[Tensor]] = {}
        self._step_losses: dict[int, Tensor] = {}
        rank_actions = schedule.actions[self.rank]
        self._ended_sends = ended_sends(schedule)[self.rank]
        self._evictions = frozenset(action for action in rank_actions if action.kind is K.EVICT)
        self._reduces = any(action.kind is K.REDUCE_GRADIENTS for action in rank_actions)
        self.backward_counter: Counter[int] = Counter()
        self.stage_index_to_group_rank = dict(enumerate(schedule.placement))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one training step; call it on all ranks.

        Args:
            args: Inputs of the whole batch, on the rank of the first stage. Tensors are split along the first
                dimension.
            target: Targets of the whole batch, on the rank of the last stage.
            losses: Receives the loss of each micro-batch, on the rank of the last stage.
            return_outputs: Whether the rank of the last stage keeps and returns the outputs of all
                micro-batches, which plans and `measure_pipeline` do not count.
            loss_kwargs: Further arguments of the loss function.
            kwargs: Keyword arguments of the stages of this rank.

        Returns:
            Outputs of the whole batch on the rank of the last stage with `return_outputs`, else None.

        Raises:
            InputError: if the batch cannot be split into the micro-batches of the schedule, or inputs or
                targets are missing.
            RankFailed: if a rank raises, ends or does not answer; the process group is broken then.
        """
        self._check_step(args, kwargs, target)
        return super().step(
            *args,
            target=target,
            losses=losses,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
            **kwargs,
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run the forward passes of a batch, and return its outputs; arguments as of `step`."""
        return super().eval(*args, target=target, losses=losses, return_outputs=return_outputs, **kwargs)

    @property
    def modules(self) -> dict[int, torch.nn.Module]:
        """Modules of this rank by the index of their stage."""
        return {index: stage.submod for index, stage in self._own.items()}

    def sum_gradients(self, shared: Iterable[SharedParameter]) -> None:
        """Add the gradients of parameters that several ranks have, after a step. Call it on all ranks.

        Args:
            shared: The parameters of all ranks, in one order.

        Raises:
            RankFailed: if a rank fails.
        """
        with self._failing("the sum of gradients of shared parameters"):
            for index, parameter in enumerate(shared):
                if self.rank in parameter.ranks:
                    self._sum_gradient(parameter, index + 1)

    # ------------------------------------------------------------------------------------------ step

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run the actions of this rank."""
        args, keywords = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        not_evicted = self._kept(tree_leaves((args, keywords, target_mbs)))
        with self._failing("the exchange of shapes"):
            self._initialize(
                args[0], keywords[0], target_mbs[0] if target_mbs else None, loss_kwargs, not_evicted
            )
        self._step_losses.clear()
        self.backward_counter.clear()
        self._sends.clear()
        self._released = 0
        for action, ended in zip(self.schedule.actions[self.rank], self._ended_sends, strict=True):
            if not self._has_backward and action.kind not in _FORWARD_ONLY:
                continue
            with self._failing(str(action)), record_function(f"PP:{action}"):
                self._take_arrived(action)
                self._release_sent(ended)
                with self.observer(action) if self.observer is not None else nullcontext():
                    if action.kind is K.FORWARD:
                        self._forward(
                            action,
                            args[action.microbatch],
                            keywords[action.microbatch],
                            None if target_mbs is None else target_mbs[action.microbatch],
                            (return_outputs, loss_kwargs, not_evicted),
                        )
                    else:
                        _EXECUTE[action.kind](self, action)
        with self._failing("the end of the step"):
            self._transport.require_sent()
        if self._has_backward and not self._reduces:
            for stage in self._stages:
                stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)
        if losses is not None and self._step_losses:
            losses[:] = [self._step_losses[index] for index in sorted(self._step_losses)]
        self._step_losses.clear()

    def _initialize(
        self, args: Any, kwargs: Any, target: Any, loss_kwargs: Any, not_evicted: frozenset[int]
    ) -> None:
        """Find shapes before the first step, and exchange the sizes of what is evicted."""
        for stage in self._stages:
            stage.prepare_eviction(not_evicted)
        self._initialize_stages(args, kwargs, target, loss_kwargs)
        if self._sizes or not self._has_backward or not self.schedule.acceptors:
            return
        gathered: list[Any] = [None] * self.schedule.ranks
        evicted_bytes = {index: stage.evicted_bytes for index, stage in self._own.items()}
        dist.all_gather_object(gathered, evicted_bytes, group=self._transport.group)
        self._sizes = {index: sizes for rank_sizes in gathered for index, sizes in rank_sizes.items()}
        self._tags = max(1, *map(len, self._sizes.values()))

    def _kept(self, inputs: Iterable[Any]) -> frozenset[int]:
        """Return the storages of parameters, buffers, inputs and targets."""
        states = (tensor for stage in self._stages for tensor in _state(stage.submod))
        return storages_of([*states, *inputs])

    # --------------------------------------------------------------------------------------- passes

    def _take_arrived(self, action: PipelineAction) -> None:
        """Wait for what a pass needs from other ranks."""
        if action.kind.computes:
            stage, microbatch = self._own[action.stage], action.microbatch
            self._wait(action._replace(kind=K.LOAD), lambda got: stage.saved[microbatch].replace(got))
        if action.kind is K.FORWARD:
            self._wait(action._replace(kind=K.RECEIVE_FORWARD), lambda got: stage.set_input(microbatch, got))
        elif action.kind in (K.BACKWARD, K.INPUT_GRADIENT):
            self._wait(
                action._replace(kind=K.RECEIVE_BACKWARD), lambda got: self._take_gradients(action, got)
            )

    def _release_sent(self, count: int) -> None:
        """Wait until the first `count` sends, which must have arrived, have released their messages."""
        if self._has_backward:  # forward passes alone leave out the messages that prove arrival
            for transfer in self._sends[self._released : count]:
                self._transport.require_ended(transfer)
            self._released = count

    def _forward(
        self, action: PipelineAction, args: Any, kwargs: Any, target: Any, step_arguments: Any
    ) -> None:
        stage, microbatch = self._own[action.stage], action.microbatch
        return_outputs, loss_kwargs, not_evicted = step_arguments
        evicts = self._has_backward and action._replace(kind=K.EVICT) in self._evictions
        with stage.recording(microbatch, not_evicted) if evicts else nullcontext():
            output = stage.forward_one_chunk(microbatch, args, kwargs, save_forward_output=return_outputs)
        if stage.is_last and self._loss_fn is not None and target is not None:
            self._step_losses[microbatch] = self._compute_loss(output, target, loss_kwargs)
        if stage.stage_index + 1 in self._own:
            following = self._own[stage.stage_index + 1]
            following.set_input(microbatch, stage.take_outputs(microbatch))

    def _backward(self, action: PipelineAction) -> None:
        stage, microbatch = self._own[action.stage], action.microbatch
        full = action.kind is K.BACKWARD
        self._wait(action._replace(kind=K.RECEIVE_BACKWARD), lambda got: self._take_gradients(action, got))
        stage.backward_one_chunk(
            microbatch,
            loss=self._step_losses.get(microbatch) if stage.is_last else None,
            full_backward=full,
            last_backward=full and self._is_last_backward(action),
        )
        if stage.is_last and microbatch in self._step_losses:
            # Losses of torch on a processor are numbers in storages of as many bytes as the output, which
            # would exist until the end of the step.
            self._step_losses[microbatch] = self._step_losses[microbatch].detach().clone()
        if full:
            stage.saved.pop(microbatch, None)
        if stage.stage_index - 1 in self._own:
            before = self._own[stage.stage_index - 1]
            before.set_output_gradients(microbatch, stage.take_input_gradients(microbatch))

    def _weight_gradient(self, action: PipelineAction) -> None:
        stage, microbatch = self._own[action.stage], action.microbatch
        stage.backward_weight_one_chunk(microbatch, last_backward=self._is_last_backward(action))
        stage.saved.pop(microbatch, None)

    def _reduce_gradients(self, action: PipelineAction) -> None:
        scale = self._n_microbatches if self.scale_grads else 1
        self._own[action.stage].perform_reduce_grad(scale)

    def _is_last_backward(self, action: PipelineAction) -> bool:
        self.backward_counter[action.stage] += 1
        return bool(self.backward_counter[action.stage] == self._n_microbatches)

    def _take_gradients(self, action: PipelineAction, received: list[Tensor]) -> None:
        """Set received gradients of outputs; outputs without a gradient have no message."""
        stage, arrived = self._own[action.stage], iter(received)
        metas = stage._stage_meta.output_grads
        gradients = [None if meta is None else next(arrived) for meta in metas]
        stage.set_output_gradients(action.microbatch, gradients)

    # ------------------------------------------------------------------------------------ transfers

    def _send_forward(self, action: PipelineAction) -> None:
        outputs = self._own[action.stage].take_outputs(action.microbatch)
        self._send(outputs, action, self.schedule.placement[action.stage + 1])

    def _send_backward(self, action: PipelineAction) -> None:
        gradients = self._own[action.stage].take_input_gradients(action.microbatch)
        present = [gradient for gradient in gradients if gradient is not None]
        self._send(present, action, self.schedule.placement[action.stage - 1])

    def _receive_forward(self, action: PipelineAction) -> None:
        buffers = self._own[action.stage].input_buffers()
        sent = PipelineAction(action.stage - 1, K.SEND_FORWARD, action.microbatch)
        self._receive(buffers, action, sent, self.schedule.placement[sent.stage])

    def _receive_backward(self, action: PipelineAction) -> None:
        buffers = [buffer for buffer in self._own[action.stage].gradient_buffers() if buffer is not None]
        sent = PipelineAction(action.stage + 1, K.SEND_BACKWARD, action.microbatch)
        self._receive(buffers, action, sent, self.schedule.placement[sent.stage])

    def _evict(self, action: PipelineAction) -> None:
        stage = self._own[action.stage]
        saved = stage.saved[action.microbatch]
        if saved.nbytes != self._sizes[action.stage]:
            raise InputError(
                f"micro-batch {action.microbatch} of stage {action.stage} saves {len(saved.nbytes)} storages "
                f"of {sum(saved.nbytes)} bytes for the backward pass, and the first one saved "
                f"{len(self._sizes[action.stage])} of {sum(self._sizes[action.stage])}: an eviction needs "
                "the same operations on the same shapes in all micro-batches"
            )
        acceptor = self.schedule.acceptors[self.rank]
        self._pending[action] = self._transport.send(saved.tensors(), acceptor, self._tag(action))
        saved.drop()

    def _accept(self, action: PipelineAction) -> None:
        evictor = self.schedule.placement[action.stage]
        self._receive(self._buffers(action.stage), action, action._replace(kind=K.EVICT), evictor)

    def _return(self, action: PipelineAction) -> None:
        evictor = self.schedule.placement[action.stage]
        self._wait(action._replace(kind=K.ACCEPT), lambda got: self._keep_accepted(action, got))
        accepted = self._accepted.pop((action.stage, action.microbatch))
        self._pending[action] = self._transport.send(accepted, evictor, self._tag(action))

    def _keep_accepted(self, action: PipelineAction, tensors: list[Tensor]) -> None:
        self._accepted[action.stage, action.microbatch] = tensors

    def _load(self, action: PipelineAction) -> None:
        acceptor = self.schedule.acceptors[self.rank]
        self._receive(self._buffers(action.stage), action, action._replace(kind=K.RETURN), acceptor)

    def _release(self, action: PipelineAction) -> None:
        copies = K.EVICT if action.stage in self._own else K.RETURN
        self._wait(action._replace(kind=copies), lambda sent: None)

    def _sum_gradient(self, shared: SharedParameter, tag: int) -> None:
        """Replace a gradient by the sum of those of all ranks that have the parameter, in their order."""
        parameter, transport = shared.parameter, self._transport
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        peers = [rank for rank in shared.ranks if rank != self.rank]
        arriving = {peer: transport.receive([torch.empty_like(own)], peer, tag) for peer in peers}
        sending = [transport.send([own], peer, tag) for peer in peers]
        gradients = {self.rank: own}
        gradients |= {peer: transfer.wait(transport.timeout)[0] for peer, transfer in arriving.items()}
        for transfer in sending:
            transfer.wait(transport.timeout)
        parameter.grad = sum((gradients[rank] for rank in shared.ranks[1:]), gradients[shared.ranks[0]])

    def _buffers(self, stage: int) -> list[Tensor]:
        device = self._transport.device
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in self._sizes[stage]]

    def _send(self, tensors: list[Tensor], action: PipelineAction, peer: int) -> None:
        self._sends.append(self._transport.send(tensors, peer, self._tag(action)))
        self._transport.release_when_sent(self._sends[-1])

    def _receive(
        self, buffers: list[Tensor], action: PipelineAction, sent: PipelineAction, peer: int
    ) -> None:
        self._pending[action] = self._transport.receive(buffers, peer, self._tag(sent))

    def _wait(self, issued: PipelineAction, take: Callable[[list[Tensor]], None]) -> None:
        """Wait for a transfer of this rank, if it was issued, and pass on its messages."""
        transfer = self._pending.pop(issued, None)
        if transfer is not None:
            take(transfer.wait(self._transport.timeout))

    def _tag(self, sent: PipelineAction) -> int:
        """Return the tag of the first message of a transfer."""
        schedule = self.schedule
        number = (_MOVES.index(sent.kind) * schedule.stages + sent.stage) * schedule.microbatches
        return 1 + (number + sent.microbatch) * max(self._tags, _FEW)

    # --------------------------------------------------------------------------------------- errors

    @contextmanager
    def _failing(self, where: str) -> Iterator[None]:
        """Report an error to all ranks, and break the connections so that they end."""
        if self._ended is not None:
            raise RankFailed(f"this pipeline has ended: {self._ended}; start the processes again")
        try:
            with failing_together(self._transport, self._report, where):
                yield
        except RankFailed as error:
            self._ended = str(error)
            raise

    def _check_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> None:
        """Raise InputError if inputs or targets are missing or cannot be split."""
        if self._ended is not None:
            raise RankFailed(f"this pipeline has ended: {self._ended}; start the processes again")
        require_equal_microbatches((args, kwargs, target), self._n_microbatches)
        first, last = 0 in self._own, self.schedule.stages - 1 in self._own
        if args and not first:
            raise InputError(f"rank {self.rank} has no first stage: give inputs to the rank that has it")
        if first and not (args or kwargs):
            raise InputError(f"rank {self.rank} has the first stage: step needs the inputs of the batch")
        if last and self._has_backward and target is None:
            raise InputError(f"rank {self.rank} has the last stage: step needs target")


_FEW = 16
"""Tags of each transfer, unless an eviction has more messages."""

_EXECUTE: dict[ActionKind, Callable[[Any, PipelineAction], None]] = {
    K.BACKWARD: PipelineRun._backward,
    K.INPUT_GRADIENT: PipelineRun._backward,
    K.WEIGHT_GRADIENT: PipelineRun._weight_gradient,
    K.SEND_FORWARD: PipelineRun._send_forward,
    K.SEND_BACKWARD: PipelineRun._send_backward,
    K.RECEIVE_FORWARD: PipelineRun._receive_forward,
    K.RECEIVE_BACKWARD: PipelineRun._receive_backward,
    K.EVICT: PipelineRun._evict,
    K.ACCEPT: PipelineRun._accept,
    K.RETURN: PipelineRun._return,
    K.LOAD: PipelineRun._load,
    K.RELEASE: PipelineRun._release,
    K.REDUCE_GRADIENTS: PipelineRun._reduce_gradients,
    K.UNSHARD: lambda run, action: None,
    K.RESHARD: lambda run, action: None,
}
"""Execution of each kind of action; parameters of stages are not sharded, so that nothing is gathered."""


def _state(module: torch.nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
