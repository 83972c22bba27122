"""Graph attention on graphs of changing size, with sums over edges by ``index_add_``.

Source: Veličković et al., Graph Attention Networks, ICLR 2018.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

FEATURES, WIDTH, HEADS, CLASSES = 8, 8, 4, 3


class Attention(nn.Module):
    """A layer of graph attention, from (N, width) features and (2, E) edges to (N, HEADS * WIDTH)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, HEADS * WIDTH, bias=False)
        self.source = nn.Parameter(torch.randn(HEADS, WIDTH) * 0.3)
        self.target = nn.Parameter(torch.randn(HEADS, WIDTH) * 0.3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return features mixed along edges."""
        source, target = edges
        hidden = self.project(nodes).view(-1, HEADS, WIDTH)
        scores = (hidden * self.source).sum(-1)[source] + (hidden * self.target).sum(-1)[target]
        weights = (functional.leaky_relu(scores, 0.2) - scores.detach().max()).exp()
        total = torch.zeros(len(nodes), HEADS).index_add_(0, target, weights)
        weights = weights / total[target].clamp_min(1e-9)
        messages = hidden[source] * weights.unsqueeze(-1)
        mixed = torch.zeros_like(hidden).index_add_(0, target, messages)
        return mixed.flatten(1)


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.ModuleDict(
        {
            "first": Attention(FEATURES),
            "second": Attention(HEADS * WIDTH),
            "head": nn.Linear(HEADS * WIDTH, CLASSES),
        }
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3, weight_decay=5e-4)

    def batch(iteration: int) -> tuple[Tensor, Tensor, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        count = random.Random(seed * 1000 + iteration).randint(12, 40)
        edges = torch.randint(count, (2, 3 * count), generator=chance)
        loops = torch.arange(count).expand(2, count)
        nodes = torch.randn(count, FEATURES, generator=chance)
        return nodes, torch.cat((edges, loops), 1), (nodes[:, 0] * 1.5).round().clamp(-1, 1).long() + 1

    state = State(modules={"network": network}, optimizers={"adam": optimizer}, batch=batch)

    def step(nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = functional.elu(network["first"](functional.dropout(nodes, 0.2), edges))
        logits = network["head"](functional.elu(network["second"](hidden, edges)))
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        right = (logits.argmax(-1) == labels).sum().item()
        state.effects.append((len(nodes), right))
        return loss.detach()

    return step, state
