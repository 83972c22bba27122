"""Prices of nodes, such that no group costs less than its nodes' prices: no cover costs less than all.

Such prices solve the dual of the linear programme of exact covers, well or badly: the higher their sum, the
fewer rows a search must keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunebench.graph._elimination import Group

__all__ = ["Prices", "by_descent", "by_order"]

Prices = dict[int, int]
"""The price of each node, a whole number, of either sign."""

_PARTS = 2**40


def by_order(groups: Sequence[Group], order: Sequence[int]) -> Prices:
    """Return the best of a few quick prices.

    Args:
        groups: Among them one for each node alone.
        order: Nodes in the order of their elimination. Prices given in that order are the best there are
            for chains and trees (for a chain they are the differences of the costs of its beginnings).
    """
    shares, ordered = _shares(groups), _in_order(groups, order)
    between = {node: (shares[node] + ordered[node]) // 2 for node in order}
    found = [_fitted(groups, prices, order) for prices in (shares, ordered, between)]
    return max(found, key=lambda prices: sum(prices.values()))


def by_descent(groups: Sequence[Group], prices: Prices, target: int, rounds: int) -> Prices:
    """Return prices of a higher sum, if so many rounds of subgradient descent find some.

    Prices rise where nodes are in no group that costs less than its nodes' prices, and fall where they are in
    several. All is counted in whole parts of the target, so that machines agree.

    Source: Held, Wolfe and Crowder, "Validation of subgradient optimization", 1974.

    Args:
        groups: Among them one for each node alone.
        prices: Where to begin.
        target: What the best known cover costs.
        rounds: How often all groups are looked at.
    """
    weights = [(group.weight * _PARTS // target, group.members) for group in groups if group.weight <= target]
    point = {node: max(-target, min(target, price)) * _PARTS // target for node, price in prices.items()}
    best, best_point, step, stalled = -_PARTS, point, 1024, 0
    for _ in range(rounds):
        value, uncovered = _relaxed(weights, point)
        if value > best:
            best, best_point, stalled = value, point, 0
        else:
            stalled += 1
            if stalled == 5:
                step, stalled = step * 7 // 10, 0
        square = sum([count * count for count in uncovered.values()])
        if not square or value >= _PARTS:
            break
        size = step * (_PARTS - value) // (1024 * square)
        point = {node: price + size * uncovered[node] for node, price in point.items()}
    found = {node: price * target // _PARTS for node, price in best_point.items()}
    found = _fitted(groups, found, list(prices))
    return max(prices, found, key=lambda each: sum(each.values()))


def _relaxed(weights: Sequence[tuple[int, tuple[int, ...]]], prices: Prices) -> tuple[int, Prices]:
    """Return a lower bound by prices that groups may be below, and how many groups each node lacks."""
    value, lacking = sum(prices.values()), dict.fromkeys(prices, 1)
    for weight, nodes in weights:
        left = weight - sum([prices[node] for node in nodes])
        if left < 0:
            value += left
            for node in nodes:
                lacking[node] -= 1
    return value, lacking


def _shares(groups: Sequence[Group]) -> Prices:
    """Price a node by its least share of a group that holds it."""
    prices: Prices = {}
    for group in groups:
        share = group.weight // len(group.members)
        for node in group.members:
            prices[node] = min(share, prices.get(node, share))
    return prices


def _in_order(groups: Sequence[Group], order: Sequence[int]) -> Prices:
    """Price a node by the least that groups of which it is the last leave to it."""
    rank = {node: place for place, node in enumerate(order)}
    ending: dict[int, list[tuple[int, list[int]]]] = {}
    for group in groups:
        *rest, last = sorted(group.members, key=rank.__getitem__)
        ending.setdefault(last, []).append((group.weight, rest))
    prices: Prices = {}
    for node in order:
        prices[node] = min(weight - sum([prices[other] for other in rest]) for weight, rest in ending[node])
    return prices


def _fitted(groups: Sequence[Group], prices: Mapping[int, int], order: Sequence[int]) -> Prices:
    """Raise or lower prices, one after the other, by what the groups of a node leave."""
    fitted = dict(prices)
    holding: dict[int, list[int]] = {node: [] for node in order}
    left = []
    for place, group in enumerate(groups):
        left.append(group.weight - sum([prices[node] for node in group.members]))
        for node in group.members:
            holding[node].append(place)
    for node in order:
        more = min([left[place] for place in holding[node]])
        if more:
            fitted[node] += more
            for place in holding[node]:
                left[place] -= more
    return fitted
