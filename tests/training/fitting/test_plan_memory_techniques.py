"""Schedules of techniques that memory plans are compared with."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch import Tensor, nn  # noqa: E402

from benchmarks.plan_memory_techniques import TECHNIQUES, offloaded, repeated, segments  # noqa: E402
from tunebench.device import described  # noqa: E402
from tunebench.training.fitting.joint_step import JointStep  # noqa: E402
from tunebench.training.fitting.profile import profile_step  # noqa: E402
from tunebench.training.memory import CopyIn, HostLink, Simulation, simulate, unplanned  # noqa: E402

BLOCKS = 4


class Network(nn.Module):
    """Equal blocks of a product and two elementwise operations, of which the backward pass reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Tanh()) for _ in range(BLOCKS))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.first(x)).sum()


@pytest.fixture(scope="module")
def joint() -> JointStep:
    with torch.device("meta"):
        network, x = Network(), torch.empty(4096, 256)
    link = HostLink(to_host_gb_s=50.0, to_device_gb_s=50.0)
    return profile_step(network, [x], device=described()["h100-sxm"], link=link)


def simulated(joint: JointStep, name: str) -> Simulation:
    return simulate(joint.step, TECHNIQUES[name](joint))


def test_schedule_without_groups_is_that_without_a_plan(joint: JointStep) -> None:
    assert repeated(joint, []) == unplanned(joint.step)


def test_checkpoint_for_each_block_repeats_what_blocks_compute_and_no_results_of_blocks(
    joint: JointStep,
) -> None:
    groups = segments(joint, 1)
    names = [[joint.step.operations[index].name for index in group] for group in groups]
    assert [sorted(name.partition("_")[0] for name in group) for group in names] == [
        ["addmm", "gelu"]
    ] * BLOCKS
    plain = simulate(joint.step, unplanned(joint.step))
    checkpointed = simulate(joint.step, repeated(joint, groups))
    repeated_us = sum(joint.step.operations[index].time_us for group in groups for index in group[:1])
    assert checkpointed.compute_us == pytest.approx(plain.compute_us + repeated_us)
    assert checkpointed.peak_bytes < plain.peak_bytes


def test_selective_checkpoint_repeats_less_and_keeps_more_than_a_checkpoint(joint: JointStep) -> None:
    whole, selective = (
        simulated(joint, name) for name in ("a checkpoint for each block", "selective checkpoint")
    )
    assert selective.compute_us <= whole.compute_us
    assert selective.peak_bytes >= whole.peak_bytes


def test_budget_of_torch_that_is_smaller_takes_longer(joint: JointStep) -> None:
    plain = simulate(joint.step, unplanned(joint.step))
    times = [simulated(joint, f"torch's budget {fraction}").step_us for fraction in ("0.8", "0.2")]
    assert plain.step_us <= times[0] < times[1]


def test_hooks_copy_every_saved_tensor_back_once_and_wait(joint: JointStep) -> None:
    schedule = offloaded(joint)
    back = [action.tensor for action in schedule if isinstance(action, CopyIn)]
    assert len(back) == len(set(back)) > BLOCKS
    swapped = simulate(joint.step, schedule)
    assert swapped.stall_us > 0
    assert swapped.peak_bytes < simulate(joint.step, unplanned(joint.step)).peak_bytes
