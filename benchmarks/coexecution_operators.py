"""Operators, modules and optimizers of torch under eager PyTorch and `coexecute`, on torch's own samples.

    python -m benchmarks.coexecution_operators [--samples 10] [--only NAME ...] [--out FILE.jsonl]
                                               [--table FILE.md]

A case is a training step with one operator (also its in-place form, and samples for which it must raise), one
module, or one optimizer. Its iterations run several samples in turns, also with permuted, zeroed and negated
values, which take other branches or raise. Compared is what `benchmarks.coexecution` compares: results,
types, gradients, inputs after the step, exceptions, random state.

Each result is saved as one line as soon as it is known, and the same command runs only what is missing for
the present code, also after it was killed.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from benchmarks.coexecution import TOLERANCE, Record, differences, engine_revision, load, run_program, save
from benchmarks.programs import Make, State, Step
from tunebench.training import coexecute
from tunebench.training.coexecution._testing import forced

__all__ = ["Case", "cases", "examine"]

ROUNDS = 8
"""Iterations with each sample."""

_PERMUTED, _ZEROED, _NEGATED = (2, 5), (3,), (4,)
"""Rounds with other values than those of the sample."""

_UNDEFINED = ("empty", "new_empty", "nn.functional.embedding_bag")
"""Operators whose results are undefined: memory without contents, offsets in another order."""

_STEPS = ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"differentiable": True})
"""Implementations of optimizers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training step.

    Attributes:
        kind: What it uses, such as ``operator`` or ``module``.
        name: The name of torch.
        make: Function that makes its program, like those of `benchmarks.programs`.
        steps: Iterations to run.
    """

    kind: str
    name: str
    make: Make
    steps: int


def cases(samples: int, only: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield all cases.

    Args:
        samples: Largest number of samples of an operator or module.
        only: Names of operators, modules and optimizers; empty for all.
    """
    for kind, infos, cases_of in (
        ("operator", op_db, _operator_cases),
        ("module", module_db, _module_cases),
        ("optimizer", optim_db, _optimizer_cases),
    ):
        for info in infos:
            name = info.optim_cls.__name__ if kind == "optimizer" else info.name
            if not only or name in only:
                _seed(1)
                yield from cases_of(info, name, samples)


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


# -- operators -----------------------------------------------------------------------------------------------


def _operator_cases(info: Any, name: str, samples: int) -> Iterator[Case]:
    if name.startswith(_UNDEFINED) or not info.dtypes:
        return
    dtype = torch.float32 if torch.float32 in info.dtypes else sorted(info.dtypes, key=str)[0]
    trains = info.supports_autograd and dtype.is_floating_point
    title = f"{name} {info.variant_test_name}".strip()
    samples_given = [
        (sample.input, sample.args, sample.kwargs)
        for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=trains), 4 * samples)
    ]
    samples_given = [sample for sample in samples_given if _is_comparable(sample)]
    samples_given = random.Random(3).sample(samples_given, min(samples, len(samples_given)))
    if samples_given:
        yield _call_case("operator", title, info.op, samples_given)
    inplace = info.inplace_variant
    if samples_given and inplace is not None:
        yield _call_case(
            "operator in place", title, lambda x, *a, **k: inplace(x.clone(), *a, **k), samples_given
        )
    if info.error_inputs_func is not None:
        wrong = [sample.sample_input for sample in itertools.islice(info.error_inputs("cpu"), samples)]
        samples_given = [(sample.input, sample.args, sample.kwargs) for sample in wrong]
        samples_given = [sample for sample in samples_given if _is_comparable(sample)]
        if samples_given:
            yield _call_case("operator that raises", title, info.op, samples_given)


def _is_comparable(sample: Any) -> bool:
    tensors = [tensor for tensor in tree_flatten(sample)[0] if isinstance(tensor, Tensor)]
    return all(
        tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_quantized for tensor in tensors
    )


def _call_case(kind: str, name: str, function: Callable[..., Any], samples: list[Any]) -> Case:
    flat = [tree_flatten(sample) for sample in samples]

    def make(seed: int) -> tuple[Step, State]:
        _seed(seed)

        def batch(iteration: int) -> tuple[Any, ...]:
            turn, position = divmod(iteration, len(flat))
            torch.manual_seed(turn // 3)
            leaves, structure = flat[position]
            return structure, *(_varied(_copied(leaf), turn) for leaf in leaves)

        state = State(modules={}, optimizers={}, batch=batch)

        def step(structure: TreeSpec, *leaves: Any) -> None:
            value, args, kwargs = tree_unflatten(list(leaves), structure)
            _train(state, function(value, *args, **kwargs))
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_leaf:
                    _keep(state, f"gradient {len(state.tensors)}", leaf.grad)

        return step, state

    return Case(kind=kind, name=name, make=make, steps=ROUNDS * len(samples))


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _varied(value: Any, turn: int) -> Any:
    """Return a sample with its values in another order, partly zero, or negated, by the turn."""
    if not isinstance(value, Tensor) or not value.numel() or value.dtype.is_complex:
        return value
    if value.is_floating_point() and value.itemsize < 2:
        return value
    data = value.detach()
    if turn in _PERMUTED:
        order = torch.randperm(data.numel(), generator=torch.Generator().manual_seed(turn))
        data.copy_(data.reshape(-1)[order].reshape(data.shape))
    elif turn in _ZEROED and data.dim():
        data[: (len(data) + 1) // 2] = 0
    elif turn in _NEGATED and data.is_floating_point():
        data.mul_(-1)
    return value


def _train(state: State, result: Any) -> None:
    """Keep results, and run a backward pass from all that have a history."""
    tensors = [tensor for tensor in tree_flatten(result)[0] if isinstance(tensor, Tensor)]
    for tensor in tensors:
        _keep(state, f"result {len(state.tensors)}", tensor.detach().clone())
        stride = tensor.stride() if tensor.layout is torch.strided else None
        state.effects.append((tuple(tensor.shape), str(tensor.dtype), stride, tensor.requires_grad))
    trained = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()]
    if trained:
        for optimizer in state.optimizers.values():
            optimizer.zero_grad()
        sum(tensor.sum() for tensor in trained).backward()  # type: ignore[union-attr]
        for optimizer in state.optimizers.values():
            optimizer.step()


def _keep(state: State, name: str, tensor: Tensor | None) -> None:
    if tensor is None or tensor.layout is not torch.strided:
        state.effects.append(None if tensor is None else str(tensor.layout))
    else:
        state.tensors[name] = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


# -- modules and optimizers ----------------------------------------------------------------------------------


def _module_cases(info: Any, name: str, samples: int) -> Iterator[Case]:
    for training in (True, False):
        _seed(1)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        )
        for sample in inputs[:samples]:
            title = f"{name} {sample.desc}".strip() + (" in training" if training else "")
            yield _module_case(title, info.module_cls, sample, training=training)


def _module_case(title: str, kind: type[nn.Module], sample: Any, *, training: bool) -> Case:
    input_leaves, structure = tree_flatten((sample.forward_input.args, sample.forward_input.kwargs))

    def make(seed: int) -> tuple[Step, State]:
        _seed(seed)
        constructed = sample.constructor_input
        module = kind(*constructed.args, **constructed.kwargs).train(training)
        parameters = [parameter for parameter in module.parameters() if type(parameter) is nn.Parameter]
        optimizers = {"adam": torch.optim.Adam(parameters, lr=1e-3)} if parameters else {}

        def batch(iteration: int) -> tuple[Any, ...]:
            torch.manual_seed(iteration // 3)
            return tuple(
                _varied(_copied(leaf), iteration if iteration in _PERMUTED else 0) for leaf in input_leaves
            )

        state = State(modules={"module": module}, optimizers=optimizers, batch=batch)

        def step(*leaves: Any) -> None:
            args, kwargs = tree_unflatten(list(leaves), structure)
            _train(state, module(*args, **kwargs))

        return step, state

    return Case(kind="module", name=title, make=make, steps=ROUNDS)


def _optimizer_cases(info: Any, name: str, samples: int) -> Iterator[Case]:
    parameters = inspect.signature(info.optim_cls).parameters
    for chosen, optimizer_input in itertools.product(_STEPS, info.optim_inputs_func(device="cpu")):
        if chosen.keys() <= parameters.keys() and chosen.keys().isdisjoint(optimizer_input.kwargs):
            options = {**optimizer_input.kwargs, **chosen}
            yield _optimizer_case(name, info, options)


def _optimizer_case(name: str, info: Any, options: dict[str, Any]) -> Case:
    def make(seed: int) -> tuple[Step, State]:
        _seed(seed)
        bias = name != "Muon"  # which updates matrices only
        network = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3, bias=bias))
        optimizer = info.optim_cls(network.parameters(), **copy.deepcopy(options))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        generator = torch.Generator().manual_seed(seed)

        def batch(iteration: int) -> tuple[Any, ...]:
            return (torch.randn(5, 4, generator=generator),)

        state = State(modules={"network": network}, optimizers={"optimizer": optimizer}, batch=batch)

        def step(x: Tensor) -> Tensor:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = network(x).square().mean()
                loss.backward()
                return loss

            if info.step_requires_closure:
                loss = optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
            schedule.step()
            return loss.detach()

        return step, state

    title = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
    return Case(kind="optimizer", name=title, make=make, steps=4 if info.step_requires_closure else ROUNDS)


# -- all -----------------------------------------------------------------------------------------------------


def examine(case: Case) -> Record:
    """Run a case under eager and co-executed, and return what differs."""
    wrapped: list[Step] = []

    def wrap(step: Step) -> Step:
        wrapped.append(coexecute(step))
        return wrapped[0]

    expected = run_program(case.make, lambda step: step, case.steps, raises=True)
    with forced():
        got = run_program(case.make, wrap, case.steps, raises=True)
    report = coexecute.report(wrapped[0])
    return {
        "kind": case.kind,
        "name": case.name,
        "differences": differences(expected, got)[:5],
        "beyond tolerance": differences(expected, got, TOLERANCE)[:5],
        "raised": len(expected.raised),
        "coexecuted": report.coexecuted,
        "fallbacks": sorted({fallback.reason for fallback in report.fallbacks}),
    }


def table(records: list[Record]) -> str:
    """Return a summary of the records as Markdown."""
    lines = [
        f"| kind | cases | equal to the last bit | equal with tensors within {TOLERANCE:g} | different "
        "| with co-executed iterations | with exceptions |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(record["kind"] for record in records):
        chosen = [record for record in records if record["kind"] == kind]
        counts = (
            len(chosen),
            sum(not record["differences"] for record in chosen),
            sum(not record["beyond tolerance"] for record in chosen),
            sum(bool(record["beyond tolerance"]) for record in chosen),
            sum(record["coexecuted"] > 0 for record in chosen),
            sum(record["raised"] > 0 for record in chosen),
        )
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    wrong = [record for record in records if record["beyond tolerance"]]
    if wrong:
        lines += ["", "| case | difference |", "|---|---|"]
        for record in wrong[:40]:
            text = " ".join("; ".join(record["beyond tolerance"][:2]).split()).replace("|", "\\|")
            lines.append(f"| {record['kind']} {record['name']} | {text[:200]} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if a case differs from eager."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coexecution_operators")
    parser.add_argument("--samples", type=int, default=10, help="samples of a case at most (default 10)")
    parser.add_argument("--only", action="append", default=[], help="name of torch to run; default all")
    parser.add_argument("--out", type=Path, default=Path("operators.jsonl"), help="file of saved results")
    parser.add_argument("--table", type=Path, help="file for the summary")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    revision = [engine_revision(), arguments.samples]
    saved = {
        (result["kind"], result["name"]): result
        for result in load(arguments.out)
        if result["revision"] == revision
    }
    results = []
    for case in cases(arguments.samples, tuple(arguments.only)):
        record = saved.get((case.kind, case.name))
        if record is None:
            record = {**examine(case), "revision": revision}
            save(arguments.out, record)
        results.append(record)
        if record["beyond tolerance"] or len(results) % 100 == 0:
            print(
                f"{len(results)} cases, {case.kind} {case.name}: {record['beyond tolerance'][:2]}", flush=True
            )
    summary = table(results)
    print(summary)
    if arguments.table:
        arguments.table.write_text(summary, encoding="utf-8")
    return int(any(result["beyond tolerance"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
