"""Search: Optuna samplers and pruners over valid configurations, and the ask/tell loop of `tunebench.tune`.

The samplers and the pruner work in any Optuna study.

To add a sampler:

1. Derive a class from `tunebench.search.sampler.TableSampler` in a new module; `choose` returns the next row.
   Any other `optuna.samplers.BaseSampler` works too: its proposals are moved to the nearest open
   configuration.
2. Register it by name in `SAMPLERS` in `tunebench.search.variant_search`. `Plan(sampler=...)` and `--sampler`
   accept the name from then on.
3. `tests/search/test_samplers.py`, the contract of all samplers, runs it without changes. A `TableSampler`
   joins Optuna's own contract tests in `tests/search/test_samplers_of_studies.py` by the list `OWN`.
"""

from typing import TYPE_CHECKING

from tunebench._deprecation import renamed
from tunebench.search.learned_pruner import LearnedPruner
from tunebench.search.pruner import BoundPruner
from tunebench.search.sampler import BoundSampler, Prospects, RandomTableSampler
from tunebench.search.surrogate_sampler import SurrogateSampler

__all__ = [
    "BoundPruner",
    "BoundSampler",
    "LearnedPruner",
    "Prospects",
    "RandomTableSampler",
    "SurrogateSampler",
]

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__, {"CalibratedPruner": "LearnedPruner"})
