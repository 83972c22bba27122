"""`tunebench predict` and `tunebench compare`: their arguments and their output."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.public_data import found
from tests.support import record_outcome
from tunebench import cli, device, predict
from tunebench.forecast.comparison import ComparedDevice, with_prices
from tunebench.forecast.network import predict_network
from tunebench.kernels import variant
from tunebench.outcome import Predicted, Verification
from tunebench.training.cluster.generation import predict_generation
from tunebench.training.steps.footprint import min_memory_bytes
from tunebench.training.steps.step import Parallelism
from tunebench.workloads import parse
from tunebench.workloads.networks import NetworkRun, network

GEMM = "gemm:m=4096,n=4096,k=4096,dtype=f16"
GPT2 = ("--model", "gpt2", "--batch", "2", "--seq", "128")
NEXT = """
name = "next"
sm_count = 160
boost_mhz = 2100
memory_gb_s = 12000
l2_mb = 192
tflops = { fp32 = 86, fp16 = 5500 }
"""


@pytest.fixture
def next_gpu(tmp_path: Path) -> str:
    path = tmp_path / "next.toml"
    path.write_text(NEXT)
    return str(path)


# -- workloads ------------------------------------------------------------------------------------------


def test_each_workload_on_each_device(run_json: Run, run_text: Run) -> None:
    typed = ["predict", "-w", GEMM, "-w", "resnet50/conv1,n=8", "--device", "h100-sxm", "--device", "t4"]
    predictions = run_json(*typed)
    assert [prediction["device"] for prediction in predictions] == ["sm_90:h100-sxm,sm=132"] * 2 + [
        "sm_75:t4,sm=40"
    ] * 2
    expected = predict(parse(GEMM), device.find("t4"))
    assert predictions[2]["workload"] == GEMM
    for name in ("time_us", "low_us", "high_us", "bound_us", "utilisation"):
        assert predictions[2][name] == pytest.approx(getattr(expected, name))
    for name in ("binding", "basis", "because"):
        assert predictions[2][name] == getattr(expected, name)
    text = run_text(*typed)
    assert text.count("h100-sxm") == len(re.findall(r"\bt4\b", text)) == 2
    assert "nine" not in text
    assert "90 % interval" in text


def test_device_may_be_a_file_and_assumptions_are_printed(
    next_gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["predict", "-w", GEMM, "--device", next_gpu, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["device"] == "sm_103:next,sm=160"
    assert "next.toml: no architecture is given" in err


@pytest.mark.parametrize("command", [["explain"], ["show"]])
def test_other_commands_take_device_files_too(
    command: list[str], next_gpu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.toml").write_text(NEXT.replace("sm_count = 160", "sm_count = 0"))
    typed = [*command, "-w", GEMM, "--device"]
    assert cli.run([*typed, str(tmp_path / "none.toml")]) == 2
    assert "sm_count must be" in capsys.readouterr().err
    if command == ["explain"]:
        assert cli.run([*typed, next_gpu]) == 0
        out, err = capsys.readouterr()
        assert "sm_103:next,sm=160" in out
        assert "no architecture is given" in err


# -- tables ---------------------------------------------------------------------------------------------


def test_a_table_is_predicted(tmp_path: Path, run_json: Run, run_text: Run) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(f'workload\n"{GEMM}"\n')
    typed = ["predict", "--workloads", str(source), "--device", "t4", "--out", str(out)]
    summary = run_json(*typed)
    assert (summary.pop("out"), summary.pop("device")) == (str(out), "sm_75:t4,sm=40")
    assert summary == {"rows": 1, "refused": 0, "interrupted": False, "faults": []}
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["predicted_us"]) > float(row["bound_us"]) > 0
    assert "1 of 1 rows predicted on t4" in run_text(*typed)


def test_unusable_rows_are_reported_with_line_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(f'workload\n"{GEMM}"\n' + "nothing\n" * 12)
    assert cli.run(["predict", "--workloads", str(source), "--device", "t4", "--out", str(out)]) == 2
    printed, err = capsys.readouterr()
    assert "1 of 13 rows predicted" in printed
    assert "in.csv, line 3: workload 'nothing' is neither" in err
    assert "line 12:" in err
    assert "line 13:" not in err
    assert "and 2 more, see column error" in err
    assert "error: 12 of 13 rows could not be predicted, see column error" in err
    assert len(out.read_text().splitlines()) == 14


def test_an_interrupted_table_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from tunebench.forecast import table

    def stopped(rows: Any, size: int) -> Any:
        yield [next(rows)]
        raise KeyboardInterrupt

    monkeypatch.setattr(table, "_chunks", stopped)
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(f'workload\n"{GEMM}"\n"{GEMM}"\n')
    assert cli.run(["predict", "--workloads", str(source), "--device", "t4", "--out", str(out)]) == 130
    assert "interrupted; the rows predicted so far" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 2


# -- models ---------------------------------------------------------------------------------------------


def test_a_model_is_the_sum_of_its_operations(run_json: Run, run_text: Run) -> None:
    (prediction,) = run_json("predict", *GPT2, "--dtype", "f16", "--device", "h100-sxm")
    run = NetworkRun(batch=2, seq=128, dtype="f16")
    expected = predict_network(network("gpt2"), device.find("h100-sxm"), run)
    for name in ("time_us", "low_us", "high_us", "bound_us", "host_us", "launches"):
        assert prediction[name] == pytest.approx(getattr(expected, name))
    assert prediction["tokens_per_s"] == pytest.approx(256 / expected.time_us * 1e6)
    assert sum(part["share"] for part in prediction["parts"]) == pytest.approx(1)
    assert sum(prediction["basis"].values()) == pytest.approx(1)
    assert sum(operation["time_us"] for operation in prediction["operations"]) == pytest.approx(
        prediction["device_us"]
    )
    text = run_text("predict", *GPT2, "--dtype", "f16", "--device", "h100-sxm")
    assert "gpt2 on h100-sxm: a forward pass of 2 x 128 tokens in f16" in text
    assert all(part["part"] in text for part in prediction["parts"])


def test_training_step_has_an_optimizer_by_default(run_json: Run, run_text: Run) -> None:
    typed = ["predict", *GPT2, "--training", "--device", "h100-sxm"]
    (adamw,), (none,) = run_json(*typed), run_json(*typed, "--optimizer", "none")
    assert (adamw["optimizer"], none["optimizer"]) == ("adamw", "none")
    assert {line["part"] for line in adamw["phases"]} == {"forward", "backward", "optimizer"}
    assert {line["part"] for line in none["phases"]} == {"forward", "backward"}
    assert "a training step of 2 x 128 tokens in f32" in run_text(*typed)


def test_a_model_without_sequences_has_images(run_json: Run) -> None:
    (prediction,) = run_json("predict", "--model", "resnet50", "--batch", "8", "--device", "t4")
    assert prediction["images_per_s"] == pytest.approx(8 / prediction["time_us"] * 1e6)


def test_list_of_workloads_keeps_their_dtype_by_default(run_json: Run) -> None:
    typed = ["predict", "--model", "llama-3-8b-decode", "--device", "h100-sxm"]
    (by_default,), (single,) = run_json(*typed), run_json(*typed, "--dtype", "f32")
    assert by_default["dtype"] == "bf16"
    assert by_default["samples_per_s"] == pytest.approx(1e6 / by_default["time_us"])
    assert single["dtype"] == "f32"
    assert single["bound_us"] > 1.9 * by_default["bound_us"]


def test_a_model_may_be_a_file(run_json: Run, tmp_path: Path) -> None:
    listed = tmp_path / "net.csv"
    listed.write_text(f'workload,count,part\n"{GEMM}",3,products\n')
    (prediction,) = run_json("predict", "--model", str(listed), "--device", "t4")
    assert (prediction["model"], prediction["dtype"]) == ("net", "f16")
    assert [(part["part"], part["launches"]) for part in prediction["parts"]] == [("products", 3)]


def test_a_model_on_several_devices(run_json: Run, run_text: Run) -> None:
    typed = ["predict", "--model", "gpt2", "--batch", "8", "--seq", "128", "--training"]
    typed += ["--data", "2", "--pipeline", "2", "--microbatches", "2", "--device", "h100-sxm"]
    (prediction,) = run_json(*typed)
    assert prediction["devices"] == 4
    assert prediction["division"]["data"] == prediction["division"]["pipeline"] == 2
    assert len(prediction["stages"]) == 2
    shares = prediction["compute_us"] + prediction["communication_us"] + prediction["bubble_us"]
    assert shares == pytest.approx(prediction["time_us"])
    text = run_text(*typed)
    assert "gpt2 on 4 x h100-sxm" in text
    assert "pipeline bubble" in text
    assert f"{prediction['tokens_per_s']:,.0f} tokens per second" in text


@pytest.mark.slow
def test_insufficient_memory_is_reported(capsys: pytest.CaptureFixture[str], run_json: Run) -> None:
    typed = ["--model", "llama-3-70b", "--seq", "64", "--dtype", "bf16"]
    warning = "warning: llama-3-70b does not fit into h100-sxm: it has 80 GiB, parameters need 131 GiB"
    assert cli.run(["predict", *typed, "--device", "h100-sxm"]) == 0
    assert warning in capsys.readouterr().err
    assert cli.run(["compare", *typed, "--device", "h100-sxm", "--device", "mi300x"]) == 0
    assert capsys.readouterr().err.count("warning") == 1
    assert cli.run(["predict", *typed, "--device", "h100-sxm", "--tensor", "4"]) == 0
    assert "warning" not in capsys.readouterr().err
    (prediction,) = run_json("predict", *typed, "--device", "mi300x")
    assert prediction["least_bytes"] == 2 * network("llama-3-70b").parameters()


def test_training_keeps_more_than_parameters() -> None:
    gpt2 = network("gpt2")
    parameter_bytes = 4 * gpt2.parameters()
    assert min_memory_bytes(gpt2, NetworkRun(seq=8)) == parameter_bytes
    assert min_memory_bytes(gpt2, NetworkRun(seq=8, mode="train")) == 2 * parameter_bytes
    assert min_memory_bytes(gpt2, NetworkRun(seq=8, mode="train", optimizer="adamw")) == 4 * parameter_bytes
    stages = min_memory_bytes(gpt2, NetworkRun(seq=8), Parallelism(pipeline=2))
    assert stages == 4 * max(gpt2.parameters(1, (0, 6)), gpt2.parameters(1, (6, 12)))
    assert min_memory_bytes(network("llama-3-8b-decode"), NetworkRun()) is None


# -- comparison of devices ---------------------------------------------------------------------------


def test_devices_are_compared_by_time_and_cost(run_json: Run, run_text: Run, next_gpu: str) -> None:
    typed = [
        "compare",
        *GPT2,
        "--device",
        "h100-sxm",
        "--device",
        "t4",
        "--device",
        next_gpu,
        "--price",
        "h100-sxm=3.6,next=7.2",
    ]
    h100, t4, new = run_json(*typed)
    (alone,) = run_json("predict", *GPT2, "--device", "h100-sxm")
    assert h100["time_us"] == pytest.approx(alone["time_us"])
    assert h100["speedup"] == 1
    assert t4["speedup"] == pytest.approx(h100["time_us"] / t4["time_us"])
    assert h100["cost_per_million_tokens"] == pytest.approx(h100["time_us"] * 1e-9 / 256 * 1e6)
    assert h100["cost_per_million_tokens_low"] < h100["cost_per_million_tokens"]
    assert t4["cost_per_million_tokens"] is None
    assert new["price_per_hour"] == 7.2
    (*_, named_as_typed) = run_json(*typed[:-1], f"{next_gpu}=1.5")
    assert named_as_typed["price_per_hour"] == 1.5
    text = run_text(*typed)
    assert "cost per million tokens" in text
    assert "cost per million" not in run_text(*typed[:-2])


def test_workloads_are_compared_by_the_sum_of_their_times(run_json: Run) -> None:
    softmax = "softmax:rows=8192,cols=1024,dtype=f32"
    (both,) = run_json("compare", "-w", GEMM, "-w", softmax, "--device", "t4")
    t4 = device.find("t4")
    expected = sum(predict(parse(text), t4).time_us for text in (GEMM, softmax))
    assert both["time_us"] == pytest.approx(expected)
    assert both["runs_per_s"] == pytest.approx(1e6 / expected)


def test_several_devices_cost_several_times_as_much(run_json: Run) -> None:
    typed = ["compare", *GPT2, "--device", "h100-sxm", "--price", "h100-sxm=3.6", "--data", "2"]
    (prediction,) = run_json(*typed)
    assert prediction["devices"] == 2
    assert prediction["cost_per_million_tokens"] == pytest.approx(
        2 * prediction["time_us"] * 1e-9 / 256 * 1e6
    )


def test_cost_is_proportional_to_time(run_json: Run) -> None:
    times = {"time_us": 3.6e9, "low_us": 1.8e9, "high_us": 7.2e9}  # one hour
    compared = ComparedDevice(device=device.find("t4"), items=4_000_000, devices=3, **times)
    assert compared.cost_per_million() is None
    (with_price,) = with_prices([compared], {"t4": 2.0})
    assert with_price.cost_per_million() == pytest.approx(1.5)
    assert with_price.cost_per_million(with_price.low_us) == pytest.approx(0.75)


# -- invalid arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["predict"], "give what to predict"),
        (["predict", "-w", GEMM, "--model", "gpt2", "--device", "t4"], "one of: --workload"),
        (["predict", "-w", GEMM, "--device", "t5"], "unknown device 't5'"),
        (["predict", "-w", GEMM, "--device", "cpu"], "is not a GPU"),
        (["predict", "-w", "gemm:m=1", "--device", "t4"], "missing n, k, dtype"),
        (
            ["predict", "-w", GEMM, "--device", "none.toml"],
            "device file none.toml cannot be read: No such file",
        ),
        (["predict", "-w", GEMM, "--out", "x.csv", "--device", "t4"], "and the other way round"),
        (["predict", "--workloads", "in.csv", "--device", "t4"], "and the other way round"),
        (
            ["predict", "--workloads", "in.csv", "--out", "x.csv", "--device", "t4", "--device", "l4"],
            "needs exactly one --device",
        ),
        (
            ["predict", "--workloads", "none.csv", "--out", "x.csv", "--device", "t4"],
            "none.csv: No such file",
        ),
        (["predict", "--model", "gpt9", "--device", "t4"], "unknown network 'gpt9'"),
        (["predict", *GPT2, "--device", "t4", "--dtype", "f64"], "unknown dtype 'f64'"),
        (["predict", *GPT2, "--device", "t4", "--optimizer", "adamw3"], "unknown optimizer 'adamw3'"),
        (
            ["predict", *GPT2, "--device", "t4", "--pipeline", "2", "--stage-layers", "6,x"],
            "such as 11,11,10",
        ),
        (["predict", *GPT2, "--device", "t4", "--user-buffers"], "it needs --sequence-parallel"),
        (["predict", *GPT2, "--device", "t4", "--sharding", "full"], "it needs --data"),
        (["predict", *GPT2, "--device", "t4", "--gathering", "lists"], "it needs --sharding full"),
        (["predict", *GPT2, "--device", "t4", "--nodes", "2"], "needs --data"),
        (["predict", *GPT2, "--device", "t4", "--data", "3"], "a batch of 2 cannot be divided"),
        (["predict", *GPT2, "--device", "t4", "--data", "2", "--schedule", "x"], "unknown schedule"),
        (["compare", "--device", "t4"], "give the work to compare"),
        (["compare", "-w", GEMM], "this machine has no GPU: name one by --device"),
        (["compare", "-w", GEMM, "--device", "t4", "--price", "t4"], "form device=price, got 't4'"),
        (["compare", "-w", GEMM, "--device", "t4", "--price", "l4=3"], "unknown device with a price 'l4'"),
        (["compare", "-w", GEMM, "--device", "t4", "--price", "t4=0"], "price of t4 must be positive"),
    ],
)
def test_invalid_argument_is_one_line_of_error(
    typed: list[str], expected: str, run_refused: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "local_gpus", tuple)
    assert expected in run_refused(*typed)


def test_without_a_gpu_one_must_be_named(run_refused: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "local_gpus", tuple)
    assert "this machine has no GPU: name one by --device" in run_refused("predict", "-w", GEMM)
    assert Parallelism().devices == 1


# -- stored predictions and recorded tuning spaces ---------------------------------------------------


def test_stored_predictions_are_shown_with_their_intervals(
    run_json: Run, run_text: Run, tmp_path: Path
) -> None:
    db, workload, where = str(tmp_path / "some.db"), parse(GEMM), device.find("h100-sxm")
    right = Verification(how="reference", detail="", worst=0.5)
    outcomes = (
        Predicted(predicted_us=90.0, verification=right, low_us=50.0, high_us=171.0),
        Predicted(predicted_us=95.0, verification=right),
    )
    for key, outcome in zip(("gemm/cuda_mma", "gemm/cuda_simt"), outcomes, strict=True):
        record_outcome(db, workload, where, key, variant(key).default(workload, where), outcome)
    best, older = run_json("show", "-w", GEMM, "--db", db)["best"]
    assert (best["time_us"], best["low_us"], best["high_us"]) == (90, 50, 171)
    assert (older["time_us"], older["low_us"]) == (95, None)
    text = run_text("show", "-w", GEMM, "--db", db)
    assert "90 us [50 us, 171 us]  predicted" in text
    assert " 95 us  predicted" in text
    assert run_json("lookup", "-w", GEMM, "--device", "h100-sxm", "--db", db)["interval_us"] == [50, 171]
    shown = run_text("lookup", "-w", GEMM, "--device", "h100-sxm", "--db", db)
    assert "(predicted; " in shown
    assert "90 % interval 50 us to 171 us)" in shown


@pytest.mark.slow
def test_recorded_space_is_compared_with_a_device_from_a_file(run_json: Run, tmp_path: Path) -> None:
    recorded = found("recorded/convolution/RTX_2080_Ti.json.gz")
    sheet = tmp_path / "twice.toml"
    described_device = device.find("rtx-2080-ti")
    sheet.write_text(
        f'name = "twice"\nlike = "rtx-2080-ti"\nmax_clock_mhz = {2 * described_device.max_clock_mhz}\n'
    )
    described = run_json("bound", str(recorded))
    twice = run_json("bound", str(recorded), "--device", str(sheet))
    assert (described["device"], twice["device"]) == ("rtx-2080-ti", "twice")
    fma = [comparison["floors"]["fma pipe"]["over_best"] for comparison in (described, twice)]
    assert fma[0] == pytest.approx(2 * fma[1])


def test_step_as_frameworks_run_it(run_json: Run) -> None:
    asked = [
        "predict",
        "--model",
        "llama-2-7b",
        "--batch",
        "32",
        "--seq",
        "4096",
        "--training",
        "--dtype",
        "bf16",
    ]
    asked += ["--device", "h100-sxm", "--stack", "megatron", "--flash-attention", "--nodes", "1"]

    def step_us(*changes: str) -> float:
        return float(run_json(*asked, *changes)[0]["time_us"])

    pipeline = ("--data", "2", "--pipeline", "4", "--microbatches", "16")
    plain = step_us(*pipeline)
    for schedule in ("zb-h1", "zbv"):
        assert step_us(*pipeline, "--schedule", schedule) < plain
    assert step_us(*pipeline, "--recompute", "full", "--recompute-layers", "2") > plain
    assert step_us(*pipeline, "--stage-layers", "9,9,8,6") != plain
    copies = ("--data", "8", "--microbatches", "4", "--sharding")
    states, full = (step_us(*copies, kind) for kind in ("optimizer", "full"))
    assert states < full
    assert step_us(*copies, "optimizer", "--no-overlap", "--f32-gradients") > states
    tensor = ("--tensor", "8", "--sequence-parallel", "--microbatches", "32")
    assert step_us(*tensor, "--user-buffers") < step_us(*tensor) < step_us(*tensor, "--no-tensor-overlap")
    assert step_us("--context", "8", "--microbatches", "32", "--cuda-graphs") > 0


def test_memory_of_each_rank_is_listed_by_kind_with_a_verdict(run_json: Run, run_text: Run) -> None:
    asked = [
        "predict",
        "--model",
        "llama-2-7b",
        "--batch",
        "64",
        "--seq",
        "4096",
        "--training",
        "--dtype",
        "bf16",
    ]
    asked += ["--device", "a100-40-sxm", "--stack", "megatron", "--flash-attention", "--pipeline", "4"]
    asked += ["--microbatches", "64"]
    ranks = run_json(*asked)[0]["memory"]
    assert [entry["rank"] for entry in ranks] == [0, 1, 2, 3]
    first, last = ranks[0], ranks[-1]
    assert first["activations"] > ranks[1]["activations"] > ranks[2]["activations"]
    figures = ("rank", "allocated", "reserved", "total", "needed", "verdict", "missing")
    kinds = [value for name, value in first.items() if name not in figures]
    assert sum(kinds) == first["total"]
    assert first["allocated"] < first["reserved"] < first["total"]
    assert first["allocated"] < first["needed"] < first["total"]
    usable = device.find("a100-40-sxm").usable_memory_bytes
    assert usable < 40 * 2**30
    assert first["missing"] == max(0, first["needed"] - usable)
    verdict = first["verdict"]
    assert verdict["low"] < first["needed"] < verdict["high"]
    assert (verdict["usable"], verdict["name"]) == (usable, "does not fit")
    assert last["working"] > 0
    recomputed = run_json(*asked, "--recompute", "full")[0]["memory"][0]
    half = run_json(*asked, "--recompute", "full", "--recompute-layers", "4")[0]["memory"][0]
    assert recomputed["activations"] < half["activations"] < first["activations"]
    text = run_text(*asked)
    assert "does not fit" in text
    assert "needed, which decides (90 % interval" in text
    assert "by nvidia-smi where there is room" in text
    assert "given back" in text
    assert "nccl" in text
    assert (
        run_json("predict", "--model", "opt-1.3b", "--seq", "128", "--training", "--device", "t4")[0][
            "memory"
        ]
        == []
    )


def test_measured_steps_move_a_prediction(run_text: Run, run_json: Run, tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text("batch = 8\n[[step]]\ntime_s = 0.05\ndata = 2\n")
    command = ["predict", "--model", "gpt2", "--batch", "8", "--seq", "512", "--training", "--dtype", "bf16"]
    command += ["--stack", "megatron@2022", "--data", "4", "--device", "a100-80-sxm"]
    assert "megatron@2022, typical: 1.16 times what is modelled" in run_text(*command)
    assert "1 measured step took" in run_text(*command, "--calibrate", str(path))
    (before,), (after,) = run_json(*command), run_json(*command, "--calibrate", str(path))
    (ratio,) = after["calibration"]["measured_over_modelled"]
    assert before["calibration"] is None
    assert (after["time_us"] > before["time_us"]) == (ratio > 1.16)
    assert after["high_us"] / after["low_us"] < before["high_us"] / before["low_us"]


LLAMA = ("--model", "llama-3-8b", "--seq", "512", "--generate", "64", "--dtype", "bf16")
SERVING = ("--stack", "compiled", "--cuda-graphs")


def test_generation_has_times_and_memory(run_json: Run, run_text: Run) -> None:
    command = ["predict", *LLAMA, *SERVING, "--batch", "4", "--device", "h100-sxm", "--device", "t4"]
    h100, t4 = run_json(*command)
    expected = predict_generation(
        network("llama-3-8b"),
        device.find("h100-sxm"),
        NetworkRun(batch=4, seq=512, dtype="bf16", stack="compiled", cuda_graphs=True),
        64,
    )
    assert h100["first_token"]["time_us"] == pytest.approx(expected.prefill.time_us)
    assert h100["token"]["time_us"] == pytest.approx(expected.decode.time_us)
    assert h100["time_us"] == pytest.approx(expected.time_us)
    assert h100["tokens_per_s"] == pytest.approx(4 * 64 / expected.time_us * 1e6)
    assert h100["memory"]["needed"] == expected.memory.needed
    assert (h100["verdict"]["name"], t4["verdict"]["name"]) == ("fits", "does not fit")
    text = run_text(*command)
    for part in ("4 sequences of 512 tokens, 64 generated", "first token", "each token", "weights 16.06 GB"):
        assert part in text
    divided = run_json("predict", *LLAMA, *SERVING, "--tensor", "4", "--device", "h100-sxm")[0]
    assert divided["devices"] == 4
    assert divided["token"]["time_us"] < h100["token"]["time_us"]
    assert "does not fit into" in text


def test_devices_are_compared_by_generated_tokens(run_json: Run) -> None:
    h100, l40s = run_json(
        "compare", *LLAMA, *SERVING, "--device", "h100-sxm", "--device", "l40s", "--price", "l40s=1"
    )
    assert h100["tokens_per_s"] == pytest.approx(64 / h100["time_us"] * 1e6)
    assert l40s["speedup"] < 1
    assert l40s["cost_per_million_tokens"] == pytest.approx(l40s["time_us"] / 3.6e9 / 64 * 1e6)


def test_a_link_is_for_several_devices_and_has_a_bandwidth(run_refused: Run) -> None:
    command = ["predict", *GPT2, "--device", "h100-sxm", "--link", "-5"]
    assert "--link has no effect alone: it needs --data" in run_refused(*command)
    message = run_refused(*command, "--data", "2")
    assert "link -5: expected a bandwidth above 0 GB/s" in message
    assert "got -5 GB/s" in message


def test_generation_refuses_other_divisions_and_training(run_refused: Run) -> None:
    resnet = ("--model", "resnet50", "--generate", "8", "--device", "h100-sxm")
    assert "--generate needs a decoder" in run_refused("predict", *resnet)
    for more in (("--data", "2"), ("--training",), ("--microbatches", "2")):
        assert "--generate is for inference" in run_refused("predict", *LLAMA, "--device", "h100-sxm", *more)
