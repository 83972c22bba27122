"""One lookup query: its candidates, where they are stored, and which one is returned."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tunebench import device as devices
from tunebench import kernels
from tunebench._command import command_line
from tunebench.answer._answer import Answer, How
from tunebench.answer._reader import AnswerReader, AnswerRow
from tunebench.answer._target import lookup_target
from tunebench.answer._validity import reason_invalid, reason_irreproducible
from tunebench.db import bundled, lookup_index
from tunebench.db.location import Location, locate
from tunebench.device import Device
from tunebench.errors import DatabaseUnavailable, InputError, LookupMiss, UnknownName
from tunebench.space import Config
from tunebench.workloads import parse

__all__ = ["LookupQuery"]

_AS_OF = "answered from its last commit"


class LookupQuery:
    """A lookup of one workload on one device.

    Args:
        text: Canonical text of the workload.
        device: As in `lookup`.
        db: As in `lookup`.
        variant: Key of the only variant to consider.
        view_of: Returns the reader of a file.
        reproducible: Whether to accept only configurations whose results are the same in every run.
    """

    def __init__(
        self,
        text: str,
        device: Device | str | None,
        db: str | Path | None,
        variant: str | None,
        view_of: Callable[[Path, Location], AnswerReader],
        *,
        reproducible: bool = False,
    ) -> None:
        self.text, self.variant, self.reproducible = text, variant, reproducible
        self.location = locate(db)
        self.target = lookup_target(device)
        self._given, self._db, self._view_of = device, db, view_of
        self._refused: dict[str, str] = {}
        self._unloaded: dict[str, str] = {}
        """Why the records of users' variants were not used, by variant: their files are not loaded."""
        self._unread = ""
        """Why the database, or its current state, cannot be read now; empty if it can."""

    @functools.cached_property
    def views(self) -> list[AnswerReader]:
        """The user's database, then the bundled records of this architecture."""
        path = self.location.path
        if path is None:
            self._unread, path = lookup_index.outdated(self.location), lookup_index.index_path(self.location)
        return [self._view_of(path, self.location), *self._bundled(self.target.architecture)]

    def _bundled(self, architecture: str | None) -> list[AnswerReader]:
        return [self._view_of(path, Location(path=path)) for path in bundled.indexes(architecture)]

    @functools.cached_property
    def device(self) -> Device:
        """Description of the device; for a stored key without one, the description of its architecture.

        Raises:
            UnknownName: if the architecture has no description either.
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
        """Return the best answer (see `tunebench.answer`).

        Args:
            strict: Accept only measurements of this workload on this architecture.

        Raises:
            LookupMiss: if there is none.
        """
        with self._held():
            answer = self._with_warning(self._measured() or (None if strict else self._inferred()))
        if answer is None:
            raise LookupMiss(self._miss(strict=strict))
        return answer

    def _with_warning(self, answer: Answer | None) -> Answer | None:
        """Return an answer that says whether the current records could be read.

        Raises:
            DatabaseUnavailable: if there is no answer, and not all records could be read.
        """
        if not self._unread:
            return answer
        if answer is None:
            raise DatabaseUnavailable(self._unread)
        return dataclasses.replace(answer, because=f"{answer.because}; {self._unread}", warning=self._unread)

    def recorded(self) -> Answer | None:
        """Return the stored answer for this workload, measured or else predicted.

        Raises:
            LookupMiss: if only variants were measured whose files are not loaded.
        """
        with self._held():
            return self._with_warning(self._measured() or self._predicted())

    def _measured(self) -> Answer | None:
        """Return the best measurement of this workload; its reason names faster variants of unloaded files.

        Raises:
            LookupMiss: if only variants were measured whose files are not loaded: another answer would hide
                them.
        """
        answer = self._exact()
        if answer is None and self._unloaded:
            raise LookupMiss("; ".join(self._unloaded.values()))
        if answer is None or not self._unloaded:
            return answer
        return dataclasses.replace(answer, because="; ".join((answer.because, *self._unloaded.values())))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Read one state of each file: a row and its details belong together."""
        with ExitStack() as stack:
            for view in list(self.views):
                try:
                    stack.enter_context(view.held())
                except DatabaseUnavailable as error:
                    self.views.remove(view)
                    self._unread = f"{error}; answered without its records"
                else:
                    if view.is_copy:
                        self._unread = f"database {view.location} is locked by another program; {_AS_OF}"
            yield

    def _exact(self) -> Answer | None:
        return self._best(lambda row: not row.predicted)

    def _predicted(self, *, here: bool = False) -> Answer | None:
        """Return the best stored prediction, for this device only or for any of its architecture."""
        return self._best(lambda row: row.predicted and (not here or row.device == self.target.key))

    def tried_operators(self) -> set[str]:
        """Return the operators of which any workload was tried on this architecture.

        Raises:
            DatabaseUnavailable: if not all records can be read now.
        """
        with self._held():
            if self._unread:
                raise DatabaseUnavailable(self._unread)
            return set[str]().union(*(view.operators(self.target.architecture) for view in self.views))

    def records_state(self) -> str:
        """Return a text that differs when a result was recorded since, of all files that this lookup reads.

        Raises:
            DatabaseUnavailable: if not all records can be read now.
        """
        with self._held():
            if self._unread:
                raise DatabaseUnavailable(self._unread)
            return "\n".join(view.state() for view in self.views)

    def timed(self) -> Answer | None:
        """Return an answer from measurements on this architecture, of this workload or its neighbours."""
        with self._held():
            return self._with_warning(self._exact() or self._unless_wrong(self._near(here=True)))

    def _near(self, *, here: bool) -> Answer | None:
        from tunebench.answer import _estimate

        views = self.views if here else list(dict.fromkeys([*self.views, *self._bundled(None)]))
        workload = parse(self.text)
        return _estimate.best_neighbour(
            workload, self.device, self.target, views, self.variant, here=here, accepts=self._accepts
        )

    def _unmeasured(self) -> Answer | None:
        from tunebench.answer import _estimate

        try:
            return _estimate.predicted_answer(
                parse(self.text),
                self.device,
                self.variant,
                str(self.location),
                is_wrong=self._is_wrong,
                accepts=self._accepts,
            )
        except InputError as error:
            self._refused["by prediction"] = str(error)
            return None

    def _accepts(self, variant: str, config: Config) -> bool:
        """Return whether the results of a configuration are as reproducible as this lookup requires."""
        reason = reason_irreproducible(self.text, variant, config) if self.reproducible else None
        if reason is not None:
            self._refused[variant] = reason
        return reason is None

    def _inferred(self) -> Answer | None:
        """Return the best answer that was not measured for this workload on this architecture."""
        return (
            self._unless_wrong(self._predicted(here=True))  # what `tune --arch` named
            or self._unless_wrong(self._near(here=True))
            or self._unless_wrong(self._near(here=False))
            or self._unless_wrong(self._predicted())
            or self._unmeasured()
        )

    def _unless_wrong(self, answer: Answer | None) -> Answer | None:
        """Return an answer unless its configuration had a wrong result for this workload on this device."""
        return None if answer is None or self._is_wrong(answer.variant, answer.config) else answer

    def _is_wrong(self, variant: str, config: Config) -> bool:
        """Return whether a configuration had a wrong result for this workload on this device."""
        if not any(view.is_wrong(self.text, self.target.key, variant, config) for view in self.views):
            return False
        self._refused[variant] = f"{variant} with {config} had a wrong result"
        return True

    def _best(self, accepts: Callable[[AnswerRow], bool]) -> Answer | None:
        """Return the first valid row that is wanted; rows of this device in any database come first."""
        rows = [(view, row) for view in self.views for row in self._rows(view) if accepts(row)]
        rows.sort(key=lambda pair: pair[1].device != self.target.key)  # a stable sort
        for view, row in rows:
            reason = reason_invalid(row, self.target, lambda: self.device)
            if reason is None:
                if self._accepts(row.variant, row.config):
                    return self._answer(view, row)
                continue
            self._refused[row.variant] = reason
            if row.predicted or row.variant in self._unloaded:
                continue
            file = self._missing_file(view, row)
            if file is not None:
                self._unloaded[row.variant] = (
                    f"{row.variant} took {row.time_us:.2f} us on {row.device}, but its file is not loaded: "
                    f"use --variant-file {shlex.quote(file)}, or tunebench.kernels.load_file in Python"
                )
        return None

    @staticmethod
    def _missing_file(view: AnswerReader, row: AnswerRow) -> str | None:
        """Return the user's file of a variant that is not loaded; None if it is, or is of no file."""
        from tunebench.kernels import variant

        try:
            variant(row.variant)
        except UnknownName:
            return view.details(row).variant_file
        return None

    def _rows(self, view: AnswerReader) -> list[AnswerRow]:
        return view.rows(self.text, self.target, self.variant)

    def _answer(self, view: AnswerReader, row: AnswerRow) -> Answer:
        details = view.details(row)
        source = details.imported_from
        origin: How = "measured here" if source is None else "imported"
        if row.predicted:
            origin = "predicted"
        elif row.device != self.target.key:
            origin = "same architecture"
        imported = "" if source is None else f"imported from {source}, "
        did = "predicted" if row.predicted else "measured"
        return Answer(
            workload=self.text,
            device=row.device,
            how=origin,
            because=f"{imported}{did} for {row.device} on {row.recorded_at:%Y-%m-%d}{details.noise}",
            variant=row.variant,
            config=row.config,
            expected_us=row.time_us,
            ci_us=row.ci_us,
            bound_us=details.figures.bound_us or row.bound_us,
            cache=row.cache,
            verification=row.verification,
            revision=row.revision,
            recorded_at=row.recorded_at,
            database=str(view.location),
            interval_us=details.interval_us if row.predicted else None,
            baselines=details.figures.baselines,
            ties=details.figures.tie_count,
        )

    def _miss(self, *, strict: bool) -> str:
        target, location = self.target, self.location
        local = {device.key: device for device in (devices.local_cpu(), *devices.local_gpus())}
        where_to: dict[str, str] = {"arch": target.architecture}
        if target.key in local:
            where_to = {"device": "cpu" if local[target.key].kind == "cpu" else target.product}
        if strict and target.key not in local:  # here, tuning would only predict
            where_to = {"device": target.product}
        empty = location.path is not None and not location.path.exists()
        where = f"database {location}" + (", which does not exist yet" if empty else "")
        reasons = "".join(f"; {reason}" for reason in self._refused.values())
        state = "was measured" if strict else "is known"
        files = kernels.files_of(self.text.partition(":")[0])
        tune = command_line("tune", workload=self.text, **where_to, variant_file=files, db=location.option)
        remedy = f"; run: {tune}"
        if strict and target.key not in local:
            remedy = f"; run, where that device is: {tune}"
        elif "by prediction" in self._refused:  # the last reason: no variant supports the workload
            remedy = ""
        return (
            f"nothing {state} for {self.text} on {target.key}, nor on any {target.architecture}, in {where}"
            f"{reasons}{remedy}"
        )
