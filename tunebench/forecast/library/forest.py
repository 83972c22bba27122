"""Sums of regression trees, evaluated by NumPy alone: what was learned needs no library to be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunebench._lazy import np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["Forest"]

CHUNK_ROWS = 4096
"""Rows that are evaluated at a time, so that what is held for each tree stays in cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """A sum of trees: nodes of all trees one after the other, children always behind their parent.

    Attributes:
        base: What is added to the sum of the trees.
        roots: (T,) i32, the first node of each tree.
        feature: (N,) i8, the column a node asks; -1 for a leaf.
        threshold: (N,) f32; at or below it a row goes left. A leaf has its value here.
        left: (N,) i16, how far behind the node its left child stands; 0 for a leaf.
        right: (N,) i16, likewise.
        depth: Longest way from a root to a leaf.
    """

    base: float
    roots: NDArray[np.int32]
    feature: NDArray[np.int8]
    threshold: NDArray[np.float32]
    left: NDArray[np.int16]
    right: NDArray[np.int16]
    depth: int

    def __call__(self, features: Array) -> Array:
        """Return the value of each row.

        Args:
            features: (R, F), rounded to f32 to be compared.
        """
        rounded = np.asarray(features, dtype=np.float32)
        parts = [self._some(rounded[i : i + CHUNK_ROWS]) for i in range(0, len(rounded), CHUNK_ROWS)]
        values: Array = np.concatenate(parts) if parts else np.zeros(0)
        return values

    def _some(self, rows: NDArray[np.float32]) -> Array:
        node = np.broadcast_to(self.roots[:, None], (len(self.roots), len(rows))).astype(np.int64)
        index = np.arange(len(rows))[None, :]
        for _ in range(self.depth):
            asked = self.feature[node]
            goes_left = rows[index, asked] <= self.threshold[node]  # a leaf goes nowhere, whatever it asks
            node += np.where(goes_left, self.left[node], self.right[node])
        total: Array = self.threshold[node].sum(axis=0, dtype=np.float64)
        return total + self.base

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return it as arrays, for a file."""
        return {
            "base": np.array([self.base]),
            "roots": self.roots,
            "feature": self.feature,
            "threshold": self.threshold,
            "left": self.left,
            "right": self.right,
            "depth": np.array([self.depth], dtype=np.int16),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Forest:
        """Return the forest that `arrays` describe, as they come from a file."""
        return cls(
            base=float(arrays["base"][0]),
            roots=np.asarray(arrays["roots"], dtype=np.int32),
            feature=np.asarray(arrays["feature"], dtype=np.int8),
            threshold=np.asarray(arrays["threshold"], dtype=np.float32),
            left=np.asarray(arrays["left"], dtype=np.int16),
            right=np.asarray(arrays["right"], dtype=np.int16),
            depth=int(arrays["depth"][0]),
        )
