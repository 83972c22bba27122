"""`tunebench explain`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench._figure import significant
from tunebench.cli._choice import ConfigRequest, in_words
from tunebench.cli._file import require_plot
from tunebench.cli._option import Json
from tunebench.cli._option_group import grouped_options
from tunebench.cli._output import duration, emit, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.explanation import Explanation

__all__ = ["command"]

_BELOW_ROOFLINE = {
    "math": "the algorithm needs fewer operations than the textbook's",
    "memory": "a cache serves part of the bytes",
}
"""Why a time may be shorter than the roofline time, by what limits the roofline."""


@grouped_options("asked", ConfigRequest)
def command(
    asked: ConfigRequest,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also plot the roofline to this file (.png, .svg, .pdf). Needs the extra plot.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain the time of a configuration: its limiting resource, and changes that would save time.

    It explains the given configuration, or else the best known one, or else the default. Nothing is compiled
    or run, and the device does not have to be present. Gains are predictions.
    """
    from tunebench.explanation import explain

    require_plot(plot)
    variant = asked.variant_key()
    explanation = explain(asked.workload, asked.target(), variant=variant, config=asked.config, db=asked.db)
    try:
        if plot is not None:
            from tunebench.explanation.plot import draw

            draw(explanation, plot)
    finally:  # a disk that is full must not lose the explanation
        emit(as_json, explanation.to_json(), lambda to: _render(explanation, to))


def _render(explanation: Explanation, to: Console) -> None:
    choice = explanation.choice
    to.print(f"{choice.workload} on {choice.device.key}", soft_wrap=True)
    to.print(f"  {in_words(choice)}", soft_wrap=True)
    for title, lines in (
        ("Workload", _workload(explanation)),
        ("Time", _times(explanation)),
        ("Configuration", _configuration(explanation)),
    ):
        to.print(table(title, "", rows=lines))
    floors = (
        (name, duration(us), f"{us / explanation.bound.us:.0%}")
        for name, us in explanation.bound.floors.items()
    )
    to.print(table("Resource", ">lower bound", ">share of the highest", rows=floors))
    if explanation.advice:
        rows = (
            (f"{a.gain:.2f}x", duration(a.before_us), duration(a.after_us), a.best.variant, a.change.text)
            for a in explanation.advice
        )
        to.print(table(">predicted speedup", ">before", ">after", "fastest variant", "advice", rows=rows))
    else:
        to.print("No change that was tried is predicted to save time.")
    for reason in explanation.refused.values():
        to.print(f"not supported here: {reason}", soft_wrap=True)


def _workload(explanation: Explanation) -> Iterator[tuple[str, str]]:
    roof = explanation.roofline
    yield "operation", explanation.category or "not stated by the operator"
    traffic_mb = significant(roof.traffic.total_bytes / 1e6)
    yield "work", f"{significant(roof.flops / 1e9)} GFLOP, {traffic_mb} MB of memory traffic"
    by = f" ({roof.factor:.2f}x the balance point)" if roof.factor is not None else ""
    yield (
        "arithmetic intensity",
        f"{significant(roof.intensity)} FLOP/byte: {roof.limit} limited on the {roof.used.pipe}{by}",
    )
    for ceiling in roof.ceilings:
        peak = f"{_rate(ceiling.gflop_s)} in {ceiling.dtype}"
        yield ceiling.pipe, f"{peak}, balanced with memory at {significant(ceiling.balance)} FLOP/byte"
    for alignment in explanation.alignments:
        line = f"rows of {alignment.line} {alignment.dtype}"
        if not alignment.full:
            prefix = f"{alignment.dimension}: " if alignment.dimension else ""
            line += f"; 16 bytes need {prefix}a multiple of {alignment.wanted}"
        yield f"alignment of {alignment.tensor}", f"{alignment.aligned_bytes} bytes ({line})"


def _times(explanation: Explanation) -> Iterator[tuple[str, str]]:
    roof = explanation.roofline
    yield "roofline", f"{duration(roof.us)}, {_rate(roof.attainable_gflop_s)}"
    label = "lower bound (assumed rates)" if explanation.bound.assumed else "lower bound"
    yield (
        label,
        f"{duration(explanation.bound.us)}, {_rate(explanation.shares(explanation.bound.us).gflop_s)}",
    )
    yield "predicted", _with_shares(explanation, explanation.predicted_us)
    if explanation.fusing is not None:
        fused = explanation.fusing
        yield (
            "fusion",
            f"{fused.gain:.2f}x predicted speedup: {duration(fused.whole.us)} fused, "
            f"{duration(fused.parts_us)} as {len(fused.parts)} separate kernels",
        )
    from tunebench.answer import HERE

    if explanation.measured is not None:
        source = f"({explanation.measured.how}, {explanation.measured.cache} caches)"
        is_local = explanation.measured.how in HERE
        us = explanation.measured.median_us
        yield "measured", f"{_with_shares(explanation, us) if is_local else duration(us)} {source}"
        if is_local and us > explanation.predicted_us:
            yield (
                "unexplained",
                f"{duration(us - explanation.predicted_us)}: measured minus predicted; limits and advice "
                "below are those of the predicted time",
            )


def _with_shares(explanation: Explanation, us: float) -> str:
    shares = explanation.shares(us)
    if explanation.bound.assumed:
        return f"{duration(us)}, {_rate(shares.gflop_s)}"
    why = f" ({_BELOW_ROOFLINE[explanation.roofline.limit]})" if shares.of_roofline > 1 else ""
    return (
        f"{duration(us)}, {_rate(shares.gflop_s)}: {shares.of_bound:.0%} of the rate at the lower bound, "
        f"{shares.of_roofline:.0%} of the roofline{why}"
    )


def _configuration(explanation: Explanation) -> Iterator[tuple[str, str]]:
    yield "limit", _limit(explanation)
    if explanation.tiles:
        cuts = ", ".join(
            f"{t.dimension} {t.extent} in tiles of {t.tile} ({t.used:.1%})" for t in explanation.tiles
        )
        yield "tile quantization", f"{explanation.tiles_used:.1%} of tile work is useful: {cuts}"
    if explanation.waves is not None:
        waves = explanation.waves
        yield (
            "wave quantization",
            f"{waves.used:.1%} of SM time is in use: {waves.blocks} blocks on {waves.sm_count} SMs, "
            f"{waves.count:.2f} waves of up to {waves.blocks_per_sm} blocks per SM, "
            f"{waves.idle_sms} SMs idle in the last wave",
        )
    if explanation.block is not None:
        block = explanation.block
        yield (
            "block",
            f"{block.threads} threads, at least {block.registers} registers per thread, "
            f"at least {block.smem_bytes} bytes of shared memory",
        )
        if block.occupancy is not None:
            occupancy = block.occupancy
            by_each = ", ".join(f"{name} {blocks}" for name, blocks in occupancy.limits.items())
            yield (
                "occupancy",
                f"at most {occupancy.blocks} blocks, {occupancy.warps} of {occupancy.most_warps} warps per "
                f"SM ({occupancy.warps / occupancy.most_warps:.0%}), "
                f"limited by {', '.join(occupancy.limited_by)} (blocks allowed by {by_each})",
            )


def _limit(explanation: Explanation) -> str:
    limit, floors, waves = explanation.limit, explanation.bound.floors, explanation.waves
    if limit.cause == "launch":
        reason = f"launch overhead about {duration(limit.launch_us)}, work {duration(limit.work_us)}"
    elif limit.cause == "few blocks" and waves is not None:
        reason = f"{waves.blocks} blocks on {waves.sm_count} SMs"
    else:
        reason = f"{limit.resource} takes at least {duration(explanation.bound.us)}"
        reason += f", {limit.against} {duration(floors[limit.against])}" if limit.against is not None else ""
    by = f" (ratio {limit.factor:.2f})" if limit.factor is not None else ""
    return f"{limit.kind} limited: {reason}{by}"


def _rate(gflop_s: float) -> str:
    return f"{significant(gflop_s / 1e3)} TFLOP/s" if gflop_s >= 1e3 else f"{significant(gflop_s)} GFLOP/s"
