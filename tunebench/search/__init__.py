"""Search: Optuna samplers and pruners over valid configurations, and the ask/tell loop of `tunebench.tune`.

The samplers and the pruner work in any Optuna study.

Another package offers a sampler by the entry point `tunebench.samplers`, a program by `register_sampler`. To
add one to this package:

1. Derive a class from `tunebench.search.sampler.TableSampler` in `tunebench/search/<name>_sampler.py`, define
   `choose`, which returns the next row, and export it here. Any other `optuna.samplers.BaseSampler` works
   too: its proposals are moved to the nearest open configuration.
2. Register it by name in `SAMPLERS` in `tunebench.search.registry`. `Plan(sampler=...)` and `--sampler`
   accept the name from then on. `tunebench/tuning/run.py` treats `random` and `surrogate` specially: a
   sampler that must ignore warm starts, or that learns from other devices, needs the same there.
3. Tests that are parametrised over `SAMPLERS` include it. Subclass
   `tunebench.testing.sampler_contract.SamplerContract` in `tests/testing/test_contracts.py`.
4. Describe it in the table of `docs/search.md` and in the help of `--sampler` (`tunebench/cli/tune.py`,
   `tunebench/cli/replay.py`).
"""

from typing import TYPE_CHECKING

from tunebench._deprecation import renamed
from tunebench.search.learned_pruner import LearnedPruner
from tunebench.search.pruner import BoundPruner
from tunebench.search.registry import register_sampler, samplers
from tunebench.search.sampler import BoundSampler, Prospects, RandomTableSampler, TableSampler
from tunebench.search.surrogate_sampler import SurrogateSampler

__all__ = [
    "BoundPruner",
    "BoundSampler",
    "LearnedPruner",
    "Prospects",
    "RandomTableSampler",
    "SurrogateSampler",
    "TableSampler",
    "register_sampler",
    "samplers",
]

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__, {"CalibratedPruner": "LearnedPruner"})
