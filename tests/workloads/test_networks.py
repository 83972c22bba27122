"""Networks: FLOPs against closed forms, published sizes, and the kernels that PyTorch launches."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.public_data import found
from tunebench.errors import InputError, UnknownName
from tunebench.workloads import suite
from tunebench.workloads.networks import Network, NetworkRun, Operation, from_config, network, networks
from tunebench.workloads.networks.tape import Tape
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.conv2d import Conv2d
from tunebench.workloads.operators.elementwise import Elementwise
from tunebench.workloads.operators.gemm import Gemm

GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 100}
SWITCH = {
    "model_type": "switch_transformers",
    "num_layers": 4,
    "d_model": 64,
    "num_heads": 4,
    "d_kv": 16,
    "d_ff": 128,
    "num_experts": 4,
    "expert_capacity": 5,
    "vocab_size": 100,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
}


def small(**changed: Any) -> Network:
    return from_config("small", {**GPT2, **changed})


def flops(operations: tuple[Operation, ...], phase: str = "forward") -> int:
    """Return the FLOPs of matrix products only."""
    return sum(
        operation.count * operation.workload.flops()
        for operation in operations
        if operation.phase == phase and isinstance(operation.workload, Gemm | Attention)
    )


def launches(operations: tuple[Operation, ...]) -> int:
    return sum(operation.count for operation in operations)


# -- sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2", 124.44),
        ("gpt2-large", 774.03),
        ("gpt2-xl", 1557.61),
        ("opt-1.3b", 1315.76),
        ("bert-base", 110.11),
        ("bert-large", 336.23),
        ("llama-2-7b", 6738.42),
        ("llama-3-8b", 8030.26),
        ("switch-base-8", 619.34),
        ("resnet50", 25.56),
        ("resnet101", 44.55),
    ],
)
def test_parameters_are_those_published(name: str, millions: float) -> None:
    assert network(name).parameters() / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize("name", networks())
def test_every_built_in_network_can_be_run(name: str) -> None:
    architecture = getattr(network(name), "architecture", None)
    listed = architecture is None or architecture.image  # or a network of images
    operations = network(name).operations(NetworkRun(batch=2, seq=0 if listed else 128, dtype="f16"))
    assert {operation.workload.dtype for operation in operations if isinstance(operation.workload, Gemm)} <= {
        "f16"
    }
    assert len({(operation.workload, operation.part, operation.alone) for operation in operations}) == len(
        operations
    )


# -- FLOPs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-large", "opt-1.3b", "llama-3-8b"])
def test_a_forward_pass_multiplies_each_matrix_with_each_token(name: str) -> None:
    model: Any = network(name)
    architecture, tokens, seq = model.architecture, 2 * 512, 512
    matrices = (
        architecture.layers * sum(matrix.k * matrix.n for matrix in model.matrices())
        + architecture.vocabulary * architecture.hidden
    )
    attention = architecture.layers * 2 * 2 * tokens * seq * architecture.inner
    run = NetworkRun(batch=2, seq=seq)
    assert flops(model.operations(run)) == 2 * matrices * tokens + attention
    # Parameters that no matrix product uses: embeddings that are only looked up, biases, normalisations.
    looked_up = 0 if architecture.tied else architecture.vocabulary * architecture.hidden
    assert model.parameters() - looked_up == pytest.approx(matrices, rel=0.01)


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "opt-125m", "llama-3-8b", "switch-base-8"])
def test_backward_multiplies_twice_as_much(name: str) -> None:
    operations = network(name).operations(NetworkRun(batch=2, seq=128, mode="train"))
    assert flops(operations, "backward") == 2 * flops(operations)


def test_fused_attention_is_one_kernel_of_half_precision() -> None:
    model = small()
    plain = model.operations(NetworkRun(batch=2, seq=32, dtype="f16"))
    fused = model.operations(NetworkRun(batch=2, seq=32, dtype="f16", fused=True))
    (attention,) = (operation for operation in fused if isinstance(operation.workload, Attention))
    assert attention.count == 3
    assert str(attention.workload) == ("attention:batch=2,heads=4,seq_q=32,head_dim=16,dtype=f16,causal=true")
    assert not any("scores" in operation.part for operation in fused)
    assert launches(fused) < launches(plain) / 1.5


def test_fusing_leaves_the_products_of_single_precision_and_moves_less() -> None:
    plain, fused = (
        network("gpt2").operations(NetworkRun(batch=2, seq=512, mode="train", fused=fused))
        for fused in (False, True)
    )
    for phase in ("forward", "backward"):
        assert flops(plain, phase) == flops(fused, phase)
    moved = [
        sum(operation.count * operation.workload.traffic().total_bytes for operation in each_list)
        for each_list in (plain, fused)
    ]
    assert moved[1] < 0.7 * moved[0]


def test_a_compiler_knows_attention_as_bert_writes_it() -> None:
    operations = network("bert-base").operations(NetworkRun(batch=8, seq=128, fused=True))
    assert [operation.count for operation in operations if isinstance(operation.workload, Attention)] == [12]


def test_a_residual_network_has_the_convolutions_of_its_suite() -> None:
    expected: Counter[Any] = Counter()
    for layer in suite("resnet50", 8):
        if isinstance(layer.workload, Conv2d):
            expected[layer.workload.changed(epilogue="none")] += layer.count
    counted: dict[str, Counter[Any]] = {"fprop": Counter(), "dgrad": Counter(), "wgrad": Counter()}
    for operation in network("resnet50").operations(NetworkRun(batch=8, dtype="f16", mode="train")):
        if isinstance(operation.workload, Conv2d):
            counted[operation.workload.direction][operation.workload.changed(direction="fprop")] += (
                operation.count
            )
    assert counted["fprop"] == counted["wgrad"] == expected
    (first,) = expected - counted["dgrad"]
    assert first.c == 3, "images need no gradient"


def test_a_compiler_normalises_and_activates_images_in_one_kernel() -> None:
    plain, fused = (
        launches(network("resnet50").operations(NetworkRun(batch=8, fused=fused))) for fused in (False, True)
    )
    assert plain - fused == 33 + 16  # activations after normalisations, and after the sum of each block


# -- launched kernels, compared with PyTorch ---------------------------------------------------------


def _launched(
    code: Callable[[Any], Any], model_input: Any
) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the names and result shapes of what PyTorch dispatches for some code, forward and backward."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, Any]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.seen.append((func.overloadpacket.__name__, getattr(result, "shape", None)))
            return result

    forward, backward = Log(), Log()
    with forward:
        out = code(model_input)
    gradient = torch.randn_like(out)
    with backward:
        out.backward(gradient)
    return forward.seen, backward.seen


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_launches_what_pytorch_launches(batch: int) -> None:
    torch = pytest.importorskip("torch")
    seq, heads, width = 6, 3, 4
    mask = torch.ones(seq, seq, dtype=torch.bool, device="meta")

    def attention(qkv: Any) -> Any:  # as in GPT-2's code
        parts = (part.view(batch, seq, heads, width) for part in qkv.split(heads * width, dim=2))
        q, k, v = (part.permute(0, 2, 1, 3) for part in parts)
        scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], 2.0, device="meta")
        scores = torch.where(mask, scores, torch.full([], -1e9, device="meta"))
        out = torch.matmul(torch.softmax(scores, dim=-1), v)
        return out.permute(0, 2, 1, 3).contiguous().view(batch, seq, heads * width)

    qkv = torch.randn(batch, seq, 3 * heads * width, requires_grad=True, device="meta")
    kinds = {"bmm": "product", "clone": "copy", "cat": "copy", "div": "pointwise", "where": "pointwise"}
    kinds |= {"_softmax": "softmax", "_softmax_backward_data": "softmax"}
    expected = [
        Counter(kinds[name] for name, _ in seen if name in kinds) for seen in _launched(attention, qkv)
    ]

    names = {"Gemm": "product", "Softmax": "softmax"}
    counted = {"forward": Counter[str](), "backward": Counter[str]()}
    for operation in small(n_layer=1, attn_pdrop=0.0).operations(
        NetworkRun(batch=batch, seq=32, mode="train")
    ):
        if operation.part in (
            "attention scores",
            "attention softmax",
            "attention values",
            "attention copies",
        ):
            fallback = "copy" if operation.part == "attention copies" else "pointwise"
            counted[operation.phase][names.get(type(operation.workload).__name__, fallback)] += (
                operation.count
            )
    assert [counted["forward"], counted["backward"]] == expected


def test_formulas_launch_what_pytorch_launches() -> None:
    """Check GPT-2's activation and RMS normalisation, whose code is a formula."""
    torch = pytest.importorskip("torch")
    weight = torch.ones(64, device="meta", requires_grad=True)

    def gelu_new(x: Any) -> Any:
        return 0.5 * x * (1.0 + torch.tanh(0.797885 * (x + 0.044715 * torch.pow(x, 3.0))))

    def rmsnorm(x: Any) -> Any:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    run = NetworkRun(batch=2, seq=8, mode="train")
    for code, add in ((gelu_new, lambda t: t.activation("p", (16, 64), "gelu_new")), (rmsnorm, _norm)):
        tape = Tape(run)
        add(tape)
        x = torch.randn(16, 64, device="meta", requires_grad=True)
        for seen, phase in zip(_launched(code, x), ("forward", "backward"), strict=True):
            views = ("expand", "detach", "alias")
            full = sum(shape == (16, 64) for name, shape in seen if name not in views)
            rows = [
                (operation.workload, operation.count)
                for operation in tape.operations
                if operation.phase == phase
            ]
            counted = sum(n for work, n in rows if isinstance(work, Elementwise) and work.rows == 16)
            # A kernel that reads almost nothing expands the gradient of the mean.
            assert counted + (code is rmsnorm and phase == "backward") == full


def _norm(tape: Tape) -> None:
    tape.rmsnorm("p", (16, 64))


def test_models_that_normalise_in_single_precision_change_types_on_the_way() -> None:
    for name, changes in (("llama-3-8b", 65 * 2 + 32), ("opt-125m", 12), ("gpt2", 0)):
        run = NetworkRun(batch=2, seq=64)
        single = network(name).operations(run)
        half = network(name).operations(dataclasses.replace(run, dtype="f16"))
        cast = [
            operation
            for operation in half
            if isinstance(operation.workload, Elementwise)
            and operation.workload.out != operation.workload.dtype
        ]
        assert sum(operation.count for operation in cast) == launches(half) - launches(single) == changes


# -- training -------------------------------------------------------------------------------------


def test_the_optimizer_touches_every_parameter() -> None:
    model = network("gpt2")
    none, sgd, adamw = (
        sum(
            operation.count * operation.workload.traffic().total_bytes
            for operation in model.operations(NetworkRun(seq=64, mode="train", optimizer=name, fused=True))
            if operation.phase == "optimizer"
        )
        for name in ("none", "sgd", "adamw")
    )
    assert none == 0
    assert sgd == pytest.approx(3 * 4 * model.parameters(), rel=1e-3)
    assert adamw == pytest.approx(7 * 4 * model.parameters(), rel=1e-3)


def test_gradients_are_added_up_only_if_asked() -> None:
    model = network("gpt2")
    added = [
        sum(
            operation.count * operation.workload.traffic().total_bytes
            for operation in operations
            if operation.part == "gradients"
        )
        for operations in (
            model.operations(NetworkRun(seq=64, mode="train", accumulate=accumulate))
            for accumulate in (False, True)
        )
    ]
    assert added == [0, pytest.approx(3 * 4 * model.parameters(), rel=1e-2)]


def test_sharded_parameters_are_copied_in_both_passes_and_gradients_once() -> None:
    model = network("gpt2")
    run = NetworkRun(seq=64, mode="train", dtype="bf16", wide_gradients=True, sharded_parameters=True)
    moved = {
        (operation.part, operation.phase): operation.count * operation.workload.traffic().total_bytes
        for operation in model.operations(run)
        if operation.part.startswith("sharded")
    }
    each_pass = pytest.approx(4 * model.parameters(), rel=1e-2)
    assert moved == {
        ("sharded parameters", "forward"): each_pass,
        ("sharded parameters", "backward"): each_pass,
        ("sharded gradients", "backward"): pytest.approx(6 * model.parameters(), rel=1e-2),
    }
    inside = dataclasses.replace(run, mode="infer")
    assert {
        operation.phase for operation in model.operations(inside) if operation.part.startswith("sharded")
    } == {"forward"}


def test_inference_has_neither_gradients_nor_a_loss() -> None:
    operations = network("switch-base-8").operations(NetworkRun(batch=2, seq=128))
    assert {operation.phase for operation in operations} == {"forward"}
    assert "loss" not in {operation.part for operation in operations}


# -- parts of a network ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, SWITCH, {"model_type": "resnet"}])
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_stages_together_equal_the_network(config: dict[str, Any], mode: Any) -> None:
    model = from_config("small", config)
    seq = 0 if config["model_type"] == "resnet" else 32

    def counted(*stages: tuple[int, int]) -> Counter[tuple[Any, ...]]:
        total: Counter[tuple[Any, ...]] = Counter()
        for stage in stages:
            for operation in model.operations(NetworkRun(batch=2, seq=seq, mode=mode, layers=stage)):
                total[operation.workload, operation.part, operation.phase, operation.alone] += operation.count
        return total

    assert counted((0, 1), (1, model.layers)) == counted((0, model.layers))
    parts = model.parameters(layers=(0, 1)) + model.parameters(layers=(1, model.layers))
    assert parts == model.parameters() + 100 * 64 * bool(
        seq
    )  # the first and the last stage both hold a tied matrix


def test_devices_that_share_layers_have_a_part_of_each_product() -> None:
    model = small(vocab_size=128)
    whole, half = (
        flops(model.operations(NetworkRun(batch=2, seq=32, mode="train", tensor=tensor))) for tensor in (1, 2)
    )
    assert half * 2 == whole
    norms_and_biases = model.parameters() - 2 * model.parameters(tensor=2)
    assert -(3 * 6 * 64 + 2 * 64 + 64) <= norms_and_biases < 0, "what is not divided is on both"


def test_shared_layers_sum_up_twice_a_layer_and_pass() -> None:
    run = NetworkRun(batch=2, seq=32, mode="train", tensor=2)
    counts = Counter(
        {(collective.part, collective.phase): collective.count for collective in small().collectives(run)}
    )
    assert counts == {
        ("layers", "forward"): 6,
        ("layers", "backward"): 6,
        ("embedding", "forward"): 1,
        ("head", "backward"): 1,
    }
    assert {collective.nbytes for collective in small().collectives(run)} == {2 * 32 * 64 * 4}
    assert small().collectives(NetworkRun(batch=2, seq=32)) == ()
    decoder = from_config("small", SWITCH).collectives(NetworkRun(seq=32, tensor=2, layers=(4, 8)))
    assert [(collective.part, collective.count) for collective in decoder] == [("layers", 4 * 3)]
    assert small().boundary_bytes(NetworkRun(batch=2, seq=32, dtype="f16")) == 2 * 32 * 64 * 2


def test_experts_process_tokens_up_to_their_capacity() -> None:
    operations = from_config("small", SWITCH).operations(NetworkRun(batch=3, seq=64))
    up = {operation.workload.m: operation.count for operation in operations if operation.part == "mlp up"}  # type: ignore[attr-defined]
    assert up == {3 * 64: 4, 3 * 5: 4 * 4}  # four dense layers, and four with four experts of 5 a sequence
    model: Any = from_config("small", SWITCH)
    assert [index for index in range(8) if model.is_sparse(index)] == [1, 3, 5, 7]
    short = from_config("small", SWITCH).operations(NetworkRun(batch=3, seq=8))
    assert any(operation.workload.m == 3 * 2 for operation in short if operation.part == "mlp up")  # type: ignore[attr-defined]
    assert any(operation.alone for operation in operations if operation.part == "router")


def test_a_bias_that_was_looked_up_is_read_by_sectors() -> None:
    layer = from_config("small", {**SWITCH, "num_heads": 16})
    pairs = 2 * 16 * 64 * 64
    for dtype, size, read in (("f32", 4, 8), ("f16", 2, 16)):
        run = NetworkRun(batch=2, seq=64, layers=(0, 1), dtype=dtype)  # type: ignore[arg-type]
        (added,) = (
            operation.workload.traffic().total_bytes
            for operation in layer.operations(run)
            if operation.part == "attention scores" and isinstance(operation.workload, Elementwise)
        )
        assert added == (2 + read) * pairs * size


# -- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": None}, "must have model_type, one of gpt2"),
        ({"model_type": "mamba"}, "mamba has layers that carry a state"),
        ({"n_layer": None}, "must have n_layer or num_hidden_layers"),
        ({"n_head": 5}, "5 heads must divide a hidden width of 64"),
        ({"n_layer": 0}, "layers must be a whole number"),
        ({"n_layer": "12"}, "layers must be a whole number from 1 to 10000, got '12'"),
        ({"activation_function": "swish7"}, "unknown activation 'swish7'"),
        ({"model_type": "resnet", "layer_type": "basic"}, "layer_type must be bottleneck"),
        ({"model_type": "resnet", "depths": [3, 4]}, "depths and hidden_sizes must be as many"),
    ],
)
def test_invalid_configuration_is_reported(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(**changed)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (NetworkRun(batch=2), "needs seq"),
        (NetworkRun(seq=33), "has 32 positions; seq=33"),
        (NetworkRun(seq=8, tensor=3), "tensor=3 must divide 4 heads of queries"),
        (NetworkRun(seq=8, layers=(2, 4)), "has 3 layers; got a stage of 2 up to 4"),
    ],
)
def test_unsupported_run_of_a_network_is_reported(run: NetworkRun, message: str) -> None:
    with pytest.raises(InputError, match=message):
        small().operations(run)


@pytest.mark.parametrize(
    "given", [{"batch": 0}, {"seq": -1}, {"tensor": 0}, {"layers": (1, 1)}, {"optimizer": "sgd"}]
)
def test_an_impossible_run_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        NetworkRun(**given)


def test_an_unknown_network_lists_the_known() -> None:
    with pytest.raises(UnknownName, match="gpt2-large"):
        network("gpt5")


def test_a_configuration_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "config.json"
    path.write_text(json.dumps({**GPT2, "torch_dtype": "float32"}), encoding="utf-8")
    model = network(str(path))
    assert (model.name, model.layers, model.parameters()) == ("mine", 3, small().parameters())
    assert network(str(path.parent)).parameters() == model.parameters()
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(InputError, match="must be an object"):
        network(str(path))
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"config\.json is not valid JSON"):
        network(str(path))
    with pytest.raises(InputError, match=r"network .* cannot be read"):
        network(str(tmp_path / "none.json"))


def test_public_configurations_are_read_unchanged() -> None:
    folder = found("predict/neusight_model_configs")
    read = {path.stem: network(str(path)) for path in sorted(folder.glob("*.json"))}
    assert len(read) == 12
    assert read["gpt2_large"].parameters() == network("gpt2-large").parameters()
    assert read["switchxl4"].parameters() == network("switch-xl-4").parameters()
    # The embedding is wider than the hidden states: one matrix projects down, another one back.
    assert read["opt"].parameters() == 50272 * 2048 + 2050 * 512 + 2 * 2048 * 512 + 12 * 512**2 + 15 * 512
    assert read["opt_13"].parameters() == network("opt-1.3b").parameters()


# -- lists of operations -----------------------------------------------------------------------------


def test_a_suite_is_a_network() -> None:
    operations = network("llama-3-8b-decode").operations(NetworkRun(batch=8, dtype="bf16"))
    assert launches(operations) == sum(layer.count for layer in suite("llama-3-8b-decode"))
    assert {operation.workload for operation in operations} == {
        layer.workload for layer in suite("llama-3-8b-decode", 8)
    }


def test_lists_are_read_from_csv_and_toml(tmp_path: Path) -> None:
    work = "gemm:m=64,n=32,k=16,dtype=f16"
    table, tables = tmp_path / "a.csv", tmp_path / "b.toml"
    table.write_text(
        f'workload,count,part,scales\n"{work}",3,up,m\n"softmax:rows=8,cols=4,dtype=f16",,,\n',
        encoding="utf-8",
    )
    tables.write_text(
        f'[[operation]]\nworkload = "{work}"\ncount = 3\npart = "up"\nscales = "m"\n\n'
        '[[operation]]\nworkload = "softmax:rows=8,cols=4,dtype=f16"\n',
        encoding="utf-8",
    )
    run = NetworkRun(dtype="f16")
    operations = network(str(table)).operations(run)
    assert operations == network(str(tables)).operations(run)
    assert [(str(operation.workload), operation.count, operation.part) for operation in operations] == [
        (work, 3, "up"),
        ("softmax:rows=8,cols=4,dtype=f16", 1, "softmax"),
    ]
    with pytest.raises(InputError, match="needs `scales`"):
        network(str(table)).operations(NetworkRun(batch=2, dtype="f16"))
    with pytest.raises(InputError, match="mode=infer"):
        network(str(table)).operations(NetworkRun(mode="train"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workload,count\n", "no workload in the list"),
        ("workload,count\ngemm:m=1,2\n", "entry 1: gemm: missing"),
        ('workload,count\n"gemm:m=1,n=1,k=1,dtype=f16",0\n', "count must be a whole number from 1 to"),
        ('workload,scales\n"gemm:m=1,n=1,k=1,dtype=f16",trans\n', "scales=trans is no size"),
        ("what,count\nx,1\n", "must have workload"),
    ],
)
def test_invalid_list_is_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "list.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        network(str(path))


# --------------------------------------------------------------------------------------- Megatron-LM

LAYER = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 96}


def megatron(**changes: Any) -> NetworkRun:
    return NetworkRun(batch=2, seq=32, mode="train", dtype="f16", stack="megatron", **changes)


def flops_of(run: NetworkRun, phase: str) -> int:
    operations = from_config("small", LAYER).operations(run)
    return sum(
        operation.count * operation.workload.flops()
        for operation in operations
        if operation.phase == phase and operation.workload.category == "dot product"
    )


def test_megatron_products_are_those_of_the_formula() -> None:
    """Forward: 24 b s h^2 (1 + s / 6h) per layer and 2 b s h V for the head; backward: twice."""
    b, s, h, vocabulary = 2, 32, 64, 96
    forward = 2 * 24 * b * s * h**2 * (1 + s / (6 * h)) + 2 * b * s * h * vocabulary
    assert flops_of(megatron(), "forward") == forward
    assert flops_of(megatron(), "backward") == 2 * forward
    core = 2 * 4 * b * s**2 * h
    assert flops_of(megatron(recompute="selective"), "backward") == 2 * forward + core
    layers = forward - 2 * b * s * h * vocabulary
    assert flops_of(megatron(recompute="full"), "backward") == 2 * forward + layers


def test_tensor_and_sequence_parallelism_divide_kernels() -> None:
    whole, divided = megatron(), megatron(tensor=2)
    assert flops_of(divided, "forward") * 2 == flops_of(whole, "forward")

    def rows(run: NetworkRun, part: str) -> set[int]:
        operations = from_config("small", LAYER).operations(dataclasses.replace(run, layers=(0, 1)))
        return {operation.workload.rows for operation in operations if operation.part == part}

    assert rows(divided, "norm") == {64}
    assert rows(megatron(tensor=2, sequence_parallel=True), "norm") == {32}


def test_megatron_collectives() -> None:
    small, nbytes = from_config("small", LAYER), 2 * 32 * 64 * 2

    def found(run: NetworkRun) -> Counter[tuple[str, str, bool]]:
        counts: Counter[tuple[str, str, bool]] = Counter()
        for collective in small.collectives(run):
            assert collective.nbytes == nbytes
            counts[collective.collective, collective.phase, collective.behind is not None] += collective.count
        return counts

    assert found(megatron()) == {}
    assert found(megatron(tensor=2)) == {
        ("all-reduce", "forward", False): 5,
        ("all-reduce", "backward", True): 5,
    }
    assert found(megatron(tensor=2, recompute="full"))["all-reduce", "backward", False] == 4
    parallel = found(megatron(tensor=2, sequence_parallel=True))
    assert parallel["reduce-scatter", "forward", False] == parallel["all-gather", "forward", False] == 5
    assert parallel["reduce-scatter", "backward", True] == parallel["all-gather", "backward", True] == 5
    assert parallel["all-gather", "backward", False] == 5
    later = found(megatron(tensor=2, layers=(1, 2)))
    assert later["all-gather", "forward", False] == 1


def test_softmax_is_fused_only_where_megatron_has_a_kernel() -> None:
    """Sequences times heads on a device must be a multiple of 4, and the numbers of 16 bits."""

    def kernels(run: NetworkRun) -> Counter[str]:
        operations = from_config("small", LAYER).operations(run)
        return Counter(
            f"{str(operation.workload).split(':')[0]} {operation.phase}"
            for operation in operations
            for _ in range(operation.count)
            if operation.part == "attention softmax"
        )

    fused, parts = kernels(megatron()), kernels(megatron(tensor=4, layers=(0, 1)))
    assert fused == {
        "softmax forward": 2,
        "softmax backward": 2,
        "elementwise forward": 2,
        "elementwise backward": 2,
    }
    assert parts["softmax forward"] == parts["softmax backward"] == 1
    assert parts["elementwise forward"] == parts["elementwise backward"] == 5
    recomputed = from_config("small", LAYER).operations(
        megatron(tensor=4, recompute="selective", layers=(0, 1))
    )
    assert (
        sum(
            "softmax" in str(operation.workload)
            for operation in recomputed
            if operation.part == "recomputation"
        )
        == 1
    )


def test_flash_attention_is_one_kernel() -> None:
    parts = {operation.part for operation in from_config("small", LAYER).operations(megatron(flash=True))}
    assert "attention" in parts
    assert not parts & {"attention scores", "attention softmax", "attention values"}


def test_gated_layers_run_by_megatron() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    llama = from_config("small", {"model_type": "llama", "vocab_size": 96, "num_key_value_heads": 2, **sizes})
    operations = llama.operations(megatron(tensor=2, flash=True))
    widths = [
        operation.workload.n
        for operation in operations
        if operation.part == "mlp up" and operation.phase == "forward"
    ]
    assert widths == [128]
    assert all("layernorm" not in str(operation.workload) for operation in operations)


@pytest.mark.parametrize(
    "changes", [{"recompute": "selective"}, {"sequence_parallel": True}, {"context": 2}, {"stack": "jax"}]
)
def test_options_of_megatron_need_its_stack(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="stack"):
        NetworkRun(seq=32, mode="train", **changes)


def test_eight_bit_products_are_those_of_linear_layers_inside_layers() -> None:
    small = from_config("small", LAYER)

    def products(run: NetworkRun) -> Counter[tuple[str, str]]:
        counts: Counter[tuple[str, str]] = Counter()
        for operation in small.operations(run):
            if operation.workload.category == "dot product":
                counts[operation.part, operation.workload.dtype] += operation.count
        return counts

    def launches(run: NetworkRun) -> int:
        return sum(operation.count for operation in small.operations(run))

    delayed, current = megatron(fp8="delayed"), megatron(fp8="current")
    for part in ("attention qkv", "attention output", "mlp up", "mlp down"):
        assert products(delayed)[part, "e4m3"] == 6  # three in each of two layers
    for part in ("attention scores", "head"):
        assert products(delayed)[part, "e4m3"] == 0 < products(delayed)[part, "f16"]
    assert flops_of(delayed, "backward") == flops_of(megatron(), "backward")
    assert launches(delayed) == launches(megatron())
    assert launches(current) - launches(delayed) == 2 * 4 * 2  # maxima of inputs and of gradients
    assert small.matrix_parameters(tensor=2, layers=(0, 1)) == 12 * 64**2 // 2
    updated = [
        operation.workload.traffic().total_bytes
        for operation in small.operations(dataclasses.replace(delayed, optimizer="adamw"))
        if operation.part == "fp8 weights"
    ]
    assert updated == [2 * 12 * 64**2 * 4]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"stack": "eager", "fp8": "delayed"}, "fp8=delayed needs stack=megatron or compiled"),
        ({"fp8": "e5m2"}, "none, delayed, current|current, delayed, none"),
        ({"dtype": "f32", "fp8": "current"}, "needs dtype=bf16"),
    ],
)
def test_eight_bit_products_need_megatron_and_16_bits(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        from_config("small", LAYER).operations(
            NetworkRun(**{"seq": 32, "mode": "train", "dtype": "bf16", "stack": "megatron"} | changes)
        )


@pytest.mark.parametrize("stack", ["eager", "compiled"])
def test_layers_of_other_stacks_run_again_and_attention_may_be_one_kernel(stack: Any) -> None:
    llama = network("llama-2-7b")
    run = NetworkRun(seq=2048, mode="train", dtype="bf16", stack=stack, flash=True)
    attention = [
        operation for operation in llama.operations(run) if operation.workload.operator == "attention"
    ]
    assert sum(operation.count for operation in attention) == 2 * 32
    assert not any("scores" in operation.part for operation in llama.operations(run))

    def flops(run: NetworkRun) -> int:
        return sum(
            operation.count * operation.workload.flops()
            for operation in llama.operations(run)
            if operation.phase == "backward"
        )

    recomputed = dataclasses.replace(run, recompute="full", recompute_layers=16)
    every = dataclasses.replace(run, recompute="full")
    assert flops(every) - flops(run) == pytest.approx(2 * (flops(recomputed) - flops(run)))
    assert flops(recomputed) > 1.2 * flops(run)


def test_fused_is_an_alias_of_the_compiled_stack() -> None:
    run = NetworkRun(seq=32, fused=True)
    assert run == NetworkRun(seq=32, stack="compiled")
    assert run.compiled
    assert not dataclasses.replace(run, stack="eager").compiled


def test_devices_of_a_ring_have_equal_shares_of_attention() -> None:
    llama = network("llama-3-8b")
    run = NetworkRun(batch=2, seq=8192, mode="train", dtype="bf16", stack="megatron", flash=True)

    def attention(ring_run: NetworkRun) -> list[Operation]:
        return [
            operation for operation in llama.operations(ring_run) if isinstance(operation.workload, Attention)
        ]

    def flops(ring_run: NetworkRun) -> int:
        return sum(operation.count * operation.workload.flops() for operation in attention(ring_run))

    for context in (2, 4, 8):
        share = dataclasses.replace(run, seq=8192 // context, context=context)
        assert flops(share) == pytest.approx(flops(run) / context, rel=0.001)
        assert sum(operation.count for operation in attention(share)) == 2 * 32 * context
        forward, backward = llama.exchanges(share)
        assert forward.count == backward.count == 32 * (context - 1)
        assert forward.nbytes == 2 * 2 * (8192 // context) * 8 * 128 * 2  # keys and values of 8 heads
        assert backward.nbytes == 2 * forward.nbytes  # and their gradients
        recomputed = llama.exchanges(dataclasses.replace(share, recompute="full"))
        assert [(exchange.phase, exchange.behind) for exchange in recomputed][-1] == ("backward", "forward")
    assert llama.exchanges(run) == ()


def test_context_parallelism_needs_flash_and_positions() -> None:
    with pytest.raises(InputError, match="flash"):
        NetworkRun(seq=1024, stack="megatron", context=2)
    run = NetworkRun(seq=1024, stack="megatron", flash=True, context=2)
    with pytest.raises(InputError, match="1024 positions; seq=2048"):
        network("gpt2").operations(run)
