"""All pipeline schedules by name: one record for each, which everything else reads.

Options, help texts, the space of cluster plans, formulas of memory, and configurations of training frameworks
follow from these records. To add a schedule, add a `NamedSchedule` to `SCHEDULES`; its factory may stand in
this file or beside the others (`generators`, `zero_bubble`).

`in_flight` is a formula of the number of ranks, the rank, its number of stages, and the number of
micro-batches, or of arrays of them. It counts the pairs of a micro-batch and a stage whose activations the
rank stores: from the forward pass to the end of the backward pass or, if that is split, to the end of the
gradient of the weights. The contract test compares each formula with the simulated schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tunebench._lazy import LazyModule, np
from tunebench.errors import InputError, UnknownName
from tunebench.training.schedules.generators import gpipe, interleaved_1f1b, looped_bfs, one_f_one_b
from tunebench.training.schedules.schedule import PipelineSchedule, looped_placement, v_placement

if TYPE_CHECKING:
    from tunebench.training.schedules import zero_bubble
    from tunebench.training.schedules.costs import PipelineCosts
else:
    # It needs Numba, which help texts and completion must not import.
    zero_bubble = LazyModule("tunebench.training.schedules.zero_bubble")

__all__ = [
    "DEFAULT_CHUNKS",
    "PLANNED_SCHEDULES",
    "SCHEDULES",
    "SPLIT_SCHEDULES",
    "V_SCHEDULES",
    "Layout",
    "NamedSchedule",
    "find_schedule",
    "first_stage_in_flight",
    "named_schedules",
    "planned_schedule",
    "stages_in_flight",
]

Factory: TypeAlias = "Callable[[int, int, int, PipelineCosts | None], PipelineSchedule]"
"""Makes a schedule from the numbers of ranks, of micro-batches and of stages of each rank, and the costs of
stages."""

Layout = Literal["single", "looped", "v"]
"""Stages of a rank: one; any number, which go around the ranks (`looped_placement`); or two, which go to the
last rank and back to the first one (`v_placement`)."""

DEFAULT_CHUNKS = 2
"""Stages of each rank of a looped schedule, if no number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchedule:
    """What is known of a schedule for any number of ranks and micro-batches.

    Attributes:
        name: Name in options and results.
        factory: Makes the schedule. See `make`.
        in_flight: Largest number of pairs of a micro-batch and a stage whose activations a rank stores, as a
            formula of ranks, rank, stages of each rank and micro-batches. `stages_in_flight` limits it to all
            pairs of the rank.
        layout: Stages of a rank.
        splits_backward: Whether gradients of weights are computed apart from those of inputs.
        depends_on_costs: Whether the order of actions depends on the costs of stages.
        first_stage: Upper limit of the micro-batches in flight on the first stage, as a formula of ranks and
            stages of each rank; None if it is all micro-batches.
        planned: Whether `plan cluster` considers it.
        interleaved: Schedule that a plan with several stages on each rank has in place of this one.
        megatron: Function of Megatron-LM that runs it (`megatron/core/pipeline_parallel/schedules.py`); None
            if there is none.
        torch: Name for `torch.distributed.pipelining.schedules.get_schedule_class`, which torchtitan reads.
        deepspeed: Class of DeepSpeed (`deepspeed/runtime/pipe/schedule.py`).
    """

    name: str
    factory: Factory
    in_flight: Callable[[Any, Any, Any, Any], Any]
    layout: Layout = "single"
    splits_backward: bool = False
    depends_on_costs: bool = False
    first_stage: Callable[[Any, Any], Any] | None = None
    planned: bool = True
    interleaved: str | None = None
    megatron: str | None = None
    torch: str | None = None
    deepspeed: str | None = None

    @property
    def v_shaped(self) -> bool:
        """Whether each rank has two stages, which go to the last rank and back."""
        return self.layout == "v"

    def stages_per_rank(self, chunks: int | None = None) -> int:
        """Return the stages of each rank.

        Args:
            chunks: Stages of each rank of a looped schedule, `DEFAULT_CHUNKS` for None; others ignore it.
        """
        if self.layout == "looped":
            return DEFAULT_CHUNKS if chunks is None else chunks
        return 2 if self.v_shaped else 1

    def placement(self, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
        """Return the rank of each stage.

        Args:
            ranks: Number of ranks.
            chunks: As in `stages_per_rank`.
        """
        return v_placement(ranks) if self.v_shaped else looped_placement(ranks, self.stages_per_rank(chunks))

    def make(
        self, ranks: int, microbatches: int, chunks: int | None = None, costs: PipelineCosts | None = None
    ) -> PipelineSchedule:
        """Return the schedule.

        Args:
            ranks: Number of ranks.
            microbatches: Number of micro-batches.
            chunks: As in `stages_per_rank`.
            costs: Costs of the stages, for schedules that depend on them; equal ones for None.

        Raises:
            InputError: if a number is below 1.
        """
        return self.factory(ranks, microbatches, self.stages_per_rank(chunks), costs)

    def stages_in_flight(self, ranks: Any, rank: Any, chunks: Any, microbatches: Any) -> Any:
        """Return the largest number of pairs of a micro-batch and a stage whose activations a rank stores.

        Args:
            ranks: Number of ranks, or an array; so are the others.
            rank: The rank.
            chunks: Stages of each rank.
            microbatches: Number of micro-batches.
        """
        # A rank stores at most every micro-batch on each of its stages.
        return np.minimum(microbatches * chunks, self.in_flight(ranks, rank, chunks, microbatches))


def _registry(*schedules: NamedSchedule) -> Mapping[str, NamedSchedule]:
    by_name = {schedule.name: schedule for schedule in schedules}
    if len(by_name) < len(schedules):
        raise InputError(f"two schedules have one name: {[schedule.name for schedule in schedules]}")
    return MappingProxyType(by_name)


def _one_round(ranks: Any, chunks: Any) -> Any:
    return ranks


def _two_rounds(ranks: Any, chunks: Any) -> Any:
    return 2 * ranks


def _rounds_of_looped(ranks: Any, chunks: Any) -> Any:
    return np.where(chunks > 1, 2, 1) * ranks


SCHEDULES: Mapping[str, NamedSchedule] = _registry(
    NamedSchedule(
        name="gpipe",
        factory=lambda ranks, microbatches, chunks, costs: gpipe(ranks, microbatches),
        in_flight=lambda ranks, rank, chunks, microbatches: microbatches,
        planned=False,
        torch="GPipe",
    ),
    NamedSchedule(
        name="1f1b",
        factory=lambda ranks, microbatches, chunks, costs: one_f_one_b(ranks, microbatches),
        in_flight=lambda ranks, rank, chunks, microbatches: ranks - rank,
        first_stage=_one_round,
        interleaved="interleaved-1f1b",
        megatron="forward_backward_pipelining_without_interleaving",
        torch="1F1B",
        deepspeed="TrainSchedule",
    ),
    NamedSchedule(
        name="interleaved-1f1b",
        factory=lambda ranks, microbatches, chunks, costs: interleaved_1f1b(ranks, microbatches, chunks),
        in_flight=lambda ranks, rank, chunks, microbatches: np.where(
            chunks > 1, (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1, ranks - rank
        ),
        layout="looped",
        first_stage=_rounds_of_looped,
        planned=False,  # a plan has it as 1f1b with several chunks
        megatron="forward_backward_pipelining_with_interleaving",
        torch="Interleaved1F1B",
    ),
    NamedSchedule(
        name="looped-bfs",
        factory=lambda ranks, microbatches, chunks, costs: looped_bfs(ranks, microbatches, chunks),
        in_flight=lambda ranks, rank, chunks, microbatches: chunks * microbatches,
        layout="looped",
        planned=False,
        torch="LoopedBFS",
    ),
    NamedSchedule(
        name="zb-h1",
        factory=lambda ranks, microbatches, chunks, costs: zero_bubble.zb_h1(
            ranks, microbatches, costs=costs
        ),
        in_flight=lambda ranks, rank, chunks, microbatches: ranks,
        first_stage=_one_round,
        splits_backward=True,
        depends_on_costs=True,
    ),
    NamedSchedule(
        name="zb-h2",
        factory=lambda ranks, microbatches, chunks, costs: zero_bubble.zb_h2(
            ranks, microbatches, costs=costs
        ),
        in_flight=lambda ranks, rank, chunks, microbatches: 2 * ranks - 1,
        splits_backward=True,
        depends_on_costs=True,
        first_stage=_two_rounds,
    ),
    NamedSchedule(
        name="interleaved-zb",
        factory=lambda ranks, microbatches, chunks, costs: zero_bubble.interleaved_zero_bubble(
            ranks, microbatches, chunks, costs=costs
        ),
        in_flight=lambda ranks, rank, chunks, microbatches: chunks * ranks,
        layout="looped",
        splits_backward=True,
        depends_on_costs=True,
        first_stage=_rounds_of_looped,
        torch="InterleavedZeroBubble",
    ),
    NamedSchedule(
        name="zbv",
        factory=lambda ranks, microbatches, chunks, costs: zero_bubble.zbv(ranks, microbatches),
        in_flight=lambda ranks, rank, chunks, microbatches: 2 * ranks,
        layout="v",
        splits_backward=True,
        first_stage=_two_rounds,
        torch="ZBVZeroBubble",
    ),
    NamedSchedule(
        name="v-half",
        factory=lambda ranks, microbatches, chunks, costs: zero_bubble.v_half(ranks, microbatches),
        in_flight=lambda ranks, rank, chunks, microbatches: 2 * ((ranks + 2) // 2),
        layout="v",
        splits_backward=True,
        first_stage=_two_rounds,
    ),
    NamedSchedule(
        name="v-min",
        factory=lambda ranks, microbatches, chunks, costs: zero_bubble.v_min(ranks, microbatches),
        in_flight=lambda ranks, rank, chunks, microbatches: 2 * ((ranks + 4) // 3),
        layout="v",
        splits_backward=True,
        first_stage=_two_rounds,
    ),
    NamedSchedule(
        name="dualpipe-v",
        factory=lambda ranks, microbatches, chunks, costs: zero_bubble.dualpipe_v(ranks, microbatches),
        in_flight=lambda ranks, rank, chunks, microbatches: 2 * ranks + 1,
        layout="v",
        splits_backward=True,
        first_stage=_two_rounds,
        planned=False,
        torch="DualPipeV",
    ),
)
"""All schedules by name. Sources of the schedules: `generators` and `zero_bubble`."""

PLANNED_SCHEDULES = tuple(name for name, schedule in SCHEDULES.items() if schedule.planned)
"""Names of the schedules of cluster plans."""

SPLIT_SCHEDULES = tuple(name for name in PLANNED_SCHEDULES if SCHEDULES[name].splits_backward)
"""Schedules of cluster plans that compute the gradients of weights apart from those of inputs."""

V_SCHEDULES = tuple(name for name in PLANNED_SCHEDULES if SCHEDULES[name].v_shaped)
"""Schedules of cluster plans with two stages on each device, the last stage beside the first one."""


def find_schedule(name: str) -> NamedSchedule:
    """Return the schedule with a name.

    Raises:
        UnknownName: if there is none.
    """
    if name not in SCHEDULES:
        raise UnknownName("schedule", name, SCHEDULES)
    return SCHEDULES[name]


def named_schedules() -> Mapping[str, Callable[[int, int], PipelineSchedule]]:
    """Return the schedules by name, each made from the numbers of ranks and micro-batches.

    Schedules with several stages on each rank have two.
    """
    return {name: schedule.make for name, schedule in SCHEDULES.items()}


def planned_schedule(name: str, chunks: int) -> NamedSchedule:
    """Return the schedule of a cluster plan.

    Args:
        name: Name of the schedule in the plan.
        chunks: Stages of each rank in the plan.

    Raises:
        UnknownName: if plans have no schedule with this name.
    """
    if name not in PLANNED_SCHEDULES:
        raise UnknownName("schedule of a plan", name, PLANNED_SCHEDULES)
    schedule = SCHEDULES[name]
    return SCHEDULES[schedule.interleaved] if chunks > 1 and schedule.interleaved else schedule


def stages_in_flight(names: Any, ranks: Any, rank: Any, chunks: Any, microbatches: Any) -> Any:
    """Return the largest number of pairs of a micro-batch and a stage that a rank stores, for many plans.

    Args:
        names: Schedules of the plans, as a column; a text for one plan. The others are alike.
        ranks: Number of ranks.
        rank: The rank.
        chunks: Stages of each rank in the plan, 1 for V-shaped schedules.
        microbatches: Number of micro-batches.
    """
    in_flight: Any = 0
    for has_schedule, schedule in _schedules_of(names, chunks):
        stages = schedule.stages_per_rank() if schedule.v_shaped else chunks
        in_flight = np.where(
            has_schedule, schedule.stages_in_flight(ranks, rank, stages, microbatches), in_flight
        )
    return in_flight


def first_stage_in_flight(names: Any, ranks: Any, chunks: Any, microbatches: Any) -> Any:
    """Return an upper limit of the micro-batches in flight on the first stage of each of many plans.

    Args:
        names: Schedules of the plans, as in `stages_in_flight`. The others are alike.
        ranks: Number of ranks.
        chunks: Stages of each rank in the plan.
        microbatches: Number of micro-batches.
    """
    in_flight: Any = 0
    for has_schedule, schedule in _schedules_of(names, chunks):
        limit = schedule.first_stage(ranks, chunks) if schedule.first_stage else microbatches
        in_flight = np.where(has_schedule, np.minimum(microbatches, limit), in_flight)
    return in_flight


def _schedules_of(names: Any, chunks: Any) -> Iterator[tuple[Any, NamedSchedule]]:
    """Yield which of many plans have a schedule, and the schedule; a later one takes precedence."""
    if isinstance(names, str):
        yield True, planned_schedule(names, chunks)
        return
    for name in PLANNED_SCHEDULES:
        schedule = SCHEDULES[name]
        yield names == name, schedule
        if schedule.interleaved:
            # After the schedule itself, so that it takes precedence where a plan has several chunks.
            yield (names == name) & (chunks > 1), SCHEDULES[schedule.interleaved]
