"""Comparison of finalists that share no rounds."""

from __future__ import annotations

import numpy as np

from tunebench.search.sampler import Prospects
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Parameter, Space
from tunebench.tuning.finalist import TimedConfig

TABLE = Space((Parameter("a", (1, 2), ""),)).enumerate()


def test_intervals_that_touch_are_ties() -> None:
    prospects = Prospects(table=TABLE, bounds_us=np.zeros(len(TABLE)))
    search = VariantSearch("any", prospects, sampler="random", seed=0)
    best, *rivals = (
        TimedConfig(search, TABLE.config(0), sum(ci_us) / 2, ci_us=ci_us)
        for ci_us in ((1.0, 2.0), (1.0, 2.0), (0.0, 0.9), (2.1, 3.0), (1.9, 5.0), (0.0, 9.0), (2.0, 2.5))
    )
    assert [best.tied(rival) for rival in rivals] == [True, False, False, True, True, True]
