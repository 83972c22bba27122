"""Verification of results: random inputs, a float64 reference, and a tolerance for every element.

A norm hides one wrong element among millions, so every element is compared with its own tolerance. Outputs
are poisoned before each run, so that an unwritten element is NaN, which never passes.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tunebench._figure import significant
from tunebench._lazy import np
from tunebench.dtype import numpy_dtype
from tunebench.measure.task_limit import outside_limit
from tunebench.workload import Reference, Tensor, Workload

if TYPE_CHECKING:
    import numpy

    from tunebench.measure._device_arrays import ReferenceDevice
    from tunebench.workload import Array

__all__ = [
    "GUARD_BYTES",
    "POISON",
    "Errors",
    "EveryElement",
    "GuardedArray",
    "InputSet",
    "OutputCheck",
    "describe_worst",
    "draw",
    "draw_stress",
    "error_shares",
    "errors_of",
    "magnitude_of",
    "poisoned",
    "share_of",
    "worst_error",
]


R = TypeVar("R")

POISON = 0xFF
"""A byte that reads as NaN in every floating-point type if repeated, and as -1 in integers."""
GUARD_BYTES = 4096
"""Guard bytes after each written tensor, which must stay poisoned: a change means an out-of-bounds write."""

SPOT_ELEMENTS = 4096
"""Random elements of each output that a spot check compares; 2 % of checks miss a wrong thousandth."""


@dataclass(frozen=True, kw_only=True)
class InputSet:
    """Random inputs of a workload, and their reference.

    Attributes:
        workload: The workload.
        seed: Seed of the inputs.
        inputs: One C-contiguous array for each tensor of `Workload.inputs()`, in its stored type.
        on: Device that computes references; None computes them with NumPy.
        secret: Seed of the choice of what is checked, which no kernel can foresee.
    """

    workload: Workload
    seed: int
    inputs: Mapping[str, Array]
    on: ReferenceDevice | None = None
    secret: int = field(default_factory=functools.partial(secrets.randbits, 128))

    def exact(self) -> dict[str, Array]:
        """Return the inputs in float64, from which references are computed (not kept: they are large)."""
        return {name: np.asarray(value, dtype=np.float64) for name, value in self.inputs.items()}

    def compute(self, reference: Callable[[Mapping[str, Array]], R]) -> R:
        """Compute references outside the time limit of the task.

        Args:
            reference: Returns them from the inputs in float64: arrays of the device, or of NumPy if it has
                too little memory or is lost.
        """
        with outside_limit(), np.errstate(all="ignore"):  # extreme inputs lead to infinities and NaN
            if self.on is not None:
                try:
                    return reference(self.on.arrays(self.inputs))
                except self.on.failures:
                    self.on.release()
            return reference(self.exact())

    @functools.cached_property
    def references(self) -> Mapping[str, Reference]:
        """Reference of every element of each output; computed at the first use."""
        return self.compute(self.workload.reference)


def draw(workload: Workload, seed: int, on: ReferenceDevice | None = None) -> InputSet:
    """Draw inputs; their reference is computed at its first use.

    Args:
        workload: The workload.
        seed: Seed of the inputs.
        on: Device that computes references; None computes them with NumPy.
    """
    with outside_limit():
        inputs = workload.draw(np.random.default_rng(seed))
    return InputSet(workload=workload, seed=seed, inputs=inputs, on=on)


def draw_stress(normal: InputSet) -> InputSet | None:
    """Draw inputs of which about half are extreme (`tunebench.stress`); None if the operator states none.

    Args:
        normal: Inputs as drawn for timing. Tensors of shape `()` are the same, since launches hold them.
    """
    workload = normal.workload
    with outside_limit(), np.errstate(all="ignore"):
        inputs = workload.draw_stress(np.random.default_rng((normal.seed, 3)))
    if inputs is None:
        return None
    numbers = {tensor.name: normal.inputs[tensor.name] for tensor in workload.inputs() if not tensor.shape}
    return dataclasses.replace(normal, inputs={**inputs, **numbers})


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The largest errors of outputs, over the elements that were compared.

    Attributes:
        share: As a share of the tolerance; a result is correct up to 1.
        absolute: The largest difference from the reference, where the reference is finite.
        relative: The same as a share of the largest magnitude in the reference of its output.
    """

    share: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0

    def joined(self, *others: Errors) -> Errors:
        """Return the largest of each error among this and others."""
        every = (self, *others)
        return Errors(
            share=max(errors.share for errors in every),
            absolute=max(errors.absolute for errors in every),
            relative=max(errors.relative for errors in every),
        )

    def fields(self) -> dict[str, float]:
        """Return the fields of `tunebench.outcome.Verification`, of a correct result."""
        return {"worst": self.share, "absolute": self.absolute, "relative": self.relative}


class OutputCheck(ABC):
    """Check of outputs; created once per input set, used for every configuration.

    Attributes:
        detail: The elements that are covered, for `Verification.detail`.
    """

    detail: str

    @abstractmethod
    def errors(self, outputs: Mapping[str, Array]) -> Errors:
        """Return the largest errors."""

    def worst(self, outputs: Mapping[str, Array]) -> float:
        """Return the largest error as a share of the tolerance; a result is correct up to 1."""
        return self.errors(outputs).share

    @abstractmethod
    def spot(self, outputs: Mapping[str, Array], rng: numpy.random.Generator) -> Errors:
        """Return the largest errors among some elements, at a small part of the cost of `errors`.

        Args:
            outputs: Computed outputs by name.
            rng: Chooses the elements.
        """

    @abstractmethod
    def describe(self, outputs: Mapping[str, Array], worst: float) -> str:
        """Return the position and values of the worst errors, for the reason of a `WrongResult`."""


class EveryElement(OutputCheck):
    """Check of every element of every output.

    Args:
        inputs: Inputs of the outputs to check.
    """

    detail = "every element"

    def __init__(self, inputs: InputSet) -> None:
        self._inputs = inputs

    def errors(self, outputs: Mapping[str, Array]) -> Errors:
        """Return the largest errors of any element."""
        return errors_of(self._inputs.workload, outputs, self._inputs.references, self._magnitudes)

    @functools.cached_property
    def _magnitudes(self) -> Mapping[str, float]:
        """Largest magnitude in the reference of each output."""
        return {name: magnitude_of(reference) for name, reference in self._inputs.references.items()}

    def spot(self, outputs: Mapping[str, Array], rng: numpy.random.Generator) -> Errors:
        """Return the largest errors of `SPOT_ELEMENTS` random elements of each output."""
        references, chosen, some = self._inputs.references, {}, {}
        for name, reference in references.items():
            at = rng.integers(reference.value.size, size=SPOT_ELEMENTS)
            scale = np.broadcast_to(reference.scale, reference.value.shape)
            value, scale = (np.asarray(array.reshape(-1)[at]) for array in (reference.value, scale))
            chosen[name] = Reference(value=value, scale=scale)
            some[name] = outputs[name].reshape(-1)[at]
        return errors_of(self._inputs.workload, some, chosen, self._magnitudes)

    def describe(self, outputs: Mapping[str, Array], worst: float) -> str:
        """Return the most wrong element of each output."""
        return describe_worst(outputs, self._inputs.references, worst)


def poisoned(workload: Workload) -> dict[str, Array]:
    """Return new, poisoned arrays for the outputs of a workload."""
    return {tensor.name: GuardedArray(tensor).array for tensor in workload.outputs()}


class GuardedArray:
    """A poisoned array on the host, followed by a guard that must stay poisoned.

    Args:
        tensor: Shape and type of the array.

    Attributes:
        array: The array.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = np.empty(tensor.nbytes + GUARD_BYTES, np.uint8)
        self._name, self._nbytes = tensor.name, tensor.nbytes
        self.array = self._bytes[: tensor.nbytes].view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        self.poison()

    def poison(self) -> None:
        """Overwrite the array and its guard with poison."""
        self._bytes[:] = POISON

    @property
    def overrun(self) -> str | None:
        """Name of the tensor if it was written past its end, else None."""
        return None if (self._bytes[self._nbytes :] == POISON).all() else self._name


def _as_numbers(array: Array, reference: Array | None = None) -> Array:
    """Return an array in float64; bytes of a truth value that are neither 0 nor 1 keep their value.

    Args:
        array: The array.
        reference: The result is on the device of this array; None leaves it on the host.
    """
    stored = array.view(np.uint8) if array.dtype == np.bool_ else array
    on: ReferenceDevice | None = getattr(reference, "on", None)
    return stored.astype(np.float64) if on is None else on.array(stored)


def worst_error(
    workload: Workload, outputs: Mapping[str, Array], references: Mapping[str, Reference]
) -> float:
    """Return the largest error over all elements as a share of the tolerance.

    A result is correct up to 1. An element that is NaN where the reference is not makes the error infinite.

    Args:
        workload: The workload, for its tolerance.
        outputs: Computed outputs by name.
        references: Their references by name.
    """
    return errors_of(workload, outputs, references).share


def errors_of(
    workload: Workload,
    outputs: Mapping[str, Array],
    references: Mapping[str, Reference],
    magnitudes: Mapping[str, float] | None = None,
) -> Errors:
    """Return the largest errors over all elements.

    Args:
        workload: The workload, for its tolerance.
        outputs: Computed outputs by name.
        references: Their references by name.
        magnitudes: Largest magnitude in each reference, if `references` are parts of others or were measured
            before.
    """
    worst = Errors()
    for name, reference in references.items():
        shares, difference = _compared(workload, outputs[name], reference)
        absolute = float(np.max(difference, initial=0.0))
        magnitude = magnitude_of(reference) if magnitudes is None else magnitudes[name]
        relative = absolute / magnitude if magnitude else 0.0
        share = float(np.max(shares, initial=0.0))
        worst = worst.joined(Errors(share=share, absolute=absolute, relative=relative))
    return worst


def magnitude_of(reference: Reference) -> float:
    """Return the largest magnitude of the finite elements of a reference; 0 without any."""
    value = reference.value
    largest = float(np.max(np.abs(value), initial=0.0))
    if largest < np.inf:
        return largest
    return float(np.max(np.where(np.abs(value) < np.inf, np.abs(value), 0.0), initial=0.0))


def error_shares(workload: Workload, output: Array, reference: Reference) -> Array:
    """Return the error of each element as a share of the tolerance.

    Where the reference is infinite or NaN, the output must be equal. Where the reference may overflow the
    type of the output, infinity of the same sign is correct, too.

    Args:
        workload: The workload, for its tolerance.
        output: The computed output.
        reference: Its reference.
    """
    return _compared(workload, output, reference)[0]


def _compared(workload: Workload, output: Array, reference: Reference) -> tuple[Array, Array]:
    """Return the error of each element as a share of the tolerance, and its difference from the reference."""
    tolerance = workload.tolerance()
    with np.errstate(invalid="ignore", over="ignore"):
        allowed = tolerance.eps_out * np.abs(reference.value) + tolerance.eps_acc * reference.scale
        number = _as_numbers(output, reference.value)
        difference = np.abs(number - reference.value)
        share = share_of(difference, allowed)
        if float(np.max(share, initial=0.0)) == np.inf:
            right = _agrees(number, reference.value, allowed, _largest(output.dtype))
            share, difference = np.where(right, 0.0, share), np.where(right, 0.0, difference)
    return share, difference


def _agrees(number: Array, value: Array, allowed: Array, largest: float) -> Array:
    """Return where infinities and NaN are those of the reference, or the reference overflows."""
    same = (number == value) | (np.isnan(number) & np.isnan(value))
    overflows = (np.abs(value) + allowed > largest) & (np.abs(number) == np.inf) & (number * value > 0.0)
    agrees: Array = same | overflows
    return agrees


def _largest(dtype: numpy.dtype[Any]) -> float:
    """Return the largest finite number of a type; infinity for types that have no infinity."""
    if dtype.kind == "f":
        return float(np.finfo(dtype).max)
    return 3.3895314e38 if dtype.name == "bfloat16" else np.inf


def share_of(error: Array, allowed: Array) -> Array:
    """Return `error / allowed`, elementwise; NaN counts as infinite.

    If nothing is allowed, only an error of zero is correct.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        share = error / allowed
    return np.where(np.isnan(share), np.where(error == 0, 0.0, np.inf), share)


def describe_worst(outputs: Mapping[str, Array], references: Mapping[str, Reference], worst: float) -> str:
    """Return the position and values of the worst error of each output, for the reason of a `WrongResult`.

    Args:
        outputs: Computed outputs by name.
        references: Their references by name.
        worst: From `worst_error`.
    """
    parts = []
    for name, reference in references.items():
        got, right = _as_numbers(outputs[name]), np.asarray(reference.value)
        with np.errstate(invalid="ignore"):
            error = np.nan_to_num(np.abs(got - right), nan=np.inf)
        error = np.where((got == right) | (np.isnan(got) & np.isnan(right)), 0.0, error)
        at = np.unravel_index(int(np.argmax(error)), error.shape)
        where = ",".join(str(int(i)) for i in at)
        must_be = significant(right[at], 6)
        parts.append(f"{name}[{where}] is {significant(got[at], 6)}, must be {must_be}")
    return f"{significant(worst, 3)} times the tolerance; {'; '.join(parts)}"
