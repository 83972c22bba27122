"""Requirement of the rooms that run training steps."""

from __future__ import annotations

from tunebench.errors import MissingDependency

__all__ = ["require_torch"]


def require_torch() -> None:
    """Import PyTorch.

    Raises:
        MissingDependency: PyTorch is not installed.
    """
    try:
        import torch as _torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependency("torch", "training") from error
