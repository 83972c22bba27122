"""The partition of minimal time: optimal against brute force, and an honest gap at a time limit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import partition as benchmark
from tunebench.errors import InputError
from tunebench.graph.partition import Partition, PartitionCandidate, cheapest_partition

pytest.importorskip("highspy", reason="the extra `torch` is not installed")

Graph = Sequence[Sequence[int]]


def candidate(cost_us: float, *nodes: int) -> PartitionCandidate:
    return PartitionCandidate(nodes=frozenset(nodes), cost_us=cost_us)


def alone(costs_us: Sequence[float]) -> list[PartitionCandidate]:
    return [candidate(cost_us, node) for node, cost_us in enumerate(costs_us)]


# -- brute force: every set of groups that covers the nodes, checked for deadlocks ---------------------------


def divisions(nodes: frozenset[int], candidates: Sequence[PartitionCandidate]) -> Iterator[list[int]]:
    """Yield all sets of candidates that contain every node exactly once."""
    if not nodes:
        yield []
        return
    for index, group in enumerate(candidates):
        if min(nodes) in group.nodes and group.nodes <= nodes:
            for rest in divisions(nodes - group.nodes, candidates):
                yield [index, *rest]


def can_run(graph: Graph, groups: Sequence[frozenset[int]]) -> bool:
    """Return whether groups can run in some order, by running every group that is ready."""
    done: set[int] = set()
    waiting = list(groups)
    while waiting:
        ready = [group for group in waiting if all(set(graph[node]) <= done | group for node in group)]
        if not ready:
            return False
        done.update(*ready)
        waiting = [group for group in waiting if group not in ready]
    return True


def is_convex(graph: Graph, group: frozenset[int]) -> bool:
    """Return whether a group is convex: whether it can run when all other nodes are alone."""
    single_nodes = [frozenset({node}) for node in range(len(graph)) if node not in group]
    return can_run(graph, [group, *single_nodes])


def worth(candidates: Sequence[PartitionCandidate], chosen: Sequence[int]) -> tuple[Fraction, int, int]:
    """Return the sort key of a partition: its exact cost, number of groups, and sum of indices."""
    return sum(Fraction(candidates[index].cost_us) for index in chosen), len(chosen), sum(chosen)


def best_of_all(
    graph: Graph, candidates: Sequence[PartitionCandidate], *, deadlocks: bool = False
) -> tuple[Fraction, int, int]:
    """Return the sort key of the best partition, with or without partitions that deadlock."""
    return min(
        worth(candidates, chosen)
        for chosen in divisions(frozenset(range(len(graph))), candidates)
        if deadlocks or can_run(graph, [candidates[index].nodes for index in chosen])
    )


# -- small graphs with random candidates ---------------------------------------------------------------------


def scattered(draw: random.Random) -> Graph:
    """Return a random graph whose nodes are not in topological order."""
    names = list(range(draw.randint(1, 9)))
    draw.shuffle(names)
    share = draw.choice([0.1, 0.2, 0.4])
    graph: list[list[int]] = [[] for _ in names]
    for later, name in enumerate(names):
        graph[name] = [names[earlier] for earlier in range(later) if draw.random() < share]
    return graph


def chain(draw: random.Random) -> Graph:
    return [[node - 1] if node else [] for node in range(draw.randint(1, 9))]


def tree(draw: random.Random) -> Graph:
    return [[draw.randrange(node)] if node else [] for node in range(draw.randint(2, 9))]


def diamonds(draw: random.Random) -> Graph:
    """Return two diamonds, one after the other."""
    return [[], [0], [0], [1, 2], [3], [3], [4, 5]][: draw.randint(4, 7)]


def abreast(draw: random.Random) -> Graph:
    """Return two parallel chains: groups that contain nodes of both often deadlock."""
    return [[node - 2] if node >= 2 else [] for node in range(draw.randint(4, 9))]


KINDS: Sequence[Callable[[random.Random], Graph]] = (scattered, chain, tree, diamonds, abreast)


def groups_of(graph: Graph, draw: random.Random) -> list[PartitionCandidate]:
    """Return single nodes and random convex groups of up to five nodes, in any order, connected or not."""
    cost = draw.choice([lambda size: draw.choice([1.0, 2.0]), lambda size: size**0.5 * draw.uniform(0.1, 3)])
    candidates = alone([cost(1) for _ in graph])
    for _ in range(draw.randint(0, 25)):
        nodes = frozenset(draw.sample(range(len(graph)), min(len(graph), draw.randint(1, 5))))
        if is_convex(graph, nodes):
            candidates.append(candidate(cost(len(nodes)), *nodes))
    draw.shuffle(candidates)
    return candidates


CASES = 120
"""Graphs of each kind."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_partition_equals_brute_force(kind: Callable[[random.Random], Graph]) -> None:
    draw = random.Random(kind.__name__)
    deadlocked = 0
    for _ in range(CASES):
        graph = kind(draw)
        candidates = groups_of(graph, draw)
        best = best_of_all(graph, candidates)
        deadlocked += best != best_of_all(graph, candidates, deadlocks=True)
        partition = cheapest_partition(graph, candidates)
        assert worth(candidates, partition.chosen) == best
        assert partition.exact
        assert partition.cost_us == partition.lower_us == float(best[0])
        assert_runs_in_order(graph, candidates, partition)
        assert_valid(graph, candidates, cheapest_partition(graph, candidates, limit_s=0), best[0])
    assert deadlocked >= {"scattered": 3, "abreast": 5}.get(kind.__name__, 0)


@pytest.mark.parametrize("kind", [scattered, abreast], ids=lambda kind: kind.__name__)
def test_partition_equals_brute_force_on_more_graphs_that_deadlock(
    kind: Callable[[random.Random], Graph],
) -> None:
    draw = random.Random(f"{kind.__name__}, short")
    for _ in range(CASES):
        graph = kind(draw)
        candidates = groups_of(graph, draw)
        best = best_of_all(graph, candidates)
        assert worth(candidates, cheapest_partition(graph, candidates).chosen) == best


def assert_runs_in_order(
    graph: Graph, candidates: Sequence[PartitionCandidate], partition: Partition
) -> None:
    """Assert that each node is in one group, and that every group runs after the groups it reads."""
    done: set[int] = set()
    for index in partition.chosen:
        nodes = candidates[index].nodes
        assert not nodes & done
        assert all(set(graph[node]) <= done | nodes for node in nodes)
        done |= nodes
    assert done == set(range(len(graph)))


def assert_valid(
    graph: Graph, candidates: Sequence[PartitionCandidate], partition: Partition, best: Fraction
) -> None:
    """Assert that cost and lower bound are true, whether or not the partition is optimal."""
    cost = worth(candidates, partition.chosen)[0]
    assert partition.cost_us == float(cost)
    assert partition.lower_us <= float(best) <= partition.cost_us
    assert partition.exact == (partition.lower_us == partition.cost_us)
    assert partition.gap >= 0
    assert_runs_in_order(graph, candidates, partition)


@pytest.mark.parametrize(("kind", "count"), [("inception", 60), ("branches", 150), ("grid", 400)])
def test_time_limit_leaves_a_valid_gap(kind: str, count: int) -> None:
    case = benchmark.case(kind, count, 0)
    exact = cheapest_partition(case.predecessors, case.candidates)
    assert exact.exact
    for limit_s in (0, 1e-3, 1e-2):
        partition = cheapest_partition(case.predecessors, case.candidates, limit_s=limit_s)
        assert_valid(case.predecessors, case.candidates, partition, Fraction(exact.cost_us))
    assert cheapest_partition(case.predecessors, case.candidates, limit_s=0).gap > 0


def test_groups_that_deadlock_are_not_both_chosen() -> None:
    graph = [[], [], [0], [1]]  # 0 -> 2 and 1 -> 3
    crossed = [*alone([5, 5, 5, 5]), candidate(1, 0, 3), candidate(2, 1, 2)]
    partition = cheapest_partition(graph, crossed)
    assert (set(partition.chosen), partition.cost_us) == ({4, 1, 2}, 11)
    assert partition.chosen == (1, 4, 2)
    assert partition.exact


def test_longer_cycles_of_groups_are_not_chosen() -> None:
    graph = [[], [], [], [0], [1], [2]]  # 0 -> 3, 1 -> 4, 2 -> 5
    circle = [candidate(1, 0, 4), candidate(2, 1, 5), candidate(3, 2, 3)]
    partition = cheapest_partition(graph, [*alone([9] * 6), *circle])
    assert partition.cost_us == 1 + 2 + 9 + 9
    assert partition.exact


def test_group_that_contains_a_whole_cycle_is_chosen() -> None:
    graph = [[], [], [0], [1]]
    crossed = [*alone([5, 5, 5, 5]), candidate(1, 0, 3), candidate(2, 1, 2), candidate(4, 0, 1, 2, 3)]
    assert cheapest_partition(graph, crossed).chosen == (6,)


def test_groups_deadlock_through_nodes_between_them() -> None:
    graph = [[], [], [0], [2], [3], [1], [5], [6]]  # 0 -> 2 -> 3 -> 4 and 1 -> 5 -> 6 -> 7
    partition = cheapest_partition(graph, [*alone([3] * 8), candidate(1, 0, 7), candidate(1, 1, 4)])
    assert partition.cost_us == 1 + 3 * 6
    assert partition.exact


def test_long_chain_is_optimal() -> None:
    draw = random.Random(0)
    count = 1000
    costs = {(start, size): draw.uniform(1, 3) * size for start in range(count) for size in (1, 2, 3, 5, 8)}
    costs = {(start, size): cost for (start, size), cost in costs.items() if start + size <= count}
    candidates = [candidate(cost, *range(start, start + size)) for (start, size), cost in costs.items()]
    partition = cheapest_partition(chain_of(count), candidates)
    best = [Fraction(0)]  # of the first nodes
    for end in range(1, count + 1):
        sizes = [size for size in (1, 2, 3, 5, 8) if size <= end]
        best.append(min(best[end - size] + Fraction(costs[end - size, size]) for size in sizes))
    assert partition.exact
    assert partition.cost_us == float(best[-1])


def chain_of(count: int) -> Graph:
    return [[node - 1] if node else [] for node in range(count)]


@pytest.mark.parametrize("shape", ["binary", "random", "star", "caterpillar"])
def test_tree_of_any_shape_is_optimal(shape: str) -> None:
    draw = random.Random(shape)
    graph = tree_of(shape, 300, draw)
    near = benchmark.neighbours([list(before) for before in graph], across=False)
    candidates = alone([draw.uniform(1, 5) for _ in graph])
    for node in range(len(graph)):
        for _ in range(4):
            nodes = benchmark.grown_group(near, node, draw.randint(2, 6), draw)
            candidates.append(candidate(len(nodes) * draw.uniform(0.5, 4), *nodes))
    partition = cheapest_partition(graph, candidates)
    assert partition.exact
    assert partition.cost_us == float(best_of_tree(graph, candidates))


def tree_of(shape: str, count: int, draw: random.Random) -> Graph:
    before = {
        "binary": lambda node: (node - 1) // 2,
        "random": draw.randrange,
        "star": lambda node: 0,
        "caterpillar": lambda node: (node - 1) // 2 * 2,
    }[shape]
    return [[before(node)] if node else [] for node in range(count)]


def best_of_tree(graph: Graph, candidates: Sequence[PartitionCandidate]) -> Fraction:
    """Return the minimal cost of a tree whose nodes follow their parents, by dynamic programming."""
    children: list[list[int]] = [[] for _ in graph]
    for node, before in enumerate(graph):
        for parent in before:
            children[parent].append(node)
    best: dict[int, Fraction] = {}
    tops: dict[int, list[PartitionCandidate]] = {}
    for group in candidates:
        tops.setdefault(min(group.nodes), []).append(group)
    for node in reversed(range(len(graph))):
        best[node] = min(
            Fraction(group.cost_us)
            + sum(
                best[child]
                for member in group.nodes
                for child in children[member]
                if child not in group.nodes
            )
            for group in tops[node]
        )
    return best[0]


@pytest.mark.parametrize("kind", ["resnet", "unet", "training"])
def test_model_of_a_thousand_nodes_is_optimal(kind: str) -> None:
    case = benchmark.case(kind, 1000, 0)
    partition = cheapest_partition(case.predecessors, case.candidates)
    assert partition.exact
    assert_runs_in_order(case.predecessors, case.candidates, partition)


def test_ties_go_to_fewer_groups_then_to_earlier_candidates() -> None:
    graph = chain_of(4)
    pairs = [candidate(2, 2, 3), candidate(2, 1, 2), candidate(2, 0, 1)]
    assert set(cheapest_partition(graph, [*alone([1, 1, 1, 1]), *pairs]).chosen) == {6, 4}
    first, last = [candidate(1, 0), candidate(1, 1, 2)], [candidate(1, 2), candidate(1, 0, 1)]
    middle = candidate(9, 1)
    assert cheapest_partition(chain_of(3), [*first, *last, middle]).chosen == (0, 1)
    assert cheapest_partition(chain_of(3), [*last, *first, middle]).chosen == (1, 0)


def test_cheapest_of_candidates_with_the_same_nodes_is_chosen() -> None:
    same = [candidate(4, 0, 1), candidate(3, 0, 1), candidate(3, 1, 0)]
    assert cheapest_partition([[], [0]], [*alone([2, 2]), *same]).chosen == (3,)


def test_cost_is_the_exact_sum_rounded_once() -> None:
    costs = [1e16, 1.0, 1.0]  # 1e16 + 1 + 1 in floats is 1e16 when added from the left
    partition = cheapest_partition(chain_of(3), alone(costs))
    assert (partition.chosen, partition.cost_us) == ((0, 1, 2), 1e16 + 2)
    partition = cheapest_partition(chain_of(3), [*alone(costs), candidate(1e16, 0, 1)])
    assert (partition.chosen, partition.cost_us) == ((3, 2), 1e16)
    partition = cheapest_partition(chain_of(2), [*alone([1e300, 5e-324]), candidate(0.0, 0, 1)])
    assert (partition.cost_us, partition.gap, partition.exact) == (0.0, 0.0, True)


def test_gap_over_lower_bound_zero_is_infinite() -> None:
    assert Partition(chosen=(0,), cost_us=1.0, lower_us=0.0, cuts=0).gap == math.inf
    assert Partition(chosen=(0,), cost_us=6.0, lower_us=5.0, cuts=0).gap == pytest.approx(0.2)


def test_graph_without_nodes_has_empty_partition() -> None:
    partition = cheapest_partition([], [])
    assert (partition.chosen, partition.cost_us, partition.gap) == ((), 0.0, 0.0)


@pytest.mark.parametrize(
    ("graph", "candidates", "says"),
    [
        ([[], [0]], alone([1]), "node 1 has none"),
        ([[1], [0]], alone([1, 1]), "acyclic graph, but node 0 is on a cycle"),
        ([[0]], alone([1]), "acyclic graph, but node 0 is on a cycle"),
        ([[], [2]], alone([1, 1]), "node 1 has predecessor 2; nodes are 0 to 1"),
        ([[]], [*alone([1]), candidate(1)], "candidate 1 () must have nodes of the graph"),
        ([[]], [*alone([1]), candidate(1, 0, 1)], "must have nodes of the graph, which are 0 to 0"),
        ([[]], alone([-1]), "a finite cost of 0 or more, got -1"),
        ([[]], alone([math.nan]), "a finite cost of 0 or more, got nan"),
        ([[]], alone([math.inf]), "a finite cost of 0 or more, got inf"),
        ([[], []], alone([1e308, 1e308]), "a finite sum"),
        (chain_of(3), [*alone([1, 1, 1]), candidate(1, 0, 2)], "(0, 2) is not convex: a path"),
        (chain_of(3), [*alone([1, 1, 1]), candidate(1, 0, 2)], "between its nodes passes through node 1"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused(graph: Graph, candidates: list[PartitionCandidate], says: str) -> None:
    with pytest.raises(InputError) as refused:
        cheapest_partition(graph, candidates)
    assert says in str(refused.value)


def test_negative_time_limit_is_refused() -> None:
    with pytest.raises(InputError, match="limit_s must be 0 or more seconds, got -1"):
        cheapest_partition([[]], alone([1]), limit_s=-1)


@given(st.randoms(use_true_random=False))
def test_cost_does_not_depend_on_node_numbers_or_candidate_order(draw: random.Random) -> None:
    kind = draw.choice(["branches", "inception", "transformer", "grid"])
    case = benchmark.case(kind, draw.randint(10, 25), draw.randint(0, 10**6), tries=4, largest=4)
    partition = cheapest_partition(case.predecessors, case.candidates)
    names = list(range(len(case.predecessors)))
    draw.shuffle(names)
    graph: list[list[int]] = [[] for _ in names]
    for node, before in enumerate(case.predecessors):
        graph[names[node]] = [names[predecessor] for predecessor in before]
    renamed = [candidate(group.cost_us, *(names[node] for node in group.nodes)) for group in case.candidates]
    draw.shuffle(renamed)
    renumbered = cheapest_partition(graph, renamed)
    assert (renumbered.cost_us, renumbered.lower_us, len(renumbered.chosen)) == (
        partition.cost_us,
        partition.lower_us,
        len(partition.chosen),
    )
    assert_runs_in_order(graph, renamed, renumbered)


def test_same_input_gives_same_partition() -> None:
    case = benchmark.case("branches", 120, 0)
    once, repeated = (cheapest_partition(case.predecessors, case.candidates) for _ in range(2))
    assert once == repeated


def test_benchmark_row_shows_proof_and_gap() -> None:
    cases = [benchmark.case("unet", 50, seed) for seed in range(2)]
    line = benchmark.row("unet", cases, 10.0)
    assert line.startswith("| unet | 46 | ")
    assert "| 2 of 2 | 0.00% |" in line
