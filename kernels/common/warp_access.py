"""Passes and sectors of one access by a warp, from the addresses of its lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

__all__ = ["LANES", "l1_passes", "sectors", "shared_passes"]

LANES = 32
BANKS = 32
LINE_WORDS, SECTOR_WORDS = 32, 8


def shared_passes(words: Words, width: int) -> int:
    """Return how often shared memory is passed for one access of a warp.

    Each bank transfers one word per pass. Lanes that access 8 or 16 bytes are served in halves or quarters of
    a warp. Two of these are merged where each lane has the address of a neighbour: lane ^ 1 or lane ^ 2.

    Args:
        words: First word, of 4 bytes, that each of the 32 lanes accesses.
        width: Words per lane: 1, 2 or 4.

    Source: CUDA C++ Programming Guide, "Shared Memory" (compute capability 5.x); answers of NVIDIA engineers
    on accesses of 8 and 16 bytes.
    """
    lane = np.arange(LANES)
    merged = any(bool((words == words[lane ^ step]).all()) for step in (1, 2))
    groups = max(1, width // 2) if merged else width
    return sum(_most_per_bank(group[:, None] + np.arange(width)) for group in np.split(words, groups))


def _most_per_bank(words: Words) -> int:
    return int(np.bincount(np.unique(words) % BANKS).max())


def l1_passes(words: Words, width: int) -> int:
    """Return how often L1 is passed for one load of a warp: once for each line of each group of lanes.

    Args:
        words: First word that each of the 32 lanes loads.
        width: Words per lane: 1, 2 or 4, for groups of 32, 16 or 8 lanes.
    """
    return sum(len(np.unique(group // LINE_WORDS)) for group in np.split(words, width))


def sectors(words: Words, width: int) -> int:
    """Return the sectors of 32 bytes that one access of a warp touches.

    Args:
        words: First word that each of the 32 lanes accesses.
        width: Words per lane.
    """
    touched: Any = words[:, None] + np.arange(width)
    return len(np.unique(touched // SECTOR_WORDS))
