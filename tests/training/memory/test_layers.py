"""What a plan does with each layer, and the plot of its memory over time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan_memory_reference import chain_step
from tunebench.errors import InputError
from tunebench.training.memory import (
    Action,
    Compute,
    CopyIn,
    CopyOut,
    Free,
    HostLink,
    LayerPlan,
    MemoryPlan,
    layer_plans,
    layers_above,
    simulate,
)

STEP = chain_step(3, link=HostLink(to_host_gb_s=1e-3, to_device_gb_s=0.5e-3))
"""Tensors 1 to 3 are activations, 4 to 6 gradients; operations 0 to 2 are the forward pass. A byte takes 1 us
to the host and 2 us back."""

LAYERS = ["a", "b", "c", "c", "b", "a"]

SCHEDULE: tuple[Action, ...] = (
    *(Compute(0), CopyOut(1), Compute(1), Free(1), Compute(2), Free(2), CopyIn(1), Compute(1), Compute(3)),
    *(Free(3), Compute(4), Free(2), Free(4), Compute(5), Free(1), Free(5), Free(6)),
)


def _plan() -> MemoryPlan:
    return MemoryPlan(
        step=STEP,
        budget_bytes=5,
        schedule=SCHEDULE,
        simulation=simulate(STEP, SCHEDULE),
        lower_us=6.0,
        optimal=False,
    )


def test_tensors_and_times_count_for_the_layer_that_writes_them() -> None:
    # The last activation is read by the next operation, so nothing is decided about it.
    assert layer_plans(_plan(), LAYERS) == [
        LayerPlan(layer="a", swapped_bytes=1, first_us=2, copies_us=3),
        LayerPlan(layer="b", recomputed_bytes=1, first_us=2, again_us=1),
        LayerPlan(layer="c", first_us=2),
    ]
    (whole,) = layer_plans(_plan(), [""] * 6)
    assert (whole.saved_bytes, whole.first_us, whole.again_us) == (2, 6, 1)


def test_with_the_length_of_the_forward_pass_only_its_tensors_that_the_backward_pass_reads_count() -> None:
    step = replace(STEP, results=(5, 6))
    plan = replace(_plan(), step=step)
    assert sum(layer.saved_bytes for layer in layer_plans(plan, LAYERS, forward=3)) == 2
    assert sum(layer.saved_bytes for layer in layer_plans(plan, LAYERS, forward=1)) == 1


def test_layers_are_cut_to_the_modules_that_contain_them() -> None:
    layers = ["stem", "body.0.conv", "body.0.norm", "body.1.conv", "body.1.norm"]
    assert layers_above(layers, 5) == layers
    assert layers_above(layers, 4) == ["stem", "body.0", "body.0", "body.1", "body.1"]
    assert layers_above(layers, 2) == layers_above(layers, 1) == ["stem", "body", "body", "body", "body"]
    assert layers_above([], 3) == []


def test_actions_end_when_the_compute_stream_has_waited_for_copies() -> None:
    times = simulate(STEP, SCHEDULE).ends_us
    # The copy in runs from 3 to 5 us; the recomputation that reads it waits.
    assert times == (1, 1, 2, 2, 3, 3, 3, 6, 7, 7, 8, 8, 8, 9, 9, 9, 9)
    assert times[-1] == simulate(STEP, SCHEDULE).step_us


def test_the_plot_shows_peaks_budget_activity_and_shares(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    from tunebench.training.memory.plot import draw, figure

    plan = _plan()
    layers = layer_plans(plan, LAYERS)
    plot = figure(plan, layers, title="three layers")
    memory, activity, shares = plot.axes
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in plot.axes]
    assert labels == [
        ["without a plan: 0.0 ms", "with the plan: 0.0 ms", "budget: 5.00 bytes"],
        ["first run: 0.0 ms", "recomputation: 0.0 ms", "wait for copies: 0.0 ms"],
        ["kept: 0.00 bytes, 0%", "recomputed: 1.00 bytes, 50%", "swapped: 1.00 bytes, 50%"],
    ]
    assert [text.get_text() for text in memory.texts] == ["4.00 bytes", "4.00 bytes"]
    planned = memory.get_lines()[2]
    assert max(planned.get_ydata()) == plan.simulation.peak_bytes
    assert planned.get_xdata()[-1] == plan.simulation.step_us / 1e3
    assert activity.get_xlabel() == "time in the step, ms"
    assert shares.patches[2].get_x() == 0.5
    draw(plan, layers, tmp_path / "memory.svg")
    assert "<svg" in (tmp_path / "memory.svg").read_text()
    with pytest.raises(InputError, match=r"must be one of .*\.svg"):
        draw(plan, layers, tmp_path / "memory.txt")
