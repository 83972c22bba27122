"""Training: reading of measurements, experts, devices left out, and the command."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunebench import device, workloads
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.forecast.library.kernel import library_kernels
from tunebench.forecast.library.model import ForecastModel
from tunebench.forecast.model_training import __main__ as command
from tunebench.forecast.model_training import data, evaluation, fit
from tunebench.forecast.model_training.data import MeasuredKernels

A100, H100, P100 = map(device.find, ("a100-80-sxm", "h100-sxm", "p100-pcie"))


def packed(path: Path, names: str, *lines: str) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join((names, *lines)) + "\n")


# ------------------------------------------------------------------------------------ the public sets


OPERATORS = "vendor,device,split,op_group,op,B,M,N,K,H,latency_ms,grid_x,grid_y,grid_z,block_x,kernel"
PRODUCTS = "device,kernel_source,gemm_dtype,m,n,k,latency_ms"
ATTENTIONS = "device,batch_size,isl,num_heads,num_key_value_heads,head_dim,kv_cache_dtype,window_size,latency"

DECODES = "device,batch_size,num_heads,num_key_value_heads,head_dim,isl,step,latency_ms"
ENCODERS = "device,batch_size,isl,num_heads,head_dim,latency_ms"
LAYER = "num_tokens,hidden_size,inter_size,topk,num_experts"
EXPERTS = f"device,{LAYER},moe_tp_size,moe_ep_size,distribution,latency_ms"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    packed(
        tmp_path / "neusight_ops.csv.gz",
        OPERATORS,
        'nvidia,Tesla T4,train,bmm,bmm,2,3.0,5.0,7.0,,0.5,1,1,2,256,"a, b"',
        "nvidia,Tesla T4,test,linear,linear,1,3.0,5.0,7.0,,0.25,,,,,",
        "amd,AMD Instinct MI100,train,elem,add,16,,,,32.0,0.125,,,,,",
        "amd,AMD Instinct MI100,train,elem,addu,16,,,,32.0,0.125,,,,,",
        "nvidia,Tesla P4,train,softmax,softmax,16,,,,32.0,0.0625,,,,,",
        "nvidia,Tesla P4,train,ln,ln,16,,,,32.0,0.0625,,,,,",
    )
    b200, a100 = "NVIDIA B200", "NVIDIA A100-SXM4-80GB"
    packed(
        tmp_path / "library_gemm_b200.csv.gz",
        PRODUCTS,
        f"{b200},x,bfloat16,64,96,128,0.004",
        f"{b200},x,fp8,64,96,128,0.003",
    )
    packed(
        tmp_path / "library_attention_b200.csv.gz",
        ATTENTIONS,
        f"{b200},2,128,8,4,64,bfloat16,0,0.02",
        f"{b200},2,128,8,4,64,fp8,0,0.01",
        f"{b200},2,128,8,4,64,bfloat16,128,0.01",
    )
    no_windows = ATTENTIONS.replace("window_size,", "")
    packed(tmp_path / "library_attention_a.csv.gz", no_windows, f"{a100},1,64,8,8,128,bfloat16,0.03")
    packed(tmp_path / "library_decode_attention_b200.csv.gz", DECODES, f"{b200},4,8,2,64,1,127,0.01")
    packed(tmp_path / "library_encoder_attention_b200.csv.gz", ENCODERS, f"{b200},4,196,8,64,0.015")
    packed(
        tmp_path / "library_moe_b200.csv.gz",
        EXPERTS,
        f"{b200},48,1024,512,2,16,1,4,balanced,0.06",
        f"{b200},48,1024,512,2,16,2,1,power_law_1.2,0.06",
    )
    return tmp_path


def test_measured_rows_equal_predicted_kernels(folder: Path) -> None:
    expected = [
        (
            "t4",
            "gemm:batch=2,m=3,n=7,k=5,dtype=f32",
            500.0,
            "bmm, train",
        ),  # column N of the data is the reduction
        ("t4", "gemm:m=3,n=7,k=5,dtype=f32", 250.0, "linear, test"),
        ("mi100", "elementwise:rows=16,cols=32,dtype=f32,expression=x+y", 125.0, "elem, train"),
        ("mi100", "elementwise:rows=16,cols=32,dtype=f32,expression=x", 125.0, "elem, train"),
        ("p4", "softmax:rows=16,cols=32,dtype=f32", 62.5, "softmax, train"),
        ("b200", "gemm:m=64,n=96,k=128,dtype=bf16", 4.0, "bf16 gemm"),
        ("b200", "gemm:m=64,n=96,k=128,dtype=e4m3", 3.0, "fp8 gemm"),
        (
            "a100-80-sxm",
            "attention:batch=1,heads=8,seq_q=64,head_dim=128,dtype=bf16,causal=true",
            30.0,
            "attention",
        ),
        (
            "b200",
            "attention:batch=2,heads=8,heads_k=4,seq_q=128,head_dim=64,dtype=bf16,causal=true",
            20.0,
            "attention",
        ),
        (
            "b200",
            "attention:batch=4,heads=8,heads_k=2,seq_q=1,seq_k=128,head_dim=64,dtype=bf16",
            10.0,
            "decode attention",
        ),
        (
            "b200",
            "attention:batch=4,heads=8,seq_q=196,head_dim=64,dtype=bf16",
            15.0,
            "encoder attention",
        ),
    ]
    rows = data.read_public(folder)
    norm = rows.pop(5)
    rows = [row for row in rows if row.kernel.family != "grouped product"]
    assert (norm.kernel.family, norm.kernel.figures, norm.group) == (
        "norm",
        (16, 32, 2048, 2048),
        "ln, train",
    )
    assert [(row.device.name, row.us, row.group) for row in rows] == [(e[0], e[2], e[3]) for e in expected]
    for row, (name, text, _, _) in zip(rows, expected, strict=True):
        (kernel,) = library_kernels(workloads.parse(text), device.find(name))
        assert row.kernel == kernel


def test_layers_of_experts_are_grouped_products_with_shares_of_their_time(folder: Path) -> None:
    """Expect the sizes of one of eight devices, and gate and up to take about twice as long as down."""
    rows = [row for row in data.read_public(folder) if row.kernel.family == "grouped product"]
    balanced, skewed = rows
    assert [row.group for row in rows] == ["layers of experts, balanced", "layers of experts, skewed"]
    assert balanced.kernel.figures[:2] == (4, 24)
    assert skewed.kernel.figures[:2] == (16, 96)
    for row, inner in ((balanced, 512), (skewed, 256)):
        groups, m, n, k, *_, skew = row.kernel.figures
        assert (n, k) in ((2 * inner, 1024), (1024, inner))
        assert (30 < row.us < 45) == (k == 1024)
        assert 15 < row.us < 45
        text = f"grouped_gemm:groups={groups:.0f},m={m:.0f},n={n:.0f},k={k:.0f},dtype=bf16"
        skews = "zipf" if skew else "uniform"
        (kernel,) = library_kernels(workloads.parse(f"{text},skew={skews}"), row.device)
        assert row.kernel == kernel


def test_devices_without_description_are_left_out(folder: Path) -> None:
    described = len(data.read_public(folder))
    packed(folder / "library_gemm_gx1.csv.gz", PRODUCTS, "NVIDIA GX1,x,bfloat16,64,96,128,0.004")
    assert len(data.read_public(folder)) == described


def test_missing_data_sets_are_named(folder: Path) -> None:
    (folder / "neusight_ops.csv.gz").unlink()
    with pytest.raises(InputError, match=r"all public data sets.*neusight_ops"):
        data.read_public(folder)


def test_tables_are_of_one_skill_type_and_device(folder: Path) -> None:
    tables = data.group_by_device(data.read_public(folder))
    counts = {(t.skill, t.arithmetic, t.device.name): len(t.us) for t in tables}
    assert counts[("product f32", "f32", "t4")] == 2
    assert counts[("product 16-bit", "bf16", "b200")] == counts[("product 8-bit", "e4m3", "b200")] == 1
    assert sum(counts.values()) == 14
    products = next(t for t in tables if t.skill == "product f32")
    assert products.figures.shape == (2, 7)
    assert products.us.tolist() == [500.0, 250.0]
    assert products.group.tolist() == ["bmm, train", "linear, test"]


# ------------------------------------------------------------------------------- measurements of one's own


def own(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("time_us,workload,device", *lines)) + "\n", encoding="utf-8")
    return path


def test_read_file_reads_a_table_of_measurements(tmp_path: Path) -> None:
    path = own(
        tmp_path / "own.csv",
        '12.5,"softmax:rows=64,cols=64,dtype=f32",h100-sxm',
        '25,"gated_gemm:m=64,n=64,k=64,dtype=f16",h100-sxm',  # skipped: the time of several kernels
        '7,"gemm:dtype=f16,m=64,n=64,k=64",t4',
    )
    rows = data.read_file(path)
    assert [(row.device.name, row.us, row.group) for row in rows] == [
        ("h100-sxm", 12.5, "softmax"),
        ("t4", 7.0, "gemm"),
    ]
    assert rows[1].kernel.figures == (1, 64, 64, 64, 2, 2, 0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('5,"softmax:rows=8,cols=8,dtype=f32",h900', "unknown device 'h900'"),
        ('5,"softmax:rows=8,cols=8,dtype=f32",cpu', "is not a GPU"),
        ('5,"softmax:rows=8,cols=8,dtype=f32"', "unknown device ''"),
        ("5", "unknown device ''"),
        ('5,"softmax:rows=0,cols=8,dtype=f32",t4', "rows"),
        ('0,"softmax:rows=8,cols=8,dtype=f32",t4', "must be positive"),
        ('nan,"softmax:rows=8,cols=8,dtype=f32",t4', "must be positive"),
        ('inf,"softmax:rows=8,cols=8,dtype=f32",t4', "must be positive"),
        ('fast,"softmax:rows=8,cols=8,dtype=f32",t4', "fast"),
    ],
)
def test_invalid_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = own(tmp_path / "own.csv", '12.5,"softmax:rows=64,cols=64,dtype=f32",h100-sxm', line)
    with pytest.raises(InputError, match=f"own.csv, line 3: .*{said}"):
        data.read_file(path)


def test_columns_and_files_that_are_missing_are_named(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("time_us,workload\n5,softmax\n")
    with pytest.raises(InputError, match=r"missing column .device."):
        data.read_file(tmp_path / "own.csv")
    with pytest.raises(InputError, match=r"none\.csv"):
        data.read_file(tmp_path / "none.csv")


def exported(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def facts(on: Device, **changed: object) -> dict[str, object]:
    fields = {field: getattr(on, field) for field in Device.__dataclass_fields__}
    return {"what": "device", "key": on.key, **fields, "since": "2026", **changed}


def measurement(us: float, text: str, key: str, kind: str = "measured") -> dict[str, object]:
    return {
        "what": "measurement",
        "device": key,
        "workload": text,
        "outcome": {"kind": kind, "median_us": us},
    }


def test_the_fastest_of_an_exported_workload_counts(tmp_path: Path) -> None:
    text, second = "softmax:rows=64,cols=64,dtype=f32", "softmax:rows=8,cols=8,dtype=f32"
    path = exported(
        tmp_path / "own.jsonl",
        facts(A100, name="mine", sm_count=90),  # a device without a description
        facts(P100, kind="cpu", name="host"),
        {"what": "run"},
        measurement(5.0, text, A100.key),
        measurement(3.0, text, A100.key),
        measurement(4.0, text, A100.key),
        measurement(1.0, text, A100.key, kind="wrong"),
        measurement(9.0, second, A100.key),
        measurement(1.0, text, P100.key),
    )
    rows = data.read_file(path)
    assert [(row.device.name, row.device.sm_count, row.us) for row in rows] == [
        ("mine", 90, 3.0),
        ("mine", 90, 9.0),
    ]
    (table,) = data.group_by_device(rows)
    assert table.device.sm_count == 90


@pytest.mark.parametrize(
    "line", ["{", '{"what": "measurement"}', json.dumps(measurement(-1.0, "x", A100.key))]
)
def test_a_bad_line_of_an_export_is_named(tmp_path: Path, line: str) -> None:
    path = exported(tmp_path / "own.jsonl", facts(A100))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputError, match=r"own.jsonl, line 2: "):
        data.read_file(path)


# ------------------------------------------------------------------------------------------------ experts


def table(
    on: Device, times: float = 1.0, *, steep: float = 0.0, names: Iterable[str] = ("a", "b")
) -> MeasuredKernels:
    """Return softmax of many sizes that take `times` their roofline time, and times ``rows ** steep``."""
    rows, cols = np.array(list(itertools.product(2 ** np.arange(4, 20), 2 ** np.arange(4, 14)))).T
    figures = (rows, cols, 4 * rows * cols, 4 * rows * cols)
    return scaled("softmax", on, figures, np.resize(np.array(list(names)), len(rows)), times * rows**steep)


def scaled(skill: str, on: Device, figures: Iterable[Any], group: Any, factor: Any) -> MeasuredKernels:
    """Return f32 kernels that take their roofline time, multiplied by a factor."""
    kernels = MeasuredKernels(
        skill=skill,
        family=skill.partition(" ")[0],
        arithmetic="f32",
        device=on,
        figures=np.stack(list(figures), axis=1).astype(float),
        us=np.ones(len(group)),
        kernel_us=np.ones(len(group)),
        group=group,
        floor_us=np.zeros(len(group)),
        lead_us=np.zeros(len(group)),
    )
    kernels.us[:] = kernels.kernel_us[:] = factor * fit.table_roofline(kernels).us
    return kernels


def behind_host(kernels: MeasuredKernels, floor_us: float, lead_us: float) -> MeasuredKernels:
    """Return the kernels as they are measured behind a host."""
    unit = np.ones(len(kernels.us))
    us = np.maximum(floor_us, lead_us + kernels.us)
    return dataclasses.replace(kernels, us=us, floor_us=floor_us * unit, lead_us=lead_us * unit)


@pytest.mark.usefixtures("learns")
def test_an_expert_learns_a_factor_and_a_trend() -> None:
    for steep, allowed in ((0.0, 0.001), (0.1, 0.08)):
        trained = fit.train_expert(table(A100, 1.5, steep=steep))
        missed = fit.errors(trained, fit.assemble_model({"softmax": [trained]}))
        assert np.abs(missed).max() < allowed
        assert -allowed < trained.expert.near.low <= 0 <= trained.expert.near.high < allowed
    features = trained.roofline.features
    assert trained.expert.least.tolist() == features.min(axis=0).tolist()
    assert trained.expert.most.tolist() == features.max(axis=0).tolist()
    assert trained.expert.device == "a100-80-sxm"


@pytest.mark.usefixtures("learns")
def test_an_expert_learns_times_without_the_host() -> None:
    plain = table(A100, 1.5, steep=0.1)
    hosted = behind_host(plain, 40.0, 20.0)
    assert 0 < hosted.visible.mean() < 1
    trained = fit.train_expert(hosted)
    missed = fit.errors(trained, fit.assemble_model({"softmax": [trained]}))
    assert len(missed) == hosted.visible.sum()
    assert np.abs(missed).max() < 0.08
    assert trained.expert.least_us == plain.us[hosted.visible].min()
    unknown = dataclasses.replace(hosted, kernel_us=np.where(hosted.visible, hosted.kernel_us, np.nan))
    retrained = fit.train_expert(unknown).expert
    assert retrained.least_us == trained.expert.least_us
    assert retrained.least[0] > trained.expert.least[0]  # the hidden kernels are those with the fewest bytes


@pytest.mark.usefixtures("learns")
def test_the_same_table_gives_the_same_expert() -> None:
    once, repeated, of_h100 = (fit.train_expert(table(on, steep=0.1)).expert for on in (A100, A100, H100))
    assert once.near == repeated.near
    for name, array in once.forest.arrays().items():
        assert np.array_equal(array, repeated.forest.arrays()[name])
    assert once.near != of_h100.near


def products(on: Device, *, of_models: float | None) -> MeasuredKernels:
    """Return products: odd sizes take their roofline time, even ones `of_models` times that if given."""
    odd = np.array(list(itertools.product(range(33, 2000, 130), repeat=3)))
    even = 16 * (odd[::3] // 16 + 1) if of_models else odd[:0]
    sizes = np.concatenate([odd, even])
    unit = np.ones(len(sizes))
    group = np.array(["at random"] * len(odd) + ["of models"] * len(even))
    factor = np.where(group == "of models", of_models or 1.0, 1.0)
    return scaled("product f32", on, (unit, *sizes.T, 4 * unit, 4 * unit, 0 * unit), group, factor)


@pytest.mark.usefixtures("learns")
def test_correction_for_random_sizes_is_the_lower_median() -> None:
    trained = [
        fit.train_expert(products(on, of_models=times))
        for on, times in ((A100, None), (H100, 0.8), (P100, 0.9), (device.find("t4"), 0.7))
    ]
    assert [expert.even for expert in trained] == [
        None,
        *(pytest.approx(np.log(t), abs=0.02) for t in (0.8, 0.9, 0.7)),
    ]
    experts = fit.assemble_model({"product f32": trained}).experts["product f32"]
    assert [expert.even for expert in experts] == [pytest.approx(np.log(0.8), abs=0.02), 0.0, 0.0, 0.0]
    two = fit.assemble_model({"product f32": trained[:3]}).experts["product f32"]
    assert two[0].even == pytest.approx(np.log(0.9), abs=0.02)
    alone = fit.assemble_model({"product f32": trained[:1]}).experts["product f32"]
    assert alone[0].even == 0.0


def test_rows_are_divided_into_training_and_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "ROWS_PER_GROUP", 40)
    group = np.array(["many"] * 100 + ["few"] * 10)
    seen, unseen = fit.divide_rows(group, np.random.default_rng(0))
    assert sorted([*seen, *unseen]) == list(range(110))
    assert np.unique(group[seen], return_counts=True)[1].tolist() == [8, 40]


def test_groups_have_equal_weight() -> None:
    weights = fit.equal_group_weights(np.array(["many"] * 9 + ["few"] * 3))
    assert weights[:9].sum() == pytest.approx(weights[9:].sum())
    assert weights.mean() == pytest.approx(1.0)


def test_spread_contains_90_percent_of_errors() -> None:
    errors = np.linspace(-1, 3, 2001)
    interval = fit.spread([errors])
    assert (interval.low, interval.high) == pytest.approx((-0.8, 2.8), abs=0.01)
    assert np.mean((errors >= interval.low) & (errors <= interval.high)) == pytest.approx(0.9, abs=0.002)
    shifted = fit.spread([errors + 10])
    assert (shifted.low, shifted.high) == (
        0.0,
        pytest.approx(12.8, abs=0.01),
    )  # the interval includes the prediction


def test_sets_of_errors_have_equal_weight() -> None:
    interval = fit.spread([np.zeros(9000), np.zeros(0), np.full(30, -2.0)])
    assert (interval.low, interval.high) == (-2.0, 0.0)


@pytest.mark.usefixtures("learns")
def test_errors_seen_on_few_devices_are_stretched() -> None:
    stretched = [fit.stretch_for_few(devices) for devices in (2, 3, 4, 7, 1000)]
    assert stretched == sorted(stretched, reverse=True)
    assert stretched[0] == fit.MOST_OF_FEW
    assert stretched[-1] == pytest.approx(1, abs=0.01)
    assert 1.2 < stretched[3] < 1.3


@pytest.mark.usefixtures("learns")
def test_far_error_comes_from_devices_left_out() -> None:
    """Predict each of two devices, apart by a factor of 4, from the other one."""
    trained = [fit.train_expert(table(A100, 1.0)), fit.train_expert(table(H100, 4.0))]
    far = fit.assemble_model({"softmax": trained}).far["softmax"]
    assert (far.low, far.high) == pytest.approx(
        (-fit.MOST_OF_FEW * np.log(4), fit.MOST_OF_FEW * np.log(4)), rel=0.01
    )
    single = fit.train_expert(table(A100, steep=0.1))
    alone = fit.assemble_model({"softmax": [single]}).far["softmax"]
    assert alone.low == pytest.approx(fit.FAR_OF_ONE * single.expert.near.low)
    assert alone.high == pytest.approx(fit.FAR_OF_ONE * single.expert.near.high)


# ---------------------------------------------------------------------------------------- devices left out


@pytest.mark.usefixtures("learns")
def test_each_device_is_left_out_in_turn() -> None:
    trained = [fit.train_expert(table(on, times)) for on, times in ((A100, 1.5), (H100, 1.5), (P100, 3.0))]
    errors = list(evaluation.evaluate_holdouts({"softmax": trained}))
    assert [(error.device, error.group, error.rows) for error in errors] == [
        (expert.table.device.name, group, 80) for expert in trained for group in ("a", "b")
    ]
    p100 = errors[-1]
    assert p100.percent == pytest.approx(50, abs=1)
    assert p100.bias_percent == pytest.approx(-50, abs=1)
    assert p100.within_percent == 0  # the two others agree, so the interval has no width
    times = trained[-1].roofline
    b = trained[-1].table.group == "b"
    roofline = np.maximum(times.compute_us, times.memory_us)[b]
    missed = 100 * np.mean(1 - roofline / trained[-1].table.us[b])
    assert p100.others_percent["roofline"] == pytest.approx(missed)
    assert set(p100.others_percent) == {
        "roofline",
        "roofline / median utilisation",
        "trees without roofline features",
    }
    assert p100.kernel_percent == pytest.approx(p100.percent)
    assert p100.hidden == 0
    # H100 is nearer to A100, which has the same ratio; P100 widens the interval but hardly changes the
    # prediction.
    assert errors[0].percent < 25
    assert errors[0].within_percent == 100
    assert errors[0].below_bound == 0
    assert evaluation.coverage(errors) == pytest.approx(np.mean([error.within_percent for error in errors]))


@pytest.mark.usefixtures("learns")
def test_kind_measured_on_one_device_has_no_holdout_error() -> None:
    assert list(evaluation.evaluate_holdouts({"softmax": [fit.train_expert(table(A100))]})) == []


# -------------------------------------------------------------------------------------------- the command


def measured(path: Path, on: Iterable[Device], count: int) -> Path:
    """Write softmax of `count` sizes on each device, each twice its roofline time."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("device", "workload", "time_us"))
        for gpu in on:
            kernels = table(gpu, 2.0)
            for (row, col, *_), us in list(zip(kernels.figures, kernels.us, strict=True))[:count]:
                rows.writerow((gpu.name, f"softmax:rows={row:.0f},cols={col:.0f},dtype=f32", us))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["training", *map(str, arguments)])
    return command.main()


@pytest.mark.usefixtures("learns")
def test_the_command_writes_model_and_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out, errors = tmp_path / "model.npz", tmp_path / "results" / "errors.json"
    files = [measured(tmp_path / f"{gpu.name}.csv", [gpu], 120) for gpu in (A100, H100)]
    arguments = [argument for path in files for argument in ("--measured", path)]
    assert run(monkeypatch, *arguments, "--out", out, "--errors", errors) == 0
    model = ForecastModel.load(out)
    assert [expert.device for expert in model.experts["softmax"]] == ["a100-80-sxm", "h100-sxm"]
    kernels = table(P100)
    blend = model.blend("softmax", fit.table_roofline(kernels), P100, "f32")
    assert blend.us / fit.table_roofline(kernels).us == pytest.approx(2.0, rel=0.01)
    entries = json.loads(errors.read_text())
    assert [(error["device"], error["group"], error["rows"]) for error in entries] == [
        ("a100-80-sxm", "softmax", 120),
        ("h100-sxm", "softmax", 120),
    ]
    assert all(error["percent"] < 1 for error in entries)
    printed = capsys.readouterr().err
    assert "softmax on h100-sxm: 120 rows" in printed
    assert "without a100-80-sxm: softmax: 0.0 %" in printed
    assert "coverage of the 90 % interval: 100.0 %" in printed


def test_too_few_rows_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    own_rows = measured(tmp_path / "own.csv", [A100], fit.FEWEST - 1)
    assert run(monkeypatch, "--measured", own_rows, "--out", tmp_path / "model.npz") == 1
    assert not (tmp_path / "model.npz").exists()
    printed = capsys.readouterr().err
    assert "99 rows are too few" in printed
    assert "error: no measurements to train on" in printed


def test_what_cannot_be_read_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run(monkeypatch, "--data", tmp_path, "--out", tmp_path / "model.npz") == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} must contain all public data sets")


def test_ctrl_c_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(_: MeasuredKernels) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "train_expert", interrupted)
    own_rows = measured(tmp_path / "own.csv", [A100], 120)
    assert run(monkeypatch, "--measured", own_rows, "--out", tmp_path / "model.npz") == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.usefixtures("learns")
def test_errors_of_a_device_left_out_contain_the_median_host_of_the_others() -> None:
    hosts = [(A100, 30.0, 20.0), (H100, 40.0, 20.0), (P100, 90.0, 60.0)]
    trained = [fit.train_expert(behind_host(table(on, 1.5), floor, lead)) for on, floor, lead in hosts]
    errors = list(evaluation.evaluate_holdouts({"softmax": trained}))
    a100, p100 = errors[0], errors[-1]
    assert a100.hidden > 0
    assert p100.kernel_percent < 1
    # The others have floors of 30 and 40 us and leads of 20 us, and the kernels are predicted exactly.
    us = trained[2].table.kernel_us[trained[2].table.group == "b"]
    expected = 100 * np.mean(1 - np.maximum(35.0, 20.0 + us) / np.maximum(90.0, 60.0 + us))
    assert p100.percent == pytest.approx(expected, abs=0.5)
    assert p100.others_percent["roofline"] < 60
