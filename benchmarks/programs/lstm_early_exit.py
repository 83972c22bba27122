"""LSTM cell over a sequence that stops as soon as its prediction is confident."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

WIDTH, LENGTH = 48, 20


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.ModuleDict({"cell": nn.LSTMCell(8, WIDTH), "head": nn.Linear(WIDTH, 2)})
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        labels = torch.randint(2, (8,), generator=chance)
        noise = torch.randn(LENGTH, 8, 8, generator=chance)
        return noise + (labels * 2 - 1)[None, :, None] * 0.3, labels

    state = State(modules={"network": network}, optimizers={"adam": optimizer}, batch=batch)

    def step(series: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = cell = series.new_zeros(series.shape[1], WIDTH)
        seen = 0
        for values in series:
            seen += 1
            hidden, cell = network["cell"](values, (hidden, cell))
            logits = network["head"](hidden)
            if logits.softmax(-1).amax(-1).mean().item() > 0.8:
                break
        loss = functional.cross_entropy(logits, labels) + 0.01 * seen
        loss.backward()
        optimizer.step()
        state.effects.append(seen)
        return loss.detach()

    return step, state
