"""ResNet-50, BERT-base and GPT-2 before and after `patch`: errors of outputs and gradients against float64.

    python -m benchmarks.patched_models [--model resnet50 ...] [--layers N] [--out FILE.md]

Weights are random and inputs small: four images of 96 x 96, or one text of 64 words. Each model runs a
training step, ResNet-50 also in eval mode, where batch normalisation is a scale and a shift:

- in float64 by torch, as the reference
- in float32 by torch
- patched, with `prefer("tunebench")`: tuned kernels wherever possible
- patched, with the default preference: the faster implementation
- restored: equal to the original to the last bit

Compiling kernels for the first time takes minutes on few cores.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.torch_models import Bert, Gpt2, Resnet, Size
from tunebench.dispatch import DispatchedCall
from tunebench.torch import patch, patched_calls, prefer, watching

SEED = 7
WORDS = 64
"""Words of a text."""
SLACK = 16.0
"""Largest error as a multiple of torch's error in float32; tuned kernels sum in another order."""
AT_KINKS = 0.05
"""Relative error that gradients of ReLU networks may always have, also torch's: where rounding moves a sum
across 0, a term of the gradient appears or disappears.
"""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of a step.

    Attributes:
        outputs: Logits.
        gradients: Gradient of each parameter, by name.
        served: Number of calls by implementation and operator.
    """

    outputs: Tensor
    gradients: dict[str, Tensor]
    served: Counter[tuple[str, str]]

    def row(self, *cells: str, truth: StepResult) -> str:
        """Return a table row: first cells, errors, calls by tuned kernels, and calls by torch."""
        output, gradient, worst = self.error(truth)
        calls = (
            str(sum(n for (by, _), n in self.served.items() if by == implementation))
            for implementation in ("tunebench", "torch")
        )
        return f"| {' | '.join((*cells, f'{output:.2e}', f'{gradient:.2e} ({worst})', *calls))} |"

    def error(self, truth: StepResult) -> tuple[float, float, str]:
        """Return the relative errors of the outputs and of the worst gradient, and that gradient's name."""
        errors = {
            name: relative_error(gradient, truth.gradients[name])
            for name, gradient in self.gradients.items()
            if truth.gradients[name].norm() > 1e-9 * _largest(truth)
        }
        worst = max(errors, key=lambda name: errors[name])
        return relative_error(self.outputs, truth.outputs), errors[worst], worst


def _largest(truth: StepResult) -> float:
    return max(float(gradient.norm()) for gradient in truth.gradients.values())


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the truth."""
    return float((result.double() - truth.double()).norm() / truth.double().norm())


def step(
    model: nn.Module, inputs: Tensor, targets: Tensor, *, run: Callable[[Tensor], Tensor] | None = None
) -> StepResult:
    """Run a model forward and backward, and restore its state.

    Args:
        model: Model with the parameters.
        inputs: Input of the model.
        targets: Class of each output.
        run: Forward pass; default: that of the model.
    """
    before = copy.deepcopy(model.state_dict())
    served: Counter[tuple[str, str]] = Counter()

    def count(call: DispatchedCall) -> None:
        served[call.by, call.function] += 1

    model.zero_grad(set_to_none=True)
    torch.set_num_threads(1)  # another number of threads changes the order of sums
    with watching(count):
        outputs = model(inputs) if run is None else run(inputs)
        nn.functional.cross_entropy(outputs, targets).backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.load_state_dict(before)
    return StepResult(outputs=outputs.detach(), gradients=gradients, served=served)


@dataclass(frozen=True, kw_only=True)
class PatchedModelCase:
    """A model with its inputs, and the relative error that its gradients may always have."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    gradient_limit: float = 0.0

    def run(self, *, kernels: bool = True) -> Iterator[tuple[str, StepResult]]:
        """Run the steps in order, each with its name; without `kernels`, skip the one by tuned kernels."""
        double = copy.deepcopy(self.model).double()
        inputs = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        yield "float64", step(double, inputs, self.targets)
        yield "torch", step(self.model, self.inputs, self.targets)
        with patch(self.model) as report, patched_calls():
            if kernels:
                print(report, flush=True)
                with prefer("tunebench"):
                    ours = step(self.model, self.inputs, self.targets)
                yield "tunebench", ours
            yield "faster", step(self.model, self.inputs, self.targets)
        yield "restored", step(self.model, self.inputs, self.targets)


def within_limits(
    tuned_step: StepResult, by_torch: StepResult, truth: StepResult, gradient_limit: float
) -> bool:
    """Return whether the errors of a step are at most `SLACK` times those of torch in float32.

    Args:
        tuned_step: The step.
        by_torch: The same step by torch in float32.
        truth: The same step in float64.
        gradient_limit: Relative error that gradients may always have.
    """
    (output, gradient, _), limits = tuned_step.error(truth), by_torch.error(truth)
    return output <= SLACK * limits[0] and gradient <= max(SLACK * limits[1], gradient_limit)


def cases(names: list[str], layers: int | None) -> Iterator[PatchedModelCase]:
    """Yield the cases; each model is made when it is needed."""
    for name in names:
        torch.manual_seed(SEED)
        yield from CASES[name](layers)


def _resnet(layers: int | None) -> Iterator[PatchedModelCase]:
    model = Resnet(blocks=(3, 4, 6, 3)[:layers])
    images, targets = torch.randn(4, 3, 96, 96), torch.randint(0, 1000, (4,))
    shared: dict[str, Any] = {"inputs": images, "targets": targets, "gradient_limit": AT_KINKS}
    yield PatchedModelCase(name="ResNet-50, training", model=model.train(), **shared)
    with torch.no_grad():
        for _ in range(10):
            model(images)  # updates running statistics, which are trivial in a new network
    yield PatchedModelCase(name="ResNet-50, eval mode", model=model.eval(), **shared)


def _text(name: str, make: Callable[[Size], nn.Module], size: Size) -> Iterator[PatchedModelCase]:
    words = torch.randint(0, size.words, (1, WORDS))
    targets = torch.randint(0, size.words, (WORDS,))
    yield PatchedModelCase(name=name, model=make(size), inputs=words, targets=targets)


CASES: dict[str, Callable[[int | None], Iterator[PatchedModelCase]]] = {
    "resnet50": _resnet,
    "bert-base": lambda layers: _text("BERT-base", Bert, Size(layers=layers or 12, words=30522, longest=512)),
    "gpt2": lambda layers: _text("GPT-2", Gpt2, Size(layers=layers or 12)),
}


def check_case(case: PatchedModelCase) -> tuple[list[str], bool]:
    """Run a case; return its rows of the table, and whether all errors are within the limits."""
    steps: dict[str, StepResult] = {}
    rows, right = [], True
    for name, result in case.run():
        steps[name] = result
        if name == "float64":
            continue
        rows.append(result.row(case.name, name, truth=steps["float64"]))
        print(rows[-1], dict(result.served), flush=True)
        right &= within_limits(result, steps["torch"], steps["float64"], case.gradient_limit)
    same = torch.equal(steps["restored"].outputs, steps["torch"].outputs)
    return rows, right and same and any(by == "tunebench" for by, _ in steps["tunebench"].served)


HEADER = (
    "| model | run by | error of outputs | error of the worst gradient | calls by tuned kernels "
    "| calls by torch |\n|---|---|---|---|---|---|"
)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit code is 0 if all errors are within the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", action="append", choices=list(CASES), help="run only this model; repeatable"
    )
    parser.add_argument("--layers", type=int, help="number of stages or layers, to run smaller models")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    began, rows, right = time.monotonic(), [], True
    for case in cases(options.model or list(CASES), options.layers):
        case_rows, fine = check_case(case)
        rows += case_rows
        right &= fine
        print(f"{case.name}: {'right' if fine else 'WRONG'}, {time.monotonic() - began:.0f} s", flush=True)
    table: Any = "\n".join((HEADER, *rows))
    print(table)
    if options.out is not None:
        options.out.write_text(table + "\n", encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
