"""Errors of gradients whose saved activations are compressed, and the memory that this saves.

    python -m benchmarks.compressed_gradients [--model transformer] [--out FILE]

Every activation that may be compressed is compressed. Errors are relative, in the Euclidean norm: of all
gradients together, and of the parameter with the largest error. Results of the forward pass are compared bit
for bit.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.table import write_table
from tunebench.training.fitting.compressed_activation import FORMATS, compressible
from tunebench.training.fitting.fitter import Fitter, fitted_by
from tunebench.training.fitting.joint_step import JointStep
from tunebench.training.fitting.plan_choice import ChosenPlan, PlanChoice
from tunebench.training.memory import PlanEffort, plan_memory, simulate, unplanned

__all__ = ["MODELS", "GradientError", "gradient_error"]


class _Convolutions(nn.Module):
    """Blocks of convolutions with batch normalisation and SiLU, and a classifier."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        conv = functools.partial(nn.Conv2d, width, width, 3, padding=1, bias=False)
        self.convolutions = nn.ModuleList(conv() for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + functional.silu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


class _Transformer(nn.Module):
    """An encoder with normalisation before its layers, and a classifier."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class _Gated(nn.Module):
    """Gated layers as in Llama, with residuals and RMS normalisation, and a classifier."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.products = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.outs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for norm, product, out in zip(self.norms, self.products, self.outs, strict=True):
            value, gate = product(norm(x)).chunk(2, -1)
            x = x + out(value * functional.silu(gate))
        return self.head(x)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer": lambda: (_Transformer(64, 2), torch.randn(16, 32, 64)),
    "convolutions": lambda: (_Convolutions(16, 4), torch.randn(16, 3, 16, 16)),
    "gated perceptron": lambda: (_Gated(64, 3), torch.randn(512, 64)),
}
"""Models and inputs; the loss is the cross entropy of ten classes at random."""


class _Compressing(Fitter):
    """Compress every activation that may be compressed."""

    def _chosen(self, joint: JointStep, joint_of: Callable[[PlanChoice], JointStep]) -> ChosenPlan:
        names = () if self._element is None else tuple(c.name for c in compressible(joint, self._element))
        choice = PlanChoice(compressed=names)
        changed = joint_of(choice)
        peak_bytes = simulate(changed.step, unplanned(changed.step)).peak_bytes
        plan = plan_memory(changed.step, peak_bytes, effort=PlanEffort(rounds=0, relaxed_size=0))
        return ChosenPlan(choice=choice, joint=changed, plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientError:
    """Errors of the gradients of a model.

    Attributes:
        compressed: Number of compressed tensors.
        peak_bytes: Peak of the step with them.
        plain_bytes: Peak of the step without.
        total: Relative error of all gradients together.
        worst: Relative error of the parameter with the largest one.
        same_loss: Whether losses are equal bit for bit.
    """

    compressed: int
    peak_bytes: int
    plain_bytes: int
    total: float
    worst: float
    same_loss: bool


def gradient_error(name: str, element: str) -> GradientError:
    """Return the errors of the gradients of a model in `MODELS` with compressed activations.

    Args:
        name: Name of the model.
        element: Type of the elements, see `tunebench.training.fit`.
    """
    (loss, gradients, plain), (expected_loss, expected, whole) = (
        _trained(name, choice) for choice in (element, None)
    )
    errors = [(first - second).double().norm() for first, second in zip(gradients, expected, strict=True)]
    norms = [gradient.double().norm() for gradient in expected]
    return GradientError(
        compressed=len(plain.choice.compressed),
        peak_bytes=plain.plan.simulation.peak_bytes,
        plain_bytes=whole.plan.simulation.peak_bytes,
        total=float(torch.stack(errors).norm() / torch.stack(norms).norm()),
        worst=max(float(error / norm) for error, norm in zip(errors, norms, strict=True) if norm),
        same_loss=torch.equal(loss, expected_loss),
    )


def _trained(name: str, element: str | None) -> tuple[Tensor, Sequence[Tensor], ChosenPlan]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = MODELS[name]()
    classes = torch.randint(10, (len(x),))

    def loss_of(x: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), classes)

    fitter = _Compressing("100%", element=element)
    loss = fitted_by(fitter, loss_of)(x)
    loss.backward()
    (step,) = fitter.steps
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return loss.detach(), gradients, ChosenPlan(choice=step.choice, joint=step.joint, plan=step.plan)


def _rows(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        for element in FORMATS:
            error = gradient_error(name, element)
            yield (
                f"| {name} | {element} | {error.compressed} | {error.plain_bytes / 1e6:.2f} | "
                f"{error.peak_bytes / 1e6:.2f} | {error.total:.2%} | {error.worst:.2%} | "
                f"{'yes' if error.same_loss else 'no'} |"
            )


def main() -> None:
    """Measure the errors, and write a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="models (default: all)")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    header = (
        "| model | compress | tensors | peak without, MB | peak with, MB | error of all gradients | "
        "largest error of a parameter | loss equal |\n|---|---|---|---|---|---|---|---|"
    )
    write_table(header, _rows(options.model or MODELS), options.out)


if __name__ == "__main__":
    main()
