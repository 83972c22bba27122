"""Optimizers by name: one record each of its states, memory traffic and operations.

Predicted updates, memory of devices and of hosts, options and help texts follow from these records. To add an
optimizer, add a `NamedOptimizer` to `OPTIMIZERS`.

States have the dtype of the parameters. In mixed precision they are f32, beside an f32 copy of the parameters
that the update changes (Micikevicius et al., "Mixed precision training", 2018, arXiv 1710.03740; Rajbhandari
et al., "ZeRO", 2020, section 3.1).

Sources:

- AdamW, two moments: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, arXiv 1711.05101.
- Adafactor, the second moment of a matrix as its rows and columns, and no first moment: Shazeer and Stern,
  "Adafactor: adaptive learning rates with sublinear memory cost", 2018, arXiv 1804.04235.
- Lion, one momentum: Chen et al., "Symbolic discovery of optimization algorithms", 2023, arXiv 2302.06675.
- Muon, one momentum and five Newton-Schulz steps of three products each: Jordan et al., "Muon: an optimizer
  for hidden layers in neural networks", 2024, and `torch.optim.Muon`.
- 8-bit AdamW, two moments of one byte and an f32 scale for each block of 256: Dettmers et al., "8-bit
  optimizers via block-wise quantization", 2021, arXiv 2110.02861, and bitsandbytes, `optim/optimizer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tunebench.errors import UnknownName
from tunebench.expression import names, parse, steps

__all__ = ["OPTIMIZERS", "NamedOptimizer", "find_optimizer"]

F32_BYTES = 4

BLOCK = 256
"""Elements of a quantized state that share a scale."""

MATRIX = 1024
"""Rows and columns of the matrix by which factored states are counted where shapes are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptimizer:
    """What is known of an optimizer.

    Attributes:
        name: Name in options.
        kernels: Elementwise kernels of an update of many tensors at a time in eager PyTorch, as expressions.
            A name is a tensor that the kernel reads, and each kernel writes one. A reduction counts as half a
            copy.
        fused_kernels: Copies and sums that move as many bytes as one kernel for the whole update.
        moments: States with a number for each parameter, in the dtype of the parameters.
        factored: States of a matrix with a number for each row and each column, and of other tensors with one
            for each parameter, in the dtype of the parameters.
        quantized: States with a byte for each parameter, and an f32 scale for each block.
        newton_schulz_steps: Steps that make the update of a matrix orthogonal, of three products each.
        megatron: Name in Megatron-LM (`--optimizer`); None if it has none.
        torchtitan: Name in torchtitan (`--optimizer.name`); None if it has none.
    """

    name: str
    kernels: tuple[str, ...] = ()
    fused_kernels: tuple[str, ...] = ()
    moments: int = 0
    factored: int = 0
    quantized: int = 0
    newton_schulz_steps: int = 0
    megatron: str | None = None
    torchtitan: str | None = None

    @property
    def updates(self) -> bool:
        """Whether the optimizer updates parameters; False for `none`."""
        return bool(self.kernels)

    @property
    def quantized_bytes(self) -> float:
        """Bytes of quantized states per parameter, with their scales."""
        return self.quantized * (1 + F32_BYTES / BLOCK)

    def state_bytes(self, number_bytes: float) -> float:
        """Return the bytes of states per parameter of a large network.

        Args:
            number_bytes: Bytes of a parameter; 4 in mixed precision.
        """
        return (self.moments + self.factored * 2 / MATRIX) * number_bytes + self.quantized_bytes

    def tensor_state_bytes(self, shape: Sequence[int], number_bytes: int) -> int:
        """Return the bytes of states of a tensor.

        Args:
            shape: Shape of the parameter.
            number_bytes: Bytes of a number of it.
        """
        count = math.prod(shape)
        rows_and_columns = count
        if len(shape) > 1:
            rows_and_columns = count // shape[-1] + count // shape[-2]
        numbers = self.moments * count + self.factored * rows_and_columns
        return numbers * number_bytes + self.quantized * (count + F32_BYTES * -(-count // BLOCK))

    @property
    def mixed_state_bytes(self) -> float:
        """Bytes per parameter of states and of the f32 copy of the parameters in mixed precision."""
        return self.state_bytes(F32_BYTES) + F32_BYTES * self.updates

    def traffic_bytes(self, number_bytes: float, *, fused: bool) -> float:
        """Return the bytes per parameter that an update reads and writes, without products.

        Args:
            number_bytes: Bytes of a parameter.
            fused: Whether one kernel does it all.
        """
        kernels = self.fused_kernels if fused else self.kernels
        tensors = sum(len(names(parse(kernel))) + 1 for kernel in kernels)
        return tensors * number_bytes + 2 * self.quantized_bytes

    @property
    def operations(self) -> int:
        """Arithmetic operations of an update per parameter, without products."""
        return sum(len(steps(parse(kernel))) for kernel in self.kernels)

    def product_flops(self, rows: int, columns: int) -> float:
        """Return the FLOPs of the products that an update of a matrix needs.

        Args:
            rows: Rows of the matrix.
            columns: Columns of the matrix.
        """
        short, long = sorted((rows, columns))
        return self.newton_schulz_steps * (4.0 * short**2 * long + 2.0 * short**3)


OPTIMIZERS: Mapping[str, NamedOptimizer] = MappingProxyType(
    {
        optimizer.name: optimizer
        for optimizer in (
            NamedOptimizer(name="none"),
            NamedOptimizer(name="sgd", kernels=("p+0.01*g",), fused_kernels=("p+0.01*g",), megatron="sgd"),
            # torch.optim.SGD: decay of the momentum, its sum with the gradient, and the step.
            NamedOptimizer(
                name="sgd-momentum",
                kernels=("m*0.9", "m+g", "p+0.01*m"),
                fused_kernels=("x", "p+m"),
                moments=1,
                megatron="sgd",
            ),
            # torch.optim.AdamW: decay, first moment, second moment (two kernels), root, its correction,
            # epsilon, and the step itself. The fused update reads four tensors and writes three: two copies
            # and a sum.
            NamedOptimizer(
                name="adamw",
                kernels=(
                    "p*0.99",
                    "m+0.1*g",
                    "v*0.999",
                    "v+0.001*square(g)",
                    "sqrt(abs(v)+0.01)",
                    "x*2",
                    "x+0.01",
                    "p+m*x",
                ),
                fused_kernels=("x", "x", "p+m"),
                moments=2,
                megatron="adam",
                torchtitan="AdamW",
            ),
            # torch.optim.Adafactor: norms of the parameter, of rows, columns and the update, and the product
            # of means (five tensors: three copies); decay, scale, clamp, root, product with the gradient, and
            # the step. Fused, the gradient is read again for the update.
            NamedOptimizer(
                name="adafactor",
                kernels=(
                    *("x", "x", "x"),
                    "p*0.99",
                    "v*0.999",
                    "max(v,0.01)",
                    "rsqrt(v)",
                    "v*g",
                    "p+0.01*g",
                ),
                fused_kernels=("x", "p+g"),
                factored=1,
            ),
            # The authors' lion_pytorch.py: decay, copy and decay of the momentum, its sum with the gradient,
            # the sign, the step, and the momentum itself (two kernels).
            NamedOptimizer(
                name="lion",
                kernels=("p*0.99", "x", "m*0.9", "m+0.1*g", "step(x)", "p+0.01*x", "m*0.99", "m+0.01*g"),
                fused_kernels=("x", "p+m"),
                moments=1,
            ),
            # torch.optim.Muon: momentum and Nesterov's sum, conversion, norm and scale, decay, and the step.
            NamedOptimizer(
                name="muon",
                kernels=("m+0.05*g", "g+0.95*m", "x", "x", "x*2", "p*0.99", "p+0.01*x"),
                fused_kernels=("x", "x", "x", "p+x"),
                moments=1,
                newton_schulz_steps=5,
                megatron="muon",
            ),
            # bitsandbytes: one kernel.
            NamedOptimizer(
                name="adamw-8bit",
                kernels=("p+g",),
                fused_kernels=("p+g",),
                quantized=2,
            ),
        )
    }
)
"""All optimizers by name.

Muon is counted for all parameters. Programs often update embeddings, heads and vectors by AdamW instead,
which stores one moment more for them.
"""


def find_optimizer(name: str) -> NamedOptimizer:
    """Return the optimizer with a name.

    Raises:
        UnknownName: if there is none.
    """
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]
