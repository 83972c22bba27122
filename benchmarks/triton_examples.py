"""Four kernels in Triton tuned for absent GPUs: compiled, verified by the interpreter, predicted.

    python -m benchmarks.triton_examples [--trials 4] [--out benchmarks/results/triton_examples.md]

Needs the extras `triton` and `cuda` (for the disassembler).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tunebench
from tunebench import Input, Output, kernels
from tunebench.binary.disassembly import count_instructions
from tunebench.compile import BinaryCache, compile_config
from tunebench.compile.assembly import machine_code
from tunebench.db import open_store
from tunebench.device import find
from tunebench.forecast.predicted_space import predicted_space
from tunebench.outcome import Predicted
from tunebench.space import Config
from tunebench.workloads import parse

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
TENSOR_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA")


@triton.jit
def softmax_row(x, y, cols, BLOCK: tl.constexpr):
    """One program per row."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * cols + at, mask=at < cols, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * cols + at, powers / tl.sum(powers, 0), mask=at < cols)


@triton.jit
def layer_norm_row(x, weight, bias, y, cols, eps, BLOCK: tl.constexpr):
    """One program per row, which loads it once."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < cols
    values = tl.load(x + row * cols + at, mask=inside, other=0.0)
    mean = tl.sum(values, 0) / cols
    centred = tl.where(inside, values - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / cols + eps)
    gain, shift = tl.load(weight + at, mask=inside), tl.load(bias + at, mask=inside)
    tl.store(y + row * cols + at, centred * scale * gain + shift, mask=inside)


@triton.jit
def product(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Tiles of c in groups of rows, so that neighbours share tiles of b in L2."""
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    tile = tl.program_id(0)
    first_m = tile // (GROUP * tiles_n) * GROUP
    rows_here = min(tiles_m - first_m, GROUP)
    inner = tile % (GROUP * tiles_n)
    rows = (first_m + inner % rows_here) * BM + tl.arange(0, BM)
    columns = inner // rows_here * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        inside = start + depth < k
        left = tl.load(
            a + rows[:, None] * k + start + depth[None, :],
            mask=(rows < m)[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            b + (start + depth)[:, None] * n + columns[None, :],
            mask=inside[:, None] & (columns < n)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.float16), mask=inside)


@triton.jit
def attend(q, k, v, o, length, scale, HEAD: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    """Causal attention: a block of queries of one head, with a running maximum over blocks of keys."""
    first, head = tl.program_id(0) * BQ, tl.program_id(1)
    base = head * length * HEAD
    queries, features = first + tl.arange(0, BQ), tl.arange(0, HEAD)
    at_q = base + queries[:, None] * HEAD + features[None, :]
    asked = tl.load(q + at_q, mask=(queries < length)[:, None], other=0.0)
    top = tl.full((BQ,), -1e30, tl.float32)
    weight = tl.zeros((BQ,), tl.float32)
    result = tl.zeros((BQ, HEAD), tl.float32)
    for start in range(0, tl.minimum(first + BQ, length), BK):
        keys = start + tl.arange(0, BK)
        at_k = base + keys[:, None] * HEAD + features[None, :]
        inside = (keys < length)[:, None]
        scores = tl.dot(asked, tl.trans(tl.load(k + at_k, mask=inside, other=0.0))) * scale
        visible = (queries[:, None] >= keys[None, :]) & (keys < length)[None, :]
        scores = tl.where(visible, scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        powers = tl.exp(scores - new_top[:, None])
        fade = tl.exp(top - new_top)
        weight = weight * fade + tl.sum(powers, 1)
        values = tl.load(v + at_k, mask=inside, other=0.0)
        result = tl.dot(powers.to(tl.float16), values, result * fade[:, None])
        top = new_top
    result = result / weight[:, None]
    tl.store(o + at_q, result.to(tl.float16), mask=(queries < length)[:, None])


def softmax_of(x: Any) -> Any:
    """Return the softmax of each row."""
    powers = np.exp(x - x.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def layer_norm_of(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Return rows with mean 0 and variance 1, scaled and shifted."""
    centred = x - x.mean(1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(1, keepdims=True) + eps) * weight + bias


def attention_of(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Return causal attention of each head."""
    scores = q @ np.swapaxes(k, 1, 2) * scale
    hidden = np.triu(np.ones(scores.shape[1:], bool), 1)
    scores = np.where(hidden, -np.inf, scores)
    powers = np.exp(scores - scores.max(2, keepdims=True))
    return powers / powers.sum(2, keepdims=True) @ v


def calls() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each kernel with the arguments of `tunebench.tune_kernel`."""
    rows, cols = 512, 4096
    yield (
        softmax_row,
        {
            "args": {"x": Input((rows, cols), "f32"), "y": Output((rows, cols), "f32"), "cols": cols},
            "space": {"BLOCK": [4096, 8192], "num_warps": [2, 4, 8, 16]},
            "default": {"BLOCK": 4096, "num_warps": 4},
            "grid": (rows, 1),
            "reference": softmax_of,
        },
    )
    yield (
        layer_norm_row,
        {
            "args": {
                "x": Input((rows, cols), "f32"),
                "weight": Input((cols,), "f32"),
                "bias": Input((cols,), "f32"),
                "y": Output((rows, cols), "f32"),
                "cols": cols,
                "eps": 1e-5,
            },
            "space": {"BLOCK": [4096, 8192], "num_warps": [2, 4, 8, 16]},
            "default": {"BLOCK": 4096, "num_warps": 4},
            "grid": (rows, 1),
            "reference": layer_norm_of,
        },
    )
    m = n = k = 4096
    yield (
        product,
        {
            "args": {
                "a": Input(("m", "k"), "f16"),
                "b": Input(("k", "n"), "f16"),
                "c": Output(("m", "n"), "f16"),
                "m": m,
                "n": n,
                "k": k,
            },
            "space": {
                "BM": [64, 128],
                "BN": [64, 128, 256],
                "BK": [32, 64],
                "GROUP": [8],
                "num_warps": [4, 8],
                "num_stages": [3, 4],
            },
            "default": {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
            "grid": "(ceil_div(m, BM) * ceil_div(n, BN), 1)",
            "reference": "a @ b",
            "flops": "2 * m * n * k",
            "emulate": {"m": 200, "n": 300, "k": 100},
        },
    )
    heads, length, width = 32, 4096, 64
    tensor = (heads, "length", width)
    yield (
        attend,
        {
            "args": {
                **{name: Input(tensor, "f16") for name in ("q", "k", "v")},
                "o": Output(tensor, "f16"),
                "length": length,
                "scale": width**-0.5,
                "HEAD": width,
            },
            "space": {"BQ": [64, 128], "BK": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3]},
            "default": {"BQ": 128, "BK": 64, "num_warps": 4, "num_stages": 3},
            "grid": f"(ceil_div(length, BQ), {heads})",
            "reference": attention_of,
            "flops": f"2 * {heads} * length * length * {width}",
            "emulate": {"length": 200},
        },
    )


def rows_of(kernel: Any, call: dict[str, Any], trials: int, folder: Path) -> Iterator[str]:
    """Yield a line of the table for each architecture."""
    plan = tunebench.Plan(trials=trials, finalists=1, audit=0.0, baselines=False, workers=1, timeout_s=300)
    cache = BinaryCache(folder / "binaries")
    for architecture in ARCHITECTURES:
        db, device = folder / "examples.db", find(architecture)
        result = tunebench.tune_kernel(kernel, arch=architecture, db=db, plan=plan, **call)
        variant = kernels.load_file(result.file)
        with open_store(db, read_only=True) as store:
            records = store.history(result.workload, device.key)
        tried = {record.key.config: record.result.outcome for record in records}
        outcomes = list(tried.values())
        verified = sum(isinstance(o, Predicted) and o.verification.how == "simulated" for o in outcomes)
        workload, config = parse(result.workload), Config(result.best or {})
        space = predicted_space(variant, workload, device)
        assert space is not None, result
        before = {round(space.predicted_us(space.table.row(tuned) or 0), 6) for tuned in tried}
        after = {round(o.predicted_us, 6) for o in outcomes if isinstance(o, Predicted)}
        binary = compile_config(variant, workload, config, device, cache)
        counts = count_instructions(machine_code(variant, workload, config, device, cache))
        tensor = ", ".join(f"{counts[name]} {name}" for name in TENSOR_INSTRUCTIONS if name in counts) or "-"
        used = binary.resources
        cells = (
            f"`{result.workload}`",
            architecture,
            f"{verified} of {len(outcomes)}",
            " ".join(f"{name}={value}" for name, value in config.items()),
            used.registers,
            used.dynamic_smem_bytes,
            used.spill_bytes,
            sum(counts.values()),
            tensor,
            f"{result.time_us:.1f}",
            f"{len(before)}, {len(after)} of {len(tried)}",
        )
        yield f"| {' | '.join(map(str, cells))} |\n"


HEAD = """\
# Triton kernels for GPUs that are not here

`python -m benchmarks.triton_examples`, Triton {version}: four kernels tuned by
`tunebench.tune_kernel(arch=...)`. Each configuration that was tried was compiled for the architecture and
verified by Triton's interpreter, products and attention on a small workload. Registers, shared memory, spills
and instructions are those of the binary of the best configuration.

**Nothing here was run on a GPU.** Times are predicted from the bytes and the declared operations of the
workload, and from the machine code: its registers, shared memory, instructions and loops, and how often those
run. The last column has the number of different predicted times among the configurations that were tried:
before compiling, from grid and threads alone, and from the machine code.

| workload | architecture | verified | best (predicted) | registers | shared memory, bytes | spills, bytes \
| instructions | on tensor cores | predicted, us | different times before and after compiling |
|---|---|---|---|---:|---:|---:|---:|---|---:|---|
"""


def main() -> None:
    """Tune, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/triton_examples.md"))
    arguments = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for kernel, call in calls():
            for line in rows_of(kernel, call, arguments.trials, Path(folder)):
                sys.stderr.write(line)
                lines.append(line)
    text = HEAD.format(version=triton.__version__) + "".join(lines)
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
