"""Database of tuning results: every outcome of every trial, and everything needed to judge and reproduce it.

    with open_store() as store:
        run = store.begin_run(RunStart(device=device, workload=str(workload), sampler="bound", seed=0))
        if store.claim(key, owner):
            store.record(key, result, run_id=run)

A *trial* is one configuration of one source revision of one variant, for one workload on one device. It has
one or more *measurements* (search, finalist, audit). The default database is an SQLite file in the user's
data folder; `postgresql://…` URLs can be shared by several machines. `lookup` reads the view `answer_v1`
(see `tunebench.answer`), so importing this package loads neither SQLAlchemy nor Alembic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebench._deprecation import renamed
from tunebench._lazy import lazy_names

if TYPE_CHECKING:
    from tunebench.db.location import Location as Location
    from tunebench.db.location import locate as locate
    from tunebench.db.migrate import downgrade as downgrade
    from tunebench.db.migrate import upgrade as upgrade
    from tunebench.db.owner import new_owner as new_owner
    from tunebench.db.record import Demand as Demand
    from tunebench.db.record import ImportResult as ImportResult
    from tunebench.db.record import MeasuredSpace as MeasuredSpace
    from tunebench.db.record import MeasurementBatch as MeasurementBatch
    from tunebench.db.record import NewMeasurement as NewMeasurement
    from tunebench.db.record import Purpose as Purpose
    from tunebench.db.record import Record as Record
    from tunebench.db.record import RunStart as RunStart
    from tunebench.db.record import RunSummary as RunSummary
    from tunebench.db.record import SpaceKey as SpaceKey
    from tunebench.db.record import Stats as Stats
    from tunebench.db.record import TrialKey as TrialKey
    from tunebench.db.record import TrialOutcome as TrialOutcome
    from tunebench.db.record import Verdict as Verdict
    from tunebench.db.store import Store as Store
    from tunebench.db.store import open_store as open_store

_HOME = {
    "NewMeasurement": "record",
    "MeasurementBatch": "record",
    "Demand": "record",
    "Record": "record",
    "ImportResult": "record",
    "TrialOutcome": "record",
    "Location": "location",
    "MeasuredSpace": "record",
    "Purpose": "record",
    "RunStart": "record",
    "RunSummary": "record",
    "SpaceKey": "record",
    "Stats": "record",
    "Store": "store",
    "TrialKey": "record",
    "Verdict": "record",
    "downgrade": "migrate",
    "locate": "location",
    "new_owner": "owner",
    "open_store": "store",
    "upgrade": "migrate",
}
"""Modules of the public names; each is imported at its first use."""

__all__ = list(_HOME)


_RENAMED = {
    "Addition": "NewMeasurement",
    "Batch": "MeasurementBatch",
    "Entry": "Record",
    "Imported": "ImportResult",
    "Known": "TrialOutcome",
    "Place": "MeasuredSpace",
}


__getattr__ = renamed(__name__, _RENAMED, lazy_names(__name__, _HOME))
