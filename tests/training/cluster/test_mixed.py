"""Plans on nodes of different products: against all plans, against equal products, and their descriptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebench.errors import InputError
from tunebench.training.cluster import (
    ClusterSearch,
    MixedCluster,
    MixedSearch,
    TrainingCluster,
    TrainingJob,
    is_mixed,
    plan_mixed,
)
from tunebench.workloads.networks import network

JOB = TrainingJob(network=network("gpt2"), batch=16, seq=1024)
MIXED = MixedCluster.parse("2 x l4 + 2 x a100-80-sxm, 2 a node, net-200, 12GB")
FIXED = {"flash": "yes", "sharding": "none", "sequence_parallel": "no"}


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["16GB", "6GB"])
def test_best_plan_is_that_of_all_plans_and_divisions(memory: str) -> None:
    machine = MixedCluster.parse(f"2 x l4 + 2 x a100-80-sxm, 2 a node, net-200, {memory}")
    search = MixedSearch(JOB, machine, fixed=FIXED)
    result = search.run(1)
    every = [division for plan in search.plans for division in search.divisions(plan)]
    fitting = [candidate for candidate in every if not search.excess_bytes(candidate)]
    assert len(fitting) > 0
    assert (len(fitting) < len(every)) == (memory == "6GB")
    best = result.best[0]
    assert best.step_us == min(map(search.step_us, fitting))
    for candidate in fitting:
        assert search.floor_us(candidate) <= search.slowest_us(candidate) * (1 + 1e-12)
        assert search.slowest_us(candidate) <= search.bound_us(candidate) * (1 + 1e-12)
        assert search.bound_us(candidate) <= search.step_us(candidate) * (1 + 1e-12)
    proof = result.proof
    closed = proof.too_large + proof.bounded_by_layers + proof.bounded_by_step + proof.simulated
    assert closed == proof.divisions < len(every)
    assert 0 < proof.bounded < proof.plans
    assert sum(best.mixed.stage_layers) == JOB.network.layers


@pytest.mark.slow
def test_faster_products_get_more_layers() -> None:
    answer = plan_mixed(JOB, MIXED, fixed=FIXED)
    best = answer.best[0]
    layers: dict[int, list[int]] = {0: [], 1: []}
    for group, count in zip(best.mixed.stage_groups, best.mixed.stage_layers, strict=True):
        layers[group].append(count)
    assert max(layers[0]) < min(layers[1])
    assert answer.equal_layers is not None
    assert max(answer.equal_layers.mixed.stage_layers) - min(answer.equal_layers.mixed.stage_layers) <= 1
    assert best.step_us < answer.equal_layers.step_us
    assert all(alone is not None for alone in answer.alone)


@pytest.mark.slow
def test_equal_products_have_the_step_and_memory_of_one_cluster() -> None:
    job = TrainingJob(network=network("gpt2-large"), batch=16, seq=1024)
    mixed = MixedSearch(job, MixedCluster.parse("2 x l4 + 2 x l4, 2 a node, net-200"), fixed=FIXED)
    whole = ClusterSearch(job, TrainingCluster.parse("4 x l4, 2 a node, net-200"), fixed=FIXED)
    for plan in mixed.plans:
        division = next(mixed.divisions(plan, equal=True))
        priced, expected = mixed.priced(division), whole.priced(plan.plan)
        assert priced.step_us == pytest.approx(expected.step.time_us, rel=1e-9), plan
        assert max(priced.memory_bytes) == expected.memory.needed
        assert priced.mfu == pytest.approx(expected.mfu)


@pytest.mark.slow
def test_three_groups_and_more_stages_than_layers() -> None:
    machine = MixedCluster.parse("1 x l4 + 1 x a100-80-sxm + 1 x h100-sxm, 1 a node, net-100, $1")
    best = plan_mixed(JOB, machine, fixed=FIXED, reasons=False).best[0]
    assert len(best.mixed.stage_layers) == 3
    assert best.cost == pytest.approx(3 * best.step_us / 3.6e9)
    with pytest.raises(InputError, match="no plan divides"):
        MixedSearch(JOB, MixedCluster.parse("8 x l4 + 8 x h100-sxm"), fixed={"tensor": "1", "data": "1"})


def test_nothing_fits_says_what_a_device_lacks() -> None:
    machine = MixedCluster.parse("1 x l4 + 1 x a100-80-sxm, 1 a node, net-100, 2GB")
    answer = plan_mixed(JOB, machine, fixed=FIXED)
    assert not answer.best
    assert answer.missing_bytes > 0


def test_encoder_and_decoder_are_no_stages_of_groups() -> None:
    job = TrainingJob(network=network("t5-base"), batch=16, seq=512)
    with pytest.raises(InputError, match="groups of devices are stages of a pipeline; plan for one group"):
        plan_mixed(job, MIXED)


def test_files_have_groups_with_shared_keys(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'devices_per_node = 4\nmemory = "20GB"\nbetween = "net-200"\n'
        '[[group]]\nproduct = "a100-80-sxm"\nnodes = 2\nmemory = "60GB"\n'
        '[[group]]\nproduct = "h100-sxm"\nnodes = 1\ndevices_per_node = 8\n'
    )
    assert is_mixed(str(path))
    machine = MixedCluster.of(str(path))
    assert [group.devices for group in machine.groups] == [8, 8]
    assert [group.memory_bytes for group in machine.groups] == [60 * 10**9, 20 * 10**9]
    assert machine.between.name == "net-200"
    text = MixedCluster.parse("8 x a100-80-sxm + 16 x h100-sxm")
    assert (text.devices, text.between.name) == (24, "net-200")
    assert not is_mixed("8 x l4")
    path.write_text("group = 1\n")
    with pytest.raises(InputError, match=r"\[\[group\]\]"):
        MixedCluster.of(str(path))
    path.write_text('[[group]]\nproduct = "l4"\n')
    with pytest.raises(InputError, match="two groups"):
        MixedCluster.of(str(path))
    path.write_text("[[group]]\nnodes = 1\n")
    with pytest.raises(InputError, match="product is missing"):
        MixedCluster.of(str(path))
