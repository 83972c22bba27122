"""Sums of regression trees (gradient boosting), evaluated with NumPy only, without scikit-learn."""

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
"""Rows evaluated at a time, so that the node indices of all trees stay in cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """A sum of regression trees. One array holds the nodes of all trees, children behind their parents.

    Attributes:
        base: Constant added to the sum of the trees.
        roots: (T,) i32, index of the root of each tree.
        feature: (N,) i8, column that a node compares; -1 for a leaf.
        threshold: (N,) f32. A row goes left if its value is at or below it. In a leaf, the value of the leaf.
        left: (N,) i16, offset of the left child from the node; 0 for a leaf.
        right: (N,) i16, offset of the right child from the node; 0 for a leaf.
        depth: Longest path from a root to a leaf.
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
            features: (R, F), rounded to f32 before comparison.
        """
        rounded = np.asarray(features, dtype=np.float32)
        parts = [self._some(rounded[i : i + CHUNK_ROWS]) for i in range(0, len(rounded), CHUNK_ROWS)]
        values: Array = np.concatenate(parts) if parts else np.zeros(0)
        return values

    def _some(self, rows: NDArray[np.float32]) -> Array:
        node = np.broadcast_to(self.roots[:, None], (len(self.roots), len(rows))).astype(np.int64)
        index = np.arange(len(rows))[None, :]
        # All trees and rows step down together; those that reached a leaf stay, because its offsets are 0.
        for _ in range(self.depth):
            asked = self.feature[node]
            goes_left = rows[index, asked] <= self.threshold[node]  # a leaf has offset 0 on both sides
            node += np.where(goes_left, self.left[node], self.right[node])
        total: Array = self.threshold[node].sum(axis=0, dtype=np.float64)
        return total + self.base

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the arrays that `from_arrays` reads."""
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
        """Return the forest stored by `arrays`."""
        return cls(
            base=float(arrays["base"][0]),
            roots=np.asarray(arrays["roots"], dtype=np.int32),
            feature=np.asarray(arrays["feature"], dtype=np.int8),
            threshold=np.asarray(arrays["threshold"], dtype=np.float32),
            left=np.asarray(arrays["left"], dtype=np.int16),
            right=np.asarray(arrays["right"], dtype=np.int16),
            depth=int(arrays["depth"][0]),
        )
