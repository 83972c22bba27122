"""Times of linear layers: torch, oneDNN with a plain weight, and oneDNN with a packed one.

    python -m benchmarks.packed_weights [--threads 1] [--rounds 15]

The layers are those of BERT, GPT-2 and Llama for some numbers of tokens. The three alternate in each round. A
cell is the median processor time over rounds divided by that with a packed weight (above 1: the packed weight
is faster). Needs torch only.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

LAYERS: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    "BERT": ((128, 768, 768), (128, 3072, 768), (128, 768, 3072), (512, 3072, 768)),
    "GPT-2": ((1, 2304, 768), (1, 768, 3072), (1, 3072, 768), (16, 3072, 768)),
    "Llama": ((1, 2048, 2048), (1, 8192, 2048), (1, 2048, 8192), (16, 8192, 2048), (64, 2048, 2048)),
}
"""Tokens, output features and input features of each layer."""

ROUND_S = 2e-3
"""Approximate time of the calls of one implementation in a round, which is at least one call."""


def ways(tokens: int, outputs: int, inputs: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Return a call of the layer by each implementation."""
    x, bias = torch.randn(tokens, inputs), torch.randn(outputs)
    weight = torch.randn(outputs, inputs) / inputs**0.5
    linear = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    return {
        "torch": lambda: functional.linear(x, weight, bias),
        "plain": lambda: linear(x, weight, bias, "none", [], ""),
        "packed": lambda: linear(x, packed, bias, "none", [], ""),
    }


def times_us(calls: Mapping[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Return the median processor time of each implementation, us."""
    began = time.perf_counter()
    expected = calls["torch"]()
    repeats = max(1, round(ROUND_S / (time.perf_counter() - began)))
    samples_us: dict[str, list[float]] = {way: [] for way in calls}
    for turn in range(rounds):
        for way in calls if turn % 2 == 0 else reversed(tuple(calls)):
            start = time.process_time_ns()
            for _ in range(repeats):
                result = calls[way]()
            samples_us[way].append((time.process_time_ns() - start) / repeats / 1e3)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    return {way: statistics.median(values) for way, values in samples_us.items()}


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which implementations alternate")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, {platform.machine()}, torch {torch.__version__}\n")
    print("| model | tokens x outputs x inputs | torch | plain weight |\n|---|---|---|---|")
    with torch.inference_mode():
        for model, layers in LAYERS.items():
            for layer in layers:
                us = times_us(ways(*layer), options.rounds)
                ratios = (f"{us[way] / us['packed']:.2f}" for way in ("torch", "plain"))
                print(f"| {model} | {' x '.join(map(str, layer))} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
