"""Lower bounds that reports and the dashboard show, and best times over them."""

from __future__ import annotations

__all__ = ["shown_bound_us", "shown_ratio"]


def shown_bound_us(search_us: float | None, least_us: float | None, *, assumed: bool) -> float | None:
    """Return the lower bound to show, in microseconds; None if unknown, or if it rests on assumed rates.

    Args:
        search_us: Lower bound of all configurations of a search, in microseconds.
        least_us: Lowest lower bound of any measurement, in microseconds, for records without `search_us`.
        assumed: Whether the rates of the device are assumed.
    """
    return search_us if search_us is not None or assumed else least_us


def shown_ratio(best_us: float | None, bound_us: float | None, *, assumed: bool) -> float | None:
    """Return a best time over its lower bound; at least 1 at measured rates, which a kernel may beat.

    Args:
        best_us: The time, in microseconds.
        bound_us: The lower bound that is shown, in microseconds.
        assumed: Whether the rates of the device are assumed, so that the bound rests on measured ones.
    """
    if best_us is None or not bound_us:
        return None
    return max(1.0, best_us / bound_us) if assumed else best_us / bound_us
