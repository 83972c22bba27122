"""References computed on a device of torch equal those of NumPy; here, the device is torch's CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.gpu import gpu_process
from tests.gpu.acceptance_workloads import REFERENCES, VERIFIED
from tests.support import needs_torch
from tunebench.measure._device_arrays import DeviceArray, ReferenceDevice, reference_device
from tunebench.measure.sampled import Sampled, SampledParts
from tunebench.measure.verify import EveryElement, InputSet, draw
from tunebench.workloads import parse

pytestmark = needs_torch

MOST_WORK = 4_000_000
SMALL = [
    text
    for text in dict.fromkeys(VERIFIED)
    if (w := parse(text)).flops() + w.traffic().total_bytes < MOST_WORK
    and w.dtype in ("f16", "e4m3", "i8", "bool")
]
GEMM = "gemm:m=150,n=200,k=70,dtype=f16,epilogue=bias"


@pytest.fixture(scope="module")
def on() -> ReferenceDevice:
    reference = reference_device("cpu")
    assert reference is not None
    return reference


def test_acceptance_compares_references_of_every_operator() -> None:
    *_, answer = gpu_process.references(REFERENCES, "cpu")
    assert len(answer["differences"]) == len(REFERENCES) > 15
    assert max(answer["differences"].values()) < 1e-12
    assert gpu_process._difference(np.array([1.0, np.inf]), np.array([1.0, 2.0])) == np.inf
    if reference_device("cuda") is None:
        assert list(gpu_process.references(REFERENCES)) == [
            {"problem": "torch cannot compute references here"}
        ]


@pytest.mark.parametrize("text", SMALL)
def test_references_of_every_operator_equal_those_of_numpy(text: str, on: ReferenceDevice) -> None:
    inputs = draw(parse(text), 3)
    host = inputs.references
    device = dataclasses.replace(inputs, on=on).references
    assert set(host) == set(device)
    for name, right in host.items():
        for got, expected in ((device[name].value, right.value), (device[name].scale, right.scale)):
            np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "gemm:m=64,n=64,k=64,dtype=bf16",
        "attention:batch=1,heads=2,seq_q=64,head_dim=64,dtype=f16,direction=backward",
        "conv2d:n=1,c=8,h=9,w=9,k=8,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc,direction=dgrad",
        "softmax:rows=9,cols=64,dtype=f16",
    ],
)
def test_products_and_exponentials_run_on_the_device(
    text: str, on: ReferenceDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy multiplies and exponentiates nothing, which is what takes a minute."""
    ran: list[str] = []
    real = DeviceArray.__array_ufunc__

    def watched(self: DeviceArray, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        assert (ufunc.__name__, method) in on.ufuncs, ufunc
        ran.append(ufunc.__name__)
        return real(self, ufunc, method, *inputs, **options)

    monkeypatch.setattr(DeviceArray, "__array_ufunc__", watched)
    dataclasses.replace(draw(parse(text), 3), on=on).references  # noqa: B018
    assert {"matmul", "exp"} & set(ran)


def checks(text: str, on: ReferenceDevice) -> list[tuple[InputSet, Any]]:
    inputs = draw(parse(text), 3)
    return [(inputs, inputs), (inputs, dataclasses.replace(inputs, on=on))]


@pytest.mark.parametrize("check_of", [EveryElement, Sampled])
def test_check_on_the_device_finds_what_the_check_on_the_host_finds(
    check_of: Any, on: ReferenceDevice
) -> None:
    checked = []
    for inputs, used in checks(GEMM, on):
        check = check_of(used)
        exact = inputs.references["c"].value
        right = {"c": exact.astype(np.float16)}
        wrong = {"c": right["c"].copy()}
        wrong["c"][0, 149, 3] += 1
        absent = {"c": right["c"].copy()}
        absent["c"][0, 7, 7] = np.nan
        rng = np.random.default_rng(0)
        worst = [check.worst(outputs) for outputs in (right, wrong, absent)]
        assert worst[0] <= 1 < worst[1]
        assert worst[2] == np.inf
        checked.append([*worst, check.spot(right, rng).share, check.describe(wrong, worst[1])])
    assert checked[0][:-1] == pytest.approx(checked[1][:-1], rel=1e-6)
    assert checked[0][-1].split(";")[-1] == checked[1][-1].split(";")[-1]


def test_parts_are_checked_on_the_device(on: ReferenceDevice) -> None:
    text = "attention:batch=2,heads=4,seq_q=20,head_dim=16,dtype=f16"
    for inputs, used in checks(text, on):
        outputs = {
            name: r.value.astype(np.float16 if name == "o" else np.float32)
            for name, r in inputs.references.items()
        }
        check = SampledParts(used)
        assert check.worst(outputs) <= 1
        outputs["o"][0, 0, 3, 3] += 1
        assert check.worst(outputs) > 1


def test_reference_is_computed_on_the_host_when_the_device_has_too_little_memory(
    on: ReferenceDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(values: Any) -> Any:
        raise on.failures[0]("out of memory")

    monkeypatch.setattr(on, "arrays", full)
    inputs = dataclasses.replace(draw(parse(GEMM), 3), on=on)
    assert isinstance(inputs.references["c"].value, np.ndarray)


def test_small_references_stay_on_the_host() -> None:
    assert not ReferenceDevice.is_worth(parse("gemm:m=64,n=64,k=64,dtype=f16"))
    assert ReferenceDevice.is_worth(parse("gemm:m=1024,n=1024,k=1024,dtype=f16"))
