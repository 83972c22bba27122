"""tunebench: find the fastest kernel and parameters for a workload on a GPU, and look them up.

`tune` searches, proves and records. `lookup` returns the best recorded configuration. `explain` names the
resource that limits it. Importing the package is cheap: each name is imported at its first use, and `lookup`
imports nothing that only tuning needs.
"""

from __future__ import annotations

from tunebench import _start as _start  # first: until then, Ctrl-C prints a traceback

# isort: split
import importlib
import sys
from typing import TYPE_CHECKING, Any

from tunebench._deprecation import MovedModules, renamed
from tunebench._version import __version__

if TYPE_CHECKING:
    from tunebench.answer import Answer, Unmeasured, lookup
    from tunebench.device import Device
    from tunebench.errors import LookupMiss, TunebenchError
    from tunebench.explanation import Explanation, explain
    from tunebench.forecast import Prediction, predict, predict_all
    from tunebench.own_kernel import InOut, Input, Output, ReferenceKernel, Scratch, ceil_div
    from tunebench.tuning import (
        Plan,
        Report,
        TuningSummary,
        parse_size_range,
        show_progress,
        tune,
        tune_all,
        tune_from_profile,
        tune_suite,
    )
    from tunebench.tuning.own_kernel import KernelResult, lookup_kernel, tune_kernel
    from tunebench.workloads import parse

__all__ = [
    "Answer",
    "Device",
    "Explanation",
    "InOut",
    "Input",
    "KernelResult",
    "LookupMiss",
    "Output",
    "Plan",
    "Prediction",
    "ReferenceKernel",
    "Report",
    "Scratch",
    "TunebenchError",
    "TuningSummary",
    "Unmeasured",
    "__version__",
    "ceil_div",
    "explain",
    "lookup",
    "lookup_kernel",
    "parse",
    "parse_size_range",
    "predict",
    "predict_all",
    "show_progress",
    "tune",
    "tune_all",
    "tune_from_profile",
    "tune_kernel",
    "tune_suite",
]

_HOME = {
    "Answer": "tunebench.answer",
    "Device": "tunebench.device",
    "Explanation": "tunebench.explanation",
    "InOut": "tunebench.own_kernel",
    "Input": "tunebench.own_kernel",
    "KernelResult": "tunebench.tuning.own_kernel",
    "LookupMiss": "tunebench.errors",
    "Output": "tunebench.own_kernel",
    "Plan": "tunebench.tuning",
    "Prediction": "tunebench.forecast",
    "Report": "tunebench.tuning",
    "ReferenceKernel": "tunebench.own_kernel",
    "Scratch": "tunebench.own_kernel",
    "TunebenchError": "tunebench.errors",
    "TuningSummary": "tunebench.tuning",
    "Unmeasured": "tunebench.answer",
    "ceil_div": "tunebench.variant",
    "explain": "tunebench.explanation",
    "lookup": "tunebench.answer",
    "lookup_kernel": "tunebench.tuning.own_kernel",
    "parse": "tunebench.workloads",
    "parse_size_range": "tunebench.tuning",
    "predict": "tunebench.forecast",
    "predict_all": "tunebench.forecast",
    "show_progress": "tunebench.tuning",
    "tune": "tunebench.tuning",
    "tune_all": "tunebench.tuning",
    "tune_from_profile": "tunebench.tuning",
    "tune_kernel": "tunebench.tuning.own_kernel",
    "tune_suite": "tunebench.tuning",
}


def _get(name: str) -> Any:
    if name == "tune_recorded":  # deprecated; warns when it is called
        return getattr(importlib.import_module("tunebench.tuning"), name)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


sys.meta_path.insert(0, MovedModules())

__getattr__ = renamed(
    __name__,
    {"DemandReport": "TuningSummary", "SuiteReport": "TuningSummary", "family": "parse_size_range"},
    _get,
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
