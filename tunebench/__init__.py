"""tunebench: which kernel, with which parameters, is fastest for this problem on this GPU?

`tune` searches, proves and remembers; `lookup` serves what is known; `explain` tells what limits it.
Importing the package is cheap: each name is imported at its first use, and looking up never imports what
tuning needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tunebench.answer import Answer, lookup
    from tunebench.device import Device
    from tunebench.errors import LookupMiss, TunebenchError
    from tunebench.explanation import Explanation, explain
    from tunebench.forecast import Prediction, predict, predict_all
    from tunebench.tuning import Plan, Report, tune
    from tunebench.workloads import parse

__all__ = [
    "Answer",
    "Device",
    "Explanation",
    "LookupMiss",
    "Plan",
    "Prediction",
    "Report",
    "TunebenchError",
    "__version__",
    "explain",
    "lookup",
    "parse",
    "predict",
    "predict_all",
    "tune",
]

_HOME = {
    "Answer": "tunebench.answer",
    "Device": "tunebench.device",
    "Explanation": "tunebench.explanation",
    "LookupMiss": "tunebench.errors",
    "Plan": "tunebench.tuning",
    "Prediction": "tunebench.forecast",
    "Report": "tunebench.tuning",
    "TunebenchError": "tunebench.errors",
    "explain": "tunebench.explanation",
    "lookup": "tunebench.answer",
    "parse": "tunebench.workloads",
    "predict": "tunebench.forecast",
    "predict_all": "tunebench.forecast",
    "tune": "tunebench.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
