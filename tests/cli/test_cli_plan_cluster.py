"""`tunebench plan cluster`: its output, its file, and mistakes."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tunebench import cli
from tunebench.cli.plan._cluster_report import ClusterReport
from tunebench.training.cluster import (
    ClusterAnswer,
    ClusterSearch,
    PlanProof,
    SearchResult,
    TrainingCluster,
    TrainingJob,
)
from tunebench.workloads.networks import network

GPT = ("plan", "cluster", "--model", "gpt2-large", "--cluster", "4 x l4, $0.7", "--batch", "16")


@pytest.mark.slow
def test_plans_are_listed_with_proof_gains_and_front(run_json: Run, run_text: Run, tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    shown = run_json(*GPT, "--top", "3", "--out", str(out))
    assert (shown["model"], shown["devices"], shown["seq"]) == ("gpt2-large", 4, 1024)
    assert [plan["step"]["time_us"] for plan in shown["plans"]] == sorted(
        plan["step"]["time_us"] for plan in shown["plans"]
    )
    assert shown["best"] == shown["plans"][0]
    assert len(shown["plans"]) == 3
    assert shown["best"]["cost"] == pytest.approx(0.7 * shown["best"]["device_hours"])
    assert shown["proof"]["optimal"] is True
    assert sum(shown["shares"].values()) == pytest.approx(1)
    assert {gain["twice_the"] for gain in shown["gains"]} == {
        "memory of each device",
        "bandwidth of all links",
        "batch",
    }
    assert [sensitivity["slower"] for sensitivity in shown["sensitivity"]] == ["kernels", "communication"]
    assert shown["missing_bytes"] == 0
    assert tomllib.loads(out.read_text())["plan"]["data"] == shown["best"]["data"]
    text = run_text(*GPT)
    for expected in ("optimal for the model", "best: tensor=", "binding:", "Pareto front", "MFU", "$"):
        assert expected in text
    front = text[text.index("Pareto front of step time and memory") :].splitlines()
    assert front[2].rstrip().endswith("the best plan")  # a row each, below the title and the header
    assert len(front) < 2 + len(shown["front"]) + 2


def test_rows_of_different_plans_differ() -> None:
    """In the table, in data and in notebooks, though all have the same step and memory here."""
    job = TrainingJob(network=network("gpt2"), batch=8, seq=512)
    machine = TrainingCluster.parse("4 x l4, host 64GB 100")
    search = ClusterSearch(job, machine, fixed={"microbatch": "1", "flash": "yes"})
    priced = search.priced(search.plans[0])
    same = tuple(replace(priced, plan=search.plans[row]) for row in range(0, len(search.plans), 5))
    assert {(listed.plan.embedding_layers, listed.plan.head_layers) for listed in same} > {(0, 0), (1, 1)}
    proof = PlanProof(
        plans=len(same), too_large=0, bounded_by_passes=0, bounded_by_step=0, simulated=0, optimal=False
    )
    result = SearchResult(
        objective="time", best=same, front=(), proof=proof, _least=same[0].plan, _pricer=search._priced
    )
    answer = ClusterAnswer(job=job, machine=machine, result=result)
    report = ClusterReport(answer=answer)
    rows = list(report._rows(same))
    assert {len(row) for row in rows} == {len(report._columns())}
    assert len(set(rows)) == len({str(priced.plan) for priced in same}) == len(same) > 100
    assert len({json.dumps(plan, default=str) for plan in report.to_json()["plans"]}) == len(same)


@pytest.mark.slow
def test_plan_for_a_framework_is_all_that_is_printed(
    run_text: Run, run_json: Run, run_refused: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run((*GPT, "--fix", "sharding=optimizer,tensor=1,pipeline=1", "--emit", "deepspeed")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["zero_optimization"]["stage"] == 1
    assert "note: start with deepspeed --num_nodes 1 --num_gpus 4" in err
    assert run_json(*GPT, "--emit", "megatron")["framework"] == "megatron"
    assert "Known: deepspeed, fsdp" in run_refused(*GPT, "--emit", "jax")
    assert "no plan fits" in run_refused(
        "plan",
        "cluster",
        "--model",
        "gpt2-large",
        "--cluster",
        "1 x l4, 6GB",
        "--batch",
        "8",
        "--emit",
        "fsdp",
    )


def test_fixed_values_and_no_reasons(run_json: Run) -> None:
    shown = run_json(*GPT, "--fix", "tensor=2, sharding=full", "--no-reasons", "--objective", "memory")
    assert {(plan["tensor"], plan["sharding"]) for plan in shown["plans"]} == {(2, "full")}
    assert shown["gains"] == shown["sensitivity"] == []


@pytest.mark.slow
def test_fronts_are_plotted_and_listed(run_text: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "front.png"
    fixed = ("--fix", "tensor=1,recompute=none,flash=yes", "--top", "1")
    text = run_text(*GPT, "--cluster", "4 x l4, 2 a node, net-100, $0.7", *fixed, "--plot", str(path))
    assert "Pareto front of step time and cost" in text
    assert path.stat().st_size > 1000


@pytest.mark.slow
def test_different_products_get_unequal_layers(run_json: Run, run_text: Run, run_refused: Run) -> None:
    asked = (
        "plan",
        "cluster",
        "--model",
        "gpt2",
        "--batch",
        "16",
        "--fix",
        "flash=yes,tensor=1,sharding=none",
    )
    mixed = (*asked, "--cluster", "2 x l4 + 2 x a100-80-sxm, 2 a node, net-200")
    best = run_json(*mixed)["best"]
    assert sum(best["stage_layers"]) == 12
    assert set(best["stage_products"]) == {"l4", "a100-80-sxm"}
    text = run_text(*mixed)
    for expected in ("optimal for the model", "layers of stages", "equal layers", "alone: "):
        assert expected in text
    assert "--emit is not possible" in run_refused(*mixed, "--emit", "megatron")


@pytest.mark.slow
def test_residual_networks_are_trained_by_copies(run_json: Run, run_text: Run, run_refused: Run) -> None:
    asked = ("plan", "cluster", "--model", "resnet50", "--cluster", "4 x l4, $0.7", "--batch", "256")
    shown = run_json(*asked, "--top", "2", "--stack", "compiled")
    assert len(shown["plans"]) == 2
    assert shown["plans"][0]["microbatch"] * shown["plans"][0]["microbatches"] == 64
    assert shown["best"]["step_us"] < run_json(*asked)["best"]["step_us"]
    text = run_text(*asked)
    for expected in ("4 copies", "micro-batch", "samples/s", "all plans are predicted"):
        assert expected in text
    assert "nothing fits" in run_text(*asked, "--cluster", "4 x l4, 1GB")
    assert "--seq is not possible" in run_refused(*asked, "--seq", "8")
    assert "residual networks" in run_refused(*GPT, "--stack", "eager")


def test_nothing_fits_is_an_answer(run_json: Run, run_text: Run) -> None:
    small = ("plan", "cluster", "--model", "gpt2-large", "--cluster", "1 x l4, 6GB", "--batch", "8")
    shown = run_json(*small)
    assert shown["best"] is None
    assert shown["missing_bytes"] > 0
    text = run_text(*small)
    assert "nothing fits: the least memory is" in text
    assert "host 512GB 200" in text  # and no copies to divide parameters among
    assert "--full-sharding" not in text
    assert "--full-sharding" in run_text(*small, "--cluster", "2 x l4, 4GB", "--fix", "tensor=1,pipeline=1")


def test_missing_host_memory_is_named(run_text: Run, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('product = "l4"\nhost_memory = "1GB"\nhost_gb_s = 100\n')
    asked = ("plan", "cluster", "--model", "gpt2-large", "--cluster", str(path), "--batch", "4")
    assert "of host memory" in run_text(*asked, "--fix", "states=host")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (("--fix", "tensor"), "expected NAME=VALUE"),
        (("--fix", "tensors=2"), "tensor"),
        (("--objective", "speed"), "cost"),
        (("--cluster", "l4"), "a number of devices first"),
        (("--dtype", "f32"), "f16 or bf16"),
        (("--seq", "4096"), "1024 positions"),
    ],
)
def test_mistakes_are_explained(run_refused: Run, changed: tuple[str, ...], expected: str) -> None:
    assert expected in run_refused(*GPT, *changed)


@pytest.mark.slow
def test_eight_bit_floats_are_faster_where_the_device_has_them(run_json: Run, run_refused: Run) -> None:
    asked = ("plan", "cluster", "--model", "llama-2-7b", "--cluster", "8 x h100-sxm", "--batch", "32")
    asked += ("--seq", "4096", "--fix", "tensor=1,pipeline=1", "--no-reasons", "--top", "1")
    wide, narrow = (
        run_json(*asked, "--fp8", kind)["best"]["step"]["time_us"] for kind in ("none", "delayed")
    )
    assert narrow < wide
    older = ("plan", "cluster", "--model", "gpt2-large", "--cluster", "4 x a100-80-sxm", "--batch", "16")
    assert "no tensor cores for 8-bit floats" in run_refused(*older, "--fp8", "current")
    assert "Known: current, delayed, none" in run_refused(*asked, "--fp8", "e5m2")


def test_measured_steps_move_plans(run_text: Run, run_json: Run, run_refused: Run, tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text("[[step]]\ntime_s = 6.5\nbatch = 16\ndata = 4\nmicrobatches = 4\nflash = true\n")
    few = (*GPT, "--no-reasons", "--fix", "flash=yes,microbatch=1,schedule=1f1b,tensor=1,chunks=1")
    before, after = run_json(*few), run_json(*few, "--calibrate", str(path))
    assert before["software_factors"] == [1.0, 1.0]
    assert after["software_factors"][0] != 1.0
    text = run_text(*few, "--calibrate", str(path))
    assert "calibrated: 1 measured step took" in text
    assert "90 % interval of the best step" in text
    assert "software, in all times: megatron@2022, typical: 1.16" in run_text(
        *few, "--stack", "megatron@2022"
    )
    path.write_text("[[step]]\nbatch = 16\n")
    assert "step 1: expected time_s, which the file leaves out" in run_refused(*few, "--calibrate", str(path))
    residual = ("plan", "cluster", "--model", "resnet50", "--cluster", "4 x l4", "--batch", "256")
    assert "--calibrate is not possible for resnet50" in run_refused(*residual, "--calibrate", str(path))
