"""Encoder that classifies sequences and computes the F1 score of every step with scikit-learn."""

from __future__ import annotations

import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

WIDTH, LENGTH, WORDS = 64, 24, 100


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.1, activation="gelu", batch_first=True)
        for _ in range(2)
    ]
    network = nn.ModuleDict(
        {
            "words": nn.Embedding(WORDS, WIDTH),
            "places": nn.Embedding(LENGTH, WIDTH),
            "encoder": nn.Sequential(*layers),
            "head": nn.Linear(WIDTH, 3),
        }
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        tokens = torch.randint(WORDS, (8, LENGTH), generator=chance)
        return tokens, tokens[:, 0] % 3

    state = State(modules={"network": network}, optimizers={"adamw": optimizer}, batch=batch)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = network["words"](tokens) + network["places"](torch.arange(tokens.shape[1]))
        logits = network["head"](network["encoder"](hidden)[:, 0])
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        score = f1_score(labels.numpy(), logits.argmax(-1).numpy(), average="macro", zero_division=0)
        state.effects.append(float(score))
        print(f"f1 {score:.3f} norm {float(norm):.3f}")
        return loss.detach()

    return step, state
