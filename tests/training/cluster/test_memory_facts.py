"""Memory against facts that people know, published peaks, and simulated requests."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pytest

from benchmarks.plan_cluster import gpt, measured_plans
from benchmarks.predict_memory import (
    FILE,
    fragmentation_shares,
    peak_rows,
    reported_rows,
    retained_shares,
)
from tests.public_data import WHOLE as PUBLIC
from tunebench import device as devices
from tunebench.errors import InputError
from tunebench.training.cluster import ClusterPlan, ClusterSearch, TrainingCluster, TrainingJob
from tunebench.training.cluster.device_memory import (
    CONTIGUOUS,
    DIVIDED,
    FRAGMENTATION,
    RETAINED,
    SEPARATE,
    WHOLE,
    MemoryPricer,
)
from tunebench.training.cluster.framework_memory import FRAMEWORKS, Framework
from tunebench.training.cluster.memory_verdict import memory_verdict
from tunebench.training.cluster.step_memory import step_memory
from tunebench.training.memory.allocator import Allocate, Release, allocator_use
from tunebench.workloads.networks import network
from tunebench.workloads.networks.network_run import Recompute


def _plan(**changes: Any) -> ClusterPlan:
    """Return the plan of one device without parallelism, with changes."""
    plan = ClusterPlan(
        nodes=1,
        tensor=1,
        pipeline=1,
        data=1,
        chunks=1,
        microbatch=1,
        recompute="full",
        sequence_parallel=False,
        flash=True,
        sharding="none",
    )
    return replace(plan, **changes)


def least_bytes(name: str, cluster: str) -> tuple[int, int]:
    """Return the least memory of all plans of a device, and the memory that plans may need."""
    job = TrainingJob(network=network(name), batch=64, seq=1024, full_sharding=True)
    search = ClusterSearch(job, TrainingCluster.parse(cluster))
    return int(search.memory.sizes(search.plans)[0].min()), search.machine.limit_bytes


def test_full_fine_tuning_of_7b_needs_112_gb_of_states() -> None:
    job = TrainingJob(network=network("llama-2-7b"), batch=1, seq=4096)
    plan = _plan()
    memory = MemoryPricer(job).of(plan)
    states = memory.parameters + memory.gradients + memory.optimizer
    assert states / 1e9 == pytest.approx(112, rel=0.05)
    assert memory.total > states


# What does not fit has 16 bytes per parameter, divided by all devices, that exceed a device; 7B has 108 GB.
@pytest.mark.parametrize(
    ("name", "cluster", "fits"),
    [
        ("llama-2-7b", "1 x h100-sxm", False),
        ("llama-2-7b", "8 x a100-80-sxm", True),
        ("llama-2-13b", "8 x rtx-4090", False),
        ("llama-2-13b", "8 x rtx-4090, host 512GB 200", True),
        ("llama-3-70b", "8 x h100-sxm", False),
        ("gpt3-175b", "8 x b200", False),
        ("gpt2-xl", "1 x t4", False),
        ("gpt3-175b", "64 x a100-80-sxm", True),
        ("gemma-2-9b", "1 x h100-sxm", False),
        ("gpt-oss-120b", "8 x h200-sxm", False),
        ("deepseek-v3", "64 x h100-sxm", False),
    ],
)
def test_what_people_know_to_fit_or_not(name: str, cluster: str, fits: bool) -> None:
    least, limit = least_bytes(name, cluster)
    assert (least <= limit) == fits


def test_70b_fits_by_tensor_8_and_pipeline_4() -> None:
    job = TrainingJob(network=network("llama-3-70b"), batch=64, seq=4096, wide_gradients=True)
    fixed = {"tensor": "8", "pipeline": "4", "sequence_parallel": "yes", "microbatch": "1", "flash": "yes"}
    search = ClusterSearch(job, TrainingCluster.parse("32 x h100-sxm"), fixed=fixed)
    assert int(search.memory.sizes(search.plans)[0].min()) <= search.machine.limit_bytes


@pytest.mark.skipif(not (PUBLIC / "training" / FILE).exists(), reason="needs public measurements")
def test_published_peaks_and_runs_out_of_memory() -> None:
    rows = peak_rows(PUBLIC / "training")
    errors = [row.error for row in rows if row.error is not None]
    assert len(errors) >= 20
    assert fmean(map(abs, errors)) <= 0.10
    assert abs(fmean(errors)) <= 0.05
    inside = [
        row.verdict.low <= row.peak_gib * 2**30 <= row.verdict.high
        for row in rows
        if row.error and row.peak_gib
    ]
    assert fmean(inside) >= 0.85
    ran_out = [row.verdict.name for row in rows if row.ran_out]
    assert ran_out.count("does not fit") >= 5 / 6 * len(ran_out) > 0
    assert "fits" not in ran_out
    assert "does not fit" not in [row.verdict.name for row in rows if not row.ran_out]


@pytest.mark.parametrize("source", ["torchtitan 2024, FSDP", "and pipeline", "compiled loss", "NeMo"])
def test_memory_that_frameworks_report(source: str) -> None:
    """No constant is fitted to these figures."""
    errors = [row.error for row in reported_rows() if source in row.source]
    assert fmean(map(abs, errors)) <= 0.12
    assert max(map(abs, errors)) <= 0.16


def test_fully_sharded_memory_by_hand() -> None:
    """Llama 3 8B on 8 devices: layers are gathered one by one, the embedding and the head together."""
    job = TrainingJob(
        network=network("llama-3-8b"), batch=16, seq=8192, framework="torchtitan", full_sharding=True
    )
    plan = _plan(data=8, microbatch=2, recompute="operators", sharding="full")
    memory = MemoryPricer(job).of(plan)
    table, tokens = 128256 * 4096, 2 * 8192
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    shard = -(-(32 * layer + 2 * table + 4096) // 8)
    assert memory.parameters == 2 * (2 * layer + 2 * table + 4096)
    assert memory.gradients == 4 * (shard + 2 * layer)
    assert memory.optimizer == 12 * shard
    # Input, queries, values, attention and its sums, one product of the width 14336, and the last one.
    kept = 2 * (4096 + 4096 + 1024 + 4096 + 14336 + 4096) + 4 * 32
    assert memory.activations == tokens * (32 * kept + 2 * 2 * 4096 + 4 * 128256)
    # Two more tensors in f32 and one in 16 bits, of which the space of the latter was not used before.
    loss = tokens * (8 * 128256 + 2 * 4096) + 2 * table
    assert memory.working == loss
    assert memory.fragmentation == tokens * 2 * 128256 + 2 * (2 * table + 4096)
    fused = MemoryPricer(replace(job, fused_loss=True)).of(plan)
    assert memory.allocated - fused.allocated == tokens * 8 * 128256


def test_fully_sharded_pipelines_keep_whole_gradients() -> None:
    """Llama 3 8B on 4 ranks of 4 devices: 8 layers on each, the embedding on the first."""
    job = TrainingJob(network=network("llama-3-8b"), batch=16, seq=4096, framework="torchtitan")
    plan = _plan(nodes=2, pipeline=4, data=4, sharding="full")
    table = 128256 * 4096
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    whole = 8 * layer + table
    shard = -(-whole // 4)
    for wide, gradient_bytes in ((False, 2), (True, 4)):
        memory = MemoryPricer(replace(job, wide_gradients=wide)).of_rank(plan, 0)
        assert memory.parameters == 2 * (2 * layer + table)
        assert memory.gradients == gradient_bytes * whole + 4 * shard
        assert memory.optimizer == 12 * shard
        resident = MemoryPricer(replace(job, wide_gradients=wide)).of_rank(
            replace(plan, sharding="optimizer"), 0
        )
        assert resident.parameters == 2 * whole
        layers = (0, 10, 11, 11)
        first = step_memory(
            job.network,
            plan.run(job),
            replace(plan.parallelism(job), stage_layers=layers),
            framework="torchtitan",
        )[0]
        assert first.parameters == 2 * (2 * layer + table)
        assert (resident.gradients, resident.optimizer) == (memory.gradients, memory.optimizer)


@pytest.mark.parametrize(
    ("divided", "reserved", "allocated"), [(False, 14, 12), (True, 18, 16)], ids=["whole", "divided"]
)
def test_loss_leaves_the_space_of_the_16_bit_logits(divided: bool, reserved: int, allocated: int) -> None:
    """The last tensors of a loss do not fit where the 16-bit logits were, in the allocator's model."""
    size, names = 128 << 20, iter(range(20))
    events: list[Allocate | Release] = []

    def take(count: int) -> int:
        events.append(Allocate(next(names), count * size))
        return events[-1].buffer

    def free(*buffers: int) -> None:
        events.extend(map(Release, buffers))

    narrow = take(2)
    wide = take(4)
    free(narrow)
    if divided:  # differences to the maximum, and their exponentials
        shifted, exponentials = take(4), take(4)
        free(exponentials)
        probabilities = take(4)
        free(shifted)
    else:
        probabilities = take(4)
    free(wide)
    gradients = [take(4) for _ in range(3 if divided else 2)]
    free(probabilities, *gradients)
    use = allocator_use(events)
    assert (use.reserved_bytes // size, use.allocated_bytes // size) == (reserved, allocated)
    framework = FRAMEWORKS["torchtitan"]
    logit_bytes = framework.parallel_logit_bytes if divided else framework.logit_bytes
    assert (logit_bytes + 6 + framework.unused_logit_bytes, logit_bytes + 6) == (reserved, allocated)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "flash"), [("full", False), ("full", True), ("none", True)])
@pytest.mark.parametrize("gradients", [SEPARATE, CONTIGUOUS])
def test_fragmentation_is_that_of_simulated_requests(
    recompute: Recompute, flash: bool, gradients: int
) -> None:
    shares = fragmentation_shares(recompute, flash=flash, contiguous=gradients == CONTIGUOUS, few=True)
    assert len(shares) >= 5
    assert FRAGMENTATION[recompute, flash][gradients] == pytest.approx(median(shares), abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("states", [WHOLE, DIVIDED])
def test_least_memory_is_that_of_simulated_requests(states: int) -> None:
    shares = retained_shares("full", flash=False, sharded=states == DIVIDED, few=True)
    assert len(shares) >= 3
    assert RETAINED["full", False][states] == pytest.approx(median(shares), abs=0.05)


def test_allocator_gives_back_what_activations_have_freed() -> None:
    """A GPT of 3.56B on one A100: tensors of the step and activations are not there at the same time."""
    job = TrainingJob(network=gpt("gpt", 30, 3072, 32), batch=512, seq=2048, dtype="f16", flash=False)
    plan = _plan(nodes=8, data=64, microbatch=8, flash=False)
    memory = MemoryPricer(job).of(plan)
    passes = memory.activations + memory.working
    assert passes > memory.step == 4 * job.network.parameters()
    kept = memory.parameters + memory.gradients + memory.optimizer + memory.workspace
    assert memory.needed == kept + round(1.05 * passes) + memory.context + memory.nccl
    assert memory.allocated < memory.needed < memory.total
    # Segments of activations also have gradients of DeepSpeed and PyTorch, and cannot be given back.
    assert MemoryPricer(replace(job, framework="deepspeed")).of(plan).returned == 0
    sharded = MemoryPricer(job).of(replace(plan, sharding="optimizer"))
    assert sharded.needed == sharded.total - sharded.returned < memory.needed


@pytest.mark.skipif(
    not (PUBLIC / "training" / "vtrain_multi.csv").exists(), reason="needs public measurements"
)
def test_measured_plans_fit() -> None:
    """No constant is fitted to these runs, of which none ran out of memory; two exceed the margin."""
    priced = [priced for _, _, priced in measured_plans(PUBLIC / "training")]
    assert "does not fit" not in {plan.verdict.name for plan in priced}
    assert sum(not plan.fits for plan in priced) <= 2


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_bytes_per_parameter_are_those_of_the_framework(framework: Framework, wide: bool) -> None:
    """Source: Megatron-LM's page on the distributed optimizer, and DeepSpeed's BF16_Optimizer."""
    job = TrainingJob(
        network=network("llama-2-7b"), batch=64, seq=1024, wide_gradients=wide, framework=framework
    )
    plan = _plan(data=8, sharding="optimizer")
    memory = MemoryPricer(job).of(plan)
    kept = memory.parameters + memory.gradients + memory.optimizer
    per_parameter = (kept + memory.step) / job.network.parameters()
    expected = {
        ("megatron", False): 4 + 16 / 8,
        ("megatron", True): 6 + 12 / 8,
        ("deepspeed", False): 4 + 18 / 8 + 1e9 / job.network.parameters(),
        ("deepspeed", True): 8 + 12 / 8 + 1e9 / job.network.parameters(),
    }
    other = (6 if wide else 4) + 12 / 8
    assert per_parameter == pytest.approx(expected.get((framework, wide), other), rel=1e-6)


def test_verdict_follows_from_the_probability() -> None:
    usable = devices.find("a100-80-sxm").usable_memory_bytes
    names = {share: memory_verdict(int(share * usable), usable, "deepspeed") for share in (0.8, 0.97, 1.03)}
    assert [verdict.name for verdict in names.values()] == ["fits", "tight", "does not fit"]
    probabilities = [verdict.probability for verdict in names.values()]
    assert probabilities == sorted(probabilities, reverse=True)
    unmeasured = memory_verdict(int(0.8 * usable), usable, "fsdp")
    assert unmeasured.high > names[0.8].high
    assert unmeasured.probability < names[0.8].probability


def test_margin_is_left_free() -> None:
    machine = TrainingCluster.parse("8 x a100-80-sxm")
    assert machine.memory_bytes == machine.device.usable_memory_bytes < machine.device.memory_bytes
    assert machine.limit_bytes <= 0.93 * machine.memory_bytes
    with pytest.raises(InputError, match="memory_margin"):
        TrainingCluster.of_fields({"product": "l4", "memory_margin": 1.0}, "a cluster")


def test_unknown_framework_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="megatron"):
        TrainingJob(network=network("gpt2"), batch=8, seq=512, framework="jax")  # type: ignore[arg-type]
