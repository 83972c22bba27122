"""Workloads: an operator is a class, and a workload is an instance of it at one size.

An operator is a frozen dataclass whose fields are its dimensions, in canonical order, so that
`gemm:m=64,n=64,k=64,dtype=f16` and `Gemm(m=64, n=64, k=64, dtype="f16")` are the same workload.
Field types define the valid values (see `tunebench.dimension`): `Size` and `Count` (integers),
`Positive` (a real number), `bool`, `Name`, `Names`, `Expression`, `ActivationName`, or a `Literal`.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, final, get_type_hints

from tunebench._deprecation import accept_renamed_attribute, renamed
from tunebench.dimension import (
    MAX_SIZE,
    ActivationName,
    AtLeast,
    Count,
    Expression,
    Kind,
    Name,
    Names,
    Positive,
    Size,
    checked,
    defaults_to,
    items_of,
    placeholder,
    text_of,
    value_of,
)
from tunebench.dtype import DType, is_integer, itemsize
from tunebench.errors import InputError, UnknownName, quoted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tunebench.stress import Stress

    Array = NDArray[Any]
    Array64 = NDArray[np.float64]

__all__ = [
    "MAX_SIZE",
    "ActivationName",
    "AllowedChanges",
    "AtLeast",
    "Category",
    "Count",
    "Expression",
    "Name",
    "Names",
    "Part",
    "Positive",
    "Reference",
    "Size",
    "Tensor",
    "Tolerance",
    "Traffic",
    "Workload",
    "defaults_to",
]


_V = TypeVar("_V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One array a kernel reads or writes: C-contiguous; a shape of `()` is passed by value.

    `dtype` is the stored type, never `tf32`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def size(self) -> int:
        """Number of elements."""
        return functools.reduce(lambda a, b: a * b, self.shape, 1)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that any implementation must move: touched inputs once, outputs once."""

    read_bytes: int
    write_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest allowed error of an element `o` with the reference `r`.

    ``|o - r| <= eps_out * |r| + eps_acc * scale``, where `scale` is the magnitude that was accumulated
    (``|A| |B|`` of a matrix product) and is part of the reference.

    Attributes:
        eps_out: Relative error of rounding the result.
        eps_acc: Relative error of accumulating, per unit of `scale`.
        reason: Derivation of the two figures.
    """

    eps_out: float
    eps_acc: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The float64 reference of one output, with the magnitude that was accumulated."""

    value: Array64
    scale: Array64


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An independent piece of a workload, which shares no output with other pieces.

    Attributes:
        workload: The piece.
        places: Slices of its tensors in those of the whole, by name; a missing tensor is used whole.
    """

    workload: Workload
    places: Mapping[str, tuple[slice, ...]]

    def of(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Return the piece of each tensor of the whole, without a copy."""
        return {name: tensor[self.places.get(name, ())] for name, tensor in tensors.items()}


Category = Literal["elementwise", "reduction", "dot product"]
"""Category of an operator, which determines what usually limits it.

Source: NVIDIA, "GPU Performance Background User's Guide", "DNN Operation Categories".
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedChanges:
    """Dimensions that a user of an operator may change and still get the results they need.

    Attributes:
        padding: Dimensions that may be extended, and the value of the new elements of inputs, so that the
            requested results are a part of those computed.
        items: Dimensions that count independent items: a batch, tokens.
        layouts: Dimensions that define the memory layout of tensors.
        fusions: Dimensions that fuse a neighbouring elementwise operation, and whether it is the one before
            (on the first input) or after (on the first output).
    """

    padding: Mapping[str, str] = dataclasses.field(default_factory=dict)
    items: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    fusions: Mapping[str, Literal["before", "after"]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """An operator at one size, type and layout; subclasses are the operators.

    A subclass is a frozen, keyword-only dataclass in a separate module of `tunebench.workloads.operators` (or
    in a user's variant file). `category` and `allowed_changes` are optional: explanations and advice use
    them.

    Attributes:
        operator: Name of the operator, which every subclass sets.
        category: Kind of operation.
        allowed_changes: Dimensions that advice may change.
        aliases: Other names of dimensions that are accepted, each with its canonical name.

    Raises:
        InputError: A dimension has an invalid value.
    """

    operator: ClassVar[str]
    category: ClassVar[Category | None] = None
    allowed_changes: ClassVar[AllowedChanges] = AllowedChanges()
    aliases: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        accept_renamed_attribute(cls, "leeway", "allowed_changes")

    if TYPE_CHECKING:  # every operator declares it, as a dimension

        @property
        def dtype(self) -> DType:
            """The element type of the inputs."""

    def __post_init__(self) -> None:
        kinds = self.dimension_kinds()
        for dimension in self._fields():
            value = getattr(self, dimension.name)
            if value is None and "follows" in dimension.metadata:
                value = self.default_of(dimension.name, getattr(self, dimension.metadata["follows"]))
            value = checked(self.operator, dimension.name, value, kinds[dimension.name])
            object.__setattr__(self, dimension.name, value)
        self.check()

    @property
    def verified_by(self) -> Literal["reference", "compared"]:
        """How results on a device are verified; ``"compared"`` if there is no independent reference."""
        return "reference"

    def check(self) -> None:  # noqa: B027 - most operators have nothing to add
        """Raise `InputError` if the dimensions contradict one another."""

    def default_of(self, dimension: str, followed: Any) -> Any:
        """Return the default of a dimension that follows another (see `defaults_to`)."""
        return followed

    def may_change(self) -> AllowedChanges:
        """Return the allowed changes of this workload (override where they are fewer than the operator's)."""
        return self.allowed_changes

    # -- tensors, work and reference ---------------------------------------------------------

    @abstractmethod
    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors a kernel reads, in the order kernels name them."""

    @abstractmethod
    def outputs(self) -> tuple[Tensor, ...]:
        """Return the tensors a kernel writes."""

    @abstractmethod
    def flops(self) -> int:
        """Return the floating-point operations of the textbook algorithm (a multiply-add is 2)."""

    @abstractmethod
    def reference(self, inputs: Mapping[str, Array64]) -> dict[str, Reference]:
        """Compute the reference result in float64.

        Args:
            inputs: Every tensor of `inputs()` by name, converted to float64 after rounding to its type.

        Returns:
            One `Reference` for every tensor of `outputs()`, by name.
        """

    @abstractmethod
    def tolerance(self) -> Tolerance:
        """Return the largest allowed error of an implementation."""

    def part_count(self) -> int:
        """Return the number of independent parts of the workload (override if there are several)."""
        return 1

    def part(self, index: int) -> Part:
        """Return one of `part_count()` parts, so that a large result can be checked by a sample of parts.

        Args:
            index: Position of the part, from 0.

        Raises:
            IndexError: There is no such part.
        """
        if index:
            raise IndexError(f"{self} has one part, index 0; got index {index}")
        return Part(workload=self, places={})

    def traffic(self) -> Traffic:
        """Return the bytes any implementation must move (override where inputs are not all touched)."""
        return Traffic(
            read_bytes=sum(tensor.nbytes for tensor in self.inputs() if tensor.shape),
            write_bytes=sum(tensor.nbytes for tensor in self.outputs()),
        )

    def unfused(self) -> tuple[Workload, ...]:
        """Return the workloads that compute the same in several kernels (override).

        Each reads inputs of this workload and rounded results of those before it from memory. They show the
        gain of fusion. Empty if nothing is fused, or if no operator computes a part alone.
        """
        return ()

    def draw(self, rng: np.random.Generator) -> dict[str, Array]:
        """Draw random inputs: standard normal rounded to the type, or any number of an integer type.

        Args:
            rng: Source of randomness, so that a check can be repeated.

        Returns:
            One array for every tensor of `inputs()`, by name.
        """
        return {tensor.name: self.draw_tensor(tensor, rng) for tensor in self.inputs()}

    def stress(self) -> Mapping[str, Stress]:
        """Return the kinds of extreme values for which results are defined, by input (override).

        Verification draws them besides normal numbers (`draw_stress`). Empty if an operator states none.
        """
        return {}

    def draw_stress(self, rng: np.random.Generator) -> dict[str, Array] | None:
        """Draw inputs of which about half are extreme, to reveal unstable kernels; None if none are stated.

        Override it for inputs that depend on others, such as statistics that an earlier kernel computed.

        Args:
            rng: Source of randomness.

        Returns:
            One array for every tensor of `inputs()`, by name.
        """
        from tunebench.stress import stressed

        stresses = self.stress()
        if not stresses:
            return None
        tensors = self.draw(rng)
        for tensor in self.inputs():
            if tensor.name in stresses:
                drawn = tensors[tensor.name]
                tensors[tensor.name] = stressed(drawn, tensor.dtype, stresses[tensor.name], rng)
        return tensors

    @final
    def draw_tensor(self, tensor: Tensor, rng: np.random.Generator) -> Array:
        """Draw one input as described for `draw`, or by its rule if it has one (see `draw_by_rule`).

        Args:
            tensor: Input tensor.
            rng: Source of randomness.
        """
        ruled = self.draw_by_rule(tensor, rng)
        return self._draw_freely(tensor, rng) if ruled is None else ruled

    def draw_by_rule(self, tensor: Tensor, rng: np.random.Generator) -> Array | None:
        """Draw an input whose values are restricted beyond its type, or return None for any other input.

        Override it for offsets and indices: random numbers would be out of bounds.

        Args:
            tensor: Input tensor.
            rng: Source of randomness.
        """
        return None

    def _draw_freely(self, tensor: Tensor, rng: np.random.Generator) -> Any:
        from tunebench.dtype import numpy_dtype

        stored = numpy_dtype(tensor.dtype)
        if tensor.dtype == "bool":
            return rng.integers(0, 2, tensor.shape).astype(stored)
        if is_integer(tensor.dtype):
            half = 2 ** (8 * itemsize(tensor.dtype) - 1)
            return rng.integers(-half, half, tensor.shape, dtype=stored)
        if not tensor.shape:
            return stored.type(rng.uniform(0.5, 1.5))
        return rng.standard_normal(tensor.shape, dtype="float32").astype(stored)

    # -- its text -----------------------------------------------------------------------------

    @classmethod
    @functools.cache
    def dimension_types(cls) -> dict[str, Any]:
        """Return the type of each dimension, by field name, as its annotation states it."""
        return get_type_hints(cls, include_extras=True)

    @classmethod
    @functools.cache
    def dimension_kinds(cls) -> dict[str, Kind]:
        """Return the kind of each dimension, by field name: its base type and its range or values."""
        return {name: Kind.of(hint) for name, hint in cls.dimension_types().items()}

    @classmethod
    @functools.cache
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(cls)

    @classmethod
    @functools.cache
    def dimensions(cls) -> tuple[str, ...]:
        """Return the names of the dimensions, in canonical order."""
        return tuple(dimension.name for dimension in dataclasses.fields(cls))

    @classmethod
    def choices(cls, dimension: str) -> tuple[Any, ...]:
        """Return the listed values of a dimension; empty for a number or a name.

        Args:
            dimension: Name of the dimension.

        Raises:
            UnknownName: There is no such dimension.
        """
        if dimension not in cls.dimensions():
            raise UnknownName(f"dimension of {cls.operator}", dimension, cls.dimensions())
        return cls.dimension_kinds()[dimension].values

    def changed(self, **dimensions: Any) -> Workload:
        """Return this workload with some dimensions replaced; dimensions that follow one of them are updated.

        Args:
            dimensions: New values, by dimension.

        Raises:
            InputError: A dimension is unknown or has an invalid value.
        """
        return type(self).from_dimensions({**self._given(), **self._by_dimension(dimensions.items())})

    @classmethod
    def parse_dimensions(cls, text: str) -> Workload:
        """Build a workload from text.

        Args:
            text: ``m=64,n=64,…``, in any order.

        Raises:
            InputError: A dimension is missing, repeated, malformed or out of range; the message names it.
        """
        return cls.from_dimensions(cls.split_dimensions(text))

    @classmethod
    def split_dimensions(cls, text: str) -> dict[str, str]:
        """Split text into dimension values, still as text.

        Commas in parentheses do not separate, and spaces around names and values are ignored.

        Args:
            text: ``m=64,n=64,…``, in any order.

        Returns:
            The text of each value, by dimension.

        Raises:
            InputError: A dimension is repeated or malformed; the message names it.
        """
        pairs: list[tuple[str, str]] = []
        for item in filter(None, items_of(text)):
            name, equals, value = map(str.strip, item.partition("="))
            if not equals or not value:
                raise InputError(f"{cls.operator}: expected dimension=value, got {quoted(item)}")
            pairs.append((name, value))
        return cls._by_dimension(pairs)

    @classmethod
    def _by_dimension(cls, pairs: Iterable[tuple[str, _V]]) -> dict[str, _V]:
        """Return values by dimension, with aliases resolved."""
        values: dict[str, _V] = {}
        for name, value in pairs:
            dimension = cls.aliases.get(name, name)
            if dimension in values:
                raise InputError(f"{cls.operator}: dimension {quoted(dimension)} is given twice")
            values[dimension] = value
        return values

    @classmethod
    def from_dimensions(cls, given: Mapping[str, Any]) -> Workload:
        """Build a workload from dimensions given as text or as values.

        Args:
            given: Text or value of each dimension; dimensions with a default may be omitted.

        Raises:
            InputError: A dimension is missing, unknown, malformed or out of range; the message names it.
        """
        given = cls._by_dimension(given.items())
        for name in given:
            if name not in cls.dimensions():
                raise UnknownName(f"dimension of {cls.operator}", name, cls.dimensions())
        missing = [
            dimension.name
            for dimension in cls._fields()
            if dimension.default is dataclasses.MISSING and dimension.name not in given
        ]
        if missing:
            raise InputError(f"{cls.operator}: missing {', '.join(missing)}; usage: {cls.usage()}")
        operator, kinds = cls.operator, cls.dimension_kinds()
        return cls(**{name: value_of(operator, name, value, kinds[name]) for name, value in given.items()})

    @classmethod
    def usage(cls) -> str:
        """Return the text form with a placeholder for each dimension, optional ones in brackets."""
        kinds = cls.dimension_kinds()
        parts = []
        for dimension in cls._fields():
            text = f"{dimension.name}={placeholder(kinds[dimension.name])}"
            parts.append(text if dimension.default is dataclasses.MISSING else f"[{text}]")
        return f"{cls.operator}:{','.join(parts)}"

    def _given(self) -> dict[str, Any]:
        """Return the dimensions that are not at their defaults, in declared order."""
        changed = {}
        for dimension in self._fields():
            value = getattr(self, dimension.name)
            follows = dimension.metadata.get("follows")
            default = (
                self.default_of(dimension.name, getattr(self, follows)) if follows else dimension.default
            )
            if value != default:
                changed[dimension.name] = value
        return changed

    def __str__(self) -> str:
        """Return the canonical text: dimensions in declared order, defaults omitted."""
        parts = (f"{name}={text_of(value)}" for name, value in self._given().items())
        return f"{self.operator}:{','.join(parts)}"


__getattr__ = renamed(__name__, {"Leeway": "AllowedChanges"})
