"""Largest batches that train under a hard limit of memory on this processor, by technique.

    python -m benchmarks.plan_memory_batches [--model gpt ...] [--limit 64MB] [--out FILE]

Each attempt is a process of its own. It runs one step, in which torch and its libraries allocate what they
keep. Then the kernel limits the private memory of the process (`RLIMIT_DATA`) to what it has and the limit,
and three more steps must succeed. Activations, gradients, workspaces of libraries and temporary tensors
count against the limit; parameters and the batch do not. Memory of 64 KiB and more is returned to the system
when it is freed.

PyTorch's activation memory budget is that of its partitioner with the operations of eager torch, without
inductor, and with batch normalisation in parts, which it cannot repeat otherwise. Of several budgets, the
first counts that fits. `fit` gets 98 %, or else 90 % of the limit, because it does not know workspaces.
Batches are found to 3 %. Only times depend on other load. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.plan_memory_measured import Checkpointed, Step, Trained, partitioned
from benchmarks.plan_memory_models import WithLoss
from benchmarks.torch_models import Bert, DenseNet, Gpt2, Resnet, Size
from tunebench.errors import InputError
from tunebench.training import fit
from tunebench.training.memory import PlanEffort, budget_bytes, largest_batch

__all__ = ["PROBLEMS", "TECHNIQUES", "Problem", "seconds_within"]

STEPS = 3
"""Steps under the limit, of which the shortest counts."""

RESOLUTION = 0.03
"""Fraction of a batch that a largest batch may be too small."""

BUDGETS = (0.5, 0.2, 0.0)
"""Fractions of saved bytes for torch's partitioner, in the order in which they are tried."""

SHARES = (0.98, 0.9)
"""Fractions of the limit for `fit`, in the order in which they are tried."""

EFFORT = PlanEffort(exact_operations=0, rounds=2, relaxed_size=0)


@dataclass(frozen=True, slots=True)
class Problem:
    """A model with its loss, and batches of any size.

    Attributes:
        model: Returns the model.
        blocks: Name of its repeated layers.
        data: Returns inputs and target of a batch.
    """

    model: Callable[[], WithLoss]
    blocks: str
    data: Callable[[int], tuple[Tensor, ...]]


_TEXT = Size(layers=8, width=96, heads=4, inner=384, words=500, longest=64)


def _images(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, 48, 48), torch.randint(10, (batch,))


def _words(batch: int) -> tuple[Tensor, ...]:
    return torch.randint(500, (batch, 64)), torch.randint(500, (batch * 64,))


PROBLEMS = {
    "resnet": Problem(
        lambda: WithLoss(Resnet((2, 3, 3, 2), width=24, classes=10), classes=True), "blocks", _images
    ),
    "densenet": Problem(lambda: WithLoss(DenseNet((4, 4, 4), 12, 24, 10), classes=True), "blocks", _images),
    "gpt": Problem(lambda: WithLoss(Gpt2(_TEXT), classes=True), "layers", _words),
    "bert": Problem(lambda: WithLoss(Bert(_TEXT), classes=True), "layers", _words),
}
"""Models of small width."""


Way = Callable[[Problem, int, int], tuple[WithLoss, Step]]
"""Returns a model and how its steps run, for a problem, a batch and a limit in bytes."""


def _eager(problem: Problem, batch: int, limit_bytes: int) -> tuple[WithLoss, Step]:
    model = problem.model()
    return model, model


def _checkpointed(problem: Problem, batch: int, limit_bytes: int) -> tuple[WithLoss, Step]:
    model = problem.model()
    setattr(model.model, problem.blocks, Checkpointed(getattr(model.model, problem.blocks)))
    return model, model


def _partitioned(problem: Problem, batch: int, limit_bytes: int, *, fraction: float) -> tuple[WithLoss, Step]:
    model = problem.model()
    return model, partitioned(model, fraction, divided=True)


def _fitted(problem: Problem, batch: int, limit_bytes: int, *, share: float) -> tuple[WithLoss, Step]:
    model = problem.model()
    tensors = [*model.parameters(), *model.buffers(), *problem.data(batch)]
    budget = int(share * limit_bytes) + sum(tensor.nbytes for tensor in tensors)
    return model, fit(model, budget, effort=EFFORT)


TECHNIQUES: Mapping[str, tuple[Way, ...]] = {
    "eager torch": (_eager,),
    "a checkpoint for each block": (_checkpointed,),
    "PyTorch's budget": tuple(functools.partial(_partitioned, fraction=fraction) for fraction in BUDGETS),
    "fit": tuple(functools.partial(_fitted, share=share) for share in SHARES),
}
"""Ways of each technique, in the order in which they are tried."""


# -- one attempt ---------------------------------------------------------------------------------------------


def seconds_within(limit_bytes: int, make: Callable[[], Callable[[], object]]) -> float | None:
    """Return the least processor time of a call in seconds within a limit of memory, in a process of its own.

    Args:
        limit_bytes: Private memory of the process above what it has after a first call.
        make: Returns what is called.

    Returns:
        The time; none if memory was exhausted, or if `fit` found no plan.

    Raises:
        RuntimeError: The call failed otherwise.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            os.write(writer, str(_limited(limit_bytes, make())).encode())
        except (MemoryError, InputError):
            pass
        except RuntimeError as error:
            if not _EXHAUSTED.search(str(error)):
                os.write(writer, f"failed: {error}"[:2000].encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)  # a library may have ended the process when memory was exhausted
    if text.startswith("failed"):
        raise RuntimeError(text)
    return float(text) if text else None


_EXHAUSTED = re.compile(r"can't allocate memory|bad_alloc|could not create a memory|out of memory", re.I)
"""Messages of torch and its libraries when memory is exhausted."""


def _limited(limit_bytes: int, call: Callable[[], object]) -> float:
    call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_private_bytes() + limit_bytes, hard))
    seconds = []
    for _ in range(STEPS):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return min(seconds)


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmData")).split()[1])


# -- table ---------------------------------------------------------------------------------------------------


def _attempt(problem: Problem, technique: str, batch: int, limit_bytes: int) -> float | None:
    """Return the time of a step in seconds by the first way of a technique that fits; none if none fits."""
    for way in TECHNIQUES[technique]:

        def make(way: Way = way) -> Callable[[], object]:
            torch.manual_seed(0)
            data = problem.data(batch)
            model, run = way(problem, batch, limit_bytes)
            trained = Trained(name=technique, model=model, run=run)

            def step() -> None:
                trained.step(data)
                model.zero_grad(set_to_none=True)

            return step

        seconds = seconds_within(limit_bytes, make)
        if seconds is not None:
            return seconds
    return None


def _rows(name: str, limit_bytes: int) -> Iterator[str]:
    """Yield the rows of a model."""
    problem, eager_batch, eager_s = PROBLEMS[name], 0, 0.0
    for technique in TECHNIQUES:
        seconds_by_batch: dict[int, float | None] = {}

        def fits(
            batch: int, technique: str = technique, times: dict[int, float | None] = seconds_by_batch
        ) -> bool:
            if batch not in times:
                times[batch] = _attempt(problem, technique, batch, limit_bytes)
            return times[batch] is not None

        batch = largest_batch(fits, eager_batch or 8, resolution=RESOLUTION)
        if not batch:
            yield f"| {name} | {technique} | 0 | | |"
            continue
        sample_s = (seconds_by_batch[batch] or 0.0) / batch
        if not eager_batch:
            eager_batch, eager_s = batch, sample_s
        yield f"| {name} | {technique} | {batch} | {batch / eager_batch:.2f} | {sample_s / eager_s:.2f} |"


HEADER = "model | technique | largest batch | over eager torch | processor time of a sample over eager torch"

_RETURNS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}
"""Settings that a process reads at its start."""


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=PROBLEMS, action="append", help="models (default: all)")
    parser.add_argument("--limit", default="64MB", help="memory of a step (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the table (default: only the terminal)")
    arguments = parser.parse_args()
    if not _RETURNS_MEMORY.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.plan_memory_batches", *sys.argv[1:]]
        sys.exit(subprocess.call(command, env={**os.environ, **_RETURNS_MEMORY}))
    warnings.simplefilter("ignore")
    limit_bytes = budget_bytes(arguments.limit, 0)
    lines = [f"| {HEADER} |", "|" + "---|" * (HEADER.count("|") + 1)]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNEBENCH_CACHE"] = folder
        for name in arguments.model or PROBLEMS:
            for row in _rows(name, limit_bytes):
                print(row, flush=True)
                lines.append(row)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
