"""Text about the software of predicted steps: what it adds, and what measured steps changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebench.stack import efficiency_of, find_stack

if TYPE_CHECKING:
    from tunebench.training.steps.calibration import Calibration

__all__ = ["calibration_text", "software_text"]


def software_text(name: str, tuning: str) -> str:
    """Return how long steps of a stack take beside the modelled time.

    Args:
        name: Name of the stack.
        tuning: `tuned`, `typical`, or empty for the usual one of the stack.
    """
    efficiency = efficiency_of(name, tuning)
    low, expected, high = efficiency.apply(1.0, 1.0, 1.0)
    return (
        f"{name}, {tuning or find_stack(name).usual}: {expected:.2f} times what is modelled "
        f"(90 % interval {low:.2f} to {high:.2f}, from {efficiency.sources} published sources)"
    )


def calibration_text(calibration: Calibration) -> str:
    """Return how far measured steps move other predictions.

    Args:
        calibration: What measured steps say.
    """
    ratios = ", ".join(f"{step.ratio:.2f}" for step in calibration.steps)
    kernels, communication = calibration.factors
    count = len(calibration.steps)
    return (
        f"{count} measured {'step' if count == 1 else 'steps'} took {ratios} times what is modelled; kernels "
        f"are taken {kernels:.2f} times as long, communication {communication:.2f} times"
    )
