"""Sampling of run times: when to stop.

Source: the stopping rules follow NVBench (NVIDIA, "NVBench: benchmark options", criterion `stdrel`): a
minimum of samples, then until the relative standard error has settled or time is up.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunebench.errors import InputError
from tunebench.outcome import CacheState, median_interval

__all__ = ["Protocol", "Samples", "collect", "is_precise", "median_interval"]


PATIENCE = 4.0
"""Wall time after which no further sample is started, as a multiple of `Protocol.max_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How samples are taken.

    Attributes:
        cache: Whether the last-level cache is flushed before each sample.
        warmups: Runs before the first sample.
        min_samples: Minimum number of samples.
        max_samples: Maximum number of samples.
        max_s: Time in seconds after which no further sample is started.
        relative_error: Standard error of the mean, relative to the mean, at which sampling stops.
        abort_after: Number of samples after which a hopeless configuration is aborted.
        abort_factor: A configuration is hopeless if its fastest sample exceeds this many times the incumbent.
    """

    cache: CacheState = "cold"
    warmups: int = 1
    min_samples: int = 10
    max_samples: int = 100
    max_s: float = 1.0
    relative_error: float = 0.005
    abort_after: int = 2
    abort_factor: float = 1.5

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.max_samples:
            raise InputError(
                f"expected 1 <= min_samples <= max_samples, got {self.min_samples} and {self.max_samples}"
            )
        if self.abort_factor < 1 or self.abort_after < 1:
            raise InputError("abort_factor and abort_after must be at least 1")


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of one configuration.

    Attributes:
        samples_us: Times of single runs, in microseconds.
        hopeless: Whether sampling was aborted because the incumbent is much faster.
    """

    samples_us: tuple[float, ...]
    hopeless: bool = False


def collect(
    sample_us: Callable[[], float],
    protocol: Protocol,
    *,
    abort_above_us: float | None = None,
    seconds: Callable[[], float] = time.monotonic,
) -> Samples:
    """Take samples until the protocol's stopping rule holds.

    Args:
        sample_us: Runs once and returns its time in microseconds.
        protocol: When to stop.
        abort_above_us: Median of the incumbent in microseconds; None never aborts.
        seconds: Clock of `Protocol.max_s`. By the processor time of this thread, a busy machine gets as many
            samples as a quiet one, within `PATIENCE` times as long.
    """
    for _ in range(protocol.warmups):
        sample_us()
    samples: list[float] = []
    end, latest = seconds() + protocol.max_s, time.monotonic() + PATIENCE * protocol.max_s
    while len(samples) < protocol.max_samples:
        samples.append(sample_us())
        if len(samples) == protocol.abort_after and _hopeless(samples, protocol, abort_above_us):
            return Samples(tuple(samples), hopeless=True)
        if len(samples) >= protocol.min_samples and (
            seconds() >= end or time.monotonic() >= latest or is_precise(samples, protocol)
        ):
            break
    return Samples(tuple(samples))


def _hopeless(samples: Sequence[float], protocol: Protocol, incumbent_us: float | None) -> bool:
    return incumbent_us is not None and min(samples) > protocol.abort_factor * incumbent_us


def is_precise(samples_us: Sequence[float], protocol: Protocol) -> bool:
    """Return whether the standard error of samples is small enough for a protocol.

    Args:
        samples_us: The samples, in microseconds.
        protocol: How samples are taken.
    """
    return _standard_error(samples_us) <= protocol.relative_error


def _standard_error(samples: Sequence[float]) -> float:
    """Return the standard error of the mean, relative to it; infinite of one sample or no positive mean."""
    if len(samples) < 2 or statistics.fmean(samples) <= 0:
        return math.inf
    return statistics.stdev(samples) / math.sqrt(len(samples)) / statistics.fmean(samples)
