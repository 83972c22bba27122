"""The operator of a user's kernel: its tensors, inputs, reference and tolerance follow from its arguments."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tunebench._lazy import np
from tunebench.dtype import DType, numpy_dtype, unit_roundoff
from tunebench.errors import InputError
from tunebench.own_kernel.argument import Argument, drawn
from tunebench.variant import ceil_div
from tunebench.workload import Reference, Tensor, Tolerance, Traffic, Workload

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["UNVERIFIED", "Expected", "OwnOperator"]

UNVERIFIED = "not verified against a reference: compared with the default configuration"
"""How results are verified for which the user gives no reference."""

ROUNDINGS = 64
"""Default tolerance in roundings of the largest element of an output: of 4,000 random roundings in a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The right results of a kernel.

    Attributes:
        compute: Returns them from inputs in float64 and sizes by name; None compares with the default
            configuration.
        arguments: Names of the arguments of `compute`.
        tolerance: Largest error, as a share of the largest magnitude in an output; None follows its type.
        by_kernel: Whether the kernel `Reference` of the generated module computes them.
    """

    compute: Callable[..., Any] | None = None
    arguments: tuple[str, ...] = ()
    tolerance: float | None = None
    by_kernel: bool = False

    @property
    def is_reference(self) -> bool:
        """Whether there is a reference; otherwise results are compared with the default configuration's."""
        return self.by_kernel or self.compute is not None


@dataclass(frozen=True, kw_only=True)
class OwnOperator(Workload):
    """Base class of generated operators; a generated module sets its attributes.

    Attributes:
        kernel_arguments: The arguments, in the order of the kernel.
        expected: The right results.
        declared_flops: Floating-point operations as a function of sizes by name.
    """

    kernel_arguments: ClassVar[tuple[Argument, ...]]
    expected: ClassVar[Expected]
    declared_flops: ClassVar[tuple[tuple[str, ...], Callable[..., Any]] | None] = None

    @property
    def verified_by(self) -> Literal["reference", "compared"]:
        """How results on the device are verified: without a reference, they are compared."""
        return "reference" if self.expected.is_reference else "compared"

    @property
    def dtype(self) -> DType:
        """The element type of the first array."""
        return next(argument.dtype for argument in self.kernel_arguments if argument.shape or argument.file)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Whole-number arguments by name."""
        return {a.name: getattr(self, a.dimension or "") for a in self.kernel_arguments if a.role == "size"}

    def check(self) -> None:
        """Check that shapes are extents joined by `x`."""
        for argument in self.kernel_arguments:
            self.shape_of(argument)

    def shape_of(self, argument: Argument) -> tuple[int, ...]:
        """Return the extents of an array argument.

        Raises:
            InputError: The dimension with the shape is malformed, or an extent is below 1.
        """
        if argument.role in ("size", "number"):
            return ()
        if argument.dimension is None:
            names = {name: self._size(name) for name in self._size_names()}
            shape = [_extent(extent, names) for extent in argument.shape]
        else:
            text = getattr(self, argument.dimension).split("x")
            shape = [int(extent) if extent.isdigit() else 0 for extent in text]
        if len(shape) != len(argument.shape) or min(shape) < 1:
            raise InputError(
                f"{self.operator}: {argument.name} has shape {shape}; it must have {len(argument.shape)} "
                "extents of 1 or more, such as " + "x".join(["8"] * len(argument.shape))
            )
        return tuple(shape)

    def _size_names(self) -> dict[str, str]:
        return {a.name: a.dimension for a in self.kernel_arguments if a.role == "size" and a.dimension}

    def _size(self, name: str) -> int:
        return int(getattr(self, self._size_names()[name]))

    def _tensors(self, *roles: str) -> list[tuple[Argument, Tensor]]:
        return [
            (argument, Tensor(name=argument.name, shape=self.shape_of(argument), dtype=argument.dtype))
            for argument in self.kernel_arguments
            if argument.role in roles
        ]

    def inputs(self) -> tuple[Tensor, ...]:
        """Return inputs and in-out arrays."""
        return tuple(tensor for _, tensor in self._tensors("input", "inout"))

    def outputs(self) -> tuple[Tensor, ...]:
        """Return outputs, and the results of in-out arrays."""
        return tuple(
            Tensor(name=argument.result, shape=tensor.shape, dtype=tensor.dtype)
            for argument, tensor in self._tensors("output", "inout")
        )

    def scratch(self) -> tuple[Tensor, ...]:
        """Return arrays for intermediate values."""
        return tuple(tensor for _, tensor in self._tensors("scratch"))

    def flops(self) -> int:
        """Return the declared operations; 0 if none are declared."""
        if self.declared_flops is None:
            return 0
        names, count = self.declared_flops
        return int(count(**{name: self.sizes[name] for name in names}))

    def traffic(self) -> Traffic:
        """Return the bytes of inputs that are read entirely, and of all outputs."""
        read = (tensor.nbytes for argument, tensor in self._tensors("input", "inout") if not argument.partly)
        return Traffic(read_bytes=sum(read), write_bytes=sum(tensor.nbytes for tensor in self.outputs()))

    def tolerance(self) -> Tolerance:
        """Return the given tolerance, or a multiple of the roundoff of the least exact output."""
        if self.expected.tolerance is not None:
            error, reason = self.expected.tolerance, "as given, of the largest magnitude in an output"
        else:
            error = ROUNDINGS * max(unit_roundoff(tensor.dtype) for tensor in self.outputs())
            reason = f"{ROUNDINGS} roundings of the largest magnitude in an output"
        if not self.expected.is_reference:
            reason = f"{reason}; {UNVERIFIED}"
        return Tolerance(eps_out=error, eps_acc=error, reason=reason)

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Return the given values of an array, or random numbers of its range."""
        argument = next(a for a in self.kernel_arguments if a.name == tensor.name)
        if argument.file is not None:
            folder = Path(sys.modules[type(self).__module__].__file__ or "").parent
            values: Array = np.load(folder / argument.file, allow_pickle=False)
            return values.view(numpy_dtype(argument.dtype)).reshape(tensor.shape)
        return drawn(argument, tensor.shape, rng)

    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Return the results of the reference function, or of the default configuration."""
        if self.expected.compute is None:
            results = self._kernel_results(inputs)
        else:
            values = {**inputs, **self.sizes, **self._numbers()}
            named = {name: values[name] for name in self.expected.arguments}
            results = self._by_name(self.expected.compute(**named))
        return {name: _scaled(value) for name, value in results.items()}

    def _numbers(self) -> dict[str, float | None]:
        return {a.name: a.value for a in self.kernel_arguments if a.role == "number"}

    def _kernel_results(self, inputs: Mapping[str, Array64]) -> dict[str, Array64]:
        """Compute the outputs with the reference kernel, or with the default configuration."""
        stored = {
            tensor.name: np.asarray(inputs[tensor.name]).astype(numpy_dtype(tensor.dtype))
            for tensor in self.inputs()
        }
        module = sys.modules[type(self).__module__]
        variant = module.Reference() if self.expected.by_kernel else module.VARIANT
        outputs: Mapping[str, Array] = variant.default_results(self, stored)
        return {name: np.asarray(value, dtype=np.float64) for name, value in outputs.items()}

    def _by_name(self, results: Any) -> dict[str, Array64]:
        """Return the results of a reference function by output, in float64.

        Raises:
            InputError: One is missing, or has another shape than its output.
        """
        outputs = self.outputs()
        names = [tensor.name for tensor in outputs]
        plain = [argument.name for argument, _ in self._tensors("output", "inout")]
        if isinstance(results, Mapping):
            by_name = {n: results.get(n, results.get(p)) for n, p in zip(names, plain, strict=True)}
        elif isinstance(results, tuple | list) and len(outputs) > 1:
            by_name = dict(zip(names, results, strict=False))
        else:
            by_name = {names[0]: results}
        for tensor in outputs:
            shape = np.shape(by_name.get(tensor.name, ()))
            if by_name.get(tensor.name) is None or shape not in (tensor.shape, ()):
                got = f"shape {shape}" if by_name.get(tensor.name) is not None else "nothing"
                raise InputError(
                    f"reference must return {', '.join(names)}, and {tensor.name} of shape {tensor.shape}; "
                    f"got {got}"
                )
        return {
            tensor.name: np.broadcast_to(np.asarray(by_name[tensor.name], dtype=np.float64), tensor.shape)
            for tensor in outputs
        }


def _extent(extent: int | str, sizes: Mapping[str, int]) -> int:
    """Return an extent; expressions are compiled once."""
    if isinstance(extent, int):
        return extent
    known = {"ceil_div": ceil_div, "math": math, "np": np, **sizes}
    return int(eval(_compiled(extent), known))  # noqa: S307 - the user's own text, as in the module


@functools.cache
def _compiled(expression: str) -> Any:
    return compile(expression, "shape", "eval")


def _scaled(value: Array64) -> Reference:
    """Return a reference whose scale is its largest finite magnitude."""
    finite = np.abs(value[np.isfinite(value)])
    scale = float(finite.max()) if finite.size else 0.0
    return Reference(value=value, scale=np.broadcast_to(np.float64(scale), value.shape))
