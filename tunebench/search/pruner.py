"""An Optuna pruner that stops what cannot win, for studies whose sampler does not know the bound."""

from __future__ import annotations

from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

__all__ = ["BOUND_US", "BoundPruner"]

BOUND_US = "bound_us"
"""User attribute of a trial that holds the lower bound of its time, in microseconds."""


class BoundPruner(BasePruner):
    """Prunes a trial whose bound exceeds the best value: no run of it can win.

    A trial without the attribute `BOUND_US` is never pruned. For studies that minimise microseconds.
    """

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Tell whether the trial's bound exceeds the best completed value."""
        bound_us = trial.user_attrs.get(BOUND_US)
        if bound_us is None:
            return False
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        values = [t.value for t in done if t.value is not None]
        return bool(values) and bound_us > min(values)
