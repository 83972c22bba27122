from __future__ import annotations

import csv
import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.public_data import found
from tunebench import device
from tunebench.errors import InputError
from tunebench.forecast.network import HOST_US, predict_network
from tunebench.training.interconnect.cluster import Cluster, Link, ProcessGroup
from tunebench.training.interconnect.collective import REACHES, collective_us, send_us
from tunebench.training.schedules import bubble
from tunebench.training.steps.gradient import chained_us, gradient_bytes
from tunebench.training.steps.overlap import TensorOverlap, occupied_sms
from tunebench.training.steps.parallelism import Sharding
from tunebench.training.steps.step import (
    BUCKET_BYTES,
    Parallelism,
    StepPrediction,
    TimeRange,
    predict_step,
)
from tunebench.workloads.networks import (
    Network,
    NetworkRun,
    Operation,
    TensorCollective,
    from_config,
    network,
)
from tunebench.workloads.operators.gemm import Gemm

A100 = device.find("a100-80-sxm")
NVLINK, NETWORK = (
    Link(name="nvlink", gb_s=300, latency_us=0.6, efficiency=0.8),
    Link(name="network", gb_s=25, latency_us=2.7, efficiency=0.95),
)
NODE = Cluster(inside=NVLINK, between=NVLINK, devices_per_node=8)
NODES = Cluster(inside=NVLINK, between=NETWORK, devices_per_node=8, nodes=8)

WIDTH = 1024
SMALL = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_head": 8,
    "n_layer": 8,
    "n_positions": 128,
    "vocab_size": 1000,
    "activation_function": "gelu_new",
}


class Stack(Network):
    """Equal layers, each with one square product forward and two backward, and nothing else."""

    name = "stack"

    def __init__(self, layers: int = 8) -> None:
        self.layers = layers

    def operations(self, run: NetworkRun) -> tuple[Operation, ...]:
        first, last = self.stage(run)
        rows = run.batch * run.seq
        work = Gemm(m=rows, n=WIDTH, k=WIDTH // run.tensor, dtype=run.dtype)
        operations = [Operation(workload=work, count=last - first, part="layers")]
        if run.trains:
            operations.append(
                Operation(workload=work, count=2 * (last - first), part="layers", phase="backward")
            )
        return tuple(operations)

    def parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        first, last = layers or (0, self.layers)
        return (last - first) * WIDTH * WIDTH // tensor

    def boundary_elements(self, run: NetworkRun) -> int:
        return run.batch * run.seq * WIDTH

    def collectives(self, run: NetworkRun) -> tuple[TensorCollective, ...]:
        if run.tensor == 1:
            return ()
        first, last = self.stage(run)
        return (TensorCollective(nbytes=self.boundary_bytes(run), count=last - first, part="layers"),)


STACK = Stack()
TRAIN = NetworkRun(batch=16, seq=512, mode="train")


def step(
    run: NetworkRun = TRAIN, cluster: Cluster = NODE, network: Network = STACK, **divided: Any
) -> StepPrediction:
    return predict_step(network, A100, run, cluster, Parallelism(**divided))


# ------------------------------------------------------------------------------------- identities


def test_step_on_one_device_equals_network_prediction() -> None:
    got, plain = step(), predict_network(STACK, A100, TRAIN)
    assert got.time_us == pytest.approx(plain.time_us)
    assert (got.low_us, got.high_us) == pytest.approx((plain.low_us, plain.high_us))
    assert got.compute.us == pytest.approx(got.time_us)
    assert (got.communication, got.bubble.us) == (TimeRange(), pytest.approx(0, abs=1e-6))
    assert got.samples_per_s == pytest.approx(16e6 / plain.time_us)


def test_data_parallel_inference_is_a_smaller_batch() -> None:
    run = dataclasses.replace(TRAIN, mode="infer")
    assert step(run, data=4).time == step(dataclasses.replace(run, batch=4)).time


def test_microbatches_on_one_device_follow_one_another() -> None:
    assert step(microbatches=4).time.us == pytest.approx(
        4 * step(dataclasses.replace(TRAIN, batch=4)).time.us
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_alike_stages_have_the_bubble_of_the_formula(schedule: str, microbatches: int) -> None:
    wires = Link(name="wires", gb_s=1e12, latency_us=0)
    cluster = dataclasses.replace(NODE, inside=wires, between=wires)
    got = step(cluster=cluster, pipeline=4, microbatches=microbatches, schedule=schedule)
    held_up = got.sends.us  # one launch per send
    share = got.bubble.us / (got.time.us - held_up)
    assert share == pytest.approx(bubble(4, microbatches), rel=1e-6)


@settings(max_examples=40)
@given(
    st.builds(
        Parallelism,
        **dict.fromkeys(("data", "tensor", "microbatches"), st.sampled_from([1, 2, 4])),
        pipeline=st.integers(1, 4),
        schedule=st.sampled_from(["gpipe", "1f1b"]),
        overlap=st.booleans(),
    ),
    st.sampled_from(["infer", "train"]),
)
def test_parts_add_up_and_intervals_are_ordered(division: Parallelism, mode: Any) -> None:
    run = dataclasses.replace(TRAIN, mode=mode)
    got = predict_step(STACK, A100, run, NODES, division)
    assert 0 < got.time.low_us <= got.time.us <= got.time.high_us
    for end in ("low", "expected", "high"):
        shares = [got.compute.at(end), got.communication.at(end), got.bubble.at(end)]
        assert min(shares) >= 0
        assert sum(shares) == pytest.approx(got.time.at(end))
    compute_us = step(dataclasses.replace(run, batch=division.microbatch(16))).compute.us
    assert got.time.us >= compute_us / division.tensor / division.pipeline  # no work is lost


# ---------------------------------------------------------------------------------- data parallel


def test_gradients_without_overlap_are_reduced_after_the_pass() -> None:
    got = step(data=8, overlap=False)
    nbytes = 4 * STACK.parameters()
    assert got.communication.us == pytest.approx(float(collective_us("all-reduce", nbytes, NODE.group(8))))


def test_a_matrix_that_two_layers_share_is_reduced_once() -> None:
    small = from_config("small", SMALL)
    got = step(NetworkRun(batch=4, seq=128, mode="train"), NODE, small, data=2)
    total = sum(gradient_bytes(small, got.run, (0, small.layers))[0])
    assert total == 4 * small.parameters()


def test_data_parallel_ranks_are_tensor_ranks_apart() -> None:
    got = step(cluster=NODES, data=2, tensor=8, overlap=False)
    group = ProcessGroup(local=1, nodes=2, inside=NVLINK, between=NETWORK)
    expected = float(collective_us("all-reduce", 4 * STACK.parameters() // 8, group))
    assert got.stages[0].gradients.us == pytest.approx(expected)


def test_gradients_hide_behind_a_long_pass_but_for_the_last_bucket() -> None:
    got = step(dataclasses.replace(TRAIN, batch=64), data=8)
    last = float(collective_us("all-reduce", 4 * WIDTH * WIDTH, NODE.group(8)))
    slower = 1 + 7 * occupied_sms(NODE.group(8)) / A100.sm_count  # seven buckets take SMs from the pass
    shorter, longer = (pace * slower * last for pace in REACHES)
    assert got.communication == TimeRange(
        low_us=pytest.approx(shorter), us=pytest.approx(slower * last), high_us=pytest.approx(longer)
    )


def test_gradients_that_take_longer_than_the_pass_follow_one_another() -> None:
    slow = dataclasses.replace(NODE, inside=Link(name="slow", gb_s=0.1))
    got = step(cluster=slow, data=8)
    assert 4 * WIDTH * WIDTH < BUCKET_BYTES  # one bucket per layer
    bucket = float(collective_us("all-reduce", 4 * WIDTH * WIDTH, slow.group(8)))
    backward = got.stages[0].backward.us
    lost = occupied_sms(slow.group(8)) / A100.sm_count * 7 / 8 * backward
    assert got.communication.us == pytest.approx(8 * bucket - 7 / 8 * backward + lost)


def test_only_the_last_microbatch_reduces_gradients() -> None:
    got = step(data=2, microbatches=8)
    assert got.communication.us == pytest.approx(
        step(dataclasses.replace(TRAIN, batch=2), data=2).communication.us
    )


# ------------------------------------------------------------------------- tensors and pipelines


def test_tensor_parallel_all_reduces_are_exposed() -> None:
    got = step(tensor=4)
    sum_us = float(collective_us("all-reduce", 4 * 16 * 512 * WIDTH, NODE.group(4)))
    assert got.communication.us == pytest.approx(8 * sum_us)
    assert got.stages[0].parameters == STACK.parameters() // 4


def test_one_microbatch_goes_through_all_stages_and_back() -> None:
    got = step(pipeline=4)
    sent = float(send_us(4 * 16 * 512 * WIDTH, NVLINK))
    assert got.sends.us == pytest.approx(6 * sent)
    assert got.time.us == pytest.approx(step().time.us + 6 * sent)
    assert [stage.send_bytes for stage in got.stages] == [4 * 16 * 512 * WIDTH] * 3 + [0]


def test_stages_have_memory_and_message_sizes() -> None:
    got = step(pipeline=3, microbatches=8, stage_layers=(4, 2, 2))
    assert [stage.layers for stage in got.stages] == [(0, 4), (4, 6), (6, 8)]
    assert [stage.in_flight for stage in got.stages] == [3, 2, 1]
    assert got.stages[0].forward.us == pytest.approx(2 * got.stages[1].forward.us)
    assert step(pipeline=3, microbatches=8, schedule="gpipe").stages[2].in_flight == 8


def test_layers_are_divided_evenly_with_more_in_the_first_stages() -> None:
    assert Parallelism(pipeline=3).stages(8) == ((0, 3), (3, 6), (6, 8))


LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 5000,
}


@pytest.mark.parametrize("tied", [False, True])
def test_ends_without_layers_have_the_embedding_and_the_head_alone(tied: bool) -> None:
    stack = from_config("small", {**LLAMA, "tie_word_embeddings": tied})
    run = replace(TRAIN, stack="megatron", optimizer="adamw", dtype="bf16")
    divided = {"cluster": NODES, "pipeline": 4, "microbatches": 4, "tensor": 2, "data": 2}
    even = step(run, network=stack, **divided, stage_layers=(1, 2, 2, 1))  # type: ignore[arg-type]
    ends = step(run, network=stack, **divided, stage_layers=(0, 3, 3, 0))  # type: ignore[arg-type]
    assert [stage.layers for stage in ends.stages] == [(0, 0), (0, 3), (3, 6), (6, 6)]
    table = 5000 * 256 // 2
    assert ends.stages[0].parameters == table
    assert ends.stages[-1].parameters == table + 256
    layer = even.stages[1].parameters // 2
    assert [stage.parameters for stage in ends.stages[1:3]] == [3 * layer, 3 * layer]
    assert sum(stage.forward.us for stage in ends.stages) == pytest.approx(
        sum(stage.forward.us for stage in even.stages), rel=0.02
    )
    assert ends.stages[0].forward.us < even.stages[0].forward.us
    assert ends.stages[0].weights.us > 0
    # All that is summed over the network is the same: tied matrices are also summed once.
    assert sum(stage.sums_forward.us for stage in ends.stages) == pytest.approx(
        sum(stage.sums_forward.us for stage in even.stages), rel=0.05, abs=1
    )


def test_both_ends_count_as_layers_of_an_even_division() -> None:
    """Llama 3 405B: 16 ranks of 8 stages, a layer less on the first and the last one (arXiv 2407.21783)."""
    parallelism = Parallelism(
        pipeline=16, chunks=8, schedule="interleaved-1f1b", embedding_layers=1, head_layers=1
    )
    counts = [last - first for first, last in parallelism.stages(126)]
    assert counts == [0, *[1] * 126, 0]
    assert [b - a for a, b in Parallelism(pipeline=4, head_layers=5).stages(24)] == [8, 7, 7, 2]
    stack = from_config("small", LLAMA)
    run = replace(TRAIN, stack="megatron", dtype="bf16")
    got = step(
        run,
        network=stack,
        pipeline=2,
        chunks=4,
        schedule="interleaved-1f1b",
        microbatches=4,
        embedding_layers=1,
        head_layers=1,
    )
    assert [stage.layers for stage in got.stages][:2] == [(0, 0), (0, 1)]
    assert got.time_us > 0


def test_experts_of_stages_are_those_of_their_layers() -> None:
    stack = from_config(
        "small", {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    run = replace(TRAIN, stack="megatron", dtype="bf16")
    got = step(run, network=stack, pipeline=4, microbatches=4, stage_layers=(0, 3, 3, 0))
    assert sum(stage.parameters for stage in got.stages) == stack.parameters()
    assert got.stages[0].parameters == got.stages[-1].parameters - 256


def test_groups_that_communicate_most_are_closest() -> None:
    inside = step(cluster=NODES, tensor=8, data=2)
    assert inside.stages[0].sums_forward.us == pytest.approx(
        step(tensor=8, run=dataclasses.replace(TRAIN, batch=8)).stages[0].sums_forward.us
    )
    across = step(cluster=NODES, data=8, pipeline=2)
    sent = float(send_us(4 * 2 * 512 * WIDTH, NETWORK))
    assert across.stages[0].send.us == pytest.approx(sent)


def test_a_stage_that_crosses_nodes_sends_over_the_network() -> None:
    cluster = dataclasses.replace(NODES, devices_per_node=6)
    got = step(cluster=cluster, data=4, pipeline=2)  # devices 2 and 6 are neighbours
    assert got.stages[0].send.us == pytest.approx(float(send_us(4 * 4 * 512 * WIDTH, NETWORK)))


def test_a_matrix_that_two_stages_share_is_summed() -> None:
    small = from_config("small", SMALL)
    run = NetworkRun(batch=4, seq=128, mode="train")
    got = step(run, network=small, pipeline=2)
    shared = float(collective_us("all-reduce", 4 * 1000 * 256, NODE.group(2)))
    sent = float(send_us(4 * 4 * 128 * 256, NVLINK))
    assert got.sends.us == pytest.approx(2 * sent + shared)


def test_a_transformer_on_sixteen_devices() -> None:
    small = from_config("small", SMALL)
    run = NetworkRun(batch=32, seq=128, mode="train", optimizer="adamw")
    got = step(run, NODES, small, data=2, tensor=2, pipeline=4, microbatches=4)
    assert got.time.us == pytest.approx((got.compute + got.communication + got.bubble).us)
    assert (
        got.compute.us < step(run, network=small).time.us / 2
    )  # launch overhead is not divided by data and tensor parallelism
    assert all(stage.optimizer.us > 0 for stage in got.stages)
    assert all(stage.sums_backward.us == 0 for stage in got.stages)  # the device waits for the host meanwhile


# --------------------------------------------------------------------------------------- measured


@pytest.mark.parametrize("divided", [{"data": 4}, {"tensor": 4}])
def test_four_devices_gain_about_what_was_measured(divided: dict[str, Any]) -> None:
    """Check the gain over four stages with one micro-batch, where no two devices work at the same time.

    Measured on 4 A100 SXM, gpt2-large, batch 4 of 1024 tokens: 0.28 (data) and 0.30 (tensor) of that time.
    """
    name = "dp4" if "data" in divided else "tp4"
    with found("predict/neusight_models.csv").open(newline="", encoding="utf-8") as file:
        labels = {row["option"]: float(row["label_ms"]) for row in csv.DictReader(file)}
    run = NetworkRun(batch=4, seq=1024, mode="train", optimizer="adamw")
    cluster = Cluster.of(device.find("a100-40-sxm"), devices=4)

    def predicted_us(parallelism: Parallelism) -> float:
        return predict_step(
            network("gpt2-large"), device.find("a100-40-sxm"), run, cluster, parallelism
        ).time_us

    gain = predicted_us(Parallelism(**divided)) / predicted_us(Parallelism(pipeline=4))
    assert gain == pytest.approx(labels[name] / labels["pp4_1"], rel=0.25)


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("divided", "message"),
    [
        ({"data": 3}, "batch of 16 cannot be divided"),
        ({"data": 4, "microbatches": 8}, "batch of 16 cannot be divided"),
        ({"pipeline": 8, "tensor": 2}, "16 devices are needed"),
        ({"data": 0}, "at least 1"),
        ({"pipeline": 2, "stage_layers": (8,)}, "must have 2 entries"),
        ({"pipeline": 2, "stage_layers": (8, 1)}, "8 layers cannot be divided"),
        ({"pipeline": 3, "stage_layers": (4, 0, 4)}, "at least one layer, the first and the last one of 0"),
        ({"pipeline": 2, "stage_layers": (8, 0)}, "no embedding and head that are pipeline stages"),
        ({"pipeline": 2, "head_layers": 9}, "the head as 9"),
        ({"head_layers": 1}, "need a pipeline"),
        ({"schedule": "gpip"}, "Did you mean gpipe|gpipe"),
    ],
)
def test_invalid_divisions_are_rejected(divided: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        step(**divided)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match="2 layers cannot"):
        step(network=Stack(2), pipeline=4)


def test_run_must_not_set_tensor_or_layers() -> None:
    with pytest.raises(InputError, match="by `parallelism`"):
        step(dataclasses.replace(TRAIN, tensor=2))


# ------------------------------------------------------------------ schedules, sharding, and what runs beside

GPT = network("gpt2-large")
MEGATRON = NetworkRun(batch=16, seq=1024, mode="train", dtype="bf16", optimizer="adamw", stack="megatron")


def gpt_us(run: NetworkRun = MEGATRON, cluster: Cluster = NODE, **divided: Any) -> float:
    return predict_step(GPT, A100, run, cluster, Parallelism(**divided)).time_us


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe-v"])
def test_gradients_of_weights_fill_bubbles(schedule: str) -> None:
    got = predict_step(GPT, A100, MEGATRON, NODE, Parallelism(pipeline=4, microbatches=8, schedule=schedule))
    plain = predict_step(GPT, A100, MEGATRON, NODE, Parallelism(pipeline=4, microbatches=8))
    assert len(got.stages) == 8 if schedule[0] in "vd" or schedule == "zbv" else 4
    assert got.compute.us == pytest.approx(plain.compute.us, rel=0.01)
    stored = [stage.in_flight * (stage.layers[1] - stage.layers[0]) for stage in got.stages]
    if schedule in ("zb-h1", "zb-h2", "zbv"):
        assert got.bubble.us < plain.bubble.us
    if schedule == "v-half":  # the first stages of each rank, then its second ones in reverse
        max_stored = max(first + second for first, second in zip(stored[:4], stored[:3:-1], strict=True))
        assert max_stored < plain.stages[0].in_flight * 9


def test_interleaved_stages_may_be_uneven_and_micro_batches_any_number() -> None:
    run = dataclasses.replace(MEGATRON, batch=18)
    division = Parallelism(
        pipeline=4,
        chunks=2,
        microbatches=18,
        schedule="interleaved-1f1b",
        stage_layers=(5, 5, 5, 5, 4, 4, 4, 4),
    )
    got = predict_step(GPT, A100, run, NODE, division)
    assert [last - first for first, last in (stage.layers for stage in got.stages)] == [5] * 4 + [4] * 4
    assert got.time_us < gpt_us(run, pipeline=4, microbatches=18)


def test_copies_that_share_more_update_less_and_communicate_more() -> None:
    kinds: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "full")
    none, states, gradients, full = (
        predict_step(GPT, A100, MEGATRON, NODE, Parallelism(data=8, sharding=kind)).stages[0]
        for kind in kinds
    )
    assert max(stage.optimizer.us for stage in (states, gradients, full)) < none.optimizer.us / 2
    assert states.gradients.us > 0 == full.gradients.us
    assert full.sums_forward.us > none.sums_forward.us == 0
    # DeepSpeed sums whole gradients where only states are sharded.
    deepspeed = dataclasses.replace(MEGATRON, stack="megatron@2022")
    whole = predict_step(GPT, A100, deepspeed, NODE, Parallelism(data=8, sharding="optimizer")).stages[0]
    assert whole.copies.gradients.total == none.copies.gradients.total
    assert whole.copies.gathered.total == states.copies.gathered.total
    slow = dataclasses.replace(NODE, inside=dataclasses.replace(NVLINK, gb_s=10))
    # gathered twice, and reduced once
    assert gpt_us(cluster=slow, data=8, sharding="full") > 1.2 * gpt_us(cluster=slow, data=8)


def test_user_buffers_hide_collectives_before_and_behind_products() -> None:
    run = dataclasses.replace(MEGATRON, sequence_parallel=True)
    waits = [
        predict_step(GPT, A100, run, NODE, division).communication.us
        for division in (
            Parallelism(tensor=4, tensor_overlap=False),
            Parallelism(tensor=4),
            Parallelism(tensor=4, user_buffers=True),
        )
    ]
    assert waits[0] > 1.3 * waits[1] > 1.3**2 * waits[2] > 0


def test_hidden_collectives_take_sms_from_products() -> None:
    overlap = TensorOverlap(products=True, user_buffers=False, parts=4, occupied=0.2)
    collective = TensorCollective(nbytes=1, count=1, part="mlp up", behind=("mlp up", "weights"))
    assert overlap.exposed_us(collective, 10.0, lambda part, gradient: 40.0) == pytest.approx(2.0)
    assert overlap.exposed_us(collective, 10.0, lambda part, gradient: 4.0) == pytest.approx(6.8)
    parts = dataclasses.replace(overlap, user_buffers=True)
    beside = dataclasses.replace(collective, behind=None, beside=("mlp up", "forward"))
    assert parts.exposed_us(beside, 10.0, lambda part, gradient: 40.0) == pytest.approx(2.5)
    assert overlap.exposed_us(beside, 10.0, lambda part, gradient: 40.0) == 10.0


def test_collectives_of_later_stages_have_time_until_the_last_pass_of_the_device() -> None:
    assert chained_us([(3.0, 5.0, 0.0)]) == 3.0
    assert chained_us([(3.0, 5.0, 9.0), (2.0, 4.0, 10.0)]) == 2.0
    assert chained_us([(30.0, 40.0, 9.0), (2.0, 4.0, 10.0)]) == 24.0


def test_some_layers_are_computed_again() -> None:
    every = dataclasses.replace(MEGATRON, recompute="full")
    times = [gpt_us(dataclasses.replace(every, recompute_layers=count)) for count in (0, 12, 36)]
    assert times[0] == pytest.approx(gpt_us())
    assert times[2] == pytest.approx(gpt_us(every))
    assert times[1] - times[0] == pytest.approx((times[2] - times[0]) / 3, rel=1e-3)


def test_host_time_is_that_of_launches_and_adds_up_if_they_block_and_graphs_have_none() -> None:
    small = dataclasses.replace(MEGATRON, batch=1, seq=128)
    runs = (
        small,
        dataclasses.replace(small, cuda_graphs=True),
        dataclasses.replace(small, launch_blocking=True),
    )
    bound, graphs, blocking = (predict_step(GPT, A100, run, NODE, Parallelism(tensor=4)) for run in runs)
    kernels = blocking.stages[0].kernels
    assert blocking.compute.us == pytest.approx(kernels.time_us)
    assert kernels.time_us == pytest.approx(kernels.device_us + kernels.host_us)
    # Collectives hide behind the host only while the device waits for it.
    assert blocking.communication.us > 0 == bound.communication.us
    assert bound.stages[0].kernels.waits_for_host
    assert graphs.time_us < bound.time_us
    assert graphs.stages[0].kernels.time_us == graphs.stages[0].kernels.device_us


def test_gradients_in_f32_take_twice_the_bytes() -> None:
    wide = dataclasses.replace(MEGATRON, wide_gradients=True)
    layers = (0, GPT.layers)
    sizes, _ = gradient_bytes(GPT, MEGATRON, layers)
    assert gradient_bytes(GPT, wide, layers)[0] == [2 * nbytes for nbytes in sizes]
    assert gpt_us(wide, data=8, overlap=False) > gpt_us(data=8, overlap=False)


def test_gathered_keys_are_exposed_and_attention_has_as_many_pairs() -> None:
    llama = network("llama-3-8b")
    ring = dataclasses.replace(MEGATRON, batch=4, seq=8192, flash=True)
    stages = [
        predict_step(llama, A100, run, NODE, Parallelism(context=4)).stages[0]
        for run in (ring, dataclasses.replace(ring, context_gather=True))
    ]
    keys_us = float(collective_us("all-gather", 2 * 2 * 4 * 8192 * 1024, NODE.group(4)))
    assert stages[1].sums_forward.us == pytest.approx(32 * keys_us)
    assert stages[0].sums_forward.us < stages[1].sums_forward.us
    pairs = [
        sum(
            operation_time.operation.count * operation_time.operation.workload.flops()
            for operation_time in stage.kernels.operations
            if operation_time.operation.part == "attention"
        )
        for stage in stages
    ]
    assert pairs[1] == pytest.approx(pairs[0], rel=1e-3)


def test_lists_of_tensors_are_copied_one_by_one_while_nothing_else_runs() -> None:
    wide = Parallelism(data=64, sharding="full", gathering="lists")
    run = dataclasses.replace(MEGATRON, batch=64)
    got, recomputed = (
        predict_step(GPT, A100, division, NODES, wide).stages[0]
        for division in (run, dataclasses.replace(run, recompute="full"))
    )
    copies_us = HOST_US * 4 * GPT.layers * 64
    assert got.sums_forward.us > copies_us
    assert recomputed.sums_backward.us - got.sums_backward.us == pytest.approx(got.sums_forward.us)
    assert gpt_us(run, NODES, data=64, sharding="full") < gpt_us(
        run, NODES, data=64, sharding="full", gathering="lists"
    )
