"""Roofline as SVG: ceilings of the device, and the rates of some times of one workload below them."""

from __future__ import annotations

from collections.abc import Mapping

from tunebench._figure import significant
from tunebench.explanation.roofline import Ceiling, Roofline
from tunebench.report.svg import Axis, Box, rate_text, svg, text, titled

__all__ = ["roofline_chart"]

AROUND = 8.0
"""Ratio of the ends of the axis of arithmetic intensity to the values that it must show."""
LABEL_ROW = 14
"""Least distance of two labels, in pixels."""


def roofline_chart(roof: Roofline, rates: Mapping[str, tuple[float, str]], *, name: str) -> str:
    """Return a roofline; both axes are logarithmic.

    Args:
        roof: The roofline.
        rates: Rate in 1e9 FLOPs per second and class of the point, by label.
        name: Accessible name of the chart.
    """
    box = Box(height=320, left=84, right=190)
    balances = [ceiling.balance for ceiling in roof.ceilings]
    left, right = min(*balances, roof.intensity) / AROUND, max(*balances, roof.intensity) * AROUND
    x = Axis(low=left, high=right, start=box.left, end=box.x_end)
    highest = max(ceiling.gflop_s for ceiling in roof.ceilings)
    lowest = min([roof.attainable_gflop_s, *(rate for rate, _ in rates.values())])
    y = Axis(low=lowest / 6, high=highest * 2, start=box.y_end, end=box.top)
    unit, scale = ("TFLOP/s", 1e-3) if highest >= 1e4 else ("GFLOP/s", 1.0)
    parts = [box.horizontal_grid(y, scale), box.frame(x="arithmetic intensity, FLOP/byte", y=unit)]
    parts += [text(x(tick), box.y_end + 18, significant(tick)) for tick in x.ticks()]
    start = max(left, y.low / roof.dram_gb_s)
    top = highest / roof.dram_gb_s
    slope = f"M{x(start):.1f} {y(start * roof.dram_gb_s):.1f}L{x(top):.1f} {y(highest):.1f}"
    parts.append(titled("path", f'class="memory" d="{slope}"', f"memory: {significant(roof.dram_gb_s)} GB/s"))
    parts += [_ceiling(box, x, y, ceiling) for ceiling in roof.ceilings]
    intensity_x = x(roof.intensity)
    parts.append(f'<path class="grid" d="M{intensity_x:.1f} {box.top}V{box.y_end}"/>')
    attainable = f"attainable: {rate_text(roof.attainable_gflop_s)}"
    dot = f'class="attainable" cx="{intensity_x:.1f}" cy="{y(roof.attainable_gflop_s):.1f}" r="5"'
    parts.append(titled("circle", dot, attainable))
    lowest_label = 0.0
    for label, (rate, style) in sorted(rates.items(), key=lambda item: -item[1][0]):
        at = f'class="{style}" cx="{intensity_x:.1f}" cy="{y(rate):.1f}" r="5"'
        parts.append(titled("circle", at, f"{label}: {rate_text(rate)}"))
        lowest_label = max(y(rate) + 4, lowest_label + LABEL_ROW)
        parts.append(text(intensity_x + 10, lowest_label, label, "start"))
    return svg(box, name, *parts)


def _ceiling(box: Box, x: Axis, y: Axis, ceiling: Ceiling) -> str:
    label = f"{ceiling.pipe} in {ceiling.dtype}"
    line = f'class="ceiling" d="M{x(ceiling.balance):.1f} {y(ceiling.gflop_s):.1f}H{box.x_end}"'
    return titled("path", line, f"{label}: {rate_text(ceiling.gflop_s)}") + text(
        box.x_end + 6, y(ceiling.gflop_s) + 4, label, "start"
    )
