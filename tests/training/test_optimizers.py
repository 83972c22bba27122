"""Contract of every optimizer: bytes counted by hand, states of torch's optimizers, names in commands."""

from __future__ import annotations

from typing import Any

import pytest

from tunebench import cli
from tunebench.cli import _completion
from tunebench.errors import InputError, UnknownName
from tunebench.optimizer import OPTIMIZERS, NamedOptimizer, find_optimizer
from tunebench.training.cluster import TrainingCluster, TrainingJob, emit
from tunebench.training.cluster.device_memory import MemoryPricer
from tunebench.training.cluster.search import ClusterSearch
from tunebench.training.cluster.space import plan_space
from tunebench.training.cluster.storage import StorageLayout, StorageTimes
from tunebench.training.pipeline import predicted
from tunebench.training.steps import footprint
from tunebench.training.steps.footprint import min_memory_bytes
from tunebench.workloads.networks import NetworkRun, network
from tunebench.workloads.networks.tape import ROW, Tape
from tunebench.workloads.operators.gemm import Gemm

every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)

TENSOR = (512, 1024)

# Bytes of states of a f32 matrix of 512 x 1024, and per parameter in mixed precision with the f32 copy.
BY_HAND = {
    "none": (0, 0.0),
    "sgd": (0, 4.0),
    "sgd-momentum": (4 * 512 * 1024, 4.0 + 4),
    "adamw": (2 * 4 * 512 * 1024, 4.0 + 8),
    "adafactor": (4 * (512 + 1024), 4.0 + 4 * 2 / 1024),
    "lion": (4 * 512 * 1024, 4.0 + 4),
    "muon": (4 * 512 * 1024, 4.0 + 4),
    "adamw-8bit": (2 * 512 * 1024 + 2 * 4 * 2048, 4.0 + 2 * (1 + 4 / 256)),
}

# Tensors that one fused kernel reads and writes: parameter twice, gradient, and each state twice.
FUSED_TENSORS = {"none": 0, "sgd": 3, "sgd-momentum": 5, "adamw": 7, "lion": 5}


@every_optimizer
def test_states_are_those_counted_by_hand(optimizer: NamedOptimizer) -> None:
    tensor_bytes, mixed_bytes = BY_HAND[optimizer.name]
    assert optimizer.tensor_state_bytes(TENSOR, 4) == tensor_bytes
    assert optimizer.mixed_state_bytes == mixed_bytes
    assert optimizer.tensor_state_bytes((100,), 2) <= 100 * 2 * optimizer.moments + 200 + 8
    tensors = FUSED_TENSORS.get(optimizer.name)
    if tensors is not None:
        assert optimizer.traffic_bytes(2, fused=True) == 2 * tensors
    # One kernel moves each byte once, many kernels move some of them several times.
    moved = optimizer.traffic_bytes(4, fused=True)
    assert moved >= optimizer.updates * (3 * 4 + 2 * optimizer.state_bytes(4)) - 0.1
    assert moved <= optimizer.traffic_bytes(4, fused=False)


@every_optimizer
@pytest.mark.parametrize("stack", ["eager", "compiled"])
def test_update_of_a_network_moves_the_bytes_and_does_the_products(
    optimizer: NamedOptimizer, stack: Any
) -> None:
    run = NetworkRun(mode="train", dtype="bf16", stack=stack, optimizer=optimizer.name)
    tape = Tape(run)
    parameters, width = 64 * ROW * ROW, 2048
    tape.updated(parameters, width)
    products = [operation for operation in tape.operations if isinstance(operation.workload, Gemm)]
    pointwise = [
        operation.workload for operation in tape.operations if not isinstance(operation.workload, Gemm)
    ]
    assert sum(work.traffic().read_bytes + work.traffic().write_bytes for work in pointwise) == pytest.approx(
        parameters * optimizer.traffic_bytes(2, fused=run.compiled), rel=1e-3
    )
    flops = sum(operation.count * operation.workload.flops() for operation in products)
    matrices = parameters / width**2
    assert flops == pytest.approx(matrices * optimizer.product_flops(width, width), rel=1e-3)
    assert (optimizer.operations > 0) == optimizer.updates


def test_products_of_a_wide_matrix_have_its_shorter_side() -> None:
    muon = find_optimizer("muon")
    assert muon.product_flops(2, 3) == muon.product_flops(3, 2) == 5 * (2 * 2 * 12 + 2 * 8)


@pytest.mark.torch
def test_states_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from tunebench.training.fitting.optimizer_state import state_bytes

    classes = {
        "adamw": (torch.optim.AdamW, {}),
        "sgd": (torch.optim.SGD, {"lr": 0.1}),
        "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "adafactor": (torch.optim.Adafactor, {}),
    }
    if hasattr(torch.optim, "Muon"):
        classes["muon"] = (torch.optim.Muon, {})
    module = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=False), torch.nn.Linear(40, 16, bias=False))
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    for name, (cls, options) in classes.items():
        optimizer = cls(module.parameters(), **options)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        states = [
            state.nbytes
            for values in optimizer.state.values()
            for state in values.values()
            if isinstance(state, torch.Tensor) and state.ndim  # not the number of the step
        ]
        expected = sum(OPTIMIZERS[name].tensor_state_bytes(shape, 4) for shape in shapes)
        assert sum(states) == expected, name
        if name != "adafactor":  # `state_bytes` counts states of the size of the parameter only
            assert state_bytes(optimizer) == expected, name


JOB = TrainingJob(network=network("gpt2"), batch=8, seq=512)
MACHINE = TrainingCluster.parse("2 x l4, host 64GB 100, nvme 1TB 6/4")


@every_optimizer
def test_plans_on_a_cluster_count_its_states(optimizer: NamedOptimizer) -> None:
    job = TrainingJob(network=network("gpt2"), batch=8, seq=512, optimizer=optimizer.name)
    fixed = {"tensor": "1", "pipeline": "1", "sharding": "none", "context": "1"}
    fixed |= {"recompute": "none", "microbatch": "4", "states": "device"}
    best = ClusterSearch(job, MACHINE, fixed=fixed).run(1).best[0]
    parameters = job.network.parameters()
    assert best.memory.optimizer == round(optimizer.mixed_state_bytes * parameters)
    assert (best.step.optimizer_us > 0) == optimizer.updates
    memory = MemoryPricer(job).of(best.plan)
    assert memory.parameters == MemoryPricer(JOB).of(best.plan).parameters
    choices = next(axis for axis in plan_space(job, MACHINE).parameters if axis.name == "states").values
    on_host = optimizer.updates and not optimizer.newton_schulz_steps
    assert choices == (("device", "host", "nvme") if on_host else ("device",))
    if on_host:
        layout = StorageLayout(1, 1, "none", "host", "device", "device")
        slowest_us = StorageTimes(MACHINE, "adamw").update_us([10**8], layout)
        assert StorageTimes(MACHINE, optimizer.name).update_us([10**8], layout) <= slowest_us


@every_optimizer
def test_frameworks_get_its_name_or_refuse_it(optimizer: NamedOptimizer) -> None:
    job = TrainingJob(network=network("gpt2"), batch=8, seq=512, optimizer=optimizer.name)
    fixed = {"tensor": "1", "pipeline": "1", "sharding": "optimizer", "context": "1", "flash": "yes"}
    plan = ClusterSearch(job, MACHINE, fixed=fixed).run(1).best[0].plan
    for framework, name in (("megatron", optimizer.megatron), ("torchtitan", optimizer.torchtitan)):
        if name is None:
            with pytest.raises(InputError, match=f"{framework} has no optimizer {optimizer.name}: .*adamw"):
                emit(framework, plan, job)
        elif optimizer.name != "adamw":
            assert f"--optimizer {name}" in emit(framework, plan, job).text
    notes = " ".join(emit("fsdp", plan, job).notes)
    assert (f"the plan is for the optimizer {optimizer.name}" in notes) == (optimizer.name != "adamw")


@every_optimizer
def test_commands_name_it(optimizer: NamedOptimizer, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["predict"], ["plan", "cluster"], ["plan", "pipeline"], ["plan", "memory"]):
        assert cli.run([*command, "--help"]) == 0
        assert f" {optimizer.name}" in " ".join(capsys.readouterr().out.split())
    assert optimizer.name in _completion.optimizers(optimizer.name[:2])


def test_least_memory_of_a_step() -> None:
    gpt2 = network("gpt2")
    parameters = gpt2.parameters()
    for name, numbers in {"sgd": 2, "sgd-momentum": 3, "lion": 3, "adamw": 4}.items():
        run = NetworkRun(batch=1, seq=64, mode="train", optimizer=name)
        assert min_memory_bytes(gpt2, run) == 4 * numbers * parameters


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownName, match=r"unknown optimizer 'adamww'\. Did you mean 'adamw'"):
        NetworkRun(mode="train", optimizer="adamww")
    with pytest.raises(UnknownName, match="unknown optimizer 'adam'"):
        TrainingJob(network=network("gpt2"), batch=8, seq=512, optimizer="adam")


def test_former_tables_follow_from_the_records() -> None:
    with pytest.warns(FutureWarning, match="OPTIMIZER_STATES is deprecated"):
        states = footprint.OPTIMIZER_STATES
    with pytest.warns(FutureWarning, match="STATE_BYTES is deprecated"):
        state_bytes = predicted.STATE_BYTES
    assert [states[name] for name in ("none", "sgd", "adamw")] == [0, 0, 2]
    assert [state_bytes[name] for name in ("none", "sgd", "adamw")] == [8, 8, 16]
