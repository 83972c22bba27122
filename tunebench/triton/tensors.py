"""Tensors that a kernel may write: found, restored, and compared between configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunebench._figure import significant

__all__ = ["ROUNDINGS", "WrittenTensors"]

ROUNDINGS = 64
"""Default tolerance in roundings of the type, relative to the largest magnitude of a tensor."""


class WrittenTensors:
    """The tensors of a call, of which `learn` finds those that the kernel writes.

    A tensor that a kernel only writes is overwritten before each check, so that elements that a configuration
    leaves out, or that only another one wrote, are found. A tensor that it also reads is restored.

    Args:
        tensors: Tensors of PyTorch by name of argument.
        tolerance: Largest error, as a share of the largest magnitude; None: 64 roundings.
    """

    def __init__(self, tensors: Mapping[str, Any], tolerance: float | None = None) -> None:
        self._tensors = dict(tensors)
        self._tolerance = tolerance
        self._originals = {name: tensor.clone() for name, tensor in tensors.items()}
        self._expected: dict[str, Any] = {}
        self._only_written: tuple[str, ...] = ()

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the tensors that the kernel writes, in the order of its arguments."""
        return tuple(self._expected)

    def restore(self) -> None:
        """Give all tensors the values that they had before."""
        for name, tensor in self._tensors.items():
            tensor.copy_(self._originals[name])

    def learn(self, launch: Callable[[], Any]) -> None:
        """Find what a launch writes, and expect it of others.

        Args:
            launch: Runs the kernel once with a correct configuration.
        """
        launch()
        first = {
            name: tensor.clone()
            for name, tensor in self._tensors.items()
            if not bool(_equal(tensor, self._originals[name]).all())
        }
        self.restore()
        for name in first:
            _fill(self._tensors[name])
        launch()
        self._only_written = tuple(
            name for name, tensor in first.items() if self._agrees(name, tensor, self._tensors[name])
        )
        self._expected = {
            name: self._tensors[name].clone() if name in self._only_written else tensor
            for name, tensor in first.items()
        }
        self.restore()

    def expect(self, results: Any) -> None:
        """Expect results that were computed otherwise.

        Args:
            results: A tensor, a tuple in the order of `written`, or a mapping by name.

        Raises:
            ValueError: They are fewer than the tensors that the kernel writes.
        """
        if not isinstance(results, Mapping):
            several = results if isinstance(results, tuple | list) else (results,)
            results = dict(zip(self.written, several, strict=False))
        if missing := [name for name in self.written if name not in results]:
            raise ValueError(f"reference returned nothing for {', '.join(missing)}, which the kernel writes")
        self._only_written = tuple(name for name in self._only_written if name in results)
        self._expected = {name: results[name].reshape(self._tensors[name].shape) for name in self.written}

    def check(self, launch: Callable[[], Any]) -> str | None:
        """Run a configuration, restore all tensors, and return what it wrote wrongly, or None.

        Args:
            launch: Runs the kernel once.
        """
        for name in self._only_written:
            _fill(self._tensors[name])
        try:
            launch()
            reasons = (self._wrong(name, tensor) for name, tensor in self._tensors.items())
            return next((reason for reason in reasons if reason is not None), None)
        finally:
            self.restore()

    def _agrees(self, name: str, first: Any, second: Any) -> bool:
        """Return whether a launch writes the same after the tensor was overwritten."""
        unwritten = _equal(second, _filled(second)) & _equal(first, self._originals[name])
        return bool((_equal(first, second) | unwritten).all())

    def _wrong(self, name: str, tensor: Any) -> str | None:
        expected = self._expected.get(name)
        if expected is None:
            same = bool(_equal(tensor, self._originals[name]).all())
            return None if same else f"{name} was changed, which other configurations only read"
        equal = _equal(tensor, expected)
        if bool(equal.all()):
            return None
        if not tensor.is_floating_point():
            return f"{name}: {int((~equal).sum())} of {equal.numel()} elements differ"
        error = (tensor.double() - expected.double()).abs()
        magnitude = expected.double()[expected.double().isfinite()].abs()
        scale = float(magnitude.max()) if magnitude.numel() else 0.0
        allowed = scale * (self._tolerance or ROUNDINGS * _roundoff(tensor))
        wrong = ~(equal | (error <= allowed))
        if not bool(wrong.any()):
            return None
        limit = significant(allowed)
        return f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ by more than {limit}"


def _roundoff(tensor: Any) -> float:
    import torch

    return float(torch.finfo(tensor.dtype).eps) / 2


def _equal(a: Any, b: Any) -> Any:
    """Return where two tensors are equal, or both NaN."""
    return (a == b) | ((a != a) & (b != b))


def _filled(tensor: Any) -> Any:
    """Return the value that marks an element as not written."""
    import torch

    if tensor.is_floating_point():
        return torch.tensor(float("nan"), dtype=tensor.dtype, device=tensor.device)
    limit = 1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 3
    return torch.tensor(limit, dtype=tensor.dtype, device=tensor.device)


def _fill(tensor: Any) -> None:
    tensor.copy_(_filled(tensor))
