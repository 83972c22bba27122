"""Batch statistics: definition, accepted algorithms for the variance, and properties of the kernels."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import GENERATIONS, H100, exact, parser, planted
from tests.support import needs_compiler, needs_numba_cuda
from tunebench import predict
from tunebench.device import find, local_cpu
from tunebench.dtype import numpy_dtype
from tunebench.emulate.emulator import emulate
from tunebench.emulate.numba_simulator import simulate
from tunebench.errors import InputError
from tunebench.kernels.batchnorm_stats import cuda_column, numba_cpu, numba_cuda
from tunebench.measure.verify import worst_error
from tunebench.space import Config
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats

Array = NDArray[Any]
F32 = np.float32


batchnorm = parser(BatchNormStats)


def shares(w: BatchNormStats, inputs: dict[str, Array], outputs: dict[str, Array]) -> dict[str, float]:
    """Return the largest error of each output as a fraction of its tolerance."""
    references = w.reference(exact(inputs))
    return {name: worst_error(w, outputs, {name: reference}) for name, reference in references.items()}


# -- definition ---------------------------------------------------------------------------------------------


def test_forward_reference_matches_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[BatchNormStats.__module__], "BLOCK_ELEMENTS", 11)  # two rows at a time
    w = batchnorm("rows=7,cols=5,dtype=f32,eps=0.25,momentum=0.3")
    t = exact(w.draw(np.random.default_rng(0)))
    values = {name: reference.value for name, reference in w.reference(t).items()}
    assert tuple(values) == ("mean", "rstd", "new_mean", "new_var")
    for j in range(5):
        column = [float(value) for value in t["x"][:, j]]
        mean = math.fsum(column) / 7
        apart = math.fsum((value - mean) ** 2 for value in column)
        assert values["mean"][j] == pytest.approx(mean, rel=1e-12)
        assert values["rstd"][j] == pytest.approx(1 / math.sqrt(apart / 7 + 0.25), rel=1e-12)
        decayed = 0.7 * t["running_mean"][j], 0.7 * t["running_var"][j]
        assert values["new_mean"][j] == pytest.approx(decayed[0] + 0.3 * mean, rel=1e-12)
        assert values["new_var"][j] == pytest.approx(decayed[1] + 0.3 * apart / 6, rel=1e-12)


def test_references_match_torch() -> None:
    torch = pytest.importorskip("torch")
    forward = batchnorm("rows=11,cols=6,dtype=f32,eps=0.001,momentum=0.2")
    t = exact(forward.draw(np.random.default_rng(1)))
    statistics = {name: reference.value for name, reference in forward.reference(t).items()}
    running = torch.tensor(t["running_mean"]), torch.tensor(t["running_var"])
    gamma, beta = torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    gamma.requires_grad_()
    beta.requires_grad_()
    y = torch.nn.functional.batch_norm(torch.tensor(t["x"]), *running, gamma, beta, True, 0.2, 0.001)
    np.testing.assert_allclose(
        y.detach().numpy(), (t["x"] - statistics["mean"]) * statistics["rstd"], rtol=1e-8, atol=1e-8
    )
    np.testing.assert_allclose(running[0].numpy(), statistics["new_mean"], rtol=1e-12)
    np.testing.assert_allclose(running[1].numpy(), statistics["new_var"], rtol=1e-12)
    dy = np.random.default_rng(2).standard_normal(y.shape)
    y.backward(torch.tensor(dy))
    backward = batchnorm("rows=11,cols=6,dtype=f32,direction=backward")
    inputs = {"dy": dy, "x": t["x"], "mean": statistics["mean"], "rstd": statistics["rstd"]}
    assert tuple(inputs) == tuple(tensor.name for tensor in backward.inputs())
    gradients = backward.reference(inputs)
    np.testing.assert_allclose(gradients["dgamma"].value, gamma.grad.numpy(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(gradients["dbeta"].value, beta.grad.numpy(), rtol=1e-9, atol=1e-9)


def test_relu_blocks_gradients_where_result_is_zero() -> None:
    torch = pytest.importorskip("torch")
    w = batchnorm("rows=11,cols=6,dtype=f32,direction=backward,act=relu")
    t = exact(w.draw(np.random.default_rng(4)))
    assert np.count_nonzero(t["y"] == 0) > 10
    gradients = {name: reference.value for name, reference in w.reference(t).items()}
    assert tuple(tensor.name for tensor in w.outputs()) == ("dgamma", "dbeta", "dz")
    z = torch.tensor(np.where(t["y"] > 0, t["y"], -1.0), requires_grad=True)
    torch.relu(z).backward(torch.tensor(t["dy"]))
    np.testing.assert_array_equal(gradients["dz"], z.grad.numpy())
    plain = batchnorm("rows=11,cols=6,dtype=f32,direction=backward")
    sums = plain.reference({**{name: t[name] for name in ("x", "mean", "rstd")}, "dy": z.grad.numpy()})
    for name, reference in sums.items():
        np.testing.assert_allclose(gradients[name], reference.value, rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rows=2,cols=8,act=relu", "act=relu needs direction=backward, not forward; leave it out"),
        ("rows=1,cols=8", "rows=1 must be at least 2: one value a column has no unbiased variance"),
        ("rows=2,cols=8,momentum=1.5", "momentum=1.5 must be at most 1"),
        ("rows=2,cols=8,momentum=0", "momentum=0.0 must be a number from"),
        ("rows=2,cols=8,eps=0.1,direction=backward", "eps=0.1 needs direction=forward, not backward"),
        ("rows=2,cols=8,momentum=0.2,direction=backward", "leave it out: backward has no running statistics"),
    ],
)
def test_invalid_combinations_are_rejected(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        batchnorm(f"{text},dtype=f32")
    assert says in str(caught.value)


def test_defaults_are_omitted_from_the_text() -> None:
    explicit = batchnorm("rows=4,cols=8,dtype=f16,eps=0.00001,momentum=0.1,direction=forward")
    assert str(explicit) == "batchnorm_stats:rows=4,cols=8,dtype=f16"


def test_columns_may_be_padded_but_not_exceeded() -> None:
    allowed_changes = batchnorm("rows=4,cols=8,dtype=f16").may_change()
    assert (dict(allowed_changes.padding), allowed_changes.items) == ({"cols": "zeros"}, ())


def test_every_kind_of_column_is_drawn() -> None:
    x = batchnorm("rows=1000,cols=16,dtype=f16").draw(np.random.default_rng(0))["x"].astype(np.float64)
    level, spread = np.abs(x.mean(axis=0)), x.std(axis=0)
    assert np.all(level[1::4] > 60 * spread[1::4])
    assert np.all(spread[3::4] < 0.004)
    assert np.all(level[[0, 2]] > 0.5)


def test_forecast_treats_statistics_as_a_memory_pass() -> None:
    prediction = predict(batchnorm("rows=1605632,cols=64,dtype=f16"), find("h100-sxm"))
    assert prediction.time_us > prediction.bound_us > 0
    assert "as an elementwise operation with the same bytes" in prediction.because


# -- accepted algorithms for the variance --------------------------------------------------------------------


def added(values: Array) -> Array:
    """Add rows sequentially in f32, the order with the largest error."""
    total: Array = np.add.accumulate(values.astype(F32), axis=0)[-1]
    return total


def two_passes(x: Array) -> tuple[Array, Array]:
    mean = added(x) / F32(len(x))
    return mean, added(np.square(x - mean)) / F32(len(x))


def welford(x: Array) -> tuple[Array, Array]:
    mean, apart = np.zeros(x.shape[1:], F32), np.zeros(x.shape[1:], F32)
    for seen, row in enumerate(x, 1):
        difference = row - mean
        mean = mean + difference / F32(seen)
        apart = apart + difference * (row - mean)
    return mean, apart / F32(len(x))


def squares_less_square(x: Array) -> tuple[Array, Array]:
    mean = added(x) / F32(len(x))
    return mean, np.maximum(added(np.square(x)) / F32(len(x)) - np.square(mean), 0)


def outputs_of(w: BatchNormStats, inputs: dict[str, Array], mean: Array, variance: Array) -> dict[str, Array]:
    share = F32(w.momentum)
    kept_mean, kept_var = ((F32(1) - share) * inputs[f"running_{name}"] for name in ("mean", "var"))
    return {
        "mean": mean,
        "rstd": F32(1) / np.sqrt(variance + F32(w.eps)),
        "new_mean": kept_mean + share * mean,
        "new_var": kept_var + share * F32(w.unbiased) * variance,
    }


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows", [2, 37, 4001])
@pytest.mark.parametrize("way", [two_passes, welford])
def test_algorithms_with_deviations_pass_verification(
    way: Callable[[Array], tuple[Array, Array]], rows: int, dtype: str
) -> None:
    w = batchnorm(f"rows={rows},cols=64,dtype={dtype}")
    for seed in range(3):
        inputs = w.draw(np.random.default_rng(seed))
        errors = shares(w, inputs, outputs_of(w, inputs, *way(inputs["x"].astype(F32))))
        assert max(errors.values()) < 1, errors


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows", [37, 4001])
def test_mean_square_minus_squared_mean_fails_verification(rows: int, dtype: str) -> None:
    w = batchnorm(f"rows={rows},cols=64,dtype={dtype}")
    inputs = w.draw(np.random.default_rng(0))
    errors = shares(w, inputs, outputs_of(w, inputs, *squares_less_square(inputs["x"].astype(F32))))
    assert errors["mean"] < 1 < errors["rstd"]


@pytest.mark.parametrize("rows", [37, 4001])
def test_slightly_wrong_results_fail_verification(rows: int) -> None:
    """Drop a row, change eps, keep the biased variance, or change the momentum."""
    w = batchnorm(f"rows={rows},cols=64,dtype=f16")
    inputs = w.draw(np.random.default_rng(0))
    right = outputs_of(w, inputs, *two_passes(inputs["x"].astype(F32)))
    less = outputs_of(w, inputs, *two_passes(inputs["x"][:-1].astype(F32)))
    _, variance = two_passes(inputs["x"].astype(F32))
    for name, wrong in (
        ("mean", less["mean"]),
        ("rstd", less["rstd"]),
        ("rstd", F32(1) / np.sqrt(variance + F32(1e-6))),
        ("new_mean", F32(0.9) * inputs["running_mean"]),
        ("new_var", F32(0.9) * inputs["running_var"] + F32(0.1) * variance),
        ("new_var", right["new_var"] * F32(1.001)),
    ):
        assert shares(w, inputs, {**right, name: wrong})[name] > 1, name


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_gradients_of_deviations_pass_and_differences_of_large_sums_fail(dtype: str) -> None:
    w = batchnorm(f"rows=4001,cols=64,dtype={dtype},direction=backward")
    inputs = w.draw(np.random.default_rng(0))
    inputs["mean"] += F32(1000)
    inputs["x"] = (inputs["x"].astype(F32) + F32(1000)).astype(numpy_dtype(w.dtype))
    dy, x = inputs["dy"].astype(F32), inputs["x"].astype(F32)
    right = {"dgamma": added(dy * (x - inputs["mean"])) * inputs["rstd"], "dbeta": added(dy)}
    assert max(shares(w, inputs, right).values()) < 1
    apart = (added(dy * x) - inputs["mean"] * added(dy)) * inputs["rstd"]
    less = {"dgamma": added((dy * (x - inputs["mean"]))[:-1]) * inputs["rstd"], "dbeta": added(dy[:-1])}
    assert shares(w, inputs, {**right, "dgamma": apart})["dgamma"] > 1
    assert min(shares(w, inputs, less).values()) > 1


# -- the kernels ---------------------------------------------------------------------------------------------

ONE_THREAD = Config({"col_threads": 64, "row_threads": 1, "vector": 1, "unroll": 4, "split": 1})
"""One thread per column, which processes all rows."""
SPLIT = Config({"col_threads": 16, "row_threads": 8, "vector": 2, "unroll": 2, "split": 8})
ON_PROCESSOR = [
    Config({"block": 64, "parts": parts, "unroll": unroll}) for parts, unroll in ((1, 4), (16, 1))
]


def shifted(w: BatchNormStats, mean: float, first: float | None = None) -> dict[str, Array]:
    """Return inputs whose columns have this mean and a deviation of 1, except for the first row."""
    generator = np.random.default_rng(5)
    inputs = w.draw(generator)
    x = generator.standard_normal((w.rows, w.cols)) + mean
    if first is not None:
        x[0] = first
    return {**inputs, "x": x.astype(numpy_dtype(w.dtype))}


FAR = [
    ("f32", 100.0, None),
    ("f32", 100.0, 0.0),
    ("f32", 0.0, 1000.0),
    ("f16", 1000.0, None),
    ("f16", 1000.0, 0.0),
    ("bf16", 64.0, None),
]


@needs_compiler
@pytest.mark.parametrize("config", [ONE_THREAD, SPLIT], ids=["one thread", "split"])
@pytest.mark.parametrize(("dtype", "mean", "first"), FAR)
def test_means_may_be_far_from_zero_in_cuda(
    dtype: str, mean: float, first: float | None, config: Config
) -> None:
    w = batchnorm(f"rows=3000,cols=64,dtype={dtype}")
    assert cuda_column.VARIANT.configs(w, H100).row(config) is not None
    inputs = shifted(w, mean, first)
    errors = shares(w, inputs, emulate(cuda_column.VARIANT, w, config, inputs))
    assert max(errors.values()) < 0.5, errors


@pytest.mark.parametrize("config", ON_PROCESSOR, ids=["one part", "parts"])
@pytest.mark.parametrize(("dtype", "mean", "first"), FAR)
def test_means_may_be_far_from_zero_on_cpu(
    dtype: str, mean: float, first: float | None, config: Config
) -> None:
    w = batchnorm(f"rows=3000,cols=70,dtype={dtype}")
    inputs = shifted(w, mean, first)
    errors = shares(w, inputs, checks.run_on_cpu(numba_cpu.VARIANT, w, config, inputs))
    assert max(errors.values()) < 0.5, errors


@needs_compiler
def test_differences_from_the_first_value_only_fail_verification() -> None:
    """Sums of such differences grow with the rows; f16 inputs round them in the same direction each time."""
    w = batchnorm("rows=6000,cols=64,dtype=f16")
    inputs = shifted(w, 1000.0, 0.0)
    alone = planted(cuda_column.VARIANT, "AT_FIRST = 8, AT_ONCE = 32", "AT_FIRST = 0, AT_ONCE = 1u << 31")
    assert max(shares(w, inputs, emulate(alone, w, ONE_THREAD, inputs)).values()) > 1
    assert max(shares(w, inputs, emulate(cuda_column.VARIANT, w, ONE_THREAD, inputs)).values()) < 0.5


FORWARD = "rows=3003,cols=66,dtype=f32"
RELU = "rows=403,cols=66,dtype=f16,direction=backward,act=relu"


FAULTS = (
    (FORWARD, "if (top == line) sums.begin(held[0]);", ""),
    (FORWARD, "from[i] = to;", ""),
    (FORWARD, "first[i] = left;", ""),
    (FORWARD, "- moved * (first[i] + left)", ""),
    (FORWARD, "const float mean = some + total / rows;", "const float mean = some;"),
    (
        FORWARD,
        "const float centre = some + over_lines(total, met[0]) / rows;",
        "const float centre = some;",
    ),
    (FORWARD, "momentum * (found.second / (rows - 1))", "momentum * (found.second / rows)"),
    (FORWARD, "each + (share < more)", "each"),
    (FORWARD, "share * each + min(share, more)", "share * each"),
    (RELU, "<= 0.0f) gradient", "< 0.0f) gradient"),
    (RELU, "store_vec(dz + at, gradient);", "store_vec(dz + at, loaded.dy);"),
    (RELU, "to_float(gradient.at[i])", "to_float(loaded.dy.at[i])"),
)


def test_injected_faults_have_a_place() -> None:
    faults = ((planted(cuda_column.VARIANT, old, new), batchnorm(text), SPLIT) for text, old, new in FAULTS)
    checks.assert_faults_have_a_place(faults)


@needs_compiler
@pytest.mark.parametrize("fault", checks.sampled_faults(FAULTS))
def test_injected_faults_are_detected(fault: tuple[str, str, str]) -> None:
    text, old, new = fault
    w = batchnorm(text)
    inputs = w.draw(np.random.default_rng(0))
    assert max(shares(w, inputs, emulate(cuda_column.VARIANT, w, SPLIT, inputs)).values()) < 1
    wrong = emulate(planted(cuda_column.VARIANT, old, new), w, SPLIT, inputs)
    assert max(shares(w, inputs, wrong).values()) > 1


def broken(w: BatchNormStats) -> dict[str, Array]:
    """Return inputs with NaN and infinities in some columns."""
    inputs = w.draw(np.random.default_rng(0))
    inputs["x"][3, 1], inputs["x"][0, 2], inputs["x"][-1, 5] = np.nan, np.inf, -np.inf
    return inputs


def assert_broken(outputs: dict[str, Array]) -> None:
    """Check that columns with NaN or infinity have no finite result, and that others are unchanged."""
    for name in ("rstd", "new_var"):
        assert np.flatnonzero(np.isnan(outputs[name])).tolist() == [1, 2, 5], name
    for name in ("mean", "new_mean"):
        assert np.flatnonzero(~np.isfinite(outputs[name])).tolist() == [1, 2, 5], name


@needs_compiler
@pytest.mark.parametrize("config", [ONE_THREAD, SPLIT], ids=["one thread", "split"])
def test_nan_propagates_in_cuda(config: Config) -> None:
    w = batchnorm("rows=300,cols=66,dtype=f32")
    assert_broken(emulate(cuda_column.VARIANT, w, config, broken(w)))


@pytest.mark.parametrize("config", ON_PROCESSOR, ids=["one part", "parts"])
def test_nan_propagates_on_cpu(config: Config) -> None:
    w = batchnorm("rows=1100,cols=66,dtype=f32")
    assert_broken(checks.run_on_cpu(numba_cpu.VARIANT, w, config, broken(w)))


def assert_gradient_of_nan(w: BatchNormStats, run: Callable[[dict[str, Array]], dict[str, Array]]) -> None:
    """Check that dz is that of torch, whose relu passes the gradient of NaN."""
    torch = pytest.importorskip("torch")
    inputs = w.draw(np.random.default_rng(0))
    inputs["y"][3, 1] = np.nan
    y = torch.tensor(inputs["y"])
    expected = torch.where(y <= 0, 0, torch.tensor(inputs["dy"])).numpy()
    assert expected[3, 1] == inputs["dy"][3, 1]
    np.testing.assert_array_equal(run(inputs)["dz"], expected)
    np.testing.assert_array_equal(w.reference(exact(inputs))["dz"].value, expected)


RELU_F32 = "rows=37,cols=34,dtype=f32,direction=backward,act=relu"


@needs_compiler
def test_relu_passes_the_gradient_of_nan_in_cuda() -> None:
    w = batchnorm(RELU_F32)
    assert_gradient_of_nan(w, lambda inputs: emulate(cuda_column.VARIANT, w, ONE_THREAD, inputs))


@pytest.mark.parametrize("config", ON_PROCESSOR, ids=["one part", "parts"])
def test_relu_passes_the_gradient_of_nan_on_cpu(config: Config) -> None:
    w = batchnorm(RELU_F32)
    assert_gradient_of_nan(w, lambda inputs: checks.run_on_cpu(numba_cpu.VARIANT, w, config, inputs))


@needs_numba_cuda
def test_relu_passes_the_gradient_of_nan_in_numba_cuda() -> None:
    w = batchnorm(RELU_F32)
    config = numba_cuda.VARIANT.default(w, H100)
    assert_gradient_of_nan(w, lambda inputs: simulate(numba_cuda.VARIANT, w, config, inputs))


@given(
    rows=st.sampled_from([2, 3, 7, 64, 1000, 401408, 2**24]),
    cols=st.sampled_from([1, 2, 3, 5, 8, 64, 131, 1024, 2048, 50257, 2**20]),
    dtype=st.sampled_from(["f32", "f16", "bf16"]),
    direction=st.sampled_from(["forward", "backward", "backward,act=relu"]),
)
@settings(max_examples=40, deadline=None)
def test_the_default_is_a_valid_configuration(rows: int, cols: int, dtype: str, direction: str) -> None:
    w = batchnorm(f"rows={rows},cols={cols},dtype={dtype},direction={direction}")
    for variant in (cuda_column.VARIANT, numba_cuda.VARIANT):
        for device in GENERATIONS:
            table = variant.configs(w, device)
            assert table.row(variant.default(w, device)) is not None
            costs = variant.costs(w, table, device)
            checks.assert_work_is_not_overstated(w, costs)
            assert np.all(costs.fill_bytes * costs.blocks <= w.traffic().read_bytes * (1 + 1e-9))
    processor = numba_cpu.VARIANT
    assert processor.configs(w, local_cpu()).row(processor.default(w, local_cpu())) is not None


def test_few_columns_keep_the_device_busy() -> None:
    for direction in ("forward", "backward"):
        w = batchnorm(f"rows=401408,cols=64,dtype=f16,direction={direction}")
        first, last = cuda_column.VARIANT.launches(w, cuda_column.VARIANT.default(w, H100))
        assert first.grid[0] * first.grid[1] >= H100.sm_count
        assert last.arguments[0] == "partial"
    many = batchnorm("rows=512,cols=65536,dtype=f16")
    assert len(cuda_column.VARIANT.launches(many, cuda_column.VARIANT.default(many, H100))) == 1


def test_emulation_workloads_keep_row_alignment_and_are_small() -> None:
    w = batchnorm("rows=1048576,cols=4104,dtype=f16")
    table = cuda_column.VARIANT.configs(w, H100)
    for row in range(0, len(table), 13):
        config = table.config(row)
        small = cuda_column.VARIANT.emulation_workload(w, config)
        assert small.cols % config["vector"] == 0
        assert small.rows * small.cols < 2**23
