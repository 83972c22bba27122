"""`tunebench.torch.patch`: dispatched modules, equal results, and restoring the model."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from benchmarks.patched_models import PatchedModelCase  # noqa: E402
from benchmarks.torch_models import Bert, Gpt2, Resnet, Size  # noqa: E402
from tests.torch.reference_kernels import reference_bindings  # noqa: E402
from tunebench.dispatch import DispatchedCall  # noqa: E402
from tunebench.errors import InputError  # noqa: E402
from tunebench.torch import patch, patched_calls, prefer, profile, unpatch, watching  # noqa: E402
from tunebench.torch.patching import modules as served  # noqa: E402

TINY = Size(layers=2, width=32, heads=2, inner=32, words=96, longest=16)


class Heard(Counter[str]):
    """Counter of dispatched calls by function, with their implementations."""

    def __init__(self) -> None:
        super().__init__()
        self.who: set[str] = set()

    def __call__(self, call: DispatchedCall) -> None:
        self[call.function] += 1
        self.who.add(call.by)


def run(model: Any, *inputs: Any, mode: Any = None) -> tuple[Any, list[Any], Heard]:
    """Return a model's outputs, the gradients of their weighted sum, and the dispatched calls."""
    heard = Heard()
    model.zero_grad(set_to_none=True)
    with watching(heard):
        y = model(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return y.detach(), [p.grad for p in model.parameters()], heard


def agree(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5)
    assert len(actual[1]) == len(expected[1])
    for ours, theirs in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# -- each module -----------------------------------------------------------------------------------


def _x(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


MODULES: dict[str, tuple[Callable[[], Any], tuple[Any, ...], set[str]]] = {
    "linear": (lambda: nn.Linear(8, 6), (_x(2, 3, 8),), {"gemm"}),
    "linear without bias": (lambda: nn.Linear(8, 6, bias=False), (_x(2, 8),), {"gemm"}),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, 2, 1, groups=2), (_x(2, 4, 7, 7),), {"conv2d"}),
    "conv2d same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (_x(2, 4, 7, 7),), {"conv2d"}),
    "conv2d reflected": (
        lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"),
        (_x(2, 4, 7, 7),),
        {"conv2d"},
    ),
    "layernorm": (lambda: nn.LayerNorm(8), (_x(2, 3, 8),), {"layernorm"}),
    "rmsnorm": (lambda: nn.RMSNorm(8, eps=0.1), (_x(2, 3, 8),), {"rmsnorm"}),
    "softmax": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), (_x(4, 8),), {"gemm", "softmax"}),
    "logsoftmax": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LogSoftmax(1)),
        (_x(4, 8),),
        {"gemm", "softmax"},
    ),
    "linear gelu": (lambda: nn.Sequential(nn.Linear(8, 6), nn.GELU()), (_x(4, 8),), {"gemm"}),
    "linear relu": (lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(inplace=True)), (_x(4, 8),), {"gemm"}),
    "linear silu": (
        lambda: nn.Sequential(nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 6)),
        (_x(4, 8),),
        {"gemm"},
    ),
    "conv2d relu": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()), (_x(2, 4, 7, 7),), {"conv2d"}),
    "attention": (lambda: _Attends(), (_x(2, 5, 8),), {"gemm", "scaled_dot_product_attention"}),
    "attention, sequence first": (
        lambda: _Attends(batch_first=False),
        (_x(5, 2, 8),),
        {"gemm", "scaled_dot_product_attention"},
    ),
    "attention without bias": (
        lambda: _Attends(bias=False, is_causal=True),
        (_x(2, 5, 8),),
        {"gemm", "scaled_dot_product_attention"},
    ),
}


class _Attends(nn.Module):
    """Self-attention, or attention to another input."""

    def __init__(self, *, is_causal: bool = False, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
        self.is_causal = is_causal

    def forward(self, x: Any, memory: Any = None) -> Any:
        memory = x if memory is None else memory
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.is_causal else None
        options = {"attn_mask": mask, "is_causal": self.is_causal}
        y, weights = self.inner(x, memory, memory, need_weights=False, **options)
        assert weights is None
        return y


@pytest.mark.parametrize("name", MODULES)
def test_patched_module_computes_the_same(name: str) -> None:
    make, inputs, functions = MODULES[name]
    torch.manual_seed(1)
    model = make()
    before = run(model, *inputs)
    assert before[2] == {}
    with patch(model) as report:
        assert report.swapped
        after = run(model, *inputs)
    assert {function.removesuffix("_dgrad") for function in after[2]} >= functions
    agree(after, before)
    restored = run(model, *inputs)
    assert restored[2] == {}
    assert torch.equal(restored[0], before[0])


def test_loss_module_is_dispatched() -> None:
    loss, x, target = (
        nn.CrossEntropyLoss(ignore_index=1, reduction="sum"),
        _x(4, 5),
        torch.tensor([0, 1, 2, 3]),
    )
    expected, heard = loss(x, target), Heard()
    with patch(loss), watching(heard):
        torch.testing.assert_close(loss(x, target), expected)
    assert heard == {"cross_entropy": 1}


def test_cross_attention_is_dispatched_and_torch_runs_other_kinds() -> None:
    torch.manual_seed(1)
    model, x, memory = _Attends(), _x(2, 5, 8), _x(2, 3, 8)
    before = run(model, x, memory)
    with patch(model):
        after = run(model, x, memory)
        assert after[2]["scaled_dot_product_attention"] == 1
        agree(after, before)
        heard = Heard()
        with watching(heard):
            assert model.inner(x, x, x)[1] is not None
            model.inner(x[0], x[0], x[0], need_weights=False)
        assert heard == {}
        with pytest.raises(RuntimeError, match="attn_mask"):
            model.inner(x, x, x, need_weights=False, is_causal=True)


@pytest.mark.parametrize(
    "masks",
    [
        {"key_padding_mask": torch.arange(5) > torch.tensor([[3], [2]])},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        {"attn_mask": torch.linspace(-1, 1, 100).view(4, 5, 5)},
        {
            "attn_mask": torch.full((5, 5), -torch.inf).triu(1),
            "key_padding_mask": torch.zeros(2, 5).index_fill(1, torch.tensor(3), -torch.inf),
            "is_causal": True,
        },
    ],
)
def test_attention_with_masks_is_dispatched(masks: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, x, heard = _Attends().inner, _x(2, 5, 8), Heard()
    expected = model(x, x, x, need_weights=False, **masks)[0]
    with patch(model), watching(heard), prefer("torch"):
        torch.testing.assert_close(model(x, x, x, need_weights=False, **masks)[0], expected)
    assert heard == {"gemm": 2, "scaled_dot_product_attention": 1}


# -- fusion of neighbours ---------------------------------------------------------------------------


def _conv_norm() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1))
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    return model


def _fused(model: Any, x: Any) -> list[str]:
    epilogues = []
    note = watching(lambda call: epilogues.append(getattr(call.workload, "epilogue", "")))
    with patch(model), note, torch.no_grad():
        model(x)
    return epilogues


@pytest.mark.parametrize("has_bias", [False, True])
def test_batch_norm_is_folded_only_in_eval_mode(has_bias: bool) -> None:
    model, x = _conv_norm(), _x(2, 4, 7, 7)
    if has_bias:
        model[0].bias = nn.Parameter(_x(6))
    assert _fused(model, x) == ["bias" if has_bias else "none", "bias"]
    model.eval()
    assert _fused(model, x) == ["scale+bias+relu", "bias"]
    for double in (False, True):
        mode = copy.deepcopy(model).double() if double else model
        images = x.double() if double else x
        before = run(mode, images)
        with patch(mode):
            agree(run(mode, images), before)
    model[0].requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert "scale+bias+relu" not in _fused(model, x)


def test_batch_norm_is_folded_only_for_a_tuned_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _conv_norm().eval(), _x(2, 4, 7, 7)
    folded = Counter[bool]()
    conv2d = served.served.conv2d

    def note(*args: Any, **fused: Any) -> Any:
        folded["scale" in fused] += 1
        return conv2d(*args, **fused)

    monkeypatch.setattr(served.served, "conv2d", note)
    with patch(model):
        model(x)
        assert folded == {False: 2}
        monkeypatch.setattr(served.Dispatcher, "bound_choice", lambda chosen: SimpleNamespace(kernel=chosen))
        assert served.is_tuned(model[0], x, "scale+bias+relu")
        assert not served.is_tuned(model[0], x.double(), "scale+bias+relu")


def test_running_statistics_are_updated_as_in_torch() -> None:
    ours, theirs, x = _conv_norm(), _conv_norm(), _x(2, 4, 7, 7)
    patch(ours)
    agree(run(ours, x), run(theirs, x))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("place", [0, 1])
def test_hooks_get_the_same_arguments(kind: str, place: int) -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU()), _x(4, 8).requires_grad_()
    assert _fused(model, x) == ["bias+relu"]
    seen: list[Any] = []

    def look(module: Any, *arguments: Any) -> None:
        seen.append([argument[0] if isinstance(argument, tuple) else argument for argument in arguments])

    getattr(model[place], f"register_{kind}")(look)
    model(x).sum().backward()
    assert _fused(model, x) == ["bias"]
    with patch(model):
        model(x).sum().backward()
    torch.testing.assert_close(seen[-1], seen[0])


def test_global_hooks_prevent_fusion() -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU()), _x(4, 8)
    handle = nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        assert _fused(model, x) == ["bias"]
    finally:
        handle.remove()
    assert _fused(model, x) == ["bias+relu"]


@pytest.mark.parametrize("activation", [nn.GELU(approximate="tanh"), nn.Tanh()])
def test_other_activations_are_not_fused(activation: Any) -> None:
    assert _fused(nn.Sequential(nn.Linear(8, 6), activation), _x(4, 8)) == ["bias"]
    assert _fused(nn.Sequential(nn.Linear(8, 6, bias=False), nn.ReLU()), _x(4, 8)) == ["none"]


# -- parameters, copies and restoring ---------------------------------------------------------------


def _model() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.LayerNorm(6), nn.Dropout(0.5), nn.Linear(6, 6))
    model.append(model[4])  # the same module twice
    return model


def test_parameters_state_and_identity_are_unchanged() -> None:
    model = _model()
    parts, parameters, keys = list(model), list(model.parameters()), list(model.state_dict())
    report = patch(model)
    assert [swap.name for swap in report.swapped] == ["", "0", "2", "4"]
    assert all(ours is theirs for ours, theirs in zip(model, parts, strict=True))
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert isinstance(model[0], nn.Linear)
    model.load_state_dict(_model().state_dict())
    model.eval().to(torch.bfloat16)
    assert model(_x(2, 8).bfloat16()).dtype == torch.bfloat16
    assert not model[3].training


def test_copies_and_pickles_are_patched_and_can_be_restored() -> None:
    model = _model().eval()
    expected = model(_x(2, 8))
    report = patch(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert type(twin[0]) is served.TunedLinear
        torch.testing.assert_close(twin(_x(2, 8)), expected)
        assert unpatch(twin) == 4
        assert type(twin[0]) is nn.Linear
        assert unpatch(twin) == 0
    assert type(model[0]) is served.TunedLinear
    report.undo()
    report.undo()
    assert [type(part) for part in model] == [type(part) for part in _model()]
    assert type(model) is nn.Sequential


def test_patch_is_undone_after_exceptions() -> None:
    model = _model()
    with pytest.raises(ZeroDivisionError), patch(model):
        1 / 0  # noqa: B018
    assert type(model[0]) is nn.Linear

    class Flaky(dict[type, type]):
        """A mapping whose second lookup returns a class that no module can have."""

        count = 0

        def __getitem__(self, kind: type) -> type:
            self.count += 1
            return int if self.count > len(self) + 2 else super().__getitem__(kind)

    with pytest.MonkeyPatch.context() as broken:
        flaky = Flaky({nn.Linear: served.TunedLinear, nn.LayerNorm: served.TunedLayerNorm})
        broken.setattr("tunebench.torch.patching.model.TUNED_MODULES", flaky)
        with pytest.raises(TypeError):
            patch(model)
        assert flaky.count > 4
    assert [type(part) for part in model] == [type(part) for part in _model()]


def test_patching_twice_changes_nothing() -> None:
    model = _model()
    first, second = patch(model), patch(model)
    assert second.swapped == ()
    assert {module.reason for module in second.left} == {"it is already patched"}
    second.undo()
    assert type(model[0]) is served.TunedLinear
    first.undo()
    assert type(model[0]) is nn.Linear


class _Own(nn.Linear):
    pass


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "own class": (lambda: _Own(8, 6), "a subclass of Linear"),
    "double": (lambda: nn.Linear(8, 6).double(), "torch.float64"),
    "lazy": (lambda: nn.LazyLinear(6), "sizes are unknown before its first call"),
    "stride": (lambda: nn.Conv2d(4, 6, 3, stride=(1, 2)), "stride differs"),
    "padding": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 2)), "padding differs"),
    "dilation": (lambda: nn.Conv2d(4, 6, 3, dilation=(1, 2)), "dilation differs"),
    "eps": (lambda: nn.LayerNorm(8, eps=-0.5), "eps is -0.5, and kernels need a positive number"),
    "default eps": (lambda: nn.RMSNorm(8), "eps is None"),
    "no weight": (lambda: nn.LayerNorm(8, elementwise_affine=False), "no weight"),
    "no bias": (lambda: nn.LayerNorm(8, bias=False), "no bias"),
    "axis": (lambda: nn.Softmax(), "axis is not given"),
    "weights": (lambda: nn.CrossEntropyLoss(weight=torch.ones(3)), "classes have weights"),
    "smoothing": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), "smoothed"),
    "keys": (lambda: nn.MultiheadAttention(8, 2, kdim=4), "different sizes than its queries"),
    "added": (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), "adds a bias or zeros"),
    "elsewhere": (lambda: nn.BatchNorm2d(4), "no kernel of tunebench"),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2), "set_fastpath_enabled"),
}


@pytest.mark.parametrize("name", LEFT)
def test_unchanged_modules_are_reported_with_reasons(name: str) -> None:
    make, reason = LEFT[name]
    model = make()
    kind = type(model)
    report = patch(model)
    assert type(model) is kind
    assert (report.left[0].name, report.left[0].kind) == ("", kind.__name__)
    assert reason in report.left[0].reason
    assert reason in str(report)
    assert report.to_json()["left"][0]["reason"] == report.left[0].reason


def test_patch_refuses_what_is_not_a_module() -> None:
    with pytest.raises(InputError, match="got list"):
        patch([nn.Linear(2, 2)])


def test_patched_model_compiles() -> None:
    model, x = _model().eval(), _x(4, 8)
    expected = run(model, x)
    torch._dynamo.reset()
    with patch(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        agree(run(compiled, x), expected)
    torch._dynamo.reset()


# -- torch's tools on patched models ----------------------------------------------------------------


def _conv_model() -> Any:
    return nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()).eval()


class _AttendsToItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.inner(x, x, x, need_weights=False)[0]


TRACED: dict[str, tuple[Callable[[], Any], Any]] = {
    "products": (lambda: _model().eval(), _x(4, 8)),
    "convolutions": (_conv_model, _x(2, 4, 7, 7)),
    "attention": (lambda: _AttendsToItself().eval(), _x(2, 5, 8)),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", TRACED)
def test_jit_trace_of_a_patched_model_has_only_operators_of_torch(name: str) -> None:
    model, x = TRACED[name][0](), TRACED[name][1]
    batch = torch.cat([x, x.flip(0)])
    expected = model(batch)
    with patch(model):
        traced = torch.jit.trace(model, x)
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    assert "tunebench::" not in str(traced.inlined_graph)
    buffer.seek(0)
    torch.testing.assert_close(torch.jit.load(buffer)(batch), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TRACED)
def test_symbolic_trace_of_a_patched_model_calls_its_modules(name: str) -> None:
    model, x = TRACED[name][0](), TRACED[name][1]
    expected = model(x)
    calls = [(node.op, node.target) for node in torch.fx.symbolic_trace(model).graph.nodes]
    with patch(model):
        traced = torch.fx.symbolic_trace(model)
        assert [(node.op, node.target) for node in traced.graph.nodes] == calls
        heard = Heard()
        with watching(heard):
            torch.testing.assert_close(traced(x), expected)
        assert heard


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_jit_script_of_a_patched_model_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU())
    with patch(model), pytest.raises(InputError, match=r"unpatch\(model\)"):
        torch.jit.script(model)
    torch.jit.script(model)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_quantization_of_a_patched_model_warns_and_changes_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU()), _x(4, 8)
    with patch(model):
        with pytest.warns(UserWarning, match=r"not quantized: call tunebench.torch.unpatch\(model\)"):
            quantized = torch.ao.quantization.quantize_dynamic(model)
        assert torch.equal(quantized(x), model(x))
        assert unpatch(quantized) == 2
    assert not hasattr(quantized[0], "qconfig")


def _normed(model: Any, kind: str) -> Any:
    torch.manual_seed(1)
    add = getattr(nn.utils.parametrizations, kind)
    for module in dict.fromkeys(model):
        if isinstance(module, nn.Linear | nn.Conv2d):
            add(module)
    return model


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("name", ["products", "convolutions"])
def test_parametrized_modules_compute_the_same(name: str, kind: str) -> None:
    make, x = TRACED[name]
    torch.manual_seed(1)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    plain, report = _normed(plain, kind).train(), patch(model)
    model = _normed(model, kind).train()
    for module in (*plain.modules(), *model.modules()):
        if isinstance(module, nn.Dropout):
            module.eval()
    for _ in range(2):  # spectral_norm changes its state at every step
        agree(run(model, x), run(plain, x))
    refused = patch(_normed(make(), kind))
    assert any(
        "patched modules can be parametrized" in patched_module.reason for patched_module in refused.left
    )
    report.undo()
    assert [type(patched_module).__name__ for patched_module in model.modules()] == [
        type(patched_module).__name__ for patched_module in plain.modules()
    ]
    agree(run(model, x), run(plain, x))
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) in (nn.Linear, nn.Conv2d)


# -- patched calls ----------------------------------------------------------------------------------


def test_calls_are_dispatched_only_inside_the_block() -> None:
    x, w = _x(4, 8).requires_grad_(), _x(6, 8)
    image, filters = _x(1, 4, 5, 5), _x(6, 4, 3, 3)

    def program() -> tuple[Any, ...]:
        y = F.linear(x, w)
        return (
            y @ y.t(),
            y.softmax(-1),
            torch.softmax(y, 1),
            F.log_softmax(y, dim=-1),
            F.layer_norm(y, (6,), w[:, 0].contiguous(), w[:, 1].contiguous()),
            F.cross_entropy(y, torch.tensor([0, 1, 2, 3])),
            F.conv2d(image, filters),
            F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        )

    expected, heard = program(), Heard()
    with watching(heard):
        with patched_calls():
            results = program()
        program()
    assert (
        heard
        == {
            "gemm": 2,
            "softmax": 3,
            "layernorm": 1,
            "cross_entropy": 1,
            "conv2d": 1,
            "scaled_dot_product_attention": 1,
        }
        or sum(heard.values()) == 9
    )
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    result = torch.empty(6, 4)
    with patched_calls():
        assert torch.matmul(w, x.detach().t(), out=result) is result


# -- profiles of patched models ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet", "bert", "gpt2"])
def test_patched_model_has_the_same_profile(name: str) -> None:
    case = _case(name)

    def recorded() -> dict[str, int]:
        with profile(save=False) as seen:
            F.cross_entropy(case.model(case.inputs), case.targets).backward()
        return {line.name: line.calls for line in seen.workloads}

    before = recorded()
    assert len(before) > 10
    with patch(case.model), patched_calls():
        assert recorded() == before


# -- whole models ----------------------------------------------------------------------------------


def _case(name: str) -> PatchedModelCase:
    torch.manual_seed(5)
    if name == "resnet":
        model = Resnet(blocks=(1, 1), width=8, expansion=2, classes=8, stem=3)
        return PatchedModelCase(name=name, model=model, inputs=_x(2, 3, 16, 16), targets=torch.tensor([1, 5]))
    words = torch.arange(16).reshape(1, 16)
    model = Bert(TINY) if name == "bert" else Gpt2(TINY)
    return PatchedModelCase(name=name, model=model, inputs=words, targets=torch.arange(16))


@pytest.mark.parametrize("name", ["resnet", "bert", "gpt2"])
def test_patched_models_have_the_same_outputs(name: str) -> None:
    case = _case(name)
    modules = [type(module) for module in case.model.modules()]
    steps = dict(case.run(kernels=False))
    for by in ("faster", "restored"):
        output, gradient, _ = steps[by].error(steps["float64"])
        assert output < 1e-5
        assert gradient < 1e-4
    assert steps["torch"].served == steps["restored"].served == {}
    assert {who for who, _ in steps["faster"].served} == {"torch"}
    assert torch.equal(steps["restored"].outputs, steps["torch"].outputs)
    assert [type(module) for module in case.model.modules()] == modules


def test_tuned_kernels_train_layers(request: pytest.FixtureRequest) -> None:
    """The model repeats the same layers, because every distinct kernel takes seconds to compile."""
    is_compiled = request.config.getoption("--every-sample")
    torch.manual_seed(5)
    layers, x = Gpt2(TINY).layers, torch.randn(1, 16, 32)
    model = nn.Sequential(*(part for layer in layers for part in (layer.norm2, layer.inner)))
    truth = run(copy.deepcopy(model).double(), x.double())
    with patch(model), prefer("tunebench"), nullcontext() if is_compiled else reference_bindings():
        result = run(model, x)
    assert result[2] == {"gemm": 2 * 2 * 3, "layernorm": 2 * 2}
    assert result[2].who == {"tunebench"}
    for ours, theirs in zip((result[0], *result[1]), (truth[0], *truth[1]), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
