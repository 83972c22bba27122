"""Decoder with relative attention that keeps its attention maps and past losses in Python lists.

Source: Huang et al., Music Transformer, ICLR 2019 (relative attention by skewing).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

WIDTH, HEADS, LENGTH, NOTES = 64, 4, 32, 48


class RelativeAttention(nn.Module):
    """Causal self-attention of (N, L, WIDTH) with a learned embedding of every distance."""

    def __init__(self, maps: list[Tensor]) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.distances = nn.Parameter(torch.randn(LENGTH, WIDTH // HEADS) / 8)
        self.maps = maps

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, L, WIDTH) features."""
        count, length, _ = x.shape
        heads = self.project(x).view(count, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        relative = functional.pad(query @ self.distances[-length:].T, (1, 0))
        relative = relative.reshape(count, HEADS, length + 1, length)[:, :, 1:]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(-1, -2) + relative) / (WIDTH // HEADS) ** 0.5
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        self.maps.append(weights.detach())
        return (weights @ value).transpose(1, 2).reshape(count, length, WIDTH)


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    maps: list[Tensor] = []
    recent: list[float] = []
    network = nn.ModuleDict(
        {
            "embed": nn.Embedding(NOTES, WIDTH),
            "layers": nn.ModuleList(RelativeAttention(maps) for _ in range(3)),
            "norms": nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3)),
            "head": nn.Linear(WIDTH, NOTES),
        }
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def batch(iteration: int) -> tuple[Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return (torch.randint(NOTES, (4, LENGTH + 1), generator=chance),)

    state = State(modules={"network": network}, optimizers={"adam": optimizer}, batch=batch)

    def step(notes: Tensor) -> Tensor:
        maps.clear()
        optimizer.zero_grad()
        hidden = network["embed"](notes[:, :-1])
        for attention, norm in zip(network["layers"], network["norms"], strict=True):
            hidden = hidden + attention(norm(hidden))
        logits = network["head"](hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), notes[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        recent.append(loss.item())
        del recent[:-5]
        peaks = [weights.amax().item() for weights in maps]
        state.effects.append((sum(recent) / len(recent), max(peaks)))
        return loss.detach()

    return step, state
