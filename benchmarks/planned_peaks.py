"""Peak memory of training steps that run by a plan, over the peak that the plan states.

    python -m benchmarks.planned_peaks [--plans 50] [--model wavenet] [--out FILE]

Each plan is made for the step of a model with times that are changed at random, so that plans differ in what
they keep. The forward and the backward graph of the plan run on this processor, and the bytes of all storages
that are alive after each operation are counted. This count shares no code with the planner.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.table import write_table
from tunebench.training.fitting.fitter import Fitter, fitted_by
from tunebench.training.fitting.planned_graph import planned_graphs
from tunebench.training.memory import PlanEffort, least_budget, plan_memory, simulate, unplanned
from tunebench.training.memory.planner import MemoryPlan

__all__ = ["MODELS", "LiveStorages", "TracedStep", "traced"]


_EFFORT = PlanEffort(rounds=0)


class _Gated(nn.Module):
    """A block of a WaveNet: both halves of a convolution are read."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv(x).chunk(2, 1)
        return x + self.out(torch.tanh(value) * torch.sigmoid(gate))


class _Attention(nn.Module):
    """Attention whose queries, keys and values are computed by one product, and divided by a function."""

    def __init__(self, width: int, divide: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.product, self.out, self.norm = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )
        self.divide = divide

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.divide(self.product(self.norm(x)))
        scores = (query @ key.transpose(-1, -2)).softmax(-1)
        return x + self.out(scores @ value)


class _ByTime(nn.Module):
    """A recurrent network written by hand, over steps that `unbind` divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.Linear(2 * width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        state = memory = torch.zeros_like(x[:, 0])
        for now in x.unbind(1):
            forget, enter, leave, new = self.cell(torch.cat([now, state], -1)).chunk(4, -1)
            memory = forget.sigmoid() * memory + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * memory.tanh()
        return state


class _Recurrent(nn.Module):
    """An LSTM or GRU of torch; its last output."""

    def __init__(self, kind: type[nn.Module], width: int) -> None:
        super().__init__()
        self.layer = kind(width, width, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


class _Shuffle(nn.Module):
    """Branches over parts of the channels, as in ShuffleNet: `split`, `cat`, batch normalisation, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width // 2, width // 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(width // 2)

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.split([x.shape[1] // 2] * 2, 1)
        changed = functional.dropout(self.norm(self.conv(changed)).relu(), 0.1)
        return torch.cat([changed, kept], 1)


def _experts(width: int) -> nn.Module:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            parts = torch.tensor_split(x, 4, dim=0)
            return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])

    return Experts()


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "wavenet": lambda: (nn.Sequential(*(_Gated(8, 2 ** (i % 4)) for i in range(8))), torch.randn(4, 8, 512)),
    "chunked attention": lambda: (
        nn.Sequential(*(_Attention(32, lambda x: x.chunk(3, -1)) for _ in range(4))),
        torch.randn(4, 64, 32),
    ),
    "unbound attention": lambda: (
        nn.Sequential(*(_Attention(32, lambda x: x.unflatten(-1, (3, -1)).unbind(-2)) for _ in range(4))),
        torch.randn(4, 64, 32),
    ),
    "recurrence by hand": lambda: (_ByTime(32), torch.randn(8, 12, 32)),
    "lstm": lambda: (_Recurrent(nn.LSTM, 24), torch.randn(8, 6, 24)),
    "gru": lambda: (_Recurrent(nn.GRU, 24), torch.randn(8, 6, 24)),
    "shuffled convolutions": lambda: (
        nn.Sequential(*(_Shuffle(16) for _ in range(6))),
        torch.randn(4, 16, 16, 16),
    ),
    "experts": lambda: (nn.Sequential(*(_experts(48) for _ in range(4))), torch.randn(64, 48)),
    "transformer": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3),
        torch.randn(4, 32, 32),
    ),
    "gated perceptron": lambda: (
        nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(32, 64), nn.GLU(), nn.LayerNorm(32)))
        ),
        torch.randn(128, 32),
    ),
}
"""Models of small width, and their inputs. Most divide a tensor into views of it."""


class LiveStorages(TorchDispatchMode):  # type: ignore[misc]  # torch does not type it
    """Count the bytes of all storages that are alive after each operation.

    Args:
        held: Tensors that exist before.

    Attributes:
        peak_bytes: Most bytes so far.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._note(held)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether torch lets compiled functions run."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count."""
        results = func(*args, **(kwargs or {}))
        self._note(leaf for leaf in tree_leaves((args, kwargs, results)) if isinstance(leaf, Tensor))
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return results

    def _note(self, tensors: Iterable[Tensor]) -> None:
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))


class _Tracer(Fitter):
    """Keep what a traced step needs to run by other plans."""

    inputs: list[Any] | None = None
    forward_results = 0

    def _partition(self, module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any) -> Any:
        self.forward_results = num_fwd_outputs
        return super()._partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **others)

    def _boxed(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        run = super()._boxed(module, _)

        def keeping(values: list[Any]) -> Any:
            if self.inputs is None:
                self.inputs = list(values)
            return run(values)

        keeping._boxed_call = True  # type: ignore[attr-defined]
        return keeping

    def graph(self, module: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Return a callable that runs a graph and releases each tensor after its last use."""
        return super()._boxed(module, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A training step that was traced once, and runs by any plan.

    Attributes:
        tracer: The backend that traced it.
    """

    tracer: _Tracer

    def plan(self, chance: random.Random) -> MemoryPlan:
        """Return a plan for a random budget, and for times that differ from those of the step at random."""
        (traced_step,) = self.tracer.steps
        step = traced_step.joint.step
        operations = [
            replace(operation, time_us=operation.time_us * 10 ** chance.uniform(-1, 1))
            for operation in step.operations
        ]
        perturbed = replace(step, operations=tuple(operations))
        least = least_budget(perturbed, effort=_EFFORT).budget_bytes
        most = simulate(perturbed, unplanned(perturbed)).peak_bytes
        budget = int(least + chance.uniform(0.05, 0.9) * (most - least))
        return plan_memory(perturbed, budget, effort=_EFFORT)

    def run(self, plan: MemoryPlan) -> tuple[int, list[Tensor]]:
        """Run the step by a plan; return the peak in bytes, results of the forward pass, and gradients."""
        (traced_step,) = self.tracer.steps
        joint, count, inputs = traced_step.joint, self.tracer.forward_results, self.tracer.inputs
        assert inputs is not None
        mode = detect_fake_mode([node.meta.get("val") for node in joint.graph.nodes])
        assert mode is not None
        forward, backward = map(self.tracer.graph, planned_graphs(joint, plan.schedule, count, None, mode))
        torch.manual_seed(1)
        counted = LiveStorages(value for value in inputs if isinstance(value, Tensor))
        with counted, torch.no_grad():
            results, saved = _divided(list(forward(list(inputs))), count)
            for result in results:
                saved.append(torch.ones_like(result))
            gradients = backward(saved)
        return counted.peak_bytes, [*results, *(leaf for leaf in gradients if isinstance(leaf, Tensor))]


def _divided(values: list[Any], count: int) -> tuple[list[Tensor], list[Any]]:
    return values[:count], values[count:]


def traced(name: str) -> TracedStep:
    """Return the training step of a model."""
    torch.manual_seed(0)
    model, x = MODELS[name]()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    tracer = _Tracer("100%", effort=PlanEffort(rounds=0))
    fitted_by(tracer, loss)(x).backward()
    return TracedStep(tracer=tracer)


def _rows(names: Iterable[str], plans: int) -> Iterator[str]:
    for name in names:
        step = traced(name)
        (traced_step,) = step.tracer.steps
        _, expected = step.run(traced_step.plan)
        chance, ratios, differing = random.Random(0), list[float](), 0
        for _ in range(plans):
            plan = step.plan(chance)
            peak_bytes, results = step.run(plan)
            ratios.append(peak_bytes / plan.simulation.peak_bytes)
            differing += not all(map(torch.equal, expected, results))
        operations = len(traced_step.joint.step.operations)
        yield (
            f"| {name} | {operations} | {len(ratios)} | {min(ratios):.4f} | {max(ratios):.4f} | {differing} |"
        )


def main() -> None:
    """Run plans of models, and write a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=50, help="plans of each model (default: 50)")
    parser.add_argument("--model", choices=MODELS, action="append", help="models (default: all)")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    header = (
        "| model | operations | plans | peak over plan, least | most | gradients differ |\n"
        "|---|---|---|---|---|---|"
    )
    write_table(header, _rows(options.model or MODELS, options.plans), options.out)


if __name__ == "__main__":
    main()
