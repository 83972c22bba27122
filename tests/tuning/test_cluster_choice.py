"""Choice of a cluster's workers and of the device to tune for; few of these tests need Ray."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from tests.support import needs_ray
from tunebench._device import driver_names
from tunebench.device import described, find
from tunebench.errors import InputError, MissingDependency
from tunebench.executor._worker_actor import WorkerActor, placed_file
from tunebench.executor.accelerator import labels, may_have
from tunebench.executor.ray import check_address
from tunebench.kernels import module_name
from tunebench.tuning import Plan, tune, tune_devices
from tunebench.tuning.cluster import targets

H100, A100 = find("h100-sxm"), find("a100-80-sxm")
WEAK = dataclasses.replace(H100, power_limit_w=350.0)


class _Found:
    address = "here:6379"
    refused = ("that node was not asked",)

    def __init__(self, *devices: object) -> None:
        self.devices = devices


@pytest.mark.parametrize(
    ("resources", "wanted", "asked"),
    [
        ({"GPU": 1, "accelerator_type:H100": 1}, "h100-sxm", True),
        ({"GPU": 1, "accelerator_type:H100": 1}, "sm_90", True),
        ({"GPU": 1, "accelerator_type:H100": 1}, H100.key, True),
        ({"GPU": 1, "accelerator_type:H100": 1}, "a100-80-sxm", False),
        ({"GPU": 1, "accelerator_type:A100": 1, "tunebench:h100-sxm": 1}, "h100-sxm", True),
        ({"GPU": 1, "accelerator_type:A100": 1, "tunebench:sm_90": 1}, "h100-sxm", True),
        ({"GPU": 1, "accelerator_type:GeForce-RTX-3090": 1}, "rtx-3090", True),
        ({"GPU": 1, "accelerator_type:GeForce-RTX-4090": 1}, "RTX 4090", True),
        ({"GPU": 1, "accelerator_type:GeForce-RTX-4090": 1}, "rtx-4080", False),
        ({"GPU": 1, "accelerator_type:GeForce-RTX-5070-Ti": 1}, "sm_120:rtx-5070-ti,sm=70", True),
        ({"GPU": 1, "accelerator_type:GeForce-RTX-5070-Ti": 1}, "NVIDIA GeForce RTX 5070 Ti", True),
        ({"GPU": 1, "accelerator_type:GeForce-RTX-5070-Ti": 1}, "rtx-5060", False),
        ({"GPU": 1, "accelerator_type:RTX-PRO-6000": 1}, "RTX PRO 6000 Server", True),
        ({"GPU": 1, "accelerator_type:RTX-A6000": 1}, "NVIDIA RTX A6000", True),
        ({"GPU": 1, "accelerator_type:L40": 1}, "NVIDIA L40", True),
        ({"GPU": 1, "accelerator_type:H200": 1}, "H200 NVL", True),
        ({"GPU": 1, "accelerator_type:H200": 1}, "NVIDIA_H200", True),
        ({"GPU": 1, "accelerator_type:A100": 1}, "A100", True),
        ({"GPU": 1, "accelerator_type:A100": 1}, "NVIDIA H100 80GB HBM3", False),
        ({"GPU": 1, "node:10.0.0.1": 1}, "h100-sxm", True),
    ],
)
def test_nodes_are_chosen_by_their_resources(resources: dict[str, float], wanted: str, asked: bool) -> None:
    assert may_have(resources, labels(wanted)) is asked


@needs_ray
@pytest.mark.parametrize("product", [name for name in described() if not name.startswith("mi")])
def test_every_described_gpu_has_the_resource_that_ray_gives_it(product: str) -> None:
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    for driver_name in driver_names(product):
        name = NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(driver_name)
        assert may_have({f"accelerator_type:{name}": 1}, labels(product))
    assert not may_have({"accelerator_type:RTX": 1}, labels(product))


def test_device_is_named_by_name_architecture_or_key_and_must_be_unique() -> None:
    cluster = _Found(H100, A100)
    for name in ("h100-sxm", "sm_90", H100.key, H100, "H100", "NVIDIA H100 80GB HBM3", "SM90"):
        assert [target.device for target in targets(cluster, [name])] == [H100]
    assert [target.device for target in targets(cluster, ["sm_90", "a100-80-sxm", "h100-sxm"])] == [
        H100,
        A100,
    ]
    assert [target.runner for target in targets(cluster, ["all"])] == ["cuda", "cuda"]
    with pytest.raises(InputError, match=r"several.*sm_80.*sm_90"):
        targets(cluster, [None])
    with pytest.raises(InputError, match="power=350"):
        targets(_Found(H100, WEAK), ["h100-sxm"])
    with pytest.raises(InputError, match=r"no b200; it has .*; that node was not asked"):
        targets(cluster, ["b200"])


@pytest.mark.parametrize("address", ["", "foo", "host:", ":6379", "http://host:80", "ray://host"])
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="local, auto, HOST:6379"):
        check_address(address)
    with pytest.raises(InputError, match="local, auto, HOST:6379"):
        tune("softmax:rows=4,cols=4,dtype=f32", device="cpu", plan=Plan(cluster=address))


def test_a_cluster_measures_and_several_devices_need_one() -> None:
    with pytest.raises(InputError, match="excludes --device offline"):
        tune("softmax:rows=4,cols=4,dtype=f32", plan=Plan(cluster="local", offline=True))
    with pytest.raises(InputError, match="needs a cluster"):
        tune_devices("softmax:rows=4,cols=4,dtype=f32", plan=Plan())


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"ray is not installed.*pip install 'ray"):
        tune("softmax:rows=4,cols=4,dtype=f32", device="cpu", plan=Plan(cluster="local"))


def test_a_users_file_is_loaded_elsewhere_under_the_name_it_has_here(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("a = 1")
    assert placed_file(str(file), "a = 1") == file
    copy = placed_file(str(file), "a = 2")
    assert copy != file
    assert copy.read_text() == "a = 2"
    assert module_name(copy) == module_name(file)


def test_a_trial_for_another_device_or_of_another_source_is_not_run() -> None:
    from tunebench.testing.executor_contract import task

    bench, trial = WorkerActor(), task()
    revision = trial.variant.revision(trial.workload, trial.config)
    bench._device = trial.device
    assert bench._refusal(trial, revision) is None
    assert "its source of softmax" in bench._refusal(trial, "another")
    bench._device = dataclasses.replace(trial.device, power_limit_w=65.0)
    assert "power=65" in bench._refusal(trial, revision)
