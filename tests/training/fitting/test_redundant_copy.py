"""Copies of a traced step: which are removed, and that the step keeps its gradients and its peak."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from tunebench.training.fitting.fit import fit  # noqa: E402
from tunebench.training.fitting.fitter import fitted_steps  # noqa: E402
from tunebench.training.fitting.redundant_copy import remove_redundant_copies  # noqa: E402
from tunebench.training.memory import simulate, unplanned  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Using .torch.compile.module")

CLONE = torch.ops.aten.clone.default


def returned(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    """Return a call with its result in a list, as in the graph of a step."""
    return lambda x: [call(x)]


@pytest.mark.parametrize(
    ("call", "kept"),
    [
        (lambda x: (x * 2).clone() + 1, 0),
        (lambda x: (x * 2).clone().view(-1).clone() + 1, 0),
        (lambda x: x.clone() + 1, 1),
        (lambda x: (x * 2).clone(), 1),
        (lambda x: (x * 2).clone().view(-1), 1),
        (lambda x: (x * 2).t().contiguous() + 1, 1),
        (lambda x: (x * 2)[:2].clone() + 1, 1),
    ],
    ids=["between", "view between", "of an input", "result", "view is a result", "transposed", "of a part"],
)
def test_only_copies_that_nobody_can_observe_are_removed(call: Callable[[Tensor], Tensor], kept: int) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(4, 4))
    module = make_fx(returned(call))(x)
    remove_redundant_copies(module.graph)
    module.graph.lint()
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=CLONE)) == kept
    matrix = torch.randn(4, 4)
    assert torch.equal(module(matrix)[0], call(matrix))


def test_views_of_a_removed_copy_have_the_memory_of_its_source() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(4, 4))
    module = make_fx(returned(lambda x: (x * 2).clone().view(-1)[2:] + 1))(x)
    remove_redundant_copies(module.graph)
    values = {node.name: node.meta["val"] for node in module.graph.nodes if node.op == "call_function"}
    storages = {values[name].untyped_storage()._cdata for name in ("mul", "view", "slice_1")}
    assert len(storages) == 1
    assert values["slice_1"].shape == (14,)


class Layers(nn.Module):
    """Encoder layers of torch with a dropout of probability 0, which torch traces as copies."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_a_step_without_dropout_needs_the_memory_of_eager_torch_and_has_its_gradients() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(8, 32, 32)
    tracker = MemTracker()
    tracker.track_external(model, x)
    with tracker:
        model(x).backward()
    measured = sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
    eager = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    fitted = fit(model, "100%")
    fitted(x).backward()
    for parameter, gradient in zip(model.parameters(), eager, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    (step,) = fitted_steps(fitted)
    predicted = simulate(step.plan.step, unplanned(step.plan.step)).peak_bytes
    assert predicted == pytest.approx(measured, rel=0.02)
