"""ResNet-50, BERT-base and GPT-2 before and after `patch`: outputs and gradients, held against float64.

    python -m benchmarks.patched_models [--model resnet50 ...] [--layers N] [--out FILE.md]

Random weights, small inputs: four images of 96 x 96, or one text of 64 words. Each model runs a training
step, and the network of images besides one in eval mode, where batch normalisation is a scale and a shift:

- in float64 by torch, to hold the others against;
- in float32 by torch;
- patched, with `prefer("tunebench")`, so that a kernel of ours runs wherever one can;
- patched, as it would be served: by whoever is known to be faster;
- given back, which must be what it was to the last bit.

Kernels are counted, and compiled on their first use: minutes on few cores, seconds when it is run again.
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
"""Length of a text."""
SLACK = 16.0
"""How many times torch's own error in float32 ours may be: sums are taken in another order."""
AT_KINKS = 0.05
"""Relative error that gradients of ReLU networks may have in any case, torch's have it, too: where rounding
moves a sum across 0, a whole term of the gradient comes or goes."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step gives.

    Attributes:
        outputs: Logits.
        gradients: Of each parameter, by name.
        served: How many calls each side ran, by who and operator.
    """

    outputs: Tensor
    gradients: dict[str, Tensor]
    served: Counter[tuple[str, str]]

    def error(self, truth: Step) -> tuple[float, float, str]:
        """Return the relative errors of the outputs and of the worst gradient, and which that is."""
        errors = {
            name: relative_error(gradient, truth.gradients[name])
            for name, gradient in self.gradients.items()
            if truth.gradients[name].norm() > 1e-9 * _largest(truth)
        }
        worst = max(errors, key=lambda name: errors[name])
        return relative_error(self.outputs, truth.outputs), errors[worst], worst


def _largest(truth: Step) -> float:
    return max(float(gradient.norm()) for gradient in truth.gradients.values())


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference over that of the truth."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """Run a model forwards and backwards; its state is as it was afterwards."""
    before = copy.deepcopy(model.state_dict())
    served: Counter[tuple[str, str]] = Counter()

    def count(call: DispatchedCall) -> None:
        served[call.by, call.function] += 1

    model.zero_grad(set_to_none=True)
    torch.set_num_threads(1)  # more of them, or fewer than before, add up in another order
    with watching(count):
        outputs = model(inputs)
        nn.functional.cross_entropy(outputs, targets).backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.load_state_dict(before)
    return Step(outputs=outputs.detach(), gradients=gradients, served=served)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with what it is given, and what error its gradients may have in any case."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    gradient_limit: float = 0.0

    def run(self, *, kernels: bool = True) -> Iterator[tuple[str, Step]]:
        """Run the steps one after the other, each with its name; without `kernels`, not the one by ours."""
        double = copy.deepcopy(self.model).double()
        inputs = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        yield "float64", step(double, inputs, self.targets)
        yield "torch", step(self.model, self.inputs, self.targets)
        with patch(self.model) as report, patched_calls():
            if kernels:
                print(report, flush=True)
            if kernels:
                with prefer("tunebench"):
                    ours = step(self.model, self.inputs, self.targets)
                yield "tunebench", ours
            yield "faster", step(self.model, self.inputs, self.targets)
        yield "given back", step(self.model, self.inputs, self.targets)


def cases(names: list[str], layers: int | None) -> Iterator[Case]:
    """Return what is to be run, made when its turn has come."""
    for name in names:
        torch.manual_seed(SEED)
        yield from CASES[name](layers)


def _resnet(layers: int | None) -> Iterator[Case]:
    model = Resnet(blocks=(3, 4, 6, 3)[:layers])
    images, targets = torch.randn(4, 3, 96, 96), torch.randint(0, 1000, (4,))
    given: dict[str, Any] = {"inputs": images, "targets": targets, "gradient_limit": AT_KINKS}
    yield Case(name="ResNet-50, training", model=model.train(), **given)
    with torch.no_grad():
        for _ in range(10):
            model(images)  # running statistics that are not those of a fresh network
    yield Case(name="ResNet-50, eval mode", model=model.eval(), **given)


def _text(name: str, make: Callable[[Size], nn.Module], size: Size) -> Iterator[Case]:
    words = torch.randint(0, size.words, (1, WORDS))
    targets = torch.randint(0, size.words, (WORDS,))
    yield Case(name=name, model=make(size), inputs=words, targets=targets)


CASES: dict[str, Callable[[int | None], Iterator[Case]]] = {
    "resnet50": _resnet,
    "bert-base": lambda layers: _text("BERT-base", Bert, Size(layers=layers or 12, words=30522, longest=512)),
    "gpt2": lambda layers: _text("GPT-2", Gpt2, Size(layers=layers or 12)),
}


def judged(case: Case) -> tuple[list[str], bool]:
    """Run a case; return the rows of its table, and whether all is as it should be."""
    steps: dict[str, Step] = {}
    rows, right = [], True
    for name, found in case.run():
        steps[name] = found
        if name == "float64":
            continue
        output, gradient, worst = found.error(steps["float64"])
        ours, theirs = (
            sum(n for (by, _), n in found.served.items() if by == who) for who in ("tunebench", "torch")
        )
        rows.append(f"| {case.name} | {name} | {output:.2e} | {gradient:.2e} ({worst}) | {ours} | {theirs} |")
        print(rows[-1], dict(found.served), flush=True)
        if name != "torch":
            limits = steps["torch"].error(steps["float64"])
            right &= output <= SLACK * limits[0]
            right &= gradient <= max(SLACK * limits[1], case.gradient_limit)
    same = torch.equal(steps["given back"].outputs, steps["torch"].outputs)
    return rows, right and same and _ran(steps["tunebench"])


def _ran(found: Step) -> bool:
    return any(by == "tunebench" for by, _ in found.served)


HEADER = (
    "| model | run by | error of outputs | error of the worst gradient | by our kernels | left to torch |\n"
    "|---|---|---|---|---|---|"
)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit code tells whether outputs and gradients are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(CASES), help="only this one; repeatable")
    parser.add_argument("--layers", type=int, help="stages or layers, fewer than there are")
    parser.add_argument("--out", type=Path, help="where the table is written")
    given = parser.parse_args(arguments)
    began, rows, right = time.monotonic(), [], True
    for case in cases(given.model or list(CASES), given.layers):
        found, fine = judged(case)
        rows += found
        right &= fine
        print(f"{case.name}: {'right' if fine else 'WRONG'}, {time.monotonic() - began:.0f} s", flush=True)
    table: Any = "\n".join((HEADER, *rows))
    print(table)
    if given.out is not None:
        given.out.write_text(table + "\n", encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
