"""Decoder in the manner of GPT-2 whose batches have a different length in every step."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

WIDTH, HEADS, LONGEST, WORDS = 64, 4, 64, 128


class Block(nn.Module):
    """Causal attention and a two-layer network, each behind a layer norm, on (N, L, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, L, WIDTH) features."""
        count, length, _ = x.shape
        heads = self.project(self.before(x)).view(count, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, WIDTH))
        return x + self.feed(self.between(x))


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.ModuleDict(
        {
            "words": nn.Embedding(WORDS, WIDTH),
            "places": nn.Embedding(LONGEST, WIDTH),
            "blocks": nn.Sequential(Block(), Block()),
            "norm": nn.LayerNorm(WIDTH),
        }
    )
    for name in ("words", "places"):
        nn.init.normal_(network[name].weight, std=0.02)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)

    def batch(iteration: int) -> tuple[Tensor]:
        length = random.Random(seed * 1000 + iteration).randint(9, LONGEST)
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return (torch.randint(WORDS, (4, length + 1), generator=chance),)

    state = State(modules={"network": network}, optimizers={"adamw": optimizer}, batch=batch)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = network["words"](tokens[:, :-1]) + network["places"](torch.arange(tokens.shape[1] - 1))
        hidden = network["norm"](network["blocks"](hidden))
        logits = hidden @ network["words"].weight.T
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        state.effects.append((tokens.shape[1], schedule.get_last_lr()[0]))
        return loss.detach()

    return step, state
