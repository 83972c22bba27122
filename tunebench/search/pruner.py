"""An Optuna pruner that stops what cannot win, for studies whose sampler does not know the bound."""

from __future__ import annotations

from optuna.pruners import BasePruner
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tunebench.errors import InputError

__all__ = ["BOUND_US", "BoundPruner"]

BOUND_US = "bound_us"
"""User attribute of a trial that holds the lower bound of its time, in microseconds."""


class BoundPruner(BasePruner):
    """Prunes a trial that by its bound cannot be better than the best completed one: no run of it can win.

    In a study that minimises times, that is one whose lower bound exceeds the least time; in a study that
    maximises performance, one whose upper bound falls below the most. Values that trials report on the way
    play no part, nor do trials that were pruned or failed. It keeps nothing between calls: what other
    processes have found is in the storage.

    Args:
        attribute: User attribute of a trial that holds the best value it can reach. A trial without it, or
            with NaN, is never pruned.
    """

    def __init__(self, attribute: str = BOUND_US) -> None:
        self._attribute = attribute

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Tell whether the trial's bound is worse than the best completed value.

        Raises:
            InputError: if the study has several objectives, or the bound is no number.
        """
        if len(study.directions) > 1:
            raise InputError("BoundPruner: one bound says nothing of several objectives; use a study of one")
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
