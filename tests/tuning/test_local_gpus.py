"""Several GPUs of this machine by position: their kind, and the processes that measure on them."""

from __future__ import annotations

import dataclasses

import pytest

from tunebench import device as devices
from tunebench.cli import tune as tune_command
from tunebench.device import described
from tunebench.errors import DeviceError, InputError
from tunebench.tuning import Plan, tunable, workers
from tunebench.tuning.tunable import TuningTarget, tuning_target

H100, A100 = described()["h100-sxm"], described()["a100-80-sxm"]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this machine two GPUs of one kind and one of another."""
    monkeypatch.setattr(devices, "local_gpus", lambda: (H100, dataclasses.replace(H100), A100))
    monkeypatch.setattr(tunable, "unavailable", lambda language: None)
    monkeypatch.setattr(tunable, "require_cuda_core", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("name", "positions"),
    [("cuda:0,cuda:1", (0, 1)), ("cuda:1", (1,)), ("cuda:2", (2,)), ("cuda", ()), ("h100-sxm", ())],
)
def test_positions_select_gpus(name: str, positions: tuple[int, ...]) -> None:
    target = tuning_target(name)
    assert (target.runner, target.gpus) == ("cuda", positions)
    assert target.device.key == (A100 if positions == (2,) else H100).key


def test_gpus_that_are_no_single_kind_are_refused() -> None:
    with pytest.raises(InputError, match="of several kinds: sm_80"):
        tuning_target("cuda:0,cuda:2")
    with pytest.raises(InputError, match="lists a GPU twice"):
        tuning_target("cuda:0,cuda:0")
    with pytest.raises(DeviceError, match="cuda:3"):
        tuning_target("cuda:0,cuda:3")


def test_each_gpu_gets_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7,GPU-1")
    target = TuningTarget(device=H100, runner="cuda", gpus=(0, 2))
    with workers.start_workers(target, Plan(workers=1)) as executor:
        assert executor._stages[1].workers == 2
        assert executor._stages[1].gpus == ("5", "GPU-1")
    with workers.start_workers(TuningTarget(device=H100, runner="cuda"), Plan(workers=1)) as executor:
        assert (executor._stages[1].workers, executor._stages[1].gpus) == (1, ())


def test_command_takes_positions_and_no_other_devices_together() -> None:
    options = tune_command.TuneOptions
    assert tune_command._listed_gpus(options(device=["cuda:0", "cuda:1"])) == "cuda:0,cuda:1"
    assert tune_command._listed_gpus(options(device=["cuda:0", "cpu"])) is None
    assert tune_command._listed_gpus(options(device=["cuda"])) is None
    with pytest.raises(InputError, match="several --device need --cluster"):
        tune_command._local_device(options(device=["cuda:0", "cpu"]))
    assert tune_command._local_device(options(device=["cuda:0", "cuda:1"])).key == H100.key
