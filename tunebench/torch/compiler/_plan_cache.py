"""Plans of graphs, remembered between processes beside the graphs that torch's caches keep compiled.

A plan is valid as long as the stored answers of all workloads that it considered are the same: a result of
another workload does not void it. The key of a graph has everything else that decides its plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from tunebench._environment import cache_folder
from tunebench._private_file import create_folder, forget_unused, read_private, write_private
from tunebench.answer import answers_state, records_state
from tunebench.device import Device
from tunebench.dispatch import KernelChoice, dispatcher, is_deterministic
from tunebench.dispatch.choice import BoundChoice
from tunebench.errors import TunebenchError
from tunebench.torch.compiler.graph_key import graph_key
from tunebench.workloads import parse

if TYPE_CHECKING:
    from tunebench.graph.partition_plan import PartitionPlan

__all__ = ["PlanKey", "PlannedGroup", "RememberedPlan", "RememberedRace"]

_FOLDER = "plans"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group that was planned for tuned kernels.

    Attributes:
        workloads: Canonical texts of its workloads.
        reason: Why torch runs it; empty if kernels do.
        inlined: Texts of the workloads whose library the compiled graph calls by itself.
    """

    workloads: tuple[str, ...]
    reason: str = ""
    inlined: tuple[str, ...] = ()

    def notify_watchers(self, device: Device, ordinal: int) -> None:
        """Report to watchers that torch runs the group, or that the compiled graph has called libraries."""
        for text in self.inlined:
            chosen = dispatcher(parse(text), device, ordinal)
            chosen.notify(chosen.bound_choice("tunebench"))
        for text in self.workloads if self.reason else ():
            workload = parse(text)
            choice = KernelChoice(workload=workload, reason=self.reason)
            dispatcher(workload, device, ordinal).notify(BoundChoice(0, choice, None))

    def left_to_torch(self, reason: str) -> PlannedGroup:
        """Return the group as run by torch for a reason."""
        return PlannedGroup(workloads=self.workloads, reason=self.reason or reason)

    def has_kernels(self, device: Device, ordinal: int) -> bool:
        """Return whether kernels run all workloads of the group, and load them."""
        choices = (dispatcher(parse(text), device, ordinal) for text in self.workloads)
        return all(chosen.bound_choice("tunebench").kernel is not None for chosen in choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedRace:
    """The race of a planned graph against torch, or what it needs.

    Attributes:
        seconds: Seconds in which the graph was compiled without caches.
        mutated: Places of inputs that the graph changes; None if it cannot be repeated.
        ratio: Torch's time divided by that of tuned kernels; None if they have not raced.
    """

    seconds: float
    mutated: tuple[int, ...] | None
    ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedPlan:
    """A plan that an earlier process made.

    Attributes:
        compiled_as: Name of the plan in the keys of torch's caches.
        groups: Its groups that were planned for tuned kernels; torch compiles a graph without any.
        path: File of the plans themselves.
        race: What a race of the graph against torch needs.
    """

    compiled_as: str
    groups: tuple[PlannedGroup, ...]
    path: Path
    race: RememberedRace

    @property
    def is_left_to_torch(self) -> bool:
        """Whether no group runs by a kernel."""
        return all(group.reason for group in self.groups)

    @property
    def reason(self) -> str:
        """Why torch runs the graph, if it does."""
        reason = self.groups[0].reason if self.groups else "no group ran by a tuned kernel"
        return f"{reason} when it was planned, and nothing was recorded since"

    def has_kernels(self, device: Device, ordinal: int) -> bool:
        """Return whether kernels run all groups that were left to them, and load these kernels."""
        return all(group.reason or group.has_kernels(device, ordinal) for group in self.groups)

    def partitions(self) -> list[PartitionPlan]:
        """Return the plans; none if their file cannot be read."""
        try:
            # A file that only this user may write, like the machine code in the cache folder.
            plans: list[PartitionPlan] = pickle.loads(read_private(self.path))  # noqa: S301
        except (OSError, AttributeError, ImportError, EOFError, pickle.UnpicklingError):
            return []
        return plans


def _race_of(stored: Mapping[str, Any]) -> RememberedRace:
    mutated = stored["mutated"]
    return RememberedRace(
        seconds=float(stored["seconds"]),
        mutated=None if mutated is None else tuple(mutated),
        ratio=stored["ratio"],
    )


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Key of a graph among remembered plans.

    Attributes:
        text: Hash of everything but records that decides the plan.
        device: Device of the graph.
    """

    text: str
    device: Device

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Sequence[Any], device: Device, mode: str = "") -> PlanKey:
        """Return the key of a graph.

        Args:
            module: The graph that Dynamo traced.
            inputs: Its inputs.
            device: Their device.
            mode: Options that decide how it is compiled.
        """
        return cls(graph_key(module, inputs, device, mode), device)

    def records(self) -> str:
        """Return a hash of all records that plans may read; empty if they cannot be read now."""
        try:
            return hashlib.sha256(records_state(self.device).encode()).hexdigest()
        except TunebenchError:
            return ""

    def plan_name(self, records: str) -> str:
        """Return a name of the plan that the graph has with some records, for the keys of torch's caches."""
        return hashlib.sha256(f"{self.text} {records}".encode()).hexdigest()

    def find(self) -> RememberedPlan | None:
        """Return the plan of the graph, if there is one and it is valid."""
        try:
            path = self._path
            stored = json.loads(read_private(path))
            if not self._is_valid(stored, path):
                return None
            with contextlib.suppress(OSError):  # a folder that cannot be written
                path.touch()
                path.with_suffix(".pickle").touch(exist_ok=True)
            groups = tuple(
                PlannedGroup(
                    workloads=tuple(group["workloads"]),
                    reason=group["reason"],
                    inlined=tuple(group["inlined"]),
                )
                for group in stored["groups"]
            )
            return RememberedPlan(
                compiled_as=stored["compiled_as"],
                groups=groups,
                path=path.with_suffix(".pickle"),
                race=_race_of(stored["race"]),
            )
        except (OSError, TunebenchError, ValueError, KeyError, TypeError):
            return None

    def remember_race(self, compiled_as: str, ratio: float, groups: Sequence[PlannedGroup]) -> None:
        """Remember the result of a race, if the graph still has the plan that raced.

        Args:
            compiled_as: Name of the plan.
            ratio: Torch's time divided by that of tuned kernels.
            groups: The groups after the race.
        """
        with contextlib.suppress(OSError, TunebenchError, ValueError, KeyError, TypeError):
            stored = json.loads(read_private(self._path))
            if stored["compiled_as"] == compiled_as:
                stored["race"]["ratio"] = ratio
                stored["groups"] = [dataclasses.asdict(group) for group in groups]
                write_private(self._path, json.dumps(stored).encode())

    @property
    def _path(self) -> Path:
        return cache_folder() / _FOLDER / f"{self.text}.json"

    def _is_valid(self, stored: dict[str, Any], path: Path) -> bool:
        records = self.records()
        if records and stored["records"] == records:
            return True
        if not records or self._answers(stored["asked"]) != stored["answers"]:
            return False
        with contextlib.suppress(OSError):  # a folder that cannot be written: the next process asks again
            write_private(path, json.dumps({**stored, "records": records}).encode())
        return True

    def _answers(self, asked: Sequence[str]) -> str:
        """Return a hash of the stored answers of workloads; deterministic algorithms exclude some."""
        return answers_state(asked, self.device, reproducible=is_deterministic())

    def remember(
        self,
        records: str,
        compiled_as: str,
        groups: Sequence[PlannedGroup],
        partitions: Sequence[PartitionPlan],
        race: RememberedRace,
    ) -> None:
        """Remember a plan; a folder that cannot be written is ignored.

        Args:
            records: What `records` returned before the graph was planned; the plan is not remembered if
                records have changed since.
            compiled_as: Name of the plan in the keys of torch's caches.
            groups: Groups that were planned for tuned kernels.
            partitions: The plans.
            race: What a race of the graph needs.
        """
        if not records or self.records() != records:
            return
        with contextlib.suppress(OSError, TunebenchError):
            asked = sorted(frozenset[str]().union(*(partition.asked for partition in partitions)))
            stored: Mapping[str, Any] = {
                "records": records,
                "asked": asked,
                "answers": self._answers(asked),
                "compiled_as": compiled_as,
                "groups": [dataclasses.asdict(group) for group in groups],
                "race": dataclasses.asdict(race),
            }
            folder = create_folder(cache_folder(), _FOLDER)
            write_private(folder / f"{self.text}.pickle", pickle.dumps(list(partitions)))
            write_private(folder / f"{self.text}.json", json.dumps(stored).encode())
            forget_unused(folder)
