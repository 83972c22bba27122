"""Lookup of operators and suites by name, and parsing of workloads."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunebench import workloads
from tunebench.errors import InputError, UnknownName
from tunebench.workload import Workload
from tunebench.workloads import (
    Layer,
    all_operators,
    batches,
    operator,
    parse,
    register,
    suite,
    suites,
    workload,
)
from tunebench.workloads.common.norm import Norm
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.gated_gemm import GatedGemm
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

SUITES = ("bert-base", "gpt2", "llama-3-8b", "llama-3-8b-decode", "llama-7b", "mixtral-8x7b", "resnet50")


def test_operators_are_found_by_name() -> None:
    assert {"conv2d", "gemm", "grouped_gemm", "layernorm", "softmax"} <= set(all_operators())
    assert operator("gemm") is Gemm


@pytest.mark.parametrize(
    "text",
    [
        "gemm:m=1024,n=1024,k=1024,dtype=f16",
        "gemm:m=1,n=1000,k=2048,dtype=tf32,batch=3,trans=nt,epilogue=bias+gelu,out=f16",
        "conv2d:n=32,c=64,h=56,w=56,k=64,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc",
        "conv2d:n=1,c=8,h=9,w=9,k=8,r=3,s=3,stride=2,pad=0,dtype=bf16,layout=nchw,dilation=2,groups=4,direction=wgrad",
        "gemm:m=8,n=8,k=8,dtype=f16,epilogue=bias+silu+residual",
        "gated_gemm:m=2048,n=14336,k=4096,dtype=bf16,trans=nt",
        "gated_gemm:m=1,n=11008,k=4096,dtype=f16,activation=gelu,out=f32",
        "grouped_gemm:groups=8,m=4096,n=14336,k=4096,dtype=bf16",
        "grouped_gemm:groups=8,m=16,n=14336,k=4096,dtype=bf16,trans=nt,skew=zipf,out=f32",
        "softmax:rows=4096,cols=1024,dtype=f32",
        "layernorm:rows=4096,cols=1024,dtype=bf16",
    ],
)
def test_a_canonical_text_is_written_as_it_was_read(text: str) -> None:
    assert str(parse(text)) == text
    assert str(parse(f"  {text}\n")) == text


def test_a_workload_is_built_by_name_and_values_too() -> None:
    built = workload("gemm", m=8, n=8, k=8, dtype="tf32")
    assert built == Gemm(m=8, n=8, k=8, dtype="tf32", out="f32") == parse("gemm:k=8,dtype=tf32,n=8,m=8")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gem:m=1", "unknown operator 'gem'. Did you mean 'gemm'? Known: attention, batchnorm_stats, "),
        ("gemm:m=1,n=1,k=1,dtype=f61", "Did you mean 'f16'? Known: bf16, e4m3, f16, f32, i8, tf32."),
        (
            "gemm:m=1,n=1,k=1,dtype=f16,trns=nt",
            "Did you mean 'trans'? Known: accumulate, act, batch, dtype, epilogue, k, m, n",
        ),
        ("gemm:m=1,n=1,k=1,dtype=i8,out=f32", "need each other, got dtype=i8 and out=f32"),
        ("gemm:m=1,n=1,k=1,dtype=f32,out=i32", "need each other, got dtype=f32 and out=i32"),
        ("gemm:m=1,n=1,k=1,dtype=i8,epilogue=bias", "i8 has epilogue=none only, got bias"),
        ("gemm:m=1,n=1,k=131072,dtype=i8", "i8 has k up to 131071, or sums overflow i32; got 131072"),
        (
            "gemm:m=1,n=1,k=1",
            "missing dtype; usage: gemm:m=N,n=N,k=N,dtype=f32|tf32|f16|bf16|e4m3|i8,[batch=N]",
        ),
        ("gemm", "neither operator:dimension=value,… nor suite/layer; operators: attention, "),
        ("", "suites: bert-base, gpt2, llama-3-8b, llama-3-8b-decode, llama-7b, mixtral-8x7b, resnet50"),
        ("gpt2-xl", "neither operator:dimension=value,… nor suite/layer, but a model; name it by --model;"),
        ("resnet5/fc", "unknown suite 'resnet5'. Did you mean 'resnet50'?"),
        ("resnet50/conv31", "unknown layer of resnet50 'conv31'. Did you mean 'conv3_1'?"),
        ("resnet50/", "unknown layer of resnet50 ''"),
        ("resnet50/fc,q=4", "unknown dimension of gemm 'q'"),
        ("resnet50/fc,m", "expected dimension=value, got 'm'"),
        ("resnet50/fc,m=2,m=3", "dimension 'm' is given twice"),
        ("resnet50/fc,m=0", "m=0 must be a whole number from 1"),
    ],
)
def test_parse_error_names_the_mistake_and_suggests_a_name(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    assert says in str(caught.value)


def test_a_layer_of_a_suite_is_a_workload() -> None:
    assert str(parse("resnet50/conv3_1")) == (
        "conv2d:n=1,c=256,h=56,w=56,k=128,r=1,s=1,stride=1,pad=0,dtype=f16,layout=nhwc,epilogue=bias+relu"
    )
    assert str(parse("resnet50/conv3_1,n=32,dtype=bf16")).startswith("conv2d:n=32,c=256,h=56,w=56,k=128,")
    assert str(parse("gpt2/lm_head,m=1,out=f32")).endswith("k=768,dtype=f16,trans=nt,out=f32")


def test_derived_dimensions_follow_a_changed_one() -> None:
    changed = parse("resnet50/fc,dtype=f32")
    assert isinstance(changed, Gemm)
    assert changed.out == "f32"


def test_all_suites_are_there() -> None:
    assert suites() == SUITES
    with pytest.raises(
        UnknownName, match=r"unknown suite 'bert'. Did you mean 'bert-base'\? Known: bert-base"
    ):
        suite("bert")
    with pytest.raises(UnknownName, match="unknown suite 'nope'"):
        batches("nope")


@pytest.mark.parametrize("name", SUITES)
def test_suite_lists_each_workload_once_in_canonical_form(name: str) -> None:
    layers = suite(name)
    assert len({layer.name for layer in layers}) == len({layer.text for layer in layers}) == len(layers)
    for layer in layers:
        assert layer.count >= 1
        assert str(layer.workload) == layer.text
        assert parse(f"{name}/{layer.name}") == layer.workload


@pytest.mark.parametrize("name", SUITES)
def test_a_batch_multiplies_every_layer_alike(name: str) -> None:
    assert batches(name)[0] == 1
    assert len(batches(name)) >= 3
    for batch in batches(name):
        for layer, many in zip(suite(name), suite(name, batch=batch), strict=True):
            assert (many.name, many.count, many.scales) == (layer.name, layer.count, layer.scales)
            assert many.workload.flops() == batch * layer.workload.flops()
            outputs, single = many.workload.outputs()[0], layer.workload.outputs()[0]
            assert outputs.size == batch * single.size


@pytest.mark.parametrize("name", SUITES)
def test_a_batch_leaves_weights_alone(name: str) -> None:
    for layer, many in zip(suite(name), suite(name, batch=8), strict=True):
        if layer.scales in {"m", "n"}:  # attention's products have no weights and scale by "batch"
            assert layer.workload.inputs()[1:2] == many.workload.inputs()[1:2]
            assert layer.workload.inputs()[0].size * 8 == many.workload.inputs()[0].size


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_is_one_or_more(batch: int) -> None:
    with pytest.raises(InputError, match="batch must be 1 or more"):
        suite("gpt2", batch=batch)


def test_a_batch_too_large_is_refused() -> None:
    with pytest.raises(InputError, match="must be a whole number from 1"):
        suite("llama-7b", batch=2**20)


def _gflop(name: str, kind: type[Workload] = Workload) -> float:
    return (
        sum(layer.count * layer.workload.flops() for layer in suite(name) if isinstance(layer.workload, kind))
        / 1e9
    )


def test_resnet50_has_its_published_layers_and_work() -> None:
    # 53 convolutions and one fully connected layer; 4.09 G multiply-adds (torchvision, ResNet50_Weights).
    assert sum(layer.count for layer in suite("resnet50")) == 54
    assert _gflop("resnet50") / 2 == pytest.approx(4.09, abs=0.01)
    weights = sum(layer.count * layer.workload.inputs()[1].size for layer in suite("resnet50"))
    biases = sum(layer.count * layer.workload.inputs()[2].size for layer in suite("resnet50"))
    assert weights + biases == pytest.approx(25.56e6, rel=0.002)  # batch normalisation folded in


def test_transformers_have_their_published_work() -> None:
    # Linear layers: 2 * parameters * tokens, with 12 * layers * hidden**2 parameters (LLaMA: 6.476e9 in all,
    # 131e6 of them the embedding, which needs no product).
    # Attention: 4 * pairs of tokens * hidden per layer; a causal mask leaves half of them and the tokens.
    block_parameters = 12 * 12 * 768**2
    assert _gflop("bert-base", Gemm) * 1e9 == 2 * block_parameters * 512
    assert _gflop("bert-base", Attention) * 1e9 == 4 * 512**2 * 768 * 12
    head = 2 * 768 * 50257 * 1024
    assert _gflop("gpt2", Gemm) * 1e9 == 2 * block_parameters * 1024 + head
    assert _gflop("gpt2", Attention) * 1e9 == 4 * (1024 * 1025 // 2) * 768 * 12
    linear = (_gflop("llama-7b", Gemm) + _gflop("llama-7b", GatedGemm)) * 1e9
    assert linear / 2 / 2048 + 32000 * 4096 + 65 * 4096 == pytest.approx(6.738e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "active", "embedding"), [("llama-3-8b", 8.03e9, 128256), ("mixtral-8x7b", 12.88e9, 32000)]
)
def test_grouped_attention_and_experts_take_their_published_work(
    name: str, active: float, embedding: int
) -> None:
    # 2 * active parameters * tokens; a token uses 12.9e9 of Mixtral's 46.7e9 parameters. The embedding and
    # the 65 normalisations need no products.
    gflop = sum(_gflop(name, kind) for kind in (Gemm, GatedGemm, GroupedGemm))
    assert gflop * 1e9 / 2 / 2048 + embedding * 4096 + 65 * 4096 == pytest.approx(active, rel=1e-3)


def test_a_step_of_decoding_is_one_token_of_a_prompt() -> None:
    step, prompt = (
        _gflop(name, Gemm) + _gflop(name, GatedGemm) for name in ("llama-3-8b-decode", "llama-3-8b")
    )
    assert step * 2048 == pytest.approx(prompt)
    (attention,) = (layer.workload for layer in suite("llama-3-8b-decode") if layer.name == "attention")
    assert attention.traffic().total_bytes >= 2 * 8192 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("name", "plain", "after_sums", "hidden"),
    [
        ("bert-base", 25, 0, 768),  # nothing reads the sum after its normalisation
        ("gpt2", 1, 24, 768),
        ("llama-7b", 1, 64, 4096),
        ("llama-3-8b", 1, 64, 4096),
        ("mixtral-8x7b", 1, 64, 4096),
    ],
)
def test_transformers_normalise_twice_a_layer_and_once_more(
    name: str, plain: int, after_sums: int, hidden: int
) -> None:
    counts = {False: 0, True: 0}
    for layer in suite(name):
        if isinstance(layer.workload, Norm):
            assert layer.workload.cols == hidden
            counts[layer.workload.has_residual] += layer.count
    assert counts == {False: plain, True: after_sums}


def test_layer_counts_once_by_default() -> None:
    layer = Layer(name="fc", text="gemm:m=1,n=8,k=8,dtype=f16", scales="m")
    assert layer.count == 1
    assert str(layer.at_batch(4).workload) == "gemm:m=4,n=8,k=8,dtype=f16"


DOUBLE = """
from dataclasses import dataclass
from typing import ClassVar

from tunebench.workloads.operators.layernorm import LayerNorm


@dataclass(frozen=True, kw_only=True)
class Double(LayerNorm):
    operator: ClassVar[str] = "double"
"""


@pytest.fixture
def no_users_operators() -> Iterator[None]:
    with workloads.operator_scope(empty=True):
        yield


def _module(source: str, name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(source, vars(module))
    return module


@pytest.mark.usefixtures("no_users_operators")
def test_a_users_operator_joins_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module(DOUBLE, "mine", monkeypatch)
    assert register(module) is module.Double
    assert register(module) is module.Double  # registering the same module again changes nothing
    assert parse("double:rows=2,cols=2,dtype=f32") == module.Double(rows=2, cols=2, dtype="f32")
    assert "double" in all_operators()
    with pytest.raises(UnknownName, match="Did you mean 'double'"):
        parse("doubel:rows=2")
    with pytest.raises(InputError, match="operator 'double' exists already"):
        register(_module(DOUBLE, "another", monkeypatch))


@pytest.mark.usefixtures("no_users_operators")
def test_a_users_operator_takes_no_name_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="operator 'gemm' exists already; choose another name"):
        register(_module(DOUBLE.replace('"double"', '"gemm"'), "mine", monkeypatch))


def test_a_module_defines_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    two = DOUBLE + DOUBLE.replace("Double", "Treble").replace('"double"', '"treble"')
    with pytest.raises(InputError, match="mine defines more than one operator"):
        register(_module(two, "mine", monkeypatch))


def test_a_module_without_an_operator_registers_nothing() -> None:
    assert register(types.ModuleType("empty")) is None


def test_reading_a_workload_imports_no_numpy_and_no_other_operator() -> None:
    code = (
        "import sys; from tunebench.workloads import parse; str(parse('gemm:m=8,n=8,k=8,dtype=f16')); "
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('numpy', 'numba', 'optuna', 'sqlalchemy')]; "
        "others = [m for m in sys.modules if m.endswith(('operators.conv2d', 'operators.softmax'))]; "
        "sys.exit(repr((loaded[:3], others)) if loaded or others else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- user-defined suites -----------------------------------------------------------------------------


def test_a_file_is_a_suite_too(tmp_path: Path) -> None:
    path = tmp_path / "net.toml"
    path.write_text(
        '[layer.up]\nworkload = "gemm:m=8,n=4,k=2,dtype=f32"\ncount = 3\nscales = "m"\n'
        '[layer.soft]\nworkload = "softmax:rows=8,cols=4,dtype=f32"\n'
    )
    up, soft = suite(str(path))
    assert (up.name, up.count, str(up.workload)) == ("up", 3, "gemm:m=8,n=4,k=2,dtype=f32")
    assert (soft.count, soft.scales) == (1, "")
    with pytest.raises(InputError, match="layer soft: a batch of 2 needs `scales`"):
        suite(path, batch=2)
    path.write_text(path.read_text() + 'scales = "m"\n')
    with pytest.raises(
        InputError, match="layer soft: a batch of 2 needs `scales`, a size that it multiplies: rows"
    ):
        suite(path, batch=2)
    path.write_text(path.read_text().partition("[layer.soft]")[0])
    assert (
        str(suite(path, batch=2)[0].workload) == "gemm:m=16,n=4,k=2,dtype=f32"
    )  # the changed file is read again


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("layer", "is not valid TOML"),
        ("", "has no layers"),
        ("layer = 3", "has no layers"),
        ("[layer.a]\ncount = 1", "layer a must be a table with `workload`"),
        (
            '[layer.a]\nworkload = "softmax:rows=8,cols=4,dtype=f32"\ncounts = 2',
            "layer a has counts; known are",
        ),
        (
            '[layer.a]\nworkload = "softmax:rows=8,cols=4,dtype=f32"\ncount = 0',
            "count must be a whole number",
        ),
        ('[layer.a]\nworkload = "softmax:rows=8,cols=4,dtype=f32"\nscales = 3', "scales must be the name"),
        ('[layer.a]\nworkload = "softmax:rows=8"', "layer a: "),
    ],
)
def test_a_file_that_is_no_suite_is_refused_in_a_line(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "net.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"net\.toml") as refused:
        suite(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
