"""One question: which answers there may be, where they stand, and which is served."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tunebench import device as devices
from tunebench.answer._answer import Answer, How
from tunebench.answer._reader import AnswerReader, AnswerRow
from tunebench.answer._target import lookup_target
from tunebench.answer._validity import reason_invalid
from tunebench.db import bundled, lookup_index
from tunebench.db.location import Location, locate
from tunebench.device import Device
from tunebench.errors import InputError, LookupMiss
from tunebench.workloads import parse

__all__ = ["LookupQuery"]


class LookupQuery:
    """What is asked, and where answers may stand; asking again asks anew.

    Args:
        text: Canonical text of the problem.
        device: As for `lookup`.
        db: As for `lookup`.
        variant: Key of the only variant to consider.
        view_of: Returns what reads a file.
    """

    def __init__(
        self,
        text: str,
        device: Device | str | None,
        db: str | Path | None,
        variant: str | None,
        view_of: Callable[[Path, Location], AnswerReader],
    ) -> None:
        self.text, self.variant = text, variant
        self.location = locate(db)
        self.target = lookup_target(device)
        self._given, self._db, self._view_of = device, db, view_of
        self._refused: dict[str, str] = {}

    @functools.cached_property
    def views(self) -> list[AnswerReader]:
        """The user's database, and beneath it the records of this architecture that come with the package."""
        path = self.location.path if self.location.path is not None else lookup_index.refresh(self.location)
        return [self._view_of(path, self.location), *self._bundled(self.target.architecture)]

    def _bundled(self, architecture: str | None) -> list[AnswerReader]:
        return [self._view_of(path, Location(path=path)) for path in bundled.indexes(architecture)]

    @functools.cached_property
    def device(self) -> Device:
        """The description of the device; of one that is known by its key alone, that of its architecture.

        Raises:
            UnknownName: if that is not described either.
        """
        if isinstance(self._given, Device):
            return self._given
        for view in self.views:
            fields = view.descriptor(self.target.key)
            if fields is not None:
                return Device(**fields)
        if self._given != self.target.key:
            return devices.find(self._given)
        like = devices.representative(self.target.architecture)
        return dataclasses.replace(like, name=self.target.product, sm_count=self.target.sm_count)

    def answer(self, *, strict: bool) -> Answer:
        """Return the best answer there is (see `tunebench.answer`).

        Raises:
            LookupMiss: if there is none.
        """
        with self._held():
            found = self._exact()
            if found is None and not strict:
                found = self._inferred()
        if found is None:
            raise LookupMiss(self._miss(strict=strict))
        return found

    def recorded(self) -> Answer | None:
        """Return what was recorded for this very problem, a prediction at worst."""
        with self._held():
            return self._exact() or self._predicted()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Read one state of each file throughout: a row and what is told of it belong together."""
        with ExitStack() as stack:
            for view in self.views:
                stack.enter_context(view.held())
            yield

    def _exact(self) -> Answer | None:
        return self._best(lambda row: not row.predicted)

    def _predicted(self) -> Answer | None:
        return self._best(lambda row: row.predicted)

    def timed(self) -> Answer | None:
        """Return what rests on times of this architecture, of this problem or its neighbours."""
        with self._held():
            return self._exact() or self._near(here=True)

    def _near(self, *, here: bool) -> Answer | None:
        from tunebench.answer import _estimate

        views = self.views if here else list(dict.fromkeys([*self.views, *self._bundled(None)]))
        problem = parse(self.text)
        return _estimate.best_neighbour(problem, self.device, self.target, views, self.variant, here=here)

    def _inferred(self) -> Answer | None:
        from tunebench.answer import _estimate

        found = self._near(here=True) or self._near(here=False) or self._predicted()
        if found is not None:
            return found
        try:
            return _estimate.default_answer(parse(self.text), self.device, self.variant, str(self.location))
        except InputError as error:
            self._refused["by default"] = str(error)
            return None

    def _best(self, wanted: Callable[[AnswerRow], bool]) -> Answer | None:
        """Return the first wanted row that stands: measured here in any database before it is elsewhere."""
        rows = [(view, row) for view in self.views for row in self._rows(view) if wanted(row)]
        rows.sort(key=lambda found: found[1].device != self.target.key)  # stable: the rest is in order
        for view, row in rows:
            reason = reason_invalid(row, self.target, lambda: self.device)
            if reason is None:
                return self._answer(view, row)
            self._refused[row.variant] = reason
        return None

    def _rows(self, view: AnswerReader) -> list[AnswerRow]:
        return view.rows(self.text, self.target, self.variant)

    def _answer(self, view: AnswerReader, row: AnswerRow) -> Answer:
        here: How = "measured here" if row.device == self.target.key else "same architecture"
        did = "predicted" if row.predicted else "timed"
        return Answer(
            workload=self.text,
            device=row.device,
            how="predicted" if row.predicted else here,
            because=f"{did} for {row.device} on {row.recorded_at:%Y-%m-%d}",
            variant=row.variant,
            config=row.config,
            expected_us=row.time_us,
            ci_us=row.ci_us,
            bound_us=row.bound_us,
            cache=row.cache,
            verification=row.verification,
            revision=row.revision,
            recorded_at=row.recorded_at,
            database=str(view.location),
            interval_us=view.interval_us(row) if row.predicted else None,
            baselines=view.baselines(row),
        )

    def _miss(self, *, strict: bool) -> str:
        target, location = self.target, self.location
        local = {device.key: device for device in (devices.local_cpu(), *devices.local_gpus())}
        device = f"--device offline --arch {target.architecture}"
        if target.key in local:
            device = "--device cpu" if local[target.key].kind == "cpu" else f"--device {target.product}"
        database = f" --db {location}" if self._db is not None else ""
        empty = location.path is not None and not location.path.exists()
        where = f"database {location}" + (", which does not exist yet" if empty else "")
        reasons = "".join(f"; {reason}" for reason in self._refused.values())
        known = "was timed" if strict else "is known"
        return (
            f"nothing {known} for {self.text} on {target.key}, nor on any {target.architecture}, in {where}"
            f"{reasons}; run: tunebench tune --workload {self.text} {device}{database}"
        )
