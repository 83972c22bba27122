"""Passes through layers with transfers: the recurrence against a simulation of events, and known cases."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tunebench.errors import InputError
from tunebench.training.steps.layer_stream import LayerWork, stream_us

RESOURCES = ("nvme read", "to device", "network", "to host")


@dataclass(eq=False)
class Task:
    """Work of a resource; it starts at the head of its resource's queue, after the tasks that it needs."""

    resource: str
    us: float
    needs: list[Task]
    left_us: float = 0.0


def simulated_us(layers: list[LayerWork], depth: int) -> float:
    """Return the time of a pass by a simulation that advances from one event to the next."""
    queues: dict[str, list[Task]] = {}

    def issued(resource: str, us: float, needs: list[Task]) -> Task:
        task = Task(resource, us, needs, us)
        queues.setdefault(resource, []).append(task)
        return task

    def chained(chain: tuple[tuple[str, float], ...], needs: list[Task]) -> list[Task]:
        for resource, us in chain:
            needs = [issued(resource, us, needs)]
        return needs

    arrived = [chained(layer.before, []) for layer in layers[:depth]]
    finished: list[list[Task]] = []
    for index, layer in enumerate(layers):
        buffer = finished[index - depth] if index >= depth else []
        computed = issued("compute", layer.compute_us, [*arrived[index], *buffer])
        finished.append(chained(layer.after, [computed]))
        if index + depth < len(layers):
            arrived.append(chained(layers[index + depth].before, [computed]))
    done: set[Task] = set()
    now_us = 0.0
    while any(queues.values()):
        running = [queue[0] for queue in queues.values() if queue and done.issuperset(queue[0].needs)]
        assert running
        elapsed = min(task.left_us for task in running)
        now_us += elapsed
        for task in running:
            task.left_us -= elapsed
            if task.left_us <= 1e-12:
                done.add(queues[task.resource].pop(0))
    return now_us


@pytest.mark.parametrize("seed", range(40))
def test_recurrence_equals_a_simulation_of_events(seed: int) -> None:
    draw = random.Random(seed)

    def chain() -> tuple[tuple[str, float], ...]:
        used = draw.sample(RESOURCES, draw.randint(0, 4))
        return tuple((name, float(draw.randint(1, 9))) for name in used)

    layers = [LayerWork(float(draw.randint(1, 9)), chain(), chain()) for _ in range(draw.randint(1, 7))]
    for depth in (1, 2, 3):
        assert stream_us(layers, depth) == pytest.approx(simulated_us(layers, depth))
        busy = dict.fromkeys(RESOURCES, 0.0)
        for layer in layers:
            for name, us in (*layer.before, *layer.after):
                busy[name] += us
        assert stream_us(layers, depth) >= max(sum(layer.compute_us for layer in layers), *busy.values())


def test_prefetch_hides_transfers_behind_the_layer_before() -> None:
    layers = [LayerWork(10.0, (("network", 4.0),))] * 5
    assert stream_us(layers, 1) == 5 * 14
    assert stream_us(layers, 2) == 4 + 5 * 10
    slow = [LayerWork(4.0, (("network", 10.0),))] * 5
    assert stream_us(slow, 2) == 5 * 10 + 4


def test_results_leave_before_their_buffer_is_used_again() -> None:
    layers = [LayerWork(1.0, after=(("to host", 10.0),))] * 4
    assert stream_us(layers, 2) == 1 + 4 * 10
    assert stream_us(layers, 1) == 4 * 11
    with pytest.raises(InputError, match="at least 1"):
        stream_us(layers, 0)
