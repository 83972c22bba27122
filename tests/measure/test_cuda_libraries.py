"""Calls of libraries on a GPU, measured without one: on a fake driver, by torch on the host's memory."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.fake_driver.build import seen_by

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcome of every scenario of `library_scenarios.py`."""
    return seen_by("library_scenarios.py", tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize("cache", ["cold", "warm", "judged"])
def test_right_library_is_timed_between_the_same_events_as_kernels(seen: dict[str, Any], cache: str) -> None:
    outcome = seen[f"{cache} right"]
    assert outcome["kind"] == "measured", outcome
    assert outcome["median_us"] == pytest.approx(400, rel=1e-5)
    assert outcome["verification"]["how"] == "reference"


def test_short_calls_are_timed_in_a_graph_of_the_library(seen: dict[str, Any]) -> None:
    outcome = seen["warm short"]
    assert (outcome["kind"], outcome["conditions"]["runs_in_a_sample"]) == ("measured", 100), outcome
    assert outcome["median_us"] == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize("scenario", ["addmm", "in steps", "fp8", "softmax", "scalar"])
def test_program_of_this_package_is_verified_on_memory_of_the_device(
    seen: dict[str, Any], scenario: str
) -> None:
    assert seen[scenario]["kind"] == "measured", seen[scenario]


def test_algorithm_of_a_list_is_verified_and_one_beyond_it_fails_alone(seen: dict[str, Any]) -> None:
    assert seen["rank 1"]["kind"] == "measured", seen["rank 1"]
    assert "lists 5 algorithms, none of rank 5" in seen["rank 5"]["reason"]


@pytest.mark.parametrize("cache", ["cold", "warm", "judged"])
def test_wrong_result_of_a_library_is_found(seen: dict[str, Any], cache: str) -> None:
    assert seen[f"{cache} wrong"]["kind"] == "wrong_result"
    assert "y[999] is" in seen[f"{cache} wrong"]["reason"]
    assert seen[f"{cache} past_the_end"]["reason"].startswith("the kernel wrote past the end of y")
    assert seen[f"{cache} keeps"]["kind"] == "wrong_result"


@pytest.mark.parametrize("cache", ["cold", "warm", "judged"])
def test_library_that_raises_ends_its_configuration_only(seen: dict[str, Any], cache: str) -> None:
    outcome = seen[f"{cache} raises"]
    assert outcome["kind"] == ("launch_failed" if cache == "judged" else "CudaError")
    assert "the library refuses the call: RuntimeError: no algorithm for this size" in outcome["reason"]
    assert seen["cold right again"]["kind"] == seen["kernel after libraries"]["kind"] == "measured"


def test_time_that_no_event_sees_is_found_by_the_judge(seen: dict[str, Any]) -> None:
    assert seen["cold hides"]["kind"] == "measured"
    assert seen["judged hides"]["kind"] == "wrong_result"
    assert "the samples are not the times of the launches" in seen["judged hides"]["reason"], seen[
        "judged hides"
    ]


def test_memory_that_libraries_keep_is_freed_for_the_next_configuration(seen: dict[str, Any]) -> None:
    assert seen["released"] >= 10


def test_binary_of_a_library_has_its_version_and_no_code(seen: dict[str, Any]) -> None:
    assert seen["target"] == "torch 9.9.9+cu130"
