"""Notes that ptxas prints beside its errors, and what they mean for the time of a kernel.

ptxas compiles a kernel whose asynchronous products it cannot overlap, or whose registers it cannot move, and
prints a note. The numbers of the notes differ between versions of ptxas: the text decides.
"""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["PtxasVerdict", "objections", "ptxas_notes", "verdict"]

PtxasVerdict = Literal["harmless", "costly", "unknown"]

_NOTE = re.compile(r"^.*?(\(C\d+\).*|Potential Performance Loss:.*)$", re.MULTILINE)
_PLACE = re.compile(r"(?: around)? (?:in )?line \d+| in (?:the )?function '[^']*'| in around line \d+")

_VERDICTS: tuple[tuple[str, PtxasVerdict], ...] = (
    # Every product is waited for before the next instruction: nothing overlaps.
    ("wgmma.mma_async instructions are serialized", "costly"),
    # Consumers get no more registers than they were launched with.
    ("'setmaxnreg' ignored", "costly"),
    # A wait that the kernel does not have may stand before the work that should overlap the products.
    ("warpgroup.wait is injected", "costly"),
    ("wgmma.wait_group is injected", "costly"),
    # Orders earlier accesses to registers before the products, as wgmma.fence does, and waits for no product.
    # tests/kernels/test_attention_forward.py compares the order of products, waits and exponentials.
    ("warpgroup.arrive is injected", "harmless"),
)
"""Verdict of each note whose effect is known, by a part of its text."""


def ptxas_notes(log: str) -> tuple[str, ...]:
    """Return the notes of a compilation log without lines and names of functions, each once.

    Args:
        log: Output of ptxas, with or without `-v`.
    """
    notes = (" ".join(_PLACE.sub("", note).split()) for note in _NOTE.findall(log))
    return tuple(dict.fromkeys(notes))


def verdict(note: str) -> PtxasVerdict:
    """Return how a note affects the time of its kernel.

    Args:
        note: One of `ptxas_notes`.
    """
    return next((effect for text, effect in _VERDICTS if text in note), "unknown")


def objections(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the notes with which no default configuration may be compiled, each after its verdict.

    Args:
        notes: From `ptxas_notes`.
    """
    verdicts = ((verdict(note), note) for note in notes)
    return tuple(f"{effect} note of ptxas: {note}" for effect, note in verdicts if effect != "harmless")
