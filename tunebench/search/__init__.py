"""Which configuration next: Optuna samplers over valid configurations, and the ask/tell loop.

Samplers and pruner serve any Optuna study; the loop is `tunebench.tune`'s.
"""

from tunebench.search.pruner import BoundPruner
from tunebench.search.sampler import BoundSampler, Prospects, RandomTableSampler
from tunebench.search.surrogate_sampler import SurrogateSampler

__all__ = ["BoundPruner", "BoundSampler", "Prospects", "RandomTableSampler", "SurrogateSampler"]
