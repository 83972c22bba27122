"""Correctness and coverage of fused groups on many architectures.

    python -m benchmarks.architectures right [--model "timm dla34"]
    python -m benchmarks.architectures coverage [--model LSTM] [--device h100-sxm]

- `right`: small models in float32 on this CPU, inference and four training steps by SGD. Groups are run by
  the float64 references of their workloads, rounded to float32, and errors are against torch in float64. A
  larger error than that of eager torch is therefore an error of the graph: of layouts, operands or
  gradients. A model is *right*, *wrong* or *not fused* (no group is run by a kernel).
- `coverage`: models at published sizes, large ones with fewer layers, in f16 on described GPUs, without
  memory for them: fraction of torch's time in operators of tunebench, times and traffic. A second table lists
  what is left to torch on the first device, by operator and reason.

Needs torchvision, timm and transformers.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor, nn

import tunebench.torch as served
from benchmarks.architecture_models import PUBLISHED, SMALL, Architecture
from benchmarks.models import without_chance
from benchmarks.table import write_table
from tests.torch.reference_kernels import reference_kernels
from tunebench.device import described
from tunebench.errors import InputError
from tunebench.graph import PartitionPlan, extract, plan_partition
from tunebench.torch.compiler.capture import differentiable_results

DEVICES = ("h100-sxm", "a100-80-sxm")
SEED = 7
SEEDS = 3
STEPS = 4
SLACK, ROUNDING = 10.0, 1e-4
"""A relative error may be this multiple of eager torch's, plus this."""


# -- right ---------------------------------------------------------------------------------------------------

RIGHT = (
    "| model | inference | training | worst error of ours | worst error of eager torch "
    "| workloads run by kernels |\n|---|---|---|---|---|---|"
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of a model in one mode.

    Attributes:
        text: ``right``, ``wrong`` or ``not fused``, or the first line of an error.
        error: Largest relative error of a result.
        by_torch: The same of eager torch.
        workloads: Number of workloads run by kernels.
    """

    text: str
    error: float = 0.0
    by_torch: float = 0.0
    workloads: int = 0


def right(name: str, case: Architecture, _: argparse.Namespace) -> Iterator[str]:
    """Yield the row of a model."""
    verdicts = [_persistent_verdict(case, training=training) for training in (False, True)]
    errors = (max(verdict.error for verdict in verdicts), max(verdict.by_torch for verdict in verdicts))
    cells = (
        name,
        *(verdict.text for verdict in verdicts),
        *map("{:.1e}".format, errors),
        verdicts[1].workloads,
    )
    yield f"| {' | '.join(map(str, cells))} |"


def _persistent_verdict(case: Architecture, *, training: bool) -> Verdict:
    """Return the verdict of the first seed that is not wrong.

    With a few seeds, rounding moves an activation across the kink of a ReLU: a term of a gradient appears or
    disappears, which is an error of some percent. A wrong graph is wrong with every seed.
    """
    for seed in range(SEED, SEED + SEEDS):
        torch.manual_seed(seed)
        verdict = _verdict(without_chance(case.make()).train(training), case.data())
        if verdict.text != "wrong":
            break
    return verdict


def _verdict(model: nn.Module, inputs: Sequence[Tensor]) -> Verdict:
    torch._dynamo.reset()
    torch.set_num_threads(1)  # tensors are small
    exact = _results(_as_double(model), [_double(tensor) for tensor in inputs])
    by_torch = _results(copy.deepcopy(model), inputs)
    try:
        with reference_kernels() as ran, served.prefer("tunebench"):
            ours = _results(served.compile(copy.deepcopy(model)), inputs)
    except Exception as error:  # anything that a compiler can raise is an outcome
        return Verdict(text=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:120]}")
    errors, allowed = _errors(ours, exact), _errors(by_torch, exact)
    is_right = all(a <= SLACK * b + ROUNDING for a, b in zip(errors, allowed, strict=True))
    text = "wrong" if not is_right else "right" if ran else "not fused"
    return Verdict(text=text, error=max(errors), by_torch=max(allowed), workloads=len(ran))


def _results(run: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of inference, or of training the first output and gradients and last parameters."""
    torch.manual_seed(SEED)
    if not run.training:
        with torch.no_grad():
            return [tensor.clone() for tensor in _floating(run(*inputs))]
    parameters = [tensor for tensor in run.parameters() if tensor.requires_grad]
    optimizer, values = torch.optim.SGD(parameters, 1e-2), []
    for step in range(STEPS):
        optimizer.zero_grad()
        output = differentiable_results(run(*inputs))[0]
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        (output * weights).mean().backward()
        if not step:
            values = [output.detach().clone()]
            values += [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        optimizer.step()
    return [*values, *(parameter.detach().clone() for parameter in parameters)]


def _floating(results: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(results)
    return [tensor for tensor in leaves if isinstance(tensor, Tensor) and tensor.is_floating_point()]


def _errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Return the relative error of each result; some gradients, such as those of keys' biases, are 0."""
    norms = [float(result.norm()) for result in exact]
    floor = 1e-3 * statistics.median(norms) + 1e-12
    return [
        float((result.double() - true.double()).norm()) / (norm + floor)
        for result, true, norm in zip(results, exact, norms, strict=True)
    ]


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _ask_for_contiguous_gradient(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
    """Make the gradient of a batch normalisation contiguous.

    On processors, torch 2.13 computes wrong gradients from that of one image if it is channels last, but its
    first stride is not that of an image, such as (16, 1, 128, 16) of 1 x 16 x 8 x 8.
    """
    if output.requires_grad:
        output.register_hook(torch.Tensor.contiguous)


def _as_double(model: nn.Module) -> nn.Module:
    """Return a copy in float64; torch has no grouped product of experts in that type."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_hook(_ask_for_contiguous_gradient)
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_experts_implementation", None):
            module.set_experts_implementation("eager")  # type: ignore[operator]
            break
    return model


# -- coverage ------------------------------------------------------------------------------------------------

COVERAGE = (
    "| model | step | device | operations | groups | in our operators | torch | in groups | traffic saved "
    "| gap |\n|---|---|---|---|---|---|---|---|---|---|"
)
LEFT = (
    "| operator | reason | step | models | mean fraction of torch's time | largest, model "
    "|\n|---|---|---|---|---|---|"
)


def _plans(
    case: Architecture, training: bool, devices: Sequence[str]
) -> Iterator[tuple[str, list[PartitionPlan]]]:
    described_devices = [described()[device] for device in devices]
    with torch._dynamo.config.patch(allow_rnn=True):  # cells of nn.LSTM as operations
        graphs = extract(
            case.make, case.specs(), training=training, dtype=case.dtype, device=described_devices[0]
        )
    for device in described_devices:
        yield device.name, [plan_partition(graph, device) for graph in graphs]


def coverage(name: str, case: Architecture, options: argparse.Namespace) -> Iterator[str]:
    """Yield a row for each step and device, and keep the fractions of the time that are left to torch."""
    for step in ("inference", "training"):
        try:
            for device, plans in _plans(case, step == "training", options.device or DEVICES):
                if device == (options.device or DEVICES)[0]:
                    _left[step][name] = _left_of(plans)
                yield f"| {name} | {step} | {device} | {' | '.join(_cells(plans))} |"
        except InputError as error:
            yield f"| {name} | {step} | - | {error} |"


def _cells(plans: Sequence[PartitionPlan]) -> Iterator[str]:
    by_torch = sum(partition.torch_us for partition in plans)
    yield str(sum(len(partition.graph.nodes) for partition in plans))
    yield str(sum(len(partition.chosen) for partition in plans))
    yield f"{sum(partition.coverage * partition.torch_us for partition in plans) / by_torch:.1%}"
    yield f"{by_torch / 1e3:.2f} ms"
    yield f"{sum(partition.us for partition in plans) / 1e3:.2f} ms"
    yield f"{sum(partition.saved_bytes for partition in plans) / 1e6:.0f} MB"
    yield f"{max(partition.partition.gap for partition in plans):.2%}"


_left: dict[str, dict[str, Mapping[tuple[str, str], float]]] = {"inference": {}, "training": {}}
"""Fraction of torch's time by operator and reason, by step and model."""


def _left_of(plans: Sequence[PartitionPlan]) -> Mapping[tuple[str, str], float]:
    """Return the fraction of torch's time left to torch, by operator and reason."""
    total, shares = (
        sum(chosen_plan.torch_us for chosen_plan in plans),
        defaultdict[tuple[str, str], float](float),
    )
    for chosen_plan in plans:
        for index in (
            i for offer in chosen_plan.chosen if not offer.group.workloads for i in offer.group.nodes
        ):
            node = chosen_plan.graph.nodes[index]
            shares[node.target, node.reason] += chosen_plan.torch_prices[index].us / total
    return shares


def left_table() -> Iterator[str]:
    """Yield the table of what `coverage` left to torch so far, largest first."""
    yield from ("", LEFT)
    for step, models in _left.items():
        shares = defaultdict[tuple[str, str], dict[str, float]](dict)
        for name, shares_by_reason in models.items():
            for key, share in shares_by_reason.items():
                shares[key][name] = share
        for (target, reason), by in sorted(shares.items(), key=lambda entry: -sum(entry[1].values())):
            worst = max(by, key=lambda name: by[name])
            cells = (
                target.removeprefix("aten."),
                reason,
                step,
                len(by),
                f"{sum(by.values()) / len(models):.2%}",
                f"{by[worst]:.1%}, {worst}",
            )
            yield f"| {' | '.join(map(str, cells))} |"


PARTS: Mapping[str, tuple[str, Mapping[str, Architecture], Callable[..., Iterator[str]]]] = {
    "right": (RIGHT, SMALL, right),
    "coverage": (COVERAGE, PUBLISHED, coverage),
}


def main(arguments: list[str] | None = None) -> None:
    """Run a part of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--model", action="append", help="run only this model; repeatable")
    parser.add_argument(
        "--device", action="append", choices=list(described()), help="GPU of `coverage`; repeatable"
    )
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    header, cases, run = PARTS[options.part]
    if unknown := set(options.model or ()) - cases.keys():
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    rows = (row for name in options.model or cases for row in run(name, cases[name], options))
    write_table(header, rows, options.out, left_table if options.part == "coverage" else tuple)


if __name__ == "__main__":
    main()
