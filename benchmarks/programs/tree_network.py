"""Recursive network over random binary trees, a different tree for every sample.

Source: Socher et al., Recursive Deep Models for Semantic Compositionality, EMNLP 2013.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

WIDTH, WORDS = 32, 50

Tree = Any
"""A word (int), or a pair of trees."""


def grow(chance: random.Random, leaves: int) -> Tree:
    """Return a random tree with a number of leaves."""
    if leaves == 1:
        return chance.randrange(WORDS)
    left_leaves = chance.randint(1, leaves - 1)
    return grow(chance, left_leaves), grow(chance, leaves - left_leaves)


def leaves_of(tree: Tree) -> list[int]:
    """Return the words of a tree, from left to right."""
    return [tree] if isinstance(tree, int) else leaves_of(tree[0]) + leaves_of(tree[1])


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.ModuleDict(
        {
            "words": nn.Embedding(WORDS, WIDTH),
            "join": nn.Linear(2 * WIDTH, WIDTH),
            "head": nn.Linear(WIDTH, 2),
        }
    )
    optimizer = torch.optim.Adagrad(network.parameters(), lr=0.05)

    def batch(iteration: int) -> tuple[list[Tree]]:
        chance = random.Random(seed * 1000 + iteration)
        return ([grow(chance, chance.randint(2, 7)) for _ in range(4)],)

    state = State(modules={"network": network}, optimizers={"adagrad": optimizer}, batch=batch)

    def embed(tree: Tree) -> Tensor:
        if isinstance(tree, int):
            vector: Tensor = network["words"](torch.tensor(tree))
            return vector
        return torch.tanh(network["join"](torch.cat([embed(tree[0]), embed(tree[1])])))

    def step(trees: list[Tree]) -> Tensor:
        optimizer.zero_grad()
        scores = torch.stack([network["head"](embed(tree)) for tree in trees])
        labels = torch.tensor([sum(leaves_of(tree)) % 2 for tree in trees])
        loss = functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        state.effects.append([len(leaves_of(tree)) for tree in trees])
        return loss.detach()

    return step, state
