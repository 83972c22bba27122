"""`tunebench plan pipeline`: its output, its files, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tunebench import device
from tunebench.training.pipeline import named_schedules
from tunebench.training.schedules import read_schedule

GPT = ("plan", "pipeline", "--model", "gpt2-large", "--device", "h100-sxm", "--stages", "4")
KNOWN = (
    "plan",
    "pipeline",
    "--forward-us",
    "100",
    "--stages",
    "8",
    "--activations",
    "1GB",
    "--static",
    "2GB",
)


def test_schedules_of_a_model_are_listed_with_the_best_one(run_json: Run, run_text: Run) -> None:
    asked = (*GPT, "--microbatches", "8", "--flash-attention")
    shown = run_json(*asked)
    assert (shown["model"], shown["ranks"], shown["microbatches"]) == ("gpt2-large", 4, 8)
    assert shown["memory_bytes"] == device.find("h100-sxm").usable_memory_bytes
    assert {schedule["name"] for schedule in shown["schedules"]} >= set(named_schedules())
    by_name = {schedule["name"]: schedule for schedule in shown["schedules"]}
    best = by_name[shown["best"]]
    assert best["step_us"] == min(schedule["step_us"] for schedule in shown["schedules"] if schedule["fits"])
    for schedule in shown["schedules"]:
        assert len(schedule["peak_bytes"]) == 4
        assert schedule["low_us"] < schedule["step_us"] < schedule["high_us"]
    assert by_name["gpipe"]["peak_bytes"][0] > by_name["1f1b"]["peak_bytes"][0]
    assert [estimate["microbatch"] for estimate in shown["estimates"]["as given"]] == [1, 2, 4]
    text = run_text(*asked)
    for expected in (
        "gpt2-large on 4 x h100-sxm",
        "interleaved-1f1b",
        "bubble",
        "fastest schedule that fits",
    ):
        assert expected in text


@pytest.mark.slow
def test_less_memory_needs_balance_or_recomputation(run_json: Run, run_text: Run) -> None:
    asked = (*KNOWN, "--microbatches", "16", "--schedule", "1f1b,gpipe")
    shown = run_json(*asked, "--memory", "9GB")
    assert shown["best"] == "1f1b balanced"
    peaks = {schedule["name"]: max(schedule["peak_bytes"]) for schedule in shown["schedules"]}
    assert peaks["1f1b"] == 10e9 > 9e9 >= peaks["1f1b balanced"]
    assert run_json(*asked, "--memory", "9GB", "--no-balance")["best"] is None
    text = run_text(*asked, "--memory", "3GB")
    assert text.lstrip().startswith("no schedule fits; 1f1b balanced needs the least memory")
    kinds = {
        kind: run_json(*GPT, "--microbatches", "8", "--schedule", "1f1b", "--recompute", kind)["schedules"][0]
        for kind in ("none", "selective", "full")
    }
    steps = [schedule["step_us"] for schedule in kinds.values()]
    assert steps == sorted(steps)
    peaks_by_kind = [max(schedule["peak_bytes"]) for schedule in kinds.values()]
    assert peaks_by_kind == sorted(peaks_by_kind, reverse=True)


@pytest.mark.slow
def test_the_verdict_states_what_balancing_gains(run_json: Run) -> None:
    asked = (*GPT, "--microbatches", "64", "--schedule", "1f1b")
    wide = run_json(*asked)
    assert [line.split(":")[0] for line in wide["verdict"]] == [
        "as given",
        "flash attention",
        "selective recomputation",
    ]
    first = wide["estimates"]["as given"]
    limit = (first[1]["peak_bytes"] + first[1]["balanced_bytes"]) // 2
    assert first[0]["peak_bytes"] < limit < first[2]["balanced_bytes"]
    tight = run_json(*asked, "--memory", f"{limit}B")
    gains = first[0]["step_us"] / first[1]["step_us"]
    expected = (
        f"balancing 1f1b allows micro-batches of 2 in place of 1, which is {gains:.3f} times as fast"
        if gains > 1
        else "balancing 1f1b gains nothing"
    )
    assert expected in tight["verdict"][0]


@pytest.mark.slow
def test_files_hold_the_best_schedule(run_json: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    plot, trace, out = (tmp_path / name for name in ("plan.svg", "trace.json", "schedule.csv"))
    files = ("--plot", str(plot), "--trace", str(trace), "--out", str(out))
    shown = run_json(*KNOWN, "--microbatches", "8", "--schedule", "1f1b", *files)
    assert shown["written"] == [str(out), str(trace), str(plot)]
    assert "<svg" in plot.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    schedule = read_schedule(out)
    assert (schedule.ranks, schedule.microbatches) == (8, 8)


def test_costs_come_from_a_file(run_json: Run, tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text("[[stage]]\ncount = 4\nforward_us = 100\nbackward_us = 200\nsend_bytes = '10MB'\n")
    asked = ("plan", "pipeline", "--costs", str(path), "--microbatches", "4", "--schedule", "1f1b")
    instant = run_json(*asked)["schedules"][0]
    assert instant["low_us"] == instant["high_us"] == instant["step_us"]
    assert instant["step_us"] == pytest.approx(7 * 300)
    linked = run_json(*asked, "--link", "25")["schedules"][0]
    assert linked["step_us"] > instant["step_us"]
    assert linked["sends_us"] == pytest.approx(linked["step_us"] - instant["step_us"])
    halves = run_json(*asked, "--stages", "2")
    assert halves["ranks"] == 2
    assert halves["schedules"][0]["step_us"] == pytest.approx(5 * 600)


@pytest.mark.slow
def test_full_recomputation_and_two_stages_per_rank_are_explained(run_text: Run) -> None:
    asked = ("plan", "pipeline", "--model", "gpt2", "--device", "h100-sxm", "--stages", "8")
    text = run_text(*asked, "--microbatches", "8")
    assert "interleaved-1f1b is left out: 12 layers cannot be divided into 16 stages" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give the stages by one of: --model NAME, --costs FILE, --forward-us"),
        (("--forward-us", "1", "--model", "gpt2"), "give the stages by one of"),
        (("--forward-us", "1", "--stages", "2", "--tensor", "2"), "need --model NAME"),
        (("--costs", "absent.toml", "--device", "t4"), "need --model NAME"),
        (("--costs", "absent.toml", "--static", "1GB"), "need --forward-us"),
        (("--forward-us", "1"), "--forward-us needs --stages N"),
        (("--forward-us", "1", "--weight-gradient-us", "3", "--stages", "2"), "expected at most 2"),
        (("--model", "gpt2"), "--model needs --stages N"),
        (
            ("--model", "gpt2", "--stages", "100", "--device", "t4"),
            "12 layers cannot be divided into 100 stages: expected at most 12",
        ),
        (("--forward-us", "1", "--stages", "1000000"), "4 micro-batches on 1000000 stages: expected at most"),
        (("--model", "gpt2", "--stages", "2", "--device", "cpu"), "is not a GPU"),
        (("--model", "gpt2", "--stages", "2", "--device", "t4", "--dtype", "int8"), "unknown dtype 'int8'"),
        (
            ("--model", "gpt2", "--stages", "2", "--device", "t4", "--recompute", "al"),
            "unknown recomputation",
        ),
        (
            ("--model", "llama-2-7b", "--stages", "2", "--device", "t4", "--tensor", "3"),
            "divisor of 8 devices",
        ),
        (("--model", "gpt2", "--stages", "2", "--device", "t4", "--stack", "jax"), "unknown stack 'jax'"),
        (("--model", "opt-125m", "--stages", "2", "--device", "t4"), "use the stack eager or compiled"),
        (("--model", "resnet50", "--stages", "2", "--device", "t4"), "expected a transformer"),
        (
            ("--forward-us", "1", "--stages", "2", "--memory", "80%"),
            "--memory '80%' is no size: expected a size above 0",
        ),
        (("--forward-us", "1", "--stages", "2", "--schedule", "1f2b"), "unknown schedule '1f2b'"),
        (("--forward-us", "1", "--stages", "2", "--link", "wire"), "unknown link 'wire'"),
        (("--forward-us", "1", "--stages", "2", "--trace", "/no/such/folder/t.json"), "there is no folder"),
        (("--costs", "absent.toml"), "costs of stages absent.toml cannot be read"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)
def test_mistakes_are_refused(run_refused: Run, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in run_refused("plan", "pipeline", "--microbatches", "4", *arguments)


@pytest.mark.slow
def test_a_plot_of_unknown_format_is_refused(run_refused: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    asked = (*KNOWN, "--microbatches", "2", "--plot", str(tmp_path / "plan.txt"))
    assert "the suffix of a plot must be one of" in run_refused(*asked)


def test_search_adds_optimised_schedules_with_their_lower_bound(run_json: Run, run_text: Run) -> None:
    sizes = ("--activations", "1MB", "--memory", "3MB", "--schedule", "1f1b", "--search", "3")
    asked = ("--forward-us", "10", "--stages", "2", "--microbatches", "4", *sizes)
    by_name = {schedule["name"]: schedule for schedule in run_json("plan", "pipeline", *asked)["schedules"]}
    best = by_name["optimised, 1 stage"]
    assert by_name["1f1b"]["bound_us"] is None
    assert best["bound_us"] <= best["step_us"] * (1 + 1e-9)
    assert best["step_us"] <= by_name["1f1b"]["step_us"]
    assert best["fits"]
    assert "optimised, 1 stage: at most 0.0% above" in run_text("plan", "pipeline", *asked)
