"""The programs of benchmarks.programs, and their comparison in benchmarks.coexecution."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import torch
from torch import Tensor

from benchmarks import coexecution, coexecution_time
from benchmarks.programs import Step, names, program
from tunebench.training import coexecute
from tunebench.training.coexecution._testing import forced


def _same(step: Step) -> Step:
    return step


def _run(name: str, wrap: coexecution.Wrap = _same) -> coexecution.Run:
    if name == "bert_metric":
        pytest.importorskip("sklearn", reason="scikit-learn is not installed: install tunebench[train]")
    return coexecution.run(name, wrap, 3)


@pytest.mark.parametrize("name", names())
def test_a_program_repeats_to_the_last_bit_and_learns(name: str) -> None:
    first, second = _run(name), _run(name)
    assert coexecution.differences(first, second) == []
    assert first.effects or first.printed
    assert all(value.isfinite().all() for key, value in first.tensors.items() if key.startswith("gradient"))
    _, state = program(name)(coexecution.SEED)
    for key, module in state.modules.items():
        if any(value.requires_grad for value in module.parameters()):
            assert any(
                not torch.equal(value, first.tensors[f"state {key}.{path}"])
                for path, value in module.named_parameters()
            )


@pytest.mark.parametrize(
    "name", ["distillation", "gat_graphs", "hooks", "ppo_numpy", "wgan_penalty", "word_lm"]
)
def test_a_program_under_coexecution_equals_eager_mode(name: str) -> None:
    expected = coexecution.run(name, _same, 5)
    with forced():
        got = coexecution.run(name, coexecute, 5)
    assert coexecution.differences(expected, got) == []


def test_another_seed_is_another_run() -> None:
    assert coexecution.differences(_run("toy_item"), coexecution.run("toy_item", _same, 3, seed=8))


def _shifts_the_loss(step: Step) -> Step:
    def changed(*batch: object) -> Tensor:
        loss = step(*batch)
        return torch.nextafter(loss, loss + 1)

    return changed


def _draws_once_more(step: Step) -> Step:
    def changed(*batch: object) -> Tensor:
        loss = step(*batch)
        torch.rand(1)
        return loss

    return changed


def _prints(step: Step) -> Step:
    def changed(*batch: object) -> Tensor:
        sys.stdout.write("more")
        return step(*batch)

    return changed


@pytest.mark.parametrize(
    ("wrap", "what"),
    [(_shifts_the_loss, "loss 0"), (_draws_once_more, "random state"), (_prints, "printed text")],
)
def test_a_difference_in_the_last_bit_is_found(wrap: coexecution.Wrap, what: str) -> None:
    differences = coexecution.differences(_run("toy_item"), _run("toy_item", wrap))
    assert any(what in line for line in differences)


def test_effects_in_another_order_are_a_difference() -> None:
    expected, got = _run("toy_attribute"), _run("toy_attribute")
    got.effects.reverse()
    assert coexecution.differences(expected, got) == ["effects"]


def test_a_missing_gradient_is_a_difference() -> None:
    expected, got = _run("toy_item"), _run("toy_item")
    del got.tensors["gradient 1 network.0.weight"]
    assert coexecution.differences(expected, got) == ["gradient 1 network.0.weight only in one run"]


def test_an_unknown_program_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="toy_item"):
        program("missing")


def test_saved_results_are_kept_and_a_cut_line_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def examine(name: str, mode: str, arguments: object) -> coexecution.Record:
        ran.append(mode)
        return {"program": name, "mode": mode, "steps": 2, "differences": ["loss 1: relative error 2e-3"]} | {
            "beyond tolerance": ["loss 1: relative error 2e-3", "effects"]
        }

    monkeypatch.setattr(coexecution, "_examine_apart", examine)
    saved = tmp_path / "results.jsonl"
    first_line = json.dumps({"program": "toy_item", "mode": "default", "steps": 2, "error": "it | failed"})
    saved.write_text(first_line + '\n{"program": "toy_item", "mo\n', encoding="utf-8")
    command = ["--program", "toy_item", "--steps", "2", "--out", str(saved)]
    coexecution.main([*command, "--table", str(tmp_path / "table.md")])
    assert ran == ["fullgraph", "capture_scalar_outputs", "coexecute"]
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table.count("| toy_item |") == 4
    assert "it \\| failed" in table
    assert "different: 1 tensors by up to 2e-03; effects" in table


def test_a_table_of_times_has_all_modes_that_ran_and_names_those_that_did_not() -> None:
    record = {
        "program": "toy_item",
        "size": "small",
        "wall_s": {"eager": [4.0, 2.0], "in use": [4.0, 2.0], "exact": [2.0, 1.0], "inductor": [1.0, 1.0]},
        "processor_s": {
            "eager": [4.0, 2.0],
            "in use": [2.0, 1.0],
            "exact": [8.0, 4.0],
            "inductor": [1.0, 1.0],
        },
        "errors": {"torch.compile": "no result within 3 s\n\nfrom user code: line 3", "fused": "none"},
        "heads": [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.9],
        "no_head": None,
        "start": {
            "eager": {"processor_s": 2.0, "peak_mib": 100.0},
            "in use": {"processor_s": 2.2, "peak_mib": 150.0, "growth_mib": 0.0, "steps": 10},
        },
    }
    times, first = coexecution_time.table([record]).split("\n\n")[1:]
    row = "| toy_item | small | 2 | 3000.00 | 1.00 | 2.00 | 2.00 | 0.50 | 3.00 | 3.00 |"
    assert times.splitlines()[2] == row
    assert "| 95 | 40 | 1.10 | 1.50 | 50.0 | 0.0 (10) | torch.compile: no result within 3 s |" in first


def test_a_program_without_a_head_counts_as_in_use_and_has_the_reason() -> None:
    record = {
        "program": "toy_item",
        "size": "small",
        "wall_s": {"eager": [2.0], "in use": [4.0], "exact": [1.0]},
        "processor_s": {"eager": [2.0], "in use": [4.0], "exact": [1.0]},
        "errors": {},
        "heads": [0.0] * 6,
        "no_head": "its sizes depend on values",
    }
    times, first = coexecution_time.table([record]).split("\n\n")[1:]
    assert times.splitlines()[2].endswith("| 0.50 | 0.50 | none | none |")
    assert times.splitlines()[3].endswith("| 0.50 | 0.50 | 0.50 | 0.50 |")
    assert "| 0 | none | none | none | none | none | its sizes depend on values |" in first


def test_a_forked_process_returns_a_record_an_error_or_runs_out_of_time() -> None:
    def fails() -> coexecution.Record:
        raise ValueError("wrong")

    def sleeps() -> coexecution.Record:
        time.sleep(60)
        return {}

    assert coexecution_time._forked(lambda: {"steps": 3}, 60) == {"steps": 3}
    assert coexecution_time._forked(fails, 60) == {"error": "ValueError: wrong"}
    assert coexecution_time._forked(sleeps, 0.1) == {"error": "no result within 0 s"}
