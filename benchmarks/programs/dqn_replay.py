"""Deep Q-learning with a replay memory of Python tuples and a target network.

Source: Mnih et al., Human-Level Control through Deep Reinforcement Learning, Nature 518, 2015.
"""

from __future__ import annotations

import random
from collections import deque

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step
from benchmarks.programs.reinforce import Cart

WIDTH, COUNT, MOVES, DISCOUNT = 32, 12, 4, 0.99


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)
    )


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network, target = _network(), _network().requires_grad_(False)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.RMSprop(network.parameters(), lr=1e-3)
    chance = random.Random(seed)
    replay: deque[tuple[list[float], int, float, list[float], bool]] = deque(maxlen=200)
    cart = Cart(seed)

    def batch(iteration: int) -> tuple[int]:
        return (iteration,)

    state = State(
        modules={"network": network, "target": target}, optimizers={"rmsprop": optimizer}, batch=batch,
        memory={"cart": cart.values},
    )  # fmt: skip

    def play(iteration: int) -> None:
        nonlocal cart
        for move in range(MOVES):
            before = cart.values
            if chance.random() < max(0.1, 1 - iteration / 25):
                action = chance.randrange(2)
            else:
                with torch.no_grad():
                    action = int(network(torch.tensor([before])).argmax(1).item())
            stands = cart.move(action)
            replay.append((before, action, 1.0, cart.values, not stands))
            if not stands:
                cart = Cart(seed + iteration * MOVES + move)
        state.memory["cart"] = cart.values

    def step(iteration: int) -> Tensor:
        play(iteration)
        if len(replay) < COUNT:
            state.effects.append("fills the memory")
            return torch.zeros(())
        before, actions, rewards, after, ended = zip(*chance.sample(list(replay), COUNT), strict=True)
        values = network(torch.tensor(before)).gather(1, torch.tensor(actions).unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            later = target(torch.tensor(after)).max(1).values
            wanted = torch.tensor(rewards) + DISCOUNT * later * (~torch.tensor(ended))
        loss = functional.smooth_l1_loss(values, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(network.parameters(), 1.0)
        optimizer.step()
        if iteration % 10 == 0:
            target.load_state_dict(network.state_dict())
            state.effects.append(loss.item())
        return loss.detach()

    return step, state
