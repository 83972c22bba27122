"""Actions of a pipeline schedule, and their text.

An action of a rank names its kind, the stage and the micro-batch: ``2F0`` is the forward pass of micro-batch
0 on stage 2. A stage is a part of the model (a chunk); a rank runs one stage or several. The text of the
kinds that ``torch.distributed.pipelining`` knows is the text that it reads.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from tunebench.errors import InputError

__all__ = ["ActionKind", "PipelineAction"]


class ActionKind(StrEnum):
    """What a rank does."""

    FORWARD = "F"
    """Forward pass of a stage."""
    BACKWARD = "B"
    """Gradients of the input and of the weights."""
    INPUT_GRADIENT = "I"
    """Gradient of the input alone."""
    WEIGHT_GRADIENT = "W"
    """Gradient of the weights alone, after that of the input."""
    SEND_FORWARD = "SEND_F"
    """Start to send the output of a stage to the next stage."""
    RECEIVE_FORWARD = "RECV_F"
    """Start to receive the input of a stage from the stage before."""
    SEND_BACKWARD = "SEND_B"
    """Start to send the gradient of a stage's input to the stage before."""
    RECEIVE_BACKWARD = "RECV_B"
    """Start to receive the gradient of a stage's output from the next stage."""
    EVICT = "EVICT"
    """Start to copy the activations of a micro-batch to the acceptor."""
    ACCEPT = "ACCEPT"
    """Start to receive the activations that another rank evicts. The stage is that of the evictor."""
    RETURN = "RETURN"
    """Start to copy accepted activations back. The stage is that of the evictor."""
    LOAD = "LOAD"
    """Start to receive evicted activations back."""
    RELEASE = "RELEASE"
    """Wait until the copy that EVICT or RETURN of this rank started has ended, and free its source."""
    UNSHARD = "UNSHARD"
    """Start the all-gather of the parameters of a sharded stage. It has no micro-batch."""
    RESHARD = "RESHARD"
    """Free the gathered parameters of a stage. It has no micro-batch."""
    REDUCE_GRADIENTS = "REDUCE_GRAD"
    """Start the reduction of the gradients of a stage over its copies. It has no micro-batch."""

    @property
    def computes(self) -> bool:
        """Whether the action occupies the rank's compute stream."""
        return self in _COMPUTES


_COMPUTES = frozenset(
    (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
)
_OF_STAGE = frozenset((ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRADIENTS))
_TEXT = re.compile(rf"(\d+)({'|'.join(sorted(ActionKind, key=len, reverse=True))})(\d*)")


class PipelineAction(NamedTuple):
    """One action of a rank.

    Attributes:
        stage: Index of the stage.
        kind: What is done.
        microbatch: Index of the micro-batch; -1 for actions on a whole stage.
    """

    stage: int
    kind: ActionKind
    microbatch: int = -1

    @classmethod
    def parse(cls, text: str) -> PipelineAction:
        """Return the action that a text such as ``2F0`` or ``1SEND_B3`` names.

        Raises:
            InputError: if the text is none.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None or (not match[3]) != (ActionKind(match[2]) in _OF_STAGE):
            raise InputError(
                f"{text!r} is not an action: expected STAGE, KIND and MICROBATCH, such as 2F0, with one of "
                f"the kinds {', '.join(ActionKind)} ({', '.join(sorted(_OF_STAGE))} without a micro-batch)"
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3] or -1))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch < 0 else self.microbatch}"
