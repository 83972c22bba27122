"""Sampled verification of large results, tested on results small enough to compute in full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.toy_variants import Toy
from tunebench._figure import significant
from tunebench.dtype import numpy_dtype
from tunebench.measure import sampled
from tunebench.measure.sampled import Sampled, SampledParts, check_of, is_sampled
from tunebench.measure.verify import EveryElement, draw
from tunebench.workloads import parse
from tunebench.workloads.operators.gemm import Gemm

LARGE = "gemm:m=8192,n=8192,k=8192,dtype=f16"


def right(gemm: Gemm, seed: int = 1) -> tuple[Sampled, np.ndarray[Any, Any]]:
    """Return the check of a GEMM and its correct result, accumulated in f32 and rounded once."""
    inputs = draw(gemm, seed)
    exact = inputs.references["c"].value
    return Sampled(inputs), exact.astype(np.float32).astype(numpy_dtype(gemm.out))


def product(**dimensions: Any) -> Gemm:
    return Gemm(**{"m": 300, "n": 290, "k": 200, "dtype": "f16", **dimensions})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "tf32", "f16", "bf16"])
@pytest.mark.parametrize("trans", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("epilogue", ["none", "bias", "bias+silu", "bias+gelu", "bias+residual"])
def test_correct_result_passes(dtype: Any, trans: Any, epilogue: Any) -> None:
    check, c = right(product(dtype=dtype, trans=trans, epilogue=epilogue))
    assert check.worst({"c": c}) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_correct_result_passes_with_any_seed(seed: int) -> None:
    check, c = right(product(m=130, n=129, dtype="bf16"), seed)
    assert check.worst({"c": c}) <= 1


@pytest.mark.parametrize("at", [(0, -1, -1), (0, -1, 0), (0, 0, -1), (0, -7, 133), (0, 133, -16)])
@pytest.mark.parametrize("epilogue", ["none", "bias+relu"])
def test_slightly_wrong_element_at_edge_is_detected(at: tuple[int, ...], epilogue: Any) -> None:
    check, c = right(product(epilogue=epilogue))
    c[at] += np.float16(0.5)  # 1/30 of a typical element
    worst = check.worst({"c": c})
    assert worst > 1
    position = ",".join(str(i % n) for i, n in zip(at, c.shape, strict=True))
    described = f"{significant(worst, 3)} times the tolerance; c[{position}] is"
    assert check.describe({"c": c}, worst).startswith(described)


@pytest.mark.parametrize("at", [(0, 5, 9), (0, 150, 140), (0, 283, 273)])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_grossly_wrong_element_is_detected_anywhere(at: tuple[int, ...], dtype: Any) -> None:
    check, c = right(product(dtype=dtype))
    usual = float(np.std(c.astype(np.float64)))
    c[at] = np.float32(float(c[at]) + 2 * usual)
    assert check.worst({"c": c}) > 1


@pytest.mark.parametrize("epilogue", ["none", "bias+gelu"])
def test_unwritten_element_is_detected(epilogue: Any) -> None:
    check, c = right(product(epilogue=epilogue))
    c[0, 150, 140] = np.nan
    assert check.worst({"c": c}) == np.inf
    assert "c[0,150,140] is NaN" in check.describe({"c": c}, np.inf)


def test_stale_outputs_are_detected() -> None:
    check, _ = right(product())
    _, stale = right(product(), seed=2)
    assert check.worst({"c": stale}) > 1


def test_missing_tile_is_detected() -> None:
    check, c = right(product(m=256, n=256))
    c[0, 64:128, 64:128] = 0
    assert check.worst({"c": c}) > 1


@pytest.mark.parametrize("epilogue", ["none", "bias+relu"])
def test_term_missing_from_every_element_is_detected(epilogue: Any) -> None:
    gemm = product(epilogue=epilogue)
    inputs = draw(gemm, 1)
    exact = inputs.exact()
    exact["a"][:, :, -1] = 0
    short = gemm.reference(exact)["c"].value.astype(np.float16)
    assert Sampled(inputs).worst({"c": short}) > 1


def test_batch_sums_every_product_and_samples_first_and_last() -> None:
    check, c = right(product(m=70, n=65, k=64, batch=9))
    assert check.worst({"c": c}) <= 1
    for z in range(9):
        wrong = c.copy()
        wrong[z, 30, 30] += 50
        assert check.worst({"c": wrong}) > 1, z


@pytest.mark.parametrize("change", [np.inf, -np.inf])
def test_infinite_element_is_detected_without_warning(change: float) -> None:
    check, c = right(product(dtype="f32"))
    c[0, 150, 140] = change
    assert check.worst({"c": c}) == np.inf


def test_sampled_blocks_cover_every_band_of_rows_and_columns() -> None:
    blocks = list(sampled.spread_blocks(0, 1000, 130, np.random.default_rng(0)))
    assert {block.rows.start // sampled.BAND for block in blocks} == set(range(16))
    assert {block.cols.start // sampled.BAND for block in blocks} == set(range(3))
    for block in blocks:
        assert 0 <= block.rows.start < block.rows.stop <= 1000
        assert 0 <= block.cols.start < block.cols.stop <= 130


@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (200, 3), (16, 16), (17, 65)])
def test_small_shapes_are_sampled_too(shape: tuple[int, int]) -> None:
    check, c = right(product(m=shape[0], n=shape[1]))
    assert check.worst({"c": c}) <= 1
    c[0, -1, -1] += np.float16(1)
    assert check.worst({"c": c}) > 1


def test_signed_sums_equal_those_of_the_product() -> None:
    gemm = product(trans="tn", epilogue="bias", batch=2, dtype="f32")
    inputs = draw(gemm, 3)
    signs = np.random.default_rng(4).choice([-1.0, 1.0], gemm.n)
    sums = gemm.reference_sums(inputs.exact(), 1, signs, 128)
    assert sums is not None
    whole = gemm.reference(inputs.exact())["c"]
    for run, start in enumerate(range(0, gemm.n, 128)):
        part = slice(start, start + 128)
        expected = (whole.value[1, :, part] * signs[part]).sum(axis=1)
        np.testing.assert_allclose(sums.value[:, run], expected, rtol=1e-9, atol=1e-9)
        assert (sums.scale[:, run] >= np.sqrt(np.square(whole.scale[1, :, part]).sum(axis=1))).all()


def test_signed_sums_are_unavailable_with_activation() -> None:
    gemm = product(epilogue="bias+relu")
    assert gemm.reference_sums(draw(gemm, 0).exact(), 0, np.ones(gemm.n), 128) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LARGE, True),
        ("gemm:m=2048,n=2048,k=2048,dtype=f32", False),
        ("conv2d:n=256,c=64,h=56,w=56,k=64,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc", False),
        ("softmax:rows=1000000,cols=8192,dtype=f16", False),
    ],
)
def test_large_results_are_sampled_if_operator_computes_parts(text: str, expected: bool) -> None:
    assert is_sampled(parse(text)) is expected


def test_small_result_is_checked_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(product(), 0)
    assert isinstance(check_of(inputs), EveryElement)
    monkeypatch.setattr(sampled, "AFFORDABLE_FLOPS", 1)
    assert isinstance(check_of(inputs), Sampled)


@pytest.mark.parametrize("make", [EveryElement, Sampled])
def test_both_checks_report_their_coverage(make: Callable[..., Any]) -> None:
    assert "every element" in make(draw(product(), 0)).detail


IN_PARTS = (
    "attention:batch=2,heads=6,seq_q=9,head_dim=8,dtype=f32,heads_k=3,causal=true",
    "attention:batch=2,heads=6,seq_q=9,head_dim=8,dtype=f32,heads_k=3,direction=backward",
    "conv2d:n=6,c=3,h=5,w=5,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nchw,epilogue=bias+residual+relu",
    "conv2d:n=2,c=3,h=5,w=5,k=6,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,direction=wgrad",
)


@pytest.mark.parametrize("text", IN_PARTS)
def test_sampled_parts_are_checked_in_full_and_the_rest_for_unwritten_elements(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "PARTS_FLOPS", 1)
    inputs = draw(parse(text), 3)
    check = check_of(inputs)
    assert isinstance(check, SampledParts)
    right = {name: reference.value.astype(np.float32) for name, reference in inputs.references.items()}
    assert check.worst(right) <= 1
    assert f"of {inputs.workload.part_count()} parts" in check.detail
    for name, output in right.items():
        for at in (0, -1):  # the first and last part are always sampled
            wrong = right | {name: output.copy()}
            wrong[name].flat[at] += 0.1 * np.abs(output).max()
            assert (worst := check.worst(wrong)) > 1
            assert f"; in the part {name}[" in check.describe(wrong, worst) or len(right) > 1
        absent = right | {name: output.copy()}
        absent[name].flat[output.size // 2] = np.nan
        assert check.worst(absent) == np.inf
        assert f"{name}[" in check.describe(absent, np.inf)


def test_result_of_few_parts_is_checked_in_full() -> None:
    assert not is_sampled(parse("attention:batch=1,heads=4,seq_q=16384,head_dim=128,dtype=f16"))
    large = parse("attention:batch=8,heads=8,seq_q=8192,head_dim=128,dtype=f16")
    assert is_sampled(large)
    assert sampled.affordable_parts(large) == 4
    assert sampled.affordable_parts(large.changed(seq_q=2048)) == 46


def test_copy_without_operations_is_checked_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "flops", lambda toy: 0)
    assert isinstance(check_of(draw(Toy(n=3), 0)), EveryElement)
