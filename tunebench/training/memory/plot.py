"""Plot of the memory of a training step over its time, with and without a plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench._plot import empty_figure, save_figure
from tunebench.training.memory.layers import LayerPlan
from tunebench.training.memory.planner import MemoryPlan
from tunebench.training.memory.schedule import Compute, unplanned
from tunebench.training.memory.simulation import Simulation, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "figure"]

PLANNED, UNPLANNED, BUDGET = "tab:blue", "0.55", "tab:red"
ACTIVITY = {"first run": "tab:blue", "recomputation": "tab:orange", "wait for copies": "tab:purple"}
SHARES = {"kept": "tab:blue", "recomputed": "tab:orange", "swapped": "tab:green"}


def draw(plan: MemoryPlan, layers: Sequence[LayerPlan], path: str | Path, *, title: str = "") -> None:
    """Write a plot of the memory of a step to a file.

    Args:
        plan: The plan.
        layers: What the plan does with each layer.
        path: File to write; its suffix selects the format.
        title: Title, such as the name of the model and the device.

    Raises:
        MissingDependency: Matplotlib is not installed.
        InputError: Matplotlib does not support the format.
        OSError: The file cannot be written.
    """
    save_figure(figure(plan, layers, title=title), path)


def figure(plan: MemoryPlan, layers: Sequence[LayerPlan], *, title: str = "") -> Figure:
    """Return the memory of a step over its time, what runs meanwhile, and what happens to saved tensors.

    Args:
        plan: The plan.
        layers: What the plan does with each layer.
        title: Title, such as the name of the model and the device.

    Raises:
        MissingDependency: Matplotlib is not installed.
    """
    plot = empty_figure()
    memory, activity, shares = plot.subplots(3, height_ratios=(14, 1, 1))
    activity.sharex(memory)
    _draw_memory(memory, plan)
    _draw_activity(activity, plan)
    _draw_shares(shares, layers)
    plot.suptitle(title, fontsize="medium")
    return plot


def _draw_memory(axes: Any, plan: MemoryPlan) -> None:
    """Draw bytes over time with and without the plan, the budget, and both peaks."""
    schedule = unplanned(plan.step)
    plain = simulate(plan.step, schedule)
    unit, name = _unit(max(plain.peak_bytes, plan.budget_bytes))
    last_ms = max(plain.step_us, plan.simulation.step_us) / 1e3
    for simulation, color, label, above in (
        (plain, UNPLANNED, "without a plan", 3),
        (plan.simulation, PLANNED, "with the plan", -12),
    ):
        times, used = _curve(simulation, unit)
        axes.fill_between(times, used, step="post", color=color, alpha=0.15, linewidth=0)
        time_ms = f"{label}: {simulation.step_us / 1e3:.1f} ms"
        axes.step(times, used, where="post", color=color, linewidth=1, label=time_ms)
        peak_index = used.index(max(used))
        axes.plot([times[peak_index]], [used[peak_index]], "o", color=color, markersize=4)
        late = times[peak_index] > 0.8 * last_ms
        axes.annotate(
            f"{used[peak_index]:.2f} {name}",
            (times[peak_index], used[peak_index]),
            (-6 if late else 6, above),
            textcoords="offset points",
            horizontalalignment="right" if late else "left",
            fontsize="small",
        )
    label = f"budget: {plan.budget_bytes / unit:.2f} {name}"
    axes.axhline(plan.budget_bytes / unit, color=BUDGET, linestyle="--", linewidth=1, label=label)
    axes.set_ylabel(f"memory, {name}")
    axes.margins(y=0.08)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.01 * last_ms)
    axes.tick_params(labelbottom=False)
    axes.grid(visible=True, alpha=0.2)
    _legend_above(axes)


def _legend_above(axes: Any) -> None:
    """Place the legend in one row above the axes."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.5,
        fontsize="small",
    )


def _curve(simulation: Simulation, unit: float) -> tuple[list[float], list[float]]:
    """Return the starts of actions in milliseconds and the memory from there on."""
    starts_us = itertools.chain([0.0], simulation.ends_us, [simulation.step_us])
    times = [start / 1e3 for start in starts_us]
    used = [size_bytes / unit for size_bytes in simulation.bytes_during]
    return times, [*used, used[-1], used[-1]]


def _draw_activity(axes: Any, plan: MemoryPlan) -> None:
    """Draw what the compute stream does over time; neighbouring intervals of a kind are one bar."""
    spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in ACTIVITY}
    started, now_ms = 0, 0.0
    for action, end_us in zip(plan.schedule, plan.simulation.ends_us, strict=True):
        end_ms = end_us / 1e3
        if isinstance(action, Compute):
            first = action.operation == started
            started += first
            run_ms = min(end_ms - now_ms, plan.step.operations[action.operation].time_us / 1e3)
            _extend(spans["wait for copies"], now_ms, end_ms - run_ms)
            _extend(spans["first run" if first else "recomputation"], end_ms - run_ms, end_ms)
        else:
            _extend(spans["wait for copies"], now_ms, end_ms)
        now_ms = end_ms
    _extend(spans["wait for copies"], now_ms, plan.simulation.step_us / 1e3)
    for kind, color in ACTIVITY.items():
        label = f"{kind}: {sum(length for _, length in spans[kind]):.1f} ms"
        axes.broken_barh(spans[kind], (0, 1), facecolors=color, label=label, linewidth=0)
    axes.set(ylim=(0, 1), yticks=[])
    axes.set_xlabel("time in the step, ms")
    _legend_above(axes)


def _extend(spans: list[tuple[float, float]], start: float, end: float) -> None:
    """Append an interval as start and length; an interval that continues the last one lengthens it."""
    if end - start <= 1e-9:
        return
    if spans and abs(sum(spans[-1]) - start) <= 1e-9:
        spans[-1] = (spans[-1][0], end - spans[-1][0])
    else:
        spans.append((start, end - start))


def _draw_shares(axes: Any, layers: Sequence[LayerPlan]) -> None:
    """Draw the bytes of saved tensors that are kept, recomputed and swapped, as one bar."""
    sizes = {
        "kept": sum(layer.kept_bytes for layer in layers),
        "recomputed": sum(layer.recomputed_bytes for layer in layers),
        "swapped": sum(layer.swapped_bytes for layer in layers),
    }
    total = sum(sizes.values())
    unit, name = _unit(total)
    offset = 0.0
    for kind, size_bytes in sizes.items():
        share = size_bytes / total if total else 0.0
        label = f"{kind}: {size_bytes / unit:.2f} {name}, {share:.0%}"
        axes.barh(0, share, left=offset, color=SHARES[kind], label=label)
        offset += share
    axes.set(xlim=(0, 1), yticks=[], xticks=[])
    axes.set_xlabel("share of the bytes saved for later operations")
    _legend_above(axes)


def _unit(size_bytes: int) -> tuple[float, str]:
    """Return the largest unit that is not larger than the size."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if size_bytes >= unit[0]), (1.0, "bytes"))
