"""Inputs that no kernel has seen, at the cost of a copy: mixtures of two secret draws.

Drawing inputs takes longer than most kernels take. A mixture shifts the rows of two draws by random
distances, takes the columns before a random cut from one and the others from the other, and exchanges the
fractions of floating-point numbers by random bits. Every row and nearly every element is new, so that neither
stored rows, nor products of some rows, nor functions of elements can be used again. An element keeps its
sign, its order of magnitude and the distribution of its column. Arrays of few rows are drawn again, or
shifted along the row if they are large. Indices and offsets stay, since they may depend on one another;
other inputs whose values an operator restricts keep these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.dtype import is_integer, storage, unit_roundoff
from tunebench.measure.timed_launches import changing_inputs
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array

__all__ = ["FreshInputs"]

SMALLEST_CHANGE, LARGEST_CHANGE = 1 / 256, 1 / 8
"""Part of an input that `FreshInputs.change` exchanges: a kernel that stores results could save the rest."""


FEW_ROWS = 16
"""Arrays of fewer rows are not mixed: too few shifts exist."""
DRAWN_ELEMENTS = 1 << 18
"""Size up to which these are drawn again, in elements: it takes a few milliseconds."""


class FreshInputs:
    """Two draws of a workload's inputs, and the inputs that are made of them.

    Args:
        workload: The workload.
        rng: Draws, and mixes; its seed must be secret.
    """

    def __init__(self, workload: Workload, rng: numpy.random.Generator) -> None:
        self.workload, self._rng = workload, rng
        self._draws = [
            {name: np.ascontiguousarray(array) for name, array in workload.draw(rng).items()}
            for _ in range(2)
        ]
        self._tensors = {tensor.name: tensor for tensor in workload.inputs()}
        self._changing = changing_inputs(workload)
        self._fractions = {name: self._fractions_of(self._tensors[name]) for name in self._changing}

    @property
    def first(self) -> Mapping[str, Array]:
        """The first draw, by name; numbers, indices and offsets are those of all launches."""
        return self._draws[0]

    def write_fixed(self, inputs: Mapping[str, Array]) -> None:
        """Overwrite the inputs that are the same in all launches: numbers, indices and offsets.

        Args:
            inputs: Arrays by name.
        """
        for name, array in inputs.items():
            if name not in self._changing:
                array[...] = self._draws[0][name]

    def write(self, inputs: Mapping[str, Array]) -> None:
        """Overwrite inputs with new ones.

        Args:
            inputs: Arrays by name.
        """
        self.write_fixed(inputs)
        for name in self._changing:
            self._mix(name, inputs[name])

    def change(self, inputs: Mapping[str, Array], before: Mapping[str, Array]) -> None:
        """Overwrite inputs with those of another launch, of which a small part is exchanged.

        Args:
            inputs: Arrays by name.
            before: Inputs of the other launch.
        """
        for name, array in inputs.items():
            if array is not before[name]:
                np.copyto(array, before[name])
            if name in self._changing:
                part = 2.0 ** self._rng.uniform(np.log2(SMALLEST_CHANGE), np.log2(LARGEST_CHANGE))
                length = max(1, int(array.size * part))
                start = int(self._rng.integers(array.size - length + 1))
                draw = self._draws[int(self._rng.integers(2))][name].reshape(-1)
                origin = int(self._rng.integers(array.size - length + 1)) if array.ndim == 1 else start
                bits = f"u{array.itemsize}"
                changed = draw[origin : origin + length].view(bits)
                if self._fractions[name] > 1:  # the part may have been exchanged for this one before
                    changed = changed ^ self._rng.integers(1, self._fractions[name], dtype=changed.dtype)
                array.reshape(-1)[start : start + length].view(bits)[...] = changed

    def _fractions_of(self, tensor: Tensor) -> int:
        """Return how many fractions the input's type has; 1 if the values of the input are restricted."""
        is_free = not is_integer(tensor.dtype) and tensor.dtype != "bool"
        if not is_free or self.workload.draw_by_rule(tensor, self._rng) is not None:
            return 1
        return round(0.5 / unit_roundoff(storage(tensor.dtype)))

    def _mix(self, name: str, array: Array) -> None:
        """Overwrite an array with columns of both draws, whose rows are shifted."""
        rows = array.reshape(-1, array.shape[-1])
        if len(rows) < FEW_ROWS and array.size <= DRAWN_ELEMENTS:
            array[...] = self.workload.draw_tensor(self._tensors[name], self._rng)
            return
        width = rows.shape[1]
        cut = int(self._rng.integers(1, width)) if width > 1 else 1
        bits = rows.view(f"u{rows.itemsize}")
        fractions = self._rng.integers(0, self._fractions[name], width, bits.dtype)
        for draw, columns in zip(self._draws, (slice(0, cut), slice(cut, width)), strict=True):
            source = draw[name].reshape(rows.shape).view(bits.dtype)
            if len(rows) < FEW_ROWS:  # shifted rows would be the same ones
                source = np.roll(source, int(self._rng.integers(width)), axis=1)
            shift = int(self._rng.integers(len(rows)))
            rest = len(rows) - shift
            np.bitwise_xor(source[shift:, columns], fractions[columns], out=bits[:rest, columns])
            np.bitwise_xor(source[:shift, columns], fractions[columns], out=bits[rest:, columns])
