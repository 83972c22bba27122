"""Schedules of a pipeline: what each rank does, in order.

A schedule lists passes (F, B, I, W) and, with balanced memory, EVICT and LOAD. Such a schedule leaves
transfers implicit: a result is sent as soon as it exists, and the receiver is ready for it. `with_transfers`
makes a schedule with every transfer explicit on both sides, which a runtime can execute in order.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tunebench._foreign_file import read_text
from tunebench._lazy import np
from tunebench.errors import InputError
from tunebench.training.schedules.action import ActionKind, PipelineAction

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PipelineSchedule", "looped_placement", "read_schedule", "v_placement", "write_schedule"]


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """Actions of every rank.

    Attributes:
        name: Name of the schedule, such as ``1f1b``.
        microbatches: Number of micro-batches of a step.
        placement: Rank of each stage.
        actions: Actions of each rank in the order in which its host issues them.
        acceptors: Rank that accepts the activations which each rank evicts; empty if none evicts.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[PipelineAction, ...], ...]
    acceptors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.microbatches < 1 or not self.placement:
            raise InputError(
                f"schedule {self.name}: expected at least one micro-batch and one stage, got "
                f"{self.microbatches} and {len(self.placement)}"
            )
        if set(self.placement) != set(range(len(self.actions))):
            raise InputError(
                f"schedule {self.name}: every one of the {len(self.actions)} ranks needs a stage, got the "
                f"ranks {self.placement} of the stages"
            )
        if len(self.acceptors) not in (0, self.ranks):
            raise InputError(
                f"schedule {self.name}: expected an acceptor for each of the {self.ranks} ranks, got "
                f"{len(self.acceptors)}"
            )
        owned: list[set[int]] = [set() for _ in self.actions]
        for stage, rank in enumerate(self.placement):
            owned[rank].add(stage)
        for rank, actions in enumerate(self.actions):
            # Schedules have up to millions of actions: look at each of them only where one may be wrong.
            of_rank = {stage for stage, _, _ in actions} <= owned[rank]
            last_microbatch = max((microbatch for _, _, microbatch in actions), default=0)
            if of_rank and last_microbatch < self.microbatches and (self.acceptors or not self._evicts(rank)):
                continue
            for action in actions:
                self._check(rank, action)

    def _evicts(self, rank: int) -> bool:
        kinds = {kind for _, kind, _ in self.actions[rank]}
        return ActionKind.EVICT in kinds or ActionKind.LOAD in kinds

    def _check(self, rank: int, action: PipelineAction) -> None:
        """Raise InputError if an action is on a stage or micro-batch that its rank does not have."""
        if not 0 <= action.stage < self.stages or action.microbatch >= self.microbatches:
            raise InputError(
                f"schedule {self.name}: rank {rank} has {action}, but there are {self.stages} stages and "
                f"{self.microbatches} micro-batches"
            )
        owner = self.placement[action.stage]
        accepts = action.kind in (ActionKind.ACCEPT, ActionKind.RETURN, ActionKind.RELEASE)
        if owner != rank and not (accepts and self.acceptors and self.acceptors[owner] == rank):
            raise InputError(
                f"schedule {self.name}: rank {rank} has {action}, but stage {action.stage} is on rank {owner}"
            )
        if action.kind in (ActionKind.EVICT, ActionKind.LOAD) and not self.acceptors:
            raise InputError(f"schedule {self.name}: {action} needs acceptors")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @cached_property
    def explicit(self) -> bool:
        """Whether the schedule lists transfers on both sides."""
        kinds = {action.kind for actions in self.actions for action in actions}
        both_sides = {ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD, ActionKind.ACCEPT}
        return bool(kinds & both_sides)

    @cached_property
    def trains(self) -> bool:
        """Whether there are backward passes."""
        return any(
            action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
            for actions in self.actions
            for action in actions
        )

    @cached_property
    def encoded(self) -> tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.int64]]:
        """First action of each rank (and the number of all), and code of the kind and slot of each action."""
        code = {kind: index for index, kind in enumerate(ActionKind)}
        first = np.cumsum([0, *map(len, self.actions)])
        all_actions = [action for actions in self.actions for action in actions]
        kinds = np.array([code[kind] for _, kind, _ in all_actions], dtype=np.int8)
        # Actions on a whole stage have no micro-batch; their slot only names the stage.
        slots = [stage * self.microbatches + max(microbatch, 0) for stage, _, microbatch in all_actions]
        return first, kinds, np.array(slots, dtype=np.int64)

    def __len__(self) -> int:
        return sum(map(len, self.actions))


def looped_placement(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage if stages go around the ranks `chunks` times."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int) -> tuple[int, ...]:
    """Return the rank of each of ``2 * ranks`` stages if they go to the last rank and back (V-shaped)."""
    return (*range(ranks), *reversed(range(ranks)))


LARGEST_BYTES = 64 << 20
"""Largest size of a file with a schedule."""


def write_schedule(schedule: PipelineSchedule, path: str | Path) -> None:
    """Write one line of comma-separated actions per rank, as ``torch.distributed.pipelining`` reads them.

    Raises:
        InputError: if the file cannot be written.
    """
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([str(action) for action in actions] for actions in schedule.actions)
    except OSError as error:
        raise InputError(f"cannot write the schedule to {path}: {error.strerror or error}") from None


def read_schedule(path: str | Path, *, acceptors: Sequence[int] = ()) -> PipelineSchedule:
    """Read a schedule that `write_schedule` or torch wrote.

    Args:
        path: The file.
        acceptors: Acceptor of each rank, if the schedule evicts.

    Raises:
        InputError: if the file cannot be read or a text in it is not an action.
    """
    text = read_text(path, "schedule ", LARGEST_BYTES)
    try:
        rows = [[cell for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text, newline=""))]
    except csv.Error as error:
        raise InputError(f"cannot read the schedule {path}: {error}") from None
    return schedule_of(
        Path(path).stem, [map(PipelineAction.parse, row) for row in rows if row], acceptors=tuple(acceptors)
    )


def schedule_of(
    name: str, actions: Iterable[Iterable[PipelineAction]], *, acceptors: tuple[int, ...] = ()
) -> PipelineSchedule:
    """Return the schedule of some actions; stages belong to the rank that runs their forward passes.

    Raises:
        InputError: if a stage has no forward pass, or has them on several ranks.
    """
    actions_by_rank = tuple(tuple(rank_actions) for rank_actions in actions)
    owners: dict[int, int] = {}
    microbatches = 0
    for rank, rank_actions in enumerate(actions_by_rank):
        for action in rank_actions:
            microbatches = max(microbatches, action.microbatch + 1)
            if action.kind is ActionKind.FORWARD and owners.setdefault(action.stage, rank) != rank:
                raise InputError(
                    f"schedule {name}: stage {action.stage} runs on ranks {owners[action.stage]} and {rank}"
                )
    missing = sorted(set(range(max(owners, default=0) + 1)) - owners.keys())
    if missing:
        raise InputError(f"schedule {name}: no rank has a forward pass of stage {missing[0]}")
    return PipelineSchedule(
        name=name,
        microbatches=microbatches,
        placement=tuple(owners[stage] for stage in sorted(owners)),
        actions=actions_by_rank,
        acceptors=acceptors,
    )
