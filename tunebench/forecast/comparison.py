"""Devices side by side: how fast each does the same work, and what that costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunebench.device import Device
from tunebench.errors import InputError, UnknownName

__all__ = ["ComparedDevice", "with_prices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedDevice:
    """One of the devices that are compared, or several alike that do the work together.

    Attributes:
        device: The device.
        time_us: Expected time of the work.
        low_us: Nine of ten real times lie between this and `high_us`.
        high_us: The other end.
        items: Tokens, samples or runs that the work makes.
        devices: How many of the device do it together.
        price_per_hour: Of one device, in any currency; None where it was not given.
    """

    device: Device
    time_us: float
    low_us: float
    high_us: float
    items: int
    devices: int = 1
    price_per_hour: float | None = None

    @property
    def items_per_s(self) -> float:
        """Items that are made in a second."""
        return self.items / self.time_us * 1e6

    def cost_per_million(self, time_us: float | None = None) -> float | None:
        """Return what a million items cost, at the expected time or another; None without a price."""
        if self.price_per_hour is None:
            return None
        hours = (self.time_us if time_us is None else time_us) / 3.6e9
        return hours * self.devices * self.price_per_hour / self.items * 1e6

    def speedup(self, first: ComparedDevice) -> float:
        """Return how many times as many items a second it makes as another."""
        return self.items_per_s / first.items_per_s


def with_prices(
    compared: Sequence[ComparedDevice], prices: Mapping[str, float]
) -> tuple[ComparedDevice, ...]:
    """Return contenders with the prices that are given, by the name of a device.

    Raises:
        UnknownName: if a price is of none of them.
        InputError: if a price is not positive.
    """
    names = {each.device.name for each in compared}
    for name, price in prices.items():
        if name not in names:
            raise UnknownName("device with a price", name, names)
        if not 0 < price < float("inf"):
            raise InputError(f"the price of {name} must be positive, got {price:g}")
    return tuple(dataclasses.replace(each, price_per_hour=prices.get(each.device.name)) for each in compared)
