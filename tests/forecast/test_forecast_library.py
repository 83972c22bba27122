"""Predicted times of library kernels: properties of every workload and device, and the stated basis."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forecast.hand_made import NeverComputed, knowing
from tunebench import device, workloads
from tunebench.errors import DeviceError, InputError
from tunebench.forecast.library import bounds_us, predict, predict_all, predict_fitting
from tunebench.forecast.library.model import WIDENING_PROXY, ForecastModel, Spread
from tunebench.forecast.library.roofline_model import LAUNCH_US, flop_per_us
from tunebench.workload import Category, Size, Tensor, Traffic, Workload

DEVICES = device.described()
A100, H100, H200, P100, P4, T4 = (
    DEVICES[name] for name in ("a100-80-sxm", "h100-sxm", "h200-sxm", "p100-pcie", "p4", "t4")
)
CONV = "conv2d:n=8,c=64,h=28,w=28,k=64,r=3,s=3,stride=1,pad=1,layout=nhwc"
EVERY = [
    workloads.parse(text)
    for text in (
        "gemm:m=1,n=1,k=1,dtype=f32",
        "gemm:m=4096,n=4096,k=4096,dtype=e4m3,epilogue=bias+gelu+residual",
        "gemm:m=300,n=7,k=64,dtype=i8",
        "gemm:m=2147483647,n=2147483647,k=2147483647,batch=2147483647,dtype=tf32",
        "gated_gemm:m=16,n=11008,k=4096,dtype=bf16",
        "scaled_gemm:m=1,n=14336,k=4096,dtype=bf16,weight=i4,scales=group",
        "scaled_gemm:m=4096,n=4096,k=4096,dtype=e4m3,scales=block",
        "scatter_add:rows=1,cols=1,bins=2147483647,dtype=f16,skipped=0",
        "scatter_add:rows=2147483647,cols=128,bins=1,dtype=f32,base=true",
        "grouped_gemm:groups=64,m=1,n=64,k=64,dtype=f16,skew=one",
        f"{CONV},dtype=f16,epilogue=scale+bias+residual+relu",
        f"{CONV},dtype=tf32,groups=64,direction=wgrad",
        "conv2d:n=1,c=1,h=1,w=1,k=1,r=1,s=1,stride=1,pad=0,layout=nchw,dtype=f32,direction=dgrad",
        "elementwise:rows=1,cols=1,dtype=f32,expression=x",
        "elementwise:rows=1048576,cols=1048576,dtype=bf16,expression=gelu(x*g)+y,vectors=g",
        "reduction:rows=2147483647,cols=1,dtype=f32,expression=x,reduce=sum,axis=rows",
        "batchnorm_stats:rows=2,cols=1,dtype=f32",
        "batchnorm_stats:rows=2147483647,cols=2147483647,dtype=bf16,direction=backward",
        "softmax:rows=1,cols=1,dtype=f16,log=true,direction=backward,prologue=scale",
        "cross_entropy:rows=2147483647,cols=2147483647,dtype=f32,direction=backward",
        "layernorm:rows=1,cols=1048576,dtype=f32,prologue=bias+residual,stats=true",
        "rmsnorm:rows=1048576,cols=1,dtype=f16,direction=backward",
        "strided_elementwise:shape=1,dtype=bool,expression=lt(x,0),operands=x.f32.0",
        "strided_elementwise:shape=4096x65536,dtype=bf16,expression=x+y,operands=x.f32.1_4096+y.bf16.0_1",
        "strided_reduction:shape=2147483x1000,dtype=f16,expression=x,operands=x.f16.1_2147483,reduce=mean",
        "attention:batch=1,heads=1,seq_q=1,head_dim=1,dtype=f16",
        "attention:batch=4,heads=32,heads_k=4,seq_q=1,seq_k=65536,head_dim=128,dtype=bf16,causal=true",
        "attention:batch=2,heads=12,seq_q=333,head_dim=64,dtype=f32,direction=backward",
    )
]


def holds(predictions: Any) -> None:
    ordered = np.array([predictions.bound_us, predictions.low_us, predictions.time_us, predictions.high_us])
    assert np.isfinite(ordered).all()
    assert (np.diff(ordered, axis=0) >= 0).all()
    assert (predictions.utilisation * predictions.time_us >= predictions.bound_us * (1 - 1e-12)).all()
    assert (predictions.time_us > 1.0).all()
    assert [b == "interpolated" for b in predictions.basis] == [not why for why in predictions.because]


@pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)
def test_every_operator_on_every_device(on: device.Device) -> None:
    assert {workload.operator for workload in EVERY} == set(workloads.all_operators())
    with np.errstate(all="raise", under="ignore"):
        predictions = predict_all(EVERY, on)
    assert len(predictions) == len(EVERY)
    holds(predictions)


sizes = st.one_of(st.integers(1, 300), st.integers(1, 2**14), st.sampled_from([1, 2**20]))
few = st.integers(1, 12)
types = st.sampled_from(["f32", "f16", "bf16"])
products = st.sampled_from(["f32", "tf32", "f16", "bf16"])
ways = st.sampled_from(["forward", "backward"])


def made(operator: str, **dimensions: Any) -> st.SearchStrategy[Workload]:
    return st.fixed_dictionaries(dimensions).map(
        lambda dimensions_drawn: workloads.workload(operator, **dimensions_drawn)
    )


def _conv(dimensions: dict[str, Any]) -> Workload:
    groups, h, w = dimensions["groups"], dimensions["h"], dimensions["w"]
    dimensions |= {
        "c": groups * dimensions["c"],
        "k": groups * dimensions["k"],
        "r": min(dimensions["r"], h),
        "s": min(dimensions["s"], w),
    }
    return workloads.workload("conv2d", **dimensions, layout="nhwc")


def _attention(dimensions: dict[str, Any]) -> Workload:
    dimensions |= {
        "heads": dimensions["heads_k"] * dimensions.pop("group"),
        "seq_k": dimensions["seq_q"] + dimensions.pop("more"),
    }
    return workloads.workload("attention", **dimensions)


pictures = dict.fromkeys(("n", "c", "h", "w", "k", "groups", "r", "s", "stride"), few)
directions = st.sampled_from(["fprop", "dgrad", "wgrad"])
convolutions = st.fixed_dictionaries(
    {**pictures, "pad": st.integers(0, 3), "dtype": products, "direction": directions}
).map(_conv)
heads = dict.fromkeys(("batch", "heads_k", "group", "head_dim"), few)
keys = {"seq_q": sizes, "more": st.sampled_from([0, 1, 4096])}
attentions = st.fixed_dictionaries(
    {**heads, **keys, "dtype": types, "causal": st.booleans(), "direction": ways}
).map(_attention)
anything = st.one_of(
    made("gemm", m=sizes, n=sizes, k=sizes, batch=few, dtype=st.one_of(products, st.just("e4m3"))),
    made("gemm", m=sizes, n=sizes, k=st.integers(1, 2**14), dtype=st.just("i8")),
    made("gated_gemm", m=sizes, n=sizes, k=sizes, dtype=products),
    made("scaled_gemm", m=sizes, n=sizes, k=sizes, dtype=st.sampled_from(["f32", "bf16", "e4m3"])),
    made("grouped_gemm", groups=sizes, m=sizes, n=sizes, k=sizes, dtype=products),
    made(
        "elementwise", rows=sizes, cols=sizes, dtype=types, expression=st.sampled_from(["x", "relu(x+y)*z"])
    ),
    made("softmax", rows=sizes, cols=sizes, dtype=types, direction=ways, log=st.booleans()),
    made("cross_entropy", rows=sizes, cols=sizes, dtype=types, direction=ways),
    made("layernorm", rows=sizes, cols=sizes, dtype=types, direction=ways),
    made("batchnorm_stats", rows=sizes.map(lambda rows: rows + 1), cols=sizes, dtype=types, direction=ways),
    made("rmsnorm", rows=sizes, cols=sizes, dtype=types, direction=ways),
    convolutions,
    attentions,
)


@settings(max_examples=60)
@given(st.lists(anything, min_size=1, max_size=8), st.sampled_from(sorted(DEVICES)))
def test_many_are_predicted_as_each_is(problems: list[Workload], name: str) -> None:
    with np.errstate(all="raise", under="ignore"):
        predictions = predict_all(problems, DEVICES[name])
    holds(predictions)
    for problem, many in zip(problems, predictions, strict=True):
        alone = predict(problem, DEVICES[name])
        assert alone.time_us == pytest.approx(many.time_us, rel=1e-9)
        assert (alone.low_us, alone.high_us) == pytest.approx((many.low_us, many.high_us), rel=1e-9)
        assert (alone.bound_us, alone.binding, alone.because) == (many.bound_us, many.binding, many.because)


def test_predict_all_of_no_workloads_is_empty() -> None:
    assert list(predict_all([], A100)) == []


def test_predicting_a_cpu_raises() -> None:
    with pytest.raises(DeviceError, match="for GPUs"):
        predict(EVERY[0], device.local_cpu())


# -------------------------------------------------------------------------------- what times should do


def time_us(text: str, on: device.Device) -> float:
    return predict(workloads.parse(text), on).time_us


def test_workload_larger_than_the_memory_of_the_device_is_refused() -> None:
    large = workloads.parse("gemm:m=200000,n=200000,k=1000,dtype=f16")
    fits = device.find("h100-sxm")
    assert predict_fitting([large], fits)[0].time_us == predict(large, fits).time_us
    with pytest.raises(InputError, match="take 75 GiB, and a40 has 48 GiB"):
        predict_fitting([workloads.parse("gemm:m=64,n=64,k=64,dtype=f16"), large], device.find("a40"))


@pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)
def test_twice_as_many_large_products_take_twice_as_long(on: device.Device) -> None:
    for dtype in ("f32", "bf16", "e4m3"):
        once, twice = (time_us(f"gemm:m=2048,n=2048,k=2048,batch={b},dtype={dtype}", on) for b in (128, 256))
        assert 1.8 < twice / once < 2.2


@pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)
def test_twice_as_many_long_rows_take_twice_as_long(on: device.Device) -> None:
    for operator in ("softmax", "layernorm", "elementwise"):
        more = ",expression=x" if operator == "elementwise" else ""
        once, twice = (time_us(f"{operator}:rows={r},cols=4096,dtype=f32{more}", on) for r in (2**17, 2**18))
        assert 1.8 < twice / once < 2.2


@pytest.mark.parametrize(
    "text", ["gemm:m=16,n=16384,k=16384,dtype=bf16", "softmax:rows=65536,cols=8192,dtype=bf16"]
)
def test_faster_memory_helps_what_it_limits(text: str) -> None:
    assert time_us(text, H200) < time_us(text, H100)


@pytest.mark.parametrize(
    ("slow", "fast"), [("t4", "a100-80-sxm"), ("a100-80-sxm", "h100-sxm"), ("h100-sxm", "b200")]
)
def test_later_devices_are_faster_at_large_products(slow: str, fast: str) -> None:
    text = "gemm:m=8192,n=8192,k=8192,dtype=f16"
    assert time_us(text, DEVICES[fast]) < 0.7 * time_us(text, DEVICES[slow])


# ------------------------------------------------------------------------------------- what is said of them


@pytest.mark.parametrize(
    ("text", "on", "because"),
    [
        ("gemm:m=4096,n=4096,k=4096,dtype=bf16", "h100-sxm", ""),
        ("gemm:m=4096,n=4096,k=4096,dtype=bf16", "h200-sxm", ""),
        ("gemm:m=1,n=1,k=1,dtype=bf16", "h100-sxm", "workload outside the measured range of sizes"),
        (
            "gemm:m=64,n=1048576,k=1048576,dtype=bf16",
            "h100-sxm",
            "workload outside the measured range of sizes",
        ),
        (
            "gemm:m=4096,n=4096,k=4096,dtype=f16",
            "v100-pcie",
            "device unlike all measured ones; the nearest is a100-80-sxm",
        ),
        (
            "gemm:m=4096,n=4096,k=4096,dtype=bf16",
            "t4",
            "bf16 multiplied in f32: the device has no tensor cores for bf16",
        ),
        (
            "gated_gemm:m=4096,n=4096,k=4096,dtype=bf16",
            "h100-sxm",
            "bf16 predicted as f32 with the same bytes",  # the gate; the products were measured
        ),
        (
            "gated_gemm:m=1,n=1,k=1,dtype=tf32",
            "h100-sxm",
            (
                "tf32 predicted as another tensor-core type"
            ),  # the reason of the first launch counts; the gate has another one
        ),
        (
            "rmsnorm:rows=4096,cols=1024,dtype=f32",
            "a100-40-pcie",
            "rmsnorm predicted as layernorm with the same bytes",
        ),
        ("layernorm:rows=65536,cols=1024,dtype=f32", "a100-40-pcie", ""),
        ("gemm:m=512,n=512,k=512,dtype=f32", "a100-40-pcie", ""),
        ("gemm:m=64,n=64,k=64,dtype=f32", "a100-40-pcie", "workload outside the measured range of sizes"),
    ],
)
def test_prediction_states_its_basis_and_reason(text: str, on: str, because: str) -> None:
    prediction = predict(workloads.parse(text), DEVICES[on])
    assert prediction.because == because
    assert prediction.basis == ("extrapolated" if because else "interpolated")


SMALL = [
    *(f"gemm:m={n},n={n},k={n}" for n in (1, 16, 64, 128, 256)),
    "gemm:m=128,n=128,k=64,batch=12",
    "attention:batch=1,heads=8,seq_q=64,head_dim=64",
    "conv2d:n=1,c=64,h=14,w=14,k=64,r=3,s=3,stride=1,pad=1,layout=nhwc",
    *(f"{operator}:rows=64,cols=1024" for operator in ("softmax", "layernorm", "rmsnorm")),
    "elementwise:rows=64,cols=1024,expression=x+y",
    "reduction:rows=64,cols=1024,expression=x,reduce=sum",
]


@pytest.mark.parametrize("on", ["h100-sxm", "a100-80-sxm", "a100-40-pcie", "l4", "v100-pcie"])
def test_small_workload_takes_about_as_long_in_f32_as_in_f16(on: str) -> None:
    """Times of f32 exclude the host's 17 us and more, which the public measurements of f32 contain."""
    single, half = (
        predict_all([workloads.parse(f"{text},dtype={dtype}") for text in SMALL], DEVICES[on])
        for dtype in ("f32", "f16")
    )
    more_us = single.time_us - half.time_us
    assert (more_us > -0.1).all()
    work_us = [4 * workload.flops() / (DEVICES[on].sm_count * 128 * 1e3) for workload in single.workloads]
    launches = np.where([workload.operator == "attention" for workload in single.workloads], 3, 1)
    assert (more_us < 12 * launches + np.array(work_us)).all(), dict(zip(SMALL, more_us, strict=True))


@pytest.mark.parametrize("on", ["h100-sxm", "a100-80-sxm", "l4", "v100-pcie"])
def test_small_f32_kernels_are_short_and_grow_with_their_size(on: str) -> None:
    sizes = (16, 64, 256, 512, 1024)
    product_us = [time_us(f"gemm:m={n},n={n},k={n},dtype=f32", DEVICES[on]) for n in sizes]
    assert all(2 < us < 10 for us in product_us[:2])
    # Trees are not monotone: allow them 10 %.
    assert (np.array(product_us) >= 0.9 * np.maximum.accumulate(product_us)).all()
    for operator in ("softmax", "layernorm", "elementwise"):
        more = ",expression=x" if operator == "elementwise" else ""
        rows_us = [time_us(f"{operator}:rows={r},cols=1024,dtype=f32{more}", DEVICES[on]) for r in sizes]
        assert 2 < rows_us[0] < 10
        assert rows_us == sorted(rows_us)


@pytest.mark.parametrize(
    ("text", "on", "binding"),
    [
        ("gemm:m=4096,n=4096,k=4096,dtype=bf16", "h100-sxm", "tensor pipe"),
        ("gemm:m=4096,n=4096,k=4096,dtype=f32", "h100-sxm", "fma pipe"),
        ("gemm:m=4096,n=4096,k=4096,dtype=f32", "mi210", "tensor pipe"),
        ("gemm:m=4096,n=4096,k=4096,dtype=f16", "p100-pcie", "fma pipe"),
        ("gemm:m=1,n=16384,k=16384,dtype=bf16", "h100-sxm", "dram"),
        ("gemm:m=64,n=64,k=64,dtype=bf16", "h100-sxm", "launch"),
        ("softmax:rows=65536,cols=4096,dtype=f32", "mi210", "dram"),
        ("softmax:rows=1,cols=1,dtype=f32", "h100-sxm", "launch"),
        (f"{CONV.replace('n=8', 'n=256')},dtype=f16", "a100-80-sxm", "tensor pipe"),
        ("attention:batch=8,heads=16,seq_q=4096,head_dim=128,dtype=f16", "h100-sxm", "tensor pipe"),
    ],
)
def test_prediction_names_the_limiting_resource(text: str, on: str, binding: str) -> None:
    assert predict(workloads.parse(text), DEVICES[on]).binding == binding


# ------------------------------------------------------------------------------------ sums, under a model


def simple(excess: float) -> ForecastModel:
    """Return a model of an A100 where every kernel takes ``exp(excess)`` times its roofline time."""
    product = knowing(A100, excess, columns=27, within=1e9)
    rows = knowing(A100, excess, columns=6, arithmetic="f32", within=1e9)
    far = Spread(-1.0, 1.0)
    return ForecastModel(
        {"product 16-bit": (product,), "elementwise": (rows,)}, {"product 16-bit": far, "elementwise": far}
    )


def test_launches_of_a_workload_add_up() -> None:
    workload = workloads.parse("gated_gemm:m=1024,n=2048,k=512,dtype=bf16")
    (prediction,) = predict_all([workload], A100, model=simple(0.5))
    product_us = 2 * 1024 * 2048 * 512 / (108 * 1410 * 2048)
    gate_us = 2 * 3 * 1024 * 2048 / (A100.dram_gb_s * 1e3)
    expected = np.exp(0.5) * (2 * product_us + gate_us + 3 * LAUNCH_US)
    assert prediction.time_us == pytest.approx(expected)
    # The products were measured; the bf16 gate was not, so its interval is wider.
    low_us, high_us = [
        np.exp(0.5)
        * (
            (2 * product_us + 2 * LAUNCH_US) * np.exp(end)
            + (gate_us + LAUNCH_US) * np.exp(WIDENING_PROXY * end)
        )
        for end in (-0.1, 0.2)
    ]
    assert (prediction.low_us, prediction.high_us) == pytest.approx((low_us, high_us))
    assert prediction.utilisation == pytest.approx((2 * product_us) / expected)


def test_utilisation_is_relative_to_the_roofline_even_with_caches() -> None:
    workload = workloads.parse("elementwise:rows=1024,cols=1024,dtype=f32,expression=x")
    (prediction,) = predict_all([workload], A100, model=simple(0.5))
    memory_us = 2 * 4 * 2**20 / (A100.dram_gb_s * 1e3)
    assert prediction.bound_us == 0
    assert prediction.utilisation == pytest.approx(memory_us / (np.exp(0.5) * (memory_us + LAUNCH_US)))


def test_no_time_is_below_its_bound() -> None:
    workload = workloads.parse("gemm:m=8192,n=8192,k=8192,dtype=bf16")
    (prediction,) = predict_all([workload], A100, model=simple(-3.0))
    assert prediction.bound_us == prediction.low_us == prediction.time_us == prediction.high_us
    assert (prediction.utilisation, prediction.binding) == (1.0, "tensor pipe")


# -------------------------------------------------------------------------------------------------- bounds


def bound_us(text: str, on: device.Device) -> float:
    return float(bounds_us([workloads.parse(text)], on)[0])


@pytest.mark.parametrize(
    ("dtype", "on", "flop_per_clock"),
    [
        ("bf16", A100, 2048),
        ("f32", A100, 128),
        ("bf16", T4, 2048),  # no bf16, and no faster type than i8
        ("f16", P100, 256),  # two halves a multiply-add
        ("f32", P100, 128),
        ("i8", P4, 1024),  # four bytes a multiply-add
        ("i8", DEVICES["v100-pcie"], 1024),
    ],
)
def test_bounds_use_the_fastest_type_available(dtype: str, on: device.Device, flop_per_clock: float) -> None:
    expected = 2 * 8192**3 / (on.sm_count * on.max_clock_mhz * flop_per_clock)
    assert bound_us(f"gemm:m=8192,n=8192,k=8192,dtype={dtype}", on) == pytest.approx(expected)


def test_bounds_allow_winograd_and_tf32_attention() -> None:
    clocks = 108 * 1410
    conv: Any = workloads.parse(f"{CONV.replace('n=8', 'n=1024')},dtype=f32")
    assert bound_us(str(conv), A100) == pytest.approx(conv.flops() / (4 * clocks * 128))
    text = "attention:batch=4,heads=16,seq_q=4096,head_dim=128,dtype=f32"
    assert bound_us(text, A100) == pytest.approx(workloads.parse(text).flops() / (clocks * 1024 / 3))


def test_bounds_exclude_bytes_that_caches_can_hold() -> None:
    assert bound_us("softmax:rows=1024,cols=1024,dtype=f32", A100) == 0
    nbytes = 4 * 65536 * 4096
    expected = 2 * (nbytes - A100.l2_bytes) / (A100.dram_gb_s * 1e3)
    assert bound_us("softmax:rows=65536,cols=4096,dtype=f32", A100) == pytest.approx(expected)


# -------------------------------------------------------------------------------------- operators of users


@dataclass(frozen=True, kw_only=True)
class Pairs(NeverComputed):
    """Energies of all pairs of points: many products, few bytes."""

    operator: ClassVar[str] = "pairs"
    category: ClassVar[Category | None] = "dot product"
    points: Size
    terms: int = 8
    moves: bool = True
    dtype: Literal["f32", "f16"] = "f16"

    def inputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="x", shape=(self.points,), dtype=self.dtype),)

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="energy", shape=(self.points,), dtype=self.dtype),)

    def flops(self) -> int:
        return self.terms * self.points**2

    def traffic(self) -> Traffic:
        return super().traffic() if self.moves else Traffic(read_bytes=0, write_bytes=0)


@pytest.mark.parametrize(
    ("workload", "on", "binding"),
    [
        (Pairs(points=10**6), A100, "tensor pipe"),
        (Pairs(points=10**6, dtype="f32"), A100, "fma pipe"),
        (Pairs(points=10**6), P4, "fma pipe"),
    ],
)
def test_bound_limited_by_arithmetic_names_its_pipe(
    workload: Workload, on: device.Device, binding: str
) -> None:
    prediction = predict(workload, on)
    assert prediction.time_us == prediction.bound_us > 1000
    assert prediction.utilisation == 1.0
    assert prediction.binding == binding
    assert prediction.because == "pairs predicted as an elementwise operation"


@pytest.mark.parametrize(
    "workload", [Pairs(points=1), Pairs(points=10**6, terms=0), Pairs(points=9, moves=False)]
)
def test_empty_operator_can_be_predicted(workload: Workload) -> None:
    prediction = predict(workload, A100)
    assert math.isfinite(prediction.time_us)
    assert prediction.bound_us < 0.01
    assert prediction.binding == "launch"


@pytest.mark.parametrize(("unmeasured", "near"), [("gb300", "gb200"), ("rtx-6000-ada", "l40s")])
def test_products_from_datasheets_have_wider_intervals_than_their_neighbours(
    unmeasured: str, near: str
) -> None:
    texts = ("gemm:m=4096,n=4096,k=4096,dtype=bf16", "layernorm:rows=8192,cols=4096,dtype=bf16")
    for text in texts:
        workload = workloads.parse(text)
        asked, measured = (predict(workload, DEVICES[name]) for name in (unmeasured, near))
        assert asked.high_us / asked.low_us >= measured.high_us / measured.low_us * (1 - 1e-9)
        assert bounds_us([workload], DEVICES[unmeasured])[0] <= asked.low_us


@pytest.mark.parametrize("heads_k", [8, 32])
@pytest.mark.parametrize("seq_q", [1, 1024])
def test_boards_of_a_chip_reach_the_same_share_of_their_memory(heads_k: int, seq_q: int) -> None:
    # H200, GH200, H100 NVL and PCIe differ from the measured H100 by their memory. Trees of one device know
    # the ratio of tiles to memory only at the values of head counts, and jumped between these.
    sizes = f"batch=64,heads=32,heads_k={heads_k},seq_q={seq_q},seq_k=4096,head_dim=128,dtype=bf16"
    workload = workloads.parse(f"attention:{sizes},causal=true")
    measured = device.find("h100-sxm")
    rates = np.geomspace(measured.dram_gb_s / 2, measured.dram_gb_s * 2, 9)
    boards = [dataclasses.replace(measured, dram_gb_s=float(rate)) for rate in rates]
    times = np.array([predict(workload, board).time_us for board in boards])
    assert (times[1:] <= 1.01 * times[:-1]).all()
    by_memory = times * rates
    assert seq_q > 1 or by_memory.max() < 1.1 * by_memory.min()


@pytest.mark.parametrize(
    "on", ["h100-sxm", "h200-sxm", "b300", "a100-80-sxm", "l40s", "rtx-4090", "rtx-5090"]
)
def test_a_window_is_cheaper_than_all_keys(on: str) -> None:
    sizes = "batch=1,heads=32,heads_k=8,seq_q=8192,head_dim=128,dtype=bf16,causal=true"
    window, whole = (
        predict(workloads.parse(f"attention:{sizes}{more}"), device.find(on)).time_us
        for more in (",window=128", "")
    )
    assert window < whole / 4


@pytest.mark.parametrize("on", ["h100-sxm", "b200", "a100-80-sxm", "rtx-4090", "l40s", "h20"])
@pytest.mark.parametrize("skew", ["uniform", "zipf"])
def test_a_grouped_product_takes_no_longer_than_separate_products(on: str, skew: str) -> None:
    """Layers of expert parallelism were measured with work that a grouped product does not have."""
    sizes = "n=4096,k=4096,dtype=bf16"
    shapes = [(groups, rows) for groups in (1, 2, 4) for rows in (16, 256, 4096, 16384)]
    grouped = [
        workloads.parse(f"grouped_gemm:groups={groups},m={rows},{sizes},skew={skew}")
        for groups, rows in shapes
    ]
    filled = [min(groups, rows) for groups, rows in shapes]
    separate = [
        workloads.parse(f"gemm:m={rows // count},{sizes}")
        for count, (_, rows) in zip(filled, shapes, strict=True)
    ]
    chip = DEVICES[on]
    times = predict_all(grouped, chip, measured_layers=False)
    products = predict_all(separate, chip)
    holds(times)
    in_sequence_us = np.array(filled) * products.time_us
    assert (times.time_us <= in_sequence_us * (1 + 1e-9)).all()
    flops = np.array([workload.flops() for workload in grouped])
    peak = flop_per_us(chip, "bf16")
    assert (times.time_us >= flops / peak * (1 - 1e-9)).all()
    layers = predict_all(grouped, chip)
    assert layers.time_us.max() > times.time_us.max()
