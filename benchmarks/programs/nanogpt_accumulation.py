"""nanoGPT with gradient accumulation, autocast, a gradient scaler, clipping and a warm-up of the rate.

Source: Karpathy, nanoGPT, train.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step
from benchmarks.programs.gpt2_lengths import Block

WIDTH, LENGTH, WORDS, MICRO_STEPS = 64, 32, 128, 4


class Decoder(nn.Module):
    """Decoder in the manner of GPT-2, from (N, L) tokens to (N, L, WORDS) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (N, L, WORDS) logits."""
        places = torch.arange(tokens.shape[1])
        hidden = self.norm(self.blocks(self.words(tokens) + self.places(places)))
        return functional.linear(hidden, self.words.weight)


def learning_rate(iteration: int) -> float:
    """Return the rate of an iteration: a linear warm-up, then a cosine."""
    if iteration < 5:
        return 1e-3 * (iteration + 1) / 5
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * min(1.0, (iteration - 5) / 95))) * 9e-4


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = Decoder()
    matrices = [value for value in network.parameters() if value.dim() >= 2]
    vectors = [value for value in network.parameters() if value.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=20)

    def batch(iteration: int) -> tuple[int, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return iteration, torch.randint(WORDS, (MICRO_STEPS, 4, LENGTH + 1), generator=chance)

    state = State(modules={"network": network}, optimizers={"adamw": optimizer}, batch=batch)

    def step(iteration: int, tokens: Tensor) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration)
        total = torch.zeros(())
        for micro in tokens:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = network(micro[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten()) / MICRO_STEPS
            total += loss.detach()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if iteration % 10 == 0:
            state.effects.append((iteration, total.item(), norm.item(), scaler.get_scale()))
        return total

    return step, state
