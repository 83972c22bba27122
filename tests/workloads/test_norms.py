"""layernorm and rmsnorm: references against loops and torch's autograd, and sharpness of tolerances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError
from tunebench.measure.verify import share_of
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.common.norm import Norm

Array = NDArray[Any]
F32 = np.float32


def norm(text: str) -> Norm:
    workload = parse(text)
    assert isinstance(workload, Norm)
    return workload


def exact(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.asarray(value, np.float64) for name, value in inputs.items()}


# -- references ----------------------------------------------------------------------------------------------


def by_loops(workload: Norm, t: Mapping[str, Array]) -> dict[str, Array]:
    """Compute forward outputs one element at a time."""
    outputs = {tensor.name: np.zeros(tensor.shape) for tensor in workload.outputs()}
    n = workload.cols
    for i in range(workload.rows):
        row = [float(t["x"][i, j]) for j in range(n)]
        if "bias" in t:
            row = [value + float(t["bias"][j]) for j, value in enumerate(row)]
        if "residual" in t:
            row = [value + float(t["residual"][i, j]) for j, value in enumerate(row)]
        mean = math.fsum(row) / n if workload.operator == "layernorm" else 0.0
        rstd = 1 / math.sqrt(math.fsum((value - mean) ** 2 for value in row) / n + workload.eps)
        for name, value in (("z", row), ("mean", mean), ("rstd", rstd)):
            if name in outputs:
                outputs[name][i] = value
        for j, value in enumerate(row):
            shift = t["beta"][j] if workload.operator == "layernorm" else 0.0
            outputs["y"][i, j] = (value - mean) * rstd * t["gamma"][j] + shift
    return outputs


@pytest.mark.parametrize(
    "text",
    [
        "layernorm:rows=3,cols=7,dtype=f32,prologue=residual,eps=0.25",
        "layernorm:rows=3,cols=7,dtype=f16,prologue=bias+residual,stats=true",
        "rmsnorm:rows=4,cols=7,dtype=f32,stats=true,eps=1e-12",
        "rmsnorm:rows=3,cols=7,dtype=bf16,prologue=residual,stats=true",
    ],
)
def test_forward_equals_loops(text: str) -> None:
    workload = norm(text)
    inputs = exact(workload.draw(np.random.default_rng(0)))
    expected = by_loops(workload, inputs)
    for name, reference in workload.reference(inputs).items():
        np.testing.assert_allclose(reference.value, expected[name], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("operator", ["layernorm", "rmsnorm"])
def test_gradients_are_those_of_autograd(operator: str) -> None:
    torch = pytest.importorskip("torch")
    forward = norm(f"{operator}:rows=5,cols=9,dtype=f32,stats=true")
    drawn = exact(forward.draw(np.random.default_rng(1)))
    right = forward.reference(drawn)
    tensors = {
        name: torch.tensor(drawn[name], requires_grad=True)
        for name in ("x", "gamma", "beta")
        if name in drawn
    }
    shape = (forward.cols,)
    if operator == "layernorm":
        y = torch.nn.functional.layer_norm(
            tensors["x"], shape, tensors["gamma"], tensors["beta"], forward.eps
        )
    else:
        y = torch.nn.functional.rms_norm(tensors["x"], shape, tensors["gamma"], forward.eps)
    dy = np.random.default_rng(2).standard_normal(y.shape)
    y.backward(torch.tensor(dy))
    statistics = {name: right[name].value for name in forward.statistics}
    operands = {"x": drawn["x"], "gamma": drawn["gamma"], "dy": dy, **statistics}
    backward = norm(f"{operator}:rows=5,cols=9,dtype=f32,direction=backward")
    gradients = backward.reference(operands)
    assert {f"d{name}" for name in tensors} == set(gradients)
    for name, tensor in tensors.items():
        np.testing.assert_allclose(gradients[f"d{name}"].value, tensor.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layernorm:prologue=residual,direction=backward", "prologue=residual needs direction=forward"),
        ("rmsnorm:prologue=residual,direction=backward", "dx is the gradient of each part of the sum"),
        ("layernorm:stats=true,direction=backward", "stats=true needs direction=forward, which writes them"),
        ("rmsnorm:prologue=bias+residual", "Known: none, residual"),
        ("layernorm:eps=0", "eps=0.0 must be a number from"),
        ("layernorm:eps=-1e-5", "must be a number from"),
        ("layernorm:eps=nan", "eps='nan' must be a number such as 1e-6"),
        ("layernorm:eps=1e99", "must be a number from"),
        ("layernorm:eps=1e-6,direction=backward", "eps=1e-6 needs direction=forward, not backward; leave it"),
    ],
)
def test_invalid_dimensions_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(f"{text},rows=2,cols=3,dtype=f32")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("given", "canonical"),
    [("1e-12", "1e-12"), ("0.000001", "1e-6"), ("1E-3", "0.001"), ("1", "1.0"), ("9.99e-06", "9.99e-6")],
)
def test_an_eps_has_one_text(given: str, canonical: str) -> None:
    workload = norm(f"rmsnorm:rows=2,cols=3,dtype=f32,eps={given}")
    assert str(workload) == f"rmsnorm:rows=2,cols=3,dtype=f32,eps={canonical}"
    assert parse(str(workload)) == workload
    assert workload.eps == float(given)


def test_key_of_earlier_versions_is_unchanged() -> None:
    defaults = "stats=false,direction=forward,prologue=none,eps=0.00001"
    assert str(norm(f"layernorm:rows=2,cols=3,dtype=f32,{defaults}")) == ("layernorm:rows=2,cols=3,dtype=f32")


@pytest.mark.parametrize("operator", ["layernorm", "rmsnorm"])
def test_statistics_are_drawn_as_those_of_some_rows(operator: str) -> None:
    workload = norm(f"{operator}:rows=1000,cols=8,dtype=f16,direction=backward")
    drawn = workload.draw(np.random.default_rng(3))
    assert drawn["rstd"].dtype == np.float32
    assert 0.5 <= drawn["rstd"].min() < drawn["rstd"].max() <= 2
    if "mean" in drawn:  # a kernel that leaves it out must not pass
        assert np.abs(drawn["mean"]).max() > 1


# -- tolerances, compared with kernels in f32 --------------------------------------------------------


def summed(values: Array, axis: int, terms: int | None = None) -> Array:
    """Add in sequence in f32, the order with the largest error; only the first `terms` if given."""
    total: Array = np.add.accumulate(values.astype(F32), axis=axis)
    return np.take(total, [(terms or total.shape[axis]) - 1], axis=axis)


def run(
    workload: Norm,
    inputs: Mapping[str, Array],
    leave_out: bool = False,
    again: bool = False,
    eps: float | None = None,
) -> dict[str, Array]:
    """Compute in f32; `leave_out` the last term of each sum, or normalise the rounded sum `again`.

    `eps` replaces that of the workload.
    """
    t = {name: value.astype(F32) for name, value in inputs.items()}
    centred, n = workload.operator == "layernorm", F32(workload.cols)
    last = workload.cols - leave_out
    added = F32(workload.eps if eps is None else eps)
    if workload.is_backward:
        rstd = t["rstd"][:, None]
        normal = ((t["x"] - t["mean"][:, None]) if centred else t["x"]) * rstd
        g, rows = t["dy"] * t["gamma"], workload.rows - leave_out
        shift = summed(g, 1, last) / n if centred else F32(0)
        outputs = {"dx": (g - shift - normal * (summed(g * normal, 1, last) / n)) * rstd}
        outputs["dgamma"] = summed(t["dy"] * normal, 0, rows)[0]
        outputs["dbeta"] = summed(t["dy"], 0, rows)[0]
    else:
        z = t["x"] + t.get("bias", F32(0)) + t.get("residual", F32(0))
        normalised = z.astype(numpy_dtype(workload.dtype)).astype(F32) if again else z
        mean = summed(normalised, 1, last) / n if centred else np.zeros((workload.rows, 1), F32)
        rstd = F32(1) / np.sqrt(summed(np.square(normalised - mean), 1, last) / n + added)
        y = (normalised - mean) * rstd * t["gamma"] + t.get("beta", F32(0))
        outputs = {"y": y, "z": z, "mean": mean[:, 0], "rstd": rstd[:, 0]}
    return {o.name: outputs[o.name].astype(numpy_dtype(o.dtype)) for o in workload.outputs()}


def shares(workload: Workload, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> dict[str, float]:
    """Return the largest error of each output as a fraction of the tolerance."""
    tolerance = workload.tolerance()
    errors = {}
    for name, reference in workload.reference(exact(inputs)).items():
        allowed = tolerance.eps_out * np.abs(reference.value) + tolerance.eps_acc * reference.scale
        error = np.abs(outputs[name].astype(np.float64) - reference.value)
        errors[name] = float(share_of(error, allowed).max())
    return errors


TYPES = ("f32", "f16", "bf16")
KERNELS = [
    f"{operator}:rows=33,cols={cols},dtype={dtype}{more}"
    for operator, residual in (("layernorm", "bias+residual"), ("rmsnorm", "residual"))
    for dtype in TYPES
    for cols in (2, 4099)
    for more in (f",prologue={residual},stats=true", ",direction=backward")
]


@pytest.mark.parametrize("text", [*KERNELS, "rmsnorm:rows=4099,cols=3,dtype=f32,direction=backward"])
def test_correct_kernel_is_within_tolerance(text: str) -> None:
    workload = norm(text)
    inputs = workload.draw(np.random.default_rng(4))
    errors = shares(workload, inputs, run(workload, inputs))
    assert max(errors.values()) < 1, errors
    # A tolerance far above actual errors would hide mistakes: it must be of their order. Sums of numbers with
    # few bits may be exact.
    assert min(errors[name] for name in errors.keys() - {"mean"}) > 1e-3, errors


@pytest.mark.parametrize("text", KERNELS)
def test_kernel_without_the_last_term_is_not_within_tolerance(text: str) -> None:
    workload = norm(text)
    inputs = workload.draw(np.random.default_rng(5))
    errors = shares(workload, inputs, run(workload, inputs, leave_out=True))
    for name in errors.keys() - {"z"}:
        assert errors[name] > 1, errors


@pytest.mark.parametrize("operator", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sum_is_normalised_before_it_is_rounded(operator: str, dtype: str) -> None:
    workload = norm(f"{operator}:rows=9,cols=1000,dtype={dtype},prologue=residual,stats=true")
    inputs = workload.draw(np.random.default_rng(6))
    errors = shares(workload, inputs, run(workload, inputs, again=True))
    assert errors["y"] > 1
    assert errors["z"] < 1


@pytest.mark.parametrize("operator", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("eps", "others"), [(1e-3, (1e-5, 0.0)), (1e-12, (1e-5, 0.0)), (1e-5, (1e-6,))])
def test_a_kernel_with_another_eps_is_not_within_tolerance(
    operator: str, dtype: str, eps: float, others: tuple[float, ...]
) -> None:
    workload = norm(f"{operator}:rows=9,cols=1000,dtype={dtype},prologue=residual,eps={eps}")
    inputs = workload.draw(np.random.default_rng(7))
    assert max(shares(workload, inputs, run(workload, inputs)).values()) < 1
    for other_eps in others:
        assert shares(workload, inputs, run(workload, inputs, eps=other_eps))["y"] > 1
