"""Residual network that recomputes the activations of its blocks in the backward pass.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.programs import State, Step

WIDTH, BLOCKS = 48, 4


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.ModuleDict(
        {
            "stem": nn.Linear(16, WIDTH),
            "blocks": nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1),
                    nn.Linear(2 * WIDTH, WIDTH),
                )
                for _ in range(BLOCKS)
            ),
            "head": nn.Linear(WIDTH, 5),
        }
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return torch.randn(32, 16, generator=chance), torch.randint(5, (32,), generator=chance)

    state = State(modules={"network": network}, optimizers={"adamw": optimizer}, batch=batch)

    def step(features: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = network["stem"](features)
        for block in network["blocks"]:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        loss = functional.cross_entropy(network["head"](hidden), labels)
        loss.backward()
        optimizer.step()
        state.effects.append(loss.item() < 1.6)
        return loss.detach()

    return step, state
