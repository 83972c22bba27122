"""Plans of any module: all micro-batches and shardings, their memory, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tunebench import device
from tunebench.errors import InputError
from tunebench.forecast.network import HOST_US
from tunebench.graph import InputSpec, load_factory
from tunebench.training.cluster import ModuleJob, TrainingCluster, plan_module
from tunebench.training.cluster.module import block_name
from tunebench.training.fitting.model_plan import ModelProfiler
from tunebench.training.memory import device_use, unplanned

MODULE = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(512, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()

def make():
    return Network()
"""

HELD = 3 * (512 * 512 + 512) + 512 * 8 + 8
L4 = device.find("l4")


@pytest.fixture(scope="module")
def profiler(tmp_path_factory: pytest.TempPathFactory) -> ModelProfiler:
    path = tmp_path_factory.mktemp("module") / "network.py"
    path.write_text(MODULE, encoding="utf-8")
    inputs = [InputSpec.parse("4096x512:f32")]
    return ModelProfiler(load_factory(f"{path}:make"), inputs, L4, optimizer="none")


def test_all_plans_are_predicted_and_the_first_one_is_traced(profiler: ModelProfiler) -> None:
    machine = TrainingCluster.parse("2 x l4, $0.7")
    answer = plan_module(ModuleJob(profiler=profiler, batch=4 * 4096), machine)
    assert (answer.name, answer.dtype, profiler.elements) == ("Network", "f32", HELD)
    assert len(answer.plans) == 3 * 14  # micro-batches of 1 to 8192, three shardings
    assert [plan.step_us for plan in answer.plans] == sorted(plan.step_us for plan in answer.plans)
    best = answer.plans[0]
    assert best.microbatch * best.microbatches == 2 * 4096
    assert best.cost == pytest.approx(2 * 0.7 * best.step_us / 3.6e9)
    small = next(plan for plan in answer.plans if plan.microbatch == 1)
    operations = len(profiler.profile(4096).step.operations)
    assert small.step_us > small.microbatches * HOST_US * operations  # bound by launches


def test_memory_is_that_of_the_traced_step_and_of_copies(profiler: ModelProfiler) -> None:
    machine = TrainingCluster.parse("2 x l4")
    answer = plan_module(ModuleJob(profiler=profiler, batch=2 * 4096), machine)
    none, optimizer, full = (
        next(plan for plan in answer.plans if (plan.microbatch, plan.sharding) == (4096, sharding))
        for sharding in ("none", "optimizer", "full")
    )
    step = profiler.profile(4096).step
    allocator = device_use(step, unplanned(step), L4, 2**40).allocator
    assert allocator is not None
    assert none.memory["parameters"] == none.memory["gradients"] == 4 * HELD  # buckets
    assert none.memory["activations"] == allocator.reserved_bytes - 4 * HELD
    assert none.memory["optimizer"] == 2 * optimizer.memory["optimizer"] == 2 * 4 * HELD
    assert full.memory["parameters"] == 2 * HELD + 2 * 4 * (512 * 512 + 512)
    assert full.memory["gradients"] == 2 * HELD


def test_one_device_has_nothing_to_communicate(profiler: ModelProfiler) -> None:
    answer = plan_module(ModuleJob(profiler=profiler, batch=4096), TrainingCluster.parse("1 x l4"))
    assert {plan.sharding for plan in answer.plans} == {"none"}
    assert all(plan.communication_us == 0 for plan in answer.plans)
    slow = plan_module(
        ModuleJob(profiler=profiler, batch=8 * 4096), TrainingCluster.parse("8 x l4, 1 a node, 1")
    )
    assert slow.plans[0].communication_us > 0


def test_what_cannot_be_planned_is_explained(profiler: ModelProfiler, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be divided among 2 devices"):
        plan_module(ModuleJob(profiler=profiler, batch=3), TrainingCluster.parse("2 x l4"))
    none = plan_module(ModuleJob(profiler=profiler, batch=4096), TrainingCluster.parse("1 x l4, 1GB"))
    assert none.plans == ()
    assert 0 < none.missing_bytes < 10**9
    assert block_name("encoder.layers.3.norm") == "encoder.layers.3"
    assert block_name("head.norm") == "head"
