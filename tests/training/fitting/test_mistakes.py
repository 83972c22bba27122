"""Mistakes of callers of `fit`: each message says what was expected, what was found, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from tunebench.errors import InputError  # noqa: E402
from tunebench.training.fitting.fit import fit  # noqa: E402
from tunebench.training.fitting.fitter import fitted_steps  # noqa: E402
from tunebench.training.memory import HostLink, budget_bytes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Using .torch.compile.module")

LINK = HostLink(to_host_gb_s=1.0, to_device_gb_s=1.0)
DATA = torch.linspace(-1, 1, 32 * 8).reshape(32, 8)


class Model(nn.Module):
    """Two layers, and a result of them."""

    def __init__(self, result: Callable[[Tensor], Any] = lambda y: y.square().mean()) -> None:
        super().__init__()
        self.layers, self.result = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.layers(x))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def foreign_optimizer() -> Any:
    return torch.optim.SGD(Model().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (lambda: Model, {}, r"got the class Model: make one"),
        (lambda: "gpt2", {}, r"expected a torch.nn.Module or a function, got str"),
        (lambda: fit(Model(), "70%"), {}, r"the model is fitted already"),
        (lambda: fit(Model().forward, "70%"), {}, r"the model is fitted already"),
        (lambda: torch.compile(Model()), {}, r"compiled already, and torch would ignore that"),
        (lambda: torch.compile(Model().forward), {}, r"compiled already, and torch would ignore that"),
        (Model, {"budget": None}, r"either a budget or a plan, got neither"),
        (Model, {"plan": "plan.json"}, r"either a budget or a plan, got both"),
        (Model, {"budget": None, "plan": {}}, r"plan must be a MemoryPlan or the path of a file, got \{\}"),
        (Model, {"budget": "150%"}, r"'150%' is above the peak without a plan: expected at most 100%"),
        (Model, {"budget": 0.5}, r"budget 0.5 is no size"),
        (Model, {"optimizer": torch.optim.AdamW}, r"optimizer must be .*, got the class AdamW"),
        (Model, {"optimizer": "adamw"}, r"optimizer must be .*, got 'adamw'"),
        (Model, {"optimizer": foreign_optimizer()}, r"the optimizer has none of the model's parameters"),
        (Model, {"other_bytes": -1}, r"other_bytes must be a whole number .*, got -1"),
        (Model, {"other_bytes": "1GB"}, r"other_bytes must be a whole number .*, got '1GB'"),
        (Model, {"host_link": "pcie5"}, r"host_link must be a HostLink, .*, got 'pcie5'"),
        (Model, {"effort": 3}, r"effort must be a PlanEffort, got 3"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_are_refused_before_the_first_call(
    make: Callable[[], Any], options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        fit(make(), **{"budget": "70%", **options})


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda y: None, "NoneType"),
        (lambda y: 3.0, "float"),
        (lambda y: y.detach(), "Tensor"),
        (lambda y: {"rows": y.argmax(-1), "loss": None}, "NoneType, Tensor"),
    ],
)
def test_a_training_step_without_a_loss_is_refused(result: Callable[[Tensor], Any], found: str) -> None:
    model = Model(result)
    with pytest.raises(InputError, match=rf"returns no loss: expected a tensor .*, got {found}\. Return"):
        fit(model, "100%")(DATA)


def test_results_without_gradients_are_returned_in_eval_mode_and_under_no_grad() -> None:
    model = Model(lambda y: y.argmax(-1))
    fitted = fit(model, "100%")
    with torch.no_grad():
        expected = model(DATA)
        assert torch.equal(fitted(DATA), expected)
    assert torch.equal(fit(model.eval(), "100%")(DATA), expected)


def test_a_model_without_trained_parameters_is_refused() -> None:
    with pytest.raises(InputError, match="Return the loss, with parameters that require gradients"):
        fit(Model().requires_grad_(False), "100%")(DATA)


def test_an_impossible_budget_says_what_needs_the_memory_and_the_least_budget_works() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert parameter_bytes == 576
    with pytest.raises(InputError, match=r"alone are above the budget") as refused:
        fit(model, "2kB", optimizer=optimizer)(DATA)
    message = str(refused.value)
    assert "a budget of 2 kB; the least" in message
    assert (
        "(optimizer and other memory 1.152 kB, inputs and buffers 1.024 kB, parameters 576 bytes" in message
    )
    assert "gradients 576 bytes, results 4 bytes)" in message
    activations = re.search(r"activations up to (.*) without a plan\.", message)
    peak = re.search(r"without a plan it takes (.*)\. Static memory takes (.*) \(optim", message)
    assert activations is not None
    assert peak is not None
    of_activations, whole, static = (budget_bytes(text, 0) for text in (activations[1], peak[1], peak[2]))
    assert of_activations == pytest.approx(whole - static, abs=10)
    assert re.search(rf"operation that needs most, \w+ \({re.escape(__file__)}:\d+\), takes", message)
    least = re.search(r"least .* is ([\d.]+ kB), and", message)
    assert least is not None
    fit(model, least[1], optimizer=optimizer)(DATA).backward()


@pytest.mark.parametrize(
    ("model", "data", "options", "expected"),
    [
        (
            Model(),
            DATA[:, :3],
            {},
            r"the model fails with these inputs: .* must have same reduction dim.*py:\d+\)",
        ),
        (Model().to("meta"), DATA, {}, r"the model fails with these inputs: .*same device.*py:\d+\)"),
        (Model().to("meta"), DATA.to("meta"), {}, r"on the device meta: fit runs steps"),
        (Model(), DATA, {"host_link": LINK}, r"host_link needs swap_folder"),
        (Model(lambda y: y.sum() if y.sum().item() > 0 else y), DATA, {}, r"as a whole: .*\.py:\d+\)"),
    ],
    ids=["shape", "device", "meta", "link", "value"],
)
def test_a_call_that_cannot_be_planned_is_explained(
    model: nn.Module, data: Tensor, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        fit(model, "100%", **options)(data)


def test_sparse_gradients_are_refused_by_line() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(InputError, match=rf"sparse tensors.* \({re.escape(__file__)}:\d+\)"):
        fit(lambda rows: table(rows).square().mean(), "100%")(torch.arange(5))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads it where it resumes after the model
@pytest.mark.parametrize("whole", [True, False], ids=["module", "function around it"])
def test_what_compiles_a_fitted_model_keeps_its_plan(*, whole: bool) -> None:
    model = Model()
    model(DATA).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    fitted = fit(model, "100%")
    around = torch.compile(fitted if whole else lambda x: fitted(x * 1) + 0, backend="aot_eager")
    around(DATA).backward()
    assert len(fitted_steps(fitted)) == 1
    assert all(map(torch.equal, expected, (parameter.grad for parameter in model.parameters())))


def test_a_whole_graph_around_a_fitted_model_is_refused_with_the_reason() -> None:
    fitted = fit(Model(), "100%")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"tunebench\.training\.fit runs it by"):
        torch.compile(lambda x: fitted(x) + 0, backend="eager", fullgraph=True)(DATA)
