"""`tunebench explain`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench.cli._option import (
    Architecture,
    ConfigText,
    Database,
    Json,
    Problem,
    Target,
    VariantFile,
    VariantName,
    target_device,
)
from tunebench.cli._output import emit, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.explanation import Explanation

__all__ = ["command"]

_BEATEN = {
    "math": "which has the textbook's operations: the algorithm takes fewer",
    "memory": "which has all bytes from memory: a cache spares it some",
}
"""Why a time may be below the roofline's, by what limits that."""


def command(
    workload: Problem,
    device: Target = None,
    arch: Architecture = None,
    variant: VariantName = None,
    variant_file: VariantFile = None,
    config: ConfigText = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the roofline into this file (.png, .svg, .pdf); needs the extra plot.",
            show_default=False,
        ),
    ] = None,
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Tell what limits a configuration, and what would take less time.

    It is the configuration asked for, the best known one, or the default. Nothing is compiled or run, and the
    device need not be here. Gains are predictions.
    """
    from tunebench.explanation import explain
    from tunebench.kernels import load_file

    loaded = load_file(variant_file).key if variant_file is not None else None
    target = target_device(device, arch)
    found = explain(workload, target, variant=variant or loaded, config=config, db=db)
    if plot is not None:
        from tunebench.explanation.plot import draw

        draw(found, plot)
    emit(as_json, found.to_json(), lambda to: _render(found, to))


def _render(found: Explanation, to: Console) -> None:
    choice = found.choice
    to.print(f"{choice.workload} on {choice.device.key}", soft_wrap=True)
    to.print(f"  {choice.variant.key} {choice.config} ({choice.why})", soft_wrap=True)
    for title, lines in (
        ("The problem", _problem(found)),
        ("Times", _times(found)),
        ("The configuration", _configuration(found)),
    ):
        to.print(table(title, "", rows=lines))
    floors = ((name, _us(us), f"{us / found.bound.us:.0%}") for name, us in found.bound.floors.items())
    to.print(table("Floors of the bound", ">at least", ">of the bound", rows=floors))
    if found.advice:
        rows = (
            (f"{a.gain:.2f}x", _us(a.before_us), _us(a.after_us), a.best.variant, a.change.text)
            for a in found.advice
        )
        to.print(table(">gain", ">from", ">to", "by", "advice (predicted)", rows=rows))
    else:
        to.print("No change that was tried is predicted to gain anything.")
    for reason in found.refused.values():
        to.print(f"not possible here: {reason}", soft_wrap=True)


def _problem(found: Explanation) -> Iterator[tuple[str, str]]:
    roof = found.roofline
    yield "operation", found.category or "of a kind that its operator does not tell"
    yield "work", f"{roof.flops / 1e9:.4g} GFLOP, {roof.traffic.total_bytes / 1e6:.4g} MB"
    by = f" by {roof.factor:.2f}" if roof.factor is not None else ""
    yield (
        "arithmetic intensity",
        f"{roof.intensity:.4g} FLOP/byte: {roof.limit} limited{by} on the {roof.used.pipe}",
    )
    for ceiling in roof.ceilings:
        peak = f"{_rate(ceiling.gflop_s)} in {ceiling.dtype}"
        yield ceiling.pipe, f"{peak}, in balance with memory at {ceiling.balance:.4g} FLOP/byte"
    for alignment in found.alignments:
        line = f"lines of {alignment.line} {alignment.dtype}"
        if alignment.full:
            yield f"alignment of {alignment.tensor}", f"16 bytes ({line})"
        else:
            of = f" of {alignment.dimension}" if alignment.dimension else ""
            wanted = f"16 bytes want a multiple of {alignment.wanted}{of}"
            yield f"alignment of {alignment.tensor}", f"{alignment.aligned_bytes} bytes ({line}; {wanted})"


def _times(found: Explanation) -> Iterator[tuple[str, str]]:
    roof, label = found.roofline, "bound (rates assumed)" if found.bound.assumed else "bound"
    yield "roofline", f"{_us(roof.us)}, {_rate(roof.attainable_gflop_s)}"
    yield label, f"{_us(found.bound.us)}, {_rate(found.shares(found.bound.us).gflop_s)}"
    yield "predicted", _with_shares(found, found.predicted_us)
    if found.fusing is not None:
        fused = found.fusing
        yield (
            "fusing",
            f"{fused.gain:.2f}x: predicted are {_us(fused.whole.us)}, "
            f"and {_us(fused.parts_us)} for {len(fused.parts)} kernels by themselves",
        )
    if found.measured is not None:
        known = f"({found.measured.how}, {found.measured.cache} caches)"
        here = found.measured.how == "measured here"
        us = found.measured.median_us
        yield "measured", f"{_with_shares(found, us) if here else _us(us)} {known}"


def _with_shares(found: Explanation, us: float) -> str:
    shares = found.shares(us)
    beaten = f" ({_BEATEN[found.roofline.limit]})" if shares.of_roofline > 1 else ""
    return (
        f"{_us(us)}, {_rate(shares.gflop_s)}: {shares.of_bound:.0%} of the bound, "
        f"{shares.of_roofline:.0%} of the roofline{beaten}"
    )


def _configuration(found: Explanation) -> Iterator[tuple[str, str]]:
    yield "limit", _limit(found)
    if found.tiles:
        cuts = ", ".join(f"{t.dimension} {t.extent} by {t.tile} ({t.used:.1%})" for t in found.tiles)
        yield "tile quantization", f"{found.tiles_used:.1%} of the tiles is inside: {cuts}"
    if found.waves is not None:
        waves = found.waves
        yield (
            "wave quantization",
            f"{waves.used:.1%} of the SMs' time is used: {waves.blocks} blocks on {waves.sm_count} SMs, "
            f"{waves.count:.2f} waves of up to {waves.blocks_per_sm} a SM, "
            f"the last leaves {waves.idle_sms} SMs idle",
        )
    if found.block is not None:
        block = found.block
        yield (
            "block",
            f"{block.threads} threads, at least {block.registers} registers each, "
            f"at least {block.smem_bytes} bytes of shared memory",
        )
        if block.occupancy is not None:
            held = block.occupancy
            by_each = ", ".join(f"{name} {blocks}" for name, blocks in held.limits.items())
            yield (
                "occupancy",
                f"at most {held.blocks} blocks, {held.warps} of {held.most_warps} warps "
                f"({held.warps / held.most_warps:.0%}), limited by {', '.join(held.limited_by)} "
                f"(blocks that each allows: {by_each})",
            )


def _limit(found: Explanation) -> str:
    limit, floors, waves = found.limit, found.bound.floors, found.waves
    by = f" by {limit.factor:.2f}" if limit.factor is not None else ""
    if limit.cause == "launch":
        reason = f"launching takes about {_us(limit.launch_us)}, working {_us(limit.work_us)}"
    elif limit.cause == "few blocks" and waves is not None:
        reason = f"{waves.blocks} blocks on {waves.sm_count} SMs"
    else:
        reason = f"{limit.resource} needs {_us(found.bound.us)}"
        reason += f", {limit.against} {_us(floors[limit.against])}" if limit.against is not None else ""
    return f"{limit.kind} limited{by}: {reason}"


def _us(us: float) -> str:
    decimals = 0 if us >= 100 else 1 if us >= 10 else 2
    return f"{us:.{decimals}f} us"


def _rate(gflop_s: float) -> str:
    return f"{gflop_s / 1e3:.4g} TFLOP/s" if gflop_s >= 1e3 else f"{gflop_s:.4g} GFLOP/s"
