"""Fronts of time, memory and cost, and a plot of them: `cost_front`, `draw_fronts`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench._plot import empty_figure, save_figure
from tunebench.errors import InputError
from tunebench.training.cluster.layer_time import LayerTimes
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.cluster.search import ClusterSearch, PricedPlan
from tunebench.training.cluster.space import TrainingJob

if TYPE_CHECKING:
    from tunebench.training.cluster.answer import ClusterAnswer

__all__ = ["cost_front", "draw_fronts"]

WIDTH_INCHES, HEIGHT_INCHES = 6.0, 4.0
"""Size of the plot of one front."""


def cost_front(
    job: TrainingJob,
    machine: TrainingCluster,
    *,
    fixed: Mapping[str, str] | None = None,
    layers: LayerTimes | None = None,
    watcher: Callable[[str], None] = lambda message: None,
) -> tuple[PricedPlan, ...]:
    """Return the plans for which no other has both a shorter step and fewer device hours, fastest first.

    With a number of nodes, the fastest plan has the fewest device hours, so one search per number is enough.
    The numbers are the divisors of the nodes of the cluster.

    Args:
        job: The network and its batch.
        machine: The cluster.
        fixed: Value of each fixed parameter as text.
        layers: Times of the layers that another search has predicted; None for new ones.
        watcher: Receives the phase.
    """
    fixed_values, nodes = dict(fixed or {}), machine.links.nodes
    counts = [count for count in range(1, nodes + 1) if nodes % count == 0]
    if "nodes" in fixed_values:
        counts = [int(fixed_values["nodes"])]
    front: list[PricedPlan] = []
    for count in counts:
        watcher(f"the fastest plan on {count} of {nodes} nodes")
        try:
            # On a fixed number of nodes, cost ranks plans as time does. The objective is needed because only
            # with it a plan may leave nodes unused.
            search = ClusterSearch(
                job, machine, fixed={**fixed_values, "nodes": str(count)}, objective="cost", layers=layers
            )
        except InputError:  # the batch, or a fixed value, does not divide among so many nodes
            continue
        front += search.run(1, front=False).best
    front.sort(key=lambda priced: (priced.step.time_us, priced.device_hours))
    # Fastest first: a point is on the front only if it is cheaper than all points before it.
    least, frontier = float("inf"), []
    for priced in front:
        if priced.device_hours < least:
            least = priced.device_hours
            frontier.append(priced)
    return tuple(frontier)


def draw_fronts(answer: ClusterAnswer, path: str | Path) -> None:
    """Plot step time against memory, and against cost if the answer has that front.

    Args:
        answer: The answer, with plans that fit.
        path: File to write; its suffix selects the format.

    Raises:
        MissingDependency: Matplotlib is not installed.
        InputError: nothing fits, or Matplotlib does not support the format.
        OSError: The file cannot be written.
    """
    if answer.best is None:
        raise InputError("no plan fits the memory, so there is no front to plot: run without --plot")
    costs = answer.cost_front
    figure = empty_figure()
    figure.set_size_inches(WIDTH_INCHES * (1 + bool(costs)), HEIGHT_INCHES)
    axes = figure.subplots(1, 1 + bool(costs), squeeze=False)[0]
    front = answer.result.front
    _draw_front(
        axes[0], [(priced_plan.memory.needed / 1e9, priced_plan.step.time_us / 1e6) for priced_plan in front]
    )
    axes[0].axvline(answer.machine.limit_bytes / 1e9, color="tab:red", linestyle="--", label="limit")
    axes[0].set_xlabel("memory of the fullest device, GB")
    axes[0].legend(frameon=False)
    if costs:
        priced = costs[0].cost is not None
        values = [
            priced_plan.cost if priced_plan.cost is not None else priced_plan.device_hours
            for priced_plan in costs
        ]
        points = [
            (value, priced_plan.step.time_us / 1e6) for value, priced_plan in zip(values, costs, strict=True)
        ]
        _draw_front(axes[1], points)
        for point, priced_plan in zip(points, costs, strict=True):
            axes[1].annotate(f"{priced_plan.plan.devices}", point, xytext=(4, 4), textcoords="offset points")
        unit = "price" if priced else "device hours"
        axes[1].set_xlabel(f"{unit} of a step (numbers: devices)")
    figure.suptitle(f"{answer.job.network.name} on {answer.machine.name}", fontsize="medium")
    save_figure(figure, path)


def _draw_front(axes: Any, points: list[tuple[float, float]]) -> None:
    """Draw a staircase: from each point to the next one, the time of the first holds."""
    ordered = sorted(points)
    axes.step(*zip(*ordered, strict=True), where="post", color="tab:blue", linewidth=1.2)
    axes.plot(*zip(*ordered, strict=True), "o", color="tab:blue", markersize=4)
    axes.set_ylabel("time of a step, s")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
