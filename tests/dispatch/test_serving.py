"""Dispatch without a framework: choices and their reasons, bound kernels, and watchers."""

from __future__ import annotations

import dataclasses
import threading
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from tests.support import needs_fork
from tunebench import dispatch, kernels
from tunebench.answer import Answer, BaselineComparison
from tunebench.device import local_cpu, representative
from tunebench.dispatch import choice, cpu, freshness
from tunebench.errors import InputError, LookupMiss, UnknownName
from tunebench.numba import attention, conv2d, layer_norm, matmul, softmax
from tunebench.space import Config
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=4,cols=16,dtype=f32")
CPU = local_cpu()
VARIANT = kernels.variant("softmax/numba_cpu")
DEFAULT = VARIANT.default(WORKLOAD, CPU)
OTHER = Config({**DEFAULT, "passes": 3})
KNOWN = Answer(
    workload=str(WORKLOAD),
    device=CPU.key,
    how="measured here",
    variant=VARIANT.key,
    config=OTHER,
    expected_us=1.0,
    ci_us=(0.9, 1.1),
    bound_us=None,
    cache="cold",
    verification="reference",
    revision="",
    because="",
    recorded_at=datetime.now(UTC),
    database="",
)
FASTER = {"torch": BaselineComparison(ratio=1.3, low=1.2, high=1.4)}


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the lookup return an answer, or None."""

    def found(**changes: Any) -> None:
        measured_answer = dataclasses.replace(KNOWN, **changes)
        for name in ("lookup_workload", "timed"):
            monkeypatch.setattr(choice, name, lambda *_, **__: measured_answer)
        dispatch.forget()

    yield found
    dispatch.forget()


@pytest.mark.parametrize(
    ("changes", "by", "words"),
    [
        ({"baselines": FASTER}, "tunebench", "1.30 times as long"),
        ({}, "torch", "was not compared with torch"),
        ({"baselines": {"numpy": FASTER["torch"]}}, "torch", "was not compared with torch"),
        (
            {"baselines": {"torch": BaselineComparison(ratio=1.3, low=0.9, high=1.7)}},
            "torch",
            "not known to be faster",
        ),
        ({"baselines": FASTER, "how": "same architecture"}, "torch", "not measured on this device"),
        ({"baselines": FASTER, "variant": "softmax/gone"}, "torch", "unknown variant"),
        ({"baselines": FASTER, "how": "neighbour", "because": "near"}, "tunebench", "as long; near"),
    ],
)
def test_tuned_kernel_is_chosen_only_if_measured_faster_here(
    answer: Any, changes: dict[str, Any], by: str, words: str
) -> None:
    answer(**changes)
    chosen = dispatch.choose(WORKLOAD, CPU)
    assert (chosen.by, words in chosen.reason) == (by, True), chosen.reason


def test_preferred_tuned_kernel_is_the_best_known_or_the_default(answer: Any) -> None:
    assert dispatch.choose(WORKLOAD, CPU, "tunebench").config == DEFAULT  # the database is empty
    answer()
    assert dispatch.choose(WORKLOAD, CPU, "tunebench").config == OTHER
    assert dispatch.choose(WORKLOAD, CPU, "torch").by == "torch"


def test_without_a_variant_the_reason_names_what_refuses() -> None:
    chosen = dispatch.choose(parse("gemm:m=8,n=8,k=8,dtype=i8"), CPU, "tunebench")
    assert chosen.by == "torch"
    assert "gemm/numba_cpu multiplies f32" in chosen.reason


def test_on_a_gpu_the_default_of_the_variant_expected_to_be_fastest_is_chosen() -> None:
    chosen = dispatch.choose(
        parse("gemm:m=4096,n=4096,k=4096,dtype=f16"), representative("sm_90"), "tunebench"
    )
    assert chosen.variant is None or chosen.variant.key != "gemm/cuda_simt"


def test_preference_of_the_context_overrides_the_process() -> None:
    seen = []
    with dispatch.prefer("tunebench"):
        thread = threading.Thread(target=lambda: seen.append(dispatch.preference()))
        thread.start()
        thread.join()
        with dispatch.prefer("torch"):
            assert dispatch.preference() == "torch"
        assert dispatch.preference() == "tunebench"
    assert (seen, dispatch.preference()) == (["faster"], "faster")
    dispatch.set_preference("torch")
    try:
        assert dispatch.preference() == "torch"
    finally:
        dispatch.set_preference("faster")
    with pytest.raises(UnknownName, match="slower"):
        dispatch.set_preference("slower")  # type: ignore[arg-type]


def test_choice_is_repeated_when_answers_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def miss(*_: Any, **__: Any) -> Any:
        asked.append(1)
        raise LookupMiss("nothing")

    monkeypatch.setattr(choice, "timed", miss)
    monkeypatch.setattr(freshness.answer, "generation", lambda: 7)
    served = dispatch.dispatcher(parse("softmax:rows=4,cols=17,dtype=f32"), CPU)
    for _ in range(3):
        served.bound_choice()
    assert len(asked) == 1
    monkeypatch.setattr(freshness.answer, "generation", lambda: 8)
    for _ in range(3):
        served.bound_choice()
    assert len(asked) == 2


def test_bound_kernel_checks_its_arrays() -> None:
    served = dispatch.bind(WORKLOAD, VARIANT, DEFAULT, CPU)
    x = np.random.default_rng(0).standard_normal((4, 16), dtype=np.float32)
    y = np.empty_like(x)
    served(x, y)  # type: ignore[operator]
    powers = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(y, powers / powers.sum(1, keepdims=True), rtol=1e-5)
    for wrong in (x.astype(np.float64), x[:, :8], np.asfortranarray(x), list(x)):
        with pytest.raises(InputError, match="x must be"):
            served(wrong, y)  # type: ignore[operator]
    with pytest.raises(InputError, match="expects 2 tensors"):
        served(x)  # type: ignore[operator]
    with pytest.raises(InputError, match="does not run on a gpu"):
        dispatch.bind(WORKLOAD, VARIANT, DEFAULT, representative("sm_90"))


def test_workloads_that_differ_in_size_share_loaded_code() -> None:
    first = dispatch.bind(WORKLOAD, VARIANT, DEFAULT, CPU)
    count = len(cpu._entries)
    second = dispatch.bind(WORKLOAD.changed(rows=5), VARIANT, DEFAULT, CPU)
    assert len(cpu._entries) == count
    assert first._entry is second._entry  # type: ignore[attr-defined]


def test_watchers_receive_calls_until_the_context_ends() -> None:
    calls: list[dispatch.DispatchedCall] = []
    x = np.ones((4, 16), np.float32)
    with dispatch.watching(calls.append):
        softmax(x)
    softmax(x)
    (call,) = calls
    assert (call.workload, call.by, call.variant) == (WORKLOAD, "tunebench", VARIANT.key)
    assert str(call).startswith(f"{WORKLOAD}: softmax/numba_cpu with passes=")


@needs_fork
def test_a_forked_child_of_openmp_does_not_run_numbas_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax(np.ones((4, 16), np.float32))
    monkeypatch.setattr(cpu, "_forked", True)
    dispatch.forget()
    with pytest.raises(InputError, match="NUMBA_THREADING_LAYER"):
        softmax(np.ones((4, 16), np.float32))
    monkeypatch.setattr(cpu, "_forked", False)
    dispatch.forget()


# -- NumPy ---------------------------------------------------------------------------------------------------


def test_numpy_functions_match_numpy() -> None:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32)

    a, b = drawn(8, 16), drawn(16, 8)
    out = np.empty((8, 8), np.float32)
    assert matmul(a, b, out).base is out or matmul(a, b, out) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(matmul(a, np.ascontiguousarray(b.T).T), a @ b, rtol=1e-4, atol=1e-5)
    x = drawn(2, 2, 16)
    np.testing.assert_allclose(np.exp(softmax(x, log=True)).sum(-1), 1, rtol=1e-5)
    assert abs(layer_norm(x, np.ones(16, np.float32), np.zeros(16, np.float32)).mean(-1)).max() < 1e-6
    q, k, v = drawn(1, 2, 4, 8), drawn(1, 2, 4, 8), drawn(1, 2, 4, 8)
    np.testing.assert_allclose(attention(q, k, v, causal=True)[:, :, 0], v[:, :, 0], rtol=1e-5)
    images, filters = drawn(1, 3, 5, 5), drawn(4, 3, 3, 3)
    made = conv2d(images, filters, np.ones(4, np.float32), pad=1)
    inside = np.einsum("chw,kchw->k", images[0, :, 1:4, 1:4], filters) + 1
    np.testing.assert_allclose(made[0, :, 2, 2], inside, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: matmul(x, x), "are incompatible"),
        (lambda x: matmul(x, x.T, np.empty((4, 4))), "out must be"),
        (lambda x: softmax(x.astype(np.float64)), "got float64"),
        (lambda x: softmax(x[:, ::2]), "C-contiguous"),
        (lambda x: softmax("text"), "__dlpack__"),
        (lambda x: conv2d(x, x), "expects 4-D images"),
    ],
)
def test_unsupported_call_is_an_error(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(np.ones((4, 16), np.float32))


def test_dlpack_arrays_are_accepted() -> None:
    class Foreign:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    np.testing.assert_allclose(softmax(Foreign(np.ones((4, 16), np.float32))), 1 / 16, rtol=1e-6)
