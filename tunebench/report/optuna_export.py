"""Export of search histories to an Optuna storage, for optuna-dashboard and `optuna.visualization`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tunebench.db.record import Record
from tunebench.errors import InputError
from tunebench.outcome import time_us
from tunebench.report.history import SearchHistory

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

__all__ = ["export_studies"]

_STATES = {"measured": "COMPLETE", "predicted": "COMPLETE", "aborted": "PRUNED", "pruned": "PRUNED"}
"""State of an Optuna trial by outcome class; that of a failure is FAIL."""


def export_studies(histories: Iterable[SearchHistory], storage: str) -> list[str]:
    """Store a study for each variant of each search history, with a trial for each record.

    The value of a trial is its time in microseconds, to minimize. User attributes of a trial are its lower
    bound (`bound_us`), outcome class, purpose, revision, and the reason of a failure.

    Args:
        histories: The search histories.
        storage: URL of the Optuna storage, such as ``sqlite:///studies.db``.

    Returns:
        Names of the new studies.

    Raises:
        InputError: a study of the name exists, or Optuna cannot open the storage.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    names = []
    try:
        opened = optuna.storages.get_storage(storage)
        for history in histories:
            for variant in dict.fromkeys(record.key.variant for record in history.records):
                records = [record for record in history.records if record.key.variant == variant]
                name = f"{variant} for {history.workload} on {history.device}"
                study = optuna.create_study(storage=opened, study_name=name, direction="minimize")
                study.set_user_attr("tunebench", dict(history.versions))
                study.add_trials(_trials(records))
                names.append(name)
    except optuna.exceptions.DuplicatedStudyError as error:
        raise InputError(f"{error} Delete the study, or export to another storage") from error
    except (SQLAlchemyError, ValueError, ImportError) as error:
        raise InputError(
            f"cannot write the Optuna storage: expected a URL such as sqlite:///studies.db, got {error}"
        ) from error
    return names


def _trials(records: Sequence[Record]) -> list[FrozenTrial]:
    import optuna

    distributions = {
        name: _distribution([record.key.config[name] for record in records]) for name in records[0].key.config
    }
    found = []
    for record in records:
        outcome = record.result.outcome
        attributes = {
            "bound_us": record.bound_us,
            "outcome": outcome.kind,
            "purpose": record.purpose,
            "revision": record.key.revision,
            "reason": getattr(outcome, "reason", None),
        }
        trial = optuna.trial.create_trial(
            state=optuna.trial.TrialState[_STATES.get(outcome.kind, "FAIL")],
            value=time_us(outcome),
            params={name: _choice(value) for name, value in record.key.config.items()},
            distributions=distributions,
            user_attrs={name: value for name, value in attributes.items() if value is not None},
        )
        trial.datetime_start = trial.datetime_complete = record.recorded_at.astimezone().replace(tzinfo=None)
        found.append(trial)
    return found


def _distribution(values: Iterable[Any]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution

    choices = dict.fromkeys(_choice(value) for value in values)
    return CategoricalDistribution(sorted(choices, key=lambda choice: (str(type(choice)), choice)))


def _choice(value: Any) -> bool | int | float | str:
    """Return a value of a parameter as a choice that Optuna can store."""
    return value if isinstance(value, (bool, int, float, str)) else str(value)
