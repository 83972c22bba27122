from __future__ import annotations

import csv
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.public_data import found
from tunebench import device
from tunebench.errors import InputError
from tunebench.forecast.network import predict_network
from tunebench.forecast.parallel.cluster import Cluster, Link, ProcessGroup
from tunebench.forecast.parallel.collective import REACHES, collective_us, send_us
from tunebench.forecast.parallel.gradient import gradient_bytes
from tunebench.forecast.parallel.pipeline import bubble
from tunebench.forecast.parallel.step import (
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
        found = [Operation(workload=work, count=last - first, part="layers")]
        if run.trains:
            found.append(Operation(workload=work, count=2 * (last - first), part="layers", phase="backward"))
        return tuple(found)

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
    one = step(dataclasses.replace(run, batch=division.microbatch(16))).compute.us
    assert got.time.us >= one / division.tensor / division.pipeline  # no work is lost


# ---------------------------------------------------------------------------------- data parallel


def test_gradients_without_overlap_are_reduced_after_the_pass() -> None:
    got = step(data=8, overlap=False)
    nbytes = 4 * STACK.parameters()
    assert got.communication.us == pytest.approx(float(collective_us("all-reduce", nbytes, NODE.group(8))))


def test_a_matrix_that_two_layers_share_is_reduced_once() -> None:
    small = from_config("small", SMALL)
    got = step(NetworkRun(batch=4, seq=128, mode="train"), NODE, small, data=2)
    total = sum(gradient_bytes(small, got.run, (0, small.layers)))
    assert total == 4 * small.parameters()


def test_data_parallel_ranks_are_tensor_ranks_apart() -> None:
    got = step(cluster=NODES, data=2, tensor=8, overlap=False)
    group = ProcessGroup(local=1, nodes=2, inside=NVLINK, between=NETWORK)
    expected = float(collective_us("all-reduce", 4 * STACK.parameters() // 8, group))
    assert got.stages[0].gradients.us == pytest.approx(expected)


def test_gradients_hide_behind_a_long_pass_but_for_the_last_bucket() -> None:
    got = step(dataclasses.replace(TRAIN, batch=64), data=8)
    last = float(collective_us("all-reduce", 4 * WIDTH * WIDTH, NODE.group(8)))
    shorter, longer = REACHES
    assert got.communication == TimeRange(
        low_us=pytest.approx(last * shorter), us=pytest.approx(last), high_us=pytest.approx(last * longer)
    )


def test_gradients_that_take_longer_than_the_pass_follow_one_another() -> None:
    slow = dataclasses.replace(NODE, inside=Link(name="slow", gb_s=0.1))
    got = step(cluster=slow, data=8)
    assert 4 * WIDTH * WIDTH < BUCKET_BYTES  # one bucket per layer
    bucket = float(collective_us("all-reduce", 4 * WIDTH * WIDTH, slow.group(8)))
    backward = got.stages[0].backward.us
    assert got.communication.us == pytest.approx(8 * bucket - 7 / 8 * backward)


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
def test_four_devices_gain_about_what_was_measured(divided: dict[str, int]) -> None:
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
        ({"schedule": "gpip"}, "one of gpipe, 1f1b"),
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
