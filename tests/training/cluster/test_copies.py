"""Data parallelism of residual networks: its memory against autograd, its plans against `predict_step`."""

from __future__ import annotations

import pytest

from tunebench.errors import InputError
from tunebench.training.cluster import TrainingCluster
from tunebench.training.cluster.copies import CopiesJob, plan_copies
from tunebench.training.steps.step import Parallelism, predict_step
from tunebench.workloads.networks import NetworkRun, from_config, network
from tunebench.workloads.networks.resnet import Convolution, ResNet

JOB = CopiesJob(network=network("resnet50"), batch=512)


def test_best_plan_is_the_fastest_that_fits() -> None:
    machine = TrainingCluster.parse("4 x l4, 4GB, $0.7")
    answer = plan_copies(JOB, machine)
    assert [plan.step_us for plan in answer.plans] == sorted(plan.step_us for plan in answer.plans)
    assert answer.too_large > 0
    assert len(answer.plans) + answer.too_large == 8
    assert all(plan.memory_bytes <= machine.limit_bytes for plan in answer.plans)
    best = answer.plans[0]
    run = NetworkRun(batch=512, mode="train", dtype="bf16", stack="eager", optimizer="adamw")
    division = Parallelism(data=4, microbatches=128 // best.microbatch)
    expected = predict_step(JOB.network, machine.device, run, machine.links, division)
    assert best.step_us == expected.time_us
    assert best.cost == pytest.approx(4 * 0.7 * expected.time_us / 3.6e9)


def test_nothing_fits_says_what_is_missing() -> None:
    answer = plan_copies(JOB, TrainingCluster.parse("4 x l4, 1GB"))
    assert answer.plans == ()
    assert (
        answer.missing_bytes == sum(JOB.memory_bytes(1, answer.machine).values()) - answer.machine.limit_bytes
    )


def test_mistakes_are_explained() -> None:
    with pytest.raises(InputError, match="cannot be divided among 4 devices"):
        plan_copies(CopiesJob(network=network("resnet50"), batch=6), TrainingCluster.parse("4 x l4"))
    with pytest.raises(InputError, match="gpt2 or llama"):
        CopiesJob(network=network("bert-base"), batch=8)
    with pytest.raises(InputError, match="eager or compiled"):
        CopiesJob(network=network("resnet50"), batch=8, stack="megatron")


def test_saved_elements_are_those_of_autograd() -> None:
    pytest.importorskip("torch")
    import torch
    from torch import nn

    sizes = {"depths": [2, 1], "hidden_sizes": [32, 64], "embedding_size": 8, "image_size": 32}
    resnet = from_config("small", {"model_type": "resnet", **sizes, "num_labels": 10})
    assert isinstance(resnet, ResNet)

    def convolution(layer: Convolution) -> nn.Sequential:
        made = [nn.Conv2d(layer.c, layer.k, layer.taps, layer.stride, layer.taps // 2, bias=False)]
        return nn.Sequential(*made, nn.BatchNorm2d(layer.k), *[nn.ReLU(inplace=True)] * layer.relu)

    stem = nn.Sequential(convolution(resnet.stem_convolution()), nn.MaxPool2d(3, 2, 1))
    blocks = [
        (
            nn.Sequential(*map(convolution, block.convolutions)),
            convolution(block.shortcut) if block.shortcut else None,
        )
        for block in resnet.blocks()
    ]
    head = nn.Linear(64, 10)
    weights = {parameter.data_ptr() for part in (stem, head) for parameter in part.parameters()}
    weights |= {
        parameter.data_ptr()
        for pair in blocks
        for part in pair
        if part is not None
        for parameter in part.parameters()
    }
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights and tensor.dim() in (2, 4):
            saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = stem(torch.zeros(2, 3, 32, 32))
        for convolutions, shortcut in blocks:
            x = torch.relu_(convolutions(x) + (shortcut(x) if shortcut else x))
        loss = nn.functional.cross_entropy(head(x.mean((2, 3))), torch.zeros(2, dtype=torch.int64))
    elements = sum(tensor.numel() for tensor in saved.values() if tensor.dtype.is_floating_point)
    positions = sum(tensor.numel() for tensor in saved.values() if not tensor.dtype.is_floating_point)
    expected = resnet.saved_elements()
    assert loss.requires_grad
    assert elements == 2 * expected[0]
    assert positions == 2 * expected[1]
