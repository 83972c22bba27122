"""Export of search histories to an Optuna storage, for optuna-dashboard and `optuna.visualization`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tunebench.db.record import Record
from tunebench.db.store import open_store
from tunebench.errors import InputError, TunebenchError
from tunebench.outcome import time_us
from tunebench.report.history import SearchHistory

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from tunebench.tuning import Progress

__all__ = ["StudyExporter", "StudyFollower", "export_studies"]

_STATES = {"measured": "COMPLETE", "predicted": "COMPLETE", "aborted": "PRUNED", "pruned": "PRUNED"}
"""State of an Optuna trial by outcome class; that of a failure is FAIL."""


def export_studies(histories: Iterable[SearchHistory], storage: str) -> list[str]:
    """Store a study for each variant of each search history, with a trial for each record.

    Records that a study has already are skipped, so that a later export adds the new ones. The value of a
    trial is its time in microseconds, to minimize. User attributes of a trial are its lower bound
    (`bound_us`), outcome class, purpose, revision, and the reason of a failure.

    Args:
        histories: The search histories.
        storage: URL of the Optuna storage, such as ``sqlite:///studies.db``.

    Returns:
        Names of the studies.

    Raises:
        InputError: Optuna cannot open the storage, or a study of the name has other parameters.
    """
    names: dict[str, None] = {}
    with _storage_errors():
        exporter = StudyExporter(storage)
        for history in histories:
            added = exporter.add(history.workload, history.device, history.records, history.versions)
            names |= dict.fromkeys(added)
    return list(names)


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise errors of a storage as `InputError`."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, ValueError, ImportError) as error:
        reason = getattr(error, "orig", None) or str(error).partition(" [SQL:")[0]  # that of the driver
        raise InputError(
            f"cannot write the Optuna storage: {reason}; expected a URL such as sqlite:///studies.db of a "
            "database that can be written"
        ) from error


class StudyExporter:
    """Adds records to the studies of an Optuna storage: one for each workload, device and variant.

    Args:
        storage: URL of the storage.
    """

    def __init__(self, storage: str) -> None:
        import optuna

        self._storage = optuna.storages.get_storage(storage)
        self._studies: dict[str, tuple[Study, set[str]]] = {}
        """Each study, with the identities of its records."""

    def add(
        self, workload: str, device: str, records: Sequence[Record], versions: Mapping[str, str] | None = None
    ) -> list[str]:
        """Add the records that the studies do not have, and return the names of the studies.

        Args:
            workload: Canonical text.
            device: `Device.key`.
            records: Records of the workload on the device, oldest first.
            versions: Versions of the newest run, for the user attribute `tunebench` of the studies.
        """
        names = []
        for variant in dict.fromkeys(record.key.variant for record in records):
            name = f"{variant} for {workload} on {device}"
            self._add(name, variant, [record for record in records if record.key.variant == variant])
            if versions is not None:
                self._studies[name][0].set_user_attr("tunebench", dict(versions))
            names.append(name)
        return names

    def _add(self, name: str, variant: str, records: Sequence[Record]) -> None:
        if name not in self._studies:
            study = _open_study(self._storage, name)
            stored = {trial.user_attrs.get("record", "") for trial in study.get_trials(deepcopy=False)}
            self._studies[name] = study, stored
        study, stored = self._studies[name]
        new = [record for record in records if _identity(record) not in stored]
        study.add_trials(_trials(new, _choices(study) or _space_values(variant)))
        stored.update(map(_identity, new))


def _open_study(storage: BaseStorage, name: str) -> Study:
    """Return the study of a name; Optuna's message about it is not printed."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(
            storage=storage, study_name=name, direction="minimize", load_if_exists=True
        )
    finally:
        optuna.logging.set_verbosity(before)


class StudyFollower:
    """Adds the records of a run to an Optuna storage while it is tuned, in a thread that reads the database.

    The database is the truth: what is missing in the storage after a crash is added by the next run of the
    workload, or by `tunebench db export-optuna`. A storage that fails ends the export, not the run.

    Args:
        storage: URL of the storage.
        db: Path or URL of the database; None for the default one.

    Attributes:
        failure: Why the export ended early, or None.

    Raises:
        InputError: Optuna cannot open the storage.
    """

    INTERVAL_S = 5.0

    def __init__(self, storage: str, db: str | None) -> None:
        with _storage_errors():
            self._exporter = StudyExporter(storage)
        self._db = db
        self._newest: dict[tuple[str, str], int] = {}
        """Id of the newest exported record, by workload and device."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="study-storage", daemon=True)
        self.failure: str | None = None

    def watch(self, progress: Progress) -> None:
        """Follow the workload and device of a progress; a `ProgressCallback`."""
        self._newest.setdefault((progress.workload, progress.device), 0)

    def __enter__(self) -> StudyFollower:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            with _storage_errors():
                while not self._ended.wait(self.INTERVAL_S):
                    self._export()
                self._export()
        except TunebenchError as error:
            self.failure = str(error)

    def _export(self) -> None:
        if not self._newest:
            return
        with open_store(self._db, read_only=True) as store:
            for (workload, device), newest in list(self._newest.items()):
                records = store.history(workload, device, after=newest)
                if records:
                    self._exporter.add(workload, device, records)
                    self._newest[workload, device] = records[-1].id


def _identity(record: Record) -> str:
    """Return a text that identifies a record in any database it is copied to."""
    return f"{record.recorded_at.isoformat()} {record.purpose} {record.key.config}"


def _choices(study: Study) -> dict[str, Sequence[Any]]:
    """Return the values of each parameter of a study, which Optuna does not allow to change."""
    first = next(iter(study.get_trials(deepcopy=False)), None)
    if first is None:
        return {}
    distributions: dict[str, Any] = first.distributions
    return {name: distribution.choices for name, distribution in distributions.items()}


def _space_values(variant: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of each parameter of an installed variant; empty without it."""
    from tunebench import kernels

    try:
        return {parameter.name: parameter.values for parameter in kernels.variant(variant).space.parameters}
    except InputError:
        return {}


def _trials(records: Sequence[Record], values: Mapping[str, Sequence[Any]]) -> list[FrozenTrial]:
    """Return the trials of records; all trials of a study must have the same values of each parameter."""
    import optuna

    if not records:
        return []
    distributions = {
        name: _distribution([*values.get(name, ()), *(record.key.config[name] for record in records)])
        for name in records[0].key.config
    }
    trials = []
    for record in records:
        outcome = record.result.outcome
        attributes = {
            "bound_us": record.bound_us,
            "outcome": outcome.kind,
            "purpose": record.purpose,
            "revision": record.key.revision,
            "reason": getattr(outcome, "reason", None),
            "record": _identity(record),
            **{f"metric {name}": value for name, value in getattr(outcome, "metrics", {}).items()},
        }
        trial = optuna.trial.create_trial(
            state=optuna.trial.TrialState[_STATES.get(outcome.kind, "FAIL")],
            value=time_us(outcome),
            params={name: _choice(value) for name, value in record.key.config.items()},
            distributions=distributions,
            user_attrs={name: value for name, value in attributes.items() if value is not None},
        )
        effort = record.result.effort
        trial.datetime_complete = record.recorded_at.astimezone().replace(tzinfo=None)
        trial.datetime_start = trial.datetime_complete - timedelta(
            seconds=effort.compile_s + effort.verify_s + effort.measure_s
        )
        trials.append(trial)
    return trials


def _distribution(values: Iterable[Any]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution

    choices = dict.fromkeys(_choice(value) for value in values)
    return CategoricalDistribution(sorted(choices, key=lambda choice: (str(type(choice)), choice)))


def _choice(value: Any) -> bool | int | float | str:
    """Return a value of a parameter as a choice that Optuna can store."""
    return value if isinstance(value, (bool, int, float, str)) else str(value)
