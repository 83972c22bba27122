"""Parts of charts: axes with ticks, texts and the frame. Colours come from the style sheet of the page."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from tunebench._console import printable
from tunebench._figure import significant

__all__ = [
    "Axis",
    "Box",
    "linked",
    "log_axis",
    "rate_text",
    "safe",
    "svg",
    "text",
    "time_unit",
    "titled",
    "trial_axis",
    "trial_ticks",
]

MARGIN = 1.06
"""Ratio of the ends of a logarithmic axis to the extreme values."""


def safe(text: str) -> str:
    r"""Return a text for a page: characters that HTML would interpret, and control characters, are escaped.

    Names come from imported files and databases. A control character that reverses the direction of writing
    would make a name look like another one.
    """
    return html.escape(printable(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Size of a chart and of the margins around its plot, in pixels."""

    width: float = 760
    height: float = 340
    left: float = 78
    right: float = 16
    top: float = 14
    bottom: float = 44

    @property
    def x_end(self) -> float:
        """Right end of the plot."""
        return self.width - self.right

    @property
    def y_end(self) -> float:
        """Lower end of the plot."""
        return self.height - self.bottom

    def frame(self, *, x: str, y: str) -> str:
        """Return the titles of both axes.

        Args:
            x: Title of the horizontal axis.
            y: Title of the vertical axis.
        """
        middle = (self.top + self.y_end) / 2
        return (
            text((self.left + self.x_end) / 2, self.height - 6, x)
            + f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">'
            f"{safe(y)}</text>"
        )

    def horizontal_grid(self, axis: Axis, scale: float = 1.0) -> str:
        """Return a grid line and a label for each tick of the vertical axis.

        Args:
            axis: The vertical axis.
            scale: Factor of the labels, such as 1e-3 for milliseconds of an axis in microseconds.
        """
        return "".join(
            f'<path class="grid" d="M{self.left} {axis(tick):.1f}H{self.x_end}"/>'
            + text(self.left - 8, axis(tick) + 4, significant(tick * scale), "end")
            for tick in axis.ticks()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A logarithmic or linear axis.

    Attributes:
        low: Value at the start.
        high: Value at the end; above `low`.
        start: Place of `low`, in pixels.
        end: Place of `high`, in pixels.
        log: Whether the axis is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def __call__(self, value: float) -> float:
        """Return the place of a value, in pixels."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values, three to ten of them."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def log_axis(values: list[float], start: float, end: float) -> Axis:
    """Return a logarithmic axis with a margin around some positive values.

    Args:
        values: At least one value.
        start: Place of the lowest one, in pixels.
        end: Place of the highest one.
    """
    return Axis(low=min(values) / MARGIN, high=max(values) * MARGIN, start=start, end=end)


def svg(box: Box, name: str, *parts: str) -> str:
    """Return a chart.

    Args:
        box: Its size.
        name: Accessible name.
        parts: Elements of SVG.
    """
    head = f'<svg viewBox="0 0 {box.width:.0f} {box.height:.0f}" role="img" aria-label="{safe(name)}">'
    return "".join((head, *parts, "</svg>"))


def text(x: float, y: float, content: str, anchor: str = "middle") -> str:
    """Return a text, escaped.

    Args:
        x: Place, in pixels.
        y: Base line, in pixels.
        content: Plain text.
        anchor: Which part of the text is at `x`: ``start``, ``middle`` or ``end``.
    """
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(content)}</text>'


def titled(element: str, attributes: str, title: str) -> str:
    """Return an element with a text that a pointer on it shows.

    Args:
        element: Name of the element.
        attributes: Its attributes.
        title: Plain text.
    """
    return f"<{element} {attributes}><title>{safe(title)}</title></{element}>"


def linked(element: str, href: str) -> str:
    """Return an element that leads to a URL; the tab key skips it, because a chart may have thousands.

    Args:
        element: The element.
        href: The URL.
    """
    return f'<a href="{safe(href)}" tabindex="-1">{element}</a>'


def rate_text(gflop_s: float) -> str:
    """Return a rate with a readable unit, from 1e9 FLOPs per second."""
    return f"{significant(gflop_s / 1e3)} TFLOP/s" if gflop_s >= 1e4 else f"{significant(gflop_s)} GFLOP/s"


def time_unit(us: float) -> tuple[str, float]:
    """Return the name of a unit that suits a time in microseconds, and the factor to it."""
    if us >= 1e7:
        return "seconds", 1e-6
    return ("milliseconds", 1e-3) if us >= 1e4 else ("microseconds", 1.0)


def trial_axis(box: Box, trials: int) -> Axis:
    """Return the horizontal axis of a number of trials."""
    return Axis(low=0.5, high=max(1, trials) + 0.5, start=box.left, end=box.x_end, log=False)


def trial_ticks(box: Box, x: Axis, trials: int) -> str:
    """Return the numbers of some trials below a horizontal axis."""
    step = max(1, trials // 6)
    size = 10 ** int(math.log10(step))
    step = next(size * digit for digit in (1, 2, 5, 10) if size * digit >= step)
    return "".join(text(x(trial), box.y_end + 16, str(trial)) for trial in range(step, trials + 1, step))


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, (last - first) // 8)
    if step > 1:
        return [10.0**e for e in range(first, last + 1, step) if low <= 10.0**e <= high]
    ticks: list[float] = []
    for digits in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        ticks = [d * 10.0**e for e in range(first, last + 1) for d in digits if low <= d * 10.0**e <= high]
        if len(ticks) >= 3:
            return ticks
    return _linear_ticks(low, high)


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * digit for digit in (1, 2, 5, 10) if size * digit >= rough)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
