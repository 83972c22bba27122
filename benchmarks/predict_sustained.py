"""Predicted rates of products of random numbers at the power limit, next to published ones.

    python -m benchmarks.predict_sustained

The rows are in `benchmarks/sustained_products.toml`, with sources.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunebench import device as devices
from tunebench import workloads
from tunebench.device import Device
from tunebench.forecast.library import predict_all

FILE = Path(__file__).with_suffix("").with_name("sustained_products.toml")

BEST_SIZE = 8192
"""Size that a row with the best of several sizes is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedProduct:
    """A published rate of a product of random numbers.

    Attributes:
        device: The device.
        size: Rows and columns of all matrices; 0 if the rate is the best of several sizes.
        tflop_s: Published rate.
        fits: Whether the constant of the architecture follows from this row.
    """

    device: Device
    size: int
    tflop_s: float
    fits: bool

    def predicted_tflop_s(self, *, sustained: bool) -> float:
        """Return the predicted rate, at the power limit or as in a short measurement."""
        size = self.size or BEST_SIZE
        work = workloads.parse(f"gemm:m={size},n={size},k={size},dtype=bf16")
        (prediction,) = predict_all([work], self.device, sustained=sustained)
        return work.flops() / prediction.time_us / 1e6


def sustained_products() -> Iterator[SustainedProduct]:
    """Yield the published rates."""
    for name, size, tflop_s, fits, _ in tomllib.loads(FILE.read_text(encoding="utf-8"))["rows"]:
        yield SustainedProduct(device=devices.find(name), size=size, tflop_s=tflop_s, fits=fits)


def print_sustained() -> None:
    """Print each published rate next to the predicted ones."""
    print(
        "| device | power limit, W | size | published, TFLOP/s | short measurement | error | at the limit | "
        "error | constant from this row |\n|---|---|---|---|---|---|---|---|---|"
    )
    for published in sustained_products():
        cells = []
        for sustained in (False, True):
            tflop_s = published.predicted_tflop_s(sustained=sustained)
            cells.append(f"{tflop_s:.0f} | {tflop_s / published.tflop_s - 1:+.0%}")
        print(
            f"| {published.device.name} | {published.device.tdp_w:g} | {published.size or 'best'} "
            f"| {published.tflop_s:.0f} | "
            f"{' | '.join(cells)} | {'yes' if published.fits else ''} |"
        )


if __name__ == "__main__":
    print_sustained()
