"""What kernels read that is made of parameters: computed anew only where these have changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

__all__ = ["DerivedTensor", "FilterSlice", "FoldedBatchNorm", "ZeroBias"]


class DerivedTensor(ABC):
    """A tensor that is a function of some others, which seldom change.

    Attributes:
        parts: The nodes that give these.
    """

    parts: tuple[fx.Node, ...]

    @abstractmethod
    def of(self, *parts: Tensor) -> Tensor:
        """Return it."""


@dataclass(frozen=True, slots=True)
class FoldedBatchNorm(DerivedTensor):
    """The scale or the shift of a batch normalisation whose statistics are the same in every step.

    Attributes:
        parts: The nodes that give weight, bias, running mean and running variance.
        what: Which of the two.
        eps: Added to the variance.
        dtype: Type of what is folded: that of the images.
    """

    parts: tuple[fx.Node, ...]
    what: Literal["scale", "shift"]
    eps: float
    dtype: torch.dtype

    def of(self, *parts: Tensor) -> Tensor:
        """Return a number for each channel."""
        weight, bias, mean, variance = parts
        scale = weight * torch.rsqrt(variance + self.eps)
        return (scale if self.what == "scale" else bias - mean * scale).to(self.dtype)


@dataclass(frozen=True, slots=True)
class FilterSlice(DerivedTensor):
    """Filters of some input channels, channels last.

    Attributes:
        parts: The node that gives all filters.
        first: The first channel.
        end: The one after the last.
    """

    parts: tuple[fx.Node, ...]
    first: int
    end: int

    def of(self, *parts: Tensor) -> Tensor:
        """Return filters (k, end - first, r, s)."""
        return parts[0][:, self.first : self.end].contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, slots=True)
class ZeroBias(DerivedTensor):
    """A bias that adds nothing to the results of filters.

    Attributes:
        parts: The node that gives the filters.
    """

    parts: tuple[fx.Node, ...]

    def of(self, *parts: Tensor) -> Tensor:
        """Return (k,)."""
        return parts[0].new_zeros(parts[0].shape[0])
