"""Simulated annealing: a custom search strategy."""

import math

import numpy as np

from tunebench.search import TableSampler


class AnnealingSampler(TableSampler):
    """Proposes a neighbour of the current configuration; slower ones replace it ever more rarely."""

    def choose(self, study):
        """Return an open row that differs from the current one in as few parameters as possible."""
        current = self._current(study)
        rows = np.flatnonzero(self.open)
        if current is None:
            return int(self._rng.choice(rows))
        differences = (self.table.ordinals[rows] != self.table.ordinals[current]).sum(axis=1)
        return int(self._rng.choice(rows[differences == differences.min()]))

    def _current(self, study):
        row, time_us, temperature = None, math.inf, 0.5
        rng = np.random.default_rng(0)  # the same decisions at each call
        for trial in study.get_trials(deepcopy=False):
            if trial.value is None:  # it runs, or failed
                continue
            slower = (trial.value - time_us) / (abs(time_us) + 1e-9) if row is not None else 0.0
            if slower <= 0 or rng.random() < math.exp(-slower / temperature):
                row, time_us = self.space.row(trial.params), trial.value
            temperature *= 0.95
        return row
