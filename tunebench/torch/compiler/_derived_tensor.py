"""Tensors that are computed from parameters, and computed again only when these change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

__all__ = ["DerivedTensor", "FilterSlice", "FoldedBatchNorm", "ZeroBias"]


class DerivedTensor(ABC):
    """A tensor that is a function of other tensors, which seldom change.

    Attributes:
        parts: FX nodes of the other tensors.
    """

    parts: tuple[fx.Node, ...]

    @abstractmethod
    def of(self, *parts: Tensor) -> Tensor:
        """Compute the tensor."""


@dataclass(frozen=True, slots=True)
class FoldedBatchNorm(DerivedTensor):
    """Scale or shift of a batch normalisation by constant running statistics.

    Attributes:
        parts: FX nodes of weight, bias, running mean and running variance.
        what: Whether it is the scale or the shift.
        eps: Added to the variance.
        dtype: Type of the result, the same as the type of the images.
    """

    parts: tuple[fx.Node, ...]
    what: Literal["scale", "shift"]
    eps: float
    dtype: torch.dtype

    def of(self, *parts: Tensor) -> Tensor:
        """Return one number per channel."""
        weight, bias, mean, variance = parts
        scale = weight * torch.rsqrt(variance + self.eps)
        return (scale if self.what == "scale" else bias - mean * scale).to(self.dtype)


@dataclass(frozen=True, slots=True)
class FilterSlice(DerivedTensor):
    """Filters of some input channels, channels last.

    Attributes:
        parts: FX node of all filters.
        first: First channel.
        end: Channel after the last one.
    """

    parts: tuple[fx.Node, ...]
    first: int
    end: int

    def of(self, *parts: Tensor) -> Tensor:
        """Return filters (k, end - first, r, s)."""
        return parts[0][:, self.first : self.end].contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, slots=True)
class ZeroBias(DerivedTensor):
    """A bias of zeros, one per filter.

    Attributes:
        parts: FX node of the filters.
    """

    parts: tuple[fx.Node, ...]

    def of(self, *parts: Tensor) -> Tensor:
        """Return zeros, (k,)."""
        return parts[0].new_zeros(parts[0].shape[0])
