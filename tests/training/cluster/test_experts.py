"""Plans of models with experts: against `predict_step`, all plans priced, and counted parameters."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from tunebench.errors import InputError
from tunebench.training.cluster import ClusterPlan, ClusterSearch, TrainingCluster, TrainingJob
from tunebench.training.cluster.device_memory import MemoryPricer
from tunebench.training.cluster.layer_time import LayerRun
from tunebench.training.pipeline.activation import ActivationMemory, architecture_of
from tunebench.training.steps.step import Parallelism, predict_step
from tunebench.workloads.networks import Network, NetworkRun, from_config, network
from tunebench.workloads.networks.network_run import Fp8

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 4096,
}
MIXTRAL = from_config("small", {**SIZES, "model_type": "mixtral", "num_local_experts": 4})
QWEN = {
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
SHARED = from_config("shared", {**SIZES, **QWEN})
DEEPSEEK = from_config(
    "latent",
    {
        **SIZES,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 8,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
    },
)
"""Latent attention, and three dense layers before five with experts."""

WINDOWED = from_config(
    "windowed",
    {**SIZES, "model_type": "gemma2", "num_hidden_layers": 6, "head_dim": 64, "sliding_window": 256},
)
"""Every other layer has a window."""

JOB = TrainingJob(network=MIXTRAL, batch=16, seq=1024)
MACHINE = TrainingCluster.parse("8 x a100-80-sxm, 4 a node, 6GB")
SEARCH = ClusterSearch(JOB, MACHINE)


@pytest.mark.parametrize(
    ("name", "billions", "active"), [("mixtral-8x7b", 46.70, 12.88), ("mixtral-8x22b", 140.62, 39.15)]
)
def test_parameters_are_those_of_the_models(name: str, billions: float, active: float) -> None:
    model = network(name)
    whole, routed = model.parameters(), model.expert_parameters()
    assert whole / 1e9 == pytest.approx(billions, abs=0.01)
    assert (whole - routed * 6 / 8) / 1e9 == pytest.approx(active, abs=0.01)


def test_parameters_with_a_shared_expert_and_normalised_heads() -> None:
    attention = 2 * 512 * 512 + 2 * 512 * 256 + (512 + 2 * 256) + 2 * 512
    router, shared, routed = 8 * 512 + 512, 3 * 512 * 512, 8 * 3 * 512 * 256
    assert SHARED.parameters() == 4 * (attention + router + shared + routed) + 2 * 4096 * 512 + 512
    normed = from_config("normed", {**SIZES, **QWEN, "model_type": "qwen3_moe"})
    attention += 2 * 64 - (512 + 2 * 256)
    assert normed.parameters() == 4 * (attention + router - 512 + routed) + 2 * 4096 * 512 + 512


def test_devices_hold_their_share_of_experts() -> None:
    run = NetworkRun(stack="megatron", tensor=2, expert=4, expert_tensor=1)
    unrouted, routed = MIXTRAL.held_parameters(run)
    assert routed == MIXTRAL.expert_parameters() // 4
    assert unrouted == MIXTRAL.parameters(2) - MIXTRAL.expert_parameters(2)
    with pytest.raises(InputError, match="expert_tensor must be 1 or 2"):
        NetworkRun(stack="megatron", tensor=2, expert_tensor=4)
    with pytest.raises(InputError, match="must divide its 4 experts"):
        MIXTRAL.operations(NetworkRun(seq=128, stack="megatron", expert=3))
    with pytest.raises(InputError, match="no experts"):
        network("gpt2").operations(NetworkRun(seq=128, stack="megatron", expert=2))
    with pytest.raises(InputError, match="experts in every layer"):
        from_config("alternating", {**SIZES, **QWEN, "decoder_sparse_step": 2})


@pytest.mark.parametrize("stack", ["eager", "compiled", "megatron"])
def test_a_token_has_the_products_of_its_experts(stack: str) -> None:
    run = NetworkRun(batch=2, seq=256, dtype="bf16", stack=stack, layers=(1, 2))  # type: ignore[arg-type]
    for model, shared in ((MIXTRAL, 0), (SHARED, 512)):
        sizes = architecture_of(model)
        inner = sum(
            operation.count * operation.workload.flops()
            for operation in model.operations(run)
            if operation.part in ("experts", "mlp up", "mlp down")
            and operation.workload.category == "dot product"
        )
        assert inner == 2 * 512 * 3 * 512 * (2 * sizes.ffn + shared)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", ["none", "current"])
def test_step_equals_that_of_predict_step(fp8: Fp8) -> None:
    job = replace(JOB, fp8=fp8)
    machine = MACHINE if fp8 == "none" else TrainingCluster.parse("8 x h100-sxm, 4 a node, 6GB")
    search = ClusterSearch(job, machine)
    rows = random.Random(5).sample(range(len(search.plans)), 40)
    plans = [search.plans[row] for row in rows]
    search.layers.predict(map(LayerRun.of, plans))
    floors_us = search.pricer.floors_us(search.plans.take(np.array(rows))).tolist()
    for plan, floor_us in zip(plans, floors_us, strict=True):
        priced = search.priced(plan)
        expected = predict_step(MIXTRAL, machine.device, plan.run(job), machine.links, plan.parallelism(job))
        assert priced.step.time_us == pytest.approx(expected.time_us, rel=1e-9), plan
        assert priced.step.communication_us == pytest.approx(expected.communication.us, rel=1e-9), plan
        assert floor_us <= search.pricer.bound_us(plan) * (1 + 1e-12), plan
        assert search.pricer.bound_us(plan) <= priced.step.time_us * (1 + 1e-12), plan
    assert {plan.expert for plan in plans} >= {1, 2, 4}
    assert {plan.recompute for plan in plans} >= {"experts", "full"}


@pytest.mark.parametrize(("fp8", "small"), [("delayed", 0), ("current", 3)])
def test_experts_in_fp8_have_products_of_their_own(fp8: Fp8, small: int) -> None:
    run = NetworkRun(
        batch=2, seq=64, mode="train", dtype="bf16", stack="megatron", flash=True, expert=2, layers=(1, 2)
    )
    eight = MIXTRAL.operations(replace(run, fp8=fp8))
    loops = [operation for operation in eight if operation.loop > 1]
    assert {operation.part for operation in loops} == {"experts"}
    assert {operation.loop for operation in loops} == {2}  # four experts on two devices
    products = [operation for operation in loops if operation.workload.category == "dot product"]
    assert sum(operation.count for operation in products) == 2 * 2 * 3  # up and down, with both gradients
    flops = sum(operation.count * operation.workload.flops() for operation in products)
    grouped = [operation for operation in MIXTRAL.operations(run) if operation.part == "experts"]
    assert flops == sum(
        operation.workload.flops() for operation in grouped if operation.workload.category == "dot product"
    )
    # a maximum, its reset and a scale, for both inputs and both gradients of two experts
    assert sum(operation.count for operation in loops) - 12 == small * 2 * 2 * 2


@pytest.mark.slow
def test_the_best_plan_is_the_fastest_that_fits() -> None:
    search = ClusterSearch(
        JOB, MACHINE, fixed={"chunks": "1", "flash": "yes", "context": "1", "microbatch": "2"}
    )
    result = search.run(3, front=False)
    fitting = sorted(priced.step.time_us for priced in map(search.priced, search.plans) if priced.fits)
    assert [priced.step.time_us for priced in result.best] == fitting[:3]
    assert 0 < len(fitting) < len(search.plans)
    assert result.proof.simulated < len(fitting) // 10


def test_plans_divide_experts_as_megatron_does() -> None:
    for plan in SEARCH.plans:
        assert plan.expert_tensor in (1, plan.tensor)
        assert plan.tensor * plan.copies % (plan.expert * plan.expert_tensor) == 0
        assert plan.sequence_parallel == (plan.tensor > 1)
    only = ClusterSearch(JOB, MACHINE, fixed={"expert": "4"})
    assert {plan.expert for plan in only.plans} == {4}
    with pytest.raises(InputError, match="expected one of 1, 2, 4"):
        ClusterSearch(JOB, MACHINE, fixed={"expert": "8"})
    with pytest.raises(InputError, match="must divide"):
        Parallelism(data=2, expert=4)


BASE = ClusterPlan(
    nodes=2,
    tensor=1,
    pipeline=1,
    data=8,
    chunks=1,
    microbatch=1,
    recompute="none",
    sequence_parallel=False,
    flash=True,
    sharding="optimizer",
)


def test_memory_divides_experts_and_their_states() -> None:
    memory = MemoryPricer(JOB)
    routed = MIXTRAL.expert_parameters()
    for expert in (1, 2, 4):
        device_memory = memory.of(replace(BASE, expert=expert))
        unrouted = MIXTRAL.parameters() - routed
        assert device_memory.parameters == 2 * (unrouted + routed // expert)
        copies = 8 // expert
        assert device_memory.optimizer == 12 * (-(-unrouted // 8) + -(-(routed // expert) // copies))


def test_activations_have_a_row_for_each_expert_of_a_token() -> None:
    architecture = architecture_of(MIXTRAL)
    sizes = {"architecture": architecture, "seq": 1024, "dtype": "bf16", "flash_attention": True}
    none, experts, full = (
        ActivationMemory(**sizes, recompute=recompute)  # type: ignore[arg-type]
        for recompute in ("none", "experts", "full")
    )
    rows = 1024 * 2
    assert none.expert_bytes == 2 * rows * (512 + 3 * 1024) + 3 * 4 * 1024 * 4
    assert none.layer_bytes - experts.layer_bytes == none.expert_bytes == experts.recomputed_bytes
    assert full.layer_bytes < experts.layer_bytes
    assert ActivationMemory(**sizes, expert_load=1.5).expert_bytes > none.expert_bytes  # type: ignore[arg-type]


def test_busier_devices_take_longer_and_capacity_limits_them() -> None:
    def step_us(**changed: float) -> float:
        job = replace(JOB, cuda_graphs=True, **changed)  # type: ignore[arg-type]
        search = ClusterSearch(job, MACHINE, fixed={"expert": "4"})
        return search.priced(replace(BASE, expert=4, microbatch=2)).step.time_us

    assert step_us() < step_us(load_factor=1.5, capacity_factor=1.25) < step_us(load_factor=1.5)
    with pytest.raises(InputError, match="at least 1"):
        replace(JOB, load_factor=0.5)


def test_exchange_needs_links_between_nodes() -> None:
    plan = replace(BASE, expert=4, microbatch=2)
    job = replace(JOB, cuda_graphs=True)
    slow = TrainingCluster.parse("8 x a100-80-sxm, 2 a node, nvlink3, 5")
    fast = TrainingCluster.parse("8 x a100-80-sxm, 8 a node")
    waits = [
        ClusterSearch(job, machine, fixed={"expert": "4", "data": "8"}).priced(
            replace(plan, nodes=machine.links.nodes)
        )
        for machine in (fast, slow)
    ]
    assert waits[1].step.waits_us > 5 * waits[0].step.waits_us > 0


def test_recomputation_exchanges_tokens_again() -> None:
    counts = []
    for recompute in ("none", "experts", "full"):
        run = NetworkRun(
            seq=256,
            mode="train",
            dtype="bf16",
            stack="megatron",
            expert=4,
            recompute=recompute,
        )
        sent = [collective for collective in SHARED.collectives(run) if collective.collective == "all-to-all"]
        counts.append(sum(collective.count for collective in sent if collective.phase == "backward"))
    assert counts == [4 * 3, 2 * 4 * 3, 2 * 4 * 3]
    assert list(itertools.accumulate(counts, max)) == counts


def test_layers_beside_a_head_alone_have_the_exchange_of_experts() -> None:
    fixed = {"pipeline": "4", "chunks": "2", "expert": "2", "head_layers": "1", "recompute": "none"}
    # With launches, the exchanges of this small network hide behind them.
    job = replace(JOB, network=DEEPSEEK, cuda_graphs=True)
    search = ClusterSearch(job, MACHINE, fixed=fixed)
    plan = search.plans[0]
    divided, ranges = plan.divided(DEEPSEEK)
    assert divided.ends_apart
    assert [last - first for first, last in ranges] == [2, 2, 1, 1, 1, 1, 1, 1]
    search.layers.predict([LayerRun.of(plan)])
    stages = search.pricer.stages(plan)
    _, double, *single = (stage.waits_forward_us for stage in stages[:-1])
    assert single == pytest.approx([double / 2] * 5)
    assert double > 0
    (floor_us,) = search.pricer.floors_us(search.plans.take(np.array([0])))
    assert floor_us <= search.pricer.bound_us(plan) <= search.pricer.step_us(plan)


@pytest.mark.slow
@pytest.mark.parametrize("model", [DEEPSEEK, WINDOWED], ids=lambda model: model.name)
def test_layers_that_differ_add_up(model: Network) -> None:
    search = ClusterSearch(replace(JOB, network=model), MACHINE)
    rows = random.Random(4).sample(range(len(search.plans)), 30)
    plans = [search.plans[row] for row in rows]
    search.layers.predict(map(LayerRun.of, plans))
    floors_us = search.pricer.floors_us(search.plans.take(np.array(rows))).tolist()
    for plan, floor_us in zip(plans, floors_us, strict=True):
        priced = search.priced(plan)
        assert 0 < floor_us <= search.pricer.bound_us(plan) * (1 + 1e-12), plan
        assert search.pricer.bound_us(plan) <= priced.step.time_us * (1 + 1e-12), plan
        expected = predict_step(
            model, MACHINE.device, plan.run(search.job), MACHINE.links, plan.parallelism(search.job)
        )
        # A layer between the ends has the mean time of all of them, so that stages of some layers differ.
        tolerance = 0.02 if plan.pipeline == 1 and not plan.recompute_layers else 0.3
        assert priced.step.time_us == pytest.approx(expected.time_us, rel=tolerance), plan
    assert {plan.pipeline for plan in plans} >= {1, 2, 4}
