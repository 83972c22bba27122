"""Comparison of devices by the speed and the cost of the same work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunebench._figure import significant
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName

__all__ = ["ComparedDevice", "with_prices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedDevice:
    """One device of a comparison, or several of the same kind that share the work.

    Attributes:
        device: The device.
        time_us: Predicted time of the work.
        low_us: Lower end of the 90 % prediction interval.
        high_us: Upper end of the 90 % prediction interval.
        items: Tokens, samples or runs in the work.
        devices: Number of devices that share the work.
        price_per_hour: Price of one device for an hour, in any currency; None if unknown.
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
        """Throughput in items per second."""
        return self.items / self.time_us * 1e6

    def cost_per_million(self, time_us: float | None = None) -> float | None:
        """Return the cost of one million items; None without a price.

        Args:
            time_us: Time of the work; None for the predicted time.
        """
        if self.price_per_hour is None:
            return None
        hours = (self.time_us if time_us is None else time_us) / 3.6e9
        return hours * self.devices * self.price_per_hour / self.items * 1e6

    def speedup(self, first: ComparedDevice) -> float:
        """Return the throughput relative to that of another device."""
        return self.items_per_s / first.items_per_s


def with_prices(
    compared: Sequence[ComparedDevice], prices: Mapping[str, float]
) -> tuple[ComparedDevice, ...]:
    """Return the devices with their prices filled in.

    Args:
        compared: Devices of the comparison.
        prices: Price of one device for an hour, by device name.

    Raises:
        UnknownName: if a price names a device that is not compared.
        InputError: if a price is not positive.
    """
    names = {compared_device.device.name for compared_device in compared}
    for name, price in prices.items():
        if name not in names:
            raise UnknownName("device with a price", name, names)
        if not 0 < price < float("inf"):
            raise InputError(f"the price of {name} must be positive, got {significant(price, 6)}")
    return tuple(
        dataclasses.replace(compared_device, price_per_hour=prices.get(compared_device.device.name))
        for compared_device in compared
    )
