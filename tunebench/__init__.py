"""tunebench: which kernel, with which parameters, is fastest for this problem on this GPU?

`tune` searches, proves and remembers; `lookup` serves what is known; `explain` tells what limits it.
Importing the package is cheap: each name is imported at its first use, and looking up never imports what
tuning needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tunebench._version import __version__

if TYPE_CHECKING:
    from tunebench.answer import Answer, Unmeasured, lookup
    from tunebench.device import Device
    from tunebench.errors import LookupMiss, TunebenchError
    from tunebench.explanation import Explanation, explain
    from tunebench.forecast import Prediction, predict, predict_all
    from tunebench.tuning import (
        DemandReport,
        Plan,
        Report,
        SuiteReport,
        family,
        tune,
        tune_all,
        tune_recorded,
        tune_suite,
    )
    from tunebench.workloads import parse

__all__ = [
    "Answer",
    "DemandReport",
    "Device",
    "Explanation",
    "LookupMiss",
    "Plan",
    "Prediction",
    "Report",
    "SuiteReport",
    "TunebenchError",
    "Unmeasured",
    "__version__",
    "explain",
    "family",
    "lookup",
    "parse",
    "predict",
    "predict_all",
    "tune",
    "tune_all",
    "tune_recorded",
    "tune_suite",
]

_HOME = {
    "Answer": "tunebench.answer",
    "DemandReport": "tunebench.tuning",
    "Device": "tunebench.device",
    "Explanation": "tunebench.explanation",
    "LookupMiss": "tunebench.errors",
    "Plan": "tunebench.tuning",
    "Prediction": "tunebench.forecast",
    "Report": "tunebench.tuning",
    "SuiteReport": "tunebench.tuning",
    "TunebenchError": "tunebench.errors",
    "Unmeasured": "tunebench.answer",
    "explain": "tunebench.explanation",
    "family": "tunebench.tuning",
    "lookup": "tunebench.answer",
    "parse": "tunebench.workloads",
    "predict": "tunebench.forecast",
    "predict_all": "tunebench.forecast",
    "tune": "tunebench.tuning",
    "tune_all": "tunebench.tuning",
    "tune_recorded": "tunebench.tuning",
    "tune_suite": "tunebench.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
