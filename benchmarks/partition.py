"""CPU time and optimality gap of the partition into groups of minimal time.

    python -m benchmarks.partition [--limit SECONDS] [--seeds 3] [--kind unet] [--nodes 300]
    python -m benchmarks.partition --models

Graphs are synthetic, with the structure of models. Candidates are connected convex groups of 2 to 8 nodes,
grown at random from every node, with random costs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tunebench.graph._precedence import Precedence
from tunebench.graph.partition import LIMIT_S, Partition, PartitionCandidate, cheapest_partition

__all__ = ["KINDS", "PartitionCase", "case", "grown_group", "neighbours", "row"]

Graph = list[list[int]]
"""Immediate predecessors of nodes 0, 1, …"""


def chain(count: int) -> Graph:
    """Return a chain."""
    return [[node - 1] if node else [] for node in range(count)]


def tree(count: int) -> Graph:
    """Return a tree in which each node feeds two."""
    return [[(node - 1) // 2] if node else [] for node in range(count)]


def sums(count: int) -> Graph:
    """Return a tree in which each node reads two others."""
    last = count - 1
    return [
        [last - child for child in (2 * at + 1, 2 * at + 2) if child < count] for at in range(last, -1, -1)
    ]


def resnet(count: int) -> Graph:
    """Return residual blocks of three convolutions, each with normalisation and ReLU."""
    graph: Graph = [[]]
    while len(graph) < count:
        start = len(graph) - 1
        for _ in range(8):
            graph.append([len(graph) - 1])
        graph.append([len(graph) - 1, start])
        graph.append([len(graph) - 1])
    return graph


def unet(count: int) -> Graph:
    """Return a U-Net: levels of six nodes down and up again, with a concatenation across each level."""
    graph: Graph = [[]]
    skips = []
    for _ in range(count // 15):
        for _ in range(6):
            graph.append([len(graph) - 1])
        skips.append(len(graph) - 1)
        graph.append([len(graph) - 1])
    for skip in reversed(skips):
        graph.append([len(graph) - 1])
        graph.append([len(graph) - 1, skip])
        for _ in range(6):
            graph.append([len(graph) - 1])
    return graph


def training(count: int) -> Graph:
    """Return a chain and its gradients: each gradient reads the one before it and a result of the chain."""
    forward = chain(count // 2)
    graph = [*forward]
    for node in reversed(range(len(forward))):
        graph.append([len(graph) - 1, node])
    return graph


def inception(count: int) -> Graph:
    """Return blocks of four parallel branches of one to four nodes, joined by a node."""
    graph: Graph = [[]]
    while len(graph) < count:
        start, branch_ends = len(graph) - 1, []
        for length in (1, 2, 3, 4):
            graph.append([start])
            for _ in range(length - 1):
                graph.append([len(graph) - 1])
            branch_ends.append(len(graph) - 1)
        graph.append(branch_ends)
    return graph


def transformer(count: int) -> Graph:
    """Return transformer layers: attention with three projections, and two products, with residuals."""
    graph: Graph = [[]]
    while len(graph) < count:
        start = len(graph) - 1
        norm = start + 1
        graph += [[start], [norm], [norm], [norm], [norm + 1], [norm + 2], [norm + 3]]
        graph += [[norm + 4, norm + 5], [norm + 7], [norm + 8, norm + 6], [norm + 9], [norm + 10, start]]
        start = len(graph) - 1
        for _ in range(5):
            graph.append([len(graph) - 1])
        graph.append([len(graph) - 1, start])
    return graph


def grid(count: int) -> Graph:
    """Return a square in which each node reads those above and to the left: it has no small separator."""
    side = round(count**0.5)
    return [
        [node - 1 for _ in range(1) if node % side] + [node - side for _ in range(1) if node >= side]
        for node in range(side * side)
    ]


def branches(count: int) -> Graph:
    """Return two parallel chains; candidates hold nodes of both, so that many of them deadlock."""
    return [[node - 2] if node >= 2 else [] for node in range(count)]


KINDS: dict[str, Callable[[int], Graph]] = {
    kind.__name__: kind
    for kind in (chain, tree, sums, resnet, unet, training, inception, transformer, branches, grid)
}


@dataclass(frozen=True, slots=True)
class PartitionCase:
    """A graph and its candidates."""

    predecessors: Graph
    candidates: tuple[PartitionCandidate, ...]


def case(kind: str, count: int, seed: int, tries: int = 8, largest: int = 8) -> PartitionCase:
    """Return a synthetic graph with random candidates.

    Args:
        kind: A name of `KINDS`.
        count: Approximate number of nodes.
        seed: Seed of the random draws.
        tries: Candidates grown from each node.
        largest: Nodes of the largest candidate.
    """
    draw = random.Random(f"{kind} {count} {seed}")
    graph = KINDS[kind](count)
    near = neighbours(graph, across=kind == "branches")
    precedence = Precedence.of(graph)
    times_us = [draw.uniform(2, 20) for _ in graph]
    costs = {frozenset({node}): time_us for node, time_us in enumerate(times_us)}
    for node in range(len(graph)):
        for _ in range(tries):
            group = grown_group(near, node, draw.randint(2, largest), draw)
            if precedence.between(sum(1 << member for member in group)) is None:
                costs[group] = sum(times_us[member] for member in group) * draw.uniform(0.5, 1)
    return PartitionCase(
        graph, tuple(PartitionCandidate(nodes=nodes, cost_us=cost) for nodes, cost in costs.items())
    )


def neighbours(graph: Graph, *, across: bool) -> list[set[int]]:
    """Return the nodes next to each node; `across` adds those of the parallel chain."""
    near: list[set[int]] = [set(before) for before in graph]
    for node, before in enumerate(graph):
        for neighbour in before:
            near[neighbour].add(node)
        if across:
            near[node].update(
                neighbour
                for neighbour in (node - 3, node - 1, node + 1, node + 3)
                if 0 <= neighbour < len(graph)
            )
    return near


def grown_group(near: Sequence[set[int]], node: int, size: int, draw: random.Random) -> frozenset[int]:
    """Return a random connected group that contains a node."""
    group = {node}
    while len(group) < size:
        around = sorted(set().union(*(near[member] for member in group)) - group)
        if not around:
            break
        group.add(draw.choice(around))
    return frozenset(group)


def captured() -> Iterator[tuple[str, PartitionCase]]:
    """Yield models of full depth and small width with all their legal groups, at random costs."""
    import torch

    from benchmarks.torch_models import Bert, Gpt2, Resnet, Size
    from tunebench.graph.group import groups
    from tunebench.torch.compiler.capture import capture

    size = Size(width=32, heads=2, inner=64, words=64, longest=16)
    words = torch.zeros(2, 16, dtype=torch.long)
    images = torch.zeros(2, 3, 64, 64)
    models = {
        "ResNet-50": (Resnet(width=8), images),
        "GPT-2": (Gpt2(size), words),
        "BERT": (Bert(size), words),
    }
    for name, (model, inputs) in models.items():
        for training in (False, True):
            for step in capture(model, (inputs,), training=training):
                legal = [frozenset(group.nodes) for group in groups(step.graph)]
                graph = [list(before) for before in step.graph.predecessors]
                yield f"{name}, {step.graph.phase}", PartitionCase(graph, _priced(legal, len(graph)))


def _priced(legal: Sequence[frozenset[int]], count: int) -> tuple[PartitionCandidate, ...]:
    draw = random.Random(0)
    times_us = [draw.uniform(2, 20) for _ in range(count)]
    return tuple(
        PartitionCandidate(nodes=nodes, cost_us=sum(times_us[node] for node in nodes) * draw.uniform(0.5, 1))
        for nodes in legal
    )


def main() -> None:
    """Print a table of cuts, proofs, gap and CPU time of each kind of graph; the worst of the seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="time limit of a graph, in seconds")
    parser.add_argument("--seeds", type=int, default=3, help="graphs of each kind and size")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--nodes", type=int, action="append")
    parser.add_argument("--models", action="store_true", help="capture models of torch instead")
    options = parser.parse_args()
    print("| kind | nodes | candidates | deadlock cuts | proven optimal | gap | CPU s |")
    print("|---|---|---|---|---|---|---|")
    if options.models:
        for name, graph in captured():
            print(row(name, [graph], options.limit), flush=True)
        return
    for kind in options.kind or KINDS:
        for count in options.nodes or (50, 300, 3000):
            print(
                row(kind, [case(kind, count, seed) for seed in range(options.seeds)], options.limit),
                flush=True,
            )


def row(name: str, cases: Sequence[PartitionCase], limit_s: float) -> str:
    """Return the table row of some graphs."""
    partitions: list[Partition] = []
    took_s = []
    for graph in cases:
        began = time.process_time()
        partitions.append(cheapest_partition(graph.predecessors, graph.candidates, limit_s=limit_s))
        took_s.append(time.process_time() - began)
    nodes, candidates = len(cases[0].predecessors), max(len(graph.candidates) for graph in cases)
    exact = sum(partition.exact for partition in partitions)
    cuts, gap = (
        max(partition.cuts for partition in partitions),
        max(partition.gap for partition in partitions),
    )
    return (
        f"| {name} | {nodes} | {candidates:,} | {cuts} | {exact} of {len(cases)} | {gap:.2%} "
        f"| {max(took_s):.2f} |"
    )


if __name__ == "__main__":
    main()
