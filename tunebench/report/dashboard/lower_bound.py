"""Lower bounds that the dashboard shows, and best times over them, of workloads and of searches."""

from __future__ import annotations

from tunebench.db.browse import DeviceEntry

__all__ = ["shown_bound_us", "shown_ratio"]


def shown_bound_us(
    device: DeviceEntry | None, search_us: float | None, least_us: float | None
) -> float | None:
    """Return the lower bound to show, in microseconds; None if unknown, or if it rests on assumed rates.

    Args:
        device: The device; None if its row is missing.
        search_us: Lower bound of all configurations of a search, in microseconds.
        least_us: Lowest lower bound of any measurement, in microseconds, for records without `search_us`.
    """
    return search_us if search_us is not None or _has_assumed_rates(device) else least_us


def shown_ratio(device: DeviceEntry | None, best_us: float | None, bound_us: float | None) -> float | None:
    """Return a best time over its lower bound; at least 1 at measured rates, which a kernel may beat.

    Args:
        device: The device; None if its row is missing.
        best_us: The time, in microseconds.
        bound_us: The lower bound that is shown, in microseconds.
    """
    if best_us is None or not bound_us:
        return None
    return max(1.0, best_us / bound_us) if _has_assumed_rates(device) else best_us / bound_us


def _has_assumed_rates(device: DeviceEntry | None) -> bool:
    return device is not None and bool(device.descriptor.get("assumed"))
