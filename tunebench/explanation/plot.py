"""Plot of the roofline: ceilings of the device, and the configuration below them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench._plot import empty_figure, save_figure
from tunebench.answer import HERE
from tunebench.explanation.analysis import Explanation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "figure"]


def draw(explanation: Explanation, path: str | Path) -> None:
    """Write a plot of the roofline to a file.

    Args:
        explanation: The explanation.
        path: File to write; its suffix selects the format.

    Raises:
        MissingDependency: if Matplotlib is not installed.
        InputError: if Matplotlib does not support the format.
        OSError: if the file cannot be written.
    """
    save_figure(figure(explanation), path)


def figure(explanation: Explanation) -> Figure:
    """Return the roofline as a Matplotlib figure without a window.

    Args:
        explanation: The explanation.

    Raises:
        MissingDependency: if Matplotlib is not installed.
    """
    drawing = empty_figure()
    axes = drawing.add_subplot()
    _draw_roofs(axes, explanation)
    _draw_points(axes, explanation)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("arithmetic intensity, FLOP/byte")
    axes.set_ylabel("GFLOP/s")
    choice = explanation.choice
    axes.set_title(f"{choice.workload}\n{choice.variant.key} on {choice.device.name}", fontsize="medium")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(loc="lower right", fontsize="small")
    return drawing


def _draw_roofs(axes: Any, explanation: Explanation) -> None:
    """Draw the memory slope up to each ceiling, and the ceilings from there on."""
    roof = explanation.roofline
    balances = [ceiling.balance for ceiling in roof.ceilings]
    left, right = min(*balances, roof.intensity) / 8, max(*balances, roof.intensity) * 8
    for ceiling, style in zip(roof.ceilings, ("-", "--", ":"), strict=False):
        label = f"{ceiling.pipe} in {ceiling.dtype}: {ceiling.gflop_s:,.0f} GFLOP/s"
        peak = ceiling.gflop_s
        axes.plot([ceiling.balance, right], [peak, peak], style, color="tab:red", label=label)
    highest = max(balances)
    axes.plot(
        [left, highest],
        [left * roof.dram_gb_s, highest * roof.dram_gb_s],
        color="tab:blue",
        label=f"memory: {roof.dram_gb_s:,.0f} GB/s",
    )


def _draw_points(axes: Any, explanation: Explanation) -> None:
    """Draw the attainable rate, and the rates at the lower bound, the predicted and the measured time."""
    roof, x = explanation.roofline, explanation.roofline.intensity
    times = {"bound": (explanation.bound.us, "^"), "predicted": (explanation.predicted_us, "s")}
    measured = explanation.measured
    if measured is not None and measured.how in HERE:
        times["measured"] = (measured.median_us, "o")
    axes.plot([x], [roof.attainable_gflop_s], "x", color="black", label="attainable", zorder=3)
    for name, (us, marker) in times.items():
        gflop_s = explanation.shares(us).gflop_s
        axes.plot([x], [gflop_s], marker, color="tab:green", label=f"{name}: {gflop_s:,.0f} GFLOP/s")
