"""Overhead of dispatch on a CPU, compared with the compiled kernel alone and with a call of torch.

Small workloads, measured alternately so that load affects all calls equally. Medians of processor time in
microseconds: run it with one thread. With `--library`, linear layers are answered with oneDNN's primitive and
compared with the bare call, torch's own, and models compiled with and without that answer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import tunebench.torch as served
from tests.support import measured, record_outcome
from tunebench.device import local_cpu
from tunebench.dispatch import dispatcher
from tunebench.torch import _tensor
from tunebench.torch.functional import custom_op
from tunebench.workloads import parse

ROUNDS, CALLS = 200, 50


def interleaved_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Time calls alternately, in blocks, and return the median of each in microseconds."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time_ns()
            for _ in range(CALLS):
                call()
            taken[name].append((time.process_time_ns() - start) / 1e3 / CALLS)
    return {name: statistics.median(times) for name, times in taken.items()}


def contenders() -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the calls to compare, by function and name."""
    x, w, b = torch.randn(8, 16), torch.randn(16, 16), torch.randn(16)
    return {
        "softmax 8 x 16": _ways(
            "softmax:rows=8,cols=16,dtype=f32",
            (x,),
            lambda: served.softmax(x, -1),
            lambda: functional.softmax(x, -1),
        ),
        "layer_norm 8 x 16": _ways(
            "layernorm:rows=8,cols=16,dtype=f32",
            (x, b, b),
            lambda: served.layer_norm(x, (16,), b, b),
            lambda: functional.layer_norm(x, (16,), b, b),
        ),
        "linear 8 x 16 x 16": _ways(
            "gemm:m=8,n=16,k=16,dtype=f32,trans=nt,epilogue=bias",
            (x, w, b),
            lambda: served.linear(x, w, b),
            lambda: functional.linear(x, w, b),
        ),
    }


def _ways(
    text: str, operands: tuple[Any, ...], tuned: Callable[[], Any], by_torch: Callable[[], Any]
) -> dict[str, Callable[[], Any]]:
    gemm_dispatcher = dispatcher(parse(text), local_cpu())
    with served.prefer("tunebench"):
        kernel = gemm_dispatcher.bound_choice().kernel
    assert kernel is not None
    out = torch.empty(8, 16)
    arrays = [_tensor._array(t, spec.shape) for t, spec in zip((*operands, out), kernel.tensors, strict=True)]

    def preferring(preference: Any, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            served.set_preference(preference)
            return call()

        return run

    served.set_preference("tunebench")
    looked_up = _lookup_arguments(tuned)
    return {
        "torch": by_torch,
        "kernel alone": lambda: kernel.run(*arrays),
        "kernel on tensors": lambda: _tensor.launch(kernel, (*operands, out)),
        "choice alone": gemm_dispatcher.bound_choice,
        "key and choice": lambda: custom_op._cached_dispatch(*looked_up).dispatcher.bound_choice(),  # type: ignore[union-attr]
        "dispatched": preferring("tunebench", tuned),
        "dispatched to torch": preferring("torch", tuned),
    }


def library_contenders(db: Path) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return calls of linear layers whose answer is a library, by size and name.

    Args:
        db: Database that gets the answers.
    """
    os.environ["TUNEBENCH_DB"] = str(db)
    rows = {}
    for m in LIBRARY_ROWS:
        text = f"gemm:m={m},n=128,k=64,dtype=f32,trans=nt,epilogue=bias"
        record_outcome(db, text, local_cpu(), "gemm/library_cpu", "program=onednn", measured(1.0))
        served.set_preference("tunebench")
        layer, x = torch.nn.Linear(64, 128), torch.randn(m, 64)
        rows[f"linear {m} x 64 x 128"] = _library_ways(layer, x)
    return rows


LIBRARY_ROWS = (64, 512, 2048)


def _library_ways(layer: torch.nn.Linear, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    primitive, w, b = torch.ops.mkldnn._linear_pointwise.default, layer.weight, layer.bias
    by_torch, compiled = torch.compile(layer), served.compile(layer)
    with torch.no_grad():
        by_torch(x)
        compiled(x)
    return {
        "oneDNN": lambda: primitive(x, w, b, "none", [], ""),
        "dispatched": lambda: served.linear(x, w, b),
        "torch": lambda: functional.linear(x, w, b),
        "torch.compile": lambda: by_torch(x),
        "compiled": lambda: compiled(x),
    }


def _lookup_arguments(call: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the arguments with which a call looks up its cached dispatch."""
    calls: list[tuple[Any, ...]] = []
    real = custom_op._cached_dispatch

    def route(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    custom_op._cached_dispatch = route
    try:
        call()
    finally:
        custom_op._cached_dispatch = real
    return calls[0]


def main() -> None:
    """Print a table with a row per function and a column per kind of call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", action="store_true", help="Time answers that are calls of oneDNN.")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        answers = library_contenders(Path(folder) / "a.db") if parser.parse_args().library else contenders()
        print("| call, us | " + " | ".join(next(iter(answers.values()))) + " |")
        for name, calls in answers.items():
            medians = interleaved_us(calls)
            print(f"| {name} | " + " | ".join(f"{us:.1f}" for us in medians.values()) + " |", flush=True)
    served.set_preference("faster")


if __name__ == "__main__":
    main()
