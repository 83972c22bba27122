"""Base of gemm and conv2d: a prologue of the left operand, and an epilogue with an activation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tunebench._lazy import np
from tunebench.activation import ACTIVATIONS
from tunebench.dtype import unit_roundoff
from tunebench.errors import InputError
from tunebench.expression import Apply, Name, parse
from tunebench.workload import AllowedChanges, Category, Expression, Tensor, Workload
from tunebench.workloads.common import activation as activations
from tunebench.workloads.common import prologue as prologues
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.operators.elementwise import neighbour

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["FusedProduct"]


@dataclass(frozen=True, kw_only=True)
class FusedProduct(Workload):
    """A product whose epilogue is a list of steps joined by ``+``; subclasses declare the dimensions."""

    category: ClassVar[Category | None] = "dot product"
    summed: ClassVar[str]
    """Dimension over which products are summed: zeros along it stay zeros only if `pre` has a value at 0."""

    if TYPE_CHECKING:  # their places among the dimensions differ between subclasses

        @property
        def epilogue(self) -> str:
            """Steps applied to sums, joined by ``+``; or none."""

        @property
        def act(self) -> Expression:
            """Activation of the epilogue, as an expression in x."""

        @property
        def pre(self) -> Expression:
            """Prologue: an expression in x, scale and shift."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tree = parse(self.act)
        if not isinstance(tree, Apply) or tree.arguments != (Name("x"),):
            return
        # An `act` with a name becomes a step of the epilogue, so that one workload has one text.
        for choice in self.choices("epilogue"):
            steps = choice.split("+")
            if tree.operation in steps:
                steps.remove(tree.operation)
                if steps == list(self.steps):
                    object.__setattr__(self, "epilogue", choice)
                    object.__setattr__(self, "act", IDENTITY)
                    return

    @property
    def steps(self) -> tuple[str, ...]:
        """Steps of the epilogue, in order."""
        return () if self.epilogue == "none" else tuple(self.epilogue.split("+"))

    @property
    def applied(self) -> tuple[str, ...]:
        """Steps of the epilogue including `act`, in order."""
        return self.steps if self.act == IDENTITY else (*self.steps, self.act)

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added to each column or output channel."""
        return "bias" in self.steps

    @property
    def has_residual(self) -> bool:
        """Whether a tensor of the shape of the result is added."""
        return "residual" in self.steps

    @property
    def has_pre(self) -> bool:
        """Whether a function of the left operand is multiplied in its place."""
        return self.pre != IDENTITY

    @property
    def activation(self) -> str:
        """The activation of the epilogue: a name, or an expression in x."""
        if self.act != IDENTITY:
            return self.act
        return next((step for step in self.steps if step in ACTIVATIONS), "none")

    def may_change(self) -> AllowedChanges:
        """Return the allowed changes; with an expression, a further operation becomes part of it."""
        allowed = self.allowed_changes
        if self.act != IDENTITY:
            allowed = dataclasses.replace(allowed, fusions={})
        if prologues.is_finite_at_zero(self.pre):
            return allowed
        padding = {name: value for name, value in allowed.padding.items() if name != self.summed}
        return dataclasses.replace(allowed, padding=padding)

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw scale and shift of `pre` near 1 and 0, so that sums have the same size as without `pre`."""
        return prologues.draw(tensor, rng)

    def _check_expressions(self, terms: int, factor: float = 1.0) -> None:
        """Refuse a prologue or an activation that may have no finite value.

        Args:
            terms: Number of products per sum.
            factor: Largest factor applied to sums before the activation.
        """
        out = self.outputs()[0].dtype
        if self.has_pre:
            prologues.check(self.operator, self.pre, self.dtype, out, terms, factor)
        if self.act == IDENTITY:
            return
        if any(step in ACTIVATIONS for step in self.steps):
            raise InputError(
                f"{self.operator}: epilogue={self.epilogue} already has an activation, got also "
                f"act={self.act}; leave one out, or write both as one expression"
            )
        reach = prologues.reach(self.pre, terms) if self.has_pre else activations.reach(terms)
        activations.check(self.operator, self.act, reach * factor, out)

    def _with_prologue(
        self, x: Array64, inputs: Mapping[str, Array64], shape: tuple[int, ...] = (-1,)
    ) -> tuple[Array64, Array64]:
        """Return `pre` of an operand, and the sum of its magnitude and its error in units of `eps_acc`.

        Args:
            x: The operand, or a part of it with all its columns or channels.
            inputs: All inputs.
            shape: Shape in which scale and shift broadcast to x.
        """
        if not self.has_pre:
            return x, np.abs(x)
        numbers = {
            name: inputs[prologues.PREFIX + name].reshape(shape) for name in prologues.vectors(self.pre)
        }
        value, error = prologues.applied(self.pre, x, numbers, self.dtype)
        # The final rounding applies to the sum including its errors.
        factor = 1 + (1 + unit_roundoff(self.outputs()[0].dtype)) / self.tolerance().eps_acc
        return value, np.abs(value) + error * factor

    def _apart(self, shape: tuple[int, int], lies: Literal["vectors", "columns"]) -> tuple[Workload, ...]:
        """Return prologue, product and epilogue as separate workloads.

        Args:
            shape: Rows and columns of the left operand, seen as a matrix.
            lies: Whether scale and shift of `pre` hold a number for each column or for each row.
        """
        result = self.outputs()[0]
        parts = [self.changed(epilogue="none", act=IDENTITY, pre=IDENTITY)]
        try:
            if self.has_pre:
                parts.insert(0, prologues.chain(self.pre, self.inputs()[0], shape, lies))
            if self.applied:
                cols = result.shape[-1]
                matrix = (result.size // cols, cols)
                parts.append(neighbour(self.applied, result.name, matrix, result.dtype, vectors="scale+bias"))
        except InputError:  # the chain alone has no text, or no inputs that can be drawn
            return ()
        return tuple(parts)
