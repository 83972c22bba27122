"""Tables for notebooks, pandas and Arrow."""

from __future__ import annotations

import sys

import pytest

import tunebench
from tunebench import _console, device, kernels
from tunebench._dataframe import columns_of
from tunebench._notebook import html_grid, html_table
from tunebench.answer import Unmeasured
from tunebench.errors import MissingDependency
from tunebench.forecast.network import predict_network
from tunebench.training.cluster import TrainingCluster, TrainingJob, plan_training
from tunebench.tuning import Progress, progress_bar
from tunebench.workloads import parse
from tunebench.workloads.networks import NetworkRun, network


def test_cells_are_escaped_and_missing_values_left_out() -> None:
    text = html_table("<b>", [("a", "<script>"), ("b", None), ("c", 3)])
    assert "<script>" not in text
    assert text.count("<tr>") == 2
    assert "<caption>&lt;b&gt;</caption>" in text


def test_space_answer_and_prediction_have_tables() -> None:
    space = kernels.variant("softmax/numba_cpu").space
    assert all(f">{name}</th>" in space._repr_html_() for name in space.names)
    workload = parse("softmax:rows=16,cols=16,dtype=f32")
    prediction = tunebench.predict(workload, device.described()["a100-80-sxm"])
    assert "90 % prediction interval" in prediction._repr_html_()
    with pytest.warns(Unmeasured):
        answer = tunebench.lookup("softmax", rows=16, cols=16, dtype="f32", device="a100-80-sxm")
    assert answer.variant in answer._repr_html_()


def test_grid_aligns_numbers_and_escapes_cells() -> None:
    text = html_grid("name", ">time", rows=[("<b>", 3), (None, 4)])
    assert "&lt;b&gt;" in text
    assert '<td style="text-align:right">3</td>' in text
    assert text.count("<tr>") == 3


def test_rows_without_a_value_have_none() -> None:
    assert columns_of([{"a": 1}, {"a": 2, "b": 3}]) == {"a": [1, 2], "b": [None, 3]}


def test_configurations_and_predictions_convert_to_pandas_and_arrow() -> None:
    pandas = pytest.importorskip("pandas", reason="the extra `dataframe` is not installed")
    pytest.importorskip("pyarrow", reason="the extra `dataframe` is not installed")
    workload = parse("softmax:rows=16,cols=16,dtype=f32")
    table = kernels.variant("softmax/numba_cpu").configs(workload, device.local_cpu())
    frame = table.to_pandas()
    assert (len(frame), tuple(frame)) == (len(table), table.space.names)
    assert dict(frame.iloc[3]) == dict(table.config(3))
    assert table.to_arrow().to_pandas().equals(frame)
    predictions = tunebench.predict_all([workload, workload], device.described()["a100-80-sxm"])
    assert predictions.to_pandas()["time_us"].tolist() == [prediction.time_us for prediction in predictions]
    assert isinstance(predictions.to_pandas(), pandas.DataFrame)
    assert predictions.to_arrow().num_rows == 2
    assert "2 workloads on" in predictions._repr_html_()


def test_missing_pandas_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    table = kernels.variant("softmax/numba_cpu").configs(
        parse("softmax:rows=16,cols=16,dtype=f32"), device.local_cpu()
    )
    for convert in (table.to_pandas, table.to_arrow):
        with pytest.raises(MissingDependency, match=r"pip install .*(dataframe|pyarrow)"):
            convert()


def test_network_and_plans_have_tables() -> None:
    gpu = device.described()["a100-80-sxm"]
    run = NetworkRun(batch=1, seq=128, mode="infer", dtype="f16")
    predicted = predict_network(network("gpt2"), gpu, run)
    assert "90 % prediction interval" in predicted._repr_html_()
    job = TrainingJob(network=network("gpt2"), batch=8, seq=128)
    answer = plan_training(job, TrainingCluster.parse("2 x a100-80-sxm"), top=2, reasons=False)
    assert str(answer.result.best[1].plan) in answer._repr_html_()
    assert answer.to_columns()["time_us"] == [plan.step.time_us for plan in answer.result.best]


def test_progress_in_a_notebook_without_widgets_is_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = _console.console_class()(force_jupyter=True)
    plain = _console.console

    def console(*, stderr: bool = False, **options: bool) -> object:
        return plain(stderr=stderr, **options) if "notebook" in options else notebook

    monkeypatch.setattr(progress_bar, "console", console)
    monkeypatch.setattr(progress_bar, "find_spec", lambda name: None)
    seen = {"phase": "search", "outcomes": {"measured": 1}, "masked": 0, "cached": 0}
    with tunebench.show_progress(2) as show:
        show(Progress(done=1, total=2, best_us=8.0, bound_us=2.0, seconds_left=None, **seen))  # type: ignore[arg-type]
    assert "search 1/2: 1 measured, best 8 us, 4x the bound" in capsys.readouterr().out
