"""Plot of a simulated pipeline: what each rank runs over time, and what it holds."""

from __future__ import annotations

import html
import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench._figure import significant
from tunebench._plot import empty_figure, save_figure
from tunebench.errors import InputError
from tunebench.training.schedules import ActionKind, MemoryTimeline, PipelineSimulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "figure"]

COLORS = {
    ActionKind.FORWARD: ("#7fb3e6", "forward"),
    ActionKind.BACKWARD: ("#f2a65a", "backward"),
    ActionKind.INPUT_GRADIENT: ("#f2a65a", "input gradient"),
    ActionKind.WEIGHT_GRADIENT: ("#7bc47f", "weight gradient"),
    ActionKind.EVICT: ("#b03a8c", "eviction"),
    ActionKind.LOAD: ("#5b3a9e", "load"),
}
"""Colour and name of each kind of action. Numbers on the first four are black."""

EDGE, SECOND_CHUNK = "white", 0.62
"""Colour between bars, and opacity of passes on a rank's later stages."""

PASS, COPY = (0.0, 0.74), (0.78, 0.18)
"""Lower end and height of passes and copies in the row of a rank."""
THINNEST = 0.7
"""Least width of a copy, in points."""

WIDTH_INCHES, ROW_INCHES, MEMORY_INCHES = 14.0, 0.42, 2.6
MOST_INCHES = 30.0
"""Greatest height of a figure."""
MOST_TITLES = 20_000
"""Most bars of a page in HTML: each has a title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """A bar in the row of a rank."""

    rank: int
    kind: ActionKind
    stage: int
    microbatch: int
    start_us: float
    end_us: float
    note: str = ""

    @property
    def title(self) -> str:
        """Tooltip of the bar."""
        times = f"{self.start_us / 1e3:.3f} to {self.end_us / 1e3:.3f} ms"
        return (
            f"rank {self.rank}: {COLORS[self.kind][1]} of micro-batch {self.microbatch}, stage {self.stage}"
            f"{self.note}, {times}"
        )


def draw(
    simulation: PipelineSimulation, path: str | Path, *, title: str = "", limit_bytes: int | None = None
) -> None:
    """Write a plot of a pipeline to a file: .html for one page without other files, else an image.

    Args:
        simulation: The simulation of a schedule.
        path: File to write; its suffix selects the format.
        title: Title, such as the name of the model.
        limit_bytes: Memory of each rank, drawn as a line.

    Raises:
        MissingDependency: Matplotlib is not installed.
        InputError: Matplotlib does not support the format, or the page would have too many bars.
        OSError: The file cannot be written.
    """
    if Path(path).suffix != ".html":
        save_figure(figure(simulation, title=title, limit_bytes=limit_bytes), path)
        return
    bars = len(list(_bars(simulation)))
    if bars > MOST_TITLES:
        raise InputError(
            f"a page of {bars} passes and copies is too large for a browser, expected at most {MOST_TITLES}: "
            "plot fewer micro-batches, or write a trace (--trace FILE.json)"
        )
    page_figure = figure(simulation, title=title, limit_bytes=limit_bytes, titled=True)
    image = io.StringIO()
    page_figure.savefig(image, format="svg", metadata={"Date": None})
    Path(path).write_text(_page(image.getvalue(), list(_bars(simulation)), title), encoding="utf-8")


def figure(
    simulation: PipelineSimulation,
    *,
    title: str = "",
    limit_bytes: int | None = None,
    titled: bool = False,
) -> Figure:
    """Return the passes and copies of each rank over time, and below them its memory.

    Args:
        simulation: The simulation of a schedule.
        title: Title, such as the name of the model.
        limit_bytes: Memory of each rank, drawn as a line.
        titled: Whether each bar has an identifier, in the order of the passes and copies.

    Raises:
        MissingDependency: Matplotlib is not installed.
    """
    plot = empty_figure()
    rows = simulation.schedule.ranks * ROW_INCHES + 0.8
    plot.set_size_inches(WIDTH_INCHES, min(MOST_INCHES, rows + MEMORY_INCHES))
    passes, memory = plot.subplots(2, height_ratios=(rows, MEMORY_INCHES), sharex=True)
    _draw_passes(passes, simulation, titled)
    _draw_memory(memory, simulation, limit_bytes)
    plot.suptitle(title, fontsize="medium")
    return plot


# -- bars --------------------------------------------------------------------------------------------------


def _bars(simulation: PipelineSimulation) -> Iterator[_Bar]:
    """Yield the passes of each rank, then evictions and loads on both of their ranks."""
    for rank, actions in enumerate(simulation.schedule.actions):
        times = zip(simulation.starts_us[rank].tolist(), simulation.ends_us[rank].tolist(), strict=True)
        for (stage, kind, microbatch), (start_us, end_us) in zip(actions, times, strict=True):
            if kind.computes and end_us > start_us:
                yield _Bar(
                    rank=rank,
                    kind=kind,
                    stage=stage,
                    microbatch=microbatch,
                    start_us=start_us,
                    end_us=end_us,
                )
    for transfer in simulation.transfers:
        if transfer.kind not in (ActionKind.EVICT, ActionKind.LOAD):
            continue
        for rank in (transfer.source, transfer.target):
            yield _Bar(
                rank=rank,
                kind=transfer.kind,
                stage=transfer.stage,
                microbatch=transfer.microbatch,
                start_us=transfer.start_us,
                end_us=transfer.end_us,
                note=f", rank {transfer.source} to {transfer.target}",
            )


def _draw_passes(axes: Any, simulation: PipelineSimulation, titled: bool) -> None:
    """Draw one row of bars for each rank, the first rank on top."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch, Rectangle

    bars = list(_bars(simulation))
    ranks = simulation.schedule.ranks
    step_ms = simulation.step_us / 1e3 or 1.0
    corners: dict[tuple[ActionKind, bool], list[list[tuple[float, float]]]] = {}
    edge = 0.4 if _bar_points(bars, simulation) > 3 else 0.0
    for bar_index, bar in enumerate(bars):
        low, height = PASS if bar.kind.computes else COPY
        left, right, bottom = bar.start_us / 1e3, bar.end_us / 1e3, bar.rank + low
        later = bar.kind.computes and bar.stage >= ranks
        if titled:
            patch = Rectangle(
                (left, bottom),
                right - left,
                height,
                facecolor=COLORS[bar.kind][0],
                alpha=SECOND_CHUNK if later else None,
                edgecolor=EDGE if bar.kind.computes else COLORS[bar.kind][0],
                linewidth=edge if bar.kind.computes else THINNEST,
                gid=f"bar{bar_index}",
            )
            axes.add_artist(patch)
        else:
            shape = [(left, bottom), (right, bottom), (right, bottom + height), (left, bottom + height)]
            corners.setdefault((bar.kind, later), []).append(shape)
    for (kind, later), shapes in corners.items():
        collection = PolyCollection(
            shapes,
            facecolors=COLORS[kind][0],
            alpha=SECOND_CHUNK if later else None,
            edgecolors=EDGE if kind.computes else COLORS[kind][0],
            linewidths=edge if kind.computes else THINNEST,
        )
        axes.add_collection(collection, autolim=False)
    _number(axes, bars, simulation)
    kinds = [kind for kind in COLORS if any(bar.kind is kind for bar in bars)]
    handles = [Patch(color=COLORS[kind][0], label=COLORS[kind][1]) for kind in kinds]
    if simulation.schedule.stages > ranks:
        handles.append(Patch(color="0.5", alpha=SECOND_CHUNK, label="lighter: second stage of a rank"))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(handles),
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.2,
        fontsize="small",
    )
    axes.set(xlim=(0, step_ms), ylim=(ranks, -0.15), ylabel="rank")
    axes.set_yticks([rank + PASS[1] / 2 for rank in range(ranks)], [str(rank) for rank in range(ranks)])
    axes.tick_params(labelbottom=False, left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _bar_points(bars: list[_Bar], simulation: PipelineSimulation) -> float:
    """Return the width of a typical pass in points."""
    widths = sorted(bar.end_us - bar.start_us for bar in bars if bar.kind.computes)
    return widths[len(widths) // 4] / simulation.step_us * (WIDTH_INCHES - 1) * 72 if widths else 0.0


def _number(axes: Any, bars: list[_Bar], simulation: PipelineSimulation) -> None:
    """Write the micro-batch on each pass that is wide enough, large enough to read on most of them."""
    points = (WIDTH_INCHES - 1) * 72 / simulation.step_us if simulation.step_us else 0.0
    digits = len(str(simulation.schedule.microbatches - 1))
    size = needed = 0.0
    for size in (8.0, 7.0, 6.0, 5.0):
        needed = size * 0.62 * digits + 0.6
        if _bar_points(bars, simulation) >= needed:
            break
    for bar in bars:
        if bar.kind.computes and (bar.end_us - bar.start_us) * points >= needed:
            axes.text(
                (bar.start_us + bar.end_us) / 2e3,
                bar.rank + PASS[1] / 2,
                str(bar.microbatch),
                fontsize=size,
                color="black",
                horizontalalignment="center",
                verticalalignment="center_baseline",
            )


# -- memory ------------------------------------------------------------------------------------------------


def _draw_memory(axes: Any, simulation: PipelineSimulation, limit_bytes: int | None) -> None:
    """Draw the memory of each rank over time, and the limit."""
    from matplotlib import colormaps

    highest = max(max(simulation.peak_bytes), limit_bytes or 0)
    unit, name = next(
        (scale for scale in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if highest >= scale[0]), (1.0, "bytes")
    )
    ranks = simulation.schedule.ranks
    last_ms = simulation.step_us / 1e3
    for rank, timeline in enumerate(simulation.memory):
        times, used = _curve(timeline, unit)
        color = colormaps["viridis"](0.92 * rank / max(1, ranks - 1))
        label = f"{rank}: {significant(timeline.peak_bytes / unit)}"
        axes.step([*times, last_ms], [*used, used[-1]], where="post", color=color, linewidth=1.1, label=label)
    handles, labels = axes.get_legend_handles_labels()
    if ranks > 16:
        shown = sorted({round(label_index * (ranks - 1) / 15) for label_index in range(16)})
        handles, labels = [handles[rank] for rank in shown], [labels[rank] for rank in shown]
    if limit_bytes is not None:
        line = axes.axhline(limit_bytes / unit, color="tab:red", linestyle="--", linewidth=1.2)
        handles, labels = [*handles, line], [*labels, f"limit: {significant(limit_bytes / unit)}"]
    axes.legend(
        handles,
        labels,
        title=f"rank: peak, {name}",
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize="x-small",
        title_fontsize="x-small",
        handlelength=1.2,
        borderaxespad=0.4,
    )
    axes.set_ylim(0, 1.06 * highest / unit if highest else 1)
    axes.set(xlabel="time in the step, ms", ylabel=f"memory, {name}")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(timeline: MemoryTimeline, unit: float) -> tuple[list[float], list[float]]:
    """Return times in milliseconds and the memory from there on.

    Of changes at one time, the highest and the last are drawn: freeing and allocating at once is no gap.
    """
    times: list[float] = []
    used: list[float] = []
    changes = zip((timeline.times_us / 1e3).tolist(), (timeline.nbytes / unit).tolist(), strict=True)
    for time_ms, group in itertools.groupby(changes, key=lambda change: change[0]):
        values = [value for _, value in group]
        for value in dict.fromkeys((max(values), values[-1])):
            times.append(time_ms)
            used.append(value)
    return times, used


# -- HTML --------------------------------------------------------------------------------------------------


def _page(image: str, bars: list[_Bar], title: str) -> str:
    """Return a page with the image, and a title on each bar."""
    image = image[image.index("<svg") :]
    image = re.sub(
        r'<g id="bar(\d+)">',
        lambda match: f"{match[0]}<title>{html.escape(bars[int(match[1])].title)}</title>",
        image,
    )
    name = html.escape(title or "pipeline")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}</title>\n<style>\n'
        "body { margin: 0; background: white; color-scheme: light; }\n"
        "svg { width: 100%; height: auto; }\n"
        'g[id^="bar"]:hover path { stroke: black !important; stroke-width: 1.5 !important; }\n'
        f"</style>\n</head>\n<body>\n{image}</body>\n</html>\n"
    )
