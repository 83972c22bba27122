"""An Optuna pruner by lower bounds, for studies whose sampler does not use them."""

from __future__ import annotations

from optuna.pruners import BasePruner
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tunebench.errors import InputError

__all__ = ["BOUND_US", "BoundPruner"]

BOUND_US = "bound_us"
"""User attribute of a trial that holds the lower bound of its time, in microseconds."""


class BoundPruner(BasePruner):
    """Prunes a trial whose bound is worse than the best completed value.

    In a study that minimizes times, the bound is a lower bound and prunes if it exceeds the least time; in a
    study that maximizes performance, it is an upper bound and prunes if it is below the greatest.
    Intermediate values and trials that were pruned or failed are ignored. The pruner has no state: results of
    other processes come from the storage.

    Args:
        attribute: User attribute of a trial with the bound of its value. A trial without it, or with NaN, is
            never pruned.
    """

    def __init__(self, attribute: str = BOUND_US) -> None:
        self._attribute = attribute

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether the bound of the trial is worse than the best completed value.

        Raises:
            InputError: if the study has several objectives, or the bound is not a number.
        """
        if len(study.directions) > 1:
            raise InputError(
                "BoundPruner: expected a study of one objective, because a bound limits one value"
            )
        bound = trial.user_attrs.get(self._attribute)
        if bound is None:
            return False
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise InputError(f"BoundPruner: {self._attribute} must be a number, got {bound!r}")
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        values = [t.value for t in done if t.value is not None]
        if study.direction == StudyDirection.MAXIMIZE:
            return bool(values) and bound < max(values)
        return bool(values) and bound > min(values)
