"""Lookup of the best known variant and configuration for a workload on a device.

    answer = tunebench.lookup("gemm", m=96, n=4096, k=4096, dtype="f16", device="h100-sxm")

`Answer.how` names the source of an answer. The first of these sources that has an answer is used:

1. ``measured here``: the workload was measured on this device. ``imported``: the same, from an imported file.
2. ``same architecture``: it was measured on another device of the architecture; the most similar device
   comes first.
3. ``predicted``: it was tuned for this device in its absence (`tune --arch`). `tune`, `lookup` and `export`
   name the same configuration.
4. ``neighbour``: the nearest workloads were measured on this architecture. The best configuration of each is
   a candidate, and the one with the shortest expected time for *this* workload is returned.
5. ``other architecture``: the same, from devices of other architectures.
6. ``predicted``: nothing comparable was measured. A stored prediction for another device of the architecture
   comes first, then the configuration that is predicted to be fastest.

A configuration that cannot run is never returned: constraints, limits and resources are checked with the
installed variants. Stale records (their source has changed) and configurations that lost to their variant's
default are not returned either. Times with cold caches come before times with warm ones, and are never
compared with them.

An exact answer needs only the standard library's `sqlite3` and the view `answer_v1` of the database: no
NumPy, SQLAlchemy, Optuna, Numba or CUDA is imported. A process caches its answers. Every `FRESH_S` it checks
whether anything was committed, so that new records are returned without a restart.
"""

from tunebench._deprecation import renamed
from tunebench.answer._answer import HERE, Answer, BaselineComparison, How, Unmeasured
from tunebench.answer._cache import (
    FRESH_S,
    answers_state,
    generation,
    lookup,
    lookup_workload,
    recorded,
    records_state,
    timed,
    tried_operators,
)

__all__ = [
    "FRESH_S",
    "HERE",
    "Answer",
    "BaselineComparison",
    "How",
    "Unmeasured",
    "answers_state",
    "generation",
    "lookup",
    "lookup_workload",
    "recorded",
    "records_state",
    "timed",
    "tried_operators",
]


__getattr__ = renamed(
    __name__,
    {
        "Versus": "BaselineComparison",
    },
)
