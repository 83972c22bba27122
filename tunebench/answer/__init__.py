"""Serving what is known: the best variant and configuration for a problem on a device.

    answer = tunebench.lookup("gemm", m=96, n=4096, k=4096, dtype="f16", device="h100-sxm")

There is always an answer, and it says how it is known (`Answer.how`). The first that exists is served:

1. ``measured here``: this problem was timed on this device;
2. ``same architecture``: it was timed on another device of the architecture, the most similar one first;
3. ``neighbour``: the nearest problems were timed on this architecture. What was best for each is a candidate,
and
   the one that is expected to be fastest for *this* problem is served;
4. ``other architecture``: likewise, from devices of other architectures;
5. ``predicted``: nobody timed anything of use. A prediction that tuning recorded comes first, then the
default
   configuration that the model expects to be fastest.

Nothing is served that cannot run: constraints, limits and resources are checked against the variants of
today. Nor is what was timed from a source that has changed since (it is to be timed again; nothing is
deleted), nor what lost to its variant's default. Times with cold caches come before times with warm ones, and
never compare.

An exact answer costs a serving process the standard library's `sqlite3` and one view of the database,
`answer_v1`: no NumPy, SQLAlchemy, Optuna, Numba or CUDA is imported. A process keeps its answers, and looks
every `FRESH_S` whether anything was committed since, so that new records are served without a restart.
"""

from tunebench._deprecation import renamed
from tunebench.answer._answer import Answer, BaselineComparison, How, Unmeasured
from tunebench.answer._cache import FRESH_S, generation, lookup, lookup_workload, recorded, timed

__all__ = [
    "FRESH_S",
    "Answer",
    "BaselineComparison",
    "How",
    "Unmeasured",
    "generation",
    "lookup",
    "lookup_workload",
    "recorded",
    "timed",
]


__getattr__ = renamed(
    __name__,
    {
        "Versus": "BaselineComparison",
    },
)
