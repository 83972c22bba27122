"""Memory plans against other techniques that reduce the memory of a training step, measured on a processor.

    python -m benchmarks.plan_memory_measured [--model resnet gpt] [--rounds 15] [--folder FOLDER]

Each technique trains a copy of the same model. Its peak is that of MemTracker in one step, with parameters,
buffers, inputs and gradients. Then one step of each technique runs in turn, on one thread: the time is the
median, over the rounds, of the time over that of eager torch in the same round. `fit` has the measured peak
of each other technique as its budget; next to saved tensors in files, it may swap to files as well.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed._tools.mem_tracker import MemTracker
from torch.fx.graph import _BoxedCodeGen
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from benchmarks.plan_memory_models import WithLoss
from benchmarks.plan_memory_techniques import PRODUCTS
from benchmarks.torch_models import Gpt2, Resnet, Size
from tunebench.errors import InputError
from tunebench.training.fitting.fit import fit
from tunebench.training.memory import PlanEffort, size_text

__all__ = ["Checkpointed", "Step", "Trained", "main", "partitioned"]

BUDGETS = (0.8, 0.5, 0.2, 0.0)
"""Fractions of saved bytes for torch's partitioner."""

EFFORT = PlanEffort(exact_operations=0, rounds=8, relaxed_size=0)
Step = Callable[..., Tensor]
"""Returns the loss of inputs."""


class Tracker(MemTracker):
    """MemTracker, which torch lets compiled functions run under only with this method."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether compiled functions may run."""
        return True


class Checkpointed(nn.Module):
    """Blocks behind checkpoints: of equal segments, or one for each block."""

    def __init__(self, blocks: nn.Sequential, segments: int = 0, **options: Any) -> None:
        super().__init__()
        self.blocks, self.segments, self.given = blocks, segments, options

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the last block."""
        if self.segments:
            return checkpoint_sequential(self.blocks, self.segments, x, use_reentrant=False)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.given)
        return x


class OnDisk:
    """Saved tensors as files: written when they are saved, read when they are used."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._model, self._folder, self._count = model, folder, 0
        self._weights = {weight.data_ptr() for weight in model.parameters()}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the loss."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return self._model(*inputs)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in self._weights or tensor.numel() < _FEW:
            return tensor
        self._count += 1
        path = self._folder / f"{self._count}.bin"
        dense = tensor.detach().contiguous()
        dense.numpy().tofile(path)
        return path, dense.shape, dense.dtype

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        path, shape, dtype = packed
        tensor = torch.empty(shape, dtype=dtype)
        with path.open("rb") as file:
            file.readinto(memoryview(tensor.numpy()).cast("B"))
        path.unlink()
        return tensor


_FEW = 1024
"""Elements below which a tensor stays in memory."""


def partitioned(model: nn.Module, fraction: float, *, divided: bool = False) -> Step:
    """Return a model that saves what torch's partitioner chooses, and runs operation by operation.

    Args:
        model: The model.
        fraction: Fraction of the saved bytes.
        divided: Whether batch normalisation runs as several operations, which can be repeated.
    """

    def partition(*arguments: Any, **more: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=fraction):
            return min_cut_rematerialization_partition(*arguments, **more)

    backend = aot_autograd(
        fw_compiler=_boxed,
        bw_compiler=_boxed,
        partition_fn=partition,
        decompositions=get_decompositions(_BATCH_NORM) if divided else None,
    )
    compiled: Step = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    return compiled


_BATCH_NORM = [
    torch.ops.aten._native_batch_norm_legit_functional,
    torch.ops.aten._batch_norm_with_update_functional,
    torch.ops.aten.native_batch_norm_backward,
    torch.ops.aten.batch_norm_backward,
]


def _boxed(module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return a callable that releases each tensor after its last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()

    def run(values: list[Any]) -> Any:
        return module(values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model, and how its steps run."""

    name: str
    model: nn.Module
    run: Step

    def step(self, data: tuple[Tensor, ...]) -> None:
        """Run one step."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.run(*data).backward()

    def peak_bytes(self, data: tuple[Tensor, ...]) -> int:
        """Return the peak of a step in bytes."""
        self.step(data)
        for parameter in self.model.parameters():
            parameter.grad = None
        tracker = Tracker()
        tracker.track_external(self.model, *data)
        with tracker:
            self.run(*data).backward()
        return sum(by_kind["Total"] for by_kind in tracker.get_tracker_snapshot("peak").values())


def techniques(whole: WithLoss, blocks: str, folder: Path) -> Iterator[Trained]:
    """Yield a copy of a model for each technique.

    Args:
        whole: The model with its loss.
        blocks: Name of its repeated layers.
        folder: Folder for saved tensors.
    """

    def checkpointed(segments: int = 0, **options: Any) -> nn.Module:
        made = copy.deepcopy(whole)
        setattr(made.model, blocks, Checkpointed(getattr(made.model, blocks), segments, **options))
        return made

    count = len(getattr(whole.model, blocks))
    products = [getattr(packet, name) for packet in PRODUCTS for name in packet.overloads()]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)
    models = {
        "eager torch": copy.deepcopy(whole),
        "checkpoints of sqrt(n) blocks": checkpointed(max(2, round(math.sqrt(count)))),
        "a checkpoint for each block": checkpointed(),
        "selective checkpoint": checkpointed(context_fn=contexts),
    }
    for name, model in models.items():
        yield Trained(name=name, model=model, run=model)
    for fraction in BUDGETS:
        model = copy.deepcopy(whole)
        yield Trained(name=f"torch's budget {fraction}", model=model, run=partitioned(model, fraction))
    model = copy.deepcopy(whole)
    yield Trained(name="saved tensors in files", model=model, run=OnDisk(model, folder))


def _fitted(
    whole: WithLoss, technique: Trained, peak: int, folder: Path, data: tuple[Tensor, ...]
) -> Trained | None:
    """Return a fitted model within the peak of another technique; none if no plan fits."""
    model = copy.deepcopy(whole)
    swaps = isinstance(technique.run, OnDisk)
    run = fit(model, peak, swap_folder=folder if swaps else None, effort=EFFORT)
    try:
        run(*data)
    except InputError as error:
        print(f"(fit at the peak of {technique.name!r}: {error})", flush=True)
        return None
    return Trained(name=f"fit, at the peak of {technique.name}", model=model, run=run)


def table(whole: WithLoss, blocks: str, data: tuple[Tensor, ...], rounds: int, folder: Path) -> None:
    """Print the rows of a model."""
    trained, peaks = [], []
    for technique in techniques(whole, blocks, folder):
        try:
            peaks.append(technique.peak_bytes(data))
        except RuntimeError as error:
            print(f"({technique.name} fails: {str(error).splitlines()[0]})", flush=True)
            continue
        trained.append(technique)
    fitted = [
        _fitted(whole, technique, peak, folder, data) for technique, peak in zip(trained, peaks, strict=True)
    ]
    runners = [*trained, *(technique for technique in fitted if technique is not None)]
    seconds: dict[str, list[float]] = {technique.name: [] for technique in runners}
    for _ in range(rounds):
        for technique in runners:
            began = time.perf_counter()
            technique.step(data)
            seconds[technique.name].append(time.perf_counter() - began)
    eager = seconds[trained[0].name]
    ratio = {
        name: statistics.median(a / b for a, b in zip(taken, eager, strict=True))
        for name, taken in seconds.items()
    }
    print(f"\nEager step: median {statistics.median(eager) * 1e3:.0f} ms. {_agreement(runners)}\n")
    print("| technique | peak | time over eager | fit: peak | fit: time over eager |\n|---|---|---|---|---|")
    for technique, peak, ours in zip(trained, peaks, fitted, strict=True):
        cells = [technique.name, size_text(peak), f"{ratio[technique.name]:.2f}"]
        cells += ["-", "-"] if ours is None else [size_text(ours.peak_bytes(data)), f"{ratio[ours.name]:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def _agreement(trained: Sequence[Trained]) -> str:
    """State the largest relative difference of gradients to those of the first model."""
    first = [weight.grad for weight in trained[0].model.parameters()]
    largest = 0.0
    for technique in trained:
        for weight, expected in zip(technique.model.parameters(), first, strict=True):
            assert weight.grad is not None
            assert expected is not None
            largest = max(largest, float((weight.grad - expected).norm() / expected.norm()))
    return (
        f"Gradients of each weight differ from those of eager torch by at most {largest:.1e} of their norm."
    )


def _resnet() -> tuple[WithLoss, str, tuple[Tensor, ...]]:
    whole = WithLoss(Resnet((2, 2, 3, 2), width=32, classes=100), classes=True)
    return whole, "blocks", (torch.randn(16, 3, 96, 96), torch.randint(0, 100, (16,)))


def _gpt() -> tuple[WithLoss, str, tuple[Tensor, ...]]:
    size = Size(layers=9, width=192, heads=4, inner=768, words=2000, longest=128)
    words = torch.randint(0, size.words, (8, 128))
    return WithLoss(Gpt2(size), classes=True), "layers", (words, torch.randint(0, size.words, (8 * 128,)))


MODELS = {"resnet": _resnet, "gpt": _gpt}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), nargs="*", default=list(MODELS))
    parser.add_argument(
        "--rounds", type=int, default=15, help="steps of each technique (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="folder for saved tensors (default: a temporary one)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # all copies of a model share their code
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for name in chosen.model:
            torch.manual_seed(0)
            whole, blocks, data = MODELS[name]()
            print(f"\n{name}\n", flush=True)
            table(whole, blocks, data, chosen.rounds, Path(folder))


if __name__ == "__main__":
    main()
