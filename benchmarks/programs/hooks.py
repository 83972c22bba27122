"""Classifier whose hooks record activations and gradients, and clip a gradient in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 64, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return torch.randn(8, 1, 8, 8, generator=chance), torch.randint(4, (8,), generator=chance)

    state = State(modules={"network": network}, optimizers={"sgd": optimizer}, batch=batch)

    def activation(module: nn.Module, inputs: Any, output: Tensor) -> None:
        state.memory["zeros"] = (output == 0).float().mean().item()

    def gradient(module: nn.Module, into: Any, out: tuple[Tensor, ...]) -> None:
        state.effects.append(out[0].norm().item())

    network[3].register_forward_hook(activation)
    network[5].register_full_backward_hook(gradient)

    def halve(bias: Tensor) -> None:
        assert bias.grad is not None
        bias.grad.mul_(0.5)

    network[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    network[5].bias.register_post_accumulate_grad_hook(halve)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        state.effects.append(state.memory["zeros"])
        return loss.detach()

    return step, state
