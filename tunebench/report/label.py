"""Labels in the margin of a chart, beside the lines that they name, none of which overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunebench.report.svg import safe, titled

__all__ = ["FONT_PX", "Label", "PlacedLabel", "label_svg", "place_labels", "spread"]

FONT_PX = 14.0
"""Largest size of the font of a label, in pixels of the chart; the style sheet uses it on narrow screens."""
LINE_PX, GAP_PX = 15.0, 3.0
"""Height of a line of text, and least distance of two labels."""
GLYPH_EM = 0.62
"""Width of a character over the size of the font: an upper estimate of the mean over a text."""
LEADER_PX = 12.0
"""Distance of a label from the plot, which a leader line crosses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label: a name above a value.

    Attributes:
        name: First line.
        value: Second line; empty for none.
        y: Place of the line that it names, in pixels.
        style: Class of the leader line.
        rank: Order of labels with the same place, from above.
        is_outside: Whether the line is outside of the plot, so that there is no leader line.
    """

    name: str
    value: str
    y: float
    style: str
    rank: float = 0.0
    is_outside: bool = False

    @property
    def height(self) -> float:
        """Height with the distance to the next label, in pixels."""
        return LINE_PX * (2 if self.value else 1) + GAP_PX


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLabel:
    """A label with the box of its text, in pixels; `name` fits into the width of the box."""

    label: Label
    name: str
    left: float
    top: float
    width: float

    @property
    def bottom(self) -> float:
        """Lower end of the text."""
        return self.top + self.label.height - GAP_PX


def place_labels(
    labels: Sequence[Label], *, left: float, width: float, top: float, bottom: float
) -> list[PlacedLabel]:
    """Return labels in a column, each as near to its line as the others allow, without overlaps.

    Args:
        labels: The labels, the most important first: where the column is too short, later ones are left out.
        left: Left end of the column, in pixels.
        width: Width of the column; longer names are cut.
        top: Upper end of the column.
        bottom: Lower end of the column.
    """
    shown, room = [], bottom - top
    for label in labels:
        if label.height <= room:
            room -= label.height
            shown.append(label)
    shown.sort(key=lambda label: (label.y, label.rank))
    heights = [label.height for label in shown]
    centres = spread([label.y for label in shown], heights, low=top, high=bottom)
    return [
        PlacedLabel(
            label=label,
            name=_fitted(label.name, width),
            left=left,
            top=centre - label.height / 2 + GAP_PX / 2,
            width=width,
        )
        for label, centre in zip(shown, centres, strict=True)
    ]


def spread(centers: Sequence[float], heights: Sequence[float], *, low: float, high: float) -> list[float]:
    """Return centres of boxes that touch at most, with the least sum of squared distances from wanted ones.

    Without the heights of the boxes above it, the place of a box must not be above that of the box before.
    This is an isotonic regression, which pooling adjacent violators solves.

    Args:
        centers: Wanted centres, in ascending order.
        heights: Height of each box; their sum is at most `high - low`.
        low: Lower limit of the boxes.
        high: Upper limit of the boxes.

    Returns:
        The centres, in the order of `centers`.
    """
    offsets, above = [], 0.0
    for height in heights:
        offsets.append(above + height / 2)
        above += height
    pools: list[tuple[float, int]] = []  # mean and number of places
    for centre, offset in zip(centers, offsets, strict=True):
        mean, count = centre - offset, 1
        while pools and pools[-1][0] >= mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    tops = [min(max(mean, low), high - above) for mean, count in pools for _ in range(count)]
    return [top + offset for top, offset in zip(tops, offsets, strict=True)]


def label_svg(placed: Iterable[PlacedLabel]) -> str:
    """Return labels and their leader lines as SVG."""
    return "".join(map(_svg, placed))


def _svg(placed: PlacedLabel) -> str:
    label, middle = placed.label, (placed.top + placed.bottom) / 2
    base = placed.top + LINE_PX - 4
    value = f'<tspan class="value" x="{placed.left:.1f}" dy="{LINE_PX}">{safe(label.value)}</tspan>'
    lines = f'<tspan x="{placed.left:.1f}">{safe(placed.name)}</tspan>{value * bool(label.value)}'
    marked = titled(
        "g", f'class="label" data-y="{label.y:.1f}"', f"{label.name} {label.value}".strip()
    ).removesuffix("</g>")
    marked += f'<text y="{base:.1f}">{lines}</text></g>'
    if label.is_outside:
        return marked
    start = placed.left - LEADER_PX
    leader = f"M{start:.1f} {label.y:.1f}L{placed.left - 3:.1f} {middle:.1f}"
    return f'<path class="leader {label.style}" d="{leader}"/>{marked}'


def _fitted(name: str, width: float) -> str:
    """Return a name, cut so that it fits into a width in pixels."""
    longest = max(2, int(width / (GLYPH_EM * FONT_PX)))
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
