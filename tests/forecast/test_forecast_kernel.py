"""Library kernels of a workload: families, figures and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from tests.forecast.hand_made import NeverComputed
from tunebench import device, workloads
from tunebench.forecast.library import kernel
from tunebench.forecast.library.kernel import COLUMNS, LibraryKernel, library_kernels
from tunebench.workload import Category, Size, Tensor

A100 = "a100-80-sxm"
MATRIX = {"rows": 8, "cols": 32}


def kernels(text: str, on: str = A100) -> list[LibraryKernel]:
    return list(library_kernels(workloads.parse(text), device.find(on)))


def figures(launched: LibraryKernel) -> dict[str, float]:
    return dict(zip(COLUMNS[launched.family], launched.figures, strict=True))


def test_every_operator_has_library_kernels() -> None:
    assert set(kernel.OPERATORS) == set(workloads.all_operators())


def test_a_product_with_its_bias_is_one_launch() -> None:
    for epilogue in ("none", "bias"):
        (launched,) = kernels(f"gemm:m=64,n=48,k=32,batch=3,dtype=bf16,out=f32,epilogue={epilogue}")
        sizes = {"batch": 3, "m": 64, "n": 48, "k": 32}
        assert figures(launched) == {**sizes, "in_bytes": 2, "out_bytes": 4, "extra_bytes": 0}
        assert (launched.family, launched.arithmetic, launched.proxy) == ("product", "bf16", "")


@pytest.mark.parametrize(
    ("epilogue", "reads"), [("bias+gelu", 1), ("bias+gelu+residual", 2), ("residual", 2)]
)
def test_other_epilogues_are_a_launch_over_the_result(epilogue: str, reads: int) -> None:
    _, launched = kernels(f"gemm:m=64,n=48,k=32,batch=3,dtype=f16,epilogue={epilogue}")
    nbytes = 2 * 3 * 64 * 48
    assert (launched.family, launched.figures) == ("elementwise", (3 * 64, 48, reads * nbytes, nbytes))
    assert launched.proxy == "f16 predicted as f32 with the same bytes"


def test_8_bit_operands_are_converted_first() -> None:
    (launched,) = kernels("gemm:m=64,n=48,k=32,batch=2,dtype=e4m3", "h100-sxm")
    assert figures(launched)["extra_bytes"] == 3 * 2 * 64 * 32
    assert (figures(launched)["in_bytes"], figures(launched)["out_bytes"], launched.arithmetic) == (
        1,
        2,
        "e4m3",
    )


@pytest.mark.parametrize(
    ("dtype", "on", "arithmetic", "said"),
    [
        ("bf16", "t4", "f32", "bf16 multiplied in f32:"),
        ("e4m3", A100, "bf16", "e4m3 multiplied in bf16:"),
        ("e4m3", "v100-pcie", "f16", "e4m3 multiplied in f16:"),
        ("e4m3", "p4", "f32", "e4m3 multiplied in f32:"),
        ("tf32", "v100-pcie", "f32", "tf32 multiplied in f32:"),
        ("tf32", A100, "tf32", "tf32 predicted as"),
        ("f16", "p100-pcie", "f32", "f16 multiplied in f32:"),
        ("i8", "v100-pcie", "f32", "i8 multiplied in f32:"),
        ("i8", "t4", "i8", "i8 as e4m3"),
        ("f32", "mi100", "f32", ""),
        ("f16", "t4", "f16", ""),
    ],
)
def test_a_type_without_tensor_cores_is_multiplied_in_another(
    dtype: str, on: str, arithmetic: str, said: str
) -> None:
    (launched,) = kernels(f"gemm:m=64,n=64,k=64,dtype={dtype}", on)
    assert launched.arithmetic == arithmetic
    assert launched.proxy.startswith(said)
    assert bool(launched.proxy) == bool(said)


def test_a_gated_product_is_two_products_and_a_gate() -> None:
    first, second, gate = kernels("gated_gemm:m=8,n=32,k=16,dtype=f16")
    assert first == second
    assert first.figures == (1, 8, 32, 16, 2, 2, 0)
    assert (gate.family, gate.figures) == ("elementwise", (8, 32, 2 * 512, 512))


@pytest.mark.parametrize(("groups", "m", "batch", "rows"), [(8, 4096, 8, 512), (8, 1, 1, 1), (64, 32, 32, 1)])
def test_groups_of_other_types_are_a_batch_of_equal_products(
    groups: int, m: int, batch: int, rows: int
) -> None:
    (launched,) = kernels(f"grouped_gemm:groups={groups},m={m},n=64,k=32,dtype=f32")
    assert launched.figures == (batch, rows, 64, 32, 4, 4, 0)
    assert "equal products" in launched.proxy


@pytest.mark.parametrize(("skew", "skewed"), [("uniform", 0), ("zipf", 1)])
def test_groups_in_16_bits_are_a_measured_kernel(skew: str, skewed: int) -> None:
    (launched,) = kernels(f"grouped_gemm:groups=8,m=96,n=64,k=32,dtype=bf16,skew={skew}")
    assert (launched.family, launched.figures) == ("grouped product", (8, 96, 64, 32, 2, 2, skewed))
    assert not launched.proxy


def test_groups_whose_rows_belong_to_one_are_one_product() -> None:
    (launched,) = kernels("grouped_gemm:groups=8,m=96,n=64,k=32,dtype=bf16,skew=one")
    assert (launched.family, launched.figures) == ("product", (1, 96, 64, 32, 2, 2, 0))
    assert "one has all rows" in launched.proxy


CONV = "conv2d:n=2,c=16,h=10,w=12,k=32,r=3,s=3,stride=1,pad=1,layout=nhwc,dtype=f16"


@pytest.mark.parametrize(
    ("direction", "m", "n", "k"),
    [("fprop", 240, 32, 144), ("dgrad", 240, 16, 288), ("wgrad", 32, 144, 240)],
)
def test_convolution_is_an_implicit_product_with_the_bytes_of_its_images(
    direction: str, m: int, n: int, k: int
) -> None:
    workload = workloads.parse(f"{CONV},direction={direction}")
    (launched,) = library_kernels(workload, device.find(A100))
    got = figures(launched)
    assert launched.figures[:6] == (1, m, n, k, 2, 2)
    assert 2 * m * n * k == workload.flops()
    assert 2 * (m * k + k * n + m * n) + got["extra_bytes"] == workload.traffic().total_bytes


def test_gradients_of_strided_convolution_skip_inserted_zeros() -> None:
    (launched,) = kernels(CONV.replace("stride=1", "stride=2") + ",direction=dgrad")
    assert figures(launched)["k"] == 32 * 9 // 4


def test_a_convolution_of_one_tap_is_the_product_itself() -> None:
    (launched,) = kernels("conv2d:n=2,c=16,h=10,w=12,k=32,r=1,s=1,stride=1,pad=0,layout=nhwc,dtype=f16")
    assert launched.figures == (1, 240, 32, 16, 2, 2, 0)


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_depthwise_convolution_is_predicted_from_its_bytes(direction: str) -> None:
    text = CONV.replace("c=16", "c=32") + f",groups=32,direction={direction}"
    traffic = workloads.parse(text).traffic()
    (launched,) = kernels(text)
    assert (launched.family, launched.figures) == (
        "elementwise",
        (240, 32, traffic.read_bytes, traffic.write_bytes),
    )


def test_groups_of_many_channels_are_a_batch() -> None:
    (launched,) = kernels(CONV + ",groups=2")
    assert launched.figures[:4] == (2, 240, 16, 72)


@pytest.mark.parametrize(("epilogue", "reads"), [("scale+bias+relu", 1), ("bias+residual", 2)])
def test_an_epilogue_of_a_convolution_is_a_launch(epilogue: str, reads: int) -> None:
    product, after = kernels(f"{CONV},epilogue={epilogue}")
    assert [product] == kernels(CONV)
    nbytes = 2 * 240 * 32
    assert (after.family, after.figures) == ("elementwise", (240, 32, reads * nbytes, nbytes))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("elementwise:dtype=f32,expression=relu(x+y)", [("elementwise", 2048, 1024)]),
        ("softmax:dtype=f32", [("softmax", 1024, 1024)]),
        ("softmax:dtype=f32,direction=backward", [("softmax", 2048, 1024)]),
        ("softmax:dtype=f32,prologue=scale+mask", [("elementwise", 2048, 1024), ("softmax", 1024, 1024)]),
        (
            "softmax:dtype=f32,prologue=scale,direction=backward",
            [("softmax", 2048, 1024), ("elementwise", 1024, 1024)],
        ),
        ("cross_entropy:dtype=f32", [("softmax", 1024 + 32, 64)]),
        ("cross_entropy:dtype=f32,direction=backward", [("softmax", 1024 + 96, 1024)]),
        ("batchnorm_stats:dtype=f32", [("elementwise", 1024 + 256, 512)]),
        ("batchnorm_stats:dtype=f32,direction=backward", [("elementwise", 2048 + 256, 256)]),
        ("layernorm:dtype=f32", [("norm", 1024 + 256, 1024)]),
        ("layernorm:dtype=f32,stats=true", [("norm", 1024 + 256, 1024 + 64)]),
        ("layernorm:dtype=f32,direction=backward", [("norm", 2048 + 192, 1024 + 256)]),
        (
            "layernorm:dtype=f32,prologue=bias+residual",
            [("elementwise", 2048 + 128, 1024), ("norm", 1024 + 256, 1024)],
        ),
        ("rmsnorm:dtype=f32", [("norm", 1024 + 128, 1024)]),
        ("rmsnorm:dtype=f32,direction=backward", [("norm", 2048 + 160, 1024 + 128)]),
    ],
)
def test_rows_are_read_and_written_once(text: str, expected: list[tuple[str, int, int]]) -> None:
    launched = kernels(f"{text},rows=8,cols=32")
    assert [
        (launched_kernel.family, *launched_kernel.figures[2:]) for launched_kernel in launched
    ] == expected
    assert all(
        figures(launched_kernel).items() >= MATRIX.items() and launched_kernel.arithmetic == "f32"
        for launched_kernel in launched
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("softmax:dtype=f32", ""),
        ("layernorm:dtype=f32", ""),
        ("layernorm:dtype=bf16", "bf16 predicted as f32 with the same bytes"),
        ("softmax:dtype=f32,direction=backward", "gradients predicted as softmax with the same bytes"),
        ("layernorm:dtype=f32,direction=backward", "gradients predicted as layernorm with the same bytes"),
        ("rmsnorm:dtype=f32", "rmsnorm predicted as layernorm with the same bytes"),
        ("cross_entropy:dtype=f32", "cross_entropy predicted as softmax with the same bytes"),
        (
            "batchnorm_stats:dtype=f16",
            "sums over rows predicted as an elementwise operation with the same bytes",
        ),
    ],
)
def test_unmeasured_kernels_name_their_proxy(text: str, said: str) -> None:
    assert [launched.proxy for launched in kernels(f"{text},rows=8,cols=32")] == [said]


ATTENTION = "attention:batch=2,heads=8,heads_k=2,seq_q=64,seq_k=128,head_dim=32"


@pytest.mark.parametrize(("direction", "products"), [("forward", 2), ("backward", 5)])
def test_attention_of_16_bits_is_one_kernel(direction: str, products: int) -> None:
    (launched,) = kernels(f"{ATTENTION},dtype=bf16,direction={direction}")
    assert (launched.family, launched.arithmetic) == ("attention", "bf16")
    assert launched.figures == (2, 8, 2, 64, 128, 32, False, 0, 2, products)


@pytest.mark.parametrize(
    ("more", "on", "said"),
    [
        ("seq_k=64,causal=true,dtype=bf16", A100, ""),
        ("seq_k=64,dtype=bf16", A100, ""),
        ("seq_k=96,causal=true,dtype=bf16", A100, "attention with unequal lengths"),
        ("seq_k=64,dtype=bf16", "t4", "bf16 multiplied in f32"),
        (
            "seq_k=64,causal=true,dtype=bf16,direction=backward",
            A100,
            "gradients of attention predicted as attention with 5",
        ),
        ("seq_k=64,causal=true,window=16,dtype=bf16", A100, "attention with a window"),
        ("seq_k=64,bias=qk,dtype=bf16", A100, "attention with a bias"),
    ],
)
def test_attention_that_was_not_measured_names_its_proxy(more: str, on: str, said: str) -> None:
    (launched,) = kernels(f"attention:batch=2,heads=8,seq_q=64,head_dim=32,{more}", on)
    assert launched.proxy.startswith(said)
    assert bool(launched.proxy) == bool(said)


@pytest.mark.parametrize(
    ("sizes", "keys", "window"),
    [
        ("seq_q=64,window=16", 64, 16),
        ("seq_q=64,window=64", 64, 0),  # as without a window
        ("seq_q=1,seq_k=64,window=16", 64, 16),
        ("seq_q=32,seq_k=64,align=first", 32, 0),  # as a square mask
        ("seq_q=64,seq_k=32,align=first", 32, 0),
    ],
)
def test_masks_are_figures_of_attention(sizes: str, keys: int, window: int) -> None:
    (launched,) = kernels(f"attention:batch=2,heads=8,head_dim=64,dtype=bf16,causal=true,{sizes}")
    assert (figures(launched)["seq_k"], figures(launched)["window"]) == (keys, window)


@pytest.mark.parametrize(
    ("sizes", "family"),
    [
        ("seq_q=64,causal=true", "attention"),
        ("seq_q=64", "encoder attention"),
        ("seq_q=64,direction=backward", "attention"),
        ("seq_q=1,seq_k=64", "decode attention"),
        ("seq_q=1,seq_k=1", "encoder attention"),
        ("seq_q=2,seq_k=64", "attention"),
    ],
)
def test_family_of_attention_follows_from_mask_and_lengths(sizes: str, family: str) -> None:
    (launched,) = kernels(f"attention:batch=2,heads=8,head_dim=32,dtype=bf16,{sizes}")
    assert launched.family == family


@pytest.mark.parametrize(("direction", "times"), [("forward", 1), ("backward", 2)])
def test_attention_in_f32_is_products_and_a_softmax(direction: str, times: int) -> None:
    *products, softmax = kernels(f"{ATTENTION},dtype=f32,direction={direction}")
    pair = [(16, 64, 128, 32, 4, 4, 0), (16, 64, 32, 128, 4, 4, 0)]
    assert [launched.figures for launched in products] == pair * times
    nbytes = 4 * 16 * 64 * 128
    assert (softmax.family, softmax.figures) == ("softmax", (16 * 64, 128, times * nbytes, nbytes))


@dataclass(frozen=True, kw_only=True)
class Histogram(NeverComputed):
    """Number of occurrences of each of `bins` values; its output is small."""

    operator: ClassVar[str] = "histogram"
    category: ClassVar[Category | None] = "reduction"
    rows: Size
    bins: Size
    dtype: Literal["f32", "f16"] = "f16"

    def inputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="x", shape=(self.rows,), dtype=self.dtype),)

    def outputs(self) -> tuple[Tensor, ...]:
        total = Tensor(name="total", shape=(), dtype=self.dtype)
        return (total, Tensor(name="counts", shape=(4, self.bins), dtype=self.dtype))

    def flops(self) -> int:
        return self.rows


def test_user_operator_is_predicted_from_its_bytes() -> None:
    (launched,) = library_kernels(Histogram(rows=1000, bins=256), device.find(A100))
    assert (launched.family, launched.arithmetic) == ("elementwise", "f32")
    assert launched.figures == (4, 256, 2000, 2 * (4 * 256 + 1))
    assert launched.proxy == "histogram predicted as an elementwise operation"
