"""Packed weights of linear layers: equal results, and no way to change one without its layer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import tunebench.torch as served
from tunebench.errors import InputError
from tunebench.torch.patching import packing
from tunebench.torch.patching.packing import PackedLinear

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _packed_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_ratio", lambda layer, rows: 1.2)


RATIO = packing._ratio
ELSEWHERE = "its weight is also referred to elsewhere"


class Layers(nn.Module):
    """Two layers, the second without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 80), nn.Linear(80, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def model() -> Layers:
    torch.manual_seed(0)
    return Layers()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, 48)


def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(x)


def doubled(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"up.weight": 2 * weight}


@pytest.mark.parametrize("rows", [1, 10, 512])
def test_packed_model_has_the_results_and_the_state_of_the_model(
    rows: int, model: Layers, x: torch.Tensor
) -> None:
    plain, names = copy.deepcopy(model), list(model.state_dict())
    report = served.pack(model, rows)
    assert (report.packed, report.left) == (("up", "down"), ())
    assert [type(layer) for layer in (model.up, model.down)] == [PackedLinear] * 2
    for part in (x, x[0], x[0, 0], x[:, :0], x.transpose(0, 1)):
        torch.testing.assert_close(run(model, part), run(plain, part))
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    assert served.unpack(model) == 2
    assert list(model.state_dict()) == names
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert torch.equal(run(model, x), run(plain, x))


REFERENCES: dict[str, Callable[[Layers], Any]] = {
    "a parameter": lambda model: model.up.weight,
    "its data": lambda model: model.up.weight.data,
    "a view": lambda model: model.up.weight.detach()[:3],
    "an array": lambda model: model.up.weight.detach().numpy(),
    "an optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "another module": lambda model: model.register_parameter("tied", model.up.weight),
    "a gradient": lambda model: model(torch.ones(48)).sum().backward(),
}


@pytest.mark.parametrize("reference", REFERENCES)
def test_weight_with_another_reference_is_not_packed(reference: str, model: Layers, x: torch.Tensor) -> None:
    referred = REFERENCES[reference](model)
    report = served.pack(model)
    assert "up" not in report.packed
    assert (report.left[0].name, report.left[0].reason) == ("up", ELSEWHERE)
    with torch.no_grad():
        model.up.weight.data.mul_(2)
    expected = copy.deepcopy(model)
    served.unpack(expected)
    torch.testing.assert_close(run(model, x), run(expected, x))
    del referred
    if reference in ("a parameter", "its data", "a view"):
        assert "up" in served.pack(model).packed


def test_memory_of_others_is_not_packed(model: Layers) -> None:
    array = torch.randn(80, 48).numpy()
    model.up.weight = nn.Parameter(torch.from_numpy(array))
    model.down.weight.data.share_memory_()
    assert served.pack(model).packed == ()


CHANGES: dict[str, Callable[[Layers], Any]] = {
    "in place": lambda model: model.up.weight.mul_(2),
    "data": lambda model: model.up.weight.data.mul_(2),
    "new data": lambda model: setattr(model.up.weight, "data", torch.ones(80, 48)),
    "parameter": lambda model: setattr(model.up, "weight", nn.Parameter(torch.ones(80, 48))),
    "tensor": lambda model: setattr(model.up, "weight", torch.ones(80, 48)),
    "registered": lambda model: model.up.register_parameter("weight", nn.Parameter(torch.ones(80, 48))),
    "initialised": lambda model: nn.init.ones_(model.up.weight),
    "reset": lambda model: model.up.reset_parameters(),
    "functional": lambda model: torch.func.functional_call(
        model, doubled(torch.ones(80, 48)), torch.ones(48)
    ),
    "parametrized": lambda model: nn.utils.parametrizations.weight_norm(model.up),
    "half": lambda model: model.half(),
    "meta": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_packed_weight_is_not_changed_by_its_attribute(change: str, model: Layers, x: torch.Tensor) -> None:
    served.pack(model)
    before = run(model, x)
    with torch.no_grad(), pytest.raises((AttributeError, InputError, KeyError, ValueError)):
        CHANGES[change](model)
    assert torch.equal(run(model, x), before)


def test_loaded_weights_are_packed_again(model: Layers, x: torch.Tensor) -> None:
    served.pack(model)
    torch.manual_seed(1)
    other = Layers()
    for assign in (False, True):
        expected = run(other, x)
        model.load_state_dict(other.state_dict(), assign=assign)
        torch.testing.assert_close(run(model, x), expected)
        with torch.no_grad():
            other.up.weight.data.mul_(2)  # of which the packed weight is a copy
        torch.testing.assert_close(run(model, x), expected)
    state = other.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*up\.weight"):
        model.load_state_dict({name: part for name, part in state.items() if name != "up.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        model.load_state_dict({**state, "up.weight": torch.ones(3, 48)})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickled(model)])
def test_copies_have_their_own_weights(copied: Callable[[Any], Any], model: Layers, x: torch.Tensor) -> None:
    served.pack(model)
    before = run(model, x)
    other = copied(model)
    assert torch.equal(run(other, x), before)
    other.load_state_dict({name: torch.zeros_like(part) for name, part in other.state_dict().items()})
    assert torch.equal(run(model, x), before)
    assert not run(other, x).any()


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def test_gradients_and_other_types_are_refused(model: Layers, x: torch.Tensor) -> None:
    served.pack(model)
    with pytest.raises(InputError, match="no gradients"):
        model(x)
    with pytest.raises(InputError, match=r"f32 tensor on a processor, got torch\.float64"):
        run(model, x.double())


@pytest.mark.slow
def test_compiled_graphs_read_the_current_weight(model: Layers, x: torch.Tensor) -> None:
    served.pack(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        model.load_state_dict({name: part.mul(3) for name, part in model.state_dict().items()})
        torch.testing.assert_close(compiled(x), model(x))
        exported = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(exported(x), model(x))
        served.unpack(model)
        with pytest.raises(InputError, match="compile the model again"):
            exported(x)
        torch.testing.assert_close(compiled(x), model(x))


def test_layers_for_which_torch_is_faster_are_left(model: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(packing, "_ratio", lambda layer, rows: asked.append(rows) or layer.in_features / 64)
    report = served.pack(nn.Sequential(model, copy.deepcopy(model)), 16)
    assert report.packed == ("0.down", "1.down")
    assert [layer.reason for layer in report.left] == ["torch takes 0.75 times as long"] * 2
    assert asked == [16, 16]


def test_ratio_of_times_is_that_of_both_ways() -> None:
    before = len(packing._weights)
    assert 0 < RATIO(nn.Linear(16, 16), 4) < 1000
    assert len(packing._weights) == before
