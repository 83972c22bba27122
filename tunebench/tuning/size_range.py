"""Size ranges: `gemm:m=1..8192,n=4096,k=4096,dtype=f16` means one workload per size.

A range contains both ends and the powers of two between them. Lookups of sizes between two of them return the
best configuration of the nearest (see `tunebench.answer`).
"""

from __future__ import annotations

import itertools
import math
import re

from tunebench.errors import InputError
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["MOST", "is_size_range", "parse_size_range"]

MOST = 256
"""Limit on the number of workloads of one text."""

_RANGE = re.compile(r"(?<==)(\d+)\.\.(\d+)(?=,|$)")


def is_size_range(text: str) -> bool:
    """Return whether the text of a workload has a size range."""
    return _RANGE.search(text) is not None


def parse_size_range(text: str) -> tuple[Workload, ...]:
    """Return the workloads of a text with size ranges: the ends of each range first, then ever finer sizes.

    Args:
        text: A workload in which sizes may be ranges, ``low..high``, both ends included.

    Raises:
        InputError: if a range is empty, a workload is invalid, or there are more than `MOST`.
    """
    ranges = [(int(low), int(high)) for low, high in _RANGE.findall(text)]
    for low, high in ranges:
        if not 1 <= low <= high:
            raise InputError(f"{text}: a range needs 1 <= low <= high, such as 1..8192; got {low}..{high}")
    sizes = [_coarse_first(_sizes(low, high)) for low, high in ranges]
    count = math.prod(map(len, sizes))
    if count > MOST:
        raise InputError(f"{text} has {count} workloads; the limit is {MOST}: narrow a range")
    form = _RANGE.sub("{}", text.replace("{", "{{").replace("}", "}}"))
    return tuple(dict.fromkeys(parse(form.format(*chosen)) for chosen in itertools.product(*sizes)))


def _sizes(low: int, high: int) -> list[int]:
    powers = (1 << exponent for exponent in range(low.bit_length(), high.bit_length()))
    return sorted({low, *(power for power in powers if low < power < high), high})


def _coarse_first(sizes: list[int]) -> list[int]:
    """Return sizes with both ends first, then the middle, the quarters and so on: any prefix covers all."""
    ordered, gaps = [sizes[-1], sizes[0]], [(0, len(sizes) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            ordered.append(sizes[middle])
            gaps += [(low, middle), (middle, high)]
    return list(dict.fromkeys(ordered))
