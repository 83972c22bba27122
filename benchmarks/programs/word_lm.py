"""Language model of words with an LSTM whose hidden state is carried from step to step.

Source: PyTorch examples, word_language_model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

WORDS, WIDTH, LENGTH, COUNT = 100, 48, 12, 8


class Model(nn.Module):
    """Embedding, LSTM and output layer, from (L, N) words to (L, N, WORDS) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.2)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2)
        self.out = nn.Linear(WIDTH, WORDS)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def forward(self, words: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return logits, and the hidden state after the last word."""
        output, hidden = self.lstm(self.drop(self.words(words)), hidden)
        return self.out(self.drop(output)), hidden


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = Model()
    text = torch.randint(WORDS, (LENGTH * 10 + 1, COUNT), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        first = iteration % 10 * LENGTH
        return text[first : first + LENGTH], text[first + 1 : first + LENGTH + 1]

    carried = torch.zeros(2, COUNT, WIDTH), torch.zeros(2, COUNT, WIDTH)
    state = State(modules={"network": network}, optimizers={"sgd": optimizer}, batch=batch)

    def step(words: Tensor, following: Tensor) -> Tensor:
        nonlocal carried
        short, long = (part.detach() for part in carried)
        optimizer.zero_grad()
        logits, carried = network(words, (short, long))
        loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.25)
        optimizer.step()
        state.effects.append(math.exp(loss.item()))
        return loss.detach()

    return step, state
