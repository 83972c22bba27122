"""Costs of stages predicted for a network: activations by the published formulas, times, links."""

from __future__ import annotations

from typing import Any

import pytest

from tunebench import device
from tunebench.errors import InputError
from tunebench.training.interconnect.cluster import Cluster
from tunebench.training.pipeline import ActivationMemory, PredictedStages
from tunebench.training.pipeline.activation import architecture_of
from tunebench.training.steps.step import Parallelism, predict_step
from tunebench.workloads.networks import NetworkRun, network

A100 = device.find("a100-80-sxm")
GPT = network("gpt3-13b")
S, B, H, HEADS = 2048, 2, 5120, 40


def memory(**changed: Any) -> ActivationMemory:
    return ActivationMemory(**{"architecture": architecture_of(GPT), "batch": B, "seq": S} | changed)


def stages(**changed: Any) -> PredictedStages:
    settings: dict[str, Any] = {
        "network": GPT,
        "device": A100,
        "cluster": Cluster.of(A100, devices=16, nodes=2),
        "ranks": 4,
        "tensor": 4,
        "microbatch": B,
        "seq": S,
    }
    return PredictedStages(**settings | changed)


@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_activations_of_a_layer_are_those_of_korthikanti(tensor: int) -> None:
    sbh = S * B * H
    scores = 5 * HEADS * S / H / tensor
    assert memory(tensor=tensor).layer_bytes == round(sbh * (10 + 24 / tensor + scores))
    divided = {"tensor": tensor, "sequence_parallel": True}
    assert memory(**divided, recompute="selective").layer_bytes == round(sbh * 34 / tensor)
    assert memory(**divided, flash_attention=True).layer_bytes == round(sbh * 34 / tensor)
    assert memory(tensor=tensor, recompute="full").layer_bytes == 2 * sbh
    assert memory(tensor=1).weight_gradient_bytes == 32 * sbh


def test_numbers_of_four_bytes_double_all_but_the_masks() -> None:
    sbh = S * B * H
    assert memory(dtype="f32", flash_attention=True).layer_bytes == 2 * 34 * sbh - 2 * sbh
    assert memory(recompute="full").recomputed_bytes == memory().layer_bytes
    assert memory(recompute="selective").recomputed_bytes + memory(recompute="selective").layer_bytes == (
        memory().layer_bytes
    )


def test_passes_take_the_time_of_a_predicted_step() -> None:
    run = NetworkRun(
        batch=B, seq=S, mode="train", dtype="f16", stack="megatron", optimizer="adamw", accumulate=True
    )
    cluster = Cluster.of(A100, devices=16, nodes=2)
    step = predict_step(GPT, A100, run, cluster, Parallelism(pipeline=4, tensor=4))
    costs = stages().costs(range(4))
    for mine, predicted in zip(costs.stages, step.stages, strict=True):
        assert mine.forward_us == pytest.approx((predicted.forward + predicted.sums_forward).us)
        assert mine.full_backward_us == pytest.approx((predicted.backward + predicted.sums_backward).us)
        assert mine.send_bytes == predicted.send_bytes
    inner = costs.stages[1]
    assert 0.3 < inner.weight_gradient_us / inner.full_backward_us < 0.5
    assert stages().optimizer_us(range(4)) == max(stage.optimizer.us for stage in step.stages)
    shown = stages(tensor_overlap=False).costs(range(4)).stages[1]
    assert shown.input_gradient_us > inner.input_gradient_us


def test_recomputation_takes_time_and_frees_memory() -> None:
    kinds = {kind: stages(recompute=kind).costs(range(4)).stages[1] for kind in ("none", "selective", "full")}
    none, selective, full = kinds.values()
    assert full.input_gradient_us == pytest.approx(none.input_gradient_us + none.forward_us, rel=0.05)
    assert none.input_gradient_us < selective.input_gradient_us < full.input_gradient_us
    assert none.activation_bytes > selective.activation_bytes > full.activation_bytes
    # Recomputed layers are kept until the gradients of weights, if these are computed later.
    assert full.retained == none.retained == selective.retained > full.activation_bytes
    assert [stage.forward_us for stage in kinds.values()] == pytest.approx([none.forward_us] * 3)


def test_two_stages_on_each_rank_share_what_is_computed_again() -> None:
    recomputing = stages(recompute="full")
    whole, halves = recomputing.costs(range(4)), recomputing.costs((*range(4), *range(4)))
    assert len(halves.stages) == 8
    total = sum(stage.forward_us for stage in whole.stages)
    assert sum(stage.forward_us for stage in halves.stages) == pytest.approx(total, rel=0.01)
    assert sum(halves.static_bytes((*range(4), *range(4)))) == sum(whole.static_bytes(range(4)))
    assert halves.stages[3].send_bytes > 0 == halves.stages[7].send_bytes


def test_static_bytes_are_sixteen_per_parameter_unless_given() -> None:
    parameters = GPT.parameters(4, (10, 20))
    assert stages().costs(range(4)).stages[1].static_bytes == 16 * parameters
    assert stages(state_bytes=18.0).costs(range(4)).stages[1].static_bytes == 18 * parameters
    assert stages(optimizer="none").costs(range(4)).stages[1].static_bytes == 4 * parameters


def test_tensor_parallel_devices_fill_nodes_and_pairs_share_them() -> None:
    assert stages().interconnect().nodes == (0, 0, 1, 1)
    assert stages().interconnect(pairs=True).nodes == (0, 1, 1, 0)
    assert stages(stack="eager").costs(range(4)).stages[0].send_bytes == S * B * H * 2
    assert stages().costs(range(4)).stages[0].send_bytes == S * B * H * 2 // 4


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"ranks": 8}, "need 32 devices"),
        ({"tensor": 3, "ranks": 1}, "expected a divisor of 8 devices per node"),
        ({"tensor": 1, "sequence_parallel": True}, "needs tensor parallelism"),
        ({"dtype": "f32", "flash_attention": True}, "needs dtype f16 or bf16"),
        ({"stack": "eager", "recompute": "full"}, "need the stack megatron, got eager"),
        ({"network": network("opt-1.3b")}, "known for gpt2, vit, llama, .*, got opt"),
        ({"network": network("resnet50")}, "give the costs of the stages"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_mistakes_are_refused(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        stages(**changed)


def test_a_compiled_network_keeps_no_scores_in_half_precision() -> None:
    by_stack = {stack: stages(stack=stack).costs(range(4)).stages[1] for stack in ("eager", "compiled")}
    assert by_stack["compiled"].activation_bytes < by_stack["eager"].activation_bytes
    assert by_stack["compiled"].forward_us < by_stack["eager"].forward_us
    wide = stages(stack="compiled", dtype="f32").memory
    assert not wide.flash_attention
