"""Real training steps within memory budgets on this processor: peaks, time, and equality with eager torch.

    python -m benchmarks.fit_models [--model unet] [--steps 20] [--out FILE]

Each budget is a fraction of the peak of the eager step by MemTracker, and runs in a process of its own. The
eager and the fitted step run alternately there, by one thread, so that a second core can copy. Times are the
shortest of several steps.

Resident memory is the growth of the process during one step, from just before it, with allocations of 64 KiB
and more returned to the system when they are freed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional

from benchmarks.torch_models import Bert, Gpt2, Resnet, Size, UNet
from tunebench.errors import InputError
from tunebench.training import fit, fitted_steps
from tunebench.training.memory import PlanEffort, simulate, unplanned

__all__ = ["MODELS", "Tracker", "measured_peak"]

FRACTIONS = (1.0, 0.7, 0.5, 0.35)


class Loss(nn.Module):
    """A model with its loss inside, so that the whole step is planned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross entropy of logits of shape (rows, classes, ...) and classes."""
        return functional.cross_entropy(self.model(x), y)


_TEXT = Size(layers=6, width=64, heads=4, inner=256, words=500, longest=128)


def _resnet() -> tuple[nn.Module, Tensor, Tensor]:
    return Resnet((1, 2, 2, 1), width=16, classes=10), torch.randn(24, 3, 64, 64), torch.randint(10, (24,))


def _unet() -> tuple[nn.Module, Tensor, Tensor]:
    return UNet(width=8), torch.randn(6, 3, 64, 64), torch.randint(2, (6, 64, 64))


def _gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    return Gpt2(_TEXT), torch.randint(500, (12, 128)), torch.randint(500, (12 * 128,))


def _bert() -> tuple[nn.Module, Tensor, Tensor]:
    model = Bert(_TEXT)
    return model, torch.randint(500, (12, 128)), torch.randint(500, (12 * 128,))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "resnet": _resnet,
    "unet": _unet,
    "gpt2": _gpt2,
    "bert": _bert,
}
"""Models of small width, with inputs and classes."""


class Tracker(MemTracker):
    """MemTracker, under which torch lets compiled functions run only with this method."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether compiled functions may run."""
        return True


def measured_peak(run: Callable[..., Tensor], model: nn.Module, data: tuple[Tensor, ...]) -> int:
    """Return the peak of a step by MemTracker in bytes, parameters and inputs included."""
    model.zero_grad()
    tracker = Tracker()
    tracker.track_external(model, *data)
    with tracker:
        run(*data).backward()
    return int(sum(by_kind["Total"] for by_kind in tracker.get_tracker_snapshot("peak").values()))


def made(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a model with its loss, and its data; the same ones each time."""
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    return Loss(model), (x, y)


def _grown_bytes(run: Callable[[], None]) -> int:
    """Return the largest growth of this process's resident memory during a call."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def _trained(
    run: Callable[..., Tensor], model: nn.Module, data: tuple[Tensor, ...], steps: int
) -> list[Tensor]:
    """Return losses, weights and buffers after steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(*data)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters(), *model.buffers()]


def _gradients(run: Callable[..., Tensor], model: nn.Module, data: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad()
    run(*data).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def one(name: str, fraction: float, swaps: bool, steps: int) -> dict[str, Any]:
    """Return the figures of one model within one budget."""
    plain, data = made(name)
    eager_peak = measured_peak(plain, plain, data)
    model, _ = made(name)
    with tempfile.TemporaryDirectory() as folder:
        folder_or_none = folder if swaps else None
        fitted = fit(
            model, int(fraction * eager_peak), swap_folder=folder_or_none, effort=PlanEffort(rounds=8)
        )
        began = time.perf_counter()
        try:
            ours = _gradients(fitted, model, data)
        except InputError as error:
            return {"error": str(error)}
        first_s = time.perf_counter() - began
        gradients_equal = _equal(ours, _gradients(plain, plain, data))
        times: dict[str, list[float]] = {"eager": [], "fitted": []}
        for _ in range(5):
            for kind, run, owner in (("eager", plain, plain), ("fitted", fitted, model)):
                owner.zero_grad()
                began = time.perf_counter()
                run(*data).backward()
                times[kind].append(time.perf_counter() - began)
        grown = {}
        for kind, run, owner in (("eager", plain, plain), ("fitted", fitted, model)):
            owner.zero_grad()
            grown[kind] = _grown_bytes(lambda run=run: run(*data).backward())  # type: ignore[misc]
        (step,) = fitted_steps(fitted)
        peak = measured_peak(fitted, model, data)
        refitted, copied = made(name)[0], made(name)[0]
        refit = fit(refitted, plan=step.plan, swap_folder=folder_or_none, host_link=step.plan.step.link)
        weights_equal = _equal(_trained(refit, refitted, data, steps), _trained(copied, copied, data, steps))
        remaining = len(list(Path(folder).iterdir()))
    simulation, tensors = step.plan.simulation, step.plan.tensors
    base_us = simulate(step.plan.step, unplanned(step.plan.step)).step_us
    return {
        "eager_peak": eager_peak,
        "budget": step.plan.budget_bytes,
        "predicted_peak": simulation.peak_bytes,
        "peak": peak,
        "eager_grown": grown["eager"],
        "grown": grown["fitted"],
        "predicted_ratio": simulation.step_us / base_us,
        "ratio": min(times["fitted"]) / min(times["eager"]),
        "recomputed": sum(bool(tensor.recomputed_before) for tensor in tensors),
        "swapped": sum(bool(tensor.copied_in_before) for tensor in tensors),
        "gradients_equal": gradients_equal,
        "weights_equal": weights_equal,
        "first_s": first_s,
        "left_files": remaining,
    }


def _rows(names: list[str], steps: int) -> Iterator[str]:
    yield (
        "| model | budget | kind | recomputed / swapped | predicted peak | measured peak | resident growth, "
        "eager -> fitted | predicted time | measured time | gradients equal | weights equal |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **memory, "OMP_NUM_THREADS": "1"}
    for name in names:
        for fraction in FRACTIONS:
            for swaps in (False, True) if fraction < 1 else (False,):
                arguments = [sys.executable, "-m", "benchmarks.fit_models", "--one", name, str(fraction)]
                command = [*arguments, str(int(swaps)), "--steps", str(steps)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(done.stderr)
                yield _row(name, fraction, swaps, json.loads(done.stdout.splitlines()[-1]))


def _row(name: str, fraction: float, swaps: bool, result: dict[str, Any]) -> str:
    kind = "recompute or swap" if swaps else "recompute"
    if "error" in result:
        return (
            f"| {name} | {fraction:.0%} | {kind} | {result['error'].partition(';')[2].strip()} "
            + "|  " * 7
            + "|"
        )
    mb = {
        key: f"{result[key] / 1e6:.1f}"
        for key in ("predicted_peak", "peak", "eager_grown", "grown", "budget")
    }
    yes = {key: "yes" if result[key] else "NO" for key in ("gradients_equal", "weights_equal")}
    return (
        f"| {name} | {fraction:.0%}, {mb['budget']} MB | {kind} "
        f"| {result['recomputed']} / {result['swapped']} "
        f"| {mb['predicted_peak']} | {mb['peak']} | {mb['eager_grown']} -> {mb['grown']} "
        f"| {result['predicted_ratio']:.2f} | {result['ratio']:.2f} | {yes['gradients_equal']} "
        f"| {yes['weights_equal']} |"
    )


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="only this model (default: all)")
    parser.add_argument("--steps", type=int, default=20, help="steps of AdamW to compare (default: 20)")
    parser.add_argument("--out", type=Path, help="file for the table (default: only the terminal)")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "FRACTION", "SWAPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.one:
        name, fraction, swaps = arguments.one
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TUNEBENCH_CACHE"] = folder  # operations are timed now
            print(json.dumps(one(name, float(fraction), swaps == "1", arguments.steps)))
        return
    lines = []
    for line in _rows([arguments.model] if arguments.model else list(MODELS), arguments.steps):
        print(line, flush=True)
        lines.append(line)
        if arguments.out:
            arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
